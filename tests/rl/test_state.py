"""Checkpoints of learners: exact restoration, consistency of asynchronous saves, verification, errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from recipes_lib.errors import DataError
from recipes_lib.models.saved_weights import BrokenSaveError
from recipes_lib.rl.rollout_schedule import RolloutSchedule
from recipes_lib.rl.state import RLState, load_state, stage_state
from recipes_lib.rl.update import Learner
from recipes_lib.training.checkpoints.manifest import find_damage, find_last_complete
from recipes_lib.training.checkpoints.saver import CheckpointSaver


def build(tmp_path, seed, width=3):
    torch.manual_seed(seed)
    model = nn.Linear(width, 2)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, warmup_steps=2)
    schedule = RolloutSchedule(1, 8, 8, 1, num_steps=16, num_warmup_steps=2, num_epochs=1.0)
    parameters = dict(model.named_parameters())
    return model, Learner("policy", model, parameters, learning_rate=0.1, args=args, schedule=schedule)


def step(model, learner, count):
    for _ in range(count):
        model(torch.ones(1, 3)).square().sum().backward()
        learner.step(lambda **_: None)


def build_saver(tmp_path):
    return CheckpointSaver(TrainingArguments(output_dir=str(tmp_path), use_cpu=True), lambda line: None)


def save(tmp_path, state, learner):
    saver = build_saver(tmp_path)
    saver.save(stage_state(saver, state, {"policy": learner}))
    saver.finish()


def test_restored_learner_makes_identical_steps(tmp_path):
    model, learner = build(tmp_path, 0)
    step(model, learner, 3)
    state = RLState(iteration=2, step=3, num_answers=64, kl_coef=0.123456789012345, seconds=1.5, evaluated_step=3)
    save(tmp_path, state, learner)
    assert find_last_complete(tmp_path) == tmp_path / "checkpoint-3"
    other_model, other = build(tmp_path, 1)
    assert load_state(tmp_path / "checkpoint-3", {"policy": other}) == state
    assert other.learning_rate == learner.learning_rate
    for one, at in ((model, learner), (other_model, other)):
        step(one, at, 3)
    assert torch.equal(model.weight, other_model.weight)
    assert torch.equal(model.bias, other_model.bias)


def test_saved_state_is_that_of_staging(tmp_path):
    model, learner = build(tmp_path, 0)
    step(model, learner, 3)
    state, before = RLState(step=3), model.weight.detach().clone()
    saver = build_saver(tmp_path)
    staged = stage_state(saver, state, {"policy": learner})
    moments = learner.optimizer.state[model.weight]["exp_avg"].clone()
    step(model, learner, 1)
    saver.save(staged)
    saver.finish()
    other_model, other = build(tmp_path, 1)
    load_state(tmp_path / "checkpoint-3", {"policy": other})
    assert torch.equal(other_model.weight, before)
    assert torch.equal(other.optimizer.state[other_model.weight]["exp_avg"], moments)
    assert find_damage(tmp_path / "checkpoint-3") is None


def test_verification_detects_one_flipped_bit_and_a_truncated_schedule(tmp_path):
    model, learner = build(tmp_path, 0)
    step(model, learner, 3)
    staged = stage_state(build_saver(tmp_path), RLState(step=3), {"policy": learner}, compares=True)
    for task in staged.tasks:
        task()
    staged.verify()
    schedule = staged.folder / "policy_scheduler.pt"
    whole = schedule.read_bytes()
    schedule.write_bytes(whole[:-1])
    with pytest.raises(BrokenSaveError, match=r"policy_scheduler\.pt cannot be read back"):
        staged.verify()
    schedule.write_bytes(whole)
    learner.optimizer.state[model.bias]["exp_avg_sq"].view(torch.int32)[0] ^= 1
    with pytest.raises(BrokenSaveError, match=r"policy_optimizer\.pt: a state differs"):
        staged.verify()
    with torch.no_grad():
        model.bias.view(torch.int32)[0] ^= 1
    with pytest.raises(BrokenSaveError, match=r"policy\.safetensors: bias differ"):
        staged.verify()


def test_non_finite_weights_are_not_saved(tmp_path):
    model, learner = build(tmp_path, 0)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    with pytest.raises(BrokenSaveError, match="weight is not finite"):
        save(tmp_path, RLState(step=3), learner)
    assert find_last_complete(tmp_path) is None


def test_checkpoint_with_other_parameters_raises(tmp_path):
    _, learner = build(tmp_path, 0)
    save(tmp_path, RLState(step=1), learner)
    other = build(tmp_path, 0)[1]
    other.parameters = {"weight": other.parameters["weight"]}
    with pytest.raises(DataError, match="has other parameters than the policy of this run"):
        load_state(tmp_path / "checkpoint-1", {"policy": other})


def test_progress_of_another_version_raises(tmp_path):
    _, learner = build(tmp_path, 0)
    save(tmp_path, RLState(step=1), learner)
    (tmp_path / "checkpoint-1" / "ppo_state.json").write_text('{"step": 1, "unknown": 2}')
    with pytest.raises(DataError, match="has other fields than this version writes"):
        load_state(tmp_path / "checkpoint-1", {"policy": learner})
