"""Preference losses: formulas of their papers in numpy, signs of gradients, extreme inputs, micro-batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recipes_lib.losses.preference import (
    PREFERENCE_LOSSES,
    REFERENCE_FREE,
    PreferenceBatch,
    PreferenceOptions,
    compute_preference_losses,
    compute_preference_metrics,
    compute_wpo_weights,
    sum_logps,
)

SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")
LN_4 = math.log(4)


def make_batch(chosen: Any, rejected: Any, num_tokens: int = 1, **fields: Any) -> PreferenceBatch:
    """Pairs whose log-ratios to the reference are ``chosen`` and ``rejected``."""
    chosen, rejected = (torch.as_tensor(ratios, dtype=torch.float64).reshape(-1) for ratios in (chosen, rejected))
    ref_chosen, ref_rejected = torch.full_like(chosen, -7.0), torch.full_like(rejected, -9.0)
    lengths = torch.full(chosen.shape, num_tokens)
    leaves = ((chosen + ref_chosen).requires_grad_(), (rejected + ref_rejected).requires_grad_())
    return PreferenceBatch(*leaves, lengths, lengths, ref_chosen, ref_rejected, **fields)


def make_pairs(num_pairs: int = 6) -> PreferenceBatch:
    generator = torch.Generator().manual_seed(0)
    figures = [-10 * torch.rand(num_pairs, generator=generator, dtype=torch.float64) - 1 for _ in range(4)]
    lengths = [torch.randint(1, 9, (num_pairs,), generator=generator) for _ in range(2)]
    leaves = [figure.requires_grad_() for figure in figures[:2]]
    return PreferenceBatch(*leaves, *lengths, *figures[2:])


def compute(name: str, batch: PreferenceBatch, **settings: Any) -> Tensor:
    settings.setdefault("label_smoothing", 0.1 if name in SMOOTHED else 0.0)
    return compute_preference_losses([name], [1.0], batch, PreferenceOptions(**settings))


def gradients_of(losses: Tensor, batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
    return torch.autograd.grad(losses.sum(), (batch.chosen_logps, batch.rejected_logps), materialize_grads=True)


def sigma(x: Any) -> Any:
    return np.exp(-np.logaddexp(0, -x))


def compare_log_odds(chosen: Any, rejected: Any) -> Any:
    log_odds = [np.log(np.exp(logp) / (1 - np.exp(logp))) for logp in (chosen, rejected)]
    return np.log(sigma(log_odds[0] - log_odds[1]))


# In the notation of the papers: log-ratios c and r of the chosen and the rejected answer, or log-probabilities where
# there is no reference; their means per token cm and rm; the gap g = beta (c - r); smoothing e.
FORMULAS: dict[str, Callable[[SimpleNamespace], Any]] = {
    "sigmoid": lambda x: -np.log(sigma(x.g)),
    "sigmoid_norm": lambda x: -np.log(sigma(x.beta * (x.cm - x.rm))),
    "hinge": lambda x: np.maximum(0, 1 - x.g),
    "ipo": lambda x: (x.cm - x.rm - 1 / (2 * x.beta)) ** 2,
    "exo_pair": lambda x: sigma(x.g) * np.log(sigma(x.g) / (1 - x.e)) + sigma(-x.g) * np.log(sigma(-x.g) / x.e),
    "nca_pair": lambda x: (
        -np.log(sigma(x.beta * x.c)) - 0.5 * np.log(sigma(-x.beta * x.c)) - 0.5 * np.log(sigma(-x.beta * x.r))
    ),
    "robust": lambda x: (-(1 - x.e) * np.log(sigma(x.g)) + x.e * np.log(sigma(-x.g))) / (1 - 2 * x.e),
    "bco_pair": lambda x: -np.log(sigma(x.beta * x.c)) - np.log(sigma(-x.beta * x.r)),
    "sppo_hard": lambda x: (x.c - 1 / (2 * x.beta)) ** 2 + (x.r + 1 / (2 * x.beta)) ** 2,
    "aot": lambda x: smooth(x.beta * (np.sort(x.pi_c - x.pi_r) - np.sort(x.ref_c - x.ref_r)), x.e),
    "aot_unpaired": lambda x: smooth(x.beta * (np.sort(x.c) - np.sort(x.r)), x.e),
    "apo_zero": lambda x: (1 - sigma(x.beta * x.c)) + sigma(x.beta * x.r),
    "apo_down": lambda x: sigma(x.beta * x.c) + (1 - sigma(x.g)),
    "discopop": lambda x: (1 - sigma(x.g / 0.05)) * -np.log(sigma(x.g)) + sigma(x.g / 0.05) * np.exp(-x.g),
    "sft": lambda x: -x.pi_c / x.num_c.mean(),
    "simpo": lambda x: -np.log(sigma(x.beta * (x.pi_cm - x.pi_rm) - 0.5)),
    "orpo": lambda x: -x.pi_cm - x.beta * compare_log_odds(x.pi_cm, x.pi_rm),
}


def smooth(gap: Any, share: float) -> Any:
    return -(1 - share) * np.log(sigma(gap)) - share * np.log(sigma(-gap))


# Gaps of up to 0.5, 4 and 45: near the start of training, within it, and where one answer is certain.
@pytest.mark.parametrize("beta", [0.05, 0.4, 4.5])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_preference_loss_equals_formula_of_paper(name: str, beta: float) -> None:
    batch = make_pairs()
    pi_c, pi_r, num_c, num_r, ref_c, ref_r = (
        getattr(batch, field.name).detach().numpy() for field in dataclasses.fields(batch)[:6]
    )
    c, r = pi_c - ref_c, pi_r - ref_r
    x = SimpleNamespace(pi_c=pi_c, pi_r=pi_r, ref_c=ref_c, ref_r=ref_r, num_c=num_c, c=c, r=r, beta=beta)
    x.g, x.e = beta * (c - r), 0.1
    x.cm, x.rm, x.pi_cm, x.pi_rm = c / num_c, r / num_r, pi_c / num_c, pi_r / num_r
    # rtol: the mean length of ``sft`` is a float32.
    np.testing.assert_allclose(compute(name, batch, beta=beta).detach(), FORMULAS[name](x), rtol=1e-7, atol=1e-12)


def make_unconstrained_batch(chosen: float, rejected: float, num_chosen: int, num_rejected: int) -> PreferenceBatch:
    leaves = (torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (chosen, rejected))
    return PreferenceBatch(*leaves, torch.tensor([num_chosen]), torch.tensor([num_rejected]))


@pytest.mark.parametrize("chosen", [0.0, -1e-30, -1e-9, -1e-4, -1.0, -50.0, -800.0])
@pytest.mark.parametrize("rejected", [0.0, -1e-9, -1.0, -800.0])
def test_orpo_is_finite_for_extreme_probabilities(chosen: float, rejected: float) -> None:
    batch = make_unconstrained_batch(chosen, rejected, 1, 1)
    assert_finite("orpo", batch, beta=0.3)


def assert_finite(name: str, batch: PreferenceBatch, **settings: Any) -> None:
    """Loss and gradients, in both precisions."""
    leaves = {"chosen_logps": batch.chosen_logps.float(), "rejected_logps": batch.rejected_logps.float()}
    for pairs in (batch, dataclasses.replace(batch, **leaves)):
        loss = compute(name, pairs, **settings)
        assert loss.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in gradients_of(loss, batch))


@pytest.mark.parametrize("ratio", [-3000.0, -100.0, 100.0, 3000.0])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_losses_and_gradients_are_finite_far_from_reference(name: str, ratio: float) -> None:
    assert_finite(name, make_batch([ratio, 0.0], [0.0, ratio]), beta=0.5)


@pytest.mark.parametrize("divergence", ["forward_kl", "alpha_divergence"])
def test_f_divergence_is_bounded_where_power_overflows(divergence: str) -> None:
    assert_finite("sigmoid", make_batch([-1000.0, 1000.0], [1000.0, -1000.0]), f_divergence_type=divergence)


@pytest.mark.parametrize("alpha", [1 - 1e-12, 1.0, 1 + 1e-12])
def test_alpha_divergence_near_1_is_reverse_kl(alpha: float) -> None:
    batch = make_batch([3.0, -40.0], [-2.0, 70.0])
    settings = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": alpha}
    torch.testing.assert_close(compute("hinge", batch, **settings), compute("hinge", batch))


def compute_slope_at_optimum(name: str, *, share: float, gap: float, **settings: Any) -> float:
    """Slope at ``beta * gap`` of the expected loss when ``share`` of the raters prefer the first of two answers."""
    batch = make_batch(gap / 0.1, 0.0)
    flipped = dataclasses.replace(
        batch,
        chosen_logps=batch.rejected_logps,
        rejected_logps=batch.chosen_logps,
        ref_chosen_logps=batch.ref_rejected_logps,
        ref_rejected_logps=batch.ref_chosen_logps,
    )
    expected = share * compute(name, batch, **settings) + (1 - share) * compute(name, flipped, **settings)
    return gradients_of(expected, batch)[0].item()


@pytest.mark.parametrize(
    ("name", "share", "settings"),
    [
        ("sigmoid", 0.8, {}),
        # A tenth of the labels of an 80/20 preference are wrong: the correction finds 80/20 again.
        ("robust", 0.8 * 0.9 + 0.2 * 0.1, {"label_smoothing": 0.1}),
        # Smoothing claims that a fifth of the unanimous labels are wrong.
        ("aot", 1.0, {"label_smoothing": 0.2}),
        ("aot_unpaired", 1.0, {"label_smoothing": 0.2}),
        ("exo_pair", 1.0, {"label_smoothing": 0.2}),
    ],
)
def test_optimum_of_noisy_preference_is_log_odds(name: str, share: float, settings: dict[str, Any]) -> None:
    below, at, above = (
        compute_slope_at_optimum(name, share=share, gap=gap, **settings) for gap in (LN_4 - 0.1, LN_4, LN_4 + 0.1)
    )
    assert below < -1e-4
    assert at == pytest.approx(0, abs=1e-12)
    assert above > 1e-4


def test_preference_metrics_per_pair() -> None:
    # The last pair is one of a policy that equals its reference.
    batch = make_batch([1.0, -3.0, 0.0], [-1.0, -2.0, 0.0], num_tokens=2)
    metrics = {name: figure.tolist() for name, figure in compute_preference_metrics(batch, 0.1).items()}
    assert metrics["rewards/chosen"] == pytest.approx([0.1, -0.3, 0])
    assert metrics["rewards/rejected"] == pytest.approx([-0.1, -0.2, 0])
    assert metrics["rewards/margins"] == pytest.approx([0.2, -0.1, 0])
    assert metrics["rewards/accuracies"] == [1, 0, 0]
    assert metrics["logps/chosen"] == [-6, -10, -7]
    assert metrics["logps/rejected"] == [-10, -11, -9]
    assert metrics["logps/chosen_per_token"] == [-3, -5, -3.5]
    assert metrics["logps/rejected_per_token"] == [-5, -5.5, -4.5]
    assert not any(figure.requires_grad for figure in compute_preference_metrics(batch, 0.1).values())


def test_reference_free_reward_is_mean_logp() -> None:
    metrics = compute_preference_metrics(make_unconstrained_batch(-3.0, -4.0, 3, 2), 2.0)
    assert metrics["rewards/chosen"].item() == pytest.approx(-2.0)
    assert metrics["rewards/rejected"].item() == pytest.approx(-4.0)


def select_pairs(batch: PreferenceBatch, pairs: slice) -> PreferenceBatch:
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return PreferenceBatch(**{k: v[pairs] if v is not None and v.ndim else v for k, v in fields.items()})


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES.keys() - {"aot", "aot_unpaired"}))
def test_preference_loss_is_independent_of_micro_batches(name: str) -> None:
    batch = make_pairs()
    batch = dataclasses.replace(batch, mean_chosen_tokens=batch.num_chosen_tokens.double().mean())
    parts = [compute(name, select_pairs(batch, pairs)) for pairs in (slice(0, 1), slice(1, 6), slice(6, 6))]
    torch.testing.assert_close(torch.cat(parts), compute(name, batch))


def test_nll_may_cover_more_tokens_than_comparison() -> None:
    batch = make_pairs()
    longer = dataclasses.replace(batch, chosen_nll=-batch.chosen_logps + 2 * batch.num_chosen_tokens)
    added = {name: (compute(name, longer) - compute(name, batch)).tolist() for name in PREFERENCE_LOSSES}
    assert added.pop("orpo") == pytest.approx([2] * 6)
    assert sum(added.pop("sft")) == pytest.approx(2 * 6)
    assert set(map(tuple, added.values())) == {(0.0,) * 6}


@pytest.mark.parametrize(
    ("name", "moved"),
    [("aot", ("ref_chosen_logps", "ref_rejected_logps")), ("aot_unpaired", ("chosen_logps", "ref_chosen_logps"))],
)
def test_aot_compares_sorted_ratios(name: str, moved: tuple[str, str]) -> None:
    batch = make_pairs()
    order = torch.tensor([3, 1, 0, 5, 2, 4])
    shuffled = dataclasses.replace(batch, **{field: getattr(batch, field)[order] for field in moved})
    torch.testing.assert_close(compute(name, shuffled), compute(name, batch))
    assert not torch.equal(compute("sigmoid", shuffled), compute("sigmoid", batch))


def test_losses_and_pairs_are_weighted() -> None:
    batch, factors = make_pairs(), torch.linspace(0.1, 2.0, 6, dtype=torch.float64)
    options = PreferenceOptions(beta=0.2)
    mixed = compute_preference_losses(["sigmoid", "sft"], [0.7, 2.0], batch, options)
    parts = [compute_preference_losses([name], [1.0], batch, options) for name in ("sigmoid", "sft")]
    torch.testing.assert_close(mixed, 0.7 * parts[0] + 2.0 * parts[1])
    weighted = compute_preference_losses(["sigmoid"], [1.0], dataclasses.replace(batch, weights=factors), options)
    torch.testing.assert_close(weighted, factors * parts[0])
    with pytest.raises(ValueError, match="zip"):
        compute_preference_losses(["sigmoid", "sft"], [1.0], batch, options)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_reference_is_required_only_by_losses_that_declare_it(name: str) -> None:
    batch = make_pairs()
    free = dataclasses.replace(batch, ref_chosen_logps=None, ref_rejected_logps=None)
    if name in REFERENCE_FREE:
        torch.testing.assert_close(compute(name, free), compute(name, batch))
    else:
        with pytest.raises(ValueError, match="compares with a reference"):
            compute(name, free)
        moved = dataclasses.replace(batch, ref_rejected_logps=batch.ref_rejected_logps * 1.1 - 1)
        assert not torch.equal(compute(name, moved), compute(name, batch))


TOKEN_LOGPS = torch.tensor([-1.0, -2.0, -4.0, -8.0, -16.0, -32.0, -64.0], dtype=torch.float64)
# Two pairs: sequences 0 and 1 are preferred to 2 and 3; their tokens are interleaved.
SEQUENCE_IDS = torch.tensor([2, 0, 0, 2, 3, 0, 1])


def test_logps_are_summed_by_sequence() -> None:
    logps = TOKEN_LOGPS.clone().requires_grad_()
    sums = sum_logps(logps, SEQUENCE_IDS, 5)
    assert sums.tolist() == [-38, -64, -9, -16, 0]
    (gradient,) = torch.autograd.grad((sums * torch.arange(1.0, 6.0)).sum(), logps)
    assert gradient.tolist() == [3, 1, 1, 3, 4, 1, 2]


def test_ld_alpha_weights_tokens_beyond_shorter_answer() -> None:
    logps = TOKEN_LOGPS.clone().requires_grad_()
    sums = sum_logps(logps, SEQUENCE_IDS, 4, ld_alpha=0.25)
    assert sums.tolist() == [-6 - 0.25 * 32, -64, -9, -16]
    (gradient,) = torch.autograd.grad(sums.sum(), logps)
    assert gradient.tolist() == [1, 1, 1, 1, 1, 0.25, 1]
    assert torch.equal(sum_logps(logps, SEQUENCE_IDS, 4, ld_alpha=1.0), sum_logps(logps, SEQUENCE_IDS, 4))
    # The rejected answer is the longer one here.
    assert sum_logps(logps, (SEQUENCE_IDS + 2) % 4, 4, ld_alpha=0.0).tolist() == [-9, -16, -6, -64]
    assert sum_logps(logps[:0], SEQUENCE_IDS[:0], 4, ld_alpha=0.5).tolist() == [0, 0, 0, 0]


def test_wpo_weights_pairs_by_geometric_mean_probability() -> None:
    logps = TOKEN_LOGPS.clone().requires_grad_()
    log_sum_sq_probs = torch.tensor([-1.0, -1.0, -3.0, -6.0, -15.0, -31.0, -60.0], dtype=torch.float64)
    weights = compute_wpo_weights(logps, log_sum_sq_probs, SEQUENCE_IDS, 4)
    assert not weights.requires_grad
    # Aligned: sequence 0 has (-1, -1, -1), 1 has (-4), 2 has (0, -2), 3 has (-1).
    assert weights.tolist() == pytest.approx([math.exp(-1 - 1), math.exp(-4 - 1)])
