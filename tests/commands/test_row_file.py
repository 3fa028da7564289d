"""A file of rows goes on behind its last whole batch, and what it did not write itself is left alone."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from recipes_lib.commands.sampling import Counts, RowFile
from recipes_lib.errors import ConfigError, DataError


class Killed(Exception):
    """The process ends."""


def killed_after(batches, number):
    for at, batch in enumerate(batches):
        if at == number:
            raise Killed
        yield batch


@dataclass(kw_only=True)
class Numbers(Counts):
    """How many rows there are."""

    num_rows: int = 0


def open_file(path, key="key", **options):
    return RowFile(path, key, Numbers(), what="rows of something else", **options)


def count_to(counts, stop):
    for number in range(counts.num_rows, stop, 2):
        rows = [{"number": each, "text": "é"} for each in range(number, min(number + 2, stop))]
        counts.num_rows += len(rows)
        yield rows


def test_a_killed_process_leaves_whole_batches_and_the_next_one_goes_on(tmp_path):
    whole, path = open_file(tmp_path / "whole.jsonl"), tmp_path / "rows.jsonl"
    whole.write(count_to(whole.counts, 5))
    first = open_file(path)
    with pytest.raises(Killed):
        first.write(killed_after(count_to(first.counts, 5), 2))
    with path.open("a") as file:
        file.write('{"half a row')
    again = open_file(path)
    assert again.counts.num_rows == 4
    again.write(count_to(again.counts, 5))
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert again.counts == whole.counts
    done = open_file(path)
    done.write(count_to(done.counts, 5))
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == list(range(5))


def test_the_record_says_what_the_rows_are_of(tmp_path):
    file = open_file(tmp_path / "rows.jsonl", facts={"seed": 7})
    file.write(count_to(file.counts, 3))
    record = json.loads((tmp_path / "rows.jsonl.record.json").read_text())
    assert record == {"key": "key", "seed": 7, "num_rows": 3, "num_bytes": (tmp_path / "rows.jsonl").stat().st_size}


def test_rows_of_something_else_and_files_of_others_are_left_alone(tmp_path):
    file = open_file(tmp_path / "rows.jsonl")
    file.write(count_to(file.counts, 3))
    with pytest.raises(ConfigError, match="of something else"):
        open_file(tmp_path / "rows.jsonl", "another key")
    (tmp_path / "mine.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="not written by this command"):
        open_file(tmp_path / "mine.jsonl")


def test_a_process_killed_in_its_first_batch_is_resumed_and_mended_inputs_begin_anew(tmp_path):
    path = tmp_path / "rows.jsonl"
    first = open_file(path)
    with pytest.raises(Killed):
        first.write(killed_after(count_to(first.counts, 5), 0))
    with path.open("a") as file:
        file.write('{"half a row')
    for key in ("key", "mended"):
        again = open_file(path, key)
        assert again.counts == Numbers()
    again.write(count_to(again.counts, 5))
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == list(range(5))


def test_two_processes_never_write_one_file(tmp_path):
    first, second = open_file(tmp_path / "rows.jsonl"), open_file(tmp_path / "rows.jsonl")

    def interrupted():
        for number, batch in enumerate(count_to(first.counts, 4)):
            if number == 1:
                with pytest.raises(ConfigError, match="is being written by another process"):
                    second.write(count_to(second.counts, 4))
            yield batch

    first.write(interrupted())
    assert [json.loads(line)["number"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == [0, 1, 2, 3]


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:7])])
def test_a_file_that_lost_rows_is_not_filled_up_with_zero_bytes(tmp_path, damage):
    path = tmp_path / "rows.jsonl"
    first = open_file(path)
    first.write(count_to(first.counts, 4))
    damage(path)
    with pytest.raises(DataError, match=r"rows\.jsonl\.record\.json counts .*\n.*delete both"):
        open_file(path)
