"""Selects the files to publish: checkpoints and final models, with portable records and without secrets."""

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
from recipes_lib.models import model_files
from recipes_lib.publish.card import ADAPTER_CONFIG, CHART, build_card, make_portable, read_portable_adapter
from recipes_lib.report.run_files import read_run
from recipes_lib.training.checkpoints.manifest import COMPLETE, is_complete, list_checkpoints, read_complete

MODEL: Final = "model"
"""Name of the contents for the finished model."""
STATES: Final = {"checkpoint": "last-checkpoint", "all_checkpoints": "{name}"}
"""Repository folder for complete checkpoints, by ``hub_strategy``; other strategies publish no optimizer states."""
MANIFESTS: Final = ("run.json", "merge.json")
RECORDS: Final = ("README.md", *MANIFESTS, "metrics.jsonl", "reward_report.json")
_HEAD_BYTES: Final = 8192
"""Bytes in which a zero byte marks a file as binary; git uses the same rule."""

Files = Mapping[str, Path | bytes]
"""Path in the repository -> file on disk, or content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Contents of one commit.

    Attributes:
        name: ``checkpoint-N`` or ``MODEL``.
        source: Checkpoint folder or output directory.
        hashes: SHA-256 of files by their path in ``source``; empty if there is no manifest.
        state: Repository folder for the complete checkpoint, to resume from; empty for none.
        tag: Tag of the commit.
    """

    name: str
    source: Path
    hashes: Mapping[str, str] = field(default_factory=dict)
    state: str = ""
    tag: str | None = None

    def find_hash(self, path: str, file: Path | bytes) -> str | None:
        """Return the SHA-256 of a file in the manifest, by its path in the repository; ``None`` if unlisted."""
        # Bytes are rewritten for publishing, such as a card: PEFT writes its own into checkpoints.
        return None if isinstance(file, bytes) else self.hashes.get(path.removeprefix(f"{self.state}/"))


def find_contents(folder: Path, keys: Mapping[str, Any]) -> dict[str, Contents]:
    """Return the publishable contents of a folder by name: checkpoints by step, then the final model.

    Args:
        folder: Output directory of a run, or folder of any model.
        keys: Configuration of the run; ``hub_strategy`` selects checkpoints, and ``tag`` is the tag of the model.
    """
    strategy, found = keys.get("hub_strategy", "end"), {}
    # ``list_checkpoints`` is newest first.
    for step, path in reversed(list_checkpoints(folder)) if strategy != "end" else ():
        record = read_complete(path)
        if record is not None and is_complete(path) and model_files.is_model(path):
            hashes = {name: file["sha256"] for name, file in record["files"].items()}
            state = STATES.get(strategy, "").format(name=path.name)
            found[path.name] = Contents(name=path.name, source=path, hashes=hashes, state=state, tag=f"step-{step}")
    if read_facts(folder).get("status", "done") == "done" and model_files.is_model(folder):
        found[MODEL] = Contents(name=MODEL, source=folder, tag=keys.get("tag"))
    return found


def collect_files(contents: Contents, folder: Path) -> Files:
    """Return the files of one commit: model, records without absolute paths, and the card.

    Args:
        contents: Contents of the commit.
        folder: Output directory of the run, from whose record the card is written; without ``run.json``, as after a
            merge, the existing card is published.

    Raises:
        DataError: The model is damaged, a link leaves the folder, or a text file contains a secret.
        FileNotFoundError: The source was deleted in the meantime.
    """
    source, record = contents.source, read_facts(folder)
    files: dict[str, Path | bytes] = {path: source / path for path in list_published(source)}
    # transformers does not save it in a checkpoint; a final model has it.
    if contents.hashes and (file := model_files.find_sentencepiece(record.get("config", {}))):
        files.setdefault(model_files.SENTENCEPIECE, file)
    if contents.state:
        files |= {f"{contents.state}/{path}": source / path for path in (*contents.hashes, COMPLETE)}
    manifests = {path: read_record(source / path) for path in files if path in MANIFESTS}
    for path, manifest in (manifests | ({"run.json": record} if record else {})).items():
        # Without the error message, which may contain paths: ``make_portable`` shortens only strings that are paths.
        portable = make_portable({name: value for name, value in manifest.items() if name != "error"})
        files[path] = json.dumps(portable, indent=1).encode()
    adapter = read_portable_adapter(source, record)
    if adapter is not None and adapter != read_record(source / ADAPTER_CONFIG):
        files[ADAPTER_CONFIG] = json.dumps(adapter, indent=2).encode()
    if record:
        step = None if contents.name == MODEL else int(contents.name.rpartition("-")[2])
        files["README.md"] = build_card(source, record, read_run(folder).find_figures(step)).encode()
    # Files with a manifest were verified when they were saved, and their hashes are compared before the upload.
    damage = None if contents.hashes else model_files.find_damage(source)
    if damage is not None:
        raise DataError(Problem(str(source), f"the model is damaged: {damage}", "train or merge it again"))
    if (leak := find_secret(files)) is not None:
        remedy = "remove it, and revoke it if others may have seen it"
        if contents.hashes:
            remedy = "revoke it, and publish no checkpoints: `--hub_strategy end`"
        where = str(source / leak.removeprefix(f"{contents.state}/"))
        raise DataError(Problem(where, "it would be published, and contains what looks like an access token", remedy))
    return files


def read_facts(folder: Path) -> Mapping[str, Any]:
    """Read ``run.json`` of a folder; empty if it does not exist.

    Raises:
        DataError: It cannot be read, or was not written by a recipe.
    """
    file = folder / "run.json"
    return read_record(file, {"stage": str, "config": dict}) if file.is_file() else {}


def list_published(folder: Path) -> list[str]:
    """Return the paths, relative to a folder, of its files that are published.

    Files are selected by known names at the top level, since subfolders may hold anything. Python files are published
    if the model needs them to load.

    Raises:
        DataError: A selected file is a broken link, or a link to a file outside of the folder.
        FileNotFoundError: The folder does not exist.
    """
    top = {path.name for path in folder.iterdir() if not path.is_dir()}
    chosen = {name for pattern in (*model_files.MODEL_FILES, *RECORDS) for name in fnmatch.filter(top, pattern)}
    if fnmatch.filter(top, "*.py"):
        # Imported here, because few models have code, and transformers takes a second to import.
        from recipes_lib.models.loading import list_code

        chosen |= top.intersection(list_code(folder))
    chosen |= {
        f"{model_files.TEMPLATES}/{path.name}"
        for path in (folder / model_files.TEMPLATES).glob("*.jinja")
        if not path.is_dir()
    }
    chosen |= {CHART} if (folder / CHART).is_file() else set()
    chosen = {path for path in chosen if not Path(path).name.startswith(".")}
    # Links into the Hub's cache are allowed: its files come from the Hub.
    homes = (folder.resolve(), Path(constants.HF_HUB_CACHE).resolve())
    for path in sorted(chosen):
        if (folder / path).is_symlink() and not (folder / path).exists():
            remedy = "restore the file, or delete the link if the model does not need it"
            raise DataError(Problem(str(folder / path), "it is a link to a file that does not exist", remedy))
        if not any((folder / path).resolve().is_relative_to(home) for home in homes):
            found = f"it is a link to a file outside of the folder, {(folder / path).resolve()}"
            raise DataError(Problem(str(folder / path), found, "copy the file here if it may be published"))
    return sorted(chosen)


def find_secret(files: Files) -> str | None:
    """Return the path of the first text file with a string in the format of an access token; ``None`` if none has."""
    # Records first, because the card is generated from them and the error should name the source.
    for path in sorted(files, key=lambda path: (path not in MANIFESTS, path)):
        content = files[path]
        if isinstance(content, Path):
            with content.open("rb") as file:
                head = file.read(_HEAD_BYTES)
                content = b"" if b"\0" in head else head + file.read()
        if has_secret_shape(content.decode(errors="replace")):
            return path
    return None
