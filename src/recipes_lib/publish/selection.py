"""Files of a folder that are published, and the scan for secrets."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Final

from recipes_lib.config.secrets import has_secret_shape
from recipes_lib.errors import DataError, Problem
from recipes_lib.models.model_files import MODEL_FILES
from recipes_lib.publish.card import CHART

MANIFESTS: Final = ("run.json", "merge.json")
RECORDS: Final = ("README.md", *MANIFESTS, "metrics.jsonl", "reward_report.json")
_TEMPLATES: Final = "additional_chat_templates"
_HEAD_BYTES: Final = 8192
"""A file with a zero byte among its first ones is no text, which is how git tells as well."""


def list_published(folder: Path) -> list[str]:
    """Return which files of a folder are published, by their path in it.

    They are known by their names, and lie at the top: a folder in it may hold anything. Code is published where the
    model is loaded by it.

    Raises:
        DataError: One of them is a link to a file that is not there, or out of the folder.
        FileNotFoundError: There is no such folder.
    """
    top = {path.name for path in folder.iterdir() if not path.is_dir()}
    chosen = {name for pattern in (*MODEL_FILES, *RECORDS) for name in fnmatch.filter(top, pattern)}
    if fnmatch.filter(top, "*.py"):
        # Here, because most models need neither their code nor the second that transformers takes.
        from recipes_lib.models.remote_code import list_code

        chosen |= top.intersection(list_code(folder))
    chosen |= {f"{_TEMPLATES}/{path.name}" for path in (folder / _TEMPLATES).glob("*.jinja") if not path.is_dir()}
    chosen |= {CHART} if (folder / CHART).is_file() else set()
    chosen = {path for path in chosen if not Path(path).name.startswith(".")}
    for path in sorted(chosen):
        if (folder / path).is_symlink() and not (folder / path).exists():
            remedy = "put the file there, or delete the link if the model does without"
            raise DataError(Problem(str(folder / path), "it is a link to a file that is not there", remedy))
        if not any((folder / path).resolve().is_relative_to(home) for home in (folder.resolve(), find_hub_cache())):
            found = f"it is a link out of the folder, to {(folder / path).resolve()}"
            raise DataError(Problem(str(folder / path), found, "copy the file here if it may be published"))
    return sorted(chosen)


def find_hub_cache() -> Path:
    """Return the cache of the Hub, whose folders hold nothing but links into it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).resolve()


def find_secret(folder: Path) -> str | None:
    """Return the path of a text in a folder that holds something of the shape of an access token; else ``None``."""
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    # The record first: the card is written from it.
    for path in sorted(paths, key=lambda path: path not in MANIFESTS):
        with (folder / path).open("rb") as file:
            head = file.read(_HEAD_BYTES)
            if b"\0" not in head and has_secret_shape((head + file.read()).decode(errors="replace")):
                return path
    return None
