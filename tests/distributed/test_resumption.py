"""One process goes on with what two began, and two with what one began: the same rows in a step, the same losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.forked import run_forked
from tests.training import resumptions

RECIPE_NAMES = ("sft", "dpo", "pretrain")
STEP = 3


def rows_by_step(reports: list[dict[str, Any]], num_steps: int) -> list[list[int]]:
    """Rows of each step over all processes; a loader reads ahead at the end of what it was asked for."""
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    for report in reports:
        size = report["accumulation"]
        for number, rows in enumerate(steps):
            rows += [row for batch in report["batches"][number * size : (number + 1) * size] for row in batch]
    return [sorted(rows) for rows in steps]


def assert_goes_on(straight: list[dict[str, Any]], resumed: list[dict[str, Any]], what: str) -> None:
    num_steps = resumptions.KEYS["max_steps"]
    rows = rows_by_step(straight, num_steps)
    assert len(set(map(tuple, rows))) == num_steps
    assert all(len(step) == 8 for step in rows)
    assert rows_by_step(resumed, num_steps - STEP) == rows[STEP:], what
    losses = {step: loss for step, loss in straight[0]["losses"].items() if int(step) > STEP}
    assert {step: loss for step, loss in resumed[0]["losses"].items() if int(step) > STEP} == {
        step: pytest.approx(loss, rel=1e-5) for step, loss in losses.items()
    }, what


@pytest.mark.multiprocess
def test_the_batch_is_kept_and_the_data_go_on_at_the_right_row(
    tiny_model_dir: Path,
    tiny_tokenizer_dir: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    places = tiny_model_dir, tiny_tokenizer_dir
    one = {recipe: resumptions.run(recipe, tmp_path / recipe / "one", *places, 4) for recipe in RECIPE_NAMES}
    for recipe in RECIPE_NAMES:
        resumptions.cut(tmp_path / recipe / "one", tmp_path / recipe / "one to two", STEP, damaged=2 * STEP)
    # The same four micro-batches as one process has are written for two, which take two each.
    runs = [(recipe, f"{recipe}/one to two", 4) for recipe in RECIPE_NAMES] + [
        (recipe, f"{recipe}/two", 2) for recipe in RECIPE_NAMES
    ]
    told = run_forked(resumptions.__name__, *places, tmp_path, json.dumps(runs))
    assert told.count("2 processes instead of 1: gradient_accumulation_steps is 2") == len(RECIPE_NAMES)
    # Each process reads some of the files; the first one tells what any of them found, and both go on from the same.
    assert told.count("checkpoint-6 is damaged: optimizer.pt does not match its SHA-256") == len(RECIPE_NAMES)
    ranks = [json.loads((tmp_path / f"reports-{rank}.json").read_text()) for rank in (0, 1)]
    for number, recipe in enumerate(RECIPE_NAMES):
        resumed, two = ([rank[number + offset] for rank in ranks] for offset in (0, len(RECIPE_NAMES)))
        assert_goes_on([one[recipe]], resumed, f"{recipe}, from one to two")
        resumptions.cut(tmp_path / recipe / "two", tmp_path / recipe / "two to one", STEP, damaged=2 * STEP)
        capfd.readouterr()
        back = resumptions.run(recipe, tmp_path / recipe / "two to one", *places, 2)
        assert "1 processes instead of 2: gradient_accumulation_steps is 4" in capfd.readouterr().err
        assert_goes_on(two, [back], f"{recipe}, from two to one")
