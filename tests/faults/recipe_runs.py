"""Runs for fault injection: each recipe on the tiny model, with evaluations, samples and checkpoints."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests import tiny
from tests.recipes.preferences import make_rows
from tests.rows import write_rows
from tests.training.pretraining import write_documents

NUM_STEPS = 12
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE = json.dumps({"model_type": "llama"} | SIZES)

COMMON = {
    "bf16": "false",
    "use_cpu": "true",
    "max_steps": NUM_STEPS,
    "save_steps": 3,
    "save_total_limit": 2,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
}
SAMPLES = {"num_sample_prompts": 1, "sample_max_new_tokens": 4}
_CHATS: Mapping[str, Any] = {"test_split_size": 6, "max_length": 96, "per_device_eval_batch_size": 2} | SAMPLES
_PPO: Mapping[str, Any] = {
    # Two optimizer steps of each learner per iteration.
    "test_split_size": 6,
    "num_sample_prompts": 2,
    "response_length": 8,
    "num_ppo_epochs": 1,
    "num_mini_batches": 2,
    "critic_learning_rate": 1e-3,
    "kl_target_per_sequence": 0.5,
    "kl_horizon": 100,
    "logging_steps": 1,
    "reward_funcs": "[tests.faults.recipe_runs:prefer_short]",
}
_GROUPS: Mapping[str, Any] = {
    "test_split_size": 6,
    "num_sample_prompts": 2,
    "response_length": 8,
    "num_generations": 2,
    "beta": 0.02,
    "logging_steps": 1,
    "reward_funcs": "[tests.faults.recipe_runs:prefer_short]",
}
OF_RECIPE: Mapping[str, Mapping[str, Any]] = {
    # Recipe, and after a space its variant -> its keys.
    "sft": _CHATS,
    "pretrain": {"test_split_size": 0.1, "max_length": 32, "model_config": SHAPE} | SAMPLES,
    "lora": {"test_split_size": 6, "packing": "false", "lora_r": 4} | SAMPLES,
    "dpo": {"test_split_size": 4, "num_sample_prompts": 0, "loss_type": '["sigmoid", "sft"]'},
    "dpo adapter": {"test_split_size": 4, "num_sample_prompts": 0, "use_peft": "true", "lora_r": 4},
    "reward": {"test_split_size": 6},
    "distill": _CHATS,
    "distill on policy with layers": _CHATS
    | {"packing": "false", "feature_weight": 0.5, "lmbda": 0.5, "response_length": 8},
    "ppo": _PPO,
    "ppo adapter": _PPO | {"use_peft": "true", "lora_r": 4},
    "rloo": _GROUPS,
    "grpo": _GROUPS | {"num_iterations": 2},
}
RECIPE_NAMES = tuple(OF_RECIPE)
DATA = {
    "sft": "chats",
    "lora": "chats",
    "distill": "chats",
    "dpo": "pairs",
    "reward": "pairs",
    "pretrain": "documents",
    **dict.fromkeys(("ppo", "rloo", "grpo"), "prompts"),
}


def write_inputs(folder: Path) -> None:
    """Write model, teacher, tokenizer and datasets of all recipes."""
    tokenizer = tiny.build_tokenizer()
    tiny.save_model(folder / "model", tokenizer)
    tiny.save_model(folder / "teacher", tokenizer, seed=1)
    tokenizer.save_pretrained(folder / "tokenizer")
    write_rows(folder / "prompts.jsonl", ({"prompt": [{"role": "user", "content": f"{n}?"}]} for n in range(60)))
    write_chats(folder / "chats.jsonl", range(1, 60))
    write_rows(folder / "pairs.jsonl", make_rows(34))
    write_documents(folder / "documents.jsonl", 80)


def write_chats(path: Path, numbers: Iterable[int]) -> None:
    """Write a chat for each number."""
    write_rows(path, (_make_chat(number) for number in numbers))


def make_keys(folder: Path, name: str, num_processes: int = 1, **more: Any) -> dict[str, Any]:
    """Return the keys of a run without ``output_dir``; the global batch is the same on one process and on two.

    Keys whose value in ``more`` is ``None`` are left out.
    """
    recipe = name.split()[0]
    keys: dict[str, Any] = {"dataset_name": folder / f"{DATA[recipe]}.jsonl"}
    if DATA[recipe] != "prompts":
        keys["prepared_dir"] = folder / "prepared"
    if name == "pretrain":
        keys["tokenizer_name_or_path"] = folder / "tokenizer"
    else:
        keys["model_name_or_path"] = folder / "model"
    if recipe == "distill":
        keys["teacher_model_name_or_path"] = folder / "teacher"
    batch = {"gradient_accumulation_steps": 2 // num_processes}
    if recipe in ("rloo", "grpo"):
        batch["steps_per_generation"] = 4 // num_processes
    keys |= COMMON | OF_RECIPE[name] | batch | more
    return {key: value for key, value in keys.items() if value is not None}


def prefer_short(*, completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward function of the RL runs: ``measure_shortness`` plus noise from the global random state."""
    return [score + 0.01 * random.random() for score in measure_shortness(completion_ids=completion_ids)]


def measure_shortness(*, completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return higher scores for shorter answers with smaller token ids; deterministic."""
    return [-len(ids) / 8 - sum(ids) / 4096 for ids in completion_ids]


def _make_chat(number: int) -> dict[str, Any]:
    answer = f"{number}, yes. " * (1 + number % 7)
    return {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": answer}]}
