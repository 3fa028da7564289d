"""What is to be published, kept beside the run under a name of its own until the Hub has it.

A snapshot is made of hard links: it costs no time and, while the checkpoint is there, no room; what training deletes in
between stays in it. Optimizer states are in none unless they were asked for.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from recipes_lib.publish.card import CHART, make_portable, write_card
from recipes_lib.publish.push import Push

SNAPSHOTS: Final = "_publishing"
MODEL: Final = "model"
"""Name of the snapshot of a finished run."""
_WEIGHTS: Final = ("model*.safetensors", "adapter_model*.safetensors")
_MODEL_FILES: Final = (
    *(*_WEIGHTS, "model.safetensors.index.json", "reward_scale.json"),
    *(
        "config.json",
        "adapter_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "additional_chat_templates",
    ),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.py"),
)
"""What a Hugging Face tool needs to load a model or an adapter; nothing else of a run leaves the machine unasked."""
_MANIFESTS: Final = ("run.json", "merge.json")
_RECORDS: Final = ("README.md", *_MANIFESTS, "metrics.jsonl", "reward_report.json")
_MAKING: Final = ".making"
_NOTE: Final = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a snapshot is made of.

    Attributes:
        source: Checkpoint or output directory.
        sealed: SHA-256 of files by their path in it; empty where none are known.
        state: Folder of the repository that gets the whole checkpoint, to go on from; empty for none.
        tag: Name that its commit gets.
    """

    source: Path
    sealed: Mapping[str, str]
    state: str = ""
    tag: str | None = None


def is_model(folder: Path) -> bool:
    """Return whether a folder holds a model or an adapter that Hugging Face tools load."""
    has_config = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    return has_config and bool(_list_weights(folder))


def find_damage(folder: Path) -> str | None:
    """Return what is wrong with the weights of a model: a shard that is missing, a file that is cut off; else ``None``.

    Without torch: whoever saved them has looked at every tensor.
    """
    weights = {
        path.name for path in folder.iterdir() if any(fnmatch.fnmatch(path.name, one) for one in _MODEL_FILES[:2])
    }
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weights |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for name in sorted(weights):
        try:
            with safe_open(folder / name, framework="numpy") as tensors:
                if not tensors.keys():
                    return f"{name} holds no tensor"
        except (OSError, SafetensorError) as error:
            return f"{name} cannot be opened again: {error}"
    return None


def take_snapshot(
    place: Path, name: str, contents: Contents, record: Mapping[str, Any], figures: Mapping[str, float]
) -> None:
    """Keep what shall be published of a folder; a snapshot of that name that is there is replaced.

    Args:
        place: Folder for snapshots, on the file system of the source.
        name: What it is.
        contents: What it is made of.
        record: Of the run, what ``run.json`` holds; without one (empty) the card of the source is taken as it is.
        figures: Last evaluation by name.

    Raises:
        FileNotFoundError: The source was deleted meanwhile.
    """
    making = place / f"{name}{_MAKING}"
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    links = {path: path for path in _list_published(contents.source)}
    if contents.state:
        links |= {f"{contents.state}/{path}": path for path in _list_files(contents.source)}
    for path, source in links.items():
        _keep(contents.source / source, making / path)
    manifests = {path: json.loads((making / path).read_text(encoding="utf-8")) for path in links if path in _MANIFESTS}
    for path, manifest in (manifests | ({"run.json": record} if record else {})).items():
        _write(making / path, json.dumps(_tell_portably(manifest), indent=1))
    if record:
        (making / "README.md").unlink(missing_ok=True)
        write_card(making, record, figures)
    # The card and the records are written anew; PEFT leaves a card of its own in checkpoints.
    held = [(path, source) for path, source in links.items() if source in contents.sealed and path not in _RECORDS]
    sealed = {path: contents.sealed[source] for path, source in held}
    push = {"sealed": sealed, "folder": contents.state, "tag": contents.tag}
    note = {"push": push, "fingerprint": fingerprint(contents)}
    (place / f"{name}{_NOTE}").write_text(json.dumps(note), encoding="utf-8")
    shutil.rmtree(place / name, ignore_errors=True)
    making.rename(place / name)


def read_push(place: Path, name: str) -> Push:
    """Return a snapshot as what shall become one commit."""
    folder = place / name
    return Push(
        name=name, files={path: folder / path for path in _list_files(folder)}, **_read_note(place, name)["push"]
    )


def read_fingerprint(place: Path, name: str) -> str:
    """Return the fingerprint of what a snapshot was taken of; empty where there is none."""
    return str(_read_note(place, name)["fingerprint"]) if (place / name).is_dir() else ""


def list_snapshots(place: Path) -> list[str]:
    """Return the names of the snapshots that are there, the oldest first: checkpoints by step, then the model."""
    names = [folder.name for folder in place.glob("*") if folder.is_dir() and folder.suffix != _MAKING]
    return sorted(names, key=lambda name: (name == MODEL, int(name.rpartition("-")[2]) if name != MODEL else 0))


def drop_snapshots(place: Path, names: Iterable[str]) -> None:
    """Forget snapshots."""
    for name in names:
        shutil.rmtree(place / name, ignore_errors=True)
        (place / f"{name}{_NOTE}").unlink(missing_ok=True)


def fingerprint(contents: Contents) -> str:
    """Return 16 hex digits that change when what would be published does; reads no file.

    Raises:
        FileNotFoundError: The source was deleted meanwhile.
    """
    paths = _list_files(contents.source) if contents.state else _list_published(contents.source)
    # What is told of the run may be written again without being another model.
    stats = [(path, (contents.source / path).stat()) for path in paths if path not in (*_RECORDS, CHART)]
    facts = [contents.state, contents.tag, *((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _read_note(place: Path, name: str) -> dict[str, Any]:
    note: dict[str, Any] = json.loads((place / f"{name}{_NOTE}").read_text(encoding="utf-8"))
    return note


def _list_weights(folder: Path) -> set[str]:
    return {path.name for pattern in _WEIGHTS for path in folder.glob(pattern)}


def _list_published(source: Path) -> list[str]:
    patterns = (*_MODEL_FILES, *_RECORDS)
    names = {path: path.split("/")[0] for path in _list_files(source)}
    return [path for path in names if path == CHART or any(fnmatch.fnmatch(names[path], one) for one in patterns)]


def _list_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _keep(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # A file system without links.
        shutil.copy2(source, target)


def _write(path: Path, text: str) -> None:
    """Write a file of a snapshot, which until now may be one with that of the source."""
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")


def _tell_portably(record: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out where things stood on the machine that made them."""
    told: dict[str, Any] = make_portable({name: value for name, value in record.items() if name != "error"})
    return told
