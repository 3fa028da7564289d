"""Metrics of an iteration, compared with numpy; checks before the first update; warnings about answers."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from math import nan

import numpy as np
import pytest
import torch
from tests.rl.test_rollout import build_rollout

from recipes_lib.errors import DivergedError
from recipes_lib.rl.monitor import (
    AnswerWatch,
    average_steps,
    correlate,
    describe_rollout,
    describe_values,
    measure_unique_grams,
    verify_first_minibatch,
    verify_first_rollout,
)
from recipes_lib.rl.objectives import PolicyObjective

LENGTHS = [(3, 5), (7, 1), (1, 4), (4, 2)]


def test_rollout_metrics_match_numpy_and_ignore_padding():
    rollout, total = build_rollout(LENGTHS), torch.tensor([1.0, 2.0, 3.0, 6.0])
    figures = describe_rollout(rollout, ["only"], total, PolicyObjective())
    mask = rollout.mask.numpy()
    kl = (rollout.logps - rollout.ref_logps).numpy() * mask
    assert figures["objective/kl_seq"] == pytest.approx(kl.sum() / 4, abs=1e-6)
    assert figures["objective/kl_token"] == pytest.approx(kl.sum() / 12, abs=1e-6)
    gap = (rollout.engine_logps - rollout.logps).numpy() * mask
    assert figures["rollout/engine_mismatch_kl"] == pytest.approx(gap.sum() / 12, abs=1e-6)
    assert figures["objective/length"] == 3
    assert figures["objective/reward_total"] == 3
    assert figures["objective/score_std"] == pytest.approx(rollout.scores.numpy().std(), abs=1e-6)
    expected = np.corrcoef(rollout.scores.numpy(), [5, 1, 4, 2])[0, 1]
    assert figures["objective/score_length_correlation"] == pytest.approx(expected, abs=1e-6)
    weights = np.minimum(np.exp((rollout.logps - rollout.engine_logps).numpy()), 2)[mask]
    assert figures["rollout/is_weight_mean"] == pytest.approx(weights.mean(), abs=1e-6)
    assert "objective/score/only" not in figures
    two = dataclasses.replace(rollout, rewards=torch.tensor([[1.0, 2.0]] * 4))
    assert describe_rollout(two, ["one", "other"], total, PolicyObjective())["objective/score/other"] == 2


def test_score_metrics_use_scored_answers_only():
    scored = torch.tensor([True, False, True, False])
    rewards = torch.tensor([[1.0, 2.0], [nan, nan], [nan, 4.0], [nan, nan]])
    rollout, total = build_rollout(LENGTHS), torch.tensor([1.0, 9.0, 3.0, 9.0])
    some = dataclasses.replace(rollout, scored=scored, rewards=rewards, returns=rollout.returns)
    figures = describe_rollout(some, ["one", "other"], total, PolicyObjective())
    assert figures["objective/score"] == pytest.approx(float(rollout.scores[scored].mean()))
    assert (figures["objective/score/one"], figures["objective/score/other"]) == (1, 3)
    assert figures["objective/reward_total"] == 2
    assert (figures["objective/length"], figures["objective/finish_rate"]) == (
        3,
        float(rollout.finished.float().mean()),
    )
    expected = describe_values(rollout.take([0, 2]))
    assert describe_values(some) == pytest.approx(expected, abs=1e-6)
    nothing = dataclasses.replace(some, scored=scored & False, rewards=rewards * nan)
    unscored = describe_rollout(nothing, ["one", "other"], total, PolicyObjective())
    assert not any("score" in name or "reward" in name for name in unscored)
    assert unscored["objective/kl_seq"] == figures["objective/kl_seq"]
    assert describe_values(nothing) == {}


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 1.0),
        ([7.0, 7.0, 7.0], [1.0, 2.0, 3.0], 0.0),
        ([-1.0, -2.0, -3.0], [1.0, 2.0, 3.0], -3.0),
        ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], 0.0),
    ],
)
def test_explained_variance_of_scored_answers(values, returns, expected):
    rollout = dataclasses.replace(build_rollout([(1, 3), (1, 3)]), scored=torch.tensor([True, False]))
    # Those of the second answer, which has no score, do not count.
    values, returns = (torch.tensor([row, [50.0, 0.0, 9.0]]) for row in (values, returns))
    figures = describe_values(dataclasses.replace(rollout, values=values, returns=returns))
    assert figures["value/explained_var"] == pytest.approx(expected)
    assert figures["value/mean"] == pytest.approx(float(values[0].mean()))
    assert figures["value/return_mean"] == pytest.approx(float(returns[0].mean()))


def test_average_steps_counts_updates_only():
    steps = [
        {"loss": 1.0, "approx_kl": 0.0, "ratio_max": 1.5, "lr": 2.0, "grad_norm": 3.0},
        {"loss": 3.0, "approx_kl": 1.0, "ratio_max": 1.2, "lr": 1.0},
    ]
    expected = {"loss": 2.0, "approx_kl": 0.5, "grad_norm": 3.0, "ratio_max": 1.5, "lr": 1.0, "num_updates": 1.0}
    assert average_steps("policy", steps) == {f"policy/{name}": value for name, value in expected.items()}


def test_ratio_other_than_one_at_first_minibatch_raises():
    verify_first_minibatch(1e-8, torch.float32)
    # The root mean square of 0.055 that was measured with logits in bfloat16.
    verify_first_minibatch(1.5e-3, torch.bfloat16)
    with pytest.raises(DivergedError, match="before the first update"):
        verify_first_minibatch(1e-4, torch.float32)
    with pytest.raises(DivergedError):
        verify_first_minibatch(float("nan"), torch.float32)


def test_reference_other_than_initial_policy_raises():
    rollout = build_rollout(LENGTHS)
    same = dataclasses.replace(rollout, ref_logps=rollout.logps)
    assert "differ by 0.0e+00" in verify_first_rollout(same, torch.float32)
    with pytest.raises(DivergedError, match="policy and reference"):
        verify_first_rollout(rollout, torch.float32)


def watch_answers(*iterations):
    """Return the warnings for iterations of (entropy, length, correlation); the watch is resumed before each."""
    warnings = []
    watch = AnswerWatch(warnings.append)
    for step, (entropy, length, correlation) in enumerate(iterations, start=1):
        exported = json.loads(json.dumps(watch.state))
        watch = AnswerWatch(warnings.append)
        watch.state |= exported
        figures = {
            "policy/entropy": entropy,
            "objective/length": length,
            "objective/score_length_correlation": correlation,
        }
        watch.check({name: value for name, value in figures.items() if value is not None}, step)
    return warnings


def test_entropy_collapse_warns_once():
    assert watch_answers((2.0, 5, 0), (0.21, 5, 0), (None, 5, None)) == []
    (line,) = watch_answers((2.0, 5, 0), (0.19, 5, 0), (0.1, 5, 0))
    assert line.startswith("warning: step 2: the entropy fell from 2 to 0.19 nats per token")


def test_rewarded_growth_of_length_warns_once():
    assert watch_answers((1, 10, 0.9), (1, 14, 0.9), (1, 16, 0.4), (1, 16, None)) == []
    (line,) = watch_answers((1, 10, 0.0), (1, 16, 0.6), (1, 20, 0.7))
    assert "step 2: answers grew from 10 to 16 tokens, and longer ones earn more" in line


def test_correlation_with_constant_is_zero():
    assert correlate(torch.ones(3), torch.tensor([1.0, 2.0, 3.0])) == 0
    assert correlate(torch.tensor([1.0, 2.0]), torch.tensor([-1.0, -2.0])) == pytest.approx(-1)


def test_unique_grams_is_share_of_4_grams_that_occur_once():
    rollout = build_rollout([(1, 5), (1, 5), (1, 2)])
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 9], [7, 7, 0, 0, 0]])
    assert measure_unique_grams(dataclasses.replace(rollout, response_ids=ids)) == 0.5
    assert measure_unique_grams(build_rollout([(1, 3)])) == 1
    # Four different tokens, so that many 4-grams repeat.
    random = build_rollout([(1, length) for length in range(1, 60)])
    random = dataclasses.replace(random, response_ids=random.response_ids % 4)
    grams = Counter(
        tuple(ids[start : start + 4])
        for ids, length in zip(random.response_ids.tolist(), random.lengths.tolist(), strict=True)
        for start in range(length - 3)
    )
    expected = sum(count == 1 for count in grams.values()) / grams.total()
    assert 0 < measure_unique_grams(random) == pytest.approx(expected)
