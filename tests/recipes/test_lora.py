"""The LoRA recipe end to end: adapters in plain PEFT, merging, resume (4-bit base: ``test_distill.py``)."""

import json
import runpy
import sys

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed import sharding
from tests.faults import recipe_runs
from tests.forked import ROOT, run_script
from tests.recipes.stranger import ANSWERS, QUESTIONS, ask, write_chats
from tests.rows import read_events


def test_adapter_and_merged_model_answer_in_plain_peft(recipes, tmp_path, tiny_model_dir):
    output = tmp_path / "a run"
    keys = {
        "model_name_or_path": tiny_model_dir,
        "dataset_name": write_chats(tmp_path / "chats, with spaces.jsonl", 4),
        "output_dir": output,
        "prepared_dir": tmp_path / "prepared",
        "bf16": "false",
        "learning_rate": 1e-2,
        "max_steps": 100,
        "per_device_train_batch_size": 4,
        "max_length": 64,
        "num_sample_prompts": 0,
        "save_strategy": "no",
        "lora_r": 32,
        "lora_modules_to_save": "[norm]",
        "loraplus_lr_ratio": 4,
    }
    printed = run_script(ROOT / "recipes" / "lora.py", keys).stderr
    for line in ("changes no logit", "33 trained tensors have one", "frozen tensors are unchanged"):
        assert line in printed
    answers = ask(tiny_model_dir, output, QUESTIONS[:4])
    assert [(answer["text"], answer["stopped"]) for answer in answers] == [(answer, True) for answer in ANSWERS[:4]]
    names = {path.name for path in output.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "generation_config.json", "README.md"} <= names
    assert {"tokenizer.json", "chat_template.jinja", "run.json", "metrics.jsonl", "report.html"} <= names
    assert not names & {"model.safetensors", "training_args.bin", "_unverified"}
    record = json.loads((output / "run.json").read_text())
    assert record["status"] == "done"
    assert record["adapter"]["base_model"] == str(tiny_model_dir)

    recipes("merge", "--adapter", output, "--output", tmp_path / "m m")
    assert ask(tmp_path / "m m", tmp_path / "m m", QUESTIONS[:4]) == answers


@pytest.fixture(scope="module")
def straight(inputs, tmp_path_factory):
    """A finished run with dropout, and its keys."""
    output = tmp_path_factory.mktemp("straight")
    keys = recipe_runs.make_keys(inputs, "lora", max_steps=6, lora_dropout=0.1, output_dir=output)
    assert sharding.run_recipe("lora", keys) == 0
    return output, keys


def test_resumed_run_reproduces_adapter(straight, tmp_path):
    output, keys = straight
    sharding.cut(output, tmp_path / "killed", 3)
    assert sharding.run_recipe("lora", keys | {"output_dir": tmp_path / "killed"}) == 0
    one, other = (load_file(run / "adapter_model.safetensors") for run in (output, tmp_path / "killed"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert json.loads((tmp_path / "killed" / "run.json").read_text())["resumed_from"] == "checkpoint-3"
    # With the stop tokens of training, also if a checkpoint is merged or evaluated.
    saved, exported = (folder / "generation_config.json" for folder in (output / "checkpoint-3", output))
    assert saved.read_text() == exported.read_text()


def test_second_run_continues_adapter_of_first(straight, tmp_path, capsys):
    first, keys = straight
    more = {"output_dir": tmp_path, "adapter_name_or_path": first, "max_steps": 2}
    keys = {name: value for name, value in keys.items() if name not in ("lora_r", "lora_dropout")}
    assert sharding.run_recipe("lora", keys | more) == 0
    # Logged for a new adapter, whose B matrices are 0.
    assert "changes no logit" not in capsys.readouterr().err
    assert read_events(tmp_path)[0]["loss"] < read_events(first)[0]["loss"]


@pytest.mark.parametrize(("recipe", "other"), [("lora", "sft"), ("rloo", "grpo")])
def test_recipe_that_imports_another_runs_as_module(monkeypatch, recipe, other):
    folder = str(ROOT / "recipes")
    monkeypatch.setattr(sys, "path", [str(ROOT), *(place for place in sys.path if place != folder)])
    monkeypatch.delitem(sys.modules, other, raising=False)
    assert runpy.run_module(f"recipes.{recipe}")["main"].__module__ == other
