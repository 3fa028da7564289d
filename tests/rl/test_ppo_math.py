"""PPO's formulas against closed forms worked out by hand and references written in numpy, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recipes_lib.rl.ppo_math import (
    KLController,
    compute_advantages,
    compute_explained_variance,
    compute_importance_weights,
    compute_policy_loss,
    compute_rewards,
    compute_value_loss,
    estimate_kl,
    penalise_missing_end,
    whiten,
)


def tensor(*rows: list[float] | tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def mask(*rows: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


REWARDS, VALUES, ALL = tensor([0.0, 0.0, 1.0]), tensor([0.5, 0.6, 0.7]), mask((1, 1, 1))


@pytest.mark.parametrize(
    ("gamma", "lam", "advantages", "returns"),
    [
        (1.0, 0.95, (0.46575, 0.385, 0.3), (0.96575, 0.985, 1.0)),
        (1.0, 1.0, (0.5, 0.4, 0.3), (1.0, 1.0, 1.0)),
        (1.0, 0.0, (0.1, 0.1, 0.3), (0.6, 0.7, 1.0)),
        (0.9, 0.8, (0.21712, 0.246, 0.3), (0.71712, 0.846, 1.0)),
    ],
)
def test_advantages_worked_out_by_hand(gamma, lam, advantages, returns):
    got = compute_advantages(REWARDS, VALUES, ALL, gamma=gamma, lam=lam)
    torch.testing.assert_close(got[0], tensor(advantages), rtol=0, atol=1e-12)
    torch.testing.assert_close(got[1], tensor(returns), rtol=0, atol=1e-12)


def test_the_score_stands_at_the_last_token_and_not_one_later():
    """One slot later, over a value of 0.8 there, the first advantage would be .456725."""
    got, _ = compute_advantages(REWARDS, VALUES, ALL, gamma=1.0, lam=0.95)
    assert got[0, 0] == pytest.approx(0.46575)
    rewards = compute_rewards(tensor([2.0, 3.0])[0], tensor([0.0] * 3, [0.0] * 3), mask((1, 1, 0), (1, 1, 1)), 0.1)
    assert rewards.tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, 3.0]]


def test_padding_and_gaps_are_passed_over():
    expected, _ = compute_advantages(REWARDS, VALUES, ALL, gamma=0.9, lam=0.8)
    padded, returns = compute_advantages(
        tensor([0.0, 0.0, 1.0, 9.0, 9.0]), tensor([0.5, 0.6, 0.7, 5.0, 5.0]), mask((1, 1, 1, 0, 0)), gamma=0.9, lam=0.8
    )
    assert torch.equal(padded[:, :3], expected)
    assert not padded[:, 3:].any()
    assert not returns[:, 3:].any()
    gap, _ = compute_advantages(
        tensor([0.0, 0.0, 9.0, 1.0]), tensor([0.5, 0.6, 5.0, 0.7]), mask((1, 1, 0, 1)), gamma=0.9, lam=0.8
    )
    assert torch.equal(gap[:, [0, 1, 3]], expected)


def test_advantages_are_the_double_sum_of_their_definition():
    random = np.random.default_rng(0)
    rewards, values, gamma, lam = random.normal(size=(4, 7)), random.normal(size=(4, 7)), 0.97, 0.9
    lengths = [7, 1, 3, 5]
    expected = np.zeros((4, 7))
    for row, length in enumerate(lengths):
        ahead = np.append(values[row, 1:length], 0.0)
        deltas = rewards[row, :length] + gamma * ahead - values[row, :length]
        for t in range(length):
            expected[row, t] = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length))
    is_token = torch.arange(7)[None] < torch.tensor(lengths)[:, None]
    got, returns = compute_advantages(
        torch.from_numpy(rewards), torch.from_numpy(values), is_token, gamma=gamma, lam=lam
    )
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(returns.numpy(), (expected + values) * is_token.numpy(), atol=1e-12)


def test_rewards_sum_to_the_score_less_the_priced_kl():
    random = np.random.default_rng(1)
    kl, scores = random.normal(size=(3, 5)), random.normal(size=3)
    lengths = np.array([5, 1, 3])
    is_token = np.arange(5)[None] < lengths[:, None]
    rewards = compute_rewards(torch.from_numpy(scores), torch.from_numpy(kl), torch.from_numpy(is_token), 0.3)
    np.testing.assert_allclose(rewards.sum(1).numpy(), scores - 0.3 * (kl * is_token).sum(1), atol=1e-12)
    assert not rewards[~torch.from_numpy(is_token)].any()


def test_whitening_is_biased_and_knows_no_padding():
    white = whiten(tensor([1.0, 2.0, 3.0, 100.0]), mask((1, 1, 1, 0)))
    torch.testing.assert_close(white, tensor([-1.2247449, 0.0, 1.2247449, 0.0]), rtol=0, atol=1e-7)
    rows = whiten(tensor([1.0, 2.0], [3.0, 100.0]), mask((1, 1), (1, 0)))
    torch.testing.assert_close(rows, tensor([-1.2247449, 0.0], [1.2247449, 0.0]), rtol=0, atol=1e-7)
    kept = whiten(tensor([1.0, 2.0, 3.0]), ALL, shift_mean=False)
    torch.testing.assert_close(kept, tensor([0.7752551, 2.0, 3.2247449]), rtol=0, atol=1e-7)


@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0]])
def test_what_is_all_alike_whitens_to_nothing(values):
    assert not whiten(tensor(values), torch.ones(1, len(values), dtype=torch.bool)).any()


def policy_loss(ratio: float, advantage: float, **options) -> tuple[float, float]:
    logps = tensor([np.log(ratio)]).requires_grad_()
    options = {"cliprange": 0.2, "num_tokens": 1} | options
    got = compute_policy_loss(logps, tensor([0.0]), tensor([advantage]), mask((1,)), **options)
    got.loss.backward()
    assert logps.grad is not None
    return got.loss.item(), logps.grad.item() / ratio


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.5, 1.0, -1.2, 0.0),
        (0.5, 1.0, -0.5, -1.0),
        (1.5, -1.0, 1.5, 1.0),
        (0.5, -1.0, 0.8, 0.0),
        (1.0, 2.0, -2.0, -2.0),
        (5.0, -1.0, 5.0, 1.0),
    ],
)
def test_the_clipped_loss_and_its_slope(ratio, advantage, loss, slope):
    assert policy_loss(ratio, advantage) == pytest.approx((loss, slope))


def test_the_dual_clip_bounds_the_loss_of_a_bad_token_alone():
    assert policy_loss(5.0, -1.0, dual_clip=3.0) == pytest.approx((3.0, 0.0))
    assert policy_loss(1.5, -1.0, dual_clip=3.0) == pytest.approx((1.5, 1.0))
    assert policy_loss(0.5, 1.0, dual_clip=3.0) == pytest.approx((-0.5, -1.0))


def test_the_policys_figures_count_tokens():
    logps = tensor([np.log(1.5), np.log(0.5), np.log(1.1), np.log(9.0)])
    got = compute_policy_loss(
        logps, torch.zeros_like(logps), tensor([1.0, -1.0, 1.0, 1.0]), mask((1, 1, 1, 0)), cliprange=0.2, num_tokens=3
    )
    assert (int(got.num_high), int(got.num_low)) == (1, 1)
    ratios = np.array([1.5, 0.5, 1.1])
    assert got.kl_sum.item() == pytest.approx((ratios - 1 - np.log(ratios)).sum())
    assert got.max_ratio_shift.item() == pytest.approx(0.5)


def test_weights_of_the_engine_are_cut_off_and_without_gradient():
    logps = tensor([0.5, 1.5, 3.0]).requires_grad_()
    weights = compute_importance_weights(logps, tensor([0.0, 0.0, 0.0]), mask((1, 1, 0)), cap=2.0)
    torch.testing.assert_close(weights, tensor([1.6487212707, 2.0, 0.0]), rtol=0, atol=1e-9)
    assert not weights.requires_grad
    assert policy_loss(1.0, 2.0, weights=tensor([0.5])) == pytest.approx((-1.0, -1.0))


@pytest.mark.parametrize(
    ("value", "old", "target", "loss"), [(1.0, 0.5, 0.9, 0.02), (0.6, 0.5, 0.9, 0.045), (0.2, 0.5, 0.4, 0.02)]
)
def test_the_clipped_value_loss(value, old, target, loss):
    got = compute_value_loss(tensor([value]), tensor([old]), tensor([target]), mask((1,)), cliprange=0.2, num_tokens=1)
    assert got.loss.item() == pytest.approx(loss)
    assert got.num_clipped == (value == 1.0)
    free = compute_value_loss(
        tensor([value]), tensor([old]), tensor([target]), ALL[:, :1], cliprange=None, num_tokens=1
    )
    assert free.loss.item() == pytest.approx(0.5 * (value - target) ** 2)


def test_the_mean_is_over_the_tokens_of_the_step_however_it_is_cut():
    """Rows (4) and (1, 1, 1): 1.75 by tokens; 2.5 by rows, or by parts of a row each, would be wrong."""
    advantages, is_token = tensor([-4.0, 9.0, 9.0], [-1.0, -1.0, -1.0]), mask((1, 0, 0), (1, 1, 1))
    zeros = torch.zeros_like(advantages)

    def loss(rows: slice) -> float:
        part = compute_policy_loss(
            zeros[rows], zeros[rows], advantages[rows], is_token[rows], cliprange=0.2, num_tokens=4
        )
        return part.loss.item()

    assert loss(slice(0, 2)) == 1.75
    assert loss(slice(0, 1)) + loss(slice(1, 2)) == 1.75


@pytest.mark.parametrize(("kl", "expected"), [(12.0, 0.150768), (6.0, 0.15), (3.0, 0.149232), (6.6, 0.150384)])
def test_the_price_of_kl_follows_its_target(kl, expected):
    controller = KLController(0.15, target_per_sequence=6.0, horizon=10_000)
    controller.update(kl, 256)
    assert controller.kl_coef == pytest.approx(expected, abs=1e-9)
    fixed = KLController(0.15, target_per_sequence=None, horizon=10_000)
    fixed.update(kl, 256)
    assert fixed.kl_coef == 0.15


P, Q = tensor([0.5, 0.3, 0.2])[0], tensor([0.2, 0.5, 0.3])[0]


def test_the_estimator_in_the_reward_has_the_gradient_of_kl():
    """As a reward, an estimator's gradient is sum_a p(a) grad log p(a) k(a); only k1's is that of KL(p || q)."""
    k1 = estimate_kl(P.log(), Q.log())
    torch.testing.assert_close(k1, tensor([0.916291, -0.510826, -0.405465])[0], rtol=0, atol=1e-6)
    assert (P * k1).sum().item() == pytest.approx(0.223805, abs=1e-6)

    logits = P.log().requires_grad_()
    p = logits.softmax(0)
    (p * (p / Q).log()).sum().backward()
    expected = torch.tensor([0.346243, -0.220389, -0.125854], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-6)

    def gradient_as_reward(k: torch.Tensor) -> torch.Tensor:
        logits = P.log().requires_grad_()
        (P * logits.log_softmax(0) * k).sum().backward()
        assert logits.grad is not None
        return logits.grad

    k2, k3 = k1**2 / 2, Q / P - 1 + k1
    torch.testing.assert_close(gradient_as_reward(k1), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient_as_reward(k3), expected + Q - P, rtol=0, atol=1e-6)
    wrong = torch.tensor([0.077158, -0.040502, -0.036656], dtype=torch.float64)
    torch.testing.assert_close(gradient_as_reward(k2), wrong, rtol=0, atol=1e-6)


def test_as_a_loss_the_estimators_have_other_gradients():
    """k1: none; k2: that of KL; k3: ``p - q``, that of KL the other way round."""
    for power, expected in ((1, [0.0, 0.0, 0.0]), (2, [0.346243, -0.220389, -0.125854]), (3, [0.3, -0.2, -0.1])):
        logits = P.log().requires_grad_()
        k1 = estimate_kl(logits.log_softmax(0), Q.log())
        k = {1: k1, 2: k1**2 / 2, 3: (-k1).exp() - 1 + k1}[power]
        (P * k).sum().backward()
        assert logits.grad is not None
        torch.testing.assert_close(logits.grad, tensor(expected)[0], rtol=0, atol=1e-6)


def test_an_answer_that_ran_into_the_limit_is_charged():
    assert penalise_missing_end(tensor([1.0, 1.0])[0], mask((1, 0))[0], 0.75).tolist() == [1.0, 0.25]


def test_explained_variance():
    returns, is_token = tensor([1.0, 2.0, 3.0, 50.0]), mask((1, 1, 1, 0))
    assert compute_explained_variance(returns, returns, is_token) == 1
    assert compute_explained_variance(torch.full_like(returns, 7.0), returns, is_token) == pytest.approx(0)
    assert compute_explained_variance(-returns, returns, is_token) == pytest.approx(-3)
    assert compute_explained_variance(returns, torch.ones_like(returns), is_token) == 0
