"""Interface of the guards: Protocol of the trainer, losses and gradients of a step, dump of a bad step."""

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
from recipes_lib.training.collectives import gather_objects, get_rank
from recipes_lib.training.layouts.fsdp import get_local
from recipes_lib.training.monitoring.callbacks import Observer

DUMP_DIR: Final = "diverged"
ROW_IDS: Final = "row_ids"
"""Key of the row numbers in a batch; they are removed before the model is called."""
MAX_SKIPPED: Final = 24
"""Updates in a row that fp16's loss scaler may skip: from its first scale, 2^16, that leaves 2^-8, at which what still
overflows is no overflow of the scaling."""
NUM_LARGEST: Final = 20
"""Gradients that a dump lists by their norms, besides all that are not finite."""


@dataclass(slots=True)
class StepInputs:
    """The micro-batches of a step and their losses, on this process.

    Attributes:
        batches: As the model gets them.
        row_ids: Numbers of the rows of each, ``int64``, as the data number them; ``None`` where they have none.
        num_terms: Terms of the objective in the whole step, over all processes.
        losses: This process's share of each micro-batch so far computed; they sum to the step's, times the processes.
        kind: Of the objective, where a run has steps of several kinds: each is compared with its own.
        num_tokens: Tokens of the whole step, over all processes, padding not counted; ``None`` where nobody counts.
    """

    batches: Sequence[Mapping[str, Any]] = ()
    row_ids: Sequence[Any] = ()
    num_terms: Tensor | None = None
    losses: list[Tensor] = field(default_factory=list)
    kind: str = ""
    num_tokens: Tensor | None = None


def separate_row_ids(batches: Sequence[dict[str, Any]]) -> list[Any]:
    """Take the row numbers out of batches and return them, ``None`` for a batch without."""
    return [batch.pop(ROW_IDS, None) for batch in batches]


def find_faults(parameters: Mapping[str, Tensor], losses: Sequence[float]) -> dict[str, Any]:
    """Return the non-finite losses and gradients of a step on this process, and the gradient norms.

    Args:
        parameters: With the gradients of the step, before they are clipped; by name.
        losses: Of the micro-batches.

    Returns:
        JSON values: ``losses``; ``bad_micro_batches``; ``gradient_norms``, those of this process's shards: all that are
        not finite, from the output towards the input, which is the way an error spreads, and the ``NUM_LARGEST``.
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
    """Return in a clause what was not finite first: a loss and on which process, or the gradients it was found in.

    Args:
        faults: From ``find_faults``, of each process by its number.
    """
    bad_losses = [(rank, at) for rank, found in enumerate(faults) for at in found["bad_micro_batches"]]
    if bad_losses:
        rank, at = bad_losses[0]
        more = f" and {len(bad_losses) - 1} more" if len(bad_losses) > 1 else ""
        return f"the loss of micro-batch {at + 1} of rank {rank} is {faults[rank]['losses'][at]}{more}"
    for rank, found in enumerate(faults):
        names = list(found["non_finite_gradients"])
        if names:
            more = f" and of {len(names) - 1} more parameters" if len(names) > 1 else ""
            return f"on rank {rank} the gradient of {names[0]} is not finite{more}, though every loss is"
    return "the norm of the gradient is not finite, though every gradient and loss is: it is too large for float32"


def stop_before_update(
    parameters: Mapping[str, Tensor],
    inputs: StepInputs,
    *,
    step: int,
    output_dir: Path,
    facts: Mapping[str, Any],
    why: str,
    learner: str = "",
    is_updated: bool = False,
) -> None:
    """Dump the step on every process, and raise; all of them must call.

    Args:
        parameters: With the gradients of the step, by name.
        inputs: The step's.
        step: Its number, from 1.
        output_dir: Of the run; the dump goes into ``diverged/step-N/``.
        facts: Further JSON values: learning rate, loss, norm.
        why: What was seen, in a clause; empty where it is the first thing that is not finite.
        learner: Whose update it is, where a step is made of several.
        is_updated: Whether DeepSpeed has made the update already, inside the backward pass.

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
        # A full disk must neither hide why the step is stopped nor let the other processes wait.
        failure = str(error)
    faults, failures = zip(*gather_objects((found, failure)), strict=True)
    whose = f" of the {learner}" if learner else ""
    when = "behind its update, which DeepSpeed makes first" if is_updated else f"before its update{whose}"
    weights = "The last checkpoint is whole, and from before"
    if not is_updated:
        weights = f"The weights are those of step {step - 1}, and the last checkpoint is whole"
    look = f"Look at the rows, batches and gradients of the step, which are in {folder} (docs/guards.md)"
    if failed := next(filter(None, failures), None):
        look = f"Its rows, batches and gradients could not be written to {folder} ({failed}): make room for them"
    raise DivergedError(
        f"step {step} was stopped {when}: {why or describe_faults(faults)}. {weights}. {look}, or lower learning_rate"
    )


def write_dump(folder: Path, rank: int, inputs: StepInputs, facts: Mapping[str, Any]) -> None:
    """Write ``rank-R.json`` and the tensors of the batches, ``rank-R.safetensors``, into ``folder``."""
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
    """Protocol of ``RecipeTrainer``: the part that guards and checks may use.

    Attributes beginning with an underscore are transformers' own (5.23), which has no public ones for them.
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
        """Compute without counting."""

    def count_terms(self, batch: dict[str, Any]) -> torch.Tensor:
        """Terms of the objective in a batch."""

    def compute_loss(self, model: Any, inputs: Any, *, num_items_in_batch: Any) -> Any:
        """A batch's share of the objective."""

    def verify_first_loss(self, loss: float) -> None:
        """Compare the loss of step 1 with its known value."""

    def find_rows(self, step: int) -> tuple[int, int]:
        """First row of a step, from 0, and the one behind its last."""

    def finish_saving(self) -> None:
        """Return when no checkpoint is being written."""

    def run_pending_evaluation(self) -> None:
        """Run the evaluation that a stop request interrupted."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        """Forward and backward of a micro-batch."""

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """The micro-batches of a step and their number of terms."""

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Mixed precision."""

    def _prepare_inputs(self, inputs: Any) -> Any: ...

    def _save_checkpoint(self, model: Any, trial: Any) -> None: ...

    def _get_learning_rate(self) -> float: ...
