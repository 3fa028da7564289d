"""``recipes score``: loss columns, limits, resumption and the page of extremes."""

from __future__ import annotations

import datetime

import pyarrow
import pytest
from pyarrow import parquet
from tests.rows import read_rows, write_rows

from recipes_lib.commands import score
from recipes_lib.errors import ConfigError, DataError
from recipes_lib.report.html_pages import NUM_EXTREMES, write_score_report

ROWS = [{"text": f"the brown fox number {number} <b>jumps</b>", "id": number} for number in range(9)]


@pytest.fixture
def run(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(score, "ROWS_PER_CHUNK", 4)

    def call(rows=ROWS, *flags, output="scored.jsonl"):
        data = rows if isinstance(rows, str) else str(write_rows(tmp_path / "rows.jsonl", rows))
        score.main([str(tiny_model_dir), f"--dataset_name={data}", f"--output={tmp_path / output}", *flags])
        return read_rows(tmp_path / output)

    return call


def test_scores_are_added_as_columns(run, capsys):
    rows = run()
    assert [{name: row[name] for name in ("text", "id")} for row in rows] == ROWS
    assert all(row["loss"] > 0 and row["num_target_tokens"] > 5 and row["bits_per_byte"] > 0 for row in rows)
    mean = sum(row["loss"] * row["num_target_tokens"] for row in rows) / sum(row["num_target_tokens"] for row in rows)
    assert f"9 of 9 rows written; loss {mean:.4f}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="holds scores by another model, of other rows"):
        run(ROWS[:3])


def test_columns_that_json_or_utf8_lack_are_kept(run, tmp_path):
    others = {"at": datetime.datetime(2024, 5, 1, 12, 30), "data": b"\xff"}
    parquet.write_table(pyarrow.Table.from_pylist([ROWS[0] | others]), tmp_path / "rows.parquet")
    (row,) = run(str(tmp_path / "rows.parquet"))
    assert {name: row[name] for name in others} == {"at": "2024-05-01T12:30:00", "data": "b'\\xff'"}
    write_rows(tmp_path / "half.jsonl", [ROWS[0] | {"note": "\ud83d"}], ensure_ascii=True)
    (row,) = run(str(tmp_path / "half.jsonl"), output="surrogate.jsonl")
    assert row["note"] == "\ud83d"


def test_interrupted_command_resumes_to_same_file(run, tmp_path, monkeypatch):
    whole = run(output="whole.jsonl")
    original = score.RowFile.write

    def write(self, batches):
        original(self, iter([next(batches)]))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(score.RowFile, "write", write)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert len(read_rows(tmp_path / "scored.jsonl")) == 4
    assert run() == whole


def test_loss_limits_filter_rows(run):
    losses = sorted(row["loss"] for row in run(output="all.jsonl"))
    kept = run(ROWS, f"--min_loss={losses[2]}", f"--max_loss={losses[5]}")
    assert sorted(row["loss"] for row in kept) == losses[2:6]


def test_preference_rows_have_loss_per_answer(run):
    pairs = [{"prompt": "How many days are in a week?", "chosen": " seven", "rejected": " a brown fox"}]
    (pair,) = run(pairs)
    alone = [{"prompt": pairs[0]["prompt"], "completion": pairs[0][name]} for name in ("chosen", "rejected")]
    chosen, rejected = run(alone, output="alone.jsonl")
    assert pair["loss"] == pytest.approx(chosen["loss"], rel=1e-5)
    assert pair["rejected_loss"] == pytest.approx(rejected["loss"], rel=1e-5)


def test_existing_columns_require_prefix(run, tmp_path):
    with pytest.raises(ConfigError, match="already has a column `rejected_loss`"):
        run([ROWS[0] | {"rejected_loss": 1.0}], output="first.jsonl")
    run()
    with pytest.raises(ConfigError, match="already has a column `bits_per_byte`"):
        run(str(tmp_path / "scored.jsonl"), output="twice.jsonl")
    assert not (tmp_path / "twice.jsonl").exists()
    rows = run(str(tmp_path / "scored.jsonl"), "--prefix=new_", output="twice.jsonl")
    assert all(row["new_loss"] == pytest.approx(row["loss"], rel=1e-5) for row in rows)


@pytest.mark.parametrize(
    ("rows", "flags", "error", "message"),
    [
        ([{"text": "a"}, {"text": 3}], [], DataError, "rows.jsonl:2"),
        (ROWS, ["--max_length=16", "--learning_rat=1"], ConfigError, "learning_rate"),
        (
            ROWS,
            ["--dataset_streaming=true", "--max_steps=1", "--max_length=16"],
            ConfigError,
            "not supported by recipes score",
        ),
        (ROWS, ["--min_loss=2", "--max_loss=1"], ConfigError, "no loss is between 2.0 and 1.0"),
        (ROWS, ["--min_loss=nan"], ConfigError, "no loss is between"),
        (ROWS, ["--max_loss=nan"], ConfigError, "no loss is between"),
    ],
)
def test_invalid_rows_and_flags_are_rejected(run, rows, flags, error, message):
    with pytest.raises(error, match=message):
        run(rows, *flags)


def test_page_shows_escaped_extremes(tmp_path):
    rows = [{"text": f"<script>{number}", "loss": number / 10} for number in range(50)] + [{"text": "", "loss": None}]
    page = write_score_report(write_rows(tmp_path / "s.jsonl", rows), "loss").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;49" in page
    assert "&lt;script&gt;0" in page
    assert page.count("<article>") == 2 * NUM_EXTREMES
    assert "&lt;script&gt;25" not in page
    assert "50 rows with target tokens; 1 without" in page
    assert "2.450" in page
    none = write_rows(tmp_path / "none.jsonl", [{"loss": None}])
    assert "0 rows with target tokens; 1 without" in write_score_report(none, "loss").read_text()
