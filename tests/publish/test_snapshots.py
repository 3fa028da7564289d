"""What is published of a run, kept while training deletes the rest."""

from __future__ import annotations

import errno
import json
import shutil

import pytest
from safetensors.numpy import save_file
from tests.publish.runs import finish, make_run, save_checkpoint

from recipes_lib.publish import snapshots
from recipes_lib.publish.snapshots import (
    MODEL,
    Contents,
    drop_snapshots,
    find_damage,
    fingerprint,
    is_model,
    list_snapshots,
    read_fingerprint,
    read_push,
    take_snapshot,
)

INDEX = "model.safetensors.index.json"
SHARDS = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
LOADED = {"model.safetensors", "config.json", "tokenizer.json"}
TOLD = {"README.md", "run.json"}
STATES = {"optimizer.pt", "trainer_state.json", "COMPLETE.json", "README.md", "samples.jsonl"}


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def take(run, name, contents):
    record = json.loads((run / "run.json").read_text())
    take_snapshot(run / "_publishing", name, contents, record, {"eval_loss": 1.5})
    return read_push(run / "_publishing", name)


def test_of_a_checkpoint_the_model_its_card_and_its_record_are_published(run):
    checkpoint = save_checkpoint(run, 10)
    seals = {"model.safetensors": "a" * 64, "optimizer.pt": "b" * 64, "README.md": "c" * 64}
    push = take(run, "checkpoint-10", Contents(source=checkpoint, sealed=seals, tag="step-10"))
    assert set(push.files) == LOADED | TOLD
    assert (push.name, push.tag, push.folder) == ("checkpoint-10", "step-10", "")
    assert push.sealed == {"model.safetensors": "a" * 64}
    assert "| eval_loss | 1.5000 |" in push.files["README.md"].read_text()


def test_optimizer_states_only_where_the_whole_checkpoint_was_asked_for(run):
    checkpoint = save_checkpoint(run, 10)
    seals = {"optimizer.pt": "b" * 64}
    contents = Contents(source=checkpoint, sealed=seals, state="last-checkpoint")
    push = take(run, "checkpoint-10", contents)
    whole = {f"last-checkpoint/{name}" for name in LOADED | STATES}
    assert set(push.files) == LOADED | TOLD | whole
    assert push.sealed == {"last-checkpoint/optimizer.pt": "b" * 64}
    assert push.folder == "last-checkpoint"


def test_of_a_finished_run_neither_samples_nor_checkpoints_are(run):
    save_checkpoint(run, 10)
    (run / "step-7-rows.jsonl").write_text("rows of a step that a guard has stopped")
    push = take(finish(run), MODEL, Contents(source=run, sealed={}))
    assert set(push.files) == LOADED | TOLD | {"metrics.jsonl"}


def test_nothing_tells_about_the_machine_and_the_run_keeps_its_own_record(run):
    before = (run / "run.json").read_text()
    push = take(finish(run), MODEL, Contents(source=run, sealed={}))
    told = push.files["run.json"].read_text()
    assert "secret" not in told + push.files["README.md"].read_text()
    assert str(run.parent) not in told
    assert "error" not in json.loads(told)
    assert json.loads(told)["command"] == ["sft.py", "--config", "sft.yaml", "--output_dir=run"]
    assert json.loads((run / "run.json").read_text()) == json.loads(before) | {"status": "done"}


def test_what_training_deletes_stays_and_took_no_room_while_it_was_there(run):
    checkpoint = save_checkpoint(run, 10)
    content = (checkpoint / "model.safetensors").read_bytes()
    push = take(run, "checkpoint-10", Contents(source=checkpoint, sealed={}))
    assert push.files["model.safetensors"].samefile(checkpoint / "model.safetensors")
    shutil.rmtree(checkpoint)
    assert push.files["model.safetensors"].read_bytes() == content


def test_a_file_system_without_links_gets_copies(run, monkeypatch):
    def refuse(*paths):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(snapshots.os, "link", refuse)
    checkpoint = save_checkpoint(run, 10)
    push = take(run, "checkpoint-10", Contents(source=checkpoint, sealed={}))
    assert push.files["model.safetensors"].read_bytes() == (checkpoint / "model.safetensors").read_bytes()


def test_a_snapshot_that_was_not_finished_is_none(run):
    (run / "_publishing" / "checkpoint-5.making").mkdir(parents=True)
    for step in (100, 20):
        take(run, f"checkpoint-{step}", Contents(source=save_checkpoint(run, step), sealed={}))
    take(finish(run), MODEL, Contents(source=run, sealed={}))
    place = run / "_publishing"
    assert list_snapshots(place) == ["checkpoint-20", "checkpoint-100", MODEL]
    drop_snapshots(place, ["checkpoint-20", MODEL])
    assert list_snapshots(place) == ["checkpoint-100"]
    assert read_fingerprint(place, MODEL) == ""


def test_a_fingerprint_follows_the_model_and_not_what_is_told_of_it(run):
    finish(run)
    contents = Contents(source=run, sealed={})
    first = fingerprint(contents)
    (run / "run.json").write_text("{}")
    (run / "samples.jsonl").write_text("others")
    assert fingerprint(contents) == first
    assert fingerprint(Contents(source=run, sealed={}, tag="v1")) != first
    (run / "config.json").write_text('{"model_type": "gpt2"}')
    assert fingerprint(contents) != first


def test_a_deleted_source_is_told(run, monkeypatch):
    checkpoint = save_checkpoint(run, 10)
    contents = Contents(source=checkpoint, sealed={})
    listed = snapshots._list_published(checkpoint)
    shutil.rmtree(checkpoint)
    monkeypatch.setattr(snapshots, "_list_published", lambda source: listed)
    with pytest.raises(FileNotFoundError):
        take(run, "checkpoint-10", contents)
    assert list_snapshots(run / "_publishing") == []


@pytest.mark.parametrize(
    ("names", "holds"),
    [
        (["model.safetensors", "config.json"], True),
        (["model-00001-of-00002.safetensors", "config.json"], True),
        (["adapter_model.safetensors", "adapter_config.json"], True),
        (["policy.safetensors", "ppo_state.json"], False),
        (["config.json"], False),
        ([], False),
    ],
)
def test_only_what_can_be_loaded_is_a_model(tmp_path, names, holds):
    for name in names:
        (tmp_path / name).touch()
    assert is_model(tmp_path) is holds
    assert not is_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda file: None, None),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "model.safetensors cannot be opened again"),
        (lambda file: file.write_bytes(b""), "model.safetensors cannot be opened again"),
        (lambda file: save_file({}, file), "model.safetensors holds no tensor"),
        (lambda file: file.with_name(INDEX).write_text(json.dumps(SHARDS)), "model-00002-of-00002.safetensors cannot"),
    ],
)
def test_weights_are_opened_again(run, change, found):
    file = finish(run) / "model.safetensors"
    change(file)
    damage = find_damage(run)
    assert damage is None if found is None else damage.startswith(found)
