"""Environment of a run: package versions, Git commit, and whether the Hub is reachable. No slow imports."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from recipes_lib import processes
from recipes_lib.errors import iterate_causes

_PACKAGES: Final = ("torch", "transformers", "trl", "accelerate", "datasets", "tokenizers", "peft", "recipes-lib")


def read_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect numerical results."""
    return {"python": platform.python_version(), **{name: find_version(name) or "not installed" for name in _PACKAGES}}


def find_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return package -> version, without packages that are not installed."""
    return {name: version for name in packages if (version := find_version(name))}


@functools.cache
def find_version(name: str) -> str | None:
    """Return the version of an installed distribution; ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_git_commit() -> str | None:
    """Return the commit of the working directory, with ``-dirty`` when tracked files differ; ``None`` outside git."""
    # ``--exclude=*`` ignores tags, so that the output is always the full hash.
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


SECONDS_TO_ANSWER: Final = 3.0
"""Timeout of the request that decides whether the Hub is reachable."""
SECONDS_OF_SILENCE: Final = 30.0
"""Read timeout of the Hub while models and data are loaded, unless HF_HUB_DOWNLOAD_TIMEOUT is longer."""


_ANSWERS: Final[Mapping[int, str]] = {
    401: "the token is invalid or expired: `hf auth login` again, or unset HF_TOKEN: public repositories need none",
    403: "take a token that may read it: `hf auth whoami` says whose the present one is",
    429: "too many requests: wait some minutes, or `hf auth login` for a higher limit",
}
"""HTTP status with which the Hub refuses without a reason of its own, and the remedy."""


def go_offline_unless_reachable(name: str) -> None:
    """Switch this process to offline mode if the Hub is unreachable, so that loading uses the cache without timeouts.

    Without a network, huggingface_hub retries every request six times over 22 seconds, and loading a model makes
    several requests. If the Hub is reachable, these retries are kept, with a read timeout. Rank 0 reports a switch on
    standard error.

    Args:
        name: Hub id, or an existing path, for which no request is made.
    """
    if Path(name).exists():
        return
    processes.disable_weight_conversion()
    # Slow to import, and not needed for a path.
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return
    # The base error of the HTTP library, httpx or another with that interface.
    http_error: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS_TO_ANSWER)
    except (http_error, OSError) as error:
        if processes.read_rank() == 0:
            failure = f"{constants.ENDPOINT} does not answer ({type(error).__name__})"
            sys.stderr.write(f"{failure}: only cached models and data can be used\n")
        constants.HF_HUB_OFFLINE = True
        # `datasets` copies the constant at import.
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
        return
    limit_silence(max(SECONDS_OF_SILENCE, constants.HF_HUB_DOWNLOAD_TIMEOUT))


def explain_refusal_of_hub(error: BaseException) -> tuple[str, str] | None:
    """Return why the Hub has not sent a file, and the remedy; ``None`` if the error has another reason, or its own."""
    from huggingface_hub.errors import HfHubHTTPError

    for cause in iterate_causes(error):
        if type(cause) is HfHubHTTPError:  # Its subclasses are the refusals with a reason.
            status = cause.response.status_code
            return f"the Hub answers {status}", _ANSWERS.get(status, "run the same command again later")
        # Its base is the error of the HTTP client, httpx or another with that interface. One with a response is not a
        # failed connection: a subclass was raised from it.
        if isinstance(cause, HfHubHTTPError.__bases__[0]) and getattr(cause, "response", None) is None:
            return f"the connection to the Hub failed ({type(cause).__name__})", "run the same command again"
    return None


def limit_silence(seconds: float) -> None:
    """Limit the timeouts of all requests of huggingface_hub; upstream's client waits forever in some of them."""
    from huggingface_hub import get_session, set_client_factory

    session = get_session()
    kind, hooks = type(session), session.event_hooks
    requests = [hook for hook in hooks["request"] if not isinstance(hook, partial)]
    # Through the factory, because upstream creates a new client after a connection error (``utils/_http.py``).
    limited: Any = {**hooks, "request": [*requests, partial(_limit, seconds)]}
    set_client_factory(lambda: kind(event_hooks=limited, follow_redirects=True))


def _limit(seconds: float, request: Any) -> None:
    # Set on each request, because upstream passes ``timeout=None`` in some calls, for example when it lists files,
    # which overrides the client's timeout (huggingface_hub 2.4, ``utils/_pagination.py``).
    given = request.extensions.get("timeout") or {}
    names = ("connect", "read", "write", "pool")
    request.extensions["timeout"] = {name: min(seconds, given.get(name) or seconds) for name in names}
