"""May this account write to the repository, and who will see it: asked before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

from recipes_lib.errors import ConfigError, Problem


def verify_write_access(training: Mapping[str, Any]) -> str:
    """Return in one line where a run will publish and who will see it.

    Args:
        training: Upstream's training keys; ``hub_model_id`` without a namespace belongs to the account itself.

    Raises:
        ConfigError: There is no token, it may not write, the Hub cannot be reached, or the repository exists and is
            public where ``hub_private_repo`` asks for a private one.
    """
    if get_token() is None:
        raise _problem("push_to_hub", "no Hub token is set up on this machine", "run `hf auth login`, or set HF_TOKEN")
    api = HfApi()
    name = training.get("hub_model_id") or Path(training["output_dir"]).name
    try:
        account = api.whoami()
        role = account.get("auth", {}).get("accessToken", {}).get("role")
        repository = name if "/" in name else f"{account['name']}/{name}"
        visibility = _read_visibility(api, repository)
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        found = f"the Hub did not answer for {name}: {str(error).strip().partition(chr(10))[0]}"
        raise _problem("push_to_hub", found, "check the network and the token with `hf auth whoami`") from error
    if role == "read":
        raise _problem("push_to_hub", "the Hub token may only read", "make one with write access, then `hf auth login`")
    asks_private = training.get("hub_private_repo", True)
    if visibility == "public" and asks_private:
        raise _problem("hub_private_repo", f"{repository} exists and is public", "name another hub_model_id")
    planned = visibility or ("private" if asks_private else "public")
    return f"publishes to {repository}, {planned}" + ("" if visibility else ", which will be created")


def _read_visibility(api: HfApi, repository: str) -> str | None:
    """Return ``private`` or ``public``, or ``None`` for a repository that does not exist."""
    try:
        return "private" if api.model_info(repository).private else "public"
    except RepositoryNotFoundError:
        return None


def _problem(key: str, found: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(key, found, remedy))
