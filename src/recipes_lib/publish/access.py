"""Hub access: write permission and visibility of the target repository, timeouts and retries of requests."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from recipes_lib.config.schema import read_training
from recipes_lib.environment import limit_silence
from recipes_lib.errors import ConfigError, Problem, iterate_causes

T = TypeVar("T")

DEFAULT_BRANCH: Final = "main"
# The base class of the Hub's error, because huggingface_hub has changed its HTTP library from httpx to httpx2.
NO_ANSWER: type[Exception] = HfHubHTTPError.__bases__[0]
"""Connection errors and timeouts of huggingface_hub's HTTP library."""
_SILENCE_SECONDS: Final = 10.0
_PAUSES: Final = (2.0, 8.0, 30.0)
"""Seconds between attempts while the Hub is busy or broken."""
_TRANSIENT: Final = (408, 409, 412, 423, 425, 429)
"""Transient HTTP statuses below 500: timeout, conflict, precondition, lock, too early, too many requests."""
_QUERY: Final = re.compile(r"\?[^\s'\"]*")
_WRITERS: Final = ("admin", "write", "contributor")
"""Roles that may create repositories in an organisation."""


@dataclass(frozen=True, slots=True)
class Target:
    """Target repository of a run.

    Attributes:
        repository: ``owner/name``.
        branch: Branch to commit to.
        is_private: Whether the repository is, or will be, private.
        exists: Whether the repository exists.
    """

    repository: str
    branch: str
    is_private: bool
    exists: bool

    def __str__(self) -> str:
        visibility = "private" if self.is_private else "public"
        branch = "" if self.branch == DEFAULT_BRANCH else f", branch {self.branch}"
        return f"publishes to {self.repository}{branch}, {visibility}" + (
            "" if self.exists else ", which will be created"
        )


def find_target(training: Mapping[str, Any]) -> Target:
    """Resolve the target repository, without changes on the Hub.

    Args:
        training: Upstream's training keys; the namespace of ``hub_model_id`` defaults to the account, and only
            ``hub_private_repo: false`` allows a public repository.

    Raises:
        ConfigError: There is no token, it has no write access, the Hub cannot be reached, or the repository exists and
            is public although ``hub_private_repo`` is not false.
    """
    if get_token() is None:
        raise _problem("push_to_hub", "no Hub token is set up on this machine", "run `hf auth login`, or set HF_TOKEN")
    name = training.get("hub_model_id") or Path(training["output_dir"]).resolve().name
    return _request(name, lambda api: _find(api, name, training))


def open_target(training: Mapping[str, Any]) -> Target:
    """Create repository and branch if they do not exist, and verify write access.

    Raises:
        ConfigError: As in ``find_target``, or another process has just created the repository as a public one.
    """
    target = find_target(training)
    _request(target.repository, lambda api: _open(api, target))
    return target


def _find(api: HfApi, name: str, training: Mapping[str, Any]) -> Target:
    validate_repo_id(name)  # Before a request: an invalid id is also found without a network.
    account = api.whoami()
    # Fine-grained tokens have another role; `auth_check` below verifies their access to the repository.
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        found = "the Hub token may only read"
        raise _problem("push_to_hub", found, "create one with write access, then `hf auth login`")
    repository = name if "/" in name else f"{account['name']}/{name}"
    branch = training.get("hub_revision") or DEFAULT_BRANCH
    asks_private = read_training(training, "hub_private_repo") is not False
    is_private = _read_privacy(api, repository)
    if is_private is None:
        _verify_namespace(account, repository.partition("/")[0])
        return Target(repository, branch, asks_private, exists=False)
    api.auth_check(repository, write=True)
    if asks_private and not is_private:
        remedy = "name another hub_model_id, or write `hub_private_repo: false` if all may see it"
        raise _problem("hub_private_repo", f"{repository} exists and is public", remedy)
    return Target(repository, branch, is_private, exists=True)


def _open(api: HfApi, target: Target) -> None:
    if not target.exists:
        api.create_repo(target.repository, private=target.is_private, exist_ok=True)
        # With ``exist_ok`` the repository may be another process's, created since ``find_target``.
        if target.is_private and _read_privacy(api, target.repository) is False:
            found = f"{target.repository} was to be private and is public"
            raise _problem("hub_private_repo", found, "name another hub_model_id")
        api.auth_check(target.repository, write=True)
    if target.branch != DEFAULT_BRANCH:
        api.create_branch(target.repository, branch=target.branch, exist_ok=True)


def _read_privacy(api: HfApi, repository: str) -> bool | None:
    """Return whether a repository is private; ``None`` if this account sees no such repository."""
    try:
        return bool(api.model_info(repository).private)
    except RepositoryNotFoundError:
        return None


def _verify_namespace(account: Mapping[str, Any], namespace: str) -> None:
    """Verify that the account may create repositories in a namespace; some tokens hide the account's organisations.

    Raises:
        ConfigError: The account is not a member of the organisation, or has no write access in it.
    """
    if namespace == account["name"] or "orgs" not in account:
        return
    roles = {group["name"]: group.get("roleInOrg", _WRITERS[0]) for group in account["orgs"]}
    if namespace not in roles:
        remedy = f"write `hub_model_id: {account['name']}/...`, or use a token of {namespace}"
        raise _problem("hub_model_id", f"the account {account['name']} is not in {namespace}", remedy)
    if roles[namespace] not in _WRITERS:
        found = f"the account {account['name']} may only read in {namespace}"
        raise _problem("hub_model_id", found, "ask for a role with write access")


def _request(name: str, request: Callable[[HfApi], T]) -> T:
    """Return the Hub's answer to a request, with retries of transient failures.

    Raises:
        ConfigError: The Hub refuses, or does not answer.
    """
    limit_silence(_SILENCE_SECONDS)
    try:
        return retry(lambda: request(HfApi()))
    except HFValidationError as error:
        found = f"{name!r} is not a repository id: {describe(error)}"
        raise _problem(
            "hub_model_id", found, "write one such as `hub_model_id: my-model` or `owner/my-model`"
        ) from error
    # A page of a proxy, such as a login, is no JSON.
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError, NO_ANSWER, json.JSONDecodeError) as error:
        if read_status(error) in (401, 403):
            found = f"the Hub does not let this account write to {name} ({describe(error)})"
            raise _problem("push_to_hub", found, "use a token that may: `hf auth whoami` says whose it is") from error
        found = f"the Hub did not answer for {name}: {describe(error)}"
        remedy = "check the network and the token with `hf auth whoami`"
        remedy = "unset HF_HUB_OFFLINE" if isinstance(error, OfflineModeIsEnabled) else remedy
        raise _problem("push_to_hub", found, remedy) from error


def _problem(key: str, found: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(key, found, remedy))


def retry(attempt: Callable[[], T]) -> T:
    """Call ``attempt``, and again after each of ``_PAUSES`` if its failure is transient; return its result.

    Each failure is reported on standard error: together, attempts and pauses may take more than a minute.
    """
    for pause in _PAUSES:
        try:
            return attempt()
        except Exception as error:
            if not is_transient(error):
                raise
            sys.stderr.write(f"the Hub did not answer ({describe(error)}); the next attempt is in {pause:g} s\n")
        time.sleep(pause)
    return attempt()


def is_transient(error: BaseException) -> bool:
    """Return whether another attempt may succeed: the Hub is busy, slow, broken or unreachable."""
    if (status := read_status(error)) is not None:
        return status in _TRANSIENT or status >= 500
    causes = list(iterate_causes(error))
    if any(isinstance(cause, FileNotFoundError | PermissionError | OfflineModeIsEnabled) for cause in causes):
        return False
    # RuntimeError: huggingface_hub's wrapper of failed LFS uploads. A response that is not JSON comes from a proxy.
    return any(isinstance(cause, NO_ANSWER | OSError | RuntimeError | json.JSONDecodeError) for cause in causes)


def read_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error, or of the first of its causes that has a response."""
    responses = (getattr(cause, "response", None) for cause in iterate_causes(error))
    return next((response.status_code for response in responses if response is not None), None)


def describe(error: BaseException) -> str:
    """Return the first line of the Hub's error and its reason, or of the original cause, without query strings of URLs.

    Query strings of presigned URLs contain signatures.
    """
    causes = list(iterate_causes(error))
    # ValueError: huggingface_hub's message about a rejected card, whose cause has only the status.
    reasons = (cause for cause in causes if isinstance(cause, ValueError) or hasattr(cause, "response"))
    shown = next(reasons, causes[-1])
    lines = [line.strip() for line in str(shown).splitlines() if line.strip()]
    # A heading has its reason in the next line.
    line = " ".join(lines[: 2 if lines and lines[0].endswith((":", "README.md.")) else 1])
    # Which huggingface_hub writes below a line with the status and the URL, as of a quota.
    reason = " ".join((getattr(shown, "server_message", None) or "").split())[:300]
    line += f" ({reason})" if reason and reason not in line else ""
    return f"{type(shown).__name__}: {_QUERY.sub('', line)}" if line else type(shown).__name__
