"""RLOO and GRPO on the loop of PPO: groups, steps and estimates, learning, and resumption to the same weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.rl import keys_task
from tests.rl.test_rollout import build_rollout
from tests.rows import read_events, read_rows
from trl.trainer.utils import nanstd

from recipes_lib.config.loader import load_config
from recipes_lib.errors import ConfigError
from recipes_lib.rl.advantages import compute_group_advantages
from recipes_lib.rl.methods import Estimate, GroupMethod
from recipes_lib.rl.rollout_schedule import choose_prompts

RECIPE_NAMES = ("rloo", "grpo")


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
        # Two generations a step: both are of the same policy.
        ({"gradient_accumulation_steps": 8}, 128, 1),
        # A step takes the end of one pass and the beginning of the next.
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, 96, 3),
    ],
)
def test_iterations_are_whole_generations_and_whole_steps(build, keys, answers, steps):
    schedule = build(**keys).schedule
    assert (schedule.answers_per_iteration, schedule.steps_per_iteration) == (answers, steps)


def test_a_step_over_parts_of_two_generations_is_refused(build):
    with pytest.raises(ConfigError, match="steps_per_generation"):
        build(steps_per_generation=3, num_iterations=1, gradient_accumulation_steps=2)


def test_a_run_has_the_steps_that_were_asked_for(build):
    schedule = build(max_steps=6).schedule
    assert (schedule.num_steps, schedule.num_iterations) == (6, 2)
    assert [schedule.count_steps(done) for done in range(3)] == [0, 4, 6]


def test_answers_to_a_prompt_stand_side_by_side():
    alone = choose_prompts(5, 0, 5, 0)
    assert choose_prompts(5, 2, 9, 0, group=3) == [prompt for prompt in alone for _ in range(3)][2:11]


@pytest.mark.parametrize("masks", [False, True])
def test_what_a_group_learns_from_is_less_the_penalty_and_without_answers_that_are_not_scored(build, masks):
    keys = {"num_generations": 4, "missing_eos_penalty": 0.5, "mask_truncated_completions": masks}
    rollout = build_rollout([(3, 4), (2, 1), (2, 3), (4, 2)])
    finished, scored = torch.tensor([True, False, True, True]), torch.tensor([True, True, True, False])
    rollout = dataclasses.replace(rollout, finished=finished, scored=scored)
    estimate = build(**keys).estimate(rollout, 0.0)
    worth = torch.where(scored, rollout.scores - 0.5 * ~finished, torch.nan)
    expected = compute_group_advantages(worth, 4, scale="group")
    torch.testing.assert_close(estimate.rewards, worth[None], equal_nan=True)
    torch.testing.assert_close(estimate.rollout.advantages, expected[:, None] * rollout.mask)
    assert estimate.rollout.scored.tolist() == [True, not masks, True, False]


@pytest.mark.parametrize(("flag", "name"), [(True, "group"), (False, "none")])
def test_a_boolean_scale_is_trls(build, flag, name):
    rollout = build_rollout([(3, 4), (2, 1), (2, 3), (4, 2)])
    told, spelt = (build(num_generations=4, scale_rewards=scale).estimate(rollout, 0.0) for scale in (flag, name))
    assert torch.equal(told.rollout.advantages, spelt.rollout.advantages)


def test_figures_of_rewards_are_trls_and_rounding_is_no_difference(build):
    """The second group's rewards differ by rounding, the third's are tiny and differ."""
    method, worth = build(num_generations=2), torch.tensor([1.0, torch.nan, 1e6, 1e6 * (1 + 1e-7), 0.0, 1e-9])
    rollout = build_rollout([(2, 2)] * 6)
    figures = method.describe(Estimate(rollout, worth.view(3, 2), worth), [], [])
    assert figures["reward_std"] == pytest.approx(float(nanstd(worth)), rel=1e-6)
    assert figures["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert "reward_std" not in method.describe(Estimate(rollout, worth.view(3, 2), worth[:2]), [], [])


def test_rloo_takes_the_kl_of_whole_answers_off_their_rewards(build):
    rollout = build_rollout([(3, 4), (2, 1)])
    estimate = build("rloo", num_generations=2, beta=0.3, missing_eos_penalty="null").estimate(rollout, 0.0)
    kl = ((rollout.logps - rollout.ref_logps) * rollout.mask).sum(1)
    first, second = rollout.scores - 0.3 * kl
    torch.testing.assert_close(estimate.rollout.advantages[:, 0], torch.stack([first - second, second - first]))


ASKED: list[str] = []


def score_half(*, prompts, completion_ids, **_):
    """Prompts whose first key is even are never solved."""
    ASKED.extend(prompts)
    scores = keys_task.score_first_key(prompts=prompts, completion_ids=completion_ids)
    return [score * (int(prompt.split()[-2][1:]) % 2) for prompt, score in zip(prompts, scores, strict=True)]


DYNAMIC = {
    "reward_funcs": "[tests.rl.test_methods:score_half]",
    "missing_eos_penalty": "null",
    "max_num_gen_batches": 20,
    "max_steps": 8,
}


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_groups_without_signal_are_left_out_and_other_prompts_are_asked(policy_dir, prompts_file, tmp_path, recipe):
    ASKED.clear()
    keys_task.train(keys_task.build_group_flags(policy_dir, tmp_path, prompts_file, **DYNAMIC), recipe)
    events = read_events(tmp_path)
    assert [event["num_answers"] for event in events][-1] == len(ASKED)
    for event in events:
        assert event["frac_reward_zero_std"] == 0
        assert event["rollout/num_groups_left_out"] > 0
        assert 1 < event["rollout/num_gen_batches"] < 20
    left_out = sum(event["rollout/num_groups_left_out"] for event in events)
    assert len(ASKED) == 4 * (left_out + 2 * 16)
    # Every prompt once, in the order of the run.
    texts = [row["prompt"] for row in read_rows(prompts_file)]
    assert [texts[number] for number in choose_prompts(300, 0, len(ASKED), 42, group=4)] == ASKED
    assert events[-1]["epoch"] == pytest.approx(len(ASKED) / 4 / 300)


def test_after_so_many_batches_groups_without_signal_stand_in(policy_dir, prompts_file, tmp_path):
    keys = DYNAMIC | {"reward_funcs": "[tests.rl.test_trainer:score_alike]", "max_num_gen_batches": 2}
    keys_task.train(keys_task.build_group_flags(policy_dir, tmp_path, prompts_file, **keys), "grpo")
    for iteration, event in enumerate(read_events(tmp_path), start=1):
        assert (event["rollout/num_gen_batches"], event["rollout/num_groups_left_out"]) == (2, 16)
        assert (event["num_answers"], event["frac_reward_zero_std"]) == (128 * iteration, 1)


@pytest.mark.parametrize(("recipe", "keys"), [("rloo", {}), ("grpo", {"use_peft": True, "learning_rate": 3e-3})])
def test_it_learns_the_task(policy_dir, prompts_file, tmp_path, recipe, keys):
    flags = keys_task.build_group_flags(policy_dir, tmp_path, prompts_file, **{"max_steps": 80, **keys})
    keys_task.train(flags, recipe)
    scores = [event["objective/score"] for event in read_events(tmp_path)]
    assert scores[-1] > scores[0] + 0.3


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("keys", [{}, {"beta": 0, "loss_type": "dr_grpo"}, DYNAMIC])
def test_a_run_that_was_stopped_resumes_to_the_same_weights(policy_dir, prompts_file, tmp_path, recipe, keys):
    if recipe == "rloo":
        keys = {name: value for name, value in keys.items() if name != "loss_type"}
    keys = {**keys, "max_steps": 10, "save_strategy": "steps", "save_steps": 4}

    def train(folder):
        return keys_task.train(keys_task.build_group_flags(policy_dir, folder, prompts_file, **keys), recipe)

    whole = train(tmp_path / "whole")
    train(tmp_path / "half")
    # As if it had been killed inside the updates of the last generation.
    for step in (8, 10):
        (tmp_path / "half" / f"checkpoint-{step}" / "COMPLETE.json").unlink()
    again = train(tmp_path / "half")
    for one, other in zip(whole.policy.parameters(), again.policy.parameters(), strict=True):
        assert torch.equal(one, other)
    steps = [event["step"] for event in read_events(tmp_path / "half")]
    assert steps == [4, 8, 10]
