"""Which failures pass, how long is waited, and that no request waits for ever."""

from __future__ import annotations

from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from tests.publish.hub_server import Fault

from recipes_lib.publish.hub_session import GivenUpError, RequestCount, describe, is_passing, limited, persist


def ask(hub, fault):
    """What ``huggingface_hub`` raises for one request with that fault."""
    hub.faults["whoami"] = [fault]
    with limited(0.2), pytest.raises(Exception) as caught:  # noqa: PT011 (of many kinds)
        HfApi().whoami()
    return caught.value


@pytest.mark.parametrize("status", [408, 409, 412, 429, 500, 502, 503, 504])
def test_a_hub_that_is_busy_or_broken_is_asked_again(hub, status):
    assert is_passing(ask(hub, Fault(status)))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_a_hub_that_refuses_is_not(hub, status):
    assert not is_passing(ask(hub, Fault(status)))


@pytest.mark.parametrize("fault", [Fault(cut="before"), Fault(cut="after"), Fault(stalls=True)])
def test_no_answer_passes_and_is_not_waited_for_for_ever(hub, fault):
    assert is_passing(ask(hub, fault))


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (RuntimeError("Error while uploading"), True),
        (ConnectionResetError(), True),
        (FileNotFoundError("gone"), False),
        (ValueError("LFS batch API returned errors: quota"), False),
        (KeyError("a bug"), False),
    ],
)
def test_other_errors(error, passes):
    assert is_passing(error) is passes


def test_a_cause_decides(hub):
    error = RuntimeError("Error while uploading 'model.safetensors'")
    error.__cause__ = ask(hub, Fault(403))
    assert not is_passing(error)
    assert "403" in describe(error)


def test_signatures_of_urls_are_not_told():
    error = OSError("PUT https://s3.example/large?X-Amz-Signature=secret&x=1 failed")
    assert describe(error) == "OSError: PUT https://s3.example/large failed"


def attempts(*faults):
    left = list(faults)

    def attempt():
        if left:
            raise left.pop(0)
        return "done"

    return attempt


def test_pauses_grow_to_a_limit_and_are_told(pauses):
    lines = []
    broken = [ConnectionResetError("reset")] * 10
    assert persist(attempts(*broken), lambda _: True, lines.append) == "done"
    assert pauses.ours == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert lines[0] == "ConnectionResetError: reset; tried again in 2 s"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({"Retry-After": "77"}, 77), ({"RateLimit": '"api";r=0;t=55'}, 55), ({"RateLimit": '"api";r=3;t=55'}, 2), ({}, 2)],
)
def test_the_hub_says_how_long_it_wants_to_be_left_alone(hub, pauses, headers, seconds):
    error = ask(hub, Fault(429, headers))
    assert persist(attempts(error), lambda _: True, lambda _: None) == "done"
    assert pauses.ours == [seconds]


def test_patience_ends_before_a_pause_that_it_does_not_cover(pauses):
    with pytest.raises(GivenUpError, match="reset"):
        persist(attempts(*[ConnectionResetError("reset")] * 9), lambda seconds: seconds < 10, lambda _: None)
    assert pauses.ours == [2, 4]  # After the next of 8 seconds it would be 14.


def test_what_would_fail_again_is_raised_at_once(pauses):
    with pytest.raises(FileNotFoundError):
        persist(attempts(FileNotFoundError("gone")), lambda _: True, lambda _: None)
    assert pauses.ours == []


def test_every_request_is_counted_also_after_a_lost_connection(hub, pauses):
    count = RequestCount()
    count.install(0.2)
    hub.faults["tree"] = [Fault(500), Fault(429), Fault(cut="before"), Fault(stalls=True)]
    hub.add("me/mine", private=True)
    assert list(persist(lambda: HfApi().list_repo_files("me/mine"), lambda _: True, lambda _: None))
    with pytest.raises(HfHubHTTPError):
        HfApi().list_repo_files("me/other")
    assert count.num_sent == len(hub.requests) == 6
    assert count.num_failed == 4


@pytest.mark.parametrize("kind", ["whoami", "info", "tree", "auth"])
def test_a_limit_holds_for_every_call_of_its_block_and_no_longer(hub, kind):
    hub.add("me/mine", private=True)
    api = HfApi()
    calls = {
        "whoami": api.whoami,
        "info": lambda: api.model_info("me/mine"),
        "tree": lambda: api.list_repo_files("me/mine"),
        "auth": lambda: api.auth_check("me/mine", write=True),
    }
    before = huggingface_hub.get_session().event_hooks
    hub.faults[kind] = [Fault(stalls=True)] * 9
    with limited(0.1), pytest.raises(Exception) as caught, pytest.MonkeyPatch.context() as patch:  # noqa: PT011, PT012
        patch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None))
        calls[kind]()
    assert is_passing(caught.value)
    assert huggingface_hub.get_session().event_hooks == before
