"""Whether a run may publish, and who will see it, is known before it trains."""

from __future__ import annotations

import huggingface_hub
import pytest
from huggingface_hub import HfApi, constants
from tests.publish.hub_server import Fault

from recipes_lib.errors import ConfigError
from recipes_lib.publish.access import describe, find_target, is_transient, limit_silence, open_target, retry

KEYS = {"output_dir": "runs/mine"}
READER = {"name": "team", "roleInOrg": "read"}


def test_a_new_repository_will_be_private_unless_asked_otherwise(hub):
    assert str(find_target(KEYS)) == "publishes to me/mine, private, which will be created"
    assert str(find_target(KEYS | {"hub_private_repo": None})).endswith("me/mine, private, which will be created")
    public = find_target(KEYS | {"hub_private_repo": False})
    assert str(public) == "publishes to me/mine, public, which will be created"
    assert hub.repositories == {}


def test_the_name_that_was_asked_for_is_used_as_it_stands(hub):
    hub.add("team/model", private=True)
    target = find_target(KEYS | {"hub_model_id": "team/model", "hub_revision": "trial"})
    assert str(target) == "publishes to team/model, branch trial, private"


def test_opened_it_is_there_as_it_was_announced(hub):
    open_target(KEYS | {"hub_revision": "trial"})
    repository = hub.repositories["me/mine"]
    assert repository.private
    assert set(repository.branches) == {"main", "trial"}
    assert hub.num_requests["auth"] == 1
    open_target(KEYS | {"hub_revision": "trial"})  # Again changes nothing.
    assert hub.num_requests["create"] == 1


def test_what_exists_and_is_public_is_refused_unless_that_is_asked_for(hub):
    hub.add("me/mine", private=False)
    with pytest.raises(ConfigError, match="me/mine exists and is public") as caught:
        open_target(KEYS)
    assert caught.value.problems[0].where == "hub_private_repo"
    assert str(open_target(KEYS | {"hub_private_repo": False})) == "publishes to me/mine, public"


def test_what_is_private_stays_so_whatever_is_asked_for(hub):
    hub.add("me/mine", private=True)
    assert str(open_target(KEYS | {"hub_private_repo": False})) == "publishes to me/mine, private"


def test_a_repository_that_someone_made_public_meanwhile_is_found(hub):
    hub.sabotage = lambda kind: hub.add("me/mine", private=False) and None if kind == "create" else None
    with pytest.raises(ConfigError, match="was to be private and is public"):
        open_target(KEYS)


@pytest.mark.parametrize(
    ("change", "keys", "where", "found"),
    [
        ({"role": "read"}, {}, "push_to_hub", "may only read"),
        ({"may_write": False}, {"hub_model_id": "me/there"}, "push_to_hub", "does not let this account write"),
        ({}, {"hub_model_id": "stranger/new"}, "hub_model_id", "me is not in stranger"),
        (
            {"orgs": [READER]},
            {"hub_model_id": "team/new"},
            "hub_model_id",
            "only read in",
        ),
        ({}, {"hub_model_id": "a/b/c"}, "hub_model_id", "'a/b/c' is not a repository id: .*Repo id"),
        ({}, {"output_dir": "outputs/mein Modell"}, "hub_model_id", "'mein Modell' is not a repository id: .*Repo id"),
    ],
)
def test_what_would_fail_after_training_is_refused_before(hub, change, keys, where, found):
    hub.add("me/there", private=True)
    vars(hub).update(change)
    with pytest.raises(ConfigError, match=found) as caught:
        find_target(KEYS | keys)
    assert caught.value.problems[0].where == where
    assert caught.value.problems[0].remedy
    assert "hf_x" not in str(caught.value)


def test_one_s_organisation_may_be_written_to(hub):
    hub.orgs = [{"name": "team", "roleInOrg": "contributor"}]
    open_target(KEYS | {"hub_model_id": "team/new"})
    assert hub.repositories["team/new"].private


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_the_hub_does_not_take_is_refused(hub, status):
    hub.faults["whoami"] = [Fault(status)]
    with pytest.raises(ConfigError, match="does not let this account"):
        find_target(KEYS)


def test_a_hub_in_trouble_is_asked_again_and_then_the_run_is_refused(hub, pauses):
    hub.faults["info"] = [Fault(503), Fault(429, {"Retry-After": "9"}), Fault(cut="before")]
    assert str(find_target(KEYS)).startswith("publishes to me/mine")
    assert pauses.ours == [2, 8, 30]
    hub.faults["whoami"] = [Fault(429)] * 9
    with pytest.raises(ConfigError, match="did not answer"):
        find_target(KEYS)


def test_offline_and_without_a_token_there_is_no_publishing(hub, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="offline"):
        find_target(KEYS)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no Hub token"):
        find_target(KEYS)


def ask(hub, fault):
    """What ``huggingface_hub`` raises for one request with that fault."""
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
def test_a_hub_that_is_busy_broken_or_silent_is_asked_again_and_one_that_refuses_is_not(hub, fault, expected):
    assert is_transient(ask(hub, fault)) is expected


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
def test_other_errors(error, expected):
    assert is_transient(error) is expected


def test_a_cause_decides(hub):
    error = RuntimeError("Error while uploading 'model.safetensors'")
    error.__cause__ = ask(hub, Fault(403))
    assert not is_transient(error)
    assert "403" in describe(error)


def test_signatures_of_urls_are_not_told():
    error = OSError("PUT https://s3.example/large?X-Amz-Signature=secret&x=1 failed")
    assert describe(error) == "OSError: PUT https://s3.example/large failed"


@pytest.mark.parametrize(("error", "num_attempts"), [(ConnectionResetError(), 4), (FileNotFoundError(), 1)])
def test_attempts_are_few(pauses, error, num_attempts):
    attempts = []

    def attempt():
        attempts.append(1)
        raise error

    with pytest.raises(type(error)):
        retry(attempt)
    assert len(attempts) == num_attempts


@pytest.mark.parametrize("kind", ["whoami", "info", "tree", "auth"])
def test_no_call_waits_for_ever(hub, kind, pauses):
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
    limit_silence(0.1)  # The last one holds, also for a client that upstream makes anew.
    huggingface_hub.close_session()
    with pytest.raises(Exception) as caught:  # noqa: PT011 (of many kinds)
        calls[kind]()
    assert is_transient(caught.value)
