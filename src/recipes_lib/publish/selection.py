"""Files to publish: checkpoints and final models, selected by name, with portable records and without secrets."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants

from recipes_lib.config.values import has_secret_shape
from recipes_lib.errors import DataError, Problem
from recipes_lib.files import read_record
from recipes_lib.models.model_files import MODEL_FILES, find_damage, is_model
from recipes_lib.publish.card import CHART, build_card, make_portable
from recipes_lib.report.run_files import read_run
from recipes_lib.training.checkpoints.manifest import COMPLETE, is_complete, list_checkpoints, read_complete

MODEL: Final = "model"
"""Name of the contents that are the finished model."""
STATES: Final = {"checkpoint": "last-checkpoint", "all_checkpoints": "{name}"}
"""Folder of the repository for whole checkpoints, by ``hub_strategy``; no other publishes optimizer states."""
MANIFESTS: Final = ("run.json", "merge.json")
RECORDS: Final = ("README.md", *MANIFESTS, "metrics.jsonl", "reward_report.json")
_TEMPLATES: Final = "additional_chat_templates"
_HEAD_BYTES: Final = 8192
"""A file with a zero byte among its first ones is binary, which is how git tells as well."""

Files = Mapping[str, Path | bytes]
"""Path in the repository -> the file on disk, or what it shall hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Contents of one commit.

    Attributes:
        name: ``checkpoint-N`` or ``MODEL``.
        source: Checkpoint or output directory.
        hashes: SHA-256 of files by their path in it; empty where none are known.
        state: Folder of the repository that gets the whole checkpoint, to resume from; empty for none.
        tag: Name that the commit gets.
    """

    name: str
    source: Path
    hashes: Mapping[str, str] = field(default_factory=dict)
    state: str = ""
    tag: str | None = None

    def find_hash(self, path: str) -> str | None:
        """Return the SHA-256 that a file must have, by its path in the repository; ``None`` if unlisted."""
        # Cards and records are written anew; PEFT leaves a card of its own in checkpoints.
        return None if path in RECORDS else self.hashes.get(path.removeprefix(f"{self.state}/"))


def find_contents(folder: Path, keys: Mapping[str, Any]) -> dict[str, Contents]:
    """Return the publishable contents of a folder by name: checkpoints by step, then the final model.

    Args:
        folder: Output directory of a run, or any model.
        keys: Configuration of the run; ``hub_strategy`` says what is published of it, and ``tag`` names the model.
    """
    strategy, found = keys.get("hub_strategy", "end"), {}
    # They are listed newest first.
    for step, path in reversed(list_checkpoints(folder)) if strategy != "end" else ():
        record = read_complete(path)
        if record is not None and is_complete(path) and is_model(path):
            hashes = {name: file["sha256"] for name, file in record["files"].items()}
            state = STATES.get(strategy, "").format(name=path.name)
            found[path.name] = Contents(name=path.name, source=path, hashes=hashes, state=state, tag=f"step-{step}")
    if read_facts(folder).get("status", "done") == "done" and is_model(folder):
        found[MODEL] = Contents(name=MODEL, source=folder, tag=keys.get("tag"))
    return found


def collect_files(contents: Contents, folder: Path) -> Files:
    """Return the files of one commit: model, records without the machine's paths, and the card.

    Args:
        contents: Of the commit.
        folder: Output directory of the run, whose record the card is written from; without ``run.json``, as after a
            merge, the card of the source is taken as it is.

    Raises:
        DataError: The model is not whole, a link leaves the folder, or a text holds a secret.
        FileNotFoundError: The source was deleted meanwhile.
    """
    source, record = contents.source, read_facts(folder)
    files: dict[str, Path | bytes] = {path: source / path for path in list_published(source)}
    if contents.state:
        files |= {f"{contents.state}/{path}": source / path for path in (*contents.hashes, COMPLETE)}
    manifests = {path: read_record(source / path) for path in files if path in MANIFESTS}
    for path, manifest in (manifests | ({"run.json": record} if record else {})).items():
        # Not the error: a message has paths inside, and only a text that is a path is shortened.
        told = make_portable({name: value for name, value in manifest.items() if name != "error"})
        files[path] = json.dumps(told, indent=1).encode()
    if record:
        step = None if contents.name == MODEL else int(contents.name.rpartition("-")[2])
        files["README.md"] = build_card(source, record, read_run(folder).find_figures(step)).encode()
    # What a manifest lists was opened again before, and its hash is compared when it is sent.
    damage = None if contents.hashes else find_damage(source)
    if damage is not None:
        raise DataError(Problem(str(source), f"the model is not whole: {damage}", "train or merge it anew"))
    if (leak := find_secret(files)) is not None:
        remedy = "take it out, and revoke it if others may have seen it"
        if contents.hashes:
            remedy = "revoke it, and publish no checkpoints: `--hub_strategy end`"
        where = str(source / leak.removeprefix(f"{contents.state}/"))
        raise DataError(Problem(where, "it would be published, and holds what looks like an access token", remedy))
    return files


def read_facts(folder: Path) -> Mapping[str, Any]:
    """Read ``run.json`` of a folder; empty if there is none."""
    return read_run(folder).facts if (folder / "run.json").is_file() else {}


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
        from recipes_lib.models.loading import list_code

        chosen |= top.intersection(list_code(folder))
    chosen |= {f"{_TEMPLATES}/{path.name}" for path in (folder / _TEMPLATES).glob("*.jinja") if not path.is_dir()}
    chosen |= {CHART} if (folder / CHART).is_file() else set()
    chosen = {path for path in chosen if not Path(path).name.startswith(".")}
    # The Hub's cache holds nothing but files of the Hub, and links into it.
    homes = (folder.resolve(), Path(constants.HF_HUB_CACHE).resolve())
    for path in sorted(chosen):
        if (folder / path).is_symlink() and not (folder / path).exists():
            remedy = "put the file there, or delete the link if the model does without"
            raise DataError(Problem(str(folder / path), "it is a link to a file that is not there", remedy))
        if not any((folder / path).resolve().is_relative_to(home) for home in homes):
            found = f"it is a link out of the folder, to {(folder / path).resolve()}"
            raise DataError(Problem(str(folder / path), found, "copy the file here if it may be published"))
    return sorted(chosen)


def find_secret(files: Files) -> str | None:
    """Return the path of a text that holds something of the shape of an access token; else ``None``."""
    # The record first: the card is written from it.
    for path in sorted(files, key=lambda path: (path not in MANIFESTS, path)):
        content = files[path]
        if isinstance(content, Path):
            with content.open("rb") as file:
                head = file.read(_HEAD_BYTES)
                content = b"" if b"\0" in head else head + file.read()
        if has_secret_shape(content.decode(errors="replace")):
            return path
    return None
