"""A checkpoint brings everything back, and refuses what it was not saved from."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from recipes_lib.config.schema import PPOConfig
from recipes_lib.errors import DataError
from recipes_lib.rl.schedule import compute_schedule
from recipes_lib.rl.state import PPOState, load_state, save_state
from recipes_lib.rl.update import Learner
from recipes_lib.training.checkpoints import find_last_complete


def build(tmp_path, seed, width=3):
    torch.manual_seed(seed)
    model = nn.Linear(width, 2)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, warmup_steps=2)
    schedule = compute_schedule(8, PPOConfig(), {"max_steps": 16}, 1)
    parameters = dict(model.named_parameters())
    return model, Learner("policy", model, parameters, learning_rate=0.1, args=args, schedule=schedule)


def step(model, learner, count):
    for _ in range(count):
        model(torch.ones(1, 3)).square().sum().backward()
        learner.step()


def test_a_learner_goes_on_where_it_was(tmp_path):
    model, learner = build(tmp_path, 0)
    step(model, learner, 3)
    state = PPOState(iteration=2, step=3, num_answers=64, kl_coef=0.123456789012345, seconds=1.5)
    save_state(tmp_path, state, {"policy": learner}, world_size=1)
    assert find_last_complete(tmp_path)[0] == tmp_path / "checkpoint-3"
    other_model, other = build(tmp_path, 1)
    assert load_state(tmp_path / "checkpoint-3", {"policy": other}) == state
    assert other.learning_rate == learner.learning_rate
    for one, at in ((model, learner), (other_model, other)):
        step(one, at, 3)
    assert torch.equal(model.weight, other_model.weight)
    assert torch.equal(model.bias, other_model.bias)


def test_other_weights_are_refused(tmp_path):
    _, learner = build(tmp_path, 0)
    save_state(tmp_path, PPOState(step=1), {"policy": learner}, world_size=1)
    other = build(tmp_path, 0)[1]
    other.parameters = {"weight": other.parameters["weight"]}
    with pytest.raises(DataError, match="does not hold the weights that the policy trains"):
        load_state(tmp_path / "checkpoint-1", {"policy": other})
