"""The distillation recipe end to end: files of a finished run, and a vocabulary mismatch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from peft import PeftModel
from tests.forked import ROOT, run_script
from tests.recipes.preferences import load_recipe, run_here, write_config
from tests.rows import read_rows, write_rows
from tests.training.students import save_student
from transformers import AutoModelForCausalLM, AutoTokenizer

RECIPE = ROOT / "recipes" / "distill.py"


@pytest.fixture
def write(tmp_path: Path, tiny_model_dir: Path) -> Callable[..., Path]:
    """Return a function that writes the configuration of a run of a few steps in fp32."""
    rows = [{"prompt": f"What is {n} and {n}?", "completion": f" It is {2 * n}."} for n in range(20)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    student = save_student(tmp_path / "student", tiny_model_dir)
    usual = {"max_length": 64, "max_steps": 4, "per_device_train_batch_size": 2, "test_split_size": 4}
    usual |= {"num_sample_prompts": 1, "sample_max_new_tokens": 4, "save_strategy": "steps"}
    teacher = {"teacher_model_name_or_path": str(tiny_model_dir)}
    return lambda **keys: write_config(tmp_path, student, data, **{**usual, **teacher, **keys})


def test_run_writes_student_metrics_and_report(tmp_path, write) -> None:
    config = write(feature_weight=0.5, similarity_weight=1.0)
    done = run_script(RECIPE, "--config", config)
    output = tmp_path / "a run"
    assert {"run.json", "metrics.jsonl", "report.html", "model.safetensors", "checkpoint-4"} <= {
        path.name for path in output.iterdir()
    }
    events = read_rows(output / "metrics.jsonl")
    train = [event for event in events if event["kind"] == "train"]
    assert [event["step"] for event in train] == [1, 2, 3, 4]
    parts = ("nll", "divergence", "teacher_nll", "agreement", "feature", "similarity")
    names = {f"distillation/{name}" for name in parts}
    assert names | {"loss", "grad_norm", "num_target_tokens"} <= train[0].keys()
    assert "eval_bits_per_byte" in [event for event in events if event["kind"] == "eval"][-1]
    record = json.loads((output / "run.json").read_text())
    assert record["stage"] == "distill"
    assert record["status"] == "done"
    student, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert student.config.num_hidden_layers == 1
    assert not any(info.values()), "projections are saved with the student"
    page = (output / "report.html").read_text()
    assert "Hidden-state loss" in page
    assert "Similarity loss" in page
    assert "step 0: loss on labels in nats: student" in done.stderr


def test_adapter_of_quantised_student_answers_in_plain_peft(tmp_path, write) -> None:
    config = write(use_peft=True, load_in_4bit=True, lora_r=4, lmbda=0.5, response_length=8)
    done = run_script(RECIPE, "--config", config)
    output = tmp_path / "a run"
    # By the checks of an adapter, which find exactly its weights trained.
    assert re.search(r"adapter: all \d+ frozen tensors are unchanged", done.stderr)
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {path.name for path in output.iterdir()}
    assert not (output / "model.safetensors").exists()
    assert any("on_policy/divergence" in event for event in read_rows(output / "metrics.jsonl"))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "student"), output)
    assert any(weight.any() for name, weight in model.named_parameters() if "lora_B" in name)


def test_vocabulary_mismatch_is_rejected_before_weights_are_loaded(tmp_path, write, capsys) -> None:
    config, student = write(), tmp_path / "student"
    tokenizer = AutoTokenizer.from_pretrained(student)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(student)
    (student / "model.safetensors").unlink()
    assert run_here(load_recipe("distill"), config, recipe="distill") == 2
    error = capsys.readouterr().err
    assert f"{config}:" in error
    assert "the teacher has no token '<new>'" in error
    assert "recipes synthesize" in error
    assert json.loads((tmp_path / "a run" / "run.json").read_text())["status"] == "refused"
