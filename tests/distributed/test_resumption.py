"""Resume at another world size, from one rank to two and back: rows of each step, losses, damaged checkpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.forked import run_forked
from tests.training import resumptions

STEP = 3


def rows_by_step(reports: list[dict[str, Any]], num_steps: int) -> list[list[int]]:
    """Return the rows of each step over all ranks, without batches that a data loader has prefetched."""
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    for report in reports:
        size = report["accumulation"]
        for number, rows in enumerate(steps):
            rows += [row for batch in report["batches"][number * size : (number + 1) * size] for row in batch]
    return [sorted(rows) for rows in steps]


def assert_continues(straight: list[dict[str, Any]], resumed: list[dict[str, Any]], what: str) -> None:
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
@pytest.mark.parametrize("recipes", [("sft", "pretrain"), pytest.param(("dpo",), marks=pytest.mark.slow)])
def test_other_world_size_keeps_batch_and_row_order(tiny_model_dir, tiny_tokenizer_dir, tmp_path, capfd, recipes):
    places = tiny_model_dir, tiny_tokenizer_dir
    one = {recipe: resumptions.run(recipe, tmp_path / recipe / "one", *places, 4) for recipe in recipes}
    for recipe in recipes:
        resumptions.cut(tmp_path / recipe / "one", tmp_path / recipe / "one to two", STEP, damaged=2 * STEP)
    # Accumulation 4, as in the run of one process, becomes 2 on two ranks.
    runs = [(recipe, f"{recipe}/one to two", 4) for recipe in recipes] + [
        (recipe, f"{recipe}/two", 2) for recipe in recipes
    ]
    output = run_forked(resumptions.__name__, *places, tmp_path, json.dumps(runs))
    assert output.count("2 processes instead of 1: gradient_accumulation_steps is 2") == len(recipes)
    # Each rank verifies some files; rank 0 logs what any of them found, and both resume from the same checkpoint.
    assert output.count("checkpoint-6 is damaged: optimizer.pt does not match its SHA-256") == len(recipes)
    ranks = [json.loads((tmp_path / f"reports-{rank}.json").read_text()) for rank in (0, 1)]
    for number, recipe in enumerate(recipes):
        resumed, two = ([rank[number + offset] for rank in ranks] for offset in (0, len(recipes)))
        assert_continues([one[recipe]], resumed, f"{recipe}, from one to two")
        resumptions.cut(tmp_path / recipe / "two", tmp_path / recipe / "two to one", STEP, damaged=2 * STEP)
        capfd.readouterr()
        back = resumptions.run(recipe, tmp_path / recipe / "two to one", *places, 2)
        assert "1 process instead of 2: gradient_accumulation_steps is 4" in capfd.readouterr().err
        assert_continues(two, [back], f"{recipe}, from two to one")
