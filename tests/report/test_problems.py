"""Each problem is named when it is there, and nothing is said of a good run."""

from __future__ import annotations

from typing import Any

import pytest

from recipes_lib.report.problems import find_problems
from recipes_lib.report.run_files import RunFiles

ROLLBACK = {"step": 27, "cause": "loss 5.2", "back_to": 25, "skipped": [50, 58], "steps": [26, 29]}


def build_run(**changes: Any) -> RunFiles:
    fields: dict[str, Any] = {
        "name": "run",
        "facts": {"status": "done"},
        "train": [{"step": step, "loss": 5 / step, "grad_norm": 1.0} for step in range(1, 21)],
        "evaluations": [{"step": 10 * n, "eval_loss": 3.0 - n, "eval_stop_rate": n / 2} for n in range(3)],
        "samples": [],
        "num_torn_lines": 0,
    }
    return RunFiles(**fields | changes)


def build_losses(*losses: Any) -> list[dict[str, Any]]:
    return [{"step": 10 * n, "eval_loss": loss} for n, loss in enumerate(losses)]


def spike_at(*steps: int) -> list[dict[str, Any]]:
    return [{"step": step, "grad_norm": 50.0 if step in steps else 1.0} for step in range(1, 41)]


def test_a_good_run_has_no_problems() -> None:
    assert find_problems(build_run()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"facts": {"status": "diverged"}}, "“diverged”"),
        ({"facts": {"rollbacks": [ROLLBACK]}}, "went back to step 25 and on without the rows of steps 26 to 29"),
        ({"train": []}, "No training step"),
        ({"train": [{"step": 3, "loss": "nan"}, {"step": 4, "loss": 1.0}]}, "loss was not finite at step 3."),
        ({"train": [{"step": n, "grad_norm": "inf"} for n in range(7)]}, "at steps 0, 1, 2, 3, 4 and 2 more"),
        ({"evaluations": build_losses(3.0, 2.0, 2.5)}, "lowest at step 10 (2) and rose to 2.5 by step 20"),
        ({"evaluations": build_losses(2.0, 2.5, 3.0)}, "made the held-out loss worse"),
        ({"evaluations": build_losses(3.0, "nan", 2.0)}, "held-out loss was not finite at step 10"),
        ({"evaluations": [{"step": n, "eval_stop_rate": 0.0} for n in (0, 10)]}, "No sample ended by itself"),
        ({"train": spike_at(30)}, "ten times its median at step 30"),
        ({"train": [{"step": n, "logps/chosen_shift": -0.1 * n} for n in range(7)]}, "lost 0.60 nats a token"),
        ({"num_torn_lines": 1}, "1 line was cut short"),
        ({"num_torn_lines": 2}, "2 lines were cut short"),
    ],
)
def test_a_problem_is_named_alone(changes: dict[str, Any], words: str) -> None:
    (problem,) = find_problems(build_run(**changes))

    assert words in problem


def test_large_gradients_of_the_warm_up_are_in_order() -> None:
    assert find_problems(build_run(train=spike_at(1, 2, 3))) == []


@pytest.mark.parametrize("losses", [(3.0, 2.0, 2.01), (1.0, -2.0, -1.99), (-1.0, -1.5, -2.0)])
def test_a_held_out_loss_that_rises_by_a_hair_or_falls_is_no_problem(losses: tuple[float, ...]) -> None:
    assert find_problems(build_run(evaluations=build_losses(*losses))) == []


def test_a_held_out_loss_below_0_that_rises_is_a_problem() -> None:
    (problem,) = find_problems(build_run(evaluations=build_losses(-1.0, -2.0, -1.9)))

    assert "lowest at step 10 (-2) and rose to -1.9 by step 20" in problem
