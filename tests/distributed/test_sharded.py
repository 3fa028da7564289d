"""FSDP2 on two ranks by the public launch file, compared with one process: training, checkpoints, export."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests import tiny
from tests.distributed import sharding
from tests.distributed.cells import (
    CELLS,
    FULL_PRECISION,
    assert_resumed,
    assert_same_run,
    build_jobs,
    in_bf16,
    measure_weight_gap,
    read_losses,
    read_weights,
    resume,
)
from tests.faults import recipe_runs
from tests.rows import read_events
from transformers import AutoConfig, AutoModelForCausalLM

from recipes_lib.commands.weights import export_checkpoint

pytestmark = pytest.mark.multiprocess
PACKED, LORA, BUFFERS = "sft packed", "lora padded", "buffers"
RESUMED = (LORA, BUFFERS)
WHOLE_STATE = ("--fsdp_state_dict_type", "FULL_STATE_DICT")
"""What most public launch files have: without effect, since checkpoints are sharded and the final model is whole."""


def write_gemma(inputs: Path) -> Path:
    """Write a language model of Gemma 4, which has buffers in its state, and names layers of a vision tower."""
    tokenizer = tiny.build_tokenizer()
    sizes = recipe_runs.SIZES | {"head_dim": 8, "global_head_dim": 8, "num_key_value_heads": 2}
    small = {"vocab_size": 512, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 8}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    kinds = ["sliding_attention", "full_attention"]
    config = AutoConfig.for_model(
        "gemma4_text", layer_types=kinds, max_position_embeddings=512, **sizes, **small, **ends
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.7)
    model.save_pretrained(inputs / "gemma")
    tokenizer.save_pretrained(inputs / "gemma")
    return inputs / "gemma"


@pytest.fixture(scope="module")
def runs(inputs: Path, alone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder of the runs on two ranks, and their exit codes and output."""
    folder = tmp_path_factory.mktemp("runs")
    jobs = build_jobs(inputs, {name: CELLS[name] for name in (PACKED, LORA, "reward")}, 2)
    jobs["from one"] = resume(jobs[LORA], alone / LORA)
    jobs["bf16"] = in_bf16(jobs[PACKED])
    jobs["nan"] = {**jobs[PACKED], "fault": "nan loss"}
    jobs[BUFFERS] = {**jobs[PACKED], "keys": jobs[PACKED]["keys"] | {"model_name_or_path": write_gemma(inputs)}}
    for name in RESUMED:
        jobs[f"{name}, resumed"] = {**resume(jobs[name], folder / name), "fault": "logged hashes"}
    jobs[PACKED] = {**jobs[PACKED], "fault": "reduced at once"}
    return folder, sharding.run_jobs(jobs, folder, "fsdp2", *FULL_PRECISION, *WHOLE_STATE)


@pytest.mark.parametrize("cell", [PACKED, LORA])
def test_fsdp2_run_matches_one_process(runs: tuple[Path, Any], alone: Path, cell: str) -> None:
    assert_same_run(alone / cell, runs[0] / cell)


def test_model_with_buffers_matches_one_process(runs, inputs, tmp_path) -> None:
    job = build_jobs(inputs, {BUFFERS: CELLS[PACKED]}, 1)[BUFFERS]
    keys = job["keys"] | {"model_name_or_path": inputs / "gemma"}
    sharding.run_jobs({BUFFERS: {**job, "keys": keys}}, tmp_path)
    assert_same_run(tmp_path / BUFFERS, runs[0] / BUFFERS, 1e-4)
    assert read_weights(runs[0] / BUFFERS)["model.layers.1.layer_scalar"] == pytest.approx(0.7)


def test_checkpoint_contains_shards_without_gathering(runs: tuple[Path, Any]) -> None:
    folder, _ = runs
    checkpoint, name = folder / PACKED / "checkpoint-2", "model.layers.0.mlp.up_proj.weight"
    files = sorted((checkpoint / "model_shards").iterdir())
    assert [file.name[:11] for file in files] == ["shard-00001", "shard-00002"]
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            assert tensors.get_tensor(name).shape == (64, 64)
    assert read_weights(folder / PACKED)[name].shape == (128, 64)
    suffixes = {path.suffix for path in checkpoint.rglob("*") if path.is_file()}
    assert suffixes <= {".safetensors", ".json", ".jinja", ".pt", ".pth"}
    assert not list(checkpoint.glob("*.safetensors"))
    record = json.loads((checkpoint / "COMPLETE.json").read_text())
    assert record["engine"] == "FSDP"
    assert sum("shards/shard-" in name for name in record["files"]) == 4
    for file in checkpoint.glob("*.pt*"):
        torch.load(file, weights_only=file.name == "scheduler.pt")
    # Checkpoints of an adapter do not contain its base.
    for file in (folder / LORA / "checkpoint-2" / "model_shards").iterdir():
        with safe_open(file, framework="pt") as tensors:
            assert all(".lora_" in name for name in tensors.keys())  # noqa: SIM118


@pytest.mark.parametrize("cell", RESUMED)
def test_resumed_run_reproduces_weights(runs: tuple[Path, Any], cell: str) -> None:
    assert_resumed(runs[0] / cell, runs[0] / f"{cell}, resumed")


@pytest.mark.parametrize("cell", RESUMED)
def test_each_rank_hashes_only_its_share(runs: tuple[Path, Any], cell: str) -> None:
    """A rank hashes the files that it wrote, and half of the bytes of a checkpoint to resume from; no file twice."""
    folder, ended = runs
    run = folder / f"{cell}, resumed"
    hashed: dict[str, list[list[str]]] = {}
    for rank, name in re.findall(rf"process (\d) hashes {re.escape(str(run))}/(\S+)", ended["output"]):
        checkpoint, file = re.fullmatch(r"(\S*checkpoint-\d+)/(\S+)", name).groups()
        hashed.setdefault(checkpoint, [[], []])[int(rank)].append(file)
    resumed = hashed.pop("checkpoint-2")
    files = json.loads((run / "checkpoint-2" / "COMPLETE.json").read_text())["files"]
    assert sorted([*resumed[0], *resumed[1]]) == sorted(files)
    sizes = [sum((run / "checkpoint-2" / file).stat().st_size for file in share) for share in resumed]
    assert max(sizes) < 0.6 * sum(sizes)
    ((name, (first, second)),) = hashed.items()
    assert name == "_saving/checkpoint-3"
    files = json.loads((run / "checkpoint-3" / "COMPLETE.json").read_text())["files"]
    assert sorted([*first, *second]) == sorted(files)
    assert sorted(second) == [name for name in sorted(files) if "/shard-00002-" in name or name == "rng_state_1.pth"]


def test_checkpoint_is_resumed_in_other_layout(runs, inputs, alone, tmp_path) -> None:
    """The optimizer states too: with fresh ones the third step differs."""
    assert_resumed(alone / LORA, runs[0] / "from one", 1e-5)
    job = build_jobs(inputs, {PACKED: CELLS[PACKED]}, 1)[PACKED]
    sharding.run_jobs({"back": resume(job, runs[0] / PACKED)}, tmp_path)
    assert_resumed(alone / PACKED, tmp_path / "back", 1e-5)


@pytest.mark.slow
def test_every_cell_is_resumed_in_other_layout(runs, inputs, alone, tmp_path) -> None:
    packed, lora = (build_jobs(inputs, CELLS, size)[name] for size, name in ((2, PACKED), (1, LORA)))
    sharding.run_jobs({PACKED: resume(packed, alone / PACKED)}, tmp_path, "fsdp2", *FULL_PRECISION)
    sharding.run_jobs({LORA: resume(lora, runs[0] / LORA)}, tmp_path)
    for name in (PACKED, LORA):
        assert_resumed(alone / name, tmp_path / name, 1e-5)


@pytest.mark.parametrize("cell", [PACKED, LORA, "reward"])
def test_exported_checkpoint_matches_one_process(runs, alone, cell, tmp_path) -> None:
    """The weights of that step, and the other files of the final model."""
    export_checkpoint(runs[0] / cell / "checkpoint-2", tmp_path / "out")
    assert measure_weight_gap(alone / cell / "checkpoint-2", tmp_path / "out") <= 1e-5
    for file in ("config.json", "generation_config.json", "tokenizer.json", "adapter_config.json"):
        assert (tmp_path / "out" / file).exists() == (alone / cell / file).exists(), file


@pytest.mark.slow
def test_8_bit_optimizer_resumes_exactly(inputs: Path, alone: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    job = build_jobs(inputs, {PACKED: CELLS[PACKED]}, 2)[PACKED]
    first = {**job, "keys": {**job["keys"], "optim": "adamw_torch_8bit"}}
    jobs = {"first": first, "resumed": resume(first, tmp_path / "first")}
    sharding.run_jobs(jobs, tmp_path, "fsdp2", *FULL_PRECISION)
    assert_resumed(tmp_path / "first", tmp_path / "resumed")
    losses = [[event["loss"] for event in read_events(run)] for run in (alone / PACKED, tmp_path / "first")]
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


def test_nan_loss_on_one_rank_stops_all_before_update(runs: tuple[Path, Any]) -> None:
    folder, ended = runs
    assert {name: code for name, code in ended["codes"].items() if code} == {"nan": 3}
    message = "step 2 was stopped before its update: the loss of micro-batch 1 of rank 1 is nan"
    assert ended["output"].count(message) == 2
    assert len(read_events(folder / "nan")) == 1


def measure_bf16_error(expected: Path, run: Path) -> float:
    """Return the largest relative difference of a loss between two runs."""
    losses = zip(read_losses(expected), read_losses(run), strict=True)
    return max(abs(other - loss) / loss for loss, other in losses)


def test_bf16_sums_are_in_fp32(runs: tuple[Path, Any], alone: Path) -> None:
    """Not equal to one process, where autocast keeps activations between layers in fp32."""
    assert measure_bf16_error(alone / "bf16", runs[0] / "bf16") < 5e-4


@pytest.mark.slow
def test_bf16_sums_in_bf16_are_detected(inputs: Path, alone: Path, tmp_path: Path) -> None:
    job = in_bf16(build_jobs(inputs, {PACKED: CELLS[PACKED]}, 2)[PACKED])
    sharding.run_jobs({"bf16": {**job, "fault": "narrow sums"}}, tmp_path, "fsdp2", *FULL_PRECISION)
    assert measure_bf16_error(alone / "bf16", tmp_path / "bf16") > 5e-4
