"""Write access and visibility of a Hub repository, verified before training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

from recipes_lib.config.schema import read_training
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.publish.hub_session import NO_ANSWER, GivenUpError, describe, limited, persist, read_status

T = TypeVar("T")

DEFAULT_BRANCH: Final = "main"
_SILENCE_SECONDS: Final = 30.0
_PATIENCE_SECONDS: Final = 60.0
"""For a Hub that is busy or broken, before a run is refused that could not publish anyway."""
_WRITERS: Final = ("admin", "write", "contributor")
"""Roles in an organisation that may make a repository in it."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a run publishes.

    Attributes:
        repository: ``owner/name``.
        branch: Branch that commits go to.
        is_private: Whether it is, or will be, private.
        exists: Whether it is there already.
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
    """Return where a run will publish, and change nothing on the Hub.

    Args:
        training: Upstream's training keys; ``hub_model_id`` without a namespace belongs to the account itself, and
            only ``hub_private_repo: false`` asks for a public repository.

    Raises:
        ConfigError: There is no token, it may not write, the Hub cannot be reached, or the repository exists and is
            public where ``hub_private_repo`` asks for a private one.
    """
    if get_token() is None:
        raise _problem("push_to_hub", "no Hub token is set up on this machine", "run `hf auth login`, or set HF_TOKEN")
    name = training.get("hub_model_id") or Path(training["output_dir"]).resolve().name
    return _ask(name, lambda api: _find(api, name, training))


def open_target(training: Mapping[str, Any]) -> Target:
    """Make the repository and its branch where they are not there yet, and prove that this account may write to it.

    Raises:
        ConfigError: As ``find_target``; or the repository that is there now is not as it was to be.
    """
    target = find_target(training)
    _ask(target.repository, lambda api: _open(api, target))
    return target


def _find(api: HfApi, name: str, training: Mapping[str, Any]) -> Target:
    account = api.whoami()
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        found = "the Hub token may only read"
        raise _problem("push_to_hub", found, "make one with write access, then `hf auth login`")
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
        # Whoever made it in between has not asked us.
        if target.is_private and not _read_privacy(api, target.repository):
            found = f"{target.repository} was to be private and is public"
            raise _problem("hub_private_repo", found, "name another hub_model_id")
        api.auth_check(target.repository, write=True)
    if target.branch != DEFAULT_BRANCH:
        api.create_branch(target.repository, branch=target.branch, exist_ok=True)


def _read_privacy(api: HfApi, repository: str) -> bool | None:
    """Return whether a repository is private; ``None`` where there is none that this account could see."""
    try:
        return bool(api.model_info(repository).private)
    except RepositoryNotFoundError:
        return None


def _verify_namespace(account: Mapping[str, Any], namespace: str) -> None:
    """Refuse a namespace that is not the account's, as far as the Hub tells: some tokens hide its organisations.

    Raises:
        ConfigError: It is somebody else's, or may only be read.
    """
    if namespace == account["name"] or "orgs" not in account:
        return
    roles = {group["name"]: group.get("roleInOrg", _WRITERS[0]) for group in account["orgs"]}
    if namespace not in roles:
        remedy = f"write `hub_model_id: {account['name']}/...`, or use a token of {namespace}"
        raise _problem("hub_model_id", f"the account {account['name']} is not in {namespace}", remedy)
    if roles[namespace] not in _WRITERS:
        found = f"the account {account['name']} may only read in {namespace}"
        raise _problem("hub_model_id", found, "ask for a role that may write")


def _ask(name: str, question: Callable[[HfApi], T]) -> T:
    """Return the Hub's answer, asked again while it is busy or broken.

    Raises:
        ConfigError: It refuses, or does not answer.
    """
    try:
        with limited(_SILENCE_SECONDS):
            return persist(lambda: question(HfApi()), lambda seconds: seconds <= _PATIENCE_SECONDS, lambda _: None)
    except (HfHubHTTPError, OfflineModeIsEnabled, HFValidationError, OSError, NO_ANSWER, GivenUpError) as error:
        if read_status(error) in (401, 403):
            found = f"the Hub does not let this account write to {name} ({describe(error)})"
            raise _problem("push_to_hub", found, "use a token that may: `hf auth whoami` says whose it is") from error
        found = f"the Hub did not answer for {name}: {describe(error)}"
        raise _problem("push_to_hub", found, "check the network and the token with `hf auth whoami`") from error


def _problem(key: str, found: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(key, found, remedy))
