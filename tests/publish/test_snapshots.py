"""What is published of a run, kept while training deletes the rest."""

from __future__ import annotations

import errno
import json
import shutil

import pytest
from tests.publish.runs import finish, link_files, make_run, save_checkpoint

from recipes_lib.errors import DataError
from recipes_lib.publish import snapshots
from recipes_lib.publish.snapshots import (
    MODEL,
    Contents,
    drop_snapshots,
    fingerprint,
    list_snapshots,
    read_fingerprint,
    read_push,
    take_snapshot,
)
from recipes_lib.training.checkpoints.manifest import read_complete

LOADED = {"model.safetensors", "config.json", "tokenizer.json"}
TOLD = {"README.md", "run.json"}
STATES = {"optimizer.pt", "trainer_state.json", "COMPLETE.json", "README.md", "samples.jsonl"}
SECRET = "hf_" + "k" * 34


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def take(run, name, contents):
    record = json.loads((run / "run.json").read_text())
    take_snapshot(run / "_publishing", name, contents, record, {"eval_loss": 1.5})
    return read_push(run / "_publishing", name)


def refuse_links(*paths):
    raise OSError(errno.EXDEV, "no links here")


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
    (checkpoint / ".env").write_text("what somebody put there after it was sealed")
    seals, files = {"optimizer.pt": "b" * 64}, (*read_complete(checkpoint)["files"], "COMPLETE.json")
    contents = Contents(source=checkpoint, sealed=seals, state="last-checkpoint", state_files=files)
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
    monkeypatch.setattr(snapshots.os, "link", refuse_links)
    checkpoint = save_checkpoint(run, 10)
    push = take(run, "checkpoint-10", Contents(source=checkpoint, sealed={}))
    assert push.files["model.safetensors"].read_bytes() == (checkpoint / "model.safetensors").read_bytes()


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_of_links_the_files_are_kept(run, monkeypatch, is_elsewhere):
    """A folder as the Hub's cache lays it out: every name leads to a file elsewhere, on another file system or not."""
    blobs = link_files(finish(run), monkeypatch)
    if is_elsewhere:
        monkeypatch.setattr(snapshots.os, "link", refuse_links)
    contents = {name: (run / name).read_bytes() for name in LOADED}
    push = take(run, MODEL, Contents(source=run, sealed={}))
    assert set(push.files) >= LOADED
    shutil.rmtree(blobs)
    assert {name: push.files[name].read_bytes() for name in LOADED} == contents


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
    listed = snapshots.list_published(checkpoint)
    shutil.rmtree(checkpoint)
    monkeypatch.setattr(snapshots, "list_published", lambda source: listed)
    with pytest.raises(FileNotFoundError):
        take(run, "checkpoint-10", contents)
    assert list_snapshots(run / "_publishing") == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: (run / "model.safetensors").write_bytes(b"torn"), "not whole: model.safetensors cannot be opened"),
        (lambda run: (run / "config.json").unlink(), "not whole: there are no weights with a configuration"),
        (lambda run: (run / "tokenizer.json").write_text(SECRET), "tokenizer.json: it would be published, and holds"),
        (lambda run: change_record(run, {"command": ["sft.py", SECRET]}), "run.json: it would be published, and holds"),
    ],
)
def test_what_must_not_be_published_is_named_and_leaves_no_snapshot(run, change, words):
    change(finish(run))
    with pytest.raises(DataError, match=words) as caught:
        take(run, MODEL, Contents(source=run, sealed={}))
    assert SECRET not in str(caught.value)
    assert caught.value.problems[0].remedy
    assert list((run / "_publishing").iterdir()) == []


def change_record(run, facts):
    (run / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | facts))
