"""Hub access before training: visibility, permissions, transient errors and timeouts."""

from __future__ import annotations

import huggingface_hub
import pytest
from huggingface_hub import HfApi, constants
from tests.publish.hub_server import Fault
from tests.publish.runs import finish, make_run

from recipes_lib.environment import limit_silence
from recipes_lib.errors import ConfigError
from recipes_lib.publish.access import describe, find_target, is_transient, open_target, retry
from recipes_lib.publish.publishing import Publication

KEYS = {"output_dir": "runs/mine"}
READER = {"name": "team", "roleInOrg": "read"}


def test_new_repository_is_private_by_default(hub):
    assert str(find_target(KEYS)) == "publishes to me/mine, private, which will be created"
    assert str(find_target(KEYS | {"hub_private_repo": None})).endswith("me/mine, private, which will be created")
    public = find_target(KEYS | {"hub_private_repo": False})
    assert str(public) == "publishes to me/mine, public, which will be created"
    assert hub.repositories == {}


def test_hub_model_id_and_revision_are_used(hub):
    hub.add("team/model", private=True)
    target = find_target(KEYS | {"hub_model_id": "team/model", "hub_revision": "trial"})
    assert str(target) == "publishes to team/model, branch trial, private"


def test_open_target_creates_repository_and_branch_once(hub):
    open_target(KEYS | {"hub_revision": "trial"})
    repository = hub.repositories["me/mine"]
    assert repository.private
    assert set(repository.branches) == {"main", "trial"}
    assert hub.num_requests["auth"] == 1
    open_target(KEYS | {"hub_revision": "trial"})  # Idempotent.
    assert hub.num_requests["create"] == 1
    open_target({"output_dir": "runs/open", "hub_private_repo": False})
    assert not hub.repositories["me/open"].private


def test_existing_public_repository_is_rejected_by_default(hub):
    hub.add("me/mine", private=False)
    with pytest.raises(ConfigError, match="me/mine exists and is public") as caught:
        open_target(KEYS)
    assert caught.value.problems[0].where == "hub_private_repo"
    assert str(open_target(KEYS | {"hub_private_repo": False})) == "publishes to me/mine, public"


def test_private_repository_stays_private(hub):
    hub.add("me/mine", private=True)
    assert str(open_target(KEYS | {"hub_private_repo": False})) == "publishes to me/mine, private"


def test_repository_made_public_concurrently_is_rejected(hub):
    hub.sabotage = lambda kind: hub.add("me/mine", private=False) and None if kind == "create" else None
    with pytest.raises(ConfigError, match="was to be private and is public"):
        open_target(KEYS)


@pytest.mark.parametrize(
    ("change", "keys", "where", "message"),
    [
        ({"role": "read"}, {}, "push_to_hub", "may only read"),
        ({"may_write": False}, {"hub_model_id": "me/there"}, "push_to_hub", "does not let this account write"),
        ({}, {"hub_model_id": "stranger/new"}, "hub_model_id", "me is not in stranger"),
        ({"orgs": [READER]}, {"hub_model_id": "team/new"}, "hub_model_id", "only read in"),
        ({}, {"hub_model_id": "a/b/c"}, "hub_model_id", "'a/b/c' is not a repository id: .*Repo id"),
        ({"role": "read"}, {"hub_model_id": "bad id"}, "hub_model_id", "'bad id' is not a repository id: .*Repo id"),
        ({}, {"output_dir": "outputs/mein Modell"}, "hub_model_id", "'mein Modell' is not a repository id: .*Repo id"),
    ],
)
def test_missing_permissions_and_invalid_ids_are_rejected(hub, change, keys, where, message):
    hub.add("me/there", private=True)
    vars(hub).update(change)
    with pytest.raises(ConfigError, match=message) as caught:
        find_target(KEYS | keys)
    assert caught.value.problems[0].where == where
    assert caught.value.problems[0].remedy
    assert "hf_x" not in str(caught.value)


def test_organisation_of_account_is_writable(hub):
    hub.orgs = [{"name": "team", "roleInOrg": "contributor"}]
    open_target(KEYS | {"hub_model_id": "team/new"})
    assert hub.repositories["team/new"].private


@pytest.mark.parametrize("status", [401, 403])
def test_rejected_token_is_reported(hub, status):
    hub.faults["whoami"] = [Fault(status)]
    with pytest.raises(ConfigError, match="does not let this account"):
        find_target(KEYS)


def test_transient_errors_are_retried_then_reported(hub, pauses, capsys):
    hub.faults["info"] = [Fault(503), Fault(429, {"Retry-After": "9"}), Fault(cut="before")]
    assert str(find_target(KEYS)).startswith("publishes to me/mine")
    assert pauses.ours == [2, 8, 30]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("; ")[-1] for line in lines] == [f"the next attempt is in {pause:g} s" for pause in pauses.ours]
    assert all(line.startswith("the Hub did not answer (") for line in lines)
    hub.faults["whoami"] = [Fault(429)] * 9
    with pytest.raises(ConfigError, match="did not answer"):
        find_target(KEYS)


@pytest.mark.parametrize("kind", ["whoami", "info", "create"])
def test_page_of_a_proxy_is_no_answer(hub, pauses, kind):
    page = Fault(200, {"Content-Type": "text/html"}, b"<html>Log in</html>")
    hub.sabotage = lambda one: page if one == kind else None
    with pytest.raises(ConfigError, match=r"did not answer for .*mine: JSONDecodeError"):
        open_target(KEYS)


def test_hidden_repository_is_not_called_public(hub):
    """A fine-grained token may see no repository that exists."""
    hub.sabotage = lambda kind: Fault(404, {"X-Error-Code": "RepoNotFound"}) if kind in ("info", "auth") else None
    with pytest.raises(ConfigError, match="did not answer for me/mine: RepositoryNotFoundError"):
        open_target(KEYS)


def test_offline_mode_and_missing_token_are_rejected(hub, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"offline.*\s+unset HF_HUB_OFFLINE"):
        find_target(KEYS)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no Hub token"):
        find_target(KEYS)


def catch(hub, fault):
    """Return the exception of ``huggingface_hub`` for a request with this fault."""
    hub.faults["whoami"] = [fault]
    limit_silence(0.2)
    with pytest.raises(Exception) as caught:  # noqa: PT011 (of many kinds)
        HfApi().whoami()
    return caught.value


TRANSIENT = [Fault(status) for status in (408, 409, 412, 429, 500, 502, 503, 504)]
TRANSIENT += [Fault(cut="before"), Fault(cut="after"), Fault(stalls=True)]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [*((fault, True) for fault in TRANSIENT), *((Fault(status), False) for status in (400, 401, 403, 404, 413, 422))],
)
def test_is_transient_for_http_faults(hub, fault, expected):
    assert is_transient(catch(hub, fault)) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("Error while uploading"), True),
        (ConnectionResetError(), True),
        (FileNotFoundError("gone"), False),
        (ValueError("LFS batch API returned errors: quota"), False),
        (KeyError("a bug"), False),
    ],
)
def test_is_transient_for_other_errors(error, expected):
    assert is_transient(error) is expected


def test_is_transient_follows_cause(hub):
    error = RuntimeError("Error while uploading 'model.safetensors'")
    error.__cause__ = catch(hub, Fault(403))
    assert not is_transient(error)
    assert "403" in describe(error)


@pytest.mark.parametrize("status", [403, 409, 413, 422, 500])
def test_reason_of_the_hub_is_described_once(hub, status):
    error = catch(hub, Fault(status, body=b'{"error": "over\\nquota"}'))
    assert describe(error).count("over quota") == 1


def test_url_signatures_are_removed_from_messages():
    error = OSError("PUT https://s3.example/large?X-Amz-Signature=secret&x=1 failed")
    assert describe(error) == "OSError: PUT https://s3.example/large failed"


@pytest.mark.parametrize(("error", "num_attempts"), [(ConnectionResetError(), 4), (FileNotFoundError(), 1)])
def test_retry_limits_attempts(pauses, error, num_attempts):
    attempts = []

    def attempt():
        attempts.append(1)
        raise error

    with pytest.raises(type(error)):
        retry(attempt)
    assert len(attempts) == num_attempts


@pytest.mark.parametrize("kind", ["whoami", "info", "tree", "auth"])
def test_stalled_call_times_out(hub, kind, pauses):
    hub.add("me/mine", private=True)
    api = HfApi()
    calls = {
        "whoami": api.whoami,
        "info": lambda: api.model_info("me/mine"),
        "tree": lambda: list(api.list_repo_tree("me/mine")),
        "auth": lambda: api.auth_check("me/mine", write=True),
    }
    hub.faults[kind] = [Fault(stalls=True)] * 9
    limit_silence(9)
    limit_silence(0.1)  # The last call wins, also for a client that upstream re-creates.
    huggingface_hub.close_session()
    with pytest.raises(Exception) as caught:  # noqa: PT011 (of many kinds)
        calls[kind]()
    assert is_transient(caught.value)


def test_files_that_another_process_commits_meanwhile_are_not_mixed_with_the_model(hub, pauses, tmp_path):
    """The Hub refuses the commit by its parent, as a transient error, and the repeated one deletes them."""
    repository, run = hub.add("me/mine", private=True), finish(make_run(tmp_path / "mine"))

    def commit_meanwhile(kind):
        if kind == "commit" and hub.num_requests["commit"] == 1:
            hub._commit(repository, "main", "another model", {"adapter_config.json": b"{}"})

    hub.sabotage = commit_meanwhile
    Publication(run, find_target({"output_dir": str(run)}), {}, str).publish_missing()
    assert [commit.message for commit in repository.branches["main"][1:]] == ["another model", "Publish model"]
    assert "adapter_config.json" not in repository.find("main").files
