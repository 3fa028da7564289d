"""Bradley-Terry loss: closed forms, and log odds as its optimum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recipes_lib.losses.preference import compute_bradley_terry


def scores(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("chosen", "rejected", "options", "expected"),
    [
        (0.4, 0.4, {}, 0.693147),
        (1.0, 0.0, {}, 0.313262),
        (1.0, 0.0, {"margins": torch.tensor([0.5])}, 0.474077),
        (2.0, 1.0, {"center_coefficient": 0.01}, 0.313262 + 0.09),
        (2.0, 1.0, {"label_smoothing": 0.2}, 0.313262 + 0.2),
        (-500.0, 500.0, {}, 1000.0),
    ],
)
def test_bradley_terry_closed_forms(chosen: float, rejected: float, options: dict[str, Any], expected: float) -> None:
    loss = compute_bradley_terry(scores(chosen), scores(rejected), **options)
    assert loss.shape == (1,)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_loss_is_per_pair() -> None:
    generator = np.random.default_rng(0)
    chosen, rejected, margins = generator.normal(size=(3, 16)) * 3
    ours = compute_bradley_terry(
        *map(torch.from_numpy, (chosen, rejected)),
        margins=torch.from_numpy(margins),
        label_smoothing=0.1,
        center_coefficient=0.02,
    )
    preferred = 1 / (1 + np.exp(-(chosen - rejected - margins)))
    expected = -0.9 * np.log(preferred) - 0.1 * np.log(1 - preferred) + 0.02 * (chosen + rejected) ** 2
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-12)


def test_half_precision_scores_are_compared_in_float32() -> None:
    chosen, rejected = torch.tensor([100.5]).bfloat16(), torch.tensor([99.0]).bfloat16()
    loss = compute_bradley_terry(chosen, rejected)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log1p(math.exp(-(chosen - rejected).item())), rel=1e-6)
