"""PPO, RLOO and GRPO raise held-out accuracy under a verifiable reward.

The policy is fine-tuned on solutions of which half are wrong. The reward is the exact match of the final number.
Accuracy is that of answers to 200 held-out problems, sampled with the same random numbers before and after; by chance,
a difference of 0.2 has a probability of 1 in 20,000.
"""

from __future__ import annotations

import pytest
from tests.rl import arithmetic_task, keys_task
from tests.rows import read_events

SHUFFLED = {"reward_funcs": "[tests.rl.arithmetic_task:score_shuffled]"}


@pytest.fixture
def run(tmp_path):
    """Train; return accuracy before and after, and the share of finished answers."""

    def train(recipe, seed, **keys):
        rows = arithmetic_task.write_problems(tmp_path, seed)
        policy = arithmetic_task.write_policy(tmp_path / "policy", rows, seed)
        build = arithmetic_task.build_flags if recipe == "ppo" else arithmetic_task.build_group_flags
        keys_task.train(build(policy, tmp_path / "out", tmp_path, **{"max_steps": 200, "seed": seed, **keys}), recipe)
        first, last = read_events(tmp_path / "out", "eval")
        return first["eval_reward"], last["eval_reward"], last["eval_stop_rate"]

    return train


@pytest.mark.slow  # The default tier covers PPO by test_learning, RLOO and GRPO by test_methods.
@pytest.mark.parametrize(
    ("recipe", "seed", "least"), [*(("ppo", seed, 0.75) for seed in range(5)), ("rloo", 0, 0.0), ("grpo", 0, 0.0)]
)
def test_held_out_accuracy_rises(run, recipe, seed, least):
    before, after, finished = run(recipe, seed)
    assert 0.2 < before < 0.55
    assert after > max(before + 0.2, least)
    assert finished > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "most"), [("ppo", 0.05), ("rloo", 0.1), ("grpo", 0.1)])
def test_held_out_accuracy_does_not_rise_with_shuffled_rewards(run, recipe, most):
    before, after, _ = run(recipe, 0, **SHUFFLED)
    assert after < before + most
