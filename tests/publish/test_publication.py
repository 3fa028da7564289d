"""Which checkpoints reach the Hub, in which order, and that none is lost to its failures."""

from __future__ import annotations

import random
import threading

import pytest
from tests.publish.hub_server import Fault
from tests.publish.runs import finish, make_run, read_weight, save_checkpoint

from recipes_lib.errors import DataError
from recipes_lib.publish import publication
from recipes_lib.publish.access import Target
from recipes_lib.publish.hub_session import GivenUpError, RequestCount
from recipes_lib.publish.journal import read_journal
from recipes_lib.publish.publication import Publication
from recipes_lib.publish.push import Publisher
from recipes_lib.publish.snapshots import MODEL, Contents
from recipes_lib.training.checkpoints.manifest import list_checkpoints, read_complete, rotate, write_complete

TARGET = Target("me/mine", "main", is_private=True, exists=True)


@pytest.fixture
def run(tmp_path, hub, pauses):
    hub.add("me/mine", private=True)
    return make_run(tmp_path / "run")


def find(run):
    found = {}
    for step, path in reversed(list_checkpoints(run)):
        sealed = {name: file["sha256"] for name, file in read_complete(path)["files"].items()}
        found[path.name] = Contents(source=path, sealed=sealed, tag=f"step-{step}")
    if (run / "model.safetensors").exists():
        found[MODEL] = Contents(source=run, sealed={})
    return found


def begin(run, *, pushes_all=True, is_over=True, lines=None):
    """A publication as a new process would begin it."""
    is_finishing = threading.Event()
    if is_over:
        is_finishing.set()
    say = (lines if lines is not None else []).append
    record = {"stage": "sft", "config": {"model_name_or_path": "a/b", "dataset_name": "c/d", "output_dir": "mine"}}
    return Publication(
        run,
        Publisher(TARGET, say),
        read_journal(run, TARGET),
        lambda: find(run),
        lambda name: (record | {"versions": {}}, {}),
        pushes_all=pushes_all,
        is_finishing=is_finishing,
        say=say,
    )


def read_messages(hub):
    return [commit.message for commit in hub.repositories["me/mine"].branches["main"][1:]]


def publish(run, **options):
    publication = begin(run, **options)
    publication.look()
    publication.push_all()


def test_checkpoints_are_commits_in_their_order_each_with_its_tag(hub, run):
    for step in (100, 20):
        save_checkpoint(run, step)
    publish(finish(run))
    assert read_messages(hub) == ["Publish checkpoint-20", "Publish checkpoint-100", "Publish model"]
    repository = hub.repositories["me/mine"]
    assert [read_weight(repository.find(revision).files) for revision in ("step-20", "step-100", "main")] == [
        20,
        100,
        -1,
    ]


def test_what_is_published_is_not_published_again_by_the_next_process(hub, run):
    save_checkpoint(run, 10)
    publish(run)
    before = len(hub.requests)
    publish(run)
    assert len(hub.requests) == before
    save_checkpoint(run, 20)
    publish(finish(run))
    assert read_messages(hub) == ["Publish checkpoint-10", "Publish checkpoint-20", "Publish model"]


def test_a_checkpoint_that_was_made_anew_is_published_anew(hub, run):
    save_checkpoint(run, 10)
    publish(run)
    other = save_checkpoint(run, 10)
    (other / "config.json").write_text('{"model_type": "llama", "another": true}')
    write_complete(other, step=10)
    publish(run)
    repository = hub.repositories["me/mine"]
    assert b"another" in repository.find("step-10").files["config.json"]
    assert len(read_messages(hub)) == 2


def test_a_branch_never_goes_back_to_an_older_checkpoint(hub, run):
    save_checkpoint(run, 20)
    publish(run)
    save_checkpoint(run, 10)
    publish(run)
    assert read_messages(hub) == ["Publish checkpoint-20"]


def test_a_checkpoint_that_is_overtaken_is_left_out_unless_all_are_asked_for(hub, run):
    for step in (10, 20):
        save_checkpoint(run, step)
    publish(run, pushes_all=False)
    assert read_messages(hub) == ["Publish checkpoint-20"]


def test_one_that_is_overtaken_while_the_hub_does_not_take_it_gives_way(hub, run):
    save_checkpoint(run, 10)
    publication = begin(run, pushes_all=False)
    publication.look()

    def fail(kind):
        if kind == "commit" and not (run / "checkpoint-20").exists():
            save_checkpoint(run, 20)
            publication.look()
            return Fault(503)
        return None

    hub.sabotage = fail
    publication.push_all()
    assert read_messages(hub) == ["Publish checkpoint-20"]
    assert read_journal(run, TARGET).counts["num_overtaken"] == 1


def test_a_damaged_checkpoint_is_named_and_passed_over(hub, run):
    for step in (10, 20):
        save_checkpoint(run, step)
    path = run / "checkpoint-10" / "model.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    lines = []
    publication = begin(run, lines=lines)
    publication.look()
    publication.push_all()
    publication.look()  # It is not tried again and again.
    publication.push_all()
    assert read_messages(hub) == ["Publish checkpoint-20"]
    assert [line for line in lines if "not published" in line] == [
        "checkpoint-10 is not published: model.safetensors holds other bytes than were written"
    ]


def test_what_the_hub_does_not_take_is_kept_for_the_next_process_though_training_deletes_it(hub, run):
    for step in (10, 20, 30):
        save_checkpoint(run, step)
    hub.sabotage = lambda kind: Fault(503) if kind == "commit" else None
    with pytest.raises(GivenUpError):
        publish(run)
    rotate(run, 1, ())
    hub.sabotage = lambda kind: None
    publish(run)
    assert read_messages(hub) == [f"Publish checkpoint-{step}" for step in (10, 20, 30)]


def test_while_a_run_goes_on_there_is_no_end_to_the_patience(hub, run, monkeypatch):
    monkeypatch.setattr(publication, "PATIENCE_SECONDS", 0.0)
    save_checkpoint(run, 10)
    going = begin(run, is_over=False)
    going.look()
    hub.faults["commit"] = [Fault(503)] * 12
    going.push_all()
    assert read_messages(hub) == ["Publish checkpoint-10"]


def test_following_a_run_keeps_what_is_deleted_while_the_hub_is_silent(hub, run):
    """Of five checkpoints that training makes and deletes while the first push hangs, each becomes a commit."""
    RequestCount().install(1.0)
    hub.faults["batch"] = [Fault(stalls=True)]
    publication = begin(run, is_over=False)
    done = []
    thread = threading.Thread(target=lambda: done.append(publication.follow()), daemon=True)
    thread.start()
    for step in (10, 20, 30, 40, 50):
        save_checkpoint(run, step)
        while not (run / "_publishing" / f"checkpoint-{step}").exists() and f"step-{step}" not in read_tags(hub):
            pass
        rotate(run, 1, ())
    finish(run)
    publication._is_finishing.set()
    thread.join(timeout=60)
    assert done
    assert read_messages(hub) == [*(f"Publish checkpoint-{step}" for step in (10, 20, 30, 40, 50)), "Publish model"]


def test_what_is_remembered_and_gone_is_published_by_the_run_that_goes_on(hub, run):
    """The Hub says only at the sixth attempt that it has nothing of it; until then what is new is kept."""
    save_checkpoint(run, 10)
    publish(run)
    hub.add("me/mine", private=True)
    hub.faults["commits"] = [Fault(503)] * 5
    save_checkpoint(run, 20)
    lines = []
    begin(finish(run), lines=lines).follow()
    assert read_messages(hub) == ["Publish checkpoint-10", "Publish checkpoint-20", "Publish model"]
    assert "checkpoint-10 was published, and is no longer there" in lines


def test_an_ancestor_is_there_though_the_branch_has_gone_on(hub, run):
    for step in (10, 20):
        save_checkpoint(run, step)
    publish(finish(run))
    begin(run).follow()
    assert len(read_messages(hub)) == 3


def test_a_hub_that_does_not_tell_what_it_has_is_believed_neither_way(hub, run):
    publish(finish(run))
    hub.sabotage = lambda kind: Fault(503) if kind == "commits" else None
    with pytest.raises(GivenUpError):
        begin(run).follow()
    assert read_journal(run, TARGET).commits.keys() == {MODEL}


def test_a_secret_is_told_while_the_run_goes_on_and_ends_the_publishing(hub, run):
    checkpoint = save_checkpoint(run, 10)
    (checkpoint / "tokenizer.json").write_text("hf_" + "k" * 34)
    write_complete(checkpoint, step=10)
    lines = []
    publication = begin(run, is_over=False, lines=lines)
    ended = []

    def follow():
        with pytest.raises(DataError) as caught:
            publication.follow()
        ended.append(caught.value)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    while not lines:
        pass
    assert "checkpoint-10/tokenizer.json: it would be published" in lines[0]
    publication._is_finishing.set()
    thread.join(timeout=60)
    assert [str(error) for error in ended] == lines
    assert read_messages(hub) == []


def read_tags(hub):
    return hub.repositories["me/mine"].tags


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
def test_none_is_lost_when_a_fifth_of_all_requests_fails(hub, run, seed):
    """Refused, too many, broken, reset before or after they were obeyed, silent; then every byte is looked at."""
    chance = random.Random(seed)
    faults = [Fault(429, {"Retry-After": "2"}), Fault(500), Fault(503), Fault(cut="before"), Fault(cut="after")]
    faults += [Fault(stalls=True)] if seed == 0 else []
    hub.sabotage = lambda kind: chance.choice(faults) if chance.random() < 0.2 else None
    count = RequestCount()
    count.install(0.3)
    for step in (10, 20, 30):
        save_checkpoint(run, step)
    publish(finish(run))
    repository = hub.repositories["me/mine"]
    assert len(read_messages(hub)) == 4
    assert {tag: read_weight(repository.find(tag).files) for tag in repository.tags} == {
        "step-10": 10,
        "step-20": 20,
        "step-30": 30,
    }
    assert read_weight(repository.find("main").files) == -1
    assert count.num_sent == len(hub.requests)
    assert count.num_failed == hub.num_faults > 2
