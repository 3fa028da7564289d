"""The inspection of a fine-tuning run; its findings are read from end to end in ``tests/commands/test_check.py``."""

from __future__ import annotations

import io
import json
import shutil

import pytest
from rich.console import Console

from recipes_lib.config.loader import load_config
from recipes_lib.inspection.supervised import SFTInspection
from recipes_lib.training.layouts.launch_files import find_launch_file, plan_launch


@pytest.mark.parametrize(("template", "caution"), [("", False), ("{{ strftime_now('%Y') }}", True)])
def test_what_is_odd_about_a_template_is_told(tmp_path, tiny_model_dir, template, caution) -> None:
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]
    chats.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(4)))
    jinja = tmp_path / "template.jinja"
    jinja.write_text(template + (tiny_model_dir / "chat_template.jinja").read_text())
    keys = {
        "model_name_or_path": tiny_model_dir,
        "dataset_name": chats,
        "output_dir": tmp_path / "out",
        "prepared_dir": tmp_path / "prepared",
        "chat_template_path": jinja,
    }
    config = load_config("sft", [f"--{name}={value}" for name, value in keys.items()])
    output = io.StringIO()
    inspection = SFTInspection(config, plan_launch(None, 1), Console(file=output, width=200, highlight=False))
    inspection.look_at_everything()
    assert not inspection.problems
    assert ("warning: the chat template writes today's date" in output.getvalue()) == caution
    assert "exact duplicates of earlier rows: 3" in output.getvalue()


@pytest.mark.parametrize("init", ["default", "pissa"])
def test_a_disk_that_holds_the_adapters_alone_is_large_enough(tmp_path, tiny_model_dir, monkeypatch, init) -> None:
    """A checkpoint of an adapter's run is its factors and their two moments, whatever its base takes."""
    # Rank 4 on seven linear layers of two decoder layers: in and out features of each.
    checkpoint = 12 * 4 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 3 * checkpoint))
    whole, told = inspect(tmp_path, tiny_model_dir, "ddp", dtype="bfloat16", save_steps=1)
    assert [problem.where for problem in whole.problems] == [str(tmp_path / "out")], told
    keys = {"stage": "lora", "lora_r": 4, "init_lora_weights": init, "dtype": "bfloat16", "save_steps": 1}
    adapted, told = inspect(tmp_path, tiny_model_dir, "ddp", **keys)
    assert not adapted.problems, told
    assert adapted.count_trained() == (checkpoint // 12, 4)
    assert f"2 checkpoints of {checkpoint / 1e9:.2f} GB" in told


def inspect(tmp_path, model, hardware: str, stage: str = "sft", **changes) -> tuple[SFTInspection, str]:
    chats = tmp_path / "chats.jsonl"
    turns = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}] for n in range(16)]
    chats.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    keys = {
        "model_name_or_path": model,
        "dataset_name": chats,
        "output_dir": tmp_path / "out",
        "prepared_dir": tmp_path / "prepared",
        "packing": False,
        "bf16": True,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        **changes,
    }
    config = load_config(stage, [f"--{name}={value}" for name, value in keys.items()])
    output = io.StringIO()
    file = find_launch_file(hardware)
    inspection = SFTInspection(config, plan_launch(file, 8), Console(file=output, width=200, highlight=False), file)
    inspection.look_at_everything()
    return inspection, output.getvalue()


@pytest.mark.parametrize(("hardware", "num_steps"), [("fsdp2", 2), ("fsdp2_cp", 8), ("zero3_sp", 8)])
def test_processes_that_share_rows_take_fewer_of_them_a_step(tmp_path, tiny_model_dir, hardware, num_steps) -> None:
    """Eight processes take eight rows; in two groups of four they take two."""
    inspection, told = inspect(tmp_path, tiny_model_dir, hardware)
    assert not inspection.problems, told
    assert inspection.num_steps == num_steps


def test_a_model_that_cannot_share_a_row_is_told_before_it_is_rented_for(tmp_path, tiny_model_dir) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
    for hardware in ("fsdp2_cp", "zero3_sp"):
        (problem,) = inspect(tmp_path, model, hardware)[0].problems
        assert problem.found == "context parallelism does not support a llama model with attention dropout"
    assert not inspect(tmp_path, model, "fsdp2")[0].problems
    (model / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2, "head_dim": 32}))
    assert not inspect(tmp_path, model, "fsdp2_cp")[0].problems
    (problem,) = inspect(tmp_path, model, "zero3_sp")[0].problems
    assert "does not support a llama model with 2 heads for 4 processes" in problem.found
