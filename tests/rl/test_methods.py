"""RLOO and GRPO on PPO's loop: schedule, estimates, dynamic sampling, convergence and exact resumption."""

from __future__ import annotations

import dataclasses
import shutil
from unittest.mock import Mock

import pytest
import torch
from tests.rl import keys_task
from tests.rl.test_rollout import build_rollout
from tests.rows import read_events, read_rows
from trl.trainer.utils import nanstd

from recipes_lib.config.loader import load_config
from recipes_lib.errors import ConfigError
from recipes_lib.report.charts import draw_charts
from recipes_lib.report.run_files import read_run
from recipes_lib.rl.methods import Estimate, GroupMethod
from recipes_lib.rl.objectives import compute_group_advantages, find_flat_groups
from recipes_lib.rl.rollout_schedule import choose_prompts


@pytest.fixture
def build(policy_dir, prompts_file, tmp_path):
    def make(recipe="grpo", world_size=1, **keys) -> GroupMethod:
        config = load_config(recipe, keys_task.build_group_flags(policy_dir, tmp_path, prompts_file, **keys))
        return GroupMethod(config, 300, world_size)

    return make


@pytest.mark.parametrize(
    ("keys", "answers", "steps"),
    [
        ({}, 64, 4),
        ({"gradient_accumulation_steps": 2}, 64, 2),
        ({"gradient_accumulation_steps": 4}, 64, 1),
        # A step uses two generations, both by the same policy.
        ({"gradient_accumulation_steps": 8}, 128, 1),
        # A step spans the end of one epoch and the start of the next.
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, 96, 3),
    ],
)
def test_iteration_has_whole_generations_and_whole_steps(build, keys, answers, steps):
    schedule = build(**keys).schedule
    assert (schedule.answers_per_iteration, schedule.steps_per_iteration) == (answers, steps)


def test_step_across_parts_of_two_generations_raises(build):
    with pytest.raises(ConfigError, match="steps_per_generation"):
        build(steps_per_generation=3, num_iterations=1, gradient_accumulation_steps=2)


def test_max_steps_limits_last_iteration(build):
    schedule = build(max_steps=6).schedule
    assert (schedule.num_steps, schedule.num_iterations) == (6, 2)
    assert [schedule.count_steps(done) for done in range(3)] == [0, 4, 6]


def test_answers_of_a_group_are_adjacent():
    alone = choose_prompts(5, 0, 5, 0)
    assert choose_prompts(5, 2, 9, 0, group=3) == [prompt for prompt in alone for _ in range(3)][2:11]


@pytest.mark.parametrize("masks", [False, True])
def test_group_estimate_applies_penalty_and_skips_unscored_answers(build, masks):
    keys = {"num_generations": 4, "missing_eos_penalty": 0.5, "mask_truncated_completions": masks}
    rollout = build_rollout([(3, 4), (2, 1), (2, 3), (4, 2)])
    finished, scored = torch.tensor([True, False, True, True]), torch.tensor([True, True, True, False])
    rollout = dataclasses.replace(rollout, finished=finished, scored=scored)
    estimate = build(**keys).estimate(rollout, 0.0)
    expected_rewards = torch.where(scored, rollout.scores - 0.5 * ~finished, torch.nan)
    expected = compute_group_advantages(expected_rewards, 4, scale="group")
    torch.testing.assert_close(estimate.rewards, expected_rewards[None], equal_nan=True)
    torch.testing.assert_close(estimate.rollout.advantages, expected[:, None] * rollout.mask)
    assert estimate.rollout.scored.tolist() == [True, not masks, True, False]


@pytest.mark.parametrize(("flag", "name"), [(True, "group"), (False, "none")])
def test_boolean_scale_rewards_means_group_or_none(build, flag, name):
    rollout = build_rollout([(3, 4), (2, 1), (2, 3), (4, 2)])
    by_flag, by_name = (build(num_generations=4, scale_rewards=scale).estimate(rollout, 0.0) for scale in (flag, name))
    assert torch.equal(by_flag.rollout.advantages, by_name.rollout.advantages)


def test_reward_std_matches_trl_and_ignores_rounding_in_flat_groups(build):
    """Rewards of the second group differ by rounding; those of the third are tiny and differ."""
    method, expected_rewards = (
        build(num_generations=2),
        torch.tensor([1.0, torch.nan, 1e6, 1e6 * (1 + 1e-7), 0.0, 1e-9]),
    )
    rollout = build_rollout([(2, 2)] * 6)
    figures = method.describe(Estimate(rollout, expected_rewards.view(3, 2), expected_rewards), [], [])
    assert figures["reward_std"] == pytest.approx(float(nanstd(expected_rewards)), rel=1e-6)
    assert figures["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert "reward_std" not in method.describe(
        Estimate(rollout, expected_rewards.view(3, 2), expected_rewards[:2]), [], []
    )


def test_rloo_subtracts_kl_of_whole_answers_from_rewards(build):
    rollout = build_rollout([(3, 4), (2, 1)])
    estimate = build("rloo", num_generations=2, beta=0.3, missing_eos_penalty="null").estimate(rollout, 0.0)
    kl = ((rollout.logps - rollout.ref_logps) * rollout.mask).sum(1)
    first, second = rollout.scores - 0.3 * kl
    torch.testing.assert_close(estimate.rollout.advantages[:, 0], torch.stack([first - second, second - first]))


def test_rloo_subtracts_no_kl_of_excluded_answers(build):
    rollout = dataclasses.replace(build_rollout([(3, 4), (2, 1)]), finished=torch.tensor([False, True]))
    keys = {"num_generations": 2, "beta": 0.3, "missing_eos_penalty": "null", "mask_truncated_completions": True}
    total = build("rloo", **keys).estimate(rollout, 0.0).total
    kl = ((rollout.logps - rollout.ref_logps) * rollout.mask).sum(1)
    torch.testing.assert_close(total, rollout.scores - 0.3 * kl * rollout.finished)


def test_group_of_excluded_answers_has_no_signal(build):
    """Otherwise a run whose answers are all truncated would end without an update and without a word."""
    rollout = build_rollout([(2, 2)] * 6)
    rollout = dataclasses.replace(rollout, finished=torch.tensor([False, False, True, False, True, True]))
    keys = {"num_generations": 2, "missing_eos_penalty": "null"}
    masked, whole = (
        build(mask_truncated_completions=is_masked, **keys).estimate(rollout, 0.0) for is_masked in (True, False)
    )
    assert find_flat_groups(masked.rewards).tolist() == [True, False, False]
    assert find_flat_groups(whole.rewards).tolist() == [False] * 3
    # A truncated answer still counts in the mean of its group.
    assert torch.equal(masked.rollout.advantages, whole.rollout.advantages)
    assert masked.rollout.loss_mask.any(dim=1).tolist() == [False, False, True, False, True, True]


SAMPLED: list[str] = []


def score_half(*, prompts, completion_ids, **_):
    """Score 0 if the first key of the prompt is even, so that those groups are flat."""
    SAMPLED.extend(prompts)
    scores = keys_task.score_first_key(prompts=prompts, completion_ids=completion_ids)
    return [score * (int(prompt.split()[-2][1:]) % 2) for prompt, score in zip(prompts, scores, strict=True)]


DYNAMIC = {
    "reward_funcs": "[tests.rl.test_methods:score_half]",
    "missing_eos_penalty": "null",
    "max_num_gen_batches": 20,
    "max_steps": 8,
}


def test_dynamic_sampling_replaces_flat_groups_by_other_prompts(policy_dir, prompts_file, tmp_path, monkeypatch):
    monkeypatch.setattr("recipes_lib.report.charts.save_figure", Mock())
    SAMPLED.clear()
    keys_task.train(keys_task.build_group_flags(policy_dir, tmp_path, prompts_file, **DYNAMIC), "grpo")
    events = read_events(tmp_path)
    assert [event["num_answers"] for event in events][-1] == len(SAMPLED)
    for event in events:
        assert event["frac_reward_zero_std"] == 0
        assert event["rollout/num_groups_left_out"] > 0
        assert 1 < event["rollout/num_gen_batches"] < 20
        assert event["clip_ratio/region_mean"] == pytest.approx(
            event["policy/clipfrac_low"] + event["policy/clipfrac_high"], abs=1e-9
        )
    assert {"clip_fraction", "flat_groups"} <= {chart.name for chart in draw_charts(read_run(tmp_path), tmp_path / "x")}
    left_out = sum(event["rollout/num_groups_left_out"] for event in events)
    assert len(SAMPLED) == 4 * (left_out + 2 * 16)
    # Each prompt once, in the order of the run.
    texts = [row["prompt"] for row in read_rows(prompts_file)]
    assert [texts[number] for number in choose_prompts(300, 0, len(SAMPLED), 42, group=4)] == SAMPLED
    assert events[-1]["epoch"] == pytest.approx(len(SAMPLED) / 4 / 300)


def test_dynamic_sampling_falls_back_to_flat_groups_at_batch_limit(policy_dir, prompts_file, tmp_path):
    keys = DYNAMIC | {"reward_funcs": "[tests.rl.test_trainer:score_constant]", "max_num_gen_batches": 2}
    keys_task.train(keys_task.build_group_flags(policy_dir, tmp_path, prompts_file, **keys), "rloo")
    for iteration, event in enumerate(read_events(tmp_path), start=1):
        assert (event["rollout/num_gen_batches"], event["rollout/num_groups_left_out"]) == (2, 16)
        assert (event["num_answers"], event["frac_reward_zero_std"]) == (128 * iteration, 1)


@pytest.mark.parametrize(("recipe", "keys"), [("rloo", {}), ("grpo", {"use_peft": True, "learning_rate": 3e-3})])
def test_group_methods_learn_rewarded_key(policy_dir, prompts_file, tmp_path, recipe, keys):
    flags = keys_task.build_group_flags(policy_dir, tmp_path, prompts_file, **{"max_steps": 80, **keys})
    keys_task.train(flags, recipe)
    scores = [event["objective/score"] for event in read_events(tmp_path)]
    assert scores[-1] > scores[0] + 0.3


@pytest.mark.parametrize(
    ("recipe", "keys"), [("rloo", {}), ("grpo", {"beta": 0, "loss_type": "dr_grpo"}), ("grpo", DYNAMIC)]
)
def test_killed_run_resumes_to_identical_weights(policy_dir, prompts_file, tmp_path, recipe, keys):
    keys = {**keys, "max_steps": 10, "save_strategy": "steps", "save_steps": 4, "per_device_train_batch_size": 8}

    def train(folder):
        return keys_task.train(keys_task.build_group_flags(policy_dir, folder, prompts_file, **keys), recipe)

    whole = train(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    # As after a kill during the updates of the last generation.
    for step in (8, 10):
        (tmp_path / "half" / f"checkpoint-{step}" / "COMPLETE.json").unlink()
    again = train(tmp_path / "half")
    for one, other in zip(whole.policy.parameters(), again.policy.parameters(), strict=True):
        assert torch.equal(one, other)
    steps = [event["step"] for event in read_events(tmp_path / "half")]
    assert steps == [4, 8, 10]
