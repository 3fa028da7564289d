"""TRL's trainers of groups inside this library's run: its own prompts, steps, stops, resumption and adapters."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
import trl
from safetensors.torch import load_file
from tests.rl import keys_task
from trl.trainer.utils import RepeatSampler

from recipes_lib.config.loader import load_config
from recipes_lib.data.prompts import load_prompt_data
from recipes_lib.errors import DivergedError
from recipes_lib.models.adapters.lora import read_adapter_state
from recipes_lib.models.loading import load_tokenizer
from recipes_lib.planning.steps import plan_groups
from recipes_lib.rl import grpo as groups
from recipes_lib.rl.grpo import TRAINERS, build_group_trainer
from recipes_lib.rl.rewards import load_rewards
from recipes_lib.training.guards.watchdog import TELLING, WATCHDOG
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.run import start_run
from recipes_lib.training.trainers.arguments import build_training_arguments
from recipes_lib.training.trainers.trained_model import load_policy

TRAINABLE = SimpleNamespace(is_trainable=True, is_qat_trainable=False, is_compileable=False)


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory):
    return keys_task.write_policy(tmp_path_factory.mktemp("policy"), 0, num_steps=30)


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    return keys_task.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", 300, seed=5)


@pytest.fixture
def build(policy_dir, prompts_file, tmp_path):
    def make(stage, folder="out", **keys):
        flags = keys_task.build_group_flags(policy_dir, tmp_path / folder, prompts_file, **keys)
        config, launch = load_config(stage, flags), read_launch()
        run = start_run(config, launch)
        tokenizer = load_tokenizer(config.model, config.tokens)
        prompts = load_prompt_data(config, tokenizer)
        args = build_training_arguments(config, launch, has_eval=True)
        trainer = build_group_trainer(config, args, launch, load_rewards(config.rewards, "cpu"), prompts, tokenizer)
        return trainer, run, prompts, config

    return make


@pytest.mark.parametrize("stage", sorted(TRAINERS))
def test_it_is_upstreams_objective_and_scale(stage):
    (upstream,) = (base for base in TRAINERS[stage].__mro__ if base in (trl.RLOOTrainer, trl.GRPOTrainer))
    assert TRAINERS[stage]._compute_loss is upstream._compute_loss
    assert TRAINERS[stage]._generate_and_score_completions is upstream._generate_and_score_completions
    assert TRAINERS[stage].loss_is_scaled_for_ga is upstream.loss_is_scaled_for_ga


@pytest.mark.parametrize("stage", sorted(TRAINERS))
def test_the_policy_is_asked_with_the_very_prompts_in_upstreams_groups(build, stage):
    trainer, _, prompts, config = build(stage, max_steps=2)
    asked = []
    generate = trainer._generate_single_turn

    def watch(prompt_ids, *args, **options):
        asked.append([list(ids) for ids in prompt_ids])
        return generate(prompt_ids, *args, **options)

    trainer._generate_single_turn = watch
    trainer.train()
    plan = plan_groups(len(prompts.train), config, 1)
    assert len(asked) == 1  # Two steps of two learn from the answers of one generation.
    assert len(asked[0]) == plan.answers_per_generation
    sampler = iter(
        RepeatSampler(range(len(prompts.train)), 4, batch_size=plan.prompts_per_generation, seed=trainer.args.seed)
    )
    expected = [prompts.train[next(sampler)].input_ids for _ in range(plan.answers_per_generation)]
    assert asked[0] == expected


def test_the_length_of_a_run_is_what_was_planned(build):
    trainer, _, prompts, config = build("rloo", max_steps=-1, num_train_epochs=0.2)
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps
    assert trainer.state.max_steps == plan_groups(len(prompts.train), config, 1).steps.num_steps


@pytest.mark.parametrize("stage", sorted(TRAINERS))
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(build, stage):
    """Stopped between two generations, of which each is learnt from in four steps."""
    keys = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    whole, _, _, _ = build(stage, "whole", **keys)
    whole.train()
    half, _, _, _ = build(stage, "half", **keys)
    half.args.max_steps = 4
    half.train()
    again, run, _, _ = build(stage, "half", **keys)
    assert run.resume_from is not None
    again.train(resume_from_checkpoint=run.resume_from)
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_that_goes_on_at_its_very_end_makes_no_step_more(build):
    keys = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    build("grpo", "ended", **keys)[0].train()
    again, run, _, _ = build("grpo", "ended", **keys)
    before = [parameter.clone() for parameter in again.model.parameters()]
    again.train(resume_from_checkpoint=run.resume_from)
    assert again.state.global_step == 4
    straight = load_file(run.output_dir / "checkpoint-4" / "model.safetensors")
    for name, parameter in again.model.named_parameters():
        torch.testing.assert_close(parameter, straight[name], rtol=0, atol=0)
    assert any(not torch.equal(one, other) for one, other in zip(before, again.model.parameters(), strict=True))


def test_sampling_and_scoring_have_the_time_that_they_need(build, monkeypatch):
    trainer, _, _, _ = build("rloo", max_steps=2)
    phases = []
    monkeypatch.setattr(WATCHDOG, "enter", phases.append)
    trainer.train()
    at = phases.index("sampling groups of answers")
    assert phases[at : at + 3] == ["sampling groups of answers", "scoring answers", "a step from new answers"]
    assert not set(phases[at : at + 3]) & TELLING


def test_without_its_adapter_the_policy_is_the_reference_and_no_copy_is_left(build):
    trainer, _, _, _ = build("rloo", max_steps=2, use_peft=True, learning_rate=1e-2)
    assert set(trainer.model.peft_config) == {"default"}
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])}
    assert moved
    assert moved <= trained


@pytest.mark.parametrize("stage", sorted(TRAINERS))
def test_an_adapter_on_few_bits_is_trained_in_float32_though_trl_rounds_it(build, stage, monkeypatch):
    """Few bits as TRL knows them, by the model's attributes; bitsandbytes need not be there."""

    def load_quantised(*given):
        policy = load_policy(*given)
        vars(policy.get_base_model()).update(is_quantized=True, is_loaded_in_4bit=True, hf_quantizer=TRAINABLE)
        return policy

    monkeypatch.setattr(groups, "load_policy", load_quantised)
    fresh = read_adapter_state(build(stage, "plain", use_peft=True)[0].model)
    trainer = build(stage, use_peft=True)[0]
    assert trainer.model.is_loaded_in_4bit
    state = read_adapter_state(trainer.model)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert all(torch.equal(state[name], tensor) for name, tensor in fresh.items())


def test_an_adapter_is_checked_as_in_other_stages(build, capsys):
    trainer, _, _, _ = build("grpo", max_steps=4, use_peft=True, learning_rate=1e-3)
    trainer.train()
    told = capsys.readouterr().err
    for line in (
        "it changes no logit before",
        "all 21 frozen tensors stand still",
        "all 28 trained tensors have a grad",
    ):
        assert told.count(f"adapter: {line}") == 1


def test_a_part_of_an_adapter_that_learns_nothing_stops_the_run(build):
    trainer, _, _, _ = build("grpo", max_steps=4, use_peft=True)
    name, part = next((name, part) for name, part in trainer.model.named_parameters() if ".lora_B." in name)
    part.register_hook(torch.zeros_like)
    with pytest.raises(DivergedError, match=rf"1 of 28 trained tensors would learn nothing: {re.escape(name)}"):
        trainer.train()


def test_answers_that_are_worth_the_same_teach_nothing_and_say_nothing_of_the_adapter(build, capsys):
    trainer, _, _, _ = build("grpo", max_steps=2, use_peft=True)
    trainer.reward_funcs[0] = lambda **given: [1.0] * len(given["prompts"])
    trainer.train()
    assert trainer.state.global_step == 2
    told = capsys.readouterr().err
    assert "grad 0 " in told
    assert "tensors have a gradient" not in told


@pytest.mark.parametrize("stage", sorted(TRAINERS))
def test_groups_that_earn_the_same_are_told_at_once_and_end_the_run_also_after_a_resumption(build, stage, capsys):
    """One group earns more than another, and in each all answers the same; two steps learn from a generation."""

    def by_prompt(**given):
        return [float(len(prompt)) for prompt in given["prompts"]]

    keys = {"max_steps": 8, "num_iterations": 1, "save_strategy": "steps", "save_steps": 2}
    trainer, run, _, _ = build(stage, **keys, max_zero_std_rollouts=2)
    trainer.reward_funcs[0] = by_prompt
    with pytest.raises(DivergedError, match=r"step 3 was stopped before its update: .* 2 rollouts in a row taught"):
        trainer.train()
    told = capsys.readouterr().err
    assert told.count("warning: step 1: all answers to a prompt earn the same, whichever of the 16 prompts it is;") == 1
    again, run, _, _ = build(stage, **keys, max_zero_std_rollouts=3)
    again.reward_funcs[0] = by_prompt
    assert run.resume_from is not None
    assert run.resume_from.name == "checkpoint-2"
    with pytest.raises(DivergedError, match=r"step 5 was stopped before its update: .* 3 rollouts in a row taught"):
        again.train(resume_from_checkpoint=run.resume_from)


def test_dropout_is_off_where_log_probabilities_are_compared(build):
    trainer, _, _, _ = build("grpo", max_steps=2, num_iterations=1, beta=0.1)
    trainer.train()
    first = next(entry for entry in trainer.state.log_history if "kl" in entry)
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert dataclasses.asdict(trainer.args)["disable_dropout"]
