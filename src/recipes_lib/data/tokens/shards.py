"""Token shards on disk: written document by document, memory-mapped for random access."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from recipes_lib.files import fsync

IntArray = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.uint32]
DigestArray = npt.NDArray[np.uint64]

SHARD_BYTES: Final = 1 << 28
"""Size of every shard but the last, 256 MiB."""

_ENDS_FILE: Final = "document_ends.bin"
_DIGESTS_FILE: Final = "document_digests.bin"
# Processes are often limited to 1,024 open files; a memory map counts until it is closed.
_MAX_OPEN_FILES: Final = 256


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Concatenated tokens of a source's documents; cheap to pickle, because files are opened on first read.

    Attributes:
        name: Name of the source, as configured.
        folder: Folder of the shards.
        dtype: Dtype of ids on disk, little-endian: ``<u2`` or ``<u4``.
        tokens_per_shard: Number of tokens of every shard but the last.
        num_tokens: Total number of tokens.
        num_documents: Total number of documents.
    """

    name: str
    folder: Path
    dtype: str
    tokens_per_shard: int
    num_tokens: int
    num_documents: int

    def read(self, start: int, stop: int) -> TokenArray:
        """Return tokens ``start:stop``, ``uint32 (stop - start,)``."""
        assert 0 <= start <= stop <= self.num_tokens, "outside the source"
        tokens = np.empty(stop - start, np.uint32)
        done = 0
        while start + done < stop:
            number, at = divmod(start + done, self.tokens_per_shard)
            shard = _map_file(_shard_file(self.folder, number), self.dtype)
            piece = shard[at : at + len(tokens) - done]
            tokens[done : done + len(piece)] = piece
            done += len(piece)
        return tokens

    def read_document_lengths(self, start: int, stop: int) -> IntArray:
        """Return the lengths of the parts of documents in tokens ``start:stop``, ``int64``; they sum to its length."""
        if start == stop:
            return np.zeros(0, np.int64)
        # Mapped as int64, although written as uint64: numpy compares signed with unsigned integers as floats, which
        # would copy the whole file.
        ends = _map_file(self.folder / _ENDS_FILE, "<i8")
        # A document that ends at `start` is excluded; the end of the last one is replaced by `stop`.
        first, last = ends.searchsorted(start, side="right"), ends.searchsorted(stop)
        return np.diff(ends[first:last], prepend=start, append=stop)

    @property
    def digests(self) -> DigestArray:
        """Digest of each document, ``uint64 (num_documents,)``, memory-mapped; equal for equal documents."""
        if not self.num_documents:  # There is no file.
            return np.zeros(0, np.uint64)
        return _map_file(self.folder / _DIGESTS_FILE, "<u8")[: self.num_documents]


def is_whole(folder: Path, description: Mapping[str, Any], *, exactly: bool = False) -> bool:
    """Return whether a folder has at least the bytes that ``TokenWriter.describe`` states; ``exactly``: no more."""
    size, per_shard = np.dtype(description["dtype"]).itemsize, description["tokens_per_shard"]
    num_full, rest = divmod(description["num_tokens"], per_shard)
    wanted = {_shard_file(folder, number): per_shard * size for number in range(num_full)}
    wanted[_shard_file(folder, num_full)] = rest * size
    wanted |= {folder / name: 8 * description["num_documents"] for name in (_ENDS_FILE, _DIGESTS_FILE)}
    found = {path: path.stat().st_size for path in wanted if path.is_file()}
    if exactly:
        return found == {path: num_bytes for path, num_bytes in wanted.items() if num_bytes}
    return all(found.get(path, 0) >= num_bytes for path, num_bytes in wanted.items())


class TokenWriter(ExitStack):
    """Appends documents to the shards of one source; a context manager, which closes the files.

    The files do not depend on how documents are divided into calls of ``append``.

    Args:
        folder: Folder of the files; created with the first document.
        num_ids: Size of the tokenizer's vocabulary; determines the dtype on disk.
        at: Result of ``describe`` after an earlier ``flush``, to resume from; what was written later is truncated.

    Raises:
        OSError: A file cannot be opened.
    """

    def __init__(self, folder: Path, *, num_ids: int, at: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._folder = folder
        self._type = np.dtype(np.uint16 if num_ids <= 1 << 16 else np.uint32).newbyteorder("<")
        self._tokens_per_shard = SHARD_BYTES // self._type.itemsize
        self.num_tokens = 0
        self.num_documents = 0
        self._files: dict[str, BufferedWriter] = {}
        if at and at["num_documents"]:
            self.num_tokens, self.num_documents = at["num_tokens"], at["num_documents"]
            self._open_documents()
            if self.num_tokens % self._tokens_per_shard:
                self._open_shard()

    @property
    def num_full_shards(self) -> int:
        """Number of full shards."""
        return self.num_tokens // self._tokens_per_shard

    def describe(self) -> dict[str, Any]:
        """Return the fields of ``TokenSource`` other than name and folder, as JSON values."""
        return {
            "dtype": self._type.str,
            "tokens_per_shard": self._tokens_per_shard,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
        }

    def append(self, input_ids: TokenArray, lengths: IntArray, digests: DigestArray) -> None:
        """Append R documents of N tokens.

        Args:
            input_ids: Token ids of the concatenated documents, ``uint32 (N,)``.
            lengths: Number of tokens of each document, at least 1, which sum to N, ``int64 (R,)``.
            digests: Digest of each document, ``uint64 (R,)``.

        Raises:
            OSError: The disk is full.
        """
        if not len(lengths):
            return
        if not self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._open_documents()
        # Before the loop, which advances `num_tokens`.
        self._files["ends"].write((self.num_tokens + np.cumsum(lengths)).astype("<u8").data)
        self._files["digests"].write(digests.astype("<u8").data)
        ids = input_ids.astype(self._type)
        while len(ids):
            filled = self.num_tokens % self._tokens_per_shard
            if not filled:
                self._open_shard()
            piece = ids[: self._tokens_per_shard - filled]
            self._files["shard"].write(piece.data)
            self.num_tokens += len(piece)
            ids = ids[len(piece) :]
        self.num_documents += len(lengths)

    def flush(self) -> None:
        """Flush and fsync all files, and the folder.

        Raises:
            OSError: The disk is full.
        """
        for file in self._files.values():
            file.flush()
            fsync(Path(file.name))
        if self._files:
            fsync(self._folder)

    def _open_documents(self) -> None:
        self._files["ends"] = self._open_at(self._folder / _ENDS_FILE, 8 * self.num_documents)
        self._files["digests"] = self._open_at(self._folder / _DIGESTS_FILE, 8 * self.num_documents)

    def _open_shard(self) -> None:
        """Close the current shard, flushed to disk, and open that of the next token."""
        if "shard" in self._files:
            self.flush()
            self._files["shard"].close()
        number, filled = divmod(self.num_tokens, self._tokens_per_shard)
        self._files["shard"] = self._open_at(_shard_file(self._folder, number), filled * self._type.itemsize)

    def _open_at(self, path: Path, num_bytes: int) -> BufferedWriter:
        """Open a file for appending after its first ``num_bytes``, the size at the last recorded progress."""
        file = self.enter_context(path.open("ab"))
        file.truncate(num_bytes)
        return file


def _shard_file(folder: Path, number: int) -> Path:
    return folder / f"tokens-{number:05d}.bin"


@functools.lru_cache(maxsize=_MAX_OPEN_FILES)
def _map_file(path: Path, dtype: str) -> npt.NDArray[Any]:
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
