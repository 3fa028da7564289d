"""Environment of a run: package versions, Git commit, and whether the Hub is reachable. No slow imports."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Final

from recipes_lib import processes

_PACKAGES: Final = ("torch", "transformers", "trl", "accelerate", "datasets", "tokenizers", "peft", "recipes-lib")


def read_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect numerical results."""
    return {"python": platform.python_version(), **{name: find_version(name) or "not installed" for name in _PACKAGES}}


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


def go_offline_unless_reachable(name: str) -> None:
    """Switch this process to offline mode if the Hub is unreachable, so that loading uses the cache without timeouts.

    Without a network, huggingface_hub retries every request six times over 22 seconds, and loading a model makes
    several requests. If the Hub is reachable, these retries are kept. Rank 0 reports a switch on standard error.

    Args:
        name: Hub id, or an existing path, for which no request is made.
    """
    if Path(name).exists():
        return
    # Slow to import, and not needed for a path.
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return
    # The base error of the HTTP library: requests below huggingface_hub 1.0, httpx from 1.0.
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
