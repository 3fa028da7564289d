"""Start checks: gradient accumulation, initial loss, gradients of trained tensors, adapters over an unchanged base."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.data.masking import IGNORE_INDEX
from recipes_lib.errors import DivergedError, list_first
from recipes_lib.models.adapters.lora import (
    adapters_off,
    find_logit_shift,
    is_taken_out_of_weights,
)
from recipes_lib.models.inference import compute_probe_logits, preserve_training_state
from recipes_lib.training.guards.step_facts import TrainerView
from recipes_lib.training.layouts.fsdp import get_local, get_whole, reshard
from recipes_lib.training.trainers.arguments import get_rounding_dtype

SAMPLE_SIZE: Final = 1024
"""Sampled elements of each frozen tensor to detect changes: an optimizer changes all of them or none."""


class AdapterChecks(TrainerCallback):
    """Stops a run in which not exactly the adapter is trained.

    Before the first step a fresh adapter changes no logit. At the first steps every trained tensor has a finite
    gradient that is not zero; an A matrix is judged as soon as its B is no longer zero. After the first step and at the
    end the frozen tensors are what they were, and at the end the trained ones are not.

    Source: ``tests/training/guards/test_adapter_checks.py``.
    """

    def __init__(self, model: nn.Module, config: AdapterConfig, *, say: Callable[[str], None]) -> None:
        """Record the initial adapter.

        Args:
            model: Under its adapter, before a checkpoint is read and before it is wrapped.
            config: Says whether the adapter is a fresh one.
            say: Takes one line for each check that has passed.
        """
        self._is_fresh = config.adapter_name_or_path is None
        self._say = say
        self._initial = {name: _summarise(parameter) for name, parameter in _find_trained(model).items()}
        self._unjudged = set(self._initial)
        self._must_move: set[str] = set()
        self._frozen: dict[str, Tensor] = {}
        self._is_first_step = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the new adapter, and record the frozen tensors."""
        model = kwargs["model"]
        if self._is_fresh and state.global_step == 0 and not is_taken_out_of_weights(model):
            verify_no_effect(model, get_rounding_dtype(model, args))
            self._say("adapter: it changes no logit before it is trained")
        self._frozen = sample_frozen(model)
        if getattr(args, "deepspeed_plugin", None) is not None:
            self._unjudged.clear()
            self._say("adapter: DeepSpeed keeps the gradients to itself, so that they are not checked")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the gradients until each was valid once."""
        if not self._unjudged:
            return
        verdicts = judge_gradients(kwargs["model"])
        if args.fp16:  # The loss scaler is still looking for its scale, and skips such a step.
            verdicts = {name: fault for name, fault in verdicts.items() if fault != NOT_FINITE}
        if faults := _name((name for name, fault in verdicts.items() if fault), verdicts):
            raise DivergedError(
                f"at step {state.global_step + 1} {len(faults)} of {len(self._initial)} trained tensors would learn "
                f"nothing: {list_first(faults)}. Their gradients are lost on the way: try "
                "activation_checkpointing: false"
            )
        # A warm-up begins at a rate of 0, at which nothing moves.
        if any(group["lr"] for group in kwargs["optimizer"].param_groups):
            self._must_move |= verdicts.keys()
        self._unjudged -= verdicts.keys()
        if not self._unjudged:
            self._say(f"adapter: all {len(self._initial)} trained tensors have a gradient")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Verify after the first step of this process that the base weights are unchanged."""
        if self._is_first_step:
            self._is_first_step = False
            verify_frozen(self._frozen, kwargs["model"])
            self._say(f"adapter: all {len(self._frozen)} frozen tensors are unchanged")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Verify that the base is unchanged, and that the adapter has changed."""
        verify_frozen(self._frozen, kwargs["model"])
        trained = _find_trained(kwargs["model"])
        if unmoved := [name for name in sorted(self._must_move) if _summarise(trained[name]) == self._initial[name]]:
            raise DivergedError(
                f"{len(unmoved)} of {len(trained)} trained tensors are unchanged by training: "
                f"{list_first(unmoved)}. They have gradients, so the optimizer does not contain them"
            )


NOT_FINITE: Final = "its gradient is not finite"


def judge_gradients(model: nn.Module) -> dict[str, str | None]:
    """Return the fault in the gradient of each trained parameter; ``None`` if there is none.

    An A matrix whose B is zero is left out: its gradient is zero by the chain rule.
    """
    trained = _find_trained(model)
    verdicts: dict[str, str | None] = {}
    for name, parameter in trained.items():
        # dL/dA = B^T dL/d(BA): zero while B, which begins at zero, has not moved.
        twin = trained.get(name.replace(".lora_A.", ".lora_B."), parameter)
        if twin is not parameter and not get_whole(twin).any():
            continue
        if parameter.grad is None:
            verdicts[name] = "it has no gradient"
        else:
            norm = float(get_whole(parameter.grad.float().norm()))
            verdicts[name] = NOT_FINITE if not math.isfinite(norm) else None if norm else "its gradient is zero"
    return verdicts


def verify_no_effect(model: Any, dtype: torch.dtype) -> None:
    """Compare the logits of eight tokens with the adapter on and off.

    Args:
        model: Under an adapter; when its weights are sharded every process must call.
        dtype: Precision of the products.

    Raises:
        DivergedError: They differ by more than rounding explains.
    """
    with adapters_off(model):
        off = compute_probe_logits(model)
    shift = find_logit_shift(off, compute_probe_logits(model), dtype)
    if shift is not None:
        raise DivergedError(
            f"the adapter moves logits by {shift:.2g} of the largest before anything is trained; it should begin as "
            "nothing"
        )


def sample_frozen(model: nn.Module) -> dict[str, Tensor]:
    """Return up to ``SAMPLE_SIZE`` numbers of each frozen parameter, of this process's shards, as bytes."""
    reshard(model)
    return {name: _sample(parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad}


def verify_frozen(samples: Mapping[str, Tensor], model: nn.Module) -> None:
    """Compare the frozen parameters with their initial values.

    Args:
        samples: From ``sample_frozen``.
        model: The same model.

    Raises:
        DivergedError: Some have moved.
    """
    now = sample_frozen(model)
    if moved := [name for name, sample in samples.items() if not torch.equal(sample, now[name])]:
        raise DivergedError(
            f"{len(moved)} of {len(samples)} frozen tensors have moved: {list_first(moved)}. The adapter no longer "
            "belongs to the model that it is said to"
        )


def _find_trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _summarise(parameter: nn.Parameter) -> tuple[float, float]:
    """Two sums that change with any number: of an embedding only the rows of the tokens that occur may move."""
    values = get_whole(parameter.detach())
    return float(values.sum(dtype=torch.float64)), float(values.float().norm())


def _sample(parameter: nn.Parameter) -> Tensor:
    # ZeRO-3 replaces sharded weights by empty placeholders.
    values = getattr(parameter, "ds_tensor", parameter).detach()
    values = get_local(values).reshape(-1)
    # As bytes: 4-bit codes that are stored as floating-point numbers may look like NaN.
    return values[:: max(1, values.numel() // SAMPLE_SIZE)][:SAMPLE_SIZE].clone().view(torch.uint8)


TOLERANCE: Final = {torch.float32: 5e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""By how much the loss of two rows may differ when they are computed apart: other kernels run; measured, with ten times
as much allowed. Relative, and absolute below 1."""
NUM_CANDIDATES: Final = 32
"""First rows of the data, of which the two with the most different lengths are taken."""
MAX_STEPS: Final = 10
"""Steps in which every trained tensor must have had a gradient: one that starts behind a zero gets it in the second
step, and behind a warm-up from 0 in the third."""
_ROUTED: Final = re.compile(r"\.(experts|router|gate|shared_expert_gate)\b")


class StartChecks(TrainerCallback):
    """Verifies gradient accumulation and the gradients of all trained tensors, once per process.

    Source: ``tests/training/guards/test_start_checks.py``.
    """

    def __init__(self, trainer: TrainerView, *, has_adapter: bool) -> None:
        """Check ``trainer``; of an adapter the gradients are judged by ``AdapterChecks``."""
        self._trainer = trainer
        self._has_adapter = has_adapter
        self._judges_gradients = not has_adapter and not trainer.is_deepspeed_enabled
        self._is_begun = False
        self._unjudged: dict[str, str | None] = {}
        self._num_trained = 0
        self._num_steps = 0

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Verify gradient accumulation; at this event, so that all other callbacks are initialised."""
        if self._is_begun or state.global_step >= state.max_steps:
            return
        self._is_begun = True
        self._trainer.observer.progress.say(verify_accumulation(self._trainer))
        flags = {name: parameter.requires_grad for name, parameter in kwargs["model"].named_parameters()}
        names = [name for name, is_trained in flags.items() if is_trained]
        if len(names) < len(flags) and not self._has_adapter:
            self._trainer.observer.progress.say(
                f"frozen: {len(flags) - len(names)} tensors that no text passes through, "
                "such as " + next(name for name in flags if not flags[name])
            )
        self._unjudged = dict.fromkeys(names if self._judges_gradients else (), "it has no gradient")
        self._num_trained = len(self._unjudged)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that every trained tensor gets a gradient within the first steps."""
        if not self._unjudged:
            return
        if self._num_steps == 0:
            verify_updated(kwargs["model"], kwargs["optimizer"])
        self._num_steps += 1
        verdicts = judge_gradients(kwargs["model"])
        self._unjudged = {name: verdicts.get(name) for name in self._unjudged if verdicts.get(name)}
        if not self._unjudged:
            self._trainer.observer.progress.say(f"gradients: all {self._num_trained} trained tensors have one")
        elif self._num_steps == MAX_STEPS:
            parameters = dict(kwargs["model"].named_parameters())
            self._trainer.observer.progress.say(judge_untrained(self._unjudged, parameters, self._num_trained))
            self._unjudged = {}


def verify_updated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Verify that the optimizer contains exactly the trained tensors, by identity.

    Args:
        model: With its gradients.
        optimizer: Built for it, before it was sharded or after.

    Raises:
        DivergedError: It does not update a tensor that is trained.
    """
    # By identity: an optimizer that was built before FSDP2 replaced the parameters holds tensors of the same names.
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    lost = [f"{name} (it is another tensor)" for name, parameter in trained if id(parameter) not in updated]
    if lost:
        raise DivergedError(
            f"the optimizer does not update {len(lost)} of {len(trained)} trained tensors: {list_first(lost)}"
        )


def verify_accumulation(trainer: TrainerView) -> str:
    """Compute the objective of two rows as two micro-batches and as one, without dropout and without a trace.

    Costs four rows forward.

    Returns:
        What was found, in a line.

    Raises:
        DivergedError: The loss is not finite; or they differ by more than rounding, so that gradient accumulation would
            decide what is learnt.
    """
    if trainer.compares_rows:
        return "accumulation: not checked, since the loss compares the rows of a micro-batch with each other"
    rows = _choose_rows(trainer)
    if len(rows) < 2:
        return "accumulation: not checked, since the data begin without two rows to train on"
    with trainer.uncounted_pass(), preserve_training_state(trainer.model_wrapped):
        # In evaluation mode: dropout would draw other masks for the two.
        apart, together = (_compute_objective(trainer, groups) for groups in ([[row] for row in rows], [rows]))
    dtype = get_rounding_dtype(trainer.model, trainer.args)
    allowed = TOLERANCE[dtype] * max(1.0, abs(together))
    if not math.isfinite(together):
        raise DivergedError(
            f"the loss of two rows is {together} before the first update: a weight is not finite, or {dtype} overflows"
        )
    # Not ``>``, which is false for NaN.
    if not abs(apart - together) <= allowed:
        raise DivergedError(
            f"two rows as two micro-batches have the loss {apart:.6f}, and as one {together:.6f}: rounding explains "
            f"{allowed:.1g}. The loss is not divided by the terms of the whole step, so that "
            "gradient_accumulation_steps and the number of processes decide what is learnt"
        )
    return f"accumulation: two rows have the same loss apart and together, {together:.6f} within {allowed:.1g}"


def _compute_objective(trainer: TrainerView, groups: Sequence[Sequence[Any]]) -> float:
    batches = [trainer.data_collator(list(rows)) for rows in groups]
    batches, num_terms = trainer.get_batch_samples(iter(batches), len(batches), trainer.args.device)
    trainer.current_gradient_accumulation_steps = len(batches)
    # The balance of experts is no sum over rows.
    coefficient, trainer.router_aux_loss_coef = trainer.router_aux_loss_coef, 0.0
    try:
        with trainer.compute_loss_context_manager():
            losses: list[Any] = [
                trainer.compute_loss(
                    trainer.model_wrapped, trainer._prepare_inputs(batch), num_items_in_batch=num_terms
                )
                for batch in batches
            ]
    finally:
        trainer.router_aux_loss_coef = coefficient
    # Every process has computed the same rows, and its share is multiplied by their number: the mean is the loss.
    return float(trainer.accelerator.reduce(torch.stack(losses).sum().float(), reduction="mean"))


def _choose_rows(trainer: TrainerView) -> list[Any]:
    """Return the rows with the fewest and the most terms among the first ones."""
    data: Any = trainer.train_dataset
    # By length: a stream of the datasets package can be indexed too, by columns.
    if hasattr(data, "__len__"):
        rows = [data[at] for at in range(min(NUM_CANDIDATES, len(data)))]
    else:
        rows = list(islice(data, NUM_CANDIDATES))
    counted = [(int(trainer.count_terms(trainer.data_collator([row]))), at) for at, row in enumerate(rows)]
    useful = sorted(pair for pair in counted if pair[0])
    return [rows[at] for _, at in (useful[0], useful[-1])] if len(useful) > 1 else []


def judge_untrained(faults: Mapping[str, str | None], parameters: Mapping[str, nn.Parameter], num_trained: int) -> str:
    """Return a warning about tensors without a gradient in the first steps, if that may be valid.

    It may for experts that no token was sent to, and the router that sends to but one; and for vectors, whose gradient
    may cancel: a bias that is added to all that is compared.

    Args:
        faults: What is wrong with each.
        parameters: Of the model, by name.
        num_trained: How many are trained.

    Raises:
        DivergedError: There is another one.
    """
    in_order = [name for name in faults if _ROUTED.search(name) or parameters[name].dim() < 2]
    lost = [name for name in faults if name not in in_order]
    if lost:
        raise DivergedError(
            f"in the first {MAX_STEPS} steps {len(lost)} of {num_trained} trained tensors learnt nothing: "
            f"{list_first(_name(lost, faults))}. Freeze them, or find where their gradients are lost: try "
            "activation_checkpointing: false"
        )
    return (
        f"gradients: {len(in_order)} of {num_trained} trained tensors had none in the first {MAX_STEPS} steps, as may "
        f"be for experts, routers and biases: {list_first(_name(in_order, faults))}"
    )


def verify_initial_loss(model: PreTrainedModel, loss: float, batches: Iterable[Mapping[str, Any]]) -> str:
    """Compare the loss of random weights with its expected value.

    Logits of random weights are independent of the targets. With final hidden states of mean square 1 and weights of
    standard deviation ``initializer_range`` they have the variance ``s^2 = initializer_range^2 * hidden_size``, and the
    expected loss is ``ln V + s^2 / 2``; a scaled or smaller output is between that and ``ln V``. The mean logit of the
    targets has the standard deviation ``s * sqrt(sum p^2)``, with ``p`` the shares of the ids among them. Where the
    output projection is the embedding, and that is scaled on its way in, few layers leave so much of it in the final
    states that they predict the id just read.

    Args:
        model: At its initialisation.
        loss: Of the first step, in nats per target.
        batches: Of that step, with ``labels``.

    Returns:
        What was found, in a line.

    Raises:
        DivergedError: The loss lies outside, by more than four standard deviations.
    """
    config: Any = model.config.get_text_config()
    base = math.log(config.vocab_size)
    std = float(getattr(config, "initializer_range", None) or 0.02) * math.sqrt(config.hidden_size)
    targets = torch.cat([batch["labels"].flatten() for batch in batches])
    counts = torch.bincount(targets[targets != IGNORE_INDEX]).double()
    share = float((counts.square().sum() / counts.sum().square()).sqrt())
    allowed = 4 * std * share + 0.01 * base
    upper = base + std**2 / 2
    upper += math.log1p(math.exp(_bound_echo(model, config) - upper)) + _bound_balance_loss(model, config)
    if not base - allowed <= loss <= upper + allowed:
        raise DivergedError(
            f"before the first update the loss is {loss:.4f}; random weights over {config.vocab_size:,} tokens have "
            f"ln({config.vocab_size:,}) = {base:.4f} to {upper:.4f}, within {allowed:.2g}. Labels are shifted or leak, "
            "the loss is scaled, or the initialisation is"
        )
    return f"step 0: loss {loss:.4f}, near ln({config.vocab_size:,}) = {base:.4f} as random weights have it"


def _bound_echo(model: PreTrainedModel, config: Any) -> float:
    """The logit of the id just read where the final state is its embedding alone; ``-inf`` where it is lost in others.

    Such a state is ``e / initializer_range``, and ``e`` has the square ``initializer_range^2 * hidden_size``.
    """
    embedding: Any = model.get_input_embeddings()
    scales = (getattr(embedding, "scalar_embed_scale", None), getattr(config, "embedding_multiplier", None))
    is_tied = getattr(config, "tie_word_embeddings", False)
    if not is_tied or all(scale is None or scale <= 1 for scale in scales):
        return -math.inf
    return float(config.initializer_range) * float(config.hidden_size)


def _bound_balance_loss(model: nn.Module, config: Any) -> float:
    """Twice what a mixture of experts adds for the balance between them when all are chosen alike."""
    coefficient = float(getattr(config, "router_aux_loss_coef", None) or 0.0)
    return 2 * coefficient * float(getattr(config, "num_experts_per_tok", None) or 0)


def _name(names: Iterable[str], faults: Mapping[str, str | None]) -> list[str]:
    return [f"{name} ({faults[name]})" for name in names]
