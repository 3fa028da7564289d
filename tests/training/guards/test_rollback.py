"""``rollbacks.json``, the rows that it skips, and the checkpoint to roll back to."""

from pathlib import Path

import pytest

from recipes_lib.errors import DataError
from recipes_lib.training.checkpoints.manifest import write_complete
from recipes_lib.training.guards.step_guard import (
    ROLLBACKS_FILE,
    Rollback,
    find_skips,
    find_step_before,
    read_rollbacks,
    write_rollbacks,
)

FIRST = Rollback(step=27, cause="loss 5", back_to=25, skipped=(50, 58), steps=(26, 29))
SECOND = Rollback(step=31, cause="loss 6", back_to=25, skipped=(58, 66), steps=(30, 33))


def test_rollbacks_round_trip(tmp_path):
    assert read_rollbacks(tmp_path) == []
    write_rollbacks(tmp_path, [FIRST, SECOND])
    assert read_rollbacks(tmp_path) == [FIRST, SECOND]
    assert [path.name for path in tmp_path.iterdir()] == [ROLLBACKS_FILE]


@pytest.mark.parametrize("skipped", ["[]", "[1]", "[1, Infinity]", "7", "[null, 2]"])
def test_invalid_file_is_rejected(tmp_path, skipped):
    text = f'[{{"step": 1, "cause": "loss", "back_to": 0, "skipped": {skipped}, "steps": [1, 2]}}]'
    (tmp_path / ROLLBACKS_FILE).write_text(text)
    with pytest.raises(DataError, match=r"rollbacks\.json: "):
        read_rollbacks(tmp_path)


def test_failed_write_keeps_old_file(tmp_path, monkeypatch):
    write_rollbacks(tmp_path, [FIRST])
    monkeypatch.setattr(Path, "write_text", lambda self, *_, **__: self.write_bytes(b'[{"step"') and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_rollbacks(tmp_path, [FIRST, SECOND])
    assert read_rollbacks(tmp_path) == [FIRST]


def test_second_rollback_is_numbered_after_first():
    assert find_skips([FIRST]).ranges == ((50, 58),)
    # Rows 58 to 65 of the run are rows 66 to 73 of the data, because 8 are skipped before them.
    assert find_skips([FIRST, SECOND]).ranges == ((50, 58), (66, 74))


def test_find_step_before_skips_recent_incomplete_and_damaged(tmp_path):
    for step in (10, 20, 25, 26):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "weights").write_bytes(b"1")
        if step != 20:
            write_complete(tmp_path / f"checkpoint-{step}", step=step, world_size=1)
    assert find_step_before(tmp_path, 28) == 26
    assert find_step_before(tmp_path, 27) == 25
    assert find_step_before(tmp_path, 24) == 10
    assert find_step_before(tmp_path, 11) is None
    (tmp_path / "checkpoint-25" / "weights").write_bytes(b"2")  # Of the recorded size.
    assert find_step_before(tmp_path, 27) == 10
