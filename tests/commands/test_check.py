"""``recipes check``: problems, exit codes, prepared data shared with training, and ``--migrate``."""

import io
import json
import shutil
from dataclasses import replace

import pytest
from rich.console import Console
from tests.rows import write_rows

from recipes_lib.commands.check import check, main
from recipes_lib.config.loader import load_config
from recipes_lib.data.packed.prepared_set import prepare
from recipes_lib.training.layouts.launch_environment import plan_launch


@pytest.fixture
def chats(tmp_path):
    rows = [
        [{"role": "user", "content": f"And {n}?"}, {"role": "assistant", "content": f"{n + 1}."}] for n in range(30)
    ]
    return write_rows(tmp_path / "chats.jsonl", [{"messages": turns} for turns in rows])


def keys_for(chats, tiny_model_dir, tmp_path, **keys):
    keys = {
        "model_name_or_path": tiny_model_dir,
        "dataset_name": chats,
        "test_split_size": 4,
        "output_dir": tmp_path / "out",
        "prepared_dir": tmp_path / "prepared",
    } | keys
    return [f"--{name}={value}" for name, value in keys.items()]


def add_long_row(chats):
    """Append a row with more tokens than the 512 positions of the tiny model."""
    turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1 2 3 " * 150}]
    with chats.open("a") as file:
        file.write(json.dumps({"messages": turns}) + "\n")


def run_check(argv):
    output = io.StringIO()
    problems = check(load_config("sft", argv), plan_launch(None, 2), Console(file=output, width=200, highlight=False))
    return problems, output.getvalue()


def test_valid_run_is_ready_and_facts_are_printed(chats, tiny_model_dir, tmp_path):
    problems, text = run_check(keys_for(chats, tiny_model_dir, tmp_path, max_steps=50, learning_rate=1e-3))
    assert not problems
    for fact in ("ready to train", "`messages` layout", "26 rows", "answers end with '<|im_end|>'", "50 steps", "sdpa"):
        assert fact in text
    assert "1.00e-03" not in text.split("learning rate at")[1].split(",")[0]
    assert not (tmp_path / "out").exists()


def test_training_reuses_data_prepared_by_check(chats, tiny_model_dir, tmp_path):
    def list_times():
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "prepared").rglob("*") if path.is_file()}

    argv = keys_for(chats, tiny_model_dir, tmp_path)
    run_check(argv)
    before = list_times()
    assert not prepare(load_config("sft", argv), lambda: pytest.fail("tokenised again")).is_new
    assert before == list_times()


def test_problems_of_all_sections_are_reported(chats, tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 10**3))
    monkeypatch.setattr("recipes_lib.publish.access.get_token", lambda: None)
    add_long_row(chats)
    keys = {"attn_implementation": "flash_attention_2", "use_cpu": "true", "push_to_hub": "true"}
    argv = keys_for(chats, tiny_model_dir, tmp_path, **keys)
    problems, text = run_check(argv)
    messages = [problem.found for problem in problems]
    for words in ("more than the 512 positions", "flash_attention_2", "the disk has"):
        assert any(words in one for one in messages)
    assert "push_to_hub" in [problem.where for problem in problems]
    assert f"{len(problems)} problems" in text


def test_invalid_rows_do_not_hide_other_problems(chats, tiny_model_dir, tmp_path):
    with chats.open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "no answer"}]}\n')
    keys = {"attn_implementation": "flash_attention_2", "use_cpu": "true"}
    problems, _ = run_check(keys_for(chats, tiny_model_dir, tmp_path, **keys))
    assert any(problem.where.endswith(":31") for problem in problems)
    assert any("flash_attention_2" in problem.found for problem in problems)


@pytest.mark.parametrize("kernel", ["flash_attention_2", "kernels-community/flash-attn3"])
def test_kernels_of_gpus_are_a_warning_without_one_unless_the_model_lacks_them(
    chats, tiny_model_dir, tmp_path, monkeypatch, kernel
):
    """A recipe for GPUs can be checked on a laptop, which has neither a GPU nor bfloat16 nor the kernel's package."""
    monkeypatch.setattr("recipes_lib.training.trainers.arguments.supports_bf16", lambda **_: False)
    argv = keys_for(chats, tiny_model_dir, tmp_path, attn_implementation=kernel)
    for keys in ([], ["--bf16=false", "--dtype=bfloat16"]):
        problems, text = run_check([*argv, *keys])
        assert not problems
        assert f"warning: attn_implementation: {kernel} is for GPUs, and this machine has none" in text
    problems, _ = run_check([*argv, "--bf16=false"])
    assert [problem.found for problem in problems] == [f"{kernel} needs bf16 or fp16"]
    monkeypatch.setattr("transformers.LlamaForCausalLM._supports_flash_attn", False)
    problems, _ = run_check(argv)
    assert [problem.found for problem in problems] == [f"{kernel} is not supported for llama models by transformers"]


@pytest.mark.parametrize("command", ["check", "launch"])
def test_missing_keys_mention_config_flag(command, recipes):
    assert "command line, without --config: `model_name_or_path` is missing" in recipes(command, code=2)


def test_memory_of_rl_uses_precision_of_launch_file(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("recipes_lib.training.trainers.arguments.supports_bf16", lambda **_: False)
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{n}?"} for n in range(8)])
    keys = {"model_name_or_path": tiny_model_dir, "dataset_name": prompts, "reward_funcs": "math:sqrt"}
    argv = [f"--{name}={value}" for name, value in (keys | {"output_dir": tmp_path / "out"}).items()]
    planned = []
    monkeypatch.setattr("recipes_lib.planning.memory.plan_memory", lambda config, *_: planned.append(config) or 1 / 0)
    for precision in ("no", "bf16"):
        launch = replace(plan_launch(None, 1), precision=precision)
        with pytest.raises(ZeroDivisionError):
            check(load_config("grpo", argv), launch, Console(file=io.StringIO()))
    assert [config.training["bf16"] for config in planned] == [False, True]


def test_exit_code_is_2_if_there_are_problems(recipes, chats, tiny_model_dir, tmp_path):
    recipes("check", *keys_for(chats, tiny_model_dir, tmp_path))
    add_long_row(chats)
    recipes("check", *keys_for(chats, tiny_model_dir, tmp_path), code=2)


def test_migration_prints_loadable_file_and_changes(chats, tiny_model_dir, tmp_path, capsys):
    old = tmp_path / "old.yaml"
    old.write_text(
        f"model_name_or_path: {tiny_model_dir}\ntorch_dtype: bfloat16\ndataset_name: {chats}\n"
        f"max_seq_length: 256\nevaluation_strategy: epoch\nwarmup_ratio: 0.1\noutput_dir: {tmp_path / 'out'}\n"
    )
    assert main(["--migrate", str(old)]) == 0
    captured = capsys.readouterr()
    new = tmp_path / "new.yaml"
    new.write_text(captured.out)
    config = load_config("sft", ["--config", str(new)])
    assert (config.tokens.max_length, config.model.dtype) == (256, "bfloat16")
    assert config.training["warmup_steps"] == 0.1
    assert f"{old}:4" in captured.err


def test_incomplete_migration_exits_with_2(chats, tiny_model_dir, tmp_path, capsys):
    old = tmp_path / "old.yaml"
    old.write_text(f"model_name_or_path: {tiny_model_dir}\noutput_dir: o\nuse_peft: true\n")
    assert main(["--migrate", str(old)]) == 2
    captured = capsys.readouterr()
    assert "use_peft: true" in captured.out
    assert "`dataset_name` is missing" in captured.err
    old.write_text(f"{old.read_text()}dataset_name: {chats}\n")
    assert main(["--migrate", str(old), "--recipe", "sft"]) == 2
    assert "another method" in capsys.readouterr().err
    assert main(["--migrate", str(old)]) == 0
    assert "a recipe of lora" in capsys.readouterr().err
