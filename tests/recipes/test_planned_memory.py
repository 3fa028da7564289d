"""Planned memory of every recipe, compared with the peak of live tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests import tiny
from tests.distributed import sharding
from tests.faults import recipe_runs
from tests.live_tensors import LiveTensors
from tests.rows import write_rows
from transformers import LlamaConfig, LlamaForCausalLM

from recipes_lib.config.loader import load_config
from recipes_lib.planning.memory import plan_memory
from recipes_lib.planning.memory_plan import Layout

LENGTH, ANSWER = 128, 64
# With one micro-batch, gradients do not exist yet at the peak of activations, and the plan counts both.
ROWS = {"max_length": LENGTH, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
SAMPLED = {
    "num_sample_prompts": 0,
    "response_length": ANSWER,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 16,
}
KEYS: dict[str, dict[str, Any]] = {
    # Compiled on a GPU, where fused operations save less; eager on a CPU.
    "pretrain": ROWS | {"torch_compile": False},
    "sft": ROWS,
    "sft kl_to_base": ROWS | {"kl_to_base": 0.1},
    "sft ewc": ROWS | {"ewc_lambda": 1.0, "ewc_fisher": "identity"},
    "lora": ROWS | {"packing": None},
    "reward": ROWS,
    "reward recomputed": ROWS | {"activation_checkpointing": True},
    "dpo": ROWS,
    "dpo adapter": ROWS,
    "distill": ROWS,
    "distill adapter": ROWS | {"use_peft": "true"},
    "distill on policy": ROWS | {"lmbda": 1.0, "response_length": 112, "per_device_eval_batch_size": 64},
    "ppo": SAMPLED | {"num_mini_batches": 1},
    "grpo": SAMPLED,
}
UNUSED = {"save_steps", "save_total_limit", "eval_steps", "sample_max_new_tokens", "model_config"}


def make_words(start: int, num_words: int) -> str:
    return " ".join(f"{(start * 7 + index * 13) % 97:02d}" for index in range(num_words))


def make_chat(role: str, *text: Any) -> list[dict[str, str]]:
    return [{"role": role, "content": make_words(*text)}]


@pytest.fixture(scope="module")
def inputs(inputs: Path) -> Path:
    """Folder with rows of maximum length, and a model large enough that its tensors dominate the peak."""
    stop = tiny.build_tokenizer().eos_token_id
    shape = LlamaConfig(
        **tiny.sizes(192, 4, 6, vocab_size=512, intermediate_size=512),
        bos_token_id=None,
        eos_token_id=stop,
        pad_token_id=stop,
    )
    LlamaForCausalLM(shape).save_pretrained(inputs / "model")
    write_rows(inputs / "documents.jsonl", ({"text": make_words(n, 400)} for n in range(40)))
    chats = ([*make_chat("user", n, 1), *make_chat("assistant", n, 36)] for n in range(80))
    write_rows(inputs / "chats.jsonl", ({"messages": chat} for chat in chats))
    pairs = (
        (make_chat("user", n, 1), make_chat("assistant", n, 36), make_chat("assistant", n + 1, 36)) for n in range(60)
    )
    write_rows(inputs / "pairs.jsonl", ({"prompt": a, "chosen": b, "rejected": c} for a, b, c in pairs))
    write_rows(inputs / "prompts.jsonl", ({"prompt": make_chat("user", n, 15)} for n in range(60)))
    return inputs


def make_keys(inputs: Path, name: str, output_dir: Path) -> dict[str, Any]:
    keys = {"output_dir": output_dir, "max_steps": 2, "save_strategy": "no", "eval_strategy": "no"} | KEYS[name]
    if name == "pretrain":
        keys |= {"model_name_or_path": inputs / "model", "tokenizer_name_or_path": None}
    if name.startswith("distill"):
        keys |= {"teacher_model_name_or_path": inputs / "model"}
    usual = name.removesuffix(" recomputed")
    usual = usual if usual in recipe_runs.RECIPE_NAMES else "sft"
    return recipe_runs.make_keys(inputs, usual, **dict.fromkeys(UNUSED), **keys)


@pytest.mark.parametrize(
    "name", [name if name in ("sft", "grpo") else pytest.param(name, marks=pytest.mark.slow) for name in KEYS]
)
def test_planned_memory_matches_peak_of_live_tensors(inputs: Path, tmp_path: Path, name: str) -> None:
    keys = make_keys(inputs, name, tmp_path / "run")
    recipe = name.split()[0]
    with LiveTensors() as live:
        assert sharding.run_recipe(recipe, keys) == 0
    config = load_config(recipe, [f"--{key}={value}" for key, value in keys.items()])
    plan = plan_memory(config, LlamaConfig.from_pretrained(inputs / "model"), Layout("single_gpu", 1))
    assert plan.allocated == pytest.approx(live.peak, rel=0.08)
