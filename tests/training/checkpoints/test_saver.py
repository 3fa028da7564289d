"""``CheckpointSaver``: verification and publishing of staged checkpoints, retention, and the dry run."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import TrainingArguments

from recipes_lib.errors import ConfigError
from recipes_lib.planning.disk import DiskPlan
from recipes_lib.training.checkpoints import manifest
from recipes_lib.training.checkpoints.manifest import list_checkpoints, read_complete
from recipes_lib.training.checkpoints.saver import CheckpointSaver, Staged, count_bytes, describe_dry_run, write_state


@pytest.fixture
def lines():
    return []


@pytest.fixture
def build(tmp_path, lines):
    def build_saver(**keys):
        args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **keys)
        args.save_keep_steps = keys.pop("save_keep_steps", None)
        return CheckpointSaver(args, lines.append, engine="")

    return build_saver


def stage(saver, step, state, folder="_saving", verify=lambda: None):
    """Stage a checkpoint with one state file."""
    staged = saver.open(step, folder)
    staged.mkdir(parents=True)
    saver.decide_to_copy(state)
    copied = saver.take(state)
    return Staged(staged, step, [lambda: write_state(copied, staged / "state.pt")], verify)


def load(checkpoint):
    return torch.load(checkpoint / "state.pt", weights_only=True)["weight"]


def test_failed_verification_publishes_nothing_and_raises(build, tmp_path, lines):
    def refuse():
        raise ValueError("truncated")

    saver, state = build(), {"weight": torch.ones(3)}
    saver.save(stage(saver, 1, state, verify=refuse))
    with pytest.raises(ValueError, match="truncated"):
        saver.finish()
    assert list_checkpoints(tmp_path) == []
    saver.save(stage(saver, 2, state, verify=refuse))
    # ``settle`` logs the error instead of raising it.
    saver.settle()
    assert lines == ["the last checkpoint could not be written: truncated"]


@pytest.mark.parametrize(
    ("words", "engine", "waits"),
    [("Timed out waiting", "FSDP", False), ("Timed out waiting", "", True), ("other", "FSDP", True)],
)
def test_end_of_run_does_not_wait_for_shards_of_rank_that_does_not_answer(tmp_path, monkeypatch, words, engine, waits):
    saver = CheckpointSaver(TrainingArguments(output_dir=str(tmp_path), use_cpu=True), print, engine=engine)
    monkeypatch.setenv("WORLD_SIZE", "2")
    waited: list[bool] = []
    saver._writing = Mock(exception=lambda: waited.append(True))
    try:
        raise RuntimeError(words)
    except RuntimeError:
        saver.settle()
    assert bool(waited) == waits


def test_file_deleted_during_save_publishes_nothing(build, tmp_path):
    saver, state = build(), {"weight": torch.ones(3)}
    staged = stage(saver, 1, state, verify=lambda: (tmp_path / "_saving" / "checkpoint-1" / "scheduler.pt").unlink())
    (staged.folder / "scheduler.pt").touch()
    saver.save(staged)
    with pytest.raises(FileNotFoundError, match=r"scheduler\.pt"):
        saver.finish()
    assert list_checkpoints(tmp_path) == []


def test_manifest_keeps_run_facts_after_run_json_is_deleted(build, tmp_path):
    saver, state, run = build(), {"weight": torch.ones(3)}, {"stage": "sft", "config": {"max_steps": 2}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    saver.save(stage(saver, 1, state))
    (tmp_path / "run.json").unlink()
    saver.save(stage(saver, 2, state))
    saver.finish()
    assert read_complete(tmp_path / "checkpoint-2")["run"] == run


def test_manifest_of_replicated_checkpoint_lists_files_of_all_ranks(build, tmp_path, monkeypatch):
    saver = build()
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    staged = stage(saver, 1, {"weight": torch.ones(3)})
    (staged.folder / "rng_state_1.pth").write_bytes(bytes(8))
    saver.save(staged)
    saver.finish()
    assert read_complete(tmp_path / "checkpoint-1")["files"].keys() == {"rng_state_1.pth", "state.pt"}


def test_checkpoint_that_cannot_be_deleted_is_logged(build, tmp_path, lines, monkeypatch):
    monkeypatch.setattr(manifest, "rotate", lambda *_: ["checkpoint-1 (Device or resource busy)"])
    saver = build(save_total_limit=1)
    saver.save(stage(saver, 2, {"weight": torch.ones(3)}))
    saver.finish()
    assert lines == ["older checkpoints could not be deleted: checkpoint-1 (Device or resource busy)"]


def test_deleted_output_dir_is_not_recreated(build, tmp_path):
    saver, state = build(), {"weight": torch.ones(3)}
    saver.save(stage(saver, 1, state))
    saver.finish()
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError):
        stage(saver, 2, state)
    assert not tmp_path.exists()
    tmp_path.mkdir()


def dry_run(saver, state, compare=lambda _: None):
    def stage_and_compare(folder):
        staged = stage(saver, 1, state, folder)
        return replace(staged, tasks=[*staged.tasks, lambda: compare(staged.folder)])

    saver.dry_run(stage_and_compare, lambda: 12, num_steps=4, num_epochs=None, model_bytes=12)


@pytest.mark.parametrize("free", [10, 40], ids=["before writing", "after writing"])
def test_dry_run_rejects_small_disk(build, tmp_path, monkeypatch, free):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    with pytest.raises(ConfigError, match="the disk has"):
        dry_run(build(save_steps=4), {"weight": torch.ones(3)})
    assert not list(tmp_path.glob("checkpoint-*"))


def test_dry_run_rejects_disk_that_cannot_rename_folders(build, tmp_path, monkeypatch):
    rename = Path.rename

    def rename_files_only(path, target):
        if path.is_dir():
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_files_only)
    with pytest.raises(ConfigError, match="cannot rename a folder in it: Function not implemented"):
        dry_run(build(save_steps=4), {"weight": torch.ones(3)})


def test_count_bytes_counts_shared_tensor_once():
    tensor = torch.zeros(4)
    assert count_bytes({"a": [tensor, tensor]}, [torch.zeros(2, dtype=torch.int8), tensor]) == 18


def test_describe_dry_run():
    plan = DiskPlan(checkpoint_bytes=1, num_checkpoints=3, total_bytes=26 * 10**9, free_bytes=2 * 10**12)
    assert describe_dry_run(8_100_000_000, 12.34, plan) == (
        "checkpoints: 8.1 GB each, written and opened again in 12.3 s; up to 3 of them and the model take 26 GB of "
        "2 TB free"
    )
