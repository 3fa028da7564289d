"""A refused combination is told where it stands: at the key that was written, or at the launch file."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import flatten_config
from recipes_lib.training.layouts.compatibility import Blocked

GIVEN = ["--model_name_or_path=o/m", "--dataset_name=o/d", "--output_dir=out"]


def block(**more: object) -> Blocked:
    return Blocked("the one", lambda _: True, "it would fail", "use another", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "where", "found"),
    [
        (block(), "mine.yaml", "the one: it would fail"),
        (block(recipes=("sft",)), "mine.yaml", "recipes/sft.py and a launch with the one: it would fail"),
        (block(keys=("seed",)), "--seed", "`seed: 7` and a launch with the one: it would fail"),
        (block(keys=("optim", "seed")), "--seed", "`seed: 7` and a launch with the one: it would fail"),
        (block(keys=("optim",)), "optim", "`optim`, which is not given, and a launch with the one: it would fail"),
    ],
)
def test_a_row_is_told_at_what_was_written(row: Blocked, where: str, found: str, tmp_path: Path) -> None:
    config = load_config("sft", [*GIVEN, "--seed=7"])
    keys = {name: value for name, value in flatten_config(config).items() if name != "optim"}
    problem = row.tell(keys, config, "mine.yaml")
    assert (problem.where, problem.found, problem.remedy) == (where, found, "use another")
