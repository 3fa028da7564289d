"""FSDP2 by the users' launch file, over gloo: every recipe trains, evaluates, saves and resumes as one process does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.distributed import sharding
from tests.distributed.cells import (
    CELLS,
    FULL_PRECISION,
    build_jobs,
    in_bf16,
    measure_gaps,
    read_weights,
)
from tests.rows import read_events, read_rows

from recipes_lib.commands.weights.export import export_checkpoint

# The others are in the matrix.
OURS = {name: CELLS[name] for name in ("sft packed", "lora padded")}


@pytest.fixture(scope="module")
def runs(inputs: Path, alone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "one").symlink_to(alone)
    jobs = build_jobs(inputs, OURS, 2)
    for name in OURS:
        resumed = {**jobs[name], "copy_of": folder / "two" / name, "step": 2}
        jobs[f"{name}, resumed"] = {**resumed, "fault": "told reads"}
        jobs[f"{name}, from one"] = {**jobs[name], "copy_of": alone / name, "step": 2}
    jobs["bf16"] = in_bf16(jobs["sft packed"])
    jobs["bf16 as accelerate has it"] = {**jobs["bf16"], "fault": "narrow sums"}
    jobs["nan"] = {**jobs["sft packed"], "fault": "nan loss"}
    two = sharding.run_jobs(jobs, folder / "two", "fsdp2", *FULL_PRECISION)
    back = {
        f"{name}, from two": {**job, "copy_of": folder / "two" / name, "step": 2}
        for name, job in build_jobs(inputs, OURS, 1).items()
    }
    sharding.run_jobs(back, folder / "back")
    return folder, two


def assert_same_run(one: Path, two: Path, tolerance: float = 1e-5) -> None:
    gaps = measure_gaps(one, two)
    assert not {what: gap for what, gap in gaps.items() if not gap <= tolerance}


@pytest.mark.multiprocess
@pytest.mark.parametrize("cell", OURS)
def test_fsdp2_gives_the_numbers_of_one_process(runs: tuple[Path, dict[str, Any]], cell: str) -> None:
    folder, _ = runs
    assert_same_run(folder / "one" / cell, folder / "two" / cell)


@pytest.mark.multiprocess
def test_a_checkpoint_is_shards_that_no_process_has_gathered(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = runs
    checkpoint = folder / "two" / "sft packed" / "checkpoint-2"
    whole = read_weights(folder / "two" / "sft packed")
    files = sorted((checkpoint / "model_shards").iterdir())
    assert [file.name[:11] for file in files] == ["shard-00001", "shard-00002"]
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            assert tensors.get_tensor("model.layers.0.mlp.up_proj.weight").shape == (64, 64)
    assert whole["model.layers.0.mlp.up_proj.weight"].shape == (128, 64)
    suffixes = {path.suffix for path in checkpoint.rglob("*") if path.is_file()}
    assert suffixes <= {".safetensors", ".json", ".jinja", ".pt", ".pth"}
    assert not list(checkpoint.glob("*.safetensors"))
    listed = json.loads((checkpoint / "COMPLETE.json").read_text())
    assert listed["engine"] == "FSDP"
    assert sum("shards/shard-" in name for name in listed["files"]) == 4
    for file in checkpoint.glob("*.pt*"):
        torch.load(file, weights_only=file.name == "scheduler.pt")
    # An adapter's base is not written again and again.
    adapter = folder / "two" / "lora padded" / "checkpoint-2" / "model_shards"
    for file in adapter.iterdir():
        with safe_open(file, framework="pt") as tensors:
            assert all(".lora_" in name for name in tensors.keys())  # noqa: SIM118


@pytest.mark.multiprocess
@pytest.mark.parametrize("cell", OURS)
def test_a_run_that_goes_on_gets_the_very_weights(runs: tuple[Path, dict[str, Any]], cell: str) -> None:
    folder, _ = runs
    straight, resumed = (read_weights(folder / "two" / name) for name in (cell, f"{cell}, resumed"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())
    assert json.loads((folder / "two" / f"{cell}, resumed" / "run.json").read_text())["resumed_from"] == "checkpoint-2"


@pytest.mark.multiprocess
@pytest.mark.parametrize("cell", OURS)
def test_no_process_reads_more_than_its_share(runs: tuple[Path, dict[str, Any]], cell: str) -> None:
    """Of what is saved each hashes what it wrote; of what is gone on from, as much as the other; and no file twice."""
    folder, two = runs
    run = folder / "two" / f"{cell}, resumed"
    read: dict[str, list[list[str]]] = {}
    for rank, name in re.findall(rf"process (\d) hashes {re.escape(str(run))}/(\S+)", two["told"]):
        checkpoint, file = re.fullmatch(r"(\S*checkpoint-\d+)/(\S+)", name).groups()
        read.setdefault(checkpoint, [[], []])[int(rank)].append(file)
    resumed = read.pop("checkpoint-2")
    listed = json.loads((run / "checkpoint-2" / "COMPLETE.json").read_text())["files"]
    assert sorted([*resumed[0], *resumed[1]]) == sorted(listed)
    sizes = [sum((run / "checkpoint-2" / file).stat().st_size for file in files) for files in resumed]
    assert max(sizes) < 0.6 * sum(sizes)
    ((name, (first, second)),) = read.items()
    assert name == "_saving/checkpoint-3"
    listed = json.loads((run / "checkpoint-3" / "COMPLETE.json").read_text())["files"]
    assert sorted([*first, *second]) == sorted(listed)
    assert sorted(second) == [name for name in sorted(listed) if "/shard-00002-" in name or name == "rng_state_1.pth"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("cell", OURS)
@pytest.mark.parametrize("resumed", ["back/{}, from two", "two/{}, from one"], ids=["back", "there"])
def test_a_checkpoint_goes_on_in_the_other_layout(runs: tuple[Path, dict[str, Any]], cell: str, resumed: str) -> None:
    """What the optimizer remembers, too: without it the next step would be another one."""
    folder, _ = runs
    run = folder / resumed.format(cell)
    straight, got = read_weights(folder / "one" / cell), read_weights(run)
    assert json.loads((run / "run.json").read_text())["resumed_from"] == "checkpoint-2"
    assert straight.keys() == got.keys()
    for name, tensor in straight.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.multiprocess
@pytest.mark.parametrize("cell", OURS)
def test_an_exported_checkpoint_is_the_model_of_one_process(
    runs: tuple[Path, dict[str, Any]], cell: str, tmp_path: Path
) -> None:
    """Held against the same step's whole checkpoint; and what stands beside the weights is what a run's end leaves."""
    folder, _ = runs
    assert_exported(folder / "one" / cell, folder / "two" / cell, tmp_path / "out")


@pytest.mark.multiprocess
def test_so_are_tied_embeddings_and_a_head(inputs: Path, alone: Path, tmp_path: Path) -> None:
    jobs = build_jobs(inputs, {name: CELLS[name] for name in ("pretrain tied", "reward")}, 2)
    sharding.run_jobs(jobs, tmp_path, "fsdp2", *FULL_PRECISION)
    for cell in jobs:
        assert_exported(alone / cell, tmp_path / cell, tmp_path / f"{cell} out")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_8_bit_states_train_in_shards_and_resume_to_the_bit(inputs: Path, alone: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    jobs = build_jobs(inputs, {"first": CELLS["sft packed"]}, 2)
    keys = {**jobs["first"]["keys"], "optim": "adamw_torch_8bit"}
    first = {**jobs["first"], "keys": keys}
    jobs = {"first": first, "resumed": {**first, "copy_of": tmp_path / "first", "step": 2}}
    sharding.run_jobs(jobs, tmp_path, "fsdp2", *FULL_PRECISION)
    weights = [read_weights(tmp_path / name) for name in jobs]
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())
    losses = [[row["loss"] for row in read_events(run)] for run in (alone / "sft packed", tmp_path / "first")]
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


def assert_exported(one: Path, two: Path, out: Path) -> None:
    export_checkpoint(two / "checkpoint-2", out)
    expected, got = read_weights(one / "checkpoint-2"), read_weights(out)
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for file in ("config.json", "generation_config.json", "tokenizer.json", "adapter_config.json"):
        assert (out / file).exists() == (one / file).exists(), file


@pytest.mark.multiprocess
def test_a_loss_that_is_none_on_one_process_stops_both_before_the_update(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, two = runs
    assert [code for code in two["codes"].values() if code] == [two["codes"]["nan"]] == [3]
    assert two["told"].count("step 2 was stopped before its update: the loss of micro-batch 1 of rank 1 is nan") == 2
    assert len(read_events(folder / "two" / "nan")) == 1


@pytest.mark.multiprocess
def test_in_bf16_only_products_are_narrow(runs: tuple[Path, dict[str, Any]]) -> None:
    """Autocast keeps what runs through the layers wider, and so is not quite the same; sums in bf16 are far off."""
    folder, _ = runs
    names = ("loss", "eval_loss")
    places = ("one/bf16", "two/bf16", "two/bf16 as accelerate has it")
    expected, ours, narrow = (
        [event[name] for event in read_rows(folder / place / "metrics.jsonl") for name in names if name in event]
        for place in places
    )
    off, narrow_off = (
        max(abs(value - right) / right for value, right in zip(some, expected, strict=True)) for some in (ours, narrow)
    )
    assert off < 5e-4 < narrow_off
