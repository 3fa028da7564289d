"""A push is one commit, whatever the Hub does to its requests, and what it holds is what was written."""

from __future__ import annotations

import hashlib
import os

import pytest
from huggingface_hub.errors import HfHubHTTPError
from tests.publish.hub_server import PART_BYTES, Fault

from recipes_lib.publish.access import Target
from recipes_lib.publish.hub_session import GivenUpError, RequestCount
from recipes_lib.publish.push import DamagedError, Publisher, Push

TARGET = Target("me/mine", "main", is_private=True, exists=True)
KINDS = ("yaml", "tree", "preupload", "batch", "upload", "join", "verify", "commit", "tag")
FAULTS = {
    "too many requests": Fault(429, {"Retry-After": "3"}),
    "broken": Fault(500),
    "overloaded": Fault(503),
    "reset": Fault(cut="before"),
    "answer lost": Fault(cut="after"),
    "silent": Fault(stalls=True),
}


@pytest.fixture
def model(tmp_path):
    """A model in two shards, one of which is sent in parts, and its card."""
    contents = {
        "model-00001-of-00002.safetensors": os.urandom(2 * PART_BYTES + 77),
        "model-00002-of-00002.safetensors": os.urandom(5000),
        "model.safetensors.index.json": b"{}",
        "config.json": b'{"model_type": "llama"}',
        "README.md": b"---\nlibrary_name: transformers\n---\n# mine\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return contents, Push(name="checkpoint-4", files={name: tmp_path / name for name in contents}, tag="step-4")


@pytest.fixture
def publish(hub, pauses):
    hub.add("me/mine", private=True)
    count = RequestCount()
    count.install(0.5)
    lines = []
    publisher = Publisher(TARGET, lines.append)

    def publish(push, may_wait=lambda seconds: True):
        return publisher.publish(push, may_wait)

    publish.lines, publish.count = lines, count
    return publish


def read_history(hub):
    return hub.repositories["me/mine"].branches["main"]


def test_a_push_is_one_commit_with_every_file_and_a_tag(hub, model, publish):
    contents, push = model
    commit = publish(push)
    first, last = read_history(hub)
    assert last.files == first.files | contents
    assert last.oid == commit == hub.repositories["me/mine"].tags["step-4"]
    assert last.message == "Publish checkpoint-4"
    assert publish.count.num_failed == 0


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_whatever_fails_in_passing_the_commit_is_there_once(hub, model, publish, fault):
    """Each kind of request fails once."""
    contents, push = model
    for kind in KINDS:
        hub.faults[kind] = [fault]
    commit = publish(push)
    first, *pushed = read_history(hub)
    assert [each.oid for each in pushed] == [commit]
    assert pushed[0].files == first.files | contents
    assert hub.repositories["me/mine"].tags == {"step-4": commit}
    # A connection that was cut may fail the next request on it, too.
    assert publish.count.num_failed >= hub.num_faults == len(KINDS)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("tree", 404),
        ("preupload", 401),
        ("batch", 403),
        ("upload", 422),
        ("commit", 400),
        ("commit", 403),
        ("tag", 403),
    ],
)
def test_a_refusal_is_told_at_once_and_nothing_is_committed(hub, model, publish, kind, status, pauses):
    hub.faults[kind] = [Fault(status)] * 9
    with pytest.raises((HfHubHTTPError, RuntimeError)):
        publish(model[1])
    assert len(read_history(hub)) == (2 if kind == "tag" else 1)
    assert pauses.ours == []


def test_what_was_sent_once_is_not_sent_again(hub, model, publish):
    hub.faults["commit"] = [Fault(503), Fault(503)]
    publish(model[1])
    assert hub.num_requests["upload"] == 3 + 1  # Three parts, and the small shard.
    assert hub.num_requests["commit"] == 3
    assert len(publish.lines) == 2
    assert "checkpoint-4: HfHubHTTPError" in publish.lines[0]


def test_another_model_takes_the_place_of_the_first_and_leaves_no_shard_of_it(hub, model, publish, tmp_path):
    publish(model[1])
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"whole")
    hub.repositories["me/mine"].branches["main"][-1].files["NOTES.md"] = b"the user's own"
    commit = publish(Push(name="model", files={"model.safetensors": other}, tag="step-4"))
    assert set(read_history(hub)[-1].files) == {
        *(".gitattributes", "NOTES.md", "README.md", "config.json"),
        "model.safetensors",
    }
    assert hub.repositories["me/mine"].tags["step-4"] == commit
    assert b"whole" in hub.repositories["me/mine"].find("step-4").files.values()


def test_a_folder_holds_the_last_push_alone(hub, publish, tmp_path):
    for name in ("rng_state_0.pth", "rng_state_1.pth", "rng_state.pth"):
        (tmp_path / name).write_bytes(name.encode())
    many = {f"last-checkpoint/{name}": tmp_path / name for name in ("rng_state_0.pth", "rng_state_1.pth")}
    publish(Push(name="checkpoint-1", files=many, folder="last-checkpoint"))
    one = {"last-checkpoint/rng_state.pth": tmp_path / "rng_state.pth"}
    publish(Push(name="checkpoint-2", files=one, folder="last-checkpoint"))
    assert set(read_history(hub)[-1].files) == {".gitattributes", *one}


def test_a_file_that_is_not_as_it_was_sealed_is_not_sent(hub, model, publish):
    _, push = model
    sealed = {"config.json": hashlib.sha256(b"other").hexdigest()}
    with pytest.raises(DamagedError, match=r"config\.json holds other bytes"):
        publish(Push(name="checkpoint-4", files=push.files, sealed=sealed))
    assert hub.requests == []


def test_patience_is_the_caller_s(hub, model, publish):
    hub.sabotage = lambda kind: Fault(503) if kind == "commit" else None
    with pytest.raises(GivenUpError, match="503"):
        publish(model[1], lambda seconds: seconds < 0)
    assert len(read_history(hub)) == 1
