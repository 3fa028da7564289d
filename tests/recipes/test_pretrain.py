"""The pretraining recipe end to end: files of a run, and independence of micro-batches and world size."""

from __future__ import annotations

import math

import pytest
from tests.distributed import sharding
from tests.faults import recipe_runs
from tests.forked import ROOT, run_script
from tests.rows import read_events
from transformers import AutoModelForCausalLM, AutoTokenizer

RECIPE = ROOT / "recipes" / "pretrain.py"


def test_run_writes_model_that_transformers_loads(inputs, tmp_path):
    output = tmp_path / "a run"
    batch = {"gradient_accumulation_steps": 1}
    keys = recipe_runs.make_keys(inputs, "pretrain", max_steps=8, save_steps=8, **batch, output_dir=output)
    run_script(RECIPE, keys)
    names = {path.name for path in output.iterdir()}
    assert {"run.json", "metrics.jsonl", "samples.jsonl", "model.safetensors", "config.json", "README.md"} <= names
    assert {"tokenizer.json", "generation_config.json", "report.html", "checkpoint-8"} <= names
    model, tokenizer = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    ids = tokenizer("the quick", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] > ids["input_ids"].shape[1]
    steps = read_events(output)
    assert {"parameter_norm", "update_ratio", "mfu", "grad_norm", "num_tokens", "tokens_per_second"} <= steps[-1].keys()
    assert "max_length was 32" in run_script(RECIPE, keys | {"max_length": 64}, code=2).stderr


EPOCHS = {"max_steps": None, "num_train_epochs": 1.5}
TWO_RANKS = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.mark.parametrize(
    ("length", "file", "batch"),
    [
        pytest.param(EPOCHS, None, (2, 4), id="epochs"),
        pytest.param(EPOCHS, "cpu_ddp", (1, 4), id="epochs on two ranks", marks=TWO_RANKS),
        pytest.param({"max_steps": 8}, "cpu_ddp", (1, 4), id="steps on two ranks", marks=TWO_RANKS),
    ],
)
def test_losses_and_learning_rates_are_independent_of_micro_batches(inputs, tmp_path, length, file, batch):
    length = {"save_strategy": "no", "save_steps": None, "save_total_limit": None, "warmup_steps": 2, **length}
    keys = recipe_runs.make_keys(inputs, "pretrain", **length)
    runs = []
    for launch, (size, number) in ((None, (8, 1)), (file, batch)):
        micro_batches = {"per_device_train_batch_size": size, "gradient_accumulation_steps": number}
        sharding.run_jobs({str(size): {"stage": "pretrain", "keys": keys | micro_batches}}, tmp_path, launch)
        runs.append(read_events(tmp_path / str(size)))
    num_steps = len(runs[0])
    assert num_steps > 4
    for figure in ("loss", "grad_norm"):
        one, other = ([step[figure] for step in steps] for steps in runs)
        assert other == pytest.approx(one, rel=2e-5)
    for steps in runs:
        for number, step in enumerate(steps):
            progress = (number - 2) / (num_steps - 2)
            cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
            assert step["learning_rate"] == pytest.approx(1e-3 * ((number + 1) / 2 if number < 2 else cosine))
