"""Keys of distillation that contradict each other, or that are spelt as elsewhere, say what to write."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        (
            "teacher_top_k: 64\nmax_steps: 9\nwarmup_steps: 0\ndataset_streaming: true\nmax_length: 64",
            5,
            "looked up by row",
        ),
        ("beta: 0.5", 5, "`distillation_beta`"),
        ("temperature: 2.0", 5, "`distillation_temperature`"),
        ("max_completion_length: 64", 5, "`response_length`"),
        ("lmbda: 0.5\nteacher_top_k: 64", 6, "sampled answers are new"),
        ("lmbda: 1.5", 5, "lmbda"),
        ("lmbda: 0.5\nsampling_temperature: 0", 6, "sampling_temperature"),
        ("distillation_beta: 1.5", 5, "distillation_beta"),
        ("distillation_alpha: 1.0", 5, "distillation_alpha"),
        ("teacher_top_k: 0", 5, "teacher_top_k"),
    ],
)
def test_what_cannot_be_is_refused_at_its_line(problems_of, lines: str, line: int, words: str) -> None:
    (problem,) = problems_of(lines + "\n", recipe="distill")
    assert problem.where == f"recipe.yaml:{line}"
    assert words in problem.found + problem.remedy
    assert problem.remedy


@pytest.mark.parametrize(
    "lines",
    [
        "teacher_top_k: 64",
        "distillation_beta: 0",
        "distillation_beta: 1",
        "lmbda: 1\nresponse_length: 64",
        "lmbda: 0\nteacher_top_k: 64",
    ],
)
def test_what_agrees_passes(problems_of, lines: str) -> None:
    assert not problems_of(lines + "\n", recipe="distill")
