"""Environment of a run: package versions, Git commit, and whether the Hub is reachable. No slow imports."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Final

_PACKAGES: Final = ("torch", "transformers", "trl", "accelerate", "datasets", "tokenizers", "peft", "recipes-lib")


def read_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect numerical results."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def read_git_commit() -> str | None:
    """Return the commit of the working directory, with ``-dirty`` when tracked files differ; ``None`` outside git."""
    # Without tags (``--exclude=*``), so that it is always the full hash.
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


SECONDS_TO_ANSWER: Final = 3.0


def go_offline_unless_reachable(name: str) -> None:
    """Switch this process to offline mode if the Hub is unreachable, so that loading uses the cache without timeouts.

    huggingface_hub makes each request six times over 22 seconds, and a model takes several. What fails once the Hub has
    answered is still made again.

    Args:
        name: Hub id, or a path, for which nothing is asked.
    """
    if Path(name).exists():
        return
    # Here, because paths need none of it.
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return
    # Of the HTTP library under huggingface_hub, which is another one in another version.
    no_answer: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS_TO_ANSWER)
    except (no_answer, OSError):
        constants.HF_HUB_OFFLINE = True
