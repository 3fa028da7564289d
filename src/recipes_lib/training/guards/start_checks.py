"""Start checks: gradient accumulation, initial loss, gradients of trained tensors, adapters on an unchanged base."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainerState, TrainingArguments

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.data.packed.collators import IGNORE_INDEX
from recipes_lib.errors import DivergedError, list_first
from recipes_lib.models.adapters.lora import adapters_off, has_changed_base
from recipes_lib.models.inference import (
    compute_probe_logits,
    find_logit_shift,
    measure_rounding,
    preserve_training_state,
    temporarily,
)
from recipes_lib.planning.schedule import verify_schedule
from recipes_lib.training.collectives import is_any
from recipes_lib.training.guards.step_facts import TrainerView
from recipes_lib.training.layouts.fsdp import get_full_tensor, get_local, reshard
from recipes_lib.training.optim.optimizers import report_optimizer
from recipes_lib.training.trainers.arguments import get_rounding_dtype

SAMPLE_SIZE: Final = 1024
"""Elements sampled from each tensor; enough to detect an update, which changes most elements of a tensor."""


class AdapterChecks(TrainerCallback):
    """Verifies that a new adapter has no effect before the first step, and that training changes no frozen tensor.

    Frozen tensors are compared after the first step and at the end.

    Source: ``tests/training/guards/test_adapter_checks.py``.
    """

    def __init__(self, config: AdapterConfig, *, say: Callable[[str], None]) -> None:
        """Check the adapter of ``config``, whose keys tell whether it is new; ``say`` logs a line per passed check."""
        self._is_fresh = config.adapter_name_or_path is None
        self._say = say
        self._frozen: dict[str, Tensor] = {}
        self._is_first_step = True

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Verify that a new adapter has no effect, and sample the frozen tensors."""
        model = kwargs["model"]
        if self._is_fresh and state.global_step == 0 and not has_changed_base(model):
            verify_no_effect(model)
            self._say("adapter: it changes no logit before it is trained")
        self._frozen = sample_weights(select_parameters(model, trained=False))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Verify after the first step of this process that the base weights are unchanged."""
        if self._is_first_step:
            self._is_first_step = False
            verify_frozen(self._frozen, kwargs["model"])
            self._say(f"adapter: all {len(self._frozen)} frozen tensors are unchanged")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Verify that the base is unchanged."""
        verify_frozen(self._frozen, kwargs["model"])


def verify_no_effect(model: Any) -> None:
    """Compare the logits of eight tokens with the adapter on and off.

    Args:
        model: PEFT model; if its weights are sharded, every process must call.

    Raises:
        DivergedError: The logits differ by more than rounding.
    """
    with adapters_off(model):
        off = compute_probe_logits(model)
    shift = find_logit_shift(model, off)
    if shift is not None:
        raise DivergedError(
            f"the new adapter changes logits by {shift:.2g} of the largest before any training; it should be "
            "initialised to have no effect"
        )


def select_parameters(model: nn.Module, *, trained: bool) -> dict[str, nn.Parameter]:
    """Return the trained or the frozen parameters by name; of a sharded model, its shards."""
    reshard(model)
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad is trained}


def sample_weights(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return up to ``SAMPLE_SIZE`` elements of each parameter (local shard), as ``uint8`` bytes."""
    return {name: _sample(parameter) for name, parameter in parameters.items()}


def verify_frozen(samples: Mapping[str, Tensor], model: nn.Module) -> None:
    """Compare the frozen parameters with their initial values.

    Args:
        samples: Result of ``sample_weights`` before training.
        model: The same model.

    Raises:
        DivergedError: A frozen parameter has changed.
    """
    if changed := list_changed(samples, select_parameters(model, trained=False)):
        raise DivergedError(
            f"{len(changed)} of {len(samples)} frozen tensors have changed: {list_first(changed)}. The adapter would "
            "not fit the published base model"
        )


def list_changed(samples: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of the parameters of which a sampled element has changed, on this process."""
    return [name for name, sample in samples.items() if not torch.equal(sample, _sample(parameters[name]))]


def _sample(parameter: nn.Parameter) -> Tensor:
    # ZeRO-3 replaces sharded weights by empty placeholders.
    values = getattr(parameter, "ds_tensor", parameter).detach()
    values = get_local(values).reshape(-1)
    # As bytes: 4-bit codes stored in a floating-point dtype may read as NaN, which is unequal to itself.
    return values[:: max(1, values.numel() // SAMPLE_SIZE)][:SAMPLE_SIZE].clone().view(torch.uint8)


TOLERANCE: Final = {torch.float32: 5e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Tolerance between the loss of two rows in one micro-batch and in two, relative, or absolute below a loss of 1: ten
times the measured difference, which comes from other kernels for other shapes."""
NUM_CANDIDATES: Final = 32
"""First rows of the dataset, from which the two with the most different lengths are chosen."""
MAX_STEPS: Final = 10
"""Steps within which every trained tensor must get a gradient."""
_MIN_STEPS: Final = 3
"""Length of a shorter run that is checked at its end: a tensor multiplied by a zero-initialised one gets its gradient
in step 2, or in step 3 after a warmup from 0."""
UNCHANGED_REMEDY: Final = (
    "raise learning_rate, write dtype: float32 (bfloat16 rounds updates below 1/512 of a weight to 0), or choose "
    "another optim"
)
NOT_FINITE: Final = "its gradient is not finite"
_ROUTED: Final = re.compile(r"\.(experts|router|gate|shared_expert_gate)\b")


class StartChecks(TrainerCallback):
    """Verifies gradient accumulation, and the gradients of all trained tensors, at the start of every process.

    The optimizer must contain every trained tensor, and each must get a finite, non-zero gradient within ``MAX_STEPS``;
    those of an adapter in every step until then, for which LoRA's A counts once its B is not zero any more. And
    ``MAX_STEPS`` steps after the warm-up, or at the end, the weights must have changed.

    Source: ``tests/training/guards/test_start_checks.py``.
    """

    def __init__(self, trainer: TrainerView, *, has_adapter: bool) -> None:
        """Check ``trainer``; ``has_adapter``: whether only an adapter is trained."""
        self._trainer = trainer
        self._has_adapter = has_adapter
        self._is_begun = False
        self._faults: dict[str, str] = {}
        self._num_trained = 0
        self._num_steps = 0
        self._trained: dict[str, Tensor] = {}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Log the parameter groups: optimizer, learning rate, weight decay, lossy weights; verify the schedule."""
        verify_schedule(kwargs["lr_scheduler"], state.max_steps)
        for line in report_optimizer(kwargs["optimizer"], kwargs["model"], args):
            self._trainer.observer.progress.say(line)
        # Not of a resumed run: at the end of a schedule, all updates of 16-bit weights may be rounded to 0.
        is_checked = not state.global_step and not self._trainer.is_deepspeed_enabled
        self._trained = sample_weights(select_parameters(kwargs["model"], trained=True)) if is_checked else {}

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Verify gradient accumulation; in this event, because all callbacks are initialised by then."""
        if self._is_begun or self._trainer.stops_at_end():
            return
        self._is_begun = True
        self._trainer.observer.progress.say(verify_accumulation(self._trainer))
        # Shards: after an evaluation, gathered weights that are tied have two names under FSDP2 x TP.
        trained, frozen = (select_parameters(kwargs["model"], trained=is_trained) for is_trained in (True, False))
        if frozen and not self._has_adapter:
            self._trainer.observer.progress.say(
                f"frozen: {len(frozen)} tensors that text does not pass through, such as {next(iter(frozen))}"
            )
        self._num_trained = len(trained)
        if self._trainer.is_deepspeed_enabled:
            # It reduces gradients into its own partitions; ``parameter.grad`` is ``None``.
            self._trainer.observer.progress.say("gradients: not checked under DeepSpeed, which does not expose them")
        else:
            self._faults = dict.fromkeys(trained, "it has no gradient")

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Check that every trained tensor gets a gradient within the first steps."""
        if not self._faults:
            return
        if self._num_steps == 0:
            verify_updated(kwargs["model"], kwargs["optimizer"])
        faults = find_gradient_faults(kwargs["model"])
        # fp16's loss scaler skips steps while it lowers its scale. The infinite norm has clipped other gradients to 0.
        if args.fp16 and NOT_FINITE in faults.values():
            return
        self._num_steps += 1
        self._faults = {name: fault for name, last in self._faults.items() if (fault := faults.get(name, last))}
        is_last = self._num_steps == MAX_STEPS or _MIN_STEPS <= self._num_steps == state.max_steps
        if not self._faults:
            self._trainer.observer.progress.say(f"gradients: all {self._num_trained} trained tensors have one")
        elif is_last or self._has_adapter:
            found = self._faults if is_last else {name: fault for name, fault in faults.items() if fault}
            parameters = dict(kwargs["model"].named_parameters())
            line = report_untrained(found, parameters, self._num_trained, state.global_step + 1)
            if is_last:
                self._trainer.observer.progress.say(line)
                self._faults = {}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Verify once, after every tensor got a gradient, that a sampled element has changed; every process must call.

        It is due ``MAX_STEPS`` steps after the warm-up, or after the last step.

        Raises:
            DivergedError: No element has changed, on any process.
        """
        is_due = state.global_step >= min(args.get_warmup_steps(state.max_steps) + MAX_STEPS, state.max_steps)
        if not is_due or not self._trained or self._faults:
            return
        # A process may hold only shards without an update; fp16's loss scaler skips updates.
        is_skipped = self._trainer.accelerator.optimizer_step_was_skipped
        parameters = select_parameters(kwargs["model"], trained=True)
        if not is_any(is_skipped or bool(list_changed(self._trained, parameters))):
            found = f"{state.global_step} steps have changed none of {len(self._trained)} trained tensors"
            raise DivergedError(f"{found}: {UNCHANGED_REMEDY}")
        self._trained = {}


def find_gradient_faults(model: nn.Module) -> dict[str, str | None]:
    """Return the fault in the gradient of each trained parameter, ``None`` for a valid one; every process must call.

    LoRA's A is omitted while its B is zero, because its gradient is then zero by the chain rule.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    faults: dict[str, str | None] = {}
    for name, parameter in trained.items():
        # dL/dA = B^T dL/d(BA), and B is initialised to zero.
        lora_b = trained.get(name.replace(".lora_A.", ".lora_B."), parameter)
        if lora_b is not parameter and not get_full_tensor(lora_b).any():
            continue
        if parameter.grad is None:
            faults[name] = "it has no gradient"
        else:
            norm = float(get_full_tensor(parameter.grad.float().norm()))
            faults[name] = NOT_FINITE if not math.isfinite(norm) else None if norm else "its gradient is zero"
    return faults


def verify_updated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Verify that the optimizer contains all trained parameters.

    Args:
        model: Trained model.
        optimizer: Optimizer of the model.

    Raises:
        DivergedError: A trained parameter is not in the optimizer.
    """
    # By identity: FSDP2 replaces parameters, and an optimizer built before that would update the old tensors.
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    lost = [f"{name} (it is another tensor)" for name, parameter in trained if id(parameter) not in updated]
    if lost:
        raise DivergedError(
            f"the optimizer does not update {len(lost)} of {len(trained)} trained tensors: {list_first(lost)}"
        )


def verify_accumulation(trainer: TrainerView) -> str:
    """Compare the loss of two rows as two micro-batches and as one; every process must call.

    The losses of two rows may be close to each other, and so may their means over tokens and over micro-batches. The
    share of the row with fewer terms is therefore compared with its loss in a step of its own.

    Runs seven rows forward, two of them to measure rounding, without dropout; leaves no trace in counts or random
    states.

    Returns:
        Log line with the result.

    Raises:
        DivergedError: The loss is not finite, or the losses differ by more than rounding, so that the result of
            training would depend on gradient accumulation.
    """
    if trainer.compares_rows:
        return "accumulation: not checked, since the loss compares the rows of a micro-batch with each other"
    rows = _choose_rows(trainer)
    if len(rows) < 2:
        return f"accumulation: not checked, since fewer than two of the first {NUM_CANDIDATES} rows have targets"
    with trainer.uncounted_pass(), preserve_training_state(trainer.model_wrapped):
        # ``preserve_training_state`` switches to evaluation mode: dropout masks would differ between the two.
        compute, each = partial(_compute_losses, trainer), [[row] for row in rows]
        (losses, num_terms), (alone, num_own) = compute(each), compute(each[:1])
        apart, together = losses.sum(), float(compute([rows])[0])
        rounding = measure_rounding(trainer.model_wrapped, lambda: compute(each)[0].sum(), apart)
    dtype = get_rounding_dtype(trainer.model, trainer.args)
    allowed = max(TOLERANCE[dtype] * max(1.0, abs(together)), rounding)
    if not math.isfinite(together):
        raise DivergedError(
            f"the loss of two rows is {together} before the first update: a weight is not finite, or {dtype} overflows"
        )
    # ``not <=`` instead of ``>``, which is false for NaN.
    if not abs(apart - together) <= allowed:
        raise DivergedError(
            f"the loss of two rows is {apart:.6f} as two micro-batches and {together:.6f} as one: rounding explains "
            f"{allowed:.1g}. The loss is not divided by the terms of the whole step, so that results depend on "
            "gradient_accumulation_steps and the number of processes"
        )
    share, expected = float(losses[0]), float(alone * num_own / num_terms)
    # Pairs have one term each, and means over their tokens besides.
    if num_own * 2 != num_terms and not abs(share - expected) <= allowed:
        raise DivergedError(
            f"a row with {num_own} of the {num_terms} terms of a step of two micro-batches contributes {share:.6f} to "
            f"its loss, and not {expected:.6f}: the loss is a mean over micro-batches, not over terms"
        )
    return f"accumulation: two rows have the loss {together:.6f} as one micro-batch and as two, +-{allowed:.1g}"


def _compute_losses(trainer: TrainerView, groups: Sequence[Sequence[Any]]) -> tuple[Tensor, Tensor]:
    """Return the contribution of each micro-batch to the loss of a step, and the number of terms of the step."""
    batches = [trainer.data_collator(list(rows)) for rows in groups]
    batches, num_terms = trainer.get_batch_samples(iter(batches), len(batches), trainer.args.device)
    trainer.current_gradient_accumulation_steps = len(batches)
    # The load-balancing loss of experts is not a sum over rows.
    with trainer.compute_loss_context_manager(), temporarily(trainer, router_aux_loss_coef=0.0):
        losses: list[Any] = [
            trainer.compute_loss(trainer.model_wrapped, trainer._prepare_inputs(batch), num_items_in_batch=num_terms)
            for batch in batches
        ]
    # Every process computes the same rows, and its loss is multiplied by the world size: the mean is the loss.
    reduced: Tensor = trainer.accelerator.reduce(torch.stack(losses).float(), reduction="mean")
    return reduced, num_terms


def _choose_rows(trainer: TrainerView) -> list[Any]:
    """Return the rows with the fewest and the most loss terms of the first ``NUM_CANDIDATES``; empty if under two."""
    data: Any = trainer.train_dataset
    # Not by ``__getitem__``, which streaming datasets have as well, for columns.
    if hasattr(data, "__len__"):
        rows = [data[at] for at in range(min(NUM_CANDIDATES, len(data)))]
    else:
        rows = list(islice(data, NUM_CANDIDATES))
    counted = [(int(trainer.count_terms(trainer.data_collator([row]))), at) for at, row in enumerate(rows)]
    useful = sorted(pair for pair in counted if pair[0])
    return [rows[at] for _, at in (useful[0], useful[-1])] if len(useful) > 1 else []


def report_untrained(
    faults: Mapping[str, str], parameters: Mapping[str, nn.Parameter], num_trained: int, step: int
) -> str:
    """Return a warning about tensors without a gradient so far, if there are valid reasons for all.

    Experts may get no tokens, a router that selects a single expert has a constant output, and gradients of vectors may
    cancel, as that of a bias which is added to everything that the loss compares.

    Args:
        faults: Fault of each tensor without a valid gradient, by name.
        parameters: Parameters of the model by name.
        num_trained: Number of trained tensors.
        step: Current step, from 1.

    Raises:
        DivergedError: Another tensor has no gradient.
    """
    lost = [name for name in faults if not _ROUTED.search(name) and parameters[name].dim() >= 2]
    if lost:
        raise DivergedError(
            f"up to step {step}, {len(lost)} of {num_trained} trained tensors have learnt nothing: "
            f"{list_first(f'{name} ({faults[name]})' for name in lost)}. "
            "Freeze them, or find where their gradients are lost: try activation_checkpointing: false"
        )
    return (
        f"gradients: {len(faults)} of {num_trained} trained tensors had none up to step {step}, which "
        f"is possible for experts, routers and biases: {list_first(faults)}"
    )


def verify_initial_loss(model: PreTrainedModel, loss: float, batches: Iterable[Mapping[str, Any]]) -> str:
    """Compare the loss of random weights with its expected range.

    Logits of random weights are independent of the targets. With final hidden states of mean square 1 and output
    weights of standard deviation ``initializer_range``, logits have the variance
    ``s^2 = initializer_range^2 * hidden_size``, and the expected loss is ``ln V + s^2 / 2``. With scaled or smaller
    outputs it lies between that and ``ln V``. The mean logit of the targets has the standard deviation
    ``s * sqrt(sum p^2)``, with ``p`` the frequencies of token ids among the targets. A model with tied, scaled
    embeddings and few layers predicts the input token, which raises the upper bound (``_bound_echo``).

    Args:
        model: Model at its initialisation.
        loss: Loss of the first step, in nats per target.
        batches: Micro-batches of that step with ``labels``, ``int64 (B, T)``.

    Returns:
        Log line with the result.

    Raises:
        DivergedError: The loss is outside of the range by more than four standard deviations.
    """
    config: Any = model.config.get_text_config()
    base = math.log(config.vocab_size)
    std = float(getattr(config, "initializer_range", None) or 0.02) * math.sqrt(config.hidden_size)
    # Frequencies of the target ids: with few distinct targets the mean logit varies more.
    targets = torch.cat([batch["labels"].flatten() for batch in batches])
    counts = torch.bincount(targets[targets != IGNORE_INDEX]).float()
    share = float((counts.square().sum() / counts.sum().square()).sqrt())
    allowed = 4 * std * share + 0.01 * base
    # Twice the load-balancing loss of a mixture of experts at uniform routing.
    balance = 2 * (getattr(config, "router_aux_loss_coef", 0) or 0) * (getattr(config, "num_experts_per_tok", 0) or 0)
    # logaddexp: the echo is one more term in the sum of exponentials of the softmax.
    upper = float(np.logaddexp(base + std**2 / 2, _bound_echo(model, config))) + balance
    if not base - allowed <= loss <= upper + allowed:
        raise DivergedError(
            f"before the first update the loss is {loss:.4f}; random weights over {config.vocab_size:,} tokens have "
            f"ln({config.vocab_size:,}) = {base:.4f} to {upper:.4f}, within {allowed:.2g}. Labels are shifted or leak, "
            "or the loss or the initialisation is scaled"
        )
    return f"step 0: loss {loss:.4f}, near ln({config.vocab_size:,}) = {base:.4f} as expected of random weights"


def _bound_echo(model: PreTrainedModel, config: Any) -> float:
    """Return the logit of the input token if the final state is its embedding only; ``-inf`` without scaled, tied ones.

    The state, normalised to mean square 1, is ``e / initializer_range`` with the embedding ``e``. Its product with
    ``e`` is ``|e|^2 / initializer_range = initializer_range * hidden_size``.
    """
    embedding: Any = model.get_input_embeddings()
    scales = (getattr(embedding, "scalar_embed_scale", None), getattr(config, "embedding_multiplier", None))
    is_tied = getattr(config, "tie_word_embeddings", False)
    if not is_tied or all(scale is None or scale <= 1 for scale in scales):
        return -math.inf
    return float(config.initializer_range) * float(config.hidden_size)
