"""Interface of the guards: trainer protocol, losses and gradients of a step, and the dump of a diverged step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerControl, TrainerState, TrainingArguments

from recipes_lib.errors import DivergedError
from recipes_lib.files import spell_numbers
from recipes_lib.quantities import pluralize
from recipes_lib.training.collectives import gather_objects, get_rank
from recipes_lib.training.layouts.fsdp import get_local
from recipes_lib.training.monitoring.callbacks import Observer

DUMP_DIR: Final = "diverged"
ROW_IDS: Final = "row_ids"
"""Key of the row ids in a batch, removed before the model is called."""
MAX_SKIPPED: Final = 24
"""Consecutive updates that fp16's loss scaler may skip. Each halves the scale, from 2^16 to 2^-8: gradients that
overflow even there are not overflows of the scaling."""
NUM_LARGEST: Final = 20
"""Number of finite gradients with the largest norms in a dump; all non-finite ones are listed too."""


@dataclass(slots=True)
class StepInputs:
    """The micro-batches of a step and their losses, on this process.

    Attributes:
        batches: Keyword arguments of the model for each micro-batch.
        row_ids: Dataset row ids of each micro-batch, ``int64``; ``None`` for data without ids.
        num_terms: Number of terms of the objective (loss normaliser) in the step, over all processes.
        losses: Scalar loss of each micro-batch computed so far, times the world size, so that the mean over processes
            of their sum is the step's loss.
        kind: Kind of the objective, for runs that alternate between several; spikes are detected per kind.
        num_tokens: Number of tokens in the step without padding, over all processes; ``None`` if not counted.
    """

    batches: Sequence[Mapping[str, Any]] = ()
    row_ids: Sequence[Any] = ()
    num_terms: Tensor | None = None
    losses: list[Tensor] = field(default_factory=list)
    kind: str = ""
    num_tokens: Tensor | None = None


def find_faults(parameters: Mapping[str, Tensor], losses: Sequence[float]) -> dict[str, Any]:
    """Return the non-finite losses and gradients of a step on this process, and the gradient norms.

    Args:
        parameters: Parameters by name, with unclipped gradients.
        losses: Losses of the micro-batches.

    Returns:
        JSON values: ``losses``; ``bad_micro_batches``, indices from 0; ``non_finite_gradients`` and
        ``largest_gradient_norms``, L2 norms of this process's shards by name; ``num_gradients``. Non-finite ones are
        ordered from the output to the input, the direction in which an error propagates.
    """
    norms = {
        name: float(torch.linalg.vector_norm(get_local(parameter.grad), dtype=torch.float32))
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
    bad = [name for name in reversed(norms) if not math.isfinite(norms[name])]
    largest = sorted(norms.keys() - set(bad), key=lambda name: -norms[name])[:NUM_LARGEST]
    return {
        "losses": list(losses),
        "bad_micro_batches": [at for at, loss in enumerate(losses) if not math.isfinite(loss)],
        "non_finite_gradients": {name: norms[name] for name in bad},
        "largest_gradient_norms": {name: norms[name] for name in largest},
        "num_gradients": len(norms),
    }


def describe_faults(faults: Sequence[Mapping[str, Any]]) -> str:
    """Return a clause that names the first non-finite loss, or else the first non-finite gradient, with its rank.

    Args:
        faults: Results of ``find_faults``, by rank.
    """
    bad_losses = [(rank, at) for rank, found in enumerate(faults) for at in found["bad_micro_batches"]]
    if bad_losses:
        rank, at = bad_losses[0]
        more = f" and {len(bad_losses) - 1} more" if len(bad_losses) > 1 else ""
        return f"the loss of micro-batch {at + 1} of rank {rank} is {faults[rank]['losses'][at]}{more}"
    for rank, found in enumerate(faults):
        names = list(found["non_finite_gradients"])
        if names:
            more = f" and of {pluralize(len(names) - 1, 'more parameter')}" if len(names) > 1 else ""
            return f"on rank {rank} the gradient of {names[0]} is not finite{more}, though every loss is"
    if not any(found["num_gradients"] for found in faults):  # DeepSpeed has freed them.
        return "the norm of the gradient is not finite, though every loss is; DeepSpeed keeps no gradients to look at"
    return "the norm of the gradient is not finite, though every gradient and loss is: it is too large for float32"


def dump_and_raise(
    parameters: Mapping[str, Tensor],
    inputs: StepInputs,
    *,
    step: int,
    output_dir: Path,
    facts: Mapping[str, Any],
    why: str = "",
    learner: str = "",
    is_updated: bool = False,
) -> None:
    """Dump the step on every process, then raise the same error on all; every process must call.

    Args:
        parameters: Parameters by name, with the step's gradients.
        inputs: Micro-batches and losses of the step.
        step: Number of the step, from 1.
        output_dir: Output directory of the run; the dump is written to ``diverged/step-N/``.
        facts: Further JSON values for the dump: learning rate, loss, gradient norm.
        why: Clause that gives the reason; empty: the first non-finite value.
        learner: Name of the updated model, in runs that train several.
        is_updated: Whether the update is already made, as DeepSpeed does within the backward pass.

    Raises:
        DivergedError: Always; the same one on every process.
    """
    found = find_faults(parameters, [float(loss) for loss in inputs.losses])
    rank = get_rank()
    folder = output_dir / DUMP_DIR / f"step-{step}"
    failure = None
    try:
        write_dump(folder, rank, inputs, {"step": step, "rank": rank, **facts, **found})
    except (OSError, SafetensorError) as error:
        # A full disk must not hide the divergence, nor keep this process from the collective call below.
        failure = str(error)
    faults, failures = zip(*gather_objects((found, failure)), strict=True)
    whose = f" of the {learner}" if learner else ""
    when = "after its update, which DeepSpeed makes first" if is_updated else f"before its update{whose}"
    weights = "The last checkpoint is intact, and from before it"
    if not is_updated:
        weights = f"The weights are those of step {step - 1}, and the last checkpoint is intact"
    advice = f"Look at the rows, batches and gradients of the step, which are in {folder} (docs/guards.md)"
    if failed := next(filter(None, failures), None):
        advice = f"Its rows, batches and gradients could not be written to {folder} ({failed}): make room for them"
    reason = why or describe_faults(faults)
    raise DivergedError(f"step {step} was stopped {when}: {reason}. {weights}. {advice}, or lower learning_rate")


def write_dump(folder: Path, rank: int, inputs: StepInputs, facts: Mapping[str, Any]) -> None:
    """Write facts and row ids to ``rank-R.json``, and the batches' tensors to ``rank-R.safetensors``, in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        # Cloned, because safetensors refuses tensors that share memory, as views of one batch do.
        f"micro_batch_{at + 1}.{name}": value.detach().cpu().contiguous().clone()
        for at, batch in enumerate(inputs.batches)
        for name, value in batch.items()
        if isinstance(value, Tensor)
    }
    save_file(tensors, folder / f"rank-{rank}.safetensors")
    row_ids = [None if ids is None else [int(row) for row in ids] for ids in inputs.row_ids]
    text = json.dumps(spell_numbers({**facts, ROW_IDS: row_ids}), indent=1, allow_nan=False)
    (folder / f"rank-{rank}.json").write_text(text, encoding="utf-8")


class TrainerView(Protocol):
    """Protocol with the members of ``RecipeTrainer`` that guards and checks use.

    Members with a leading underscore are transformers' (5.23), which has no public equivalents.
    """

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    model: Any
    model_wrapped: Any
    accelerator: Any
    callback_handler: Any
    data_collator: Any
    train_dataset: Any
    is_deepspeed_enabled: Any
    neftune_noise_alpha: Any
    neftune_hook_handle: Any
    current_gradient_accumulation_steps: Any
    router_aux_loss_coef: float
    compares_rows: bool
    is_evaluating: bool
    last_evaluated_step: int
    guard: Any
    observer: Observer

    def uncounted_pass(self) -> AbstractContextManager[None]:
        """Compute without recording losses, metrics or token counts."""

    def count_terms(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the number of terms of the objective in a batch."""

    def compute_loss(self, model: Any, inputs: Any, *, num_items_in_batch: Any) -> Any:
        """Return a micro-batch's share of the objective."""

    def verify_first_loss(self, loss: float) -> None:
        """Compare the loss of step 1 with its expected value."""

    def find_rows(self, step: int) -> tuple[int, int]:
        """Return the half-open range of rows of a step, both from 0."""

    def finish_saving(self) -> None:
        """Wait until no checkpoint is being written."""

    def stops_at_end(self) -> bool:
        """Return whether the run is resumed at its end."""

    def run_pending_evaluation(self) -> None:
        """Run the evaluation that a preemption interrupted, if any."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        """Run forward and backward of a micro-batch."""

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Return the micro-batches of a step and their number of terms."""

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the autocast context."""

    def _prepare_inputs(self, inputs: Any) -> Any: ...

    def _save_checkpoint(self, model: Any, trial: Any) -> None: ...

    def _get_learning_rate(self) -> float: ...
