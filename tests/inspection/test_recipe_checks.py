"""``recipes check`` of SFT and PPO; findings are tested end to end in ``tests/commands/test_check.py``."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from tests.rl import keys_task

from recipes_lib.planning.memory import plan_memory

CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]} for n in range(16)
]
# Rank 4 on seven linear layers of two decoder layers, in and out features of each, with two moments.
ADAPTER = 12 * 4 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
ONE_A_PROCESS = {
    "packing": False,
    "bf16": True,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_processes": 8,
}


@pytest.mark.parametrize(("template", "caution"), [("", False), ("{{ strftime_now('%Y') }}", True)])
def test_template_cautions_are_reported(look, tmp_path, tiny_model_dir, template, caution) -> None:
    jinja = tmp_path / "template.jinja"
    jinja.write_text(template + (tiny_model_dir / "chat_template.jinja").read_text())
    problems, told = look("sft", CHATS[:1] * 4, chat_template_path=jinja)
    assert not problems
    assert ("warning: the chat template writes today's date" in told) == caution
    assert "exact duplicates of earlier rows: 3" in told


@pytest.mark.parametrize("init", ["default", "pissa"])
def test_disk_check_counts_only_adapters(look, tmp_path, monkeypatch, init) -> None:
    """A checkpoint of an adapter's run is its factors and their two moments, whatever its base takes."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 3 * ADAPTER))
    keys = {"dtype": "bfloat16", "save_steps": 1, "hardware": "ddp", **ONE_A_PROCESS}
    problems, told = look("sft", CHATS, **keys)
    assert [problem.where for problem in problems] == [str(tmp_path / "out")], told
    problems, told = look("lora", CHATS, lora_r=4, init_lora_weights=init, **keys)
    assert not problems, told
    assert f"2 checkpoints of {ADAPTER / 1e9:.2f} GB" in told


@pytest.mark.parametrize(("hardware", "num_steps"), [("fsdp2", 2), ("fsdp2_cp", 8), ("zero3_sp", 8)])
def test_context_parallel_ranks_reduce_rows_per_step(look, hardware, num_steps) -> None:
    """Eight processes take eight rows; in two groups of four they take two."""
    problems, told = look("sft", CHATS, hardware=hardware, **ONE_A_PROCESS)
    assert not problems, told
    assert f"    {num_steps} steps, 1.00 epochs" in told


def test_model_without_context_parallelism_is_reported(look, tmp_path, tiny_model_dir) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    config = json.loads((model / "config.json").read_text())

    def find_problems(hardware, **changes):
        (model / "config.json").write_text(json.dumps({**config, **changes}))
        problems, _ = look("sft", CHATS, model_name_or_path=model, hardware=hardware, **ONE_A_PROCESS)
        return [problem.found for problem in problems]

    for hardware in ("fsdp2_cp", "zero3_sp"):
        found = "context parallelism does not support a llama model with attention dropout"
        assert find_problems(hardware, attention_dropout=0.1) == [found]
    assert find_problems("fsdp2", attention_dropout=0.1) == []
    heads = {"num_attention_heads": 2, "head_dim": 32}
    assert find_problems("fsdp2_cp", **heads) == []
    (found,) = find_problems("zero3_sp", **heads)
    assert "does not support a llama model with 2 heads for 4 processes" in found


ROWS = [{"prompt": [{"role": "user", "content": f"What is {n} plus {n}?"}], "answer": str(2 * n)} for n in range(12)]


@pytest.fixture
def look_at_ppo(look):
    keys = {"reward_funcs": "[tests.rl.keys_task:score_first_key]", "per_device_train_batch_size": 2}
    return lambda rows=ROWS, **more: look("ppo", rows, **{**keys, "response_length": 32, **more})


def test_valid_run_is_ready_with_figures_of_rows(look_at_ppo):
    problems, told = look_at_ppo(test_split_size=2, num_train_epochs=2)
    assert problems == []
    assert "10 prompts of" in told
    assert "held out: 2 prompts" in told
    assert "answers end with '<|im_end|>'" in told
    assert "reward: 1 score_first_key" in told
    assert "3 iterations of 8 answers and 8 steps of 2 answers: 24 steps, every prompt answered 2.4 times" in told
    assert told.endswith("ready to train\n")


def test_checkpoint_size_counts_policy_and_critic_adapters(look_at_ppo, monkeypatch):
    checkpoint = 2 * ADAPTER
    free = shutil._ntuple_diskusage(10**9, 0, 11 * checkpoint)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    problems, told = look_at_ppo(use_peft=True, lora_r=4, save_steps=0.1)
    assert problems == []
    kept = int(re.search(r"(\d+) checkpoints of", told)[1])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=kept * checkpoint))
    (problem,) = look_at_ppo(use_peft=True, lora_r=4, save_steps=0.1)[0]
    assert f"{kept} checkpoints of {checkpoint / 1e9:.3g} GB" in problem.found


def test_reward_that_cannot_be_imported_is_reported(look_at_ppo):
    problems, _ = look_at_ppo(reward_funcs="[tests.rl.keys_task:absent, nowhere:at_all]")
    assert [problem.where for problem in problems] == ["reward_funcs"] * 2
    assert "absent" in problems[0].found
    assert "nowhere" in problems[1].found


def test_response_beyond_model_positions_is_reported(look_at_ppo):
    problems, _ = look_at_ppo(response_length=600)
    assert [problem.where for problem in problems] == ["max_length"]


def test_response_beyond_reward_model_positions_is_reported(look_at_ppo, tiny_model_dir, tmp_path):
    reward, other = tmp_path / "reward", tmp_path / "other"
    for folder in (reward, other):
        shutil.copytree(tiny_model_dir, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    keys_task.build_tokenizer().save_pretrained(other)
    keys = {"reward_funcs": "null", "response_length": 32}
    problems, _ = look_at_ppo(reward_model_name_or_path=reward, **keys)
    assert [problem.where for problem in problems] == ["reward_model_name_or_path"]
    assert "the reward model has 40 positions" in problems[0].found
    problems, told = look_at_ppo(reward_model_name_or_path=other, **keys)
    assert problems == []
    assert "warning: the reward model has 40 positions" in told
    assert "warning" not in look_at_ppo(reward_model_name_or_path=tiny_model_dir, **keys)[1]


def test_overlong_prompt_is_reported_or_dropped(look_at_ppo):
    rows = [*ROWS, {"prompt": [{"role": "user", "content": "a long prompt " * 40}]}]
    problems, _ = look_at_ppo(rows, max_length=64)
    assert [problem.where.endswith("rows.jsonl:13") for problem in problems] == [True]
    problems, told = look_at_ppo(rows, max_length=64, overlong="drop")
    assert problems == []
    assert "left out, too long: 1" in told


def test_missing_engine_and_unseeded_engine_are_reported(look_at_ppo):
    problems, _ = look_at_ppo(use_vllm=True)
    assert [(problem.where, problem.found) for problem in problems] == [("use_vllm", "vLLM is not installed")]
    problems, told = look_at_ppo(use_transformers_continuous_batching=True)
    assert problems == []
    assert "continuous batching, not from the seed" in told


def test_run_beyond_accelerator_memory_is_warned(look_at_ppo, monkeypatch):
    monkeypatch.setattr("recipes_lib.hardware.read_device_memory", lambda: None)
    problems, told = look_at_ppo()
    assert "GB at most; `recipes plan` lists it" in told
    assert "warning" not in told
    monkeypatch.setattr("recipes_lib.hardware.read_device_memory", lambda: 500_000_000)
    problems, told = look_at_ppo()
    assert not problems
    assert "warning: this is more than the 0.5 GB of the device at hand can hold; adapters" in told


def test_memory_estimate_uses_checked_layout(look_at_ppo, monkeypatch):
    """Where FSDP2 shares the models out, a GPU that one copy of them would fill is large enough."""
    planned = []
    monkeypatch.setattr("recipes_lib.hardware.read_device_memory", lambda: 500_000_000)
    monkeypatch.setattr(
        "recipes_lib.planning.memory.plan_memory",
        lambda config, model, layout, **keys: planned.append(layout) or plan_memory(config, model, layout, **keys),
    )
    _, told = look_at_ppo(hardware="fsdp2", num_processes=2, bf16=True)
    assert planned[0].shards == (2, 2, 2)
    assert "or accelerate_configs/ddp.yaml: " in told
