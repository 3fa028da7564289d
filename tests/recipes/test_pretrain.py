"""The pretraining recipe as a user runs it: in processes of its own, to a model that any tool loads."""

from __future__ import annotations

import json
import math

import pytest
from tests.distributed import sharding
from tests.forked import ROOT, run_script
from tests.rows import read_events
from tests.training.pretraining import write_documents
from transformers import AutoModelForCausalLM, AutoTokenizer

RECIPE = ROOT / "recipes" / "pretrain.py"


def write_config(tmp_path, tiny_tokenizer_dir, **keys):
    documents = tmp_path / "some documents.jsonl"
    if not documents.exists():
        write_documents(documents)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    keys = {
        "model_config": {"model_type": "llama"} | sizes,
        "tokenizer_name_or_path": str(tiny_tokenizer_dir),
        "dataset_name": str(documents),
        "test_split_size": 0.1,
        "output_dir": str(tmp_path / "a run"),
        "prepared_dir": str(tmp_path / "prepared"),
        "max_length": 32,
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "bf16": False,
        "num_sample_prompts": 1,
        "sample_max_new_tokens": 4,
    } | keys
    path = tmp_path / "pretrain.yaml"
    path.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in keys.items() if value is not None))
    return path


def run_recipe(*argv):
    return run_script(RECIPE, *argv)


def test_a_run_leaves_a_base_model_that_any_tool_loads(tmp_path, tiny_tokenizer_dir):
    config = write_config(tmp_path, tiny_tokenizer_dir)
    done = run_recipe("--config", config)
    assert done.returncode == 0, done.stderr[-3000:]
    output = tmp_path / "a run"
    names = {path.name for path in output.iterdir()}
    assert {"run.json", "metrics.jsonl", "samples.jsonl", "model.safetensors", "config.json", "README.md"} <= names
    assert {"tokenizer.json", "generation_config.json", "report.html", "checkpoint-8"} <= names
    model, tokenizer = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    ids = tokenizer("the quick", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] > ids["input_ids"].shape[1]
    steps = read_events(output)
    assert {"parameter_norm", "update_ratio", "mfu", "grad_norm", "num_tokens", "tokens_per_second"} <= steps[-1].keys()
    other = run_recipe("--config", config, "--max_length", "64")
    assert other.returncode == 2
    assert "max_length was 32" in other.stderr


CUTS = {None: {"8x1": (8, 1), "2x4": (2, 4)}, "cpu_ddp": {"1x4 on two": (1, 4), "4x1 on two": (4, 1)}}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "length",
    [
        pytest.param({"max_steps": 8}, id="steps", marks=pytest.mark.slow),
        pytest.param({"max_steps": None, "num_train_epochs": 1.5}, id="epochs"),
    ],
)
def test_how_the_batch_is_cut_changes_neither_losses_nor_rates(tmp_path, tiny_tokenizer_dir, length):
    rates = {"warmup_steps": 2, "learning_rate": 1e-3}
    config = write_config(tmp_path, tiny_tokenizer_dir, save_strategy="no", output_dir=None, **rates, **length)
    for file, cuts in CUTS.items():
        jobs = {
            name: {
                "stage": "pretrain",
                "keys": {"config": config, "per_device_train_batch_size": size, "gradient_accumulation_steps": number},
            }
            for name, (size, number) in cuts.items()
        }
        sharding.run_jobs(jobs, tmp_path / "runs", file)
    runs = {name: read_events(tmp_path / "runs" / name) for cuts in CUTS.values() for name in cuts}
    num_steps = len(runs["8x1"])
    assert num_steps > 4
    for steps in runs.values():
        for figure in ("loss", "grad_norm"):
            expected = [step[figure] for step in runs["8x1"]]
            assert [step[figure] for step in steps] == pytest.approx(expected, rel=2e-5)
        for number, step in enumerate(steps):
            progress = (number - 2) / (num_steps - 2)
            cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
            assert step["learning_rate"] == pytest.approx(1e-3 * ((number + 1) / 2 if number < 2 else cosine))
