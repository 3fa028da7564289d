"""PPO with a reward that can be checked raises it from where fine-tuning left it, on problems that are not trained on.

The policy is fine-tuned on solutions of which every second one is wrong, so that it is right less than half of the
time; the reward is the exact match of the final number; what is judged are sampled answers to 200 held-out problems, at
the same random numbers before and after. By luck alone, two such shares differ by 0.2 once in twenty thousand times.
"""

from __future__ import annotations

import pytest
from tests.rl import arithmetic_task, keys_task

SHUFFLED = {"reward_funcs": "[tests.rl.arithmetic_task:score_shuffled]"}


@pytest.fixture
def run(tmp_path):
    """Share of right answers before and after, and the share of answers that end."""

    def train(seed, **keys):
        rows = arithmetic_task.write_problems(tmp_path, seed)
        policy = arithmetic_task.write_policy(tmp_path / "policy", rows, seed)
        given = {"max_steps": 200, "seed": seed, **keys}
        keys_task.train(arithmetic_task.build_flags(policy, tmp_path / "out", tmp_path, **given))
        first, last = keys_task.read_metrics(tmp_path / "out", "eval")
        return first["eval_reward"], last["eval_reward"], last["eval_stop_rate"]

    return train


@pytest.mark.slow  # Every test run sees PPO learn in check A of test_learning, and this reward rise in test_groups.
@pytest.mark.parametrize("seed", range(5))
def test_the_verifiable_reward_rises(run, seed):
    before, after, finished = run(seed)
    assert 0.2 < before < 0.55
    assert after > max(before + 0.2, 0.75)
    assert finished > 0.95


@pytest.mark.slow
def test_it_does_not_rise_when_the_reward_is_told_of_others(run):
    before, after, _ = run(0, **SHUFFLED)
    assert after < before + 0.05
