"""Output directories as training leaves them, without training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from tests.publish.hub_server import Files
from tests.rows import write_rows

from recipes_lib.files import replace_record
from recipes_lib.training.checkpoints.manifest import write_complete


def make_run(folder: Path, status: str = "running", **keys: object) -> Path:
    """Write ``run.json`` and ``metrics.jsonl`` of an SFT run; ``keys`` update its configuration."""
    config = {
        "model_name_or_path": "owner/base",
        "dataset_name": "owner/chats",
        "output_dir": str(folder),
        "push_to_hub": True,
        "hub_strategy": "every_save",
        "hub_always_push": True,
        **keys,
    }
    record = {"stage": "sft", "status": status, "config": config, "versions": {"torch": "2.13.0"}, "error": "at /a/b"}
    record["command"] = ["sft.py", "--config", "/somewhere/secret/sft.yaml", "--output_dir=/somewhere/secret/run"]
    folder.mkdir(parents=True, exist_ok=True)
    # Replaced, as in training: a publisher may read the file at any time.
    replace_record(folder / "run.json", record)
    events = [{"kind": "eval", "step": step, "eval_loss": 4 - step / 10} for step in (0, 10, 20, 30)]
    write_rows(folder / "metrics.jsonl", events)
    return folder


def write_model(folder: Path, value: float) -> None:
    """Write files of a model, with one constant tensor, and the samples that training writes next to it."""
    import numpy as np

    save_file({"weight": np.full(300, value, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "samples.jsonl").write_text('{"prompt": "private"}')


def save_checkpoint(run: Path, step: int) -> Path:
    """Write a complete checkpoint with optimizer and trainer state."""
    folder = run / f"checkpoint-{step}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_model(folder, step)
    (folder / "README.md").write_text("as PEFT leaves one")
    (folder / "optimizer.pt").write_bytes(b"moments")
    (folder / "trainer_state.json").write_text("{}")
    write_complete(folder, step=step)
    return folder


def finish(run: Path) -> Path:
    """Write the final model into the output directory, and set the status to done."""
    write_model(run, -1.0)
    record = json.loads((run / "run.json").read_text())
    replace_record(run / "run.json", record | {"status": "done"})
    return run


def link_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace each file by a link, as in the Hub's cache; return the folder of the contents."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder.parent))
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for path in [path for path in folder.iterdir() if path.is_file()]:
        path.rename(blobs / path.name)
        path.symlink_to(Path("..") / blobs.name / path.name)
    return blobs


def read_weight(files: Files) -> float:
    """Return the constant value of the weights of a published model."""
    from safetensors.numpy import load

    return float(load(files["model.safetensors"])["weight"][0])
