"""Spike rollback: the checkpoint to return to, the rows to skip, and the record that survives a kill."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from recipes_lib.data.tokens.dataset import RowSkips
from recipes_lib.errors import DataError, Problem
from recipes_lib.files import read_json, replace_record
from recipes_lib.training.checkpoints.manifest import is_complete, list_checkpoints

ROLLBACKS_FILE: Final = "rollbacks.json"
_REMEDY: Final = "put the file back, or choose another output_dir: without it the run would meet its spikes again"

MARGIN: Final = 2
"""Steps that a checkpoint must lie before the spike: the batch before it is left out too."""
STEPS_BEFORE: Final = 1
"""Steps left out before the one that was seen to be a spike: the update that its loss was computed after."""
STEPS_AFTER: Final = 2
"""Steps left out behind it: bad rows come in runs, since neighbours come from one source."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """One return to a checkpoint.

    Attributes:
        step: Whose loss or gradient was the spike; its update was never made.
        cause: What was seen, in words.
        back_to: Step of the checkpoint that the run went on from.
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
    """All returns of a run, in the order in which they were made; kept in ``rollbacks.json``.

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
    """Read the returns of a run; none where there is no file.

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
    """Make a rollback of a JSON object; raises what Python does where it is none."""
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
