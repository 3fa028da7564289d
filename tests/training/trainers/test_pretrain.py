"""Pretraining runs, compared with a torch loop, resumed runs and extended runs."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.rows import read_events
from tests.training.pretraining import build_config, run_recipe, write_documents
from transformers import AutoTokenizer

from recipes_lib.data.tokens.token_data import prepare_tokens
from recipes_lib.errors import ConfigError
from recipes_lib.models.architecture import find_model_config, start_causal_lm
from recipes_lib.training.checkpoints import checkpointing
from recipes_lib.training.trainers.next_token_trainer import PretrainTrainer
from recipes_lib.training.trainers.pretraining_rows import build_rows


def cosine(step: int, num_steps: int, num_warmup: int, floor: float) -> float:
    """Cosine schedule with linear warm-up, as in Brown et al. 2020."""
    if step < num_warmup:
        return (step + 1) / num_warmup
    progress = (step - num_warmup) / (num_steps - num_warmup)
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


def train_by_loop(config, tokenizer, factors, sizes, isolated):
    """Return the losses of a torch loop on the same rows, one document or row at a time, with torch's AdamW."""
    rows = build_rows(config, prepare_tokens(config, lambda: tokenizer), 1)
    model_config, _ = find_model_config(config.model, tokenizer, config.tokens.max_length)
    model = start_causal_lm(config.model, model_config, "eager", seed=config.training.get("seed", 42))
    decaying = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": decaying, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.ndim < 2]}],
        lr=0.0,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    at = 0
    losses = []
    for factor, size in zip(factors, sizes, strict=True):
        batch = [rows.train[index] for index in range(at, at + size)]
        at += size
        batch = [row for row in batch if len(row["input_ids"])]
        nll, count = torch.zeros(()), 0
        for row in batch:
            ids = torch.from_numpy(row["input_ids"].astype(np.int64))
            for document in ids.split(row["seq_lengths"].tolist()) if isolated else [ids]:
                if len(document) > 1:
                    logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
                    nll = nll + torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum")
                    count += len(document) - 1
        (nll / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = config.training["learning_rate"] * factor
        optimizer.step()
        optimizer.zero_grad()
        losses.append((nll / count).item())
    return losses


@pytest.mark.parametrize("isolated", [True, False])
def test_losses_equal_torch_loop(tmp_path, tiny_tokenizer_dir, monkeypatch, isolated):
    keys = {"cross_document_attention": not isolated, "gradient_accumulation_steps": 2, "warmup_steps": 3}
    config = build_config(tmp_path, tiny_tokenizer_dir, **keys)
    run_recipe(config, monkeypatch)
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    expected = train_by_loop(config, tokenizer, [cosine(s, 8, 3, 0.1) for s in range(8)], [4] * 8, isolated)
    assert [step["loss"] for step in read_events(tmp_path / "out")] == pytest.approx(expected, rel=2e-5)


def test_model_is_sharded_before_the_first_step(tmp_path, tiny_tokenizer_dir, monkeypatch):
    """While it is sharded, its state lacks buffers, which no checkpoint would have either."""
    events, take = [], PretrainTrainer.take_batches

    @contextmanager
    def sharding(*_):
        yield events.append("begin")
        events.append("end")

    monkeypatch.setattr(checkpointing, "sharding", sharding)
    monkeypatch.setattr(PretrainTrainer, "take_batches", lambda *args: events.append("step") or take(*args))
    run_recipe(build_config(tmp_path, tiny_tokenizer_dir, max_steps=2), monkeypatch)
    assert events[:3] == ["begin", "end", "step"]


def test_recurrent_model_trains_once_refusal_is_followed(tmp_path, tiny_tokenizer_dir, monkeypatch):
    keys = {"model_config": {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2}, "max_steps": 1}
    with pytest.raises(ConfigError) as refusal:
        run_recipe(build_config(tmp_path, tiny_tokenizer_dir, **keys), monkeypatch)
    (problem,) = refusal.value.problems
    key = "cross_document_attention"
    assert f"{key}: true" in problem.remedy
    run_recipe(build_config(tmp_path, tiny_tokenizer_dir, **keys, **{key: True}), monkeypatch)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "done"


def test_batch_ramp_follows_planned_rows_and_learning_rates(tmp_path, tiny_tokenizer_dir, monkeypatch):
    ramp = {
        "batch_ramp_tokens": 32 * 2 * 6,
        "batch_ramp_start": 0.25,
        "warmup_tokens": 1,
        "lr_scheduler_type": "constant",
    }
    config = build_config(tmp_path, tiny_tokenizer_dir, gradient_accumulation_steps=4, max_steps=6, **ramp)
    run_recipe(config, monkeypatch)
    steps = read_events(tmp_path / "out")
    # ceil(4 * (1/4 + 3/4 * tokens / 384)), with the tokens before each step.
    micro_steps = [1, 2, 3, 4, 4, 4]
    assert np.diff([0, *(step["num_tokens"] for step in steps)]).tolist() == [64 * count for count in micro_steps]
    factors = [math.sqrt(count / 4) for count in micro_steps]
    assert [step["learning_rate"] for step in steps] == pytest.approx([1e-2 * factor for factor in factors])
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    expected = train_by_loop(config, tokenizer, factors, [8] * 6, isolated=True)
    assert [step["loss"] for step in steps] == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(("streaming", "stops"), [(False, (11, 13)), (True, (13,))])
def test_resumed_run_is_bit_identical(tmp_path, tiny_tokenizer_dir, monkeypatch, streaming, stops):
    # An epoch is 42 rows, 2 in step 1 and 4 in each later one: the run stops after the first epoch, or in the second.
    write_documents(tmp_path / "documents.jsonl", 12)
    keys = {"max_steps": 14, "gradient_accumulation_steps": 2}
    keys |= {"dataset_streaming": streaming, "batch_ramp_tokens": 600, "batch_ramp_start": 0.5}
    whole = build_config(tmp_path, tiny_tokenizer_dir, **keys)
    run_recipe(whole, monkeypatch)
    if not streaming:
        assert read_events(tmp_path / "out")[10]["num_tokens"] == 32 * 42
        epochs = build_rows(whole, prepare_tokens(whole, pytest.fail), 1).epochs
        assert epochs == {"documents": pytest.approx((2 + 13 * 4) / 42, rel=0.01)}
    for stop in stops:
        saving = {"output_dir": tmp_path / f"stopped-{stop}", "save_strategy": "steps", "save_steps": stop}
        config = build_config(tmp_path, tiny_tokenizer_dir, **keys, **saving)
        run_recipe(config, monkeypatch, stop_after=stop)
        assert not (tmp_path / f"stopped-{stop}" / "model.safetensors").exists()
        run_recipe(config, monkeypatch)
        weights, expected = (load_file(tmp_path / name / "model.safetensors") for name in (f"stopped-{stop}", "out"))
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        losses = [[step["loss"] for step in read_events(tmp_path / name)] for name in (f"stopped-{stop}", "out")]
        assert losses[0] == losses[1]


def test_extended_run_resumes_from_stable_phase(tmp_path, tiny_tokenizer_dir, monkeypatch):
    keys = {"lr_scheduler_type": "warmup_stable_decay", "decay_steps": 3, "warmup_steps": 2}
    keys |= {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 1, "logging_steps": 2}
    run_recipe(build_config(tmp_path, tiny_tokenizer_dir, max_steps=10, **keys), monkeypatch)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {name for name in names if "checkpoint" in name} == {"checkpoint-7", "checkpoint-10"}
    documents = tmp_path / "documents.jsonl"
    text = documents.read_text()
    documents.write_text(text.replace("the", "thy"))
    with pytest.raises(ConfigError, match="the rows of the dataset are not those"):
        run_recipe(build_config(tmp_path, tiny_tokenizer_dir, max_steps=15, **keys), monkeypatch)
    # An extension that is refused leaves the checkpoints as they were.
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    documents.write_text(text)
    run_recipe(build_config(tmp_path, tiny_tokenizer_dir, max_steps=15, **keys), monkeypatch)
    run_recipe(
        build_config(tmp_path, tiny_tokenizer_dir, max_steps=15, output_dir=tmp_path / "long", **keys), monkeypatch
    )
    weights, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "long"))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    steps, expected = (read_events(tmp_path / name) for name in ("out", "long"))
    assert [step["learning_rate"] for step in steps][1:6] == [1e-2] * 5
    # Of the step before the decay too, which is not logged.
    assert [step["num_tokens"] for step in steps] == [step["num_tokens"] for step in expected]
    assert (tmp_path / "out" / "superseded-checkpoint-10").is_dir()


def test_muon_learns_and_resumes_bit_identically(tmp_path, tiny_tokenizer_dir, monkeypatch):
    """Other optimizers: ``tests/training/optim/test_optimizers.py``."""
    config = build_config(tmp_path, tiny_tokenizer_dir, optim="muon", max_steps=10, save_strategy="steps", save_steps=5)
    run_recipe(config, monkeypatch)
    steps = read_events(tmp_path / "out")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    expected = load_file(tmp_path / "out" / "model.safetensors")
    # A finished run without its model resumes from the last checkpoint.
    (tmp_path / "out" / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "out" / "checkpoint-10")
    run_recipe(config, monkeypatch)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_mixture_is_evaluated_per_source(tmp_path, tiny_tokenizer_dir, monkeypatch):
    for name in ("prose", "code"):
        write_documents(tmp_path / f"{name}.jsonl", 30)
    text = (tmp_path / "code.jsonl").read_text()
    (tmp_path / "code.jsonl").write_text(text.replace("the", "def"))
    mixture = [
        {"name": str(tmp_path / f"{name}.jsonl"), "weight": weight} for name, weight in (("prose", 3), ("code", 1))
    ]
    config = build_config(tmp_path, tiny_tokenizer_dir, dataset_name=None, dataset_mixture=mixture, test_split_size=0.2)
    run_recipe(config, monkeypatch)
    text = (tmp_path / "out" / "metrics.jsonl").read_text()
    for figure in ("eval_loss", "eval_prose_loss", "eval_code_loss", "eval_code_bits_per_byte"):
        assert f'"{figure}"' in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "muon"])
def test_run_on_gpu_learns_and_resumes_with_flat_rows(tmp_path, tiny_tokenizer_dir, monkeypatch, optim):
    architecture = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    keys = {"use_cpu": False, "bf16": True, "optim": optim, "max_steps": 20, "learning_rate": 3e-3}
    keys |= {"model_config": architecture | {"num_attention_heads": 4}, "save_strategy": "steps", "save_steps": 5}
    config = build_config(tmp_path, tiny_tokenizer_dir, **keys)
    run_recipe(config, monkeypatch, stop_after=12)
    run_recipe(config, monkeypatch)
    steps = read_events(tmp_path / "out")
    assert [step["step"] for step in steps] == list(range(1, 21))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert steps[-1]["mfu"] is None or steps[-1]["mfu"] > 0
