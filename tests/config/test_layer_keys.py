"""What is learnt from a teacher's layers needs its layers; options need the part that they belong to."""

from __future__ import annotations

import pytest

from recipes_lib.config.schema import WEIGHTS, LayersConfig


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        *((f"teacher_top_k: 64\nattn_implementation: eager\n{key}: 0.1", 7, "the teacher's layers") for key in WEIGHTS),
        ("attention_weight: 1.0", 5, "write `attn_implementation: eager`"),
        ("attention_weight: 1.0\nattn_implementation: sdpa", 5, "write `attn_implementation: eager`"),
        ("feature_loss: cosine", 5, "`feature_loss` has no effect: `feature_weight` is 0.0"),
        ("angle_weight: 1.0\nfeature_layers: [1]", 6, "`feature_layers` has no effect"),
        ("feature_weight: 1.0\nrelation_layers: [1]", 6, "`relation_layers` has no effect"),
        ("projection_learning_rate: 0.1", 5, "has no effect"),
        ("feature_weight: -1.0", 5, "feature_weight"),
        ("feature_weight: 1.0\nfeature_layers: [0, 1]", 6, "indices start at 1"),
        ("feature_weight: 1.0\nfeature_layers: [2, 2]", 6, "must be distinct"),
        ("feature_weight: 1.0\nfeature_layers: []", 6, "indices start at 1"),
        ("similarity_weight: 1.0\ntorch_compile: true", 6, "drops the forward hooks of `similarity_weight`"),
        ("feature_weight: 1.0\nfeature_loss: mae", 6, "mse, cosine"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_at_its_line(problems_of, lines: str, line: int, words: str) -> None:
    (problem,) = problems_of(lines + "\n", recipe="distill")
    assert problem.where == f"recipe.yaml:{line}"
    assert words in problem.found + problem.remedy
    assert problem.remedy


@pytest.mark.parametrize(
    "lines",
    [
        "feature_weight: 0.1\nfeature_loss: cosine\nfeature_layers: [2, 4]\nprojection_learning_rate: 0.01",
        "attention_weight: 1.0\nattn_implementation: eager",
        "similarity_weight: 1\ndistance_weight: 2\nangle_weight: 0.5\nrelation_layers: [3]",
    ],
)
def test_any_sum_of_parts_passes(problems_of, lines: str) -> None:
    assert not problems_of(lines + "\n", recipe="distill")


def test_no_part_is_on_unasked() -> None:
    assert not any(getattr(LayersConfig(), key) for key in WEIGHTS)


def test_the_keys_are_those_of_distillation(problems_of) -> None:
    (problem,) = problems_of("feature_weight: 1.0\n", recipe="sft")
    assert "`distill` recipe" in problem.remedy
