"""Collector built from a configuration: sampling keys, precision, positions of the reward model."""

from __future__ import annotations

import pytest
import torch
from tests.rl import keys_task
from tests.rl.reward_models import write_reward_model

from recipes_lib.config.loader import load_config
from recipes_lib.data.prompts import load_prompt_data
from recipes_lib.errors import ConfigError
from recipes_lib.rl.collect import Collector
from recipes_lib.rl.models import ActorCritic
from recipes_lib.rl.rewards import load_rewards
from recipes_lib.training.monitoring.progress import TrainingProgress


@pytest.fixture
def build(policy_dir, prompts_file, tmp_path):
    def load(num_positions=64, **keys):
        flags = keys_task.build_flags(policy_dir, tmp_path / "out", prompts_file, **keys)
        config, args, tokenizer, models = keys_task.load(load_config("ppo", flags))
        prompts = load_prompt_data(config, tokenizer)
        rewards = load_rewards(config.rewards, "cpu")
        if rewards.model is not None:
            rewards.model.model.config.max_position_embeddings = num_positions

        alone = ActorCritic(models.policy, None, None, models.stop_ids)
        collector = Collector(config, args, alone, rewards, tokenizer, TrainingProgress(), prompts.max_length)
        return collector, prompts.train

    return load


def test_reward_model_with_too_few_positions_raises(build, policy_dir, tmp_path):
    reward_model = {
        "reward_model_name_or_path": write_reward_model(tmp_path / "reward", policy_dir),
        "reward_funcs": "null",
    }
    _, prompts = build(**reward_model)
    longest = max(len(prompt.input_ids) for prompt in prompts) + 8
    build(num_positions=longest, **reward_model)
    with pytest.raises(
        ConfigError, match=f"{longest - 1} positions, and the longest prompt with its answer {longest} "
    ):
        build(num_positions=longest - 1, **reward_model)


def test_sampling_keys_reach_sampler(build):
    collector, prompts = build(response_length=3, seed=7, per_device_eval_batch_size=5)
    assert (collector.args.per_device_eval_batch_size, collector.args.seed) == (5, 7)
    answers = collector.answer(prompts[:8], range(8))
    assert int(answers.lengths.max()) == 3


@pytest.mark.parametrize(("bf16", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_autocast_follows_bf16(build, bf16, dtype):
    collector, _ = build(bf16=bf16)
    with collector.precision():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
