"""``recipes check`` of SFT and PPO; findings are tested end to end in ``tests/commands/test_check.py``."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.rl import keys_task
from tests.rl.reward_models import write_reward_model
from tests.training.students import save_student

from recipes_lib.data.sources.rows import Remark
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.planning.memory import plan_memory
from recipes_lib.quantities import format_bytes
from recipes_lib.training.checkpoints.manifest import write_complete

CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]} for n in range(16)
]
# Rank 4 on seven linear layers of two decoder layers, in and out features of each, with two moments.
ADAPTER = 12 * 4 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
ONE_ROW_PER_RANK = {
    "packing": False,
    "bf16": True,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_processes": 8,
}


@pytest.mark.parametrize(("template", "caution"), [("", False), ("{{ strftime_now('%Y') }}", True)])
def test_template_cautions_are_reported(run_check, tmp_path, tiny_model_dir, template, caution) -> None:
    jinja = tmp_path / "template.jinja"
    jinja.write_text(template + (tiny_model_dir / "chat_template.jinja").read_text())
    problems, output = run_check("sft", CHATS[:1] * 4, chat_template_path=jinja)
    assert not problems
    assert ("warning: the chat template writes today's date" in output) == caution
    assert "exact duplicates of earlier rows: 3" in output


@pytest.mark.parametrize(("name", "caution"), [("up_proj", False), ("layers.0.mlp.up_proj", True)])
def test_adapter_of_few_layers_is_reported(run_check, name, caution) -> None:
    problems, output = run_check("lora", CHATS, lora_target_modules=f"[{name}]")
    assert not problems
    assert ("warning: lora_target_modules: the names are those of modules in 1 of 2 layers" in output) == caution


def test_warning_on_rows_names_the_first_and_a_remedy(run_check) -> None:
    texts = [{"prompt": "two and two", "completion": answer} for answer in (" are four", " are 4")]
    problems, output = run_check("sft", texts)
    assert not problems
    assert f"warning: train: 2 of 2 rows {Remark.PLAIN_TEXT.found}; the first is " in output
    assert f"; {Remark.PLAIN_TEXT.remedy}" in output


@pytest.mark.parametrize("init", ["default", "pissa"])
def test_disk_check_counts_only_adapters(run_check, tmp_path, monkeypatch, init) -> None:
    """The checkpoint of a LoRA run holds the factors and their two moments, not the base model."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 3 * ADAPTER))
    keys = {"dtype": "bfloat16", "save_steps": 1, "hardware": "ddp", **ONE_ROW_PER_RANK}
    problems, output = run_check("sft", CHATS, **keys)
    assert [problem.where for problem in problems] == [str(tmp_path / "out")], output
    assert "warning: trained weights have 16 bits" in output
    problems, output = run_check("lora", CHATS, lora_r=4, init_lora_weights=init, **keys)
    assert not problems, output
    assert "warning: trained weights" not in output
    assert f"2 checkpoints of {format_bytes(ADAPTER)} and" in output, output[-300:]


@pytest.mark.parametrize(("hardware", "num_steps"), [("fsdp2", 2), ("fsdp2_cp", 8), ("zero3_sp", 8)])
def test_context_parallel_ranks_reduce_rows_per_step(run_check, hardware, num_steps) -> None:
    """Eight ranks read eight rows per step; in two context-parallel groups of four, two."""
    problems, output = run_check("sft", CHATS, hardware=hardware, **ONE_ROW_PER_RANK)
    assert not problems, output
    assert f"    {num_steps} steps, 1.00 epochs" in output


def test_model_without_context_parallelism_is_reported(run_check, tmp_path, tiny_model_dir) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    config = json.loads((model / "config.json").read_text())

    def find_problems(hardware, **changes):
        (model / "config.json").write_text(json.dumps({**config, **changes}))
        problems, _ = run_check("sft", CHATS, model_name_or_path=model, hardware=hardware, **ONE_ROW_PER_RANK)
        return [problem.found for problem in problems]

    for hardware in ("fsdp2_cp", "zero3_sp"):
        found = "context parallelism does not support a llama model with attention dropout"
        assert find_problems(hardware, attention_dropout=0.1) == [found]
    assert find_problems("fsdp2", attention_dropout=0.1) == []
    heads = {"num_attention_heads": 2, "head_dim": 32}
    (model / "model.safetensors").unlink()  # Of four heads.
    assert find_problems("fsdp2_cp", **heads) == []
    (found,) = find_problems("zero3_sp", **heads)
    assert "does not support a llama model with 2 heads for 4 processes" in found


PAIRS = [{"prompt": f"{n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(4)]


@pytest.mark.parametrize(
    ("recipe", "rows", "key"),
    [
        ("sft", CHATS, "model_name_or_path"),
        ("distill", CHATS, "teacher_model_name_or_path"),
        ("reward", PAIRS, "model_name_or_path"),
        ("dpo", PAIRS, "ref_model_name_or_path"),
    ],
)
def test_weights_that_do_not_fit_are_a_problem_and_damaged_ones_a_warning(
    run_check, tmp_path, tiny_model_dir, recipe, rows, key
) -> None:
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    keys = {"teacher_model_name_or_path": tiny_model_dir} if recipe == "distill" else {}
    problems, output = run_check(recipe, rows, **keys | {key: model}, pad_token="<|pad|>")
    assert [key in problem.where for problem in problems] == [True], output
    assert f"the checkpoint of {model} lacks model.norm.weight" in problems[0].found
    assert "steps and learning rate" in output
    (problem,) = run_check(recipe, rows, **keys | {key: "runs/absent"}, pad_token="<|pad|>")[0]
    assert key in problem.where.split("--")
    (model / "model.safetensors").write_bytes(b"")
    problems, output = run_check(recipe, rows, **keys | {key: model}, pad_token="<|pad|>")
    assert problems == []
    assert f"warning: {model}: model.safetensors cannot be opened: " in output


ROWS = [{"prompt": [{"role": "user", "content": f"What is {n} plus {n}?"}], "answer": str(2 * n)} for n in range(12)]


@pytest.fixture
def check_ppo(run_check):
    keys = {"reward_funcs": "[tests.rl.keys_task:score_first_key]", "per_device_train_batch_size": 2}
    return lambda rows=ROWS, **more: run_check("ppo", rows, **{**keys, "response_length": 32, **more})


def test_valid_run_is_ready_with_figures_of_rows(check_ppo):
    problems, output = check_ppo(test_split_size=2, num_train_epochs=2)
    assert problems == []
    assert "10 prompts of" in output
    assert "held out: 2 prompts" in output
    assert "answers end with '<|im_end|>'" in output
    assert "reward: 1 score_first_key" in output
    assert "3 iterations of 8 answers and 8 steps of 2 answers: 24 steps, every prompt answered 2.4 times" in output
    assert output.endswith("ready to train\n")


def test_learning_rates_of_policy_begin_after_warmup_of_critic(check_ppo):
    keys = {"learning_rate": 1.6e-4, "lr_scheduler_type": "linear", "warmup_steps": 0, "num_train_epochs": 2}
    problems, output = check_ppo(test_split_size=2, critic_warmup_iterations=1, **keys)
    assert problems == []
    # 16 of 24 steps, of which those at 0, 25, 50, 75 and 100 % are 0, 4, 8, 11 and 15.
    rates = "1.60e-04, 1.20e-04, 8.00e-05, 5.00e-05, 1.00e-05"
    assert f"learning rate at 0, 25, 50, 75, 100 % of the steps after the first 8: {rates}" in output


def test_checkpoint_size_counts_policy_and_critic_adapters(check_ppo, tmp_path, monkeypatch):
    checkpoint = 2 * ADAPTER
    free = shutil._ntuple_diskusage(10**9, 0, 11 * checkpoint)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    problems, output = check_ppo(use_peft=True, lora_r=4, save_steps=0.1)
    assert problems == []
    kept = int(re.search(r"(\d+) checkpoints of", output)[1])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=kept * checkpoint))
    (problem,) = check_ppo(use_peft=True, lora_r=4, save_steps=0.1)[0]
    assert f"{kept} checkpoints of {format_bytes(checkpoint)} and" in problem.found
    # Those that a resumed run has written need no more space.
    output_dir = tmp_path / "run"
    (output_dir / "checkpoint-2").mkdir(parents=True)
    (output_dir / "checkpoint-2" / "weights").write_bytes(b"0" * checkpoint)
    write_complete(output_dir / "checkpoint-2")
    assert check_ppo(use_peft=True, lora_r=4, save_steps=0.1, output_dir=output_dir)[0] == []


def test_reward_that_cannot_be_imported_is_reported(check_ppo):
    problems, _ = check_ppo(reward_funcs="[tests.rl.keys_task:absent, nowhere:at_all]")
    assert [problem.where for problem in problems] == ["reward_funcs"] * 2
    assert "absent" in problems[0].found
    assert "nowhere" in problems[1].found


def test_reward_that_needs_another_column_is_reported(check_ppo):
    verifiers = "[recipes_lib.rl.verifiers:exact_match, recipes_lib.rl.verifiers:python_tests]"
    problems, _ = check_ppo([{**row, "solution": "4"} for row in ROWS], reward_funcs=verifiers)
    assert [problem.found for problem in problems] == [
        "python_tests cannot be called: missing a required argument: 'tests'"
    ]


def test_response_beyond_model_positions_is_reported(check_ppo):
    problems, _ = check_ppo(response_length=600)
    assert [problem.where for problem in problems] == ["max_length"]


def test_response_beyond_reward_model_positions_is_reported(check_ppo, tiny_model_dir, tmp_path):
    reward, other = tmp_path / "reward", tmp_path / "other"
    for folder in (reward, other):
        write_reward_model(folder, tiny_model_dir)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    keys_task.build_tokenizer().save_pretrained(other)
    keys = {"reward_funcs": "null", "response_length": 32}
    problems, _ = check_ppo(reward_model_name_or_path=reward, **keys)
    assert [problem.where for problem in problems] == ["--reward_model_name_or_path"]
    assert "the reward model has 40 positions" in problems[0].found
    problems, output = check_ppo(reward_model_name_or_path=other, **keys)
    assert problems == []
    assert "warning: the reward model has 40 positions" in output
    problems, output = check_ppo(reward_model_name_or_path=tiny_model_dir, **keys)
    assert "warning" not in output
    (problem,) = problems
    assert "lacks score.weight" in problem.found
    (problem,) = check_ppo(reward_model_name_or_path="runs/absent", **keys)[0]
    assert (problem.where, "runs/absent is no folder" in problem.found) == ("--reward_model_name_or_path", True)


def test_reward_model_from_which_no_critic_can_start_is_reported(check_ppo, tiny_model_dir, tmp_path):
    larger = write_reward_model(tmp_path / "reward", save_student(tmp_path / "base", tiny_model_dir, vocab_size=600))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    record = {"peft_type": "LORA", "task_type": "SEQ_CLS", "base_model_name_or_path": str(tiny_model_dir)}
    (adapter / "adapter_config.json").write_text(json.dumps(record))
    for name, found in ((larger, "has a vocabulary of 600 tokens"), (adapter, "which is an adapter")):
        problems, _ = check_ppo(reward_model_name_or_path=name)
        assert [problem.where for problem in problems if found in problem.found] == ["critic_model_name_or_path"]
        problems, _ = check_ppo(reward_model_name_or_path=name, critic_model_name_or_path=tiny_model_dir)
        assert not [problem for problem in problems if "critic" in problem.where]
    cut = write_reward_model(tmp_path / "cut", tiny_model_dir)
    tensors = load_file(cut / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.0.mlp" not in name}
    save_file(kept, cut / "model.safetensors", metadata={"format": "pt"})
    (problem,) = check_ppo(critic_model_name_or_path=cut)[0]
    assert "critic_model_name_or_path" in problem.where
    assert "layers.0.mlp" in problem.found
    (problem,) = check_ppo(critic_model_name_or_path=larger, use_peft=True)[0]
    assert "the critic shares the policy's weights, and cannot start from another model" in problem.found


def test_overlong_prompt_is_reported_or_dropped(check_ppo):
    rows = [*ROWS, {"prompt": [{"role": "user", "content": "a long prompt " * 40}]}]
    problems, _ = check_ppo(rows, max_length=64)
    assert [problem.where.endswith("rows.jsonl:13") for problem in problems] == [True]
    problems, output = check_ppo(rows, max_length=64, overlong="drop")
    assert problems == []
    assert "left out, too long: 1" in output


def test_missing_engine_and_unseeded_engine_are_reported(check_ppo, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    problems, _ = check_ppo(use_vllm=True, use_cpu=True)
    assert [(problem.where, problem.found) for problem in problems] == [("use_vllm", "vLLM is not installed")]
    # The run is probably for another machine.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    problems, output = check_ppo(use_vllm=True)
    assert problems == []
    assert "warning: use_vllm: vLLM is not installed" in output
    problems, output = check_ppo(use_transformers_continuous_batching=True)
    assert problems == []
    assert "continuous batching, not from the seed" in output


def test_run_beyond_accelerator_memory_is_warned(check_ppo, monkeypatch):
    monkeypatch.setattr("recipes_lib.hardware.read_device_memory", lambda: None)
    problems, output = check_ppo()
    assert "GB at most; `recipes plan` lists it" in output
    assert "warning" not in output
    monkeypatch.setattr("recipes_lib.hardware.read_device_memory", lambda: 500_000_000)
    problems, output = check_ppo()
    assert not problems
    assert "warning: this is more than the 500 MB of the device at hand can hold; adapters" in output


def test_architecture_whose_memory_cannot_be_planned_is_a_warning(check_ppo, monkeypatch):
    def plan(*_args, **_keys):
        raise ConfigError(Problem("model_config", "a new model saves activations that cannot be counted", "measure it"))

    monkeypatch.setattr("recipes_lib.planning.memory.plan_memory", plan)
    problems, output = check_ppo()
    assert not problems
    assert "warning: memory is not planned: a new model saves" in output


def test_memory_estimate_uses_checked_layout(check_ppo, monkeypatch):
    """FSDP2 shards the models, so that a GPU too small for a full copy is large enough."""
    planned = []
    monkeypatch.setattr("recipes_lib.hardware.read_device_memory", lambda: 500_000_000)
    monkeypatch.setattr(
        "recipes_lib.planning.memory.plan_memory",
        lambda config, model, layout, **keys: planned.append(layout) or plan_memory(config, model, layout, **keys),
    )
    check_ppo(hardware="fsdp2", num_processes=2, bf16=True)
    assert [layout.shards for layout in planned] == [(2, 2, 2)]
