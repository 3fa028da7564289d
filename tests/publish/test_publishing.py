"""``recipes publish`` and publishing during training, against a faulty Hub on loopback."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub.errors import HfHubHTTPError
from safetensors.numpy import save, save_file
from tests.forked import ROOT
from tests.locks import locked
from tests.publish.hub_server import Commit, Fault
from tests.publish.runs import finish, link_files, make_run, read_weight, save_checkpoint

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.environment import limit_silence
from recipes_lib.errors import PreemptedError
from recipes_lib.publish import publishing
from recipes_lib.publish.access import NO_ANSWER, Target
from recipes_lib.publish.publishing import Publication
from recipes_lib.publish.selection import MODEL, find_contents
from recipes_lib.training.checkpoints.manifest import rotate, write_complete


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "mine")


def read_messages(hub, name="me/mine"):
    return [commit.message.removeprefix("Publish ") for commit in hub.repositories[name].branches["main"][1:]]


@pytest.mark.parametrize(
    ("strategy", "state"), [("every_save", ""), ("checkpoint", "last-checkpoint"), ("all_checkpoints", "checkpoint-10")]
)
def test_find_contents_skips_incomplete_checkpoints(run, strategy, state):
    save_checkpoint(run, 20)
    save_checkpoint(run, 10)
    (save_checkpoint(run, 30) / "COMPLETE.json").unlink()
    (save_checkpoint(run, 40) / "config.json").unlink()
    policy = run / "checkpoint-50"
    policy.mkdir()
    (policy / "policy.safetensors").touch()
    write_complete(policy, step=50)
    contents = find_contents(run, {"hub_strategy": strategy})
    assert list(contents) == ["checkpoint-10", "checkpoint-20"]
    assert contents["checkpoint-10"].state == state
    assert contents["checkpoint-10"].tag == "step-10"
    assert {"model.safetensors", "optimizer.pt"} <= set(contents["checkpoint-10"].hashes)
    assert list(find_contents(finish(run), {"hub_strategy": "end", "tag": "v1"})) == [MODEL]


def test_command_publishes_once(hub, run, recipes):
    for step in (10, 20):
        save_checkpoint(run, step)
    finish(run)
    output = recipes("publish", run, "--tag", "v1.0")
    assert "publishes to me/mine, private, which will be created" in output
    assert f"published at {hub.endpoint}/me/mine: 3 commits" in output
    repository = hub.repositories["me/mine"]
    assert set(repository.tags) == {"step-10", "step-20", "v1.0"}
    assert "| eval_loss | 2.0 |" in repository.find("step-20").files["README.md"].decode()
    files = repository.find("v1.0").files
    assert "| eval_loss | 1.0 |" in files["README.md"].decode()
    model = {"model.safetensors", "config.json", "tokenizer.json"}
    assert files.keys() == {".gitattributes", "README.md", "run.json", "metrics.jsonl", *model}
    recipes("publish", run, "--tag", "v1.0")
    assert read_messages(hub) == ["checkpoint-10", "checkpoint-20", MODEL]


def test_merged_model_is_published(recipes, hub, run, tmp_path):
    folder = finish(make_run(tmp_path / "merged"))
    (folder / "run.json").unlink()
    (folder / "merge.json").write_text(json.dumps({"base": "owner/base", "adapter": "/somewhere/secret/lora"}))
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n# merged\n")
    command = ["publish", str(folder), "--hub_model_id", "me/joined", "--hub_revision", "trial"]
    recipes(*command, "--hub_private_repo", "false")
    repository = hub.repositories["me/joined"]
    assert not repository.private
    files = repository.find("trial").files
    assert json.loads(files["merge.json"]) == {"base": "owner/base", "adapter": "lora"}
    assert files["README.md"].endswith(b"# merged\n")
    assert len(repository.branches["main"]) == 1


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "metrics.jsonl"])
def test_file_with_secret_is_not_published(hub, run, recipes, name):
    secret = "hf_" + "k" * 34
    with (finish(run) / name).open("a") as file:
        file.write(f'{{"told": "{secret}"}}')
    error = recipes("publish", run, code=2)
    assert f"{run / name}: it would be published, and contains what looks like an access token" in error
    assert secret not in error
    assert read_messages(hub) == []


def test_symbolic_links_to_hub_cache_are_published(recipes, hub, run, monkeypatch):
    """Replacing a file by a link into the Hub's cache does not delete it from the repository."""
    recipes("publish", finish(run))
    before = dict(hub.repositories["me/mine"].find("main").files)
    link_files(run, monkeypatch)
    (run / "model.safetensors").resolve().write_bytes(save({"weight": np.full(300, 7, np.float32)}))
    recipes("publish", run)
    after = hub.repositories["me/mine"].find("main").files
    assert after.keys() == before.keys()
    assert read_weight(after) == 7


def lose_repository(hub):
    del hub.repositories["me/mine"]


def lose_branch(hub):
    del hub.repositories["me/mine"].branches["trial"]


def push_over(hub):
    """Commit another model, as a second run with the same target does."""
    history = hub.repositories["me/mine"].branches["trial"]
    files = dict(history[-1].files, **{"model.safetensors": save({"weight": np.full(300, 7, np.float32)})})
    history.append(Commit("f" * 40, "Publish model", files))


def squash(hub):
    """Squash the history into one commit with the same files."""
    history = hub.repositories["me/mine"].branches["trial"]
    history[:] = [Commit("e" * 40, "squashed", history[-1].files)]


def lose_records(hub):
    del hub.repositories["me/mine"].branches["trial"][-1].files["metrics.jsonl"]


@pytest.mark.parametrize("lose", [lose_repository, lose_branch, push_over, squash, lose_records])
def test_content_lost_on_hub_is_published_again(recipes, hub, run, lose):
    command = ["publish", str(finish(run)), "--hub_revision", "trial", "--tag", "v1"]
    recipes(*command)
    before = dict(hub.repositories["me/mine"].find("trial").files)
    lose(hub)
    recipes(*command)
    repository = hub.repositories["me/mine"]
    assert repository.find("trial").files == repository.find("v1").files == before


def test_edited_card_is_kept(recipes, hub, run):
    recipes("publish", finish(run))
    history = hub.repositories["me/mine"].branches["main"]
    history.append(Commit("d" * 40, "a better card", dict(history[-1].files, **{"README.md": b"by hand"})))
    assert "the card on the Hub differs, and is kept" in recipes("publish", run)
    assert history[-1].files.pop("README.md") == b"by hand"
    assert "published model" in recipes("publish", run)


@pytest.mark.parametrize(("word", "is_private"), [("no", False), ("FALSE", False), ("yes", True), ("on", True)])
def test_hub_private_repo_accepts_yaml_booleans(recipes, hub, run, word, is_private):
    recipes("publish", finish(run), "--hub_private_repo", word)
    assert hub.repositories["me/mine"].private is is_private


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hub_private", "false"], "--hub_private: is unknown\n    did you mean `--hub_private_repo`?"),
        (["--hub_private_repo", "perhaps"], "--hub_private_repo: 'perhaps' is not true or false"),
    ],
    ids=["abbreviated", "not a boolean"],
)
def test_invalid_flag_is_rejected(recipes, hub, run, flags, message):
    assert message in recipes("publish", finish(run), *flags, code=2)
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
def test_failed_publishing_names_remedy(hub, run, recipes, change, words):
    finish(run)
    change(hub, run)
    error = recipes("publish", run, code=2)
    assert words in error
    assert "\n    " in error
    if "me/mine" in hub.repositories:
        assert read_messages(hub) == []


def test_read_only_folder_is_published(recipes, hub, run, monkeypatch):
    opened = Path.open

    def open_or_refuse(path, mode="r", **options):
        if "r" not in mode and run in path.parents:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, mode, **options)

    finish(run)
    monkeypatch.setattr(Path, "open", open_or_refuse)
    recipes("publish", run)
    assert read_messages(hub) == [MODEL]


def test_concurrent_publisher_is_rejected(recipes, hub, run):
    finish(run)
    with locked(run / "_published.lock"):
        assert "another process publishes it" in recipes("publish", run, code=2)


def recipe(run, train, **keys):
    """Return a function that calls ``train`` while it publishes from the directory of the run."""
    config = RecipeConfig.__new__(RecipeConfig)
    training = {"push_to_hub": True, "hub_strategy": "every_save", "output_dir": str(run), **keys}
    object.__setattr__(config, "training", training)
    return lambda: publishing.publishing(config)(train)(config)


def wait_for(hub, tag):
    while tag not in hub.repositories["me/mine"].tags and "publishing" in [each.name for each in threading.enumerate()]:
        hub.closing.wait(0.05)


def test_checkpoints_are_published_during_training(hub, tmp_path, capsys):
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


def test_hub_strategy_end_publishes_only_model(hub, run):
    def train(config):
        save_checkpoint(run, 10)
        finish(run)

    recipe(run, train, hub_strategy="end")()
    assert read_messages(hub) == [MODEL]


def test_checkpoints_of_earlier_run_are_not_published(hub, run):
    save_checkpoint(run, 10)

    def train(config):
        hub.closing.wait(2 * publishing.SECONDS_BETWEEN_LOOKS)
        raise PreemptedError("refused by its configuration")

    with pytest.raises(PreemptedError):
        recipe(run, train)()
    assert read_messages(hub) == []


def test_preempted_run_does_not_wait_for_upload(hub, run, pauses):
    hub.sabotage = lambda kind: Fault(stalls=True) if kind == "preupload" else None

    def train(config):
        make_run(run)
        save_checkpoint(run, 10)
        while "preupload" not in hub.requests:
            hub.closing.wait(0.05)
        raise PreemptedError("SIGTERM")

    with pytest.raises(PreemptedError):
        recipe(run, train)()
    (publisher,) = (thread for thread in threading.enumerate() if thread.name == "publishing")
    hub.sabotage = lambda kind: None
    recipe(run, lambda config: finish(run))()
    assert read_messages(hub) == ["checkpoint-10", MODEL]
    # The stalled thread would retry, and close the client of huggingface_hub, during later tests.
    hub.closing.set()
    publisher.join(60)
    assert not publisher.is_alive()


def test_rejected_final_commit_does_not_fail_run(hub, run, capsys):
    hub.sabotage = lambda kind: Fault(403) if kind == "commit" else None
    recipe(run, lambda config: finish(run))()
    error = capsys.readouterr().err
    assert "not everything is published" in error
    assert "403" in error
    assert f"`recipes publish {run}` publishes the rest" in error


def test_only_main_process_publishes(hub, run, monkeypatch):
    trained = []
    recipe(run, trained.append, push_to_hub=False)()
    monkeypatch.setenv("RANK", "1")
    recipe(run, trained.append)()
    assert len(trained) == 2
    assert hub.requests == []


def test_missing_write_permission_prevents_training(hub, run):
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
    """Publish the contents of the run, as a new process does."""
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
"""Each kind of request and each fault at least once; the other pairs are slow tests."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.slow) for cell in itertools.product(KINDS, FAULTS)],
)
def test_transient_failure_leaves_one_commit(hub, run, publish, kind, name):
    fault = FAULTS[name]
    checkpoint = save_checkpoint(run, 4)
    if kind == "join":  # Only files that are uploaded in parts are joined.
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
def test_rejected_request_is_not_retried(hub, run, publish, kind, status, pauses):
    save_checkpoint(run, 4)
    hub.faults[kind] = [Fault(status)] * 9
    with pytest.raises((HfHubHTTPError, RuntimeError)):
        publish()
    assert len(read_messages(hub)) == (1 if kind == "tag" else 0)
    assert pauses.ours == []


def test_rejected_large_file_is_reported_with_reason(hub, run, recipes):
    rejected = {"oid": "0" * 64, "size": 1, "error": {"code": 403, "message": "storage quota exceeded"}}
    body = json.dumps({"objects": [rejected]}).encode()
    hub.faults["batch"] = [Fault(200, {"Content-Type": "application/vnd.git-lfs+json"}, body)]
    assert "storage quota exceeded" in recipes("publish", finish(run), code=2)


def test_rejected_card_is_reported_with_reason(hub, run, recipes):
    errors = [{"message": '"base_model" with value "/tmp/base" is not valid'}]
    hub.faults["yaml"] = [Fault(400, {}, json.dumps({"errors": errors}).encode())]
    error = recipes("publish", finish(run), code=2)
    assert 'Invalid metadata in README.md. - "base_model" with value "/tmp/base" is not valid' in error


def test_failed_commit_does_not_repeat_upload(hub, run, publish):
    save_checkpoint(run, 4)
    hub.faults["commit"] = [Fault(503), Fault(503)]
    publish()
    assert (hub.num_requests["upload"], hub.num_requests["commit"]) == (1, 3)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_no_commit_is_lost_under_random_faults(hub, run, publish, seed):
    """The command is repeated until it succeeds; then each commit exists once, in order."""
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


def test_older_checkpoint_is_not_committed_after_newer(hub, run, publish):
    save_checkpoint(run, 20)
    publish()
    save_checkpoint(run, 10)
    publish()
    publish()
    assert read_messages(hub) == ["checkpoint-20"]


def test_resaved_checkpoint_is_published_again(hub, run, publish):
    save_checkpoint(run, 10)
    publish()
    other = save_checkpoint(run, 10)
    (other / "config.json").write_text('{"model_type": "llama", "another": true}')
    write_complete(other, step=10)
    publish()
    assert b"another" in hub.repositories["me/mine"].find("step-10").files["config.json"]
    assert len(read_messages(hub)) == 2


def test_superseded_checkpoint_is_skipped_without_hub_always_push(hub, run, publish):
    for step in (10, 20):
        save_checkpoint(run, step)
    publish(hub_always_push=False)
    assert read_messages(hub) == ["checkpoint-20"]


def test_damaged_checkpoint_is_skipped(hub, run, publish):
    for step in (10, 20):
        save_checkpoint(run, step)
    path = run / "checkpoint-10" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    publish()
    assert read_messages(hub) == ["checkpoint-20"]
    assert publish.lines[0] == "checkpoint-10 is not published: model.safetensors does not match its SHA-256"


@pytest.mark.parametrize("kind", ["tree", "batch"])
def test_checkpoint_deleted_during_retry_is_skipped(hub, run, publish, kind):
    """The first request of a kind fails transiently, and training deletes the checkpoint before the retry."""
    for step in (10, 20):
        save_checkpoint(run, step)

    def fail(asked):
        if asked == kind and (run / "checkpoint-10").exists():
            rotate(run, 1, ())
            return Fault(503)
        return None

    hub.sabotage = fail
    publish()
    assert read_messages(hub) == ["checkpoint-20"]
    assert "checkpoint-10 is not published: it was deleted in the meantime" in publish.lines[0]


def test_new_model_replaces_older_one_and_keeps_user_files(hub, run, publish):
    shards = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    files = hub.repositories["me/mine"].branches["main"][-1].files
    older = {*shards, "model.safetensors.index.json", "adapter_config.json", "reward_scale.json"}
    older |= {"tokenizer.model", "additional_chat_templates/rag.jinja", "merge.json", "report/loss.png"}
    own = {"NOTES.md", "notes/config.json"}
    files |= dict.fromkeys(older | own, b"{}")
    finish(run)
    publish()
    after = set(hub.repositories["me/mine"].find("main").files)
    assert not after & older
    assert own | {"model.safetensors", "config.json"} <= after


def test_model_is_published_only_after_the_end_of_its_run(hub, run, publish):
    """Its status is `done` before its card and report are written."""
    save_checkpoint(run, 10)
    Publication(finish(run), TARGET, {"hub_strategy": "every_save"}, publish.lines.append).publish_missing(
        with_model=False
    )
    assert read_messages(hub) == ["checkpoint-10"]


def test_last_checkpoint_folder_has_only_last_checkpoint(hub, run, publish):
    first = save_checkpoint(run, 10)
    (first / "rng_state_1.pth").write_bytes(b"of a second process")
    write_complete(first, step=10)
    publish(hub_strategy="checkpoint")
    assert "last-checkpoint/rng_state_1.pth" in hub.repositories["me/mine"].find("main").files
    save_checkpoint(run, 20)
    publish(hub_strategy="checkpoint")
    assert "last-checkpoint/rng_state_1.pth" not in hub.repositories["me/mine"].find("main").files


def test_secret_in_checkpoint_does_not_fail_run(hub, run, capsys):
    def train(config):
        checkpoint = save_checkpoint(run, 10)
        (checkpoint / "tokenizer.json").write_text("hf_" + "k" * 34)
        write_complete(checkpoint, step=10)
        make_run(run)  # Before, the publisher takes the checkpoint for one of an earlier run.

    recipe(run, train)()
    error = capsys.readouterr().err
    assert "checkpoint-10/tokenizer.json: it would be published" in error
    assert "not everything is published" in error
    assert read_messages(hub) == []


def test_publisher_continues_after_failed_commits(hub, run, monkeypatch, pauses):
    monkeypatch.setattr(publishing, "PAUSE_SECONDS", 0.01)

    def train(config):
        make_run(run)
        hub.faults["commit"] = [Fault(403)] * 3
        save_checkpoint(run, 10)
        wait_for(hub, "step-10")
        finish(run)

    recipe(run, train)()
    assert read_messages(hub) == ["checkpoint-10", MODEL]


def test_publisher_waits_for_lock_of_other_process(hub, run, monkeypatch, capsys):
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


def test_stalled_hub_blocks_neither_training_nor_exit(recipes, hub, run):
    """All uploads stall, of single files and of files in parts."""
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
    # Not forked: the fork server has imported huggingface_hub in offline mode.
    command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "not everything is published (the upload has taken more than 1 s)" in done.stderr
    assert f"`recipes publish {run}` publishes the rest" in done.stderr
    hub.sabotage = lambda kind: None
    recipes("publish", run)
    assert read_messages(hub) == ["checkpoint-10", MODEL]


def test_recipes_with_export_use_publishing():
    recipes = [path for path in sorted((ROOT / "recipes").glob("*.py")) if "export_model" in path.read_text()]
    assert len(recipes) >= 6
    for path in recipes:
        assert "@recipe\ndef main(" in path.read_text(), path.name
