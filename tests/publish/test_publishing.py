"""``recipes publish`` and publishing while training: what is whole is committed, and the run never pays for the Hub."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub.errors import HfHubHTTPError
from safetensors.numpy import save, save_file
from tests.forked import ROOT
from tests.publish.hub_server import Commit, Fault
from tests.publish.runs import finish, link_files, make_run, read_weight, save_checkpoint

from recipes_lib.cli import main
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import EXIT_DONE, EXIT_USER, PreemptedError
from recipes_lib.publish import publishing
from recipes_lib.publish.access import NO_ANSWER, Target, limit_silence
from recipes_lib.publish.publishing import Publication
from recipes_lib.publish.selection import MODEL, find_contents
from recipes_lib.training.checkpoints.manifest import rotate, write_complete


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "mine")


def read_messages(hub, name="me/mine"):
    return [commit.message.removeprefix("Publish ") for commit in hub.repositories[name].branches["main"][1:]]


@pytest.mark.parametrize(
    ("strategy", "state"),
    [("every_save", ""), ("checkpoint", "last-checkpoint"), ("all_checkpoints", "checkpoint-10")],
)
def test_only_whole_checkpoints_that_hold_a_model_are_found(run, strategy, state):
    save_checkpoint(run, 20)
    save_checkpoint(run, 10)
    (save_checkpoint(run, 30) / "COMPLETE.json").unlink()
    (save_checkpoint(run, 40) / "config.json").unlink()
    policy = run / "checkpoint-50"
    policy.mkdir()
    (policy / "policy.safetensors").touch()
    write_complete(policy, step=50)
    found = find_contents(run, {"hub_strategy": strategy})
    assert list(found) == ["checkpoint-10", "checkpoint-20"]
    assert found["checkpoint-10"].state == state
    assert found["checkpoint-10"].tag == "step-10"
    assert {"model.safetensors", "optimizer.pt"} <= set(found["checkpoint-10"].hashes)
    assert list(find_contents(finish(run), {"hub_strategy": "end", "tag": "v1"})) == [MODEL]


def test_the_command_publishes_what_is_there_and_the_second_time_nothing(hub, run, capsys):
    for step in (10, 20):
        save_checkpoint(run, step)
    finish(run)
    assert main(["publish", str(run), "--tag", "v1.0"]) == EXIT_DONE
    told = capsys.readouterr().out
    assert "publishes to me/mine, private, which will be created" in told
    assert "published at https://huggingface.co/me/mine: 3 commits" in told
    repository = hub.repositories["me/mine"]
    assert set(repository.tags) == {"step-10", "step-20", "v1.0"}
    assert "| eval_loss | 2.0 |" in repository.find("step-20").files["README.md"].decode()
    files = repository.find("v1.0").files
    assert "| eval_loss | 1.0 |" in files["README.md"].decode()
    model = {"model.safetensors", "config.json", "tokenizer.json"}
    assert files.keys() == {".gitattributes", "README.md", "run.json", "metrics.jsonl", *model}
    assert main(["publish", str(run), "--tag", "v1.0"]) == EXIT_DONE
    assert read_messages(hub) == ["checkpoint-10", "checkpoint-20", MODEL]


def test_a_merged_model_is_published_as_it_is(hub, run, tmp_path):
    folder = finish(make_run(tmp_path / "merged"))
    (folder / "run.json").unlink()
    (folder / "merge.json").write_text(json.dumps({"base": "owner/base", "adapter": "/somewhere/secret/lora"}))
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n# merged\n")
    command = ["publish", str(folder), "--hub_model_id", "me/joined", "--hub_revision", "trial"]
    assert main([*command, "--hub_private_repo", "false"]) == EXIT_DONE
    repository = hub.repositories["me/joined"]
    assert not repository.private
    files = repository.find("trial").files
    assert json.loads(files["merge.json"]) == {"base": "owner/base", "adapter": "lora"}
    assert files["README.md"].endswith(b"# merged\n")
    assert len(repository.branches["main"]) == 1


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "metrics.jsonl"])
def test_a_secret_does_not_leave_the_machine_and_is_not_repeated(hub, run, capsys, name):
    secret = "hf_" + "k" * 34
    with (finish(run) / name).open("a") as file:
        file.write(f'{{"told": "{secret}"}}')
    assert main(["publish", str(run)]) == EXIT_USER
    told = capsys.readouterr().err
    assert f"{run / name}: it would be published, and contains what looks like an access token" in told
    assert secret not in told
    assert read_messages(hub) == []


def test_linked_files_are_published_as_they_are(hub, run, monkeypatch):
    """What the Hub has is not deleted for a link that is laid over a file, as the Hub's cache does it."""
    assert main(["publish", str(finish(run))]) == EXIT_DONE
    before = dict(hub.repositories["me/mine"].find("main").files)
    link_files(run, monkeypatch)
    (run / "model.safetensors").resolve().write_bytes(save({"weight": np.full(300, 7, np.float32)}))
    assert main(["publish", str(run)]) == EXIT_DONE
    after = hub.repositories["me/mine"].find("main").files
    assert after.keys() == before.keys()
    assert read_weight(after) == 7


def lose_repository(hub):
    del hub.repositories["me/mine"]


def lose_branch(hub):
    del hub.repositories["me/mine"].branches["trial"]


def push_over(hub):
    """As another run does that has the same target."""
    history = hub.repositories["me/mine"].branches["trial"]
    files = dict(history[-1].files, **{"model.safetensors": save({"weight": np.full(300, 7, np.float32)})})
    history.append(Commit("f" * 40, "Publish model", files))


def squash(hub):
    """The history becomes one commit, with the files that the last one had."""
    history = hub.repositories["me/mine"].branches["trial"]
    history[:] = [Commit("e" * 40, "squashed", history[-1].files)]


@pytest.mark.parametrize("lose", [lose_repository, lose_branch, push_over, squash])
def test_what_the_hub_has_no_longer_is_published_again(hub, run, lose):
    command = ["publish", str(finish(run)), "--hub_revision", "trial", "--tag", "v1"]
    assert main(command) == EXIT_DONE
    before = dict(hub.repositories["me/mine"].find("trial").files)
    lose(hub)
    assert main(command) == EXIT_DONE
    repository = hub.repositories["me/mine"]
    assert repository.find("trial").files == repository.find("v1").files == before


def test_what_somebody_wrote_over_the_card_stays(hub, run):
    assert main(["publish", str(finish(run))]) == EXIT_DONE
    history = hub.repositories["me/mine"].branches["main"]
    history.append(Commit("d" * 40, "a better card", dict(history[-1].files, **{"README.md": b"by hand"})))
    assert main(["publish", str(run)]) == EXIT_DONE
    assert history[-1].files["README.md"] == b"by hand"


@pytest.mark.parametrize(("word", "is_private"), [("no", False), ("FALSE", False), ("yes", True), ("on", True)])
def test_who_sees_it_is_said_as_in_a_recipe(hub, run, word, is_private):
    assert main(["publish", str(finish(run)), "--hub_private_repo", word]) == EXIT_DONE
    assert hub.repositories["me/mine"].private is is_private


def test_a_word_that_is_no_answer_is_a_mistake_of_the_user(hub, run, capsys):
    with pytest.raises(SystemExit) as caught:
        publishing.main([str(finish(run)), "--hub_private_repo", "perhaps"])
    assert caught.value.code == EXIT_USER
    assert "--hub_private_repo: 'perhaps' is neither true nor false" in capsys.readouterr().err
    assert hub.repositories == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda hub, run: (run / "model.safetensors").unlink(), "there is no finished model"),
        (lambda hub, run: shutil.rmtree(run), "mine: is not a folder"),
        (lambda hub, run: (run / "model.safetensors").write_bytes(b"torn"), "the model is damaged"),
        (lambda hub, run: hub.add("me/mine", private=False), "exists and is public"),
        (lambda hub, run: hub.faults["commit"].extend([Fault(403)] * 9), "not everything is published"),
    ],
)
def test_what_cannot_be_published_is_told_with_its_remedy(hub, run, capsys, change, words):
    finish(run)
    change(hub, run)
    assert main(["publish", str(run)]) == EXIT_USER
    told = capsys.readouterr().err
    assert words in told
    assert "\n    " in told
    if "me/mine" in hub.repositories:
        assert read_messages(hub) == []


def test_a_read_only_folder_is_published(hub, run, monkeypatch):
    opened = Path.open

    def open_or_refuse(path, mode="r", **options):
        if "r" not in mode and run in path.parents:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, mode, **options)

    finish(run)
    monkeypatch.setattr(Path, "open", open_or_refuse)
    assert main(["publish", str(run)]) == EXIT_DONE
    assert read_messages(hub) == [MODEL]


def test_a_second_process_is_refused(hub, run, capsys):
    finish(run)
    hold = f"import fcntl, sys; f = open({str(run / '_published.lock')!r}, 'a'); fcntl.lockf(f, fcntl.LOCK_EX)"
    command = [sys.executable, "-c", f"{hold}; print('held', flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        assert main(["publish", str(run)]) == EXIT_USER
        other.stdin.close()
    assert "another process publishes it" in capsys.readouterr().err


def recipe(run, train, **keys):
    """``train`` as a recipe that publishes to the run's directory."""
    config = RecipeConfig.__new__(RecipeConfig)
    training = {"push_to_hub": True, "hub_strategy": "every_save", "output_dir": str(run), **keys}
    object.__setattr__(config, "training", training)
    return lambda: publishing.publishing(train)(config)


def wait_for(hub, tag):
    while tag not in hub.repositories["me/mine"].tags:
        hub.closing.wait(0.05)


def test_beside_a_run_checkpoints_are_published_when_they_are_there(hub, tmp_path, capsys):
    run = tmp_path / "mine"

    def train(config):
        assert "private" in capsys.readouterr().err
        make_run(run)
        for step in (10, 20):
            save_checkpoint(run, step)
            wait_for(hub, f"step-{step}")
        finish(run)

    recipe(run, train)()
    assert read_messages(hub) == ["checkpoint-10", "checkpoint-20", MODEL]
    assert read_weight(hub.repositories["me/mine"].find("step-10").files) == 10
    assert "3 commits" in capsys.readouterr().err
    names = {name for commit in hub.repositories["me/mine"].branches["main"] for name in commit.files}
    assert not any("optimizer" in name or name.startswith("_") for name in names)


def test_with_the_model_at_the_end_no_checkpoint_is_published(hub, run):
    def train(config):
        save_checkpoint(run, 10)
        finish(run)

    recipe(run, train, hub_strategy="end")()
    assert read_messages(hub) == [MODEL]


def test_what_another_run_left_in_the_directory_is_not_published(hub, run):
    save_checkpoint(run, 10)

    def train(config):
        hub.closing.wait(2 * publishing.SECONDS_BETWEEN_LOOKS)
        raise PreemptedError("refused by its configuration")

    with pytest.raises(PreemptedError):
        recipe(run, train)()
    assert read_messages(hub) == []


def test_a_run_that_is_stopped_does_not_wait_and_the_next_one_publishes_the_rest(hub, run):
    hub.sabotage = lambda kind: Fault(stalls=True) if kind == "preupload" else None

    def train(config):
        make_run(run)
        save_checkpoint(run, 10)
        while "preupload" not in hub.requests:
            hub.closing.wait(0.05)
        raise PreemptedError("SIGTERM")

    with pytest.raises(PreemptedError):
        recipe(run, train)()
    hub.sabotage = lambda kind: None
    recipe(run, lambda config: finish(run))()
    assert read_messages(hub) == ["checkpoint-10", MODEL]


def test_a_refusal_at_the_end_is_told_and_does_not_fail_the_run(hub, run, capsys):
    hub.sabotage = lambda kind: Fault(403) if kind == "commit" else None
    recipe(run, lambda config: finish(run))()
    told = capsys.readouterr().err
    assert "not everything is published" in told
    assert "403" in told
    assert f"`recipes publish {run}` publishes the rest" in told


def test_only_the_main_process_publishes_and_only_where_it_is_asked_for(hub, run, monkeypatch):
    trained = []
    recipe(run, trained.append, push_to_hub=False)()
    monkeypatch.setenv("RANK", "1")
    recipe(run, trained.append)()
    assert len(trained) == 2
    assert hub.requests == []


def test_who_may_not_publish_does_not_train(hub, run):
    hub.role = "read"
    trained = []
    with pytest.raises(Exception, match="may only read"):
        recipe(run, trained.append)()
    assert trained == []


TARGET = Target("me/mine", "main", is_private=True, exists=True)
FAULTS = {
    "too many requests": Fault(429),
    "broken": Fault(500),
    "overloaded": Fault(503),
    "reset": Fault(cut="before"),
    "answer lost": Fault(cut="after"),
    "silent": Fault(stalls=True),
}
KINDS = ("yaml", "tree", "preupload", "batch", "upload", "join", "verify", "commit", "tag")


@pytest.fixture
def publish(hub, pauses, run):
    """Publish what the run holds, as a new process does."""
    hub.add("me/mine", private=True)
    limit_silence(30)

    def publish(*, hub_strategy="every_save", hub_always_push=True):
        keys = {"hub_strategy": hub_strategy, "hub_always_push": hub_always_push}
        Publication(run, TARGET, keys, publish.lines.append).publish_missing()

    publish.lines = []
    return publish


QUICK = {
    *(("commit", name) for name in FAULTS),
    *(("tag", "answer lost"), ("upload", "answer lost"), ("upload", "silent")),
    *zip(KINDS[:7], itertools.cycle(FAULTS)),
}
"""Every kind of request, and every fault; the other pairs are in the slow tier."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.slow) for cell in itertools.product(KINDS, FAULTS)],
)
def test_after_a_transient_failure_the_commit_is_there_once(hub, run, publish, kind, name):
    fault = FAULTS[name]
    checkpoint = save_checkpoint(run, 4)
    if kind == "join":  # Of a file that is sent in parts.
        save_file({"weight": np.full(40_000, 4, np.float32)}, checkpoint / "model.safetensors")
        write_complete(checkpoint, step=4)
    hub.faults[kind] = [fault]
    if fault.stalls:
        limit_silence(0.5)
    publish()
    assert hub.num_faults == 1
    assert read_messages(hub) == ["checkpoint-4"]
    repository = hub.repositories["me/mine"]
    assert repository.tags == {"step-4": repository.branches["main"][-1].oid}
    assert read_weight(repository.find("step-4").files) == 4
    publish()
    assert read_messages(hub) == ["checkpoint-4"]


REFUSALS = [("preupload", 401), ("batch", 403), ("upload", 422), ("commit", 400), ("commit", 403), ("tag", 403)]


@pytest.mark.parametrize(("kind", "status"), REFUSALS)
def test_a_refusal_is_told_at_once_and_nothing_is_committed(hub, run, publish, kind, status, pauses):
    save_checkpoint(run, 4)
    hub.faults[kind] = [Fault(status)] * 9
    with pytest.raises((HfHubHTTPError, RuntimeError)):
        publish()
    assert len(read_messages(hub)) == (1 if kind == "tag" else 0)
    assert pauses.ours == []


def test_what_was_uploaded_once_is_not_uploaded_again(hub, run, publish):
    save_checkpoint(run, 4)
    hub.faults["commit"] = [Fault(503), Fault(503)]
    publish()
    assert (hub.num_requests["upload"], hub.num_requests["commit"]) == (1, 3)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_none_is_lost_when_a_fifth_of_all_requests_fails(hub, run, publish, seed):
    """Run again until it succeeds; then every commit is there once, in order."""
    chance = random.Random(seed)
    faults = [Fault(429), Fault(500), Fault(503), Fault(cut="before"), Fault(cut="after")]
    hub.sabotage = lambda kind: chance.choice(faults) if chance.random() < 0.2 else None
    for step in (20, 100):
        save_checkpoint(run, step)
    finish(run)
    for _ in range(20):
        with suppress(HfHubHTTPError, RuntimeError, OSError, NO_ANSWER):
            publish()
            break
    assert hub.num_faults > 2
    assert read_messages(hub) == ["checkpoint-20", "checkpoint-100", MODEL]
    find = hub.repositories["me/mine"].find
    assert [read_weight(find(name).files) for name in ("step-20", "step-100", "main")] == [20, 100, -1]


def test_a_branch_never_goes_back_to_an_older_checkpoint(hub, run, publish):
    save_checkpoint(run, 20)
    publish()
    save_checkpoint(run, 10)
    publish()
    publish()
    assert read_messages(hub) == ["checkpoint-20"]


def test_a_checkpoint_that_was_saved_anew_is_published_anew(hub, run, publish):
    save_checkpoint(run, 10)
    publish()
    other = save_checkpoint(run, 10)
    (other / "config.json").write_text('{"model_type": "llama", "another": true}')
    write_complete(other, step=10)
    publish()
    assert b"another" in hub.repositories["me/mine"].find("step-10").files["config.json"]
    assert len(read_messages(hub)) == 2


def test_an_overtaken_checkpoint_is_left_out_unless_all_are_asked_for(hub, run, publish):
    for step in (10, 20):
        save_checkpoint(run, step)
    publish(hub_always_push=False)
    assert read_messages(hub) == ["checkpoint-20"]


def test_a_damaged_checkpoint_is_named_and_skipped(hub, run, publish):
    for step in (10, 20):
        save_checkpoint(run, step)
    path = run / "checkpoint-10" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    publish()
    assert read_messages(hub) == ["checkpoint-20"]
    assert publish.lines[0] == "checkpoint-10 is not published: model.safetensors does not match its SHA-256"


def test_a_checkpoint_that_is_deleted_while_it_waits_is_named_and_skipped(hub, run, publish):
    """The first upload fails in passing, and training goes on saving and deleting meanwhile."""
    for step in (10, 20):
        save_checkpoint(run, step)

    def fail(kind):
        if kind == "batch" and (run / "checkpoint-10").exists():
            rotate(run, 1, ())
            return Fault(503)
        return None

    hub.sabotage = fail
    publish()
    assert read_messages(hub) == ["checkpoint-20"]
    assert "checkpoint-10 is not published: it was deleted in the meantime" in publish.lines[0]


def test_another_model_replaces_the_weights_and_leaves_what_the_user_wrote(hub, run, publish):
    shards = {f"model-0000{number}-of-00002.safetensors": b"old" for number in (1, 2)}
    files = hub.repositories["me/mine"].branches["main"][-1].files
    files |= shards | {"model.safetensors.index.json": b"{}", "NOTES.md": b"the user's own"}
    finish(run)
    publish()
    after = set(hub.repositories["me/mine"].find("main").files)
    assert not after & {*shards, "model.safetensors.index.json"}
    assert {"NOTES.md", "model.safetensors"} <= after


def test_the_folder_of_the_last_checkpoint_holds_that_one_alone(hub, run, publish):
    first = save_checkpoint(run, 10)
    (first / "rng_state_1.pth").write_bytes(b"of a second process")
    write_complete(first, step=10)
    publish(hub_strategy="checkpoint")
    assert "last-checkpoint/rng_state_1.pth" in hub.repositories["me/mine"].find("main").files
    save_checkpoint(run, 20)
    publish(hub_strategy="checkpoint")
    assert "last-checkpoint/rng_state_1.pth" not in hub.repositories["me/mine"].find("main").files


def test_a_secret_in_a_checkpoint_ends_the_publishing_and_not_the_run(hub, run, capsys):
    def train(config):
        make_run(run)
        checkpoint = save_checkpoint(run, 10)
        (checkpoint / "tokenizer.json").write_text("hf_" + "k" * 34)
        write_complete(checkpoint, step=10)

    recipe(run, train)()
    told = capsys.readouterr().err
    assert "checkpoint-10/tokenizer.json: it would be published" in told
    assert "not everything is published" in told
    assert read_messages(hub) == []


def test_a_failing_hub_does_not_end_the_publishing_of_a_run(hub, run, monkeypatch, pauses):
    monkeypatch.setattr(publishing, "PAUSE_SECONDS", 0.01)

    def train(config):
        make_run(run)
        hub.faults["commit"] = [Fault(403)] * 3
        save_checkpoint(run, 10)
        wait_for(hub, "step-10")
        finish(run)

    recipe(run, train)()
    assert read_messages(hub) == ["checkpoint-10", MODEL]


def test_a_run_publishes_again_when_another_process_has_ended(hub, run, monkeypatch, capsys):
    monkeypatch.setattr(publishing, "PAUSE_SECONDS", 0.01)
    is_free, lock = iter([False, False]), publishing.try_lock
    monkeypatch.setattr(publishing, "try_lock", lambda file, **keys: next(is_free, None) is None and lock(file, **keys))

    def train(config):
        make_run(run)
        save_checkpoint(run, 10)
        wait_for(hub, "step-10")
        finish(run)

    recipe(run, train)()
    assert read_messages(hub) == ["checkpoint-10", MODEL]
    assert capsys.readouterr().err.count("another process publishes it") == 1


def test_a_stalled_hub_holds_neither_the_training_nor_the_end_of_the_process(hub, run):
    """Of a file in parts, beside others: every upload hangs."""
    hub.sabotage = lambda kind: Fault(stalls=True) if kind == "upload" else None
    code = f"""
from pathlib import Path
from recipes_lib.publish import publishing
from tests.publish.runs import finish, make_run, save_checkpoint
from tests.publish.test_publishing import recipe
publishing.WAIT_SECONDS = 1.0
run = Path({str(run)!r})
def train(config):
    make_run(run)
    save_checkpoint(run, 10)
    finish(run)
recipe(run, train, hub_strategy="all_checkpoints")()
"""
    command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "not everything is published (the upload has taken more than 1 s)" in done.stderr
    assert f"`recipes publish {run}` publishes the rest" in done.stderr
    hub.sabotage = lambda kind: None
    assert main(["publish", str(run)]) == EXIT_DONE
    assert read_messages(hub) == ["checkpoint-10", MODEL]


def test_every_recipe_publishes_by_it():
    recipes = [path for path in sorted((ROOT / "recipes").glob("*.py")) if "export_model" in path.read_text()]
    assert len(recipes) >= 6
    for path in recipes:
        assert "@recipe\ndef main(" in path.read_text(), path.name
