"""Spike rollback to a checkpoint, and replay checks (``verify_steps``): a step computed twice, ranks compared."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from recipes_lib.data.tokens.dataset import RowSkips
from recipes_lib.errors import DataError, DivergedError, Problem
from recipes_lib.files import read_json, replace_record
from recipes_lib.models.inference import RandomStates
from recipes_lib.training.checkpoints.manifest import is_complete, list_checkpoints
from recipes_lib.training.collectives import gather_objects
from recipes_lib.training.guards.step_facts import StepInputs, TrainerView
from recipes_lib.training.layouts.fsdp import get_local

ROLLBACKS_FILE: Final = "rollbacks.json"
_REMEDY: Final = "put the file back, or choose another output_dir: without it the run would meet its spikes again"

MARGIN: Final = 2
"""Smallest number of steps from a checkpoint to the spike: the batch before it is skipped too."""
STEPS_BEFORE: Final = 1
"""Skipped steps before the spike: the update after which its loss was computed."""
STEPS_AFTER: Final = 2
"""Skipped steps after it: bad rows come in runs, since neighbours come from one source."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """One rollback to a checkpoint.

    Attributes:
        step: Step of the spike in loss or gradient norm; its update was not made.
        cause: Description of the spike.
        back_to: Step of the checkpoint that the run resumed from.
        skipped: Rows left out, ``(first, stop)``, in the numbers of the run as it was then.
        steps: Steps that they were the rows of, first and last, from 1.
    """

    step: int
    cause: str
    back_to: int
    skipped: tuple[int, int]
    steps: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rollbacks:
    """All rollbacks of a run, in order; stored in ``rollbacks.json``.

    Source: ``tests/training/guards/test_rollback.py``.
    """

    made: tuple[Rollback, ...] = ()

    @property
    def skips(self) -> RowSkips:
        """The rows that the run leaves out."""
        skips = RowSkips()
        for rollback in self.made:
            skips = skips.leave_out(*rollback.skipped)
        return skips

    def write(self, output_dir: Path) -> None:
        """Replace the file atomically, on disk before this returns."""
        replace_record(output_dir / ROLLBACKS_FILE, [asdict(rollback) for rollback in self.made])

    @staticmethod
    def clear(output_dir: Path) -> None:
        """Forget those of an earlier run in the same directory."""
        (output_dir / ROLLBACKS_FILE).unlink(missing_ok=True)


def read_rollbacks(output_dir: Path) -> Rollbacks:
    """Read the rollbacks of a run; none without a file.

    Raises:
        DataError: The file is not as it was written.
    """
    path = output_dir / ROLLBACKS_FILE
    if not path.exists():
        return Rollbacks()
    records = read_json(path, remedy=_REMEDY)
    try:
        return Rollbacks(tuple(_restore(record) for record in records))
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(Problem(str(path), "is not as it was written", _REMEDY)) from error


def _restore(record: Any) -> Rollback:
    """Build a rollback from a JSON object; raises Python's errors on invalid ones."""
    ranges = {name: (int(record[name][0]), int(record[name][1])) for name in ("skipped", "steps")}
    return Rollback(**{**record, **ranges, "step": int(record["step"]), "back_to": int(record["back_to"])})


def find_step_before(output_dir: Path, spike_step: int) -> int | None:
    """Return the step of the newest complete checkpoint ``MARGIN`` steps before a spike; ``None`` when there is none.

    Args:
        output_dir: Of the run.
        spike_step: The step whose update was not made, from 1.
    """
    eligible = (
        step for step, path in list_checkpoints(output_dir) if step <= spike_step - MARGIN and is_complete(path)
    )
    return next(eligible, None)


_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of as many bytes as an element of a tensor."""

Figures = dict[str, int]


def compute_checksums(tensors: Mapping[str, Tensor]) -> Figures:
    """Return the sum of each tensor's elements, their bits read as whole numbers, modulo 2^64.

    A flipped bit changes it by a power of two, whatever the number says; NaN is nothing special. A tensor of which this
    process has a shard is summed over that.
    """
    if not tensors:
        return {}
    # Sums of whole numbers do not depend on their order, unlike those of floats: two devices give the same one.
    local = [get_local(tensor) for tensor in tensors.values()]
    sums = [part.detach().contiguous().view(_WORDS[part.element_size()]).sum(dtype=torch.int64) for part in local]
    # One transfer for all tensors.
    return dict(zip(tensors, torch.stack([part.to(sums[0].device) for part in sums]).tolist(), strict=True))


def find_differences(checksums: Sequence[Figures]) -> dict[int, list[str]]:
    """Return the names of differing tensors for each process that deviates from the majority.

    Args:
        checksums: Of the same tensors, of each process by its number. Of two processes that differ none is like the
            most; then it is the second one that is named.
    """
    differing: dict[int, list[str]] = {}
    for name in checksums[0]:
        values = [sums[name] for sums in checksums]
        usual = max(values, key=values.count)
        for rank, value in enumerate(values):
            if value != usual:
                differing.setdefault(rank, []).append(name)
    return differing


class ReplayCheck:
    """Verifies the hardware every ``verify_steps`` steps, by computing a step twice.

    Before such a step the parameters and buffers that every process has are compared with each other. After its forward
    and backward passes these are made again from the same batches and random states, and must give the same loss and
    the same gradients, bit by bit. That is only so where the computation is deterministic: on a CPU, or with
    ``full_determinism``; elsewhere only weights are compared.

    Source: ``tests/training/guards/test_replay_check.py``, ``tests/distributed/test_guards.py``.
    """

    def __init__(self, trainer: TrainerView, every: int | None) -> None:
        """Check every ``every`` steps; ``None`` is never."""
        self._trainer = trainer
        self._every = every
        self._states: RandomStates | None = None
        self._is_told = False

    def begin(self, step: int) -> None:
        """Compare the weights of all processes if step ``step``, from 1, is to be checked; remember how it begins.

        Raises:
            DivergedError: A process has other weights than the others.
        """
        self._states = None
        if self._every is None or step % self._every:
            return
        self._compare_weights(step)
        if self._trainer.args.device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
            self._states = RandomStates.read()
        elif not self._is_told:
            self._is_told = True
            self._trainer.observer.progress.say(
                "verify_steps: this device may compute another sum each time, so that only weights are compared; "
                "with full_determinism: true steps are computed twice as well"
            )

    def compare(self, inputs: StepInputs) -> None:
        """Compute the step again, if it is to be checked; the gradients are afterwards what they were.

        Args:
            inputs: The step's, whose gradients are not yet clipped.

        Raises:
            DivergedError: The loss or a gradient is another one.
        """
        if self._states is None:
            return
        named = self._trainer.model.named_parameters()
        trained = {name: parameter for name, parameter in named if parameter.grad is not None}
        gradients = {name: parameter.grad for name, parameter in trained.items()}
        after = RandomStates.read()
        # The gradients of a scaled loss are no longer what was computed.
        is_scaled = self._trainer.accelerator.scaler is not None
        first = self._replay(trained, inputs) if is_scaled else _read_figures(trained, inputs.losses)
        again = self._replay(trained, inputs)
        # Every process learns of it, so that all of them stop, and compute once more together where that is needed.
        found = gather_objects([name for name in first if first[name] != again[name]])
        if any(found):
            self._name(found, trained, inputs)
        for name, parameter in trained.items():
            parameter.grad = gradients[name]
        after.restore()

    def _name(self, found: list[list[str]], trained: Mapping[str, nn.Parameter], inputs: StepInputs) -> None:
        """Say which process it is: the one whose loss has changed, or who computes its own share in two ways.

        Raises:
            DivergedError: Always.
        """
        step = self._trainer.state.global_step + 1
        premise = f"step {step} was computed twice from the same weights, rows and random numbers"
        # Reduced gradients have changed on all of them.
        blamed = [[name for name in names if name not in trained] for names in found]
        if not any(blamed) and len(found) > 1:
            one, other = (self._replay(trained, inputs, is_reduced=False) for _ in range(2))
            blamed = gather_objects([name for name in one if one[name] != other[name]])
            premise += "" if any(blamed) else ", then twice more with one result, so that any rank may be at fault"
        if not any(blamed):
            blamed = found
        _refuse({rank: names for rank, names in enumerate(blamed) if names}, premise)

    def _replay(self, trained: Mapping[str, nn.Parameter], inputs: StepInputs, *, is_reduced: bool = True) -> Figures:
        """Compute the step once more; only the share of this rank if nothing is reduced."""
        trainer = self._trainer
        model: Any = trainer.model_wrapped
        assert self._states is not None
        self._states.restore()
        for parameter in trained.values():
            parameter.grad = None
        with trainer.uncounted_pass():
            for number, batch in enumerate(inputs.batches, start=1):
                is_last = is_reduced and number == len(inputs.batches)
                # As upstream's loop: gradients are reduced behind the last micro-batch.
                with contextlib.nullcontext() if is_last else trainer.accelerator.no_sync(model):
                    trainer.training_step(model, dict(batch), inputs.num_terms)
            return _read_figures(trained, trainer.guard.inputs.losses)

    def _compare_weights(self, step: int) -> None:
        model: Any = self._trainer.model
        if self._trainer.args.world_size == 1:
            return
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        # Of what is sharded every process has another part.
        own = compute_checksums({name: value for name, value in tensors.items() if not hasattr(value, "to_local")})
        found = find_differences(gather_objects(own))
        if found:
            _refuse(found, f"before step {step} the weights of all processes should be the same")


def _read_figures(trained: Mapping[str, nn.Parameter], losses: Sequence[Tensor]) -> Figures:
    named = {f"the loss of micro-batch {at + 1}": loss.reshape(1) for at, loss in enumerate(losses)}
    gradients = {name: parameter.grad for name, parameter in trained.items() if parameter.grad is not None}
    return compute_checksums({**named, **gradients})


def _refuse(differing: Mapping[int, list[str]], premise: str) -> None:
    """Raise.

    Raises:
        DivergedError: Always.
    """
    rank, names = next(iter(differing.items()))
    ranks = f"rank {rank}" + (f" (and {len(differing) - 1} more)" if len(differing) > 1 else "")
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise DivergedError(
        f"{premise}; {ranks} differs in {names[0]}{more}. A processor or its memory makes mistakes, or a module is not "
        "deterministic: take that machine out, and run the same command again"
    )
