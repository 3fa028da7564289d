"""Sources that the ``datasets`` library reads: folders written by ``save_to_disk``, and Hub datasets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from recipes_lib.data.sources.local_files import FileSource
from recipes_lib.data.sources.readers import spell_as_json
from recipes_lib.data.sources.rows import Entry, RawRow
from recipes_lib.environment import explain_refusal_of_hub, go_offline_unless_reachable
from recipes_lib.errors import DataError, Problem, ReadFailedError, explain_refusal, iterate_causes
from recipes_lib.files import read_record

_BATCH_ROWS: Final = 1000
_DICT_FILE: Final = "dataset_dict.json"
_STATE_FILE: Final = "state.json"
_SAVE_AGAIN: Final = "write it again with `save_to_disk`"


@dataclass(frozen=True)
class HubSource:
    """The rows of a split of a Hub dataset at one commit.

    Attributes:
        name: Hub id.
        commit: Commit to which the revision was resolved.
        config: Name of the configuration.
        split: Split, or a slice of one in the notation of ``datasets``.
        streaming: Whether rows are read over the network during iteration.
        dataset: The opened ``Dataset`` or ``IterableDataset``.
        num_bytes: Arrow size of the split in bytes, from the dataset's metadata; ``None`` if unknown.
    """

    name: str
    commit: str
    config: str
    split: str
    streaming: bool
    dataset: Any
    num_bytes: int | None = None

    def rows(self) -> Iterator[Entry]:
        """Yield the rows from the start.

        Raises:
            ReadFailedError: The Hub or the local cache cannot be read further.
        """
        try:
            batches = self.dataset.with_format(None).iter(batch_size=_BATCH_ROWS)
            rows = (zip(batch, row, strict=True) for batch in batches for row in zip(*batch.values(), strict=True))
            for index, row in enumerate(rows):
                yield RawRow(f"{self.name} row {index}", index, spell_as_json(dict(row)))
        except Exception as error:  # Any error of the library, the network or the cache.
            raise ReadFailedError(*_describe_failure(self.name, error, _DAMAGED).problems) from None

    def fingerprint(self) -> str:
        """Return the SHA-256 of Hub id, commit, configuration and split; equal for streamed and downloaded data."""
        return hashlib.sha256(json.dumps([self.name, self.commit, self.config, self.split]).encode()).hexdigest()


def is_saved(folder: Path) -> bool:
    """Return whether ``save_to_disk`` wrote the folder."""
    return (folder / _DICT_FILE).is_file() or (folder / _STATE_FILE).is_file()


def load_saved(folder: Path, name: str, split: str) -> FileSource:
    """Open a split of a saved ``DatasetDict``; a saved ``Dataset`` has only the split ``train``.

    Raises:
        DataError: The folder has no such split, or is damaged.
    """
    if not (folder / _DICT_FILE).is_file():
        splits = {"train": folder}
    else:
        splits = {path.name: path for path in sorted(folder.iterdir()) if (path / _STATE_FILE).is_file()}
    if split not in splits:
        found = f"no split `{split}`; found {', '.join(f'`{found}`' for found in splits)}"
        raise DataError(Problem(name, found, "name one of these, or hold rows out with `test_split_size`"))
    # The folder can have files of an earlier save, and of the cache of `map`.
    state = read_record(splits[split] / _STATE_FILE, {"_data_files": list}, remedy=_SAVE_AGAIN)
    listed = [str(entry.get("filename")) for entry in state["_data_files"] if isinstance(entry, dict)]
    if wrong := [file for file in listed if not file.endswith(".arrow")]:
        raise DataError(Problem(name, f"{_STATE_FILE} lists `{wrong[0]}`, which is no Arrow file", _SAVE_AGAIN))
    files = [splits[split] / Path(file).name for file in listed]
    return FileSource(name, {f"{name.rstrip('/')}/{file.relative_to(folder)}": file for file in files})


def load_hub(name: str, config: str | None, revision: str | None, split: str, streaming: bool) -> HubSource:
    """Open a split of a Hub dataset, downloading it unless it is streamed.

    Args:
        name: Hub id.
        config: Name of the configuration; ``None`` for the default one.
        revision: Commit, tag or branch; ``None`` for ``main``.
        split: Split, or a slice of one in the notation of ``datasets``.
        streaming: Whether to read rows over the network during iteration.

    Raises:
        DataError: The Hub is unreachable and the dataset is not cached at this revision; or the dataset, revision,
            configuration or split does not exist, or is not accessible to this user.
    """
    go_offline_unless_reachable(name)
    remedy = _REMEDY
    try:
        builder, commit = _open_builder(name, config, revision)
        remedy = _DAMAGED
        if streaming:
            dataset = builder.as_streaming_dataset(split)
        else:
            builder.download_and_prepare()
            dataset = builder.as_dataset(split)
        for column, feature in (dataset.features or {}).items():
            if (encoded := _keep_encoded(feature)) != feature:
                dataset = dataset.cast_column(column, encoded)
    except Exception as error:  # Any error of the library, the network or the cache.
        raise _describe_failure(name, error, remedy) from None
    sizes = builder.info.splits or {}
    size = sizes[split].num_bytes if split in sizes else None
    return HubSource(name, commit, str(builder.config.name), split, streaming, dataset, size)


def _open_builder(name: str, config: str | None, revision: str | None) -> tuple[Any, str]:
    """Return the builder of a Hub dataset at a revision, and its commit."""
    import datasets
    from datasets.packaged_modules.cache.cache import Cache

    try:
        builder = datasets.load_dataset_builder(name, config, revision=revision)
        # Offline, `datasets` substitutes a builder of its cache, which ignores the requested revision.
        if isinstance(builder, Cache) and revision not in (None, builder.hash):
            raise ConnectionError(f"offline, and the cached copy is commit {builder.hash}, not `{revision}`")
    except ConnectionError:
        # Of the Hub's cache, which `hf download` fills, `datasets` reads nothing offline.
        if (folder := _find_download(name, revision)) is None:
            raise
        return datasets.load_dataset_builder(str(folder), config), folder.name
    return builder, str(builder.hash)


def _find_download(name: str, revision: str | None) -> Path | None:
    """Return the folder of a dataset that `hf download` has completed; ``None`` if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:  # Also if files of the listing are missing.
        return None
    # Without this listing, huggingface_hub also returns the folder of an interrupted download.
    return folder if (folder.parents[1] / "trees" / f"{folder.name}.json").is_file() else None


def _keep_encoded(feature: Any) -> Any:
    """Return a feature of ``datasets`` that does not decode media, which is slow and needs further packages.

    ``Json``, which is how ``datasets`` reads objects of mixed types, is decoded.
    """
    import datasets

    if isinstance(feature, dict):
        return {name: _keep_encoded(field) for name, field in feature.items()}
    if isinstance(feature, datasets.List):
        return datasets.List(_keep_encoded(feature.feature), length=feature.length)
    is_media = getattr(feature, "decode", None) is True and not isinstance(feature, datasets.Json)
    return replace(feature, decode=False) if is_media else feature


def _describe_failure(name: str, error: Exception, otherwise: str) -> DataError:
    if refusal := explain_refusal_of_hub(error):
        return DataError(Problem(name, *refusal))
    message, *causes = map(str, iterate_causes(error))
    message = message.replace(" (OfflineModeIsEnabled)", "")  # Possibly set by ``go_offline_unless_reachable``.
    remedy = next((remedy for words, remedy in _REMEDIES if any(word in message for word in words)), otherwise)
    if exhausted := explain_refusal(error):  # Such as of a full or read-only disk.
        remedy = exhausted.remedy
    if isinstance(error, ConnectionError):
        remedy = "go online, without HF_HUB_OFFLINE; pin a commit that is cached; or name a local file or folder"
    lines = [line.strip() for text in (message, *causes) for line in text.splitlines() if line.strip()]
    reason = " ".join(lines[: _NUM_LINES.get(lines[0], 1)]) if lines else type(error).__name__
    return DataError(Problem(name, f"cannot be loaded from the Hub: {reason}", remedy))


_REMEDIES: Final = (
    (("gated",), "accept its terms on the dataset's page, then log in with `hf auth login`"),
    (("Revision",), "check `dataset_revision`"),
    (("scripts are no longer",), "set `dataset_revision: refs/convert/parquet`, or convert the data to Parquet"),
    (
        ("generating the dataset", "Couldn't cast", "JSON parse error"),
        "if its files differ or are broken, `hf download --repo-type dataset` it, and name a file or folder of them",
    ),
    (("onfig name", "BuilderConfig"), "set `dataset_config` to one of these"),
    (("]. Available",), "name a whole split, or set `dataset_streaming: false`: a stream has no slices"),
    (("split",), "set `dataset_train_split` and `dataset_test_split` to splits it has"),
)
_NUM_LINES: Final = {"Config name is missing.": 2, "An error occurred while generating the dataset": 4}
"""Heading of ``datasets`` -> number of lines up to its reason: configurations; or columns and file, or the cause."""
_DAMAGED: Final = (
    "if its cached copy is damaged, delete it below HF_HUB_CACHE and HF_DATASETS_CACHE and run again while online"
)
_REMEDY: Final = "check the spelling; a private dataset needs `hf auth login`; a local path must exist"
