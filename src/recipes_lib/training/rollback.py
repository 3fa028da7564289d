"""Going back behind a spike: from which checkpoint, without which rows, and the record that survives a kill."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from recipes_lib.data.row_skips import RowSkips
from recipes_lib.training.checkpoints import is_complete, list_checkpoints

ROLLBACKS_FILE: Final = "rollbacks.json"

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

    Source: ``tests/training/test_rollback.py``.
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
        """Replace the file in one stroke, on disk before this returns."""
        partial = output_dir / f"{ROLLBACKS_FILE}.partial"
        with partial.open("w", encoding="utf-8") as file:
            json.dump([asdict(rollback) for rollback in self.made], file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(output_dir / ROLLBACKS_FILE)

    @staticmethod
    def clear(output_dir: Path) -> None:
        """Forget those of an earlier run in the same directory."""
        (output_dir / ROLLBACKS_FILE).unlink(missing_ok=True)


def read_rollbacks(output_dir: Path) -> Rollbacks:
    """Read the returns of a run; none where there is no file."""
    path = output_dir / ROLLBACKS_FILE
    if not path.exists():
        return Rollbacks()
    records = json.loads(path.read_text(encoding="utf-8"))
    tuples = ("skipped", "steps")
    made = ({**record, **{name: tuple(record[name]) for name in tuples}} for record in records)
    return Rollbacks(tuple(Rollback(**record) for record in made))


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
