"""Pipeline blocks after the steps: clean documents and hashes of each task, deduplication, shards of the corpus."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from recipes_lib.config.corpus_keys import MAX_SAMPLES, CorpusConfig
from recipes_lib.corpus import duplicates
from recipes_lib.corpus.documents import (
    CHAT,
    HTML,
    SOURCE,
    Ledger,
    add_flag,
    join_chat,
    read_shard,
    spell_calls,
    spell_encodable,
    write_shard,
)
from recipes_lib.corpus.pii import build_masker
from recipes_lib.data.windows import WINDOW, encode_in_windows
from recipes_lib.errors import DataError, Problem
from recipes_lib.files import atomic_file, count_bytes, hash_file, replace_record

EXACT_STEP: Final = "exact_duplicates"
NEAR_STEP: Final = "near_duplicates"
LINES_STEP: Final = "repeated_lines"
_BATCH_DOCUMENTS: Final = 32
"""Documents tokenized at a time; a token takes about 90 bytes of memory, and a book has 100,000."""


class WriteClean(PipelineStep):  # type: ignore[misc]
    """Last block of cleaning: writes the remaining documents of a task, their hashes, and the ledger."""

    type, name = "WRITE", "clean documents"

    def __init__(self, folder: Path, config: CorpusConfig, ledger: Ledger) -> None:
        """Write to ``folder``; ``ledger`` is shared with the blocks before."""
        super().__init__()
        self.folder, self.config, self.ledger = folder, config, ledger

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> None:
        """Write all documents."""
        # The blocks before are generators: none of them has read a document yet.
        self.ledger.clear()
        hashes = duplicates.Hashes(self.config)
        write_shard(self.folder / f"{rank:05d}.parquet", self._add(data, hashes))
        hashes.write(self.folder, rank)
        replace_record(self.folder / f"{rank:05d}.json", self.ledger.to_record())

    def _add(self, documents: Iterator[Document], hashes: duplicates.Hashes) -> Iterator[Document]:
        for document in documents:
            document.metadata.pop(HTML, None)  # Still present if the step `extract` is off.
            with self.track_time():
                hashes.add(document.text, spell_calls(document.metadata.get(CHAT, {})))
            yield document


class CompareHashes(PipelineStep):  # type: ignore[misc]
    """Finds duplicates and repeated lines of the whole corpus, in one task."""

    type, name = "DEDUPLICATE", "compare hashes"

    def __init__(self, folder: Path, sources: Sequence[duplicates.HashFolder], config: CorpusConfig) -> None:
        """Compare the hashes of ``sources``; write the result to ``folder``."""
        super().__init__()
        self.folder, self.sources, self.config = folder, sources, config

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the result as arrays, ``NAME.npy``.

        For N documents in T tasks: ``status uint8 (N,)`` and ``kept_as int64 (N,)`` as in ``Duplicates``,
        ``starts int64 (T + 1,)`` with the first document of each task, sorted hashes ``lines uint64 (L,)`` of repeated
        lines, and ``line_firsts int64 (L,)`` with the first document of each.

        Raises:
            DataError: An earlier corpus cannot be read.
        """
        earlier = [
            folder for name in self.config.duplicates_of or () for folder in duplicates.open_earlier(name, self.config)
        ]
        table = duplicates.HashTable([*earlier, *self.sources])
        # Documents of earlier corpora come first: of two duplicates, the one in this corpus is removed.
        starts = table.starts[sum(folder.num_tasks for folder in earlier) :]
        num_earlier = int(starts[0])
        found = duplicates.find_duplicates(table, self.config)
        lines, firsts = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        if self.config.repeated_lines != "off":
            lines, firsts = duplicates.find_repeated_lines(
                table, found.status, self.config.repeated_lines_min_documents
            )
        # Ordinals of this corpus; those of earlier corpora become negative.
        arrays: dict[str, npt.NDArray[Any]] = {
            "status": found.status[num_earlier:],
            "kept_as": found.kept_as[num_earlier:] - num_earlier,
            "starts": starts - num_earlier,
            "lines": lines,
            "line_firsts": firsts - num_earlier,
        }
        for name, array in arrays.items():
            duplicates.save_array(self.folder / f"{name}.npy", array)


class WriteShards(PipelineStep):  # type: ignore[misc]
    """Writes the shards: documents that are not duplicates, without repeated lines."""

    type, name = "WRITE", "shards"

    def __init__(
        self, folder: Path, tasks: Sequence[tuple[Path, int, str]], compared: Path, config: CorpusConfig
    ) -> None:
        """Store the arguments.

        Args:
            folder: Folder of the shards and their records.
            tasks: Folder of the clean documents, number in this folder and kind of source, for each task.
            compared: Folder of ``CompareHashes``.
            config: The corpus configuration.
        """
        super().__init__()
        self.folder, self.tasks, self.compared, self.config = folder, tasks, compared, config
        self.ledger = Ledger((EXACT_STEP, NEAR_STEP, LINES_STEP), MAX_SAMPLES, build_masker(config))

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the shard of task ``rank``."""
        self.ledger.clear()
        source, number, kind = self.tasks[rank]
        is_chat = kind == "chat"
        has_tokens = self.config.tokenizer_name_or_path is not None
        self._counts: dict[str, Any] = {"documents": 0, "bytes": 0, "tokens": 0 if has_tokens else None}
        kept = self._count(self._filter(read_shard(source / f"{number:05d}.parquet"), rank, can_cut=not is_chat))
        suffix = "jsonl" if is_chat or self.config.output_format == "jsonl" else "parquet"
        path = self.folder / f"{rank:05d}.{suffix}"
        if suffix == "jsonl":
            write_lines(path, kept)
        else:
            write_shard(path, kept)
        record = self.ledger.to_record() | self._counts
        record |= {"file": path.name, "file_bytes": path.stat().st_size, "sha256": hash_file(path)}
        replace_record(self.folder / f"{rank:05d}.json", record)

    def _filter(self, documents: Iterable[Document], rank: int, *, can_cut: bool) -> Iterator[Document]:
        arrays = {
            name: np.load(self.compared / f"{name}.npy", mmap_mode="r")
            for name in ("status", "kept_as", "starts", "lines", "line_firsts")
        }
        start = int(arrays["starts"][rank])
        lines = arrays["lines"] if can_cut else arrays["lines"][:0]
        for ordinal, document in enumerate(documents, start=start):
            status, size = int(arrays["status"][ordinal]), count_bytes(document.text)
            step = NEAR_STEP if status == duplicates.NEAR else EXACT_STEP
            for name in (EXACT_STEP, NEAR_STEP):
                tally = self.ledger.tallies[name]
                is_here = status != duplicates.KEPT and name == step
                tally.count_in(size)
                if is_here and getattr(self.config, name) == "annotate":
                    tally.found["repeated"] += 1
                    add_flag(document, name)
                elif is_here:
                    document.metadata["repeats"] = int(arrays["kept_as"][ordinal])
                    self.ledger.remove(name, "repeats an earlier document", document)
                    break
                tally.count_out(size)
            else:
                if self._cut_lines(document, ordinal, lines, arrays["line_firsts"]):
                    yield document

    def _cut_lines(self, document: Document, ordinal: int, lines: Any, firsts: Any) -> bool:
        """Remove repeated lines, with hashes in ``lines``; return whether any text is left."""
        tally, before = self.ledger.tallies[LINES_STEP], document.text
        tally.count_in(count_bytes(before))
        if len(lines):
            unit = self.config.repeated_lines_unit
            hashes = duplicates.hash_lines(before, unit)
            # `searchsorted` returns the length for a hash above all of `lines`.
            places = np.minimum(np.searchsorted(lines, hashes), len(lines) - 1)
            shared = lines[places] == hashes
            if self.config.repeated_lines_keep_first:
                shared &= firsts[places] != ordinal
            if num_shared := int(shared.sum()):
                tally.found[f"{unit}s"] += num_shared
                if self.config.repeated_lines == "annotate":
                    add_flag(document, LINES_STEP)
                else:
                    pieces = zip(duplicates.split_lines(before, unit), shared, strict=True)
                    document.text = ("\n" if unit == "line" else "\n\n").join(p for p, cut in pieces if not cut)
                    tally.changed += 1
                    self.ledger.samples.add(LINES_STEP, document, before)
        if not document.text.strip():
            self.ledger.remove(LINES_STEP, "nothing left", document, before)
            return False
        tally.count_out(count_bytes(document.text))
        self.ledger.samples.add("kept", document)
        return True

    def _count(self, documents: Iterator[Document]) -> Iterator[Document]:
        tokenizer = load_tokenizer(self.config.tokenizer_name_or_path, self.config.tokenizer_revision)
        while batch := list(islice(documents, _BATCH_DOCUMENTS)):
            self._counts["documents"] += len(batch)
            self._counts["bytes"] += sum(count_bytes(document.text) for document in batch)
            if tokenizer is not None:
                texts = [document.text for document in batch if len(document.text) <= WINDOW]
                # The fast form computes no character offsets, which counting does not need.
                encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
                self._counts["tokens"] += sum(map(len, encoded))
                long = (document.text for document in batch if len(document.text) > WINDOW)
                pieces = chain.from_iterable(encode_in_windows(tokenizer, text) for text in long)
                self._counts["tokens"] += sum(piece.last - piece.first for piece in pieces)
            yield from batch


def load_tokenizer(name: str | None, revision: str | None = None) -> Any:
    """Return a tokenizer of the tokenizers library, without truncation and padding; ``None`` if ``name`` is ``None``.

    Raises:
        DataError: The tokenizer cannot be loaded.
    """
    if name is None:
        return None
    from tokenizers import Tokenizer

    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        tokenizer = (
            Tokenizer.from_file(str(path))
            if path.is_file()
            else Tokenizer.from_pretrained(name, revision=revision or "main")
        )
    except Exception as error:  # tokenizers raises plain `Exception`.
        remedy = "name a folder with tokenizer.json, the file, or a Hub id; without it tokens are not counted"
        found = f"{path if path.is_file() else name} cannot be loaded: {error}"
        raise DataError(Problem("tokenizer_name_or_path", found, remedy)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def write_lines(path: Path, documents: Iterable[Document]) -> None:
    """Write documents as JSON Lines: ``text`` or the columns of a chat, then ``id``, ``source`` and ``metadata``.

    Raises:
        OSError: The file cannot be written.
    """
    with atomic_file(path, is_shared=True) as partial, partial.open("w", encoding="utf-8") as file:
        for document in documents:
            metadata = {name: value for name, value in document.metadata.items() if name not in (SOURCE, CHAT)}
            chat = document.metadata.get(CHAT)
            columns = {"text": document.text} if chat is None else join_chat(chat, document.text)
            columns |= {"id": document.id, "source": document.metadata[SOURCE], "metadata": metadata}
            file.write(json.dumps(spell_encodable(columns), ensure_ascii=False, allow_nan=False) + "\n")
