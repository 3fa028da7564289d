"""Snapshots of what is to be published, kept beside the run until the Hub has it.

A snapshot is made of hard links: it costs no time and, while the checkpoint is there, no room; what training deletes in
between stays in it. Optimizer states are in none unless they were asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recipes_lib.errors import DataError, Problem
from recipes_lib.files import read_record
from recipes_lib.models.model_files import find_damage, is_model
from recipes_lib.publish.card import CHART, make_portable, write_card
from recipes_lib.publish.push import Push
from recipes_lib.publish.selection import MANIFESTS, RECORDS, find_secret, list_published

SNAPSHOTS: Final = "_publishing"
MODEL: Final = "model"
"""Name of the snapshot of a finished run."""
_MAKING: Final = ".making"
_NOTE: Final = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a snapshot is made of.

    Attributes:
        source: Checkpoint or output directory.
        sealed: SHA-256 of files by their path in it; empty where none are known.
        state: Folder of the repository that gets the whole checkpoint, to go on from; empty for none.
        state_files: Files that the whole checkpoint is.
        tag: Name that its commit gets.
    """

    source: Path
    sealed: Mapping[str, str]
    state: str = ""
    state_files: Collection[str] = ()
    tag: str | None = None


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
        DataError: The model is not whole, or a text holds a secret; then there is no snapshot.
        FileNotFoundError: The source was deleted meanwhile.
    """
    making = place / f"{name}{_MAKING}"
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    links = _choose(contents)
    for path, source in links.items():
        _keep(contents.source / source, making / path)
    manifests = {path: read_record(making / path) for path in links if path in MANIFESTS}
    for path, manifest in (manifests | ({"run.json": record} if record else {})).items():
        _write(making / path, json.dumps(_tell_portably(manifest), indent=1))
    if record:
        (making / "README.md").unlink(missing_ok=True)
        write_card(making, record, figures)
    problem = _find_problem(contents, links, making)
    if problem is not None:
        shutil.rmtree(making)
        raise DataError(problem)
    # The card and the records are written anew; PEFT leaves a card of its own in checkpoints.
    held = [(path, source) for path, source in links.items() if source in contents.sealed and path not in RECORDS]
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
        DataError: A file is a link that leads nowhere.
        FileNotFoundError: The source was deleted meanwhile.
    """
    paths = sorted(set(_choose(contents).values()))
    # What is told of the run may be written again without being another model.
    stats = [(path, (contents.source / path).stat()) for path in paths if path not in (*RECORDS, CHART)]
    facts = [contents.state, contents.tag, *((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _read_note(place: Path, name: str) -> dict[str, Any]:
    return read_record(place / f"{name}{_NOTE}")


def _choose(contents: Contents) -> dict[str, str]:
    """Return the files of a source by the paths that they are published at."""
    model = {path: path for path in list_published(contents.source)}
    return model | {f"{contents.state}/{path}": path for path in contents.state_files}


def _find_problem(contents: Contents, links: Mapping[str, str], making: Path) -> Problem | None:
    """Return why a snapshot must not be published, looked for in what would be sent."""
    assert all((making / path).is_file() for path in links)
    damage = find_damage(making) if is_model(making) else "there are no weights with a configuration"
    # What was sealed was opened again before, and is held against its seal when it is sent.
    if damage is not None and not contents.sealed:
        return Problem(str(contents.source), f"the model is not whole: {damage}", "train or merge it anew")
    leak = find_secret(making)
    if leak is None:
        return None
    remedy = "take it out, and revoke it if others may have seen it"
    if contents.sealed:
        remedy = "revoke it, and publish no checkpoints: `--hub_strategy end`"
    where = str(contents.source / links[leak]) if leak in links else leak
    return Problem(where, "it would be published, and holds what looks like an access token", remedy)


def _list_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _keep(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Of the file itself: Linux would give a symbolic link another name, from where it leads elsewhere.
        os.link(source.resolve(), target)
    except FileNotFoundError:
        raise
    except OSError:  # A file system without links, or two.
        shutil.copy2(source, target)


def _write(path: Path, text: str) -> None:
    """Write a file of a snapshot, which until now may be one with that of the source."""
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")


def _tell_portably(record: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out where things stood on the machine that made them."""
    told: dict[str, Any] = make_portable({name: value for name, value in record.items() if name != "error"})
    return told
