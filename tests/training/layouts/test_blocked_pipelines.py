"""What is refused in stages, and that nothing of it is without; ``test_combinations.py`` has a case for each row."""

from __future__ import annotations

from typing import Any

import pytest

from recipes_lib.training.layouts.compatibility import BLOCKED, OF_PIPELINES
from recipes_lib.training.layouts.launch_environment import Launch, Layout

EVERYTHING: dict[str, Any] = {
    **{"fp16": True, "batch_ramp_tokens": 1, "verify_steps": 1, "metrics": ["a:B"]},
    **{"torch_compile": True, "optim": "lion_8bit", "gradient_accumulation_steps": 1},
}


def find_rows(stages: int, schedule: str, keys: dict[str, Any], num_processes: int = 4) -> list[str]:
    launch = Launch(0, 0, num_processes, "", layout=Layout(pipeline_stages=stages, schedule=schedule))
    return [row.why for row in OF_PIPELINES if row.applies(keys, launch) and row.recipe_text[:3] != "any"]


def test_they_are_rows_of_the_one_table() -> None:
    assert set(OF_PIPELINES) <= set(BLOCKED)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_without_stages_nothing_is_refused(schedule: str) -> None:
    assert find_rows(1, schedule, EVERYTHING) == []


def test_a_plain_recipe_goes_in_stages() -> None:
    plain = {"gradient_accumulation_steps": 8, "bf16": True, "max_grad_norm": 1.0}
    assert all(find_rows(2, schedule, plain) == [] for schedule in ("1f1b", "gpipe", "interleaved"))


@pytest.mark.parametrize(
    ("schedule", "num_batches", "is_refused"),
    [("1f1b", 1, True), ("1f1b", 3, False), ("interleaved", 3, True), ("interleaved", 2, False), ("gpipe", 1, False)],
)
def test_each_schedule_says_how_many_micro_batches_it_takes(schedule: str, num_batches: int, is_refused: bool) -> None:
    assert bool(find_rows(2, schedule, {"gradient_accumulation_steps": num_batches})) is is_refused
