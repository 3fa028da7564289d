"""What an iteration learns from is what the formulas say."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.rl.test_rollout import build_rollout

from recipes_lib.config.schema import PPOConfig
from recipes_lib.rl.advantages import compute_targets


def test_an_iterations_targets_are_those_of_their_definition():
    """Whitened advantages, returns that are not; penalty and KL in their sum."""
    rollout, config = build_rollout([(3, 4), (2, 1), (2, 3)]), PPOConfig(gamma=0.9, lam=0.8)
    targets = compute_targets(rollout, config, 0.5, 0.1)
    kl = ((rollout.logps - rollout.ref_logps) * rollout.mask).double().numpy()
    scores = rollout.scores.double().numpy() - 0.5 * (~rollout.finished).numpy()
    np.testing.assert_allclose(targets.total, scores - 0.1 * kl.sum(1), atol=1e-6)
    advantages = np.zeros(kl.shape)
    for row, length in enumerate([4, 1, 3]):
        rewards, values = -0.1 * kl[row, :length], np.append(rollout.values[row, :length].double().numpy(), 0)
        rewards[-1] += scores[row]
        deltas = rewards + 0.9 * values[1:] - values[:-1]
        for t in range(length):
            advantages[row, t] = sum(0.72 ** (k - t) * deltas[k] for k in range(t, length))
    mask = rollout.mask.numpy()
    np.testing.assert_allclose(targets.rollout.returns, (advantages + rollout.values.numpy()) * mask, atol=1e-6)
    kept = advantages[mask]
    np.testing.assert_allclose(targets.rollout.advantages[rollout.mask], (kept - kept.mean()) / kept.std(), atol=1e-5)


def test_whitened_rewards_keep_their_mean():
    """Divided by their standard deviation around it, so that answers that earn nothing do not seem to cost."""
    rollout = build_rollout([(3, 4), (2, 1), (2, 3)])
    plain, whitened = (
        compute_targets(rollout, PPOConfig(gamma=1.0, lam=1.0, whiten_rewards=whiten), 0.5, 0.1)
        for whiten in (False, True)
    )
    # With gamma and lam of 1 what a return loses from token to token is the reward of the token.
    after = torch.nn.functional.pad(plain.rollout.returns, (0, 1))[:, 1:]
    rewards = (plain.rollout.returns - after)[rollout.mask].double().numpy()
    white = (rewards - rewards.mean()) / rewards.std() + rewards.mean()
    expected = np.zeros(rollout.mask.shape)
    expected[rollout.mask.numpy()] = white
    # A return is the sum of the rewards from its token on.
    expected = expected[:, ::-1].cumsum(1)[:, ::-1] * rollout.mask.numpy()
    assert abs(rewards.mean()) > 0.1
    np.testing.assert_allclose(whitened.rollout.returns, expected, atol=1e-5)
    assert torch.equal(whitened.total, plain.total)


@pytest.mark.parametrize("whiten_rewards", [False, True])
def test_answers_that_are_not_scored_change_no_target(whiten_rewards):
    """Whatever else is known of them: the others have what they would have alone."""
    rollout, config = build_rollout([(3, 4), (2, 5), (2, 3), (4, 2)]), PPOConfig(whiten_rewards=whiten_rewards)
    scored = torch.tensor([True, False, True, True])
    among = compute_targets(dataclasses.replace(rollout, scored=scored), config, 0.5, 0.1)
    alone = compute_targets(rollout.take([0, 2, 3]), config, 0.5, 0.1)
    torch.testing.assert_close(among.rollout.advantages[scored, :4], alone.rollout.advantages)
    torch.testing.assert_close(among.rollout.returns[scored, :4], alone.rollout.returns)
    torch.testing.assert_close(among.total[scored], alone.total)
    assert not among.rollout.advantages[~scored].any()
