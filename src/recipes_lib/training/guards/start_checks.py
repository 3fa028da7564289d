"""Start checks: gradient accumulation, initial loss, and gradients of all trained tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes_lib.data.masking import IGNORE_INDEX
from recipes_lib.errors import DivergedError
from recipes_lib.training.evaluation.training_state import preserve_training_state
from recipes_lib.training.guards.adapter_checks import judge_gradients
from recipes_lib.training.guards.trainer_view import TrainerView
from recipes_lib.training.trainers.arguments import get_rounding_dtype

TOLERANCE: Final = {torch.float32: 5e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""By how much the loss of two rows may differ when they are computed apart: other kernels run; measured, with ten times
as much allowed. Relative, and absolute below 1."""
NUM_CANDIDATES: Final = 32
"""First rows of the data, of which two as unlike as possible are taken."""
MAX_STEPS: Final = 10
"""Steps in which every trained tensor must have had a gradient: one that starts behind a zero gets it in the second
step, and behind a warm-up from 0 in the third."""
_ROUTED: Final = re.compile(r"\.(experts|router|gate|shared_expert_gate)\b")


class StartChecks(TrainerCallback):
    """Shows once a process that accumulating equals a large batch, and that all that is trained has a gradient.

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
        """Compute two rows together and apart, now that all who wait for the beginning of training are ready."""
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
        """Look at the gradients until each was seen, or was not in the first steps."""
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
    """Hold what an optimizer updates against what is trained: a tensor of another identity would stay as it is.

    Args:
        model: With its gradients.
        optimizer: Built for it, before it was sharded or after.

    Raises:
        DivergedError: It does not update a tensor that is trained.
    """
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    lost = {name: "it is another tensor" for name, parameter in trained if id(parameter) not in updated}
    if lost:
        raise DivergedError(
            f"the optimizer does not update {len(lost)} of {len(trained)} trained tensors: {_list(list(lost), lost)}"
        )


def verify_accumulation(trainer: TrainerView) -> str:
    """Compute the objective of two rows as two micro-batches and as one, without dropout and without a trace.

    Costs four rows forward.

    Returns:
        What was found, in a line.

    Raises:
        DivergedError: The loss is not finite; or they differ by more than rounding, so that how a batch is cut would
            decide what is learnt.
    """
    if trainer.compares_rows:
        return "accumulation: not checked, since the loss compares the rows of a micro-batch with each other"
    rows = _choose_rows(trainer)
    if len(rows) < 2:
        return "accumulation: not checked, since the data begin without two rows to train on"
    with trainer.uncounted_pass(), preserve_training_state(trainer.model_wrapped):
        apart, together = (_compute_objective(trainer, groups) for groups in ([[row] for row in rows], [rows]))
    dtype = get_rounding_dtype(trainer.model, trainer.args)
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        dtype = torch.float16  # It has as many digits.
    allowed = TOLERANCE[dtype] * max(1.0, abs(together))
    if not math.isfinite(together):
        raise DivergedError(
            f"the loss of two rows is {together} before the first update: a weight is not finite, or {dtype} overflows"
        )
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
    return float(trainer.accelerator.reduce(torch.stack(losses).sum().float(), reduction="mean"))


def _choose_rows(trainer: TrainerView) -> list[Any]:
    """Of the first rows those with the fewest and the most terms."""
    data: Any = trainer.train_dataset
    num_rows = min(NUM_CANDIDATES, len(data)) if hasattr(data, "__len__") else NUM_CANDIDATES
    rows = [data[at] for at in range(num_rows)] if hasattr(data, "__getitem__") else list(islice(data, num_rows))
    counted = [(int(trainer.count_terms(trainer.data_collator([row]))), at) for at, row in enumerate(rows)]
    useful = sorted(pair for pair in counted if pair[0])
    return [rows[at] for _, at in (useful[0], useful[-1])] if len(useful) > 1 else []


def judge_untrained(faults: Mapping[str, str | None], parameters: Mapping[str, nn.Parameter], num_trained: int) -> str:
    """Return a warning of tensors that had no gradient in the first steps, where that may be in order.

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
            f"{_list(lost, faults)}. Freeze them, or find where their gradients are lost: try "
            "activation_checkpointing: false"
        )
    return (
        f"gradients: {len(in_order)} of {num_trained} trained tensors had none in the first {MAX_STEPS} steps, as may "
        f"be for experts, routers and biases: {_list(in_order, faults)}"
    )


def verify_initial_loss(model: PreTrainedModel, loss: float, batches: Iterable[Mapping[str, Any]]) -> str:
    """Hold the loss of random weights against what it must be near, whatever the text.

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
    if not config.tie_word_embeddings or all(scale is None or scale <= 1 for scale in scales):
        return -math.inf
    return float(config.initializer_range) * float(config.hidden_size)


def _bound_balance_loss(model: nn.Module, config: Any) -> float:
    """Twice what a mixture of experts adds for the balance between them when all are chosen alike."""
    coefficient = float(getattr(config, "router_aux_loss_coef", None) or 0.0)
    return 2 * coefficient * float(getattr(config, "num_experts_per_tok", None) or 0)


def _list(names: Sequence[str], faults: Mapping[str, str | None]) -> str:
    shown = ", ".join(f"{name} ({faults[name]})" for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
