"""Runs of GRPO and RLOO against TRL's trainers on the same prompts, answers and minibatches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from tests.rl import keys_task
from tests.rl.keys_task import EOS, MAX_ANSWER
from tests.rows import read_events, read_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes_lib.models.generation import Generated
from recipes_lib.rl import trainer as trainer_module
from recipes_lib.rl.collect import Collector
from recipes_lib.rl.update import Updater

SHARED = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_steps": 8,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "temperature": 0.9,
    "bf16": False,
    "use_cpu": True,
    "save_strategy": "no",
}
FIGURES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "entropy": "entropy",
    "kl": "kl_ref",
    "clip_ratio/low_mean": "clipfrac_low",
    "clip_ratio/high_mean": "clipfrac_high",
}
"""Figure in TRL's log of a step -> ours."""


def draw_answer(number: int) -> list[int]:
    """Draw an answer of up to ``MAX_ANSWER`` tokens; some have the end token alone, and some have none."""
    random = np.random.default_rng(number)
    ids = random.integers(EOS + 1, keys_task.VOCABULARY, MAX_ANSWER).tolist()
    return ids if number % 5 == 3 else [*ids[: number % MAX_ANSWER], EOS]


def score_ids(*, completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 7 / 3 for ids in completion_ids]


def score_some(*, completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [None if sum(ids) % 3 == 0 else float(len(ids)) for ids in completion_ids]


def generate(self: Collector, policy: Any, prompts: Any, numbers: list[int], *track: Any) -> Generated:
    answers = [draw_answer(number) for number in numbers]
    # After the end token, anything may follow.
    ids = torch.tensor([[*answer, *[EOS] * (MAX_ANSWER - len(answer))] for answer in answers])
    return Generated(ids, torch.zeros(ids.shape))


def choose_in_order(num_prompts: int, first: int, count: int, *, seed: int, group: int) -> list[int]:
    return [number // group % num_prompts for number in range(first, first + count)]


def train_ours(monkeypatch, recipe, flags):
    """Return figures of each step, and the weights, of a run on answers of ``draw_answer``, in their order."""
    steps = []
    compute, update = Collector._compute_logps_and_values, Updater.update_policy

    def compute_exactly(self, rollout):
        rollout = compute(self, rollout)
        return dataclasses.replace(rollout, engine_logps=rollout.logps * rollout.mask)

    def record(self, *args, **kwargs):
        steps.extend(made := update(self, *args, **kwargs))
        return made

    def list_in_order(self, num_answers, iteration):
        schedule = self.method.schedule
        rows = [*range(num_answers)] * schedule.update_epochs
        yield from (rows[at : at + schedule.answers_per_step] for at in range(0, len(rows), schedule.answers_per_step))

    with monkeypatch.context() as patch:
        patch.setattr(Collector, "_generate", generate)
        patch.setattr(Collector, "_compute_logps_and_values", compute_exactly)
        patch.setattr(Updater, "update_policy", record)
        patch.setattr(Updater, "_minibatches", list_in_order)
        patch.setattr(trainer_module, "choose_prompts", choose_in_order)
        models = keys_task.train(flags, recipe)
    return steps, models.policy.state_dict()


def train_trl(monkeypatch, recipe, policy_dir, folder, prompts, rewards, use_peft, **keys):
    """Return the log of each step and the weights of TRL's run on the same answers."""
    is_rloo = recipe == "rloo"
    kind, arguments = (trl.RLOOTrainer, trl.RLOOConfig) if is_rloo else (trl.GRPOTrainer, trl.GRPOConfig)
    names = {"max_completion_length": MAX_ANSWER, "logging_steps": 1, "report_to": "none", "shuffle_dataset": False}
    monkeypatch.setattr(f"trl.trainer.{recipe}_trainer.shuffle_sequence_dict", lambda batch: batch)
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32),
        args=arguments(output_dir=str(folder), **names, **keys),
        reward_funcs=rewards,
        train_dataset=prompts,
        processing_class=AutoTokenizer.from_pretrained(policy_dir),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear") if use_peft else None,
    )
    numbers = iter(range(10**6))

    def answer(prompt_ids, *_):
        answers = [draw_answer(next(numbers)) for _ in prompt_ids]
        return answers if is_rloo else (answers, None)

    monkeypatch.setattr(trainer, "_generate_single_turn", answer)
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log], trainer.model.state_dict()


CASES = {
    "dapo_lora": ("grpo", {"beta": 0.1, "epsilon": 0.02, "epsilon_high": 0.05, "use_peft": True}),
    "gspo": (
        "grpo",
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "beta": 0.1,
            "epsilon": 0.001,
            "gradient_accumulation_steps": 2,
        },
    ),
    "rewards": (
        "grpo",
        {"loss_type": "dr_grpo", "scale_rewards": "batch", "reward_weights": [1.0, -0.5], "epsilon": 0.02},
    ),
    "masked": ("grpo", {"mask_truncated_completions": True, "scale_rewards": "none", "delta": 1.03, "epsilon": 0.02}),
    "rloo": ("rloo", {"beta": 0.1, "epsilon": 0.05, "normalize_advantages": True}),
}


def assert_same_generations(logs, events, *, has_rewards):
    """Compare the figures of generations; rewards of RLOO are less the KL divergence, which TRL does not subtract."""
    generations = [log for log in logs if "reward" in log]
    for log, event in zip(generations, events, strict=True):
        assert event["objective/length"] == pytest.approx(log["completions/mean_length"])
        assert 1 - event["objective/finish_rate"] == pytest.approx(log["completions/clipped_ratio"])
        for name in ("reward", "reward_std", "frac_reward_zero_std") if has_rewards else ():
            assert event[name] == pytest.approx(log[name], abs=1e-6), name


@pytest.mark.parametrize(("recipe", "keys"), CASES.values(), ids=CASES)
def test_run_equals_trl(policy_dir, prompts_file, tmp_path, monkeypatch, recipe, keys):
    rewards = [score_ids, score_some][: len(keys.get("reward_weights", [1.0]))]
    prompts = Dataset.from_list(read_rows(prompts_file))
    adapter = {"use_peft": True, "lora_r": 4, "lora_alpha": 8} if keys.get("use_peft") else {}
    paths = ", ".join(f"{__name__}:{reward.__name__}" for reward in rewards)
    own = {"missing_eos_penalty": 0, "reward_funcs": f"[{paths}]", "beta": 0.0, **SHARED, **keys, **adapter}
    flags = keys_task.build_group_flags(policy_dir, tmp_path / "ours", prompts_file, **own)
    steps, weights = train_ours(monkeypatch, recipe, flags)

    upstream = {"adam_beta2": 0.95, "beta": 0.0, **SHARED, **keys}
    use_peft = upstream.pop("use_peft", False)
    given = (recipe, policy_dir, tmp_path / "trl", prompts, rewards)
    logs, expected = train_trl(monkeypatch, *given, use_peft=use_peft, **upstream)

    # With accumulation, TRL's figures are means over micro-batches; its ratios of whole answers are counted by answer.
    is_by_token = "gradient_accumulation_steps" not in keys and recipe == "grpo"
    names = [name for name in FIGURES if name in logs[0]] if is_by_token else ["loss", "grad_norm", "learning_rate"]
    for log, step in zip(logs, steps, strict=True):
        for name in names:
            # The ratio of a token may be on either side of a bound, by rounding.
            tolerance = 0.03 if name.startswith("clip") else 1e-5
            assert step[FIGURES[name]] == pytest.approx(log[name], rel=1e-4, abs=tolerance), (name, log["step"])
    for name, value in weights.items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert_same_generations(logs, read_events(tmp_path / "ours"), has_rewards=recipe == "grpo")
