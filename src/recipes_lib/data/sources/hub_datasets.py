"""Datasets of the ``datasets`` library: saved to disk, or on the Hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recipes_lib.data.sources.local_files import compute_digest
from recipes_lib.data.sources.readers import read_batches, spell_as_json
from recipes_lib.data.sources.rows import Entry, RawRow
from recipes_lib.environment import go_offline_unless_reachable
from recipes_lib.errors import DataError, Problem

_BATCH_ROWS: Final = 1000
_DICT_FILE: Final = "dataset_dict.json"
_STATE_FILE: Final = "state.json"


@dataclass(frozen=True)
class SavedSource:
    """The rows of a ``Dataset`` saved with ``save_to_disk``.

    Attributes:
        name: Folder as the user wrote it.
        folder: Folder of the split.
    """

    name: str
    folder: Path
    streaming = False

    def rows(self) -> Iterator[Entry]:
        """Read from the start.

        Raises:
            DataError: It cannot be read further.
        """
        import datasets

        try:
            # Whatever format is stored with the dataset: that of torch or numpy would give tensors for lists.
            dataset = datasets.load_from_disk(str(self.folder)).with_format("arrow")
            yield from read_batches(dataset.iter(batch_size=_BATCH_ROWS), dataset.data.schema, self.name)
        except Exception as error:  # Any error of the library on a damaged folder.
            found = f"cannot be read as a saved dataset: {_first_line(error)}"
            raise DataError(Problem(self.name, found, "write it again with `save_to_disk`")) from None

    def fingerprint(self) -> str:
        """SHA-256 of the Arrow files and of the list that orders them.

        Raises:
            DataError: They cannot be read.
        """
        digest = hashlib.sha256()
        try:
            for path in [self.folder / _STATE_FILE, *sorted(self.folder.glob("*.arrow"))]:
                digest.update(compute_digest(path))
        except OSError as error:
            raise DataError(Problem(self.name, f"cannot be read: {error.strerror}", "check its files")) from None
        return digest.hexdigest()


@dataclass(frozen=True)
class HubSource:
    """The rows of a split of a Hub dataset at one commit.

    Attributes:
        name: Hub id.
        commit: The commit that the revision was when it was resolved.
        config: Configuration.
        split: Split, or a slice of one in the notation of ``datasets``.
        streaming: Whether rows are read over the network as they are asked for.
        dataset: The opened ``Dataset`` or ``IterableDataset``.
        num_bytes: Of the split as Arrow holds it, as the dataset tells; ``None``: it does not.
    """

    name: str
    commit: str
    config: str
    split: str
    streaming: bool
    dataset: Any
    num_bytes: int | None = None

    def rows(self) -> Iterator[Entry]:
        """Read from the start.

        Raises:
            DataError: The Hub or the cache stopped answering.
        """
        try:
            batches = self.dataset.with_format(None).iter(batch_size=_BATCH_ROWS)
            rows = (
                zip(batch, values, strict=True) for batch in batches for values in zip(*batch.values(), strict=True)
            )
            for index, row in enumerate(rows):
                yield RawRow(self.name, index, "row", spell_as_json(dict(row)))
        except Exception as error:  # Any error of the library, the network or the cache.
            raise _describe_failure(self.name, error) from None

    def fingerprint(self) -> str:
        """SHA-256 of the Hub id, commit, configuration and split; the same whether streamed or not."""
        return hashlib.sha256(json.dumps([self.name, self.commit, self.config, self.split]).encode()).hexdigest()


def is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote the folder."""
    return (folder / _DICT_FILE).is_file() or (folder / _STATE_FILE).is_file()


def load_saved(folder: Path, name: str, split: str) -> SavedSource:
    """Choose a split of a saved ``DatasetDict``; a saved ``Dataset`` has the one split ``train``.

    Raises:
        DataError: There is no such split.
    """
    if not (folder / _DICT_FILE).is_file():
        splits = {"train": folder}
    else:
        splits = {path.name: path for path in sorted(folder.iterdir()) if (path / _STATE_FILE).is_file()}
    if split not in splits:
        found = f"no split `{split}`; found {', '.join(f'`{found}`' for found in splits)}"
        raise DataError(Problem(name, found, "name one of these, or hold rows out with `test_split_size`"))
    return SavedSource(name, splits[split])


def load_hub(name: str, config: str | None, revision: str | None, split: str, streaming: bool) -> HubSource:
    """Open a split of a Hub dataset, downloading it unless it is streamed.

    Args:
        name: Hub id.
        config: Configuration, where the dataset has several.
        revision: Commit, tag or branch.
        split: Split, or a slice of one.
        streaming: Whether to read over the network as rows are asked for.

    Raises:
        DataError: The Hub cannot be reached, or has no such dataset, revision, configuration or split for this user; or
            only another revision is cached.
    """
    go_offline_unless_reachable(name)
    import datasets
    from datasets.packaged_modules.cache.cache import Cache
    from huggingface_hub import constants

    # datasets has its own copy of the switch, made at import.
    datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE or constants.HF_HUB_OFFLINE
    try:
        builder = datasets.load_dataset_builder(name, config, revision=revision)
        if isinstance(builder, Cache) and revision not in (None, builder.hash):  # it serves whatever it has
            raise ConnectionError(f"offline, and the cached copy is commit {builder.hash}, not `{revision}`")
        if streaming:
            dataset = builder.as_streaming_dataset(split)
        else:
            builder.download_and_prepare()
            dataset = builder.as_dataset(split)
    except Exception as error:  # Any error of the library, the network or the cache.
        raise _describe_failure(name, error) from None
    sizes = builder.info.splits or {}
    size = sizes[split].num_bytes if split in sizes else None
    return HubSource(name, str(builder.hash), str(builder.config.name), split, streaming, dataset, size)


def _describe_failure(name: str, error: Exception) -> DataError:
    message = str(error)
    remedy = next((remedy for words, remedy in _REMEDIES if any(word in message for word in words)), _REMEDY)
    if isinstance(error, ConnectionError):
        remedy = "go online (HF_HUB_OFFLINE=0), pin a commit that is cached, or name a local file or folder"
    return DataError(Problem(name, f"cannot be loaded from the Hub: {_first_line(error)}", remedy))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


_REMEDIES: Final = (
    (("gated",), "accept its terms on the dataset's page, then log in with `hf auth login`"),
    (("Revision",), "check `dataset_revision`"),
    (("scripts are no longer",), "set `dataset_revision: refs/convert/parquet`, or convert the data to Parquet"),
    (("onfig name", "BuilderConfig"), "set `dataset_config` to one of these"),
    (("split",), "set `dataset_train_split` and `dataset_test_split` to splits it has"),
)
_REMEDY: Final = "check the spelling; a private dataset needs `hf auth login`; a local path must exist"
