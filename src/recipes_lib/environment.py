"""Environment of a run: package versions and the Git commit of the working directory. Standard library only."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from typing import Final

_PACKAGES: Final = ("torch", "transformers", "trl", "accelerate", "datasets", "tokenizers", "peft", "recipes-lib")


def read_versions() -> dict[str, str]:
    """Return the version of Python and of each package that decides what is computed."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def read_git_commit() -> str | None:
    """Return the commit of the working directory, with ``-dirty`` when tracked files differ; ``None`` outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
