"""Local files and folders as sources: selection of files, splits, decompression, and cached SHA-256 digests."""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedReader, RawIOBase
from os.path import realpath
from pathlib import Path
from posixpath import normpath
from typing import Any, Final, cast

import yaml
from fsspec.utils import glob_translate

from recipes_lib.config.paths import find_cache
from recipes_lib.data.sources import readers
from recipes_lib.data.sources.rows import Entry
from recipes_lib.errors import DataError, Problem, ReadFailedError, collect_problems, list_first, raise_problems
from recipes_lib.files import hash_file, is_inside, read_record, replace_record
from recipes_lib.processes import warn_once

_JSON_LINES: Final = partial(readers.read_json, may_be_document=False)
READERS: Final[Mapping[str, Callable[..., Iterator[Entry]]]] = {
    ".jsonl": _JSON_LINES,
    ".ndjson": _JSON_LINES,
    ".json": partial(readers.read_json, may_be_document=True),
    ".csv": partial(readers.read_csv, delimiter=","),
    ".tsv": partial(readers.read_csv, delimiter="\t"),
    ".parquet": readers.read_parquet,
    ".arrow": readers.read_arrow,
    ".txt": readers.read_text,
    ".md": readers.read_text,
}
"""File suffix -> reader."""

_KINDS: Final = {".ndjson": ".jsonl", ".json": ".jsonl", ".md": ".txt"}
"""Suffix -> suffix of the same file type; a folder may mix those."""
COMPRESSIONS: Final = {
    ".gz": ("gzip", b"\x1f\x8b\x08"),
    ".zst": ("zstd", b"\x28\xb5\x2f\xfd"),
    ".bz2": ("bz2", b"BZh91AY&SY"),
    ".xz": ("xz", b"\xfd7zXZ\0"),
}
"""Second suffix of a compressed file -> codec, and the magic bytes at the start of the file."""
_LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/"
IGNORED_NAMES: Final = frozenset(
    f"{stem}.json" for stem in ("config", "corpus", "dataset_info", "dataset_infos", "dataset_dict")
) | {"README.md", "LICENSE.txt", "robots.txt"}
"""Files in the folder of a dataset, or in the copy of a web site, that are not data."""
SPLIT_WORDS: Final = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SNAPSHOT: Final = re.compile(r"(?:.*/)?snapshots/[0-9a-f]{40}(?=/)")
"""Folder of one revision of a dataset in the cache of the Hub."""
_CARD: Final = re.compile(r"---[ \t]*\n(.*?)\n---[ \t]*(\n|$)", re.DOTALL)
"""Metadata of a dataset card, in YAML at its beginning."""
_SHARD: Final = re.compile(r"data/(?P<split>[^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]+")


@dataclass(frozen=True)
class FileSource:
    """The rows of one or several files, in order.

    Attributes:
        name: File or folder, as configured.
        files: Name in error messages -> path; read in this order.
        text_documents: Unit of a row in text files.
    """

    name: str
    files: Mapping[str, Path]
    text_documents: readers.TextDocuments = "line"
    streaming = False

    def rows(self) -> Iterator[Entry]:
        """Yield the rows of all files from the start.

        Raises:
            DataError: Files are truncated or damaged; raised after the last file, with the problems of all.
            ReadFailedError: A file cannot be opened, or read further; raised likewise.
        """
        problems, kind = list[Problem](), DataError
        for label, path in self.files.items():
            try:
                with collect_problems(problems), open_file(path) as file:
                    reader = READERS[find_suffix(path)]
                    options = {"documents": self.text_documents} if reader is readers.read_text else {}
                    yield from reader(file, label, **options)
            except (OSError, EOFError, lzma.LZMAError) as error:
                problems.append(_describe_failure(label, path, error))
                kind = ReadFailedError if readers.is_disk_failure(error) else kind
        raise_problems(problems, self.name, kind)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the files' bytes, in order, and of what determines how they are read.

        These are the suffix of each file and, for text files, the unit of a row. Other parts of the names do not count,
        so that moved or renamed files keep their fingerprint.

        Raises:
            DataError: A file cannot be read.
        """
        digest = hashlib.sha256()
        for label, path in self.files.items():
            suffix = find_suffix(path)
            is_joined = READERS[suffix] is readers.read_text and self.text_documents != "line"
            kind = f"{suffix} {self.text_documents}" if is_joined else suffix
            try:
                digest.update(kind.encode() + compute_digest(path))
            except OSError as error:
                raise DataError(_describe_failure(label, path, error)) from None
        return digest.hexdigest()


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading in binary mode, with transparent decompression.

    Raises:
        DataError: As ``find_codec``.
        OSError: The file cannot be opened.
    """
    codec = find_codec(path)
    if codec == "xz":  # Not supported by pyarrow.
        return BufferedReader(cast(RawIOBase, lzma.open(path)))
    if codec is not None:
        import pyarrow as pa

        return BufferedReader(pa.input_stream(str(path), compression=codec))
    return path.open("rb")


def find_codec(path: Path) -> str | None:
    """Return the codec of a compressed file, one of ``COMPRESSIONS``; ``None`` for an uncompressed file.

    Magic bytes take precedence over the suffix, since downloads often lose the second suffix. The suffix decides for
    files whose start is damaged, so that the error is about decompression.

    Raises:
        DataError: The file is a pointer of Git LFS.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(len(_LFS_POINTER))
    if head == _LFS_POINTER:
        found = "a pointer of Git LFS, not the data"
        raise DataError(Problem(str(path), found, "run `git lfs pull` in its repository, or download the file"))
    by_suffix = COMPRESSIONS.get(path.suffix.lower(), (None, b""))[0]
    return next((codec for codec, mark in COMPRESSIONS.values() if head.startswith(mark)), by_suffix)


def load_files(
    path: Path,
    name: str,
    split: str,
    text_documents: readers.TextDocuments = "line",
    card: Mapping[str, Any] | None = None,
) -> FileSource:
    """Select the files of a split: a single file is the split ``train``; a folder is split by names as in ``datasets``.

    A file that is reachable under several names, by symbolic links, is read once, under the first name.

    Args:
        path: File or folder.
        name: The path, as configured.
        split: Split to read.
        text_documents: Unit of a row in text files.
        card: Configuration of the dataset card that selects the files of a folder, from ``read_card``.

    Raises:
        DataError: The path is neither a file nor a folder, or a folder has no file of a known type, mixes several
            types, or has no such split.

    Source: ``datasets.data_files.get_data_patterns``; ``tests/data/sources/test_local_files.py``.
    """
    if path.is_file():
        if find_suffix(path) not in READERS:
            # Both suffixes of a compressed file, because a `.tar.gz` is not a compressed data file.
            kind = "".join(path.suffixes[-2:]) if path.suffix.lower() in COMPRESSIONS else path.suffix
            raise DataError(Problem(name, f"unknown kind of file `{kind}`", f"convert or rename it to {_KNOWN}"))
        splits = {"train": [path]}
    elif not path.is_dir():
        found = "is a pipe or a device, and rows are read several times"
        raise DataError(Problem(name, found, "write its rows to a file, and name that"))
    else:
        splits = _find_splits(path, name) if card is None else _find_card_splits(path, name, card, split)
    if split not in splits:
        found = f"no split `{split}`; found {', '.join(f'`{found}`' for found in splits)}"
        remedy = (
            f"name one of these; or a path (./{split}), with `dataset_test_split`; "
            "or hold rows out, with `test_split_size`"
        )
        if "[" in split:
            remedy = "slices are for Hub datasets; name one of these, and draw rows with `repeat` in `dataset_mixture`"
        raise DataError(Problem(name, found, remedy))
    files: dict[str, Path] = {}
    for file in splits[split]:
        files.setdefault(realpath(file), file)
    return FileSource(name, {_label(file, path, name): file for file in files.values()}, text_documents)


def read_card(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return the configurations in the dataset card of a folder (``configs`` in ``README.md``) by name; often none."""
    with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
        text = (folder / "README.md").read_text(encoding="utf-8-sig")
        metadata = _CARD.match(text)
        card = yaml.safe_load(metadata[1]) if metadata else None
        configs = card.get("configs") if isinstance(card, dict) else None
        if isinstance(configs, list):
            named = [config for config in configs if isinstance(config, dict) and "config_name" in config]
            return {str(config["config_name"]): config for config in named}
    return {}


def choose_config(card: Mapping[str, Mapping[str, Any]], config: str | None, name: str) -> Mapping[str, Any]:
    """Return a configuration of a dataset card: the named one, otherwise the default or the only one.

    Args:
        card: Configurations by name, at least one.
        config: Name of the configuration; ``None`` for the default one.
        name: The folder, as configured.

    Raises:
        DataError: The card has no such configuration, or several and no default one.

    Source: ``datasets.utils.metadata.MetadataConfigs.get_default_config_name``.
    """
    defaults = [key for key, value in card.items() if len(card) == 1 or key == "default" or value.get("default")]
    chosen = config or next(iter(defaults), "")
    if chosen not in card:
        found = f"has no configuration `{config}`" if config else "has several configurations, and no default one"
        remedy = f"set `dataset_config` (`config` in a mixture) to one of {', '.join(card)}"
        raise DataError(Problem(name, f"its README.md {found}", remedy))
    return card[chosen]


def _find_card_splits(folder: Path, name: str, card: Mapping[str, Any], split: str) -> dict[str, list[Path]]:
    """Return the splits of a dataset card, and the files of ``split`` by its patterns, as in ``datasets``.

    The files of other splits may be missing, since a download can be of some splits only.
    """
    data_dir, patterns = str(card.get("data_dir") or ""), card.get("data_files")
    if not is_inside(data_dir):
        raise DataError(Problem(name, "its README.md has a `data_dir` outside of the folder", "correct README.md"))
    base = folder / data_dir
    if patterns is None:
        return _find_splits(base, name)
    listed = patterns if isinstance(patterns, list) else [patterns]
    entries = [part if isinstance(part, dict) else {"split": "train", "path": part} for part in listed]
    files = {file.relative_to(base).as_posix(): file for file in _list_data(base, name)}
    splits: dict[str, list[Path]] = {str(entry.get("split")): [] for entry in entries}
    for entry in entries:
        paths = entry.get("path") if str(entry.get("split")) == split else []
        for pattern in map(str, paths if isinstance(paths, list) else [paths]):
            try:
                matches = re.compile(glob_translate(normpath(pattern))).match
            except ValueError as error:  # Such as `**` within a name.
                raise DataError(Problem(name, f"its README.md has `{pattern}`: {error}", "correct README.md")) from None
            matching = [file for relative, file in files.items() if matches(relative)]
            if not matching:
                raise DataError(Problem(name, f"no data file matches `{pattern}` of its README.md", "download it"))
            splits[split] += matching
    _refuse_mixed_kinds(splits.get(split, ()), folder, name)
    return splits


def _list_data(folder: Path, name: str) -> list[Path]:
    files = list_files(folder, name)
    data = [file for file in files if find_suffix(file) in READERS]
    if data:  # `recipes clean` writes its report, in HTML, beside the data.
        warn_of_ignored((file for file in files if find_suffix(file) not in (*READERS, ".html")), folder, name)
    return data


def warn_of_ignored(files: Iterable[Path], folder: Path, name: str) -> None:
    """Warn once of the files of a folder that are not read."""
    if names := list_first(file.relative_to(folder).as_posix() for file in files):
        warn_once(f"{name}: files of unknown kinds are ignored: {names}")


def list_files(folder: Path, name: str) -> list[Path]:
    """Return the files of a folder and its subfolders, sorted, without hidden and ignored ones and pipes.

    Args:
        folder: The folder.
        name: The folder, as configured.

    Raises:
        DataError: The folder or one of its subfolders cannot be read.
    """
    try:
        return sorted(_enumerate_files(folder), key=lambda file: file.relative_to(folder).as_posix())
    except OSError as error:
        raise DataError(_describe_failure(str(error.filename or name), folder, error)) from None


def _find_splits(folder: Path, name: str) -> dict[str, list[Path]]:
    files = _list_data(folder, name)
    if not files:
        raise DataError(Problem(name, "the folder has no data file", f"put in files with the suffix {_KNOWN}"))
    matches = (_SNAPSHOT.match(file.relative_to(folder.parent).as_posix()) for file in files)
    # All at once would mix revisions, and the configurations of their dataset cards.
    if snapshots := sorted({match[0] for match in matches if match}):
        found = f"a cache of the Hub, with {len(snapshots)} snapshots, first {snapshots[0]}"
        raise DataError(Problem(name, found, "name the folder of one snapshot, or the dataset by its Hub id"))
    _refuse_mixed_kinds(files, folder, name)
    return _group_by_split(files, folder, name)


def _refuse_mixed_kinds(files: Iterable[Path], folder: Path, name: str) -> None:
    kinds: dict[str, Path] = {}
    for file in files:
        kinds.setdefault(_KINDS.get(find_suffix(file), find_suffix(file)), file)
    if len(kinds) > 1:
        examples = ", ".join(file.relative_to(folder).as_posix() for file in kinds.values())
        found = f"the folder mixes kinds of files: {examples}"
        raise DataError(Problem(name, found, "name one file, or move the others away"))


def _enumerate_files(folder: Path, above: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders; symbolic links to a parent are not followed."""
    above |= {realpath(folder)}
    for path in folder.iterdir():
        if path.name.startswith((".", "__")) or path.name in IGNORED_NAMES:
            continue
        if path.is_dir():
            if realpath(path) not in above:
                yield from _enumerate_files(path, above)
        elif not path.is_fifo():
            yield path


def _group_by_split(files: list[Path], folder: Path, name: str) -> dict[str, list[Path]]:
    """Group files by the first of three rules that any file matches: Hub shards, folder names, file names."""
    rules = _split_of_shard, lambda file: _splits_in(file.parent.as_posix()), lambda file: _splits_in(file.name)
    for rule in rules:
        found = {file: rule(file.relative_to(folder)) for file in files}
        if not any(found.values()):
            continue
        splits: dict[str, list[Path]] = {}
        for file, named in found.items():
            if len(named) != 1:
                what = f"`{file.relative_to(folder).as_posix()}` belongs to {' and '.join(sorted(named)) or 'no split'}"
                if not named:
                    # Names a file that did match: a word such as `dev` may not have been meant as a split.
                    other = next(other for other in files if found[other])
                    what += f", and `{other.relative_to(folder).as_posix()}` to {' and '.join(sorted(found[other]))}"
                remedy = "name every file after one split, as train-1.jsonl, or none; or move it away"
                raise DataError(Problem(name, what, remedy))
            splits.setdefault(min(named), []).append(file)
        return splits
    return {"train": files}


def _split_of_shard(file: Path) -> set[str]:
    match = _SHARD.fullmatch(file.as_posix())
    return {match["split"]} if match else set()


def _splits_in(text: str) -> set[str]:
    words = set(re.split(r"[-._ 0-9/]", text))
    return {split for split, names in SPLIT_WORDS.items() if words & set(names)}


def find_suffix(path: Path) -> str:
    """Return the suffix of the file type, without that of the compression."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path).suffix.lower()


def _label(file: Path, root: Path, name: str) -> str:
    return name if file == root else f"{name.rstrip('/')}/{file.relative_to(root).as_posix()}"


def _describe_failure(label: str, path: Path, error: OSError | EOFError | lzma.LZMAError) -> Problem:
    if readers.is_disk_failure(error):
        return Problem(label, f"cannot be read: {error.strerror}", "check the path and its permissions")
    remedy = "download it again, or decompress it by its own program"
    return Problem(label, f"not a whole {path.suffix} file: {error}", remedy)


_KNOWN: Final = (
    f"{', '.join(READERS)}, or one of these with {', '.join(COMPRESSIONS)}; "
    "`recipes clean` also reads HTML, and WARC with or without .gz"
)


MIN_BYTES: Final = 64 * 2**20
"""Size from which digests are cached; smaller files are hashed in about 0.1 s."""

_SETTLED_NS: Final = 2 * 10**9
"""Minimum age of a cached file's last change: a later change within the clock's resolution has the same time."""


def compute_digest(path: Path) -> bytes:
    """Return the SHA-256 of a file's content, 32 bytes.

    The digest of a large file is cached with the file's device, inode, size, ``mtime`` and ``ctime``, and is reused
    while all of these are equal. ``ctime`` makes this safe, because programs cannot set it. If the folder of cached
    digests cannot be written, the file is hashed every time.

    Args:
        path: The file.

    Raises:
        OSError: The file cannot be read.
        ConfigError: The file is large, and the user has no home folder.

    Source: ``hashlib.file_digest``; ``tests/data/sources/test_local_files.py``.
    """
    with path.open("rb") as file:
        before = _describe(file.fileno())
        if before["st_size"] < MIN_BYTES:
            return bytes.fromhex(hash_file(file))
        name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
        entry = find_cache("digests") / f"{name}.json"
        with suppress(DataError, ValueError):  # A missing or damaged entry is written again.
            cached = read_record(entry, {"sha256": str})
            if cached.get("file") == before:
                return bytes.fromhex(cached["sha256"])
        digest = bytes.fromhex(hash_file(file))
        # Not cached while the file is being written, or if it changed so recently that `_SETTLED_NS` applies.
        if _describe(file.fileno()) == before and time.time_ns() - before["st_ctime_ns"] > _SETTLED_NS:
            with suppress(OSError):  # Without a cache, the next process hashes the file again.
                entry.parent.mkdir(parents=True, exist_ok=True)
                replace_record(entry, {"path": str(path), "file": before, "sha256": digest.hex()})
    return digest


def _describe(descriptor: int) -> dict[str, int]:
    status = os.fstat(descriptor)
    return {name: getattr(status, name) for name in ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")}
