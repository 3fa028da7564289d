"""Whatever a run stages is saved by the same rules: sealed or not there, beside training, kept, with a dry run."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace

import pytest
import torch
from transformers import TrainingArguments

from recipes_lib.errors import ConfigError
from recipes_lib.training.checkpoints import saver as saver_module
from recipes_lib.training.checkpoints.manifest import DRY_RUN, find_damage, list_checkpoints, read_complete
from recipes_lib.training.checkpoints.saver import CheckpointSaver, HostCopy, Staged, write_state


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
    """Stage one tensor."""
    staged = saver.open(step, folder)
    staged.mkdir(parents=True)
    saver.decide_to_copy(lambda: [state])
    copied = saver.take(state)
    return Staged(staged, step, [lambda: write_state(copied, staged / "state.pt")], verify)


def load(checkpoint):
    return torch.load(checkpoint / "state.pt", weights_only=True)["weight"]


def test_training_goes_on_while_a_checkpoint_is_written(build, tmp_path):
    saver, state, go = build(), {"weight": torch.ones(3)}, threading.Event()
    staged = stage(saver, 2, state, verify=lambda: go.wait(60))
    saver.save(staged)
    state["weight"].fill_(5)
    assert not (tmp_path / "checkpoint-2").exists()
    go.set()
    saver.finish()
    assert torch.equal(load(tmp_path / "checkpoint-2"), torch.ones(3))
    record = read_complete(tmp_path / "checkpoint-2")
    assert {"step": 2, "world_size": 1, "engine": "", "per_device_train_batch_size": 8}.items() <= record.items()


def test_without_memory_for_a_copy_training_waits_and_says_so(build, tmp_path, lines, monkeypatch):
    monkeypatch.setattr(HostCopy, "explain_refusal", lambda *_, **__: "there is none")
    saver, state = build(), {"weight": torch.ones(3)}
    for step in (1, 2):
        saver.save(stage(saver, step, state))
        assert find_damage(tmp_path / f"checkpoint-{step}") is None
    assert lines == ["training waits while a checkpoint is written: there is none"]


def test_what_cannot_be_opened_again_gets_no_name_and_ends_the_run_at_its_next_look(build, tmp_path, lines):
    def refuse():
        raise ValueError("torn")

    saver, state = build(), {"weight": torch.ones(3)}
    saver.save(stage(saver, 1, state, verify=refuse))
    with pytest.raises(ValueError, match="torn"):
        saver.finish()
    assert list_checkpoints(tmp_path) == []
    saver.save(stage(saver, 2, state, verify=refuse))
    # When something else ends the run, that is what is raised.
    saver.settle()
    assert lines == ["the last checkpoint could not be written: torn"]


def test_the_newest_every_nth_and_those_that_are_named_stay(build, tmp_path):
    saver, state = build(save_total_limit=1), {"weight": torch.ones(3)}
    saver._keep_every = 4
    for step in range(1, 7):
        saver.save(stage(saver, step, state), keep=[2])
    saver.finish()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [6, 4, 2]


def test_a_checkpoint_that_lost_a_file_while_it_was_written_gets_no_name(build, tmp_path):
    saver, state = build(), {"weight": torch.ones(3)}
    staged = stage(saver, 1, state, verify=lambda: (tmp_path / "_saving" / "checkpoint-1" / "scheduler.pt").unlink())
    (staged.folder / "scheduler.pt").touch()
    saver.save(staged)
    with pytest.raises(FileNotFoundError, match=r"scheduler\.pt"):
        saver.finish()
    assert list_checkpoints(tmp_path) == []


def test_what_is_known_of_the_run_outlives_its_record(build, tmp_path):
    saver, state, run = build(), {"weight": torch.ones(3)}, {"stage": "sft", "config": {"max_steps": 2}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    saver.save(stage(saver, 1, state))
    (tmp_path / "run.json").unlink()
    saver.save(stage(saver, 2, state))
    saver.finish()
    assert read_complete(tmp_path / "checkpoint-2")["run"] == run


def test_an_older_checkpoint_that_cannot_be_deleted_ends_no_run(build, tmp_path, lines, monkeypatch):
    monkeypatch.setattr(saver_module, "rotate", lambda *_: ["checkpoint-1 (Device or resource busy)"])
    saver = build(save_total_limit=1)
    saver.save(stage(saver, 2, {"weight": torch.ones(3)}))
    saver.finish()
    assert lines == ["older checkpoints could not be deleted: checkpoint-1 (Device or resource busy)"]


def test_a_directory_that_is_gone_is_not_made_anew_for_a_part_of_the_run(build, tmp_path):
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

    saver.dry_run(stage_and_compare, lambda: 12, num_steps=4, model_bytes=12, num_besides=0)


def test_a_dry_run_compares_tells_and_leaves_nothing(build, tmp_path, lines):
    compared = []
    dry_run(build(), {"weight": torch.ones(3)}, lambda folder: compared.append((folder, load(folder).tolist())))
    assert compared == [(tmp_path / DRY_RUN / "checkpoint-1", [1, 1, 1])]
    (line,) = lines
    assert line.startswith("checkpoints: ")
    assert "opened again in" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("free", [10, 40], ids=["before anything is written", "when its size is known"])
def test_a_disk_that_is_too_small_is_refused(build, tmp_path, monkeypatch, free):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    with pytest.raises(ConfigError, match="the disk has"):
        dry_run(build(save_steps=4), {"weight": torch.ones(3)})
    assert not list(tmp_path.glob("checkpoint-*"))
