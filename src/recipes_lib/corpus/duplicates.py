"""Deduplication of a whole corpus: exact duplicates, near duplicates by MinHash LSH, lines repeated in many documents.

Cleaning writes arrays of hashes for every task; this module compares them, in document order. ``count_compared_bytes``
gives the memory: bands are read one at a time, digests slice by slice, and both are sorted in slices of
``_SLICE_ROWS``; arrays for the verification of candidates are memory-mapped.

Words, n-grams and MinHash signatures are arrays of hashes, without a Python object per word. A word is a run of
letters, combining marks, digits and underscores, case-insensitive; in scripts without spaces, a single character.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from recipes_lib.config.corpus_keys import CorpusConfig
from recipes_lib.data.sources.splits import find_distinct
from recipes_lib.errors import DataError, Problem
from recipes_lib.files import atomic_file, read_record

KEPT: Final = 0
EXACT: Final = 1
NEAR: Final = 2

_BYTES_COMPARED: Final = 55
"""Peak memory for each document of the corpus, in bytes."""
_BYTES_SORTED: Final = 50
"""Additional memory for each document of the slice being sorted, in bytes."""
_SLICE_ROWS: Final = 1 << 26
"""Hashes sorted at a time."""
_BLOCK_ROWS: Final = 1 << 20
"""Rows of a temporary array."""
_MAX_COMPARISONS: Final = 1000
"""Kept documents with which a document is compared, the earliest ones. Pages of one template that are not similar
enough to be removed have more candidates, and comparing all pairs would be quadratic."""
_MAX_OPEN_FILES: Final = 256
"""Memory-mapped arrays at a time."""
_CACHE_BYTES: Final = 1 << 28
"""Shingles of documents that are kept for further comparisons, if documents have the mean length of the corpus."""
_ARRAYS: Final = ("exact", "bands", "num_shingles", "shingles", "num_lines", "lines")

Ordinals = npt.NDArray[np.int64]


def count_compared_bytes(num_documents: int) -> int:
    """Return the peak memory, in bytes, for comparing ``num_documents`` documents.

    Source: measured in ``tests/corpus/test_duplicates.py``.
    """
    return _BYTES_COMPARED * num_documents + _BYTES_SORTED * min(num_documents, _SLICE_ROWS)


class Hashes:
    """Hashes of the documents of one task."""

    def __init__(self, config: CorpusConfig) -> None:
        """Compute the hashes for the deduplication steps that ``config`` enables."""
        self.config = config
        self._minhash = MinHash(config.near_duplicates_bands, config.near_duplicates_rows, config.near_duplicates_seed)
        # Bytes of arrays: lists of arrays take over a kilobyte for each document, of which a task can have millions.
        self._found = {name: bytearray() for name in _ARRAYS}

    def add(self, text: str, calls: str = "") -> None:
        """Add a document; one with other ``calls``, those of ``spell_calls``, is no duplicate."""
        digest = hashlib.blake2b((text + calls).encode(errors="replace"), digest_size=16).digest()
        shingles = np.zeros(0, np.uint32)
        keys = np.zeros(self._minhash.bands, np.uint64)
        if self.config.near_duplicates != "off":
            shingles = hash_shingles(text, self.config.near_duplicates_ngram)
            keys = self._minhash.compute_keys(shingles)
            keys ^= np.uint64(int.from_bytes(hashlib.blake2b(calls.encode(), digest_size=8).digest()))
        has_lines = self.config.repeated_lines != "off"
        lines = hash_lines(text, self.config.repeated_lines_unit) if has_lines else np.zeros(0, np.uint64)
        self._found["exact"] += digest
        self._found["bands"] += keys.tobytes()
        for name, array in (("shingles", shingles), ("lines", lines)):
            self._found[f"num_{name}"] += np.int64(len(array)).tobytes()
            self._found[name] += array.tobytes()

    def write(self, folder: Path, rank: int) -> None:
        """Write the arrays of task ``rank``, as ``RANK.NAME.npy``.

        For N documents: ``exact uint64 (N, 2)`` are 128-bit digests, ``bands uint64 (N, bands)`` MinHash keys;
        ``shingles uint32`` and ``lines uint64`` are concatenated over documents, whose counts are
        ``num_shingles int64 (N,)`` and ``num_lines int64 (N,)``.
        """
        shapes = {"exact": (-1, 2), "bands": (-1, self._minhash.bands)}
        for name, found in self._found.items():
            dtype = np.uint32 if name == "shingles" else np.int64 if name.startswith("num") else np.uint64
            save_array(_array_path(folder, rank, name), np.frombuffer(found, dtype).reshape(shapes.get(name, -1)))


def save_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Atomically write an array as ``.npy``.

    Raises:
        OSError: The file cannot be written.
    """
    with atomic_file(path, is_shared=True) as partial, partial.open("wb") as file:
        np.save(file, array)


def _array_path(folder: Path, rank: int, name: str) -> Path:
    return folder / f"{rank:05d}.{name}.npy"


def split_lines(text: str, unit: str) -> list[str]:
    r"""Split a text into lines, at ``\n``, or paragraphs, at ``\n\n``; joining them restores the text."""
    return text.split("\n" if unit == "line" else "\n\n")


def hash_lines(text: str, unit: str) -> HashArray:
    """Return a hash of every line or paragraph, ``uint64 (L,)``; 0 for blank ones, which are never removed."""
    values = (
        int.from_bytes(hashlib.blake2b(line.encode(errors="replace"), digest_size=8).digest()) if line else 0
        for line in map(str.strip, split_lines(text, unit))
    )
    return np.fromiter(values, np.uint64)


@dataclass(frozen=True)
class HashFolder:
    """Folder with the hashes of a source's documents.

    Attributes:
        path: Folder of the arrays of ``Hashes.write``.
        num_tasks: Number of tasks of the source.
        label: Label of the source.
    """

    path: Path
    num_tasks: int
    label: str


class HashTable:
    """Hashes of all documents, in memory-mapped arrays; a document is identified by its ordinal in the table."""

    def __init__(self, folders: Sequence[HashFolder]) -> None:
        """Open the arrays of ``folders``, in document order."""
        self.tasks = [(folder, rank) for folder in folders for rank in range(folder.num_tasks)]
        # Every memory map holds a file descriptor: a task has six arrays, and a process often at most 1,024 files.
        self._open = functools.lru_cache(maxsize=_MAX_OPEN_FILES)(self._map)
        self.starts = np.cumsum([0, *(len(array) for array in self._iterate("exact"))], dtype=np.int64)
        self._shingle_starts = [np.concatenate(([0], np.cumsum(array))) for array in self._iterate("num_shingles")]
        self.num_shingles = sum(int(starts[-1]) for starts in self._shingle_starts)

    def __len__(self) -> int:
        """Number of documents."""
        return int(self.starts[-1])

    def _map(self, name: str, task: int) -> npt.NDArray[Any]:
        folder, rank = self.tasks[task]
        array: npt.NDArray[Any] = np.load(_array_path(folder.path, rank, name), mmap_mode="r")
        return array

    def _iterate(self, name: str) -> Iterator[npt.NDArray[Any]]:
        return (self._open(name, task) for task in range(len(self.tasks)))

    def find_long(self) -> npt.NDArray[np.bool_]:
        """Return a mask, ``bool (N,)``: True for documents with at least one n-gram; others have no near duplicate."""
        masks = [np.diff(starts) > 0 for starts in self._shingle_starts]
        return np.concatenate([np.zeros(0, np.bool_), *masks])

    def read_band(self, band: int, chosen: npt.NDArray[np.bool_], salts: HashArray | None = None) -> HashArray:
        """Return the keys of one band for the documents where ``chosen`` is True, ``uint64 (n,)``.

        With ``salts``, ``uint64 (N,)``, keys are XORed with them, so that keys of different salts do not match.
        """
        keys = np.empty(int(np.count_nonzero(chosen)), np.uint64)
        filled = 0
        for start, array in zip(self.starts, self._iterate("bands"), strict=False):
            here = chosen[start : start + len(array)]
            found = array[here, band]
            if salts is not None:
                found ^= salts[start : start + len(array)][here]
            keys[filled : filled + len(found)] = found
            filled += len(found)
        return keys

    def read_digests(self, number: int, num_slices: int) -> tuple[Ordinals, HashArray]:
        """Return ordinals ``(n,)`` and digests ``(n, 2)`` of the documents in slice ``number`` of ``num_slices``."""
        ordinals, digests = [np.zeros(0, np.int64)], [np.zeros((0, 2), np.uint64)]
        for start, array in zip(self.starts, self._iterate("exact"), strict=False):
            # Slice by the second half of the digest: the first one is salted by source (`_find_exact`).
            rows = np.flatnonzero(array[:, 1] % np.uint64(num_slices) == number)
            ordinals.append(start + rows)
            digests.append(array[rows])
        return np.concatenate(ordinals), np.concatenate(digests)

    def read_keys(self, ordinal: int) -> HashArray:
        """Return the band keys of one document, ``uint64 (bands,)``."""
        task, row = self._locate(ordinal)
        return np.array(self._open("bands", task)[row])

    def read_shingles(self, ordinal: int) -> ShingleArray:
        """Return the distinct shingles of one document, sorted."""
        task, row = self._locate(ordinal)
        start, stop = self._shingle_starts[task][row : row + 2]
        return find_distinct(self._open("shingles", task)[start:stop])

    def iterate_lines(self) -> Iterator[tuple[HashArray, Ordinals]]:
        """Yield for every task the hashes of its lines, ``uint64 (L,)``, and the ordinal of the document of each."""
        arrays = zip(self.starts[:-1], self._iterate("num_lines"), self._iterate("lines"), strict=True)
        for start, sizes, lines in arrays:
            yield np.asarray(lines), np.repeat(np.arange(start, start + len(sizes)), sizes)

    def _locate(self, ordinal: int) -> tuple[int, int]:
        task = int(np.searchsorted(self.starts, ordinal, "right")) - 1
        return task, int(ordinal - self.starts[task])


@dataclass(frozen=True)
class Duplicates:
    """Result of the comparison.

    Attributes:
        status: ``KEPT``, or ``EXACT`` or ``NEAR`` for a duplicate, ``uint8 (N,)``.
        kept_as: Ordinal of the earlier, kept document that a duplicate repeats, or of the document itself,
            ``int64 (N,)``.
    """

    status: npt.NDArray[np.uint8]
    kept_as: Ordinals


def find_duplicates(table: HashTable, config: CorpusConfig) -> Duplicates:
    """Compare all documents; the first of equal or similar ones is kept."""
    found = Duplicates(np.zeros(len(table), np.uint8), np.arange(len(table), dtype=np.int64))
    salts = _salt_by_source(table) if config.duplicates_across == "source" else None
    if config.exact_duplicates != "off":
        _find_exact(table, salts, found)
    if config.near_duplicates != "off":
        _find_near(table, config, salts, found)
    return found


def _salt_by_source(table: HashTable) -> HashArray:
    labels = [hashlib.blake2b(folder.label.encode(), digest_size=8).digest() for folder, _ in table.tasks]
    return np.repeat(np.frombuffer(b"".join(labels), np.uint64), np.diff(table.starts))


def _find_exact(table: HashTable, salts: HashArray | None, found: Duplicates) -> None:
    """Sort the digests slice by slice; equal digests are in the same slice."""
    num_slices = max(1, -(-len(table) // _SLICE_ROWS))
    for number in range(num_slices):
        ordinals, digests = table.read_digests(number, num_slices)
        high, low = digests[:, 0] if salts is None else digests[:, 0] ^ salts[ordinals], digests[:, 1]
        order = np.lexsort((low, high))  # Stable sort: equal documents stay in order.
        repeats = np.zeros(len(order), bool)
        repeats[1:] = (high[order[1:]] == high[order[:-1]]) & (low[order[1:]] == low[order[:-1]])
        # The running maximum carries the position of a run's first document forward to its repeats.
        firsts = order[np.maximum.accumulate(np.where(repeats, 0, np.arange(len(order))))]
        found.status[ordinals[order[repeats]]] = EXACT
        found.kept_as[ordinals[order]] = ordinals[firsts]


def _find_near(table: HashTable, config: CorpusConfig, salts: HashArray | None, found: Duplicates) -> None:
    # Exact duplicates are removed already, and have the same candidates as their originals.
    is_active = (found.status == KEPT) & table.find_long()
    active = np.flatnonzero(is_active)
    labels = np.arange(len(table), dtype=np.int64)
    for band in range(config.near_duplicates_bands):
        _unite(labels, *_find_equal(table.read_band(band, is_active, salts), active))
    members = _list_members(labels)
    components = labels[members]
    order = np.argsort(components, kind="stable")
    borders = np.flatnonzero(np.diff(components[order], prepend=-1, append=-1))
    # Two candidates are always in one component, so components are independent; within one, document order decides.
    selection = _KeepFirst(table, config, salts)
    for start, stop in itertools.pairwise(borders):
        for ordinal, kept_as in selection.find_removed(members[order[start:stop]]):
            found.status[ordinal] = NEAR
            found.kept_as[ordinal] = kept_as


def _list_members(labels: Ordinals) -> Ordinals:
    """Return the documents of components with at least two members, ascending."""
    others = [
        start + np.flatnonzero(part != np.arange(start, start + len(part)))
        for start in range(0, len(labels), _BLOCK_ROWS)
        if len(part := labels[start : start + _BLOCK_ROWS])
    ]
    later = np.concatenate([np.zeros(0, np.int64), *others])
    return find_distinct(np.concatenate([later, labels[later]]))


def _find_equal(keys: HashArray, ordinals: Ordinals) -> tuple[Ordinals, Ordinals]:
    """Return pairs of documents with equal keys, n - 1 pairs for n documents of a key, which connect all of them."""
    num_slices = max(1, -(-len(keys) // _SLICE_ROWS))
    pairs = []
    for number in range(num_slices):
        parts = [
            start + np.flatnonzero(keys[start : start + _BLOCK_ROWS] % np.uint64(num_slices) == number)
            for start in range(0, len(keys), _BLOCK_ROWS)
        ]
        chosen = np.concatenate([np.zeros(0, np.int64), *parts])
        order = chosen[np.argsort(keys[chosen], kind="stable")]
        same = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
        pairs.append((ordinals[order[same]], ordinals[order[same + 1]]))
    return np.concatenate([first for first, _ in pairs]), np.concatenate([second for _, second in pairs])


def _unite(labels: Ordinals, first: Ordinals, second: Ordinals) -> None:
    """Merge the components of each pair of documents in place: a vectorised union-find.

    Args:
        labels: Root of each document, ``int64 (N,)``: the first document of its component.
        first: One document of each pair.
        second: The other document of each pair.
    """
    while len(first):
        roots, other_roots = labels[first], labels[second]
        differ = roots != other_roots
        first, second = first[differ], second[differ]
        # The larger root points to the smaller one, so labels only decrease. `minimum.at`, because a root can occur in
        # several pairs, of which an indexed assignment would keep the last.
        np.minimum.at(labels, np.maximum(roots, other_roots)[differ], np.minimum(roots, other_roots)[differ])
        # Pointer jumping: every round halves the length of the chains.
        while not np.array_equal(labels[labels], labels):
            labels[:] = labels[labels]


class _KeepFirst:
    """Selects the documents of a connected component that are similar to an earlier, kept one.

    Transitive removal of whole components would remove too much: if A resembles B and B resembles C, A and C may have
    little in common.
    """

    def __init__(self, table: HashTable, config: CorpusConfig, salts: HashArray | None) -> None:
        self._table, self._config, self._salts = table, config, salts
        # By size, because a book has a thousand times the shingles of a page.
        fitting = _CACHE_BYTES * len(table) // (4 * table.num_shingles or 1)
        self._read = functools.lru_cache(maxsize=min(fitting, 4096))(table.read_shingles)

    def find_removed(self, members: Ordinals) -> Iterator[tuple[int, int]]:
        """Yield each document to remove, with the kept one that it repeats; ``members`` are ascending."""
        if not self._config.near_duplicates_verify:
            yield from ((int(member), int(members[0])) for member in members[1:])
            return
        # (band, key) -> kept documents, ascending: only documents that share a whole band are candidates.
        kept: dict[tuple[int, int], list[int]] = {}
        for member in map(int, members):
            keys = self._table.read_keys(member)
            buckets = list(enumerate((keys if self._salts is None else keys ^ self._salts[member]).tolist()))
            candidates = sorted({earlier for bucket in buckets for earlier in kept.get(bucket, ())})
            similar = (earlier for earlier in candidates[:_MAX_COMPARISONS] if self._is_similar(earlier, member))
            if (first := next(similar, None)) is not None:
                yield member, first
                continue
            for bucket in buckets:
                # The earliest candidates of all buckets are among the earliest of each bucket; without this bound, the
                # union above would grow with the number of pages of a template.
                if len(earliest := kept.setdefault(bucket, [])) < _MAX_COMPARISONS:
                    earliest.append(member)

    def _is_similar(self, first: int, second: int) -> bool:
        return compute_jaccard(self._read(first), self._read(second)) >= self._config.near_duplicates_threshold


def find_repeated_lines(table: HashTable, status: npt.NDArray[np.uint8], least: int) -> tuple[HashArray, Ordinals]:
    """Return the hashes of lines in at least ``least`` kept documents, sorted, and the first document of each.

    Args:
        table: Hashes of all documents.
        status: Result of ``find_duplicates``, ``uint8 (N,)``: lines of removed documents do not count.
        least: Smallest number of documents.
    """
    num_lines = sum(len(lines) for lines, _ in table.iterate_lines())
    num_slices = max(1, -(-num_lines // _SLICE_ROWS))
    hashes, firsts = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for number in range(num_slices):
        collected = []
        for lines, owners in table.iterate_lines():
            chosen = (lines != 0) & (status[owners] == KEPT) & (lines % np.uint64(num_slices) == number)
            collected.append((lines[chosen], owners[chosen]))
        keys, owners = map(np.concatenate, zip(*collected, strict=True))
        # By line, then by document: the first of each run is the first document of a line.
        order = np.lexsort((owners, keys))
        keys, owners = keys[order], owners[order]
        is_new = np.ones(len(keys), bool)  # Count each document once per line.
        is_new[1:] = (keys[1:] != keys[:-1]) | (owners[1:] != owners[:-1])
        values, first, counts = np.unique(keys[is_new], return_index=True, return_counts=True)
        hashes.append(values[counts >= least])
        firsts.append(owners[is_new][first[counts >= least]])
    values, owners = np.concatenate(hashes), np.concatenate(firsts)
    order = np.argsort(values)
    return values[order], owners[order]


def describe_hashes(config: CorpusConfig) -> dict[str, Any]:
    """Return the settings that determine the hashes, as JSON values; they must be equal to compare two corpora."""
    return {name: getattr(config, f"near_duplicates_{name}") for name in ("ngram", "bands", "rows", "seed")} | {
        "near": config.near_duplicates != "off"
    }


def open_earlier(name: str, config: CorpusConfig) -> list[HashFolder]:
    """Return the hashes of an earlier corpus, including those of documents that were duplicates there.

    Raises:
        DataError: The folder is not a finished corpus, its hashes were deleted, or have other settings.
    """
    remedy = "name the output_dir of a finished corpus that still has its folder `.work`"
    fields: Mapping[str, type] = {"hashes": dict, "work": dict}
    manifest = read_record(Path(name) / "corpus.json", fields, remedy=remedy)
    if manifest["hashes"] != describe_hashes(config):
        found = f"its hashes have the settings {manifest['hashes']}, and this corpus has {describe_hashes(config)}"
        raise DataError(Problem(name, found, "set the near_duplicates keys to the values of that corpus"))
    work = Path(name) / ".work"
    try:
        folders = [
            HashFolder(work / clean["folder"], clean["num_tasks"], clean["label"])
            for clean in manifest["work"]["clean"]
        ]
        for folder in folders:
            for rank in range(folder.num_tasks):
                _array_path(folder.path, rank, "exact").stat()
    except (OSError, KeyError, TypeError) as error:
        raise DataError(Problem(name, f"its hashes cannot be read: {error}", remedy)) from error
    return folders


HashArray = npt.NDArray[np.uint64]
ShingleArray = npt.NDArray[np.uint32]

_PIECE: Final = 1 << 20
"""Characters hashed at a time, which take about 40 bytes of memory each."""
# Both are odd, so that multiplication modulo 2^64 is invertible and loses no bits: the golden ratio, as in splitmix64,
# and a constant of MurmurHash3's finaliser.
_FACTOR: Final = 0x9E3779B97F4A7C15
_MIX: Final = np.uint64(0xFF51AFD7ED558CCD)
UNSPACED: Final = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Characters of scripts without spaces: Thai, Lao, Burmese, Khmer, kana, Chinese characters of the basic plane."""
COMBINING_MARKS: Final = "".join(char for char in map(chr, range(0xFE00)) if unicodedata.category(char) in ("Mn", "Mc"))
"""Accents and vowel signs, which belong to words and which ``\\w`` does not match, without variation selectors."""
_MAX_CODE: Final = 0xFFFF
"""End of the basic multilingual plane: later characters, mostly emoji, are not part of words."""


class Words(NamedTuple):
    """The W words of a text.

    Attributes:
        hashes: Hash of each word, ``uint64 (W,)``.
        starts: First character of each word, ``int64 (W,)``.
        ends: End of each word in characters, exclusive, ``int64 (W,)``.
    """

    hashes: HashArray
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


@functools.cache
def _tables() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64], HashArray, HashArray]:
    """Return lookup tables: by character its class and folded code, by position a power of ``_FACTOR`` and its inverse.

    Class 0 separates words, 1 is part of a word, 2 is a word by itself.
    """
    kinds = np.zeros(_MAX_CODE + 1, np.uint8)
    folded = np.zeros(_MAX_CODE + 1, np.uint64)
    for code in range(_MAX_CODE):
        char = chr(code)
        if re.match(r"\w", char):
            compatible = unicodedata.normalize("NFKC", char).lower()
            kinds[code] = 2 if UNSPACED.match(char) else 1
            folded[code] = ord(compatible if len(compatible) == 1 else char)
        elif char in COMBINING_MARKS and not UNSPACED.match(char):
            # Otherwise, most words of Hindi or Tamil would be split into single consonants.
            kinds[code], folded[code] = 1, code
    powers = np.full(_PIECE + 1, _FACTOR, np.uint64)
    inverses = np.full(_PIECE + 1, pow(_FACTOR, -1, 1 << 64), np.uint64)
    # The products overflow on purpose: all arithmetic is modulo 2^64.
    powers[0] = inverses[0] = 1
    return kinds, folded, np.cumprod(powers), np.cumprod(inverses)


def hash_words(text: str) -> Words:
    """Return the words of a text, hashed without distinction of case and of Unicode compatibility forms (NFKC)."""
    pieces = zip(*(_hash_piece(codes, start) for start, codes in _cut(text)), strict=True)
    return Words(*map(np.concatenate, pieces))


def _cut(text: str) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
    """Yield the text as code points, in pieces that end at word boundaries."""
    kinds, start = _tables()[0], 0
    while True:
        piece = text[start : start + _PIECE]
        codes = np.minimum(np.frombuffer(piece.encode("utf-32-le", "surrogatepass"), np.uint32), _MAX_CODE)
        if start + len(codes) < len(text):
            outside = np.flatnonzero(kinds[codes] != 1)
            # End the piece after its last character outside a word; one long word without such a character is split.
            codes = codes[: int(outside[-1]) + 1] if len(outside) else codes
        yield start, codes
        start += len(codes)
        if start >= len(text):
            return


def _hash_piece(codes: npt.NDArray[np.uint32], offset: int) -> Words:
    kinds, folded, powers, inverses = _tables()
    kind = kinds[codes]
    padded = np.concatenate(([np.uint8(0)], kind, [np.uint8(0)]))
    alone, before, after = kind == 2, padded[:-2], padded[2:]
    starts = np.flatnonzero((kind > 0) & ((before != 1) | alone))
    ends = np.flatnonzero((kind > 0) & ((after != 1) | alone)) + 1
    # A word's hash is a polynomial in its codes: the difference of two prefix sums modulo 2^64, which has the power of
    # the word's position as a factor. The inverse power removes it, so that equal words have equal hashes anywhere.
    prefix = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(folded[codes] * powers[: len(codes)], out=prefix[1:])
    hashes = (prefix[ends] - prefix[starts]) * inverses[starts]
    return Words(_mix(hashes), starts + offset, ends + offset)


def _mix(hashes: HashArray) -> HashArray:
    hashes = (hashes ^ (hashes >> np.uint64(32))) * _MIX
    return hashes ^ (hashes >> np.uint64(29))


def hash_ngrams(words: HashArray, size: int) -> HashArray:
    """Return the hash of every n-gram of ``size`` words, ``uint64 (max(W - size + 1, 0),)``, in order."""
    num = max(len(words) - size + 1, 0)
    hashes = words[:num].copy()
    for shift in range(1, size):
        hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(_FACTOR) + words[shift : num + shift]
    return _mix(hashes)


def hash_shingles(text: str, size: int) -> ShingleArray:
    """Return 32-bit hashes of the n-grams of ``size`` words of a text, in order, with repetitions.

    Empty for a shorter text. By chance, two documents of n distinct n-grams share about n^2 / 2^32 of these hashes, a
    fraction n / 2^32.
    """
    # The upper half: in a product modulo 2^64, low bits depend only on the low bits of the factors.
    return (hash_ngrams(hash_words(text).hashes, size) >> np.uint64(32)).astype(np.uint32)


class MinHash:
    """MinHash signatures, reduced to one key per LSH band.

    Source: Broder 1997, with hash functions a x + b modulo 2^32. ``tests/corpus/test_shingles.py`` compares the share
    of pairs with an equal key with 1 - (1 - s^rows)^bands for similarity s.
    """

    def __init__(self, bands: int, rows: int, seed: int) -> None:
        """Sample ``bands * rows`` hash functions."""
        random = np.random.default_rng(seed)
        # With odd a, x -> a x + b is a permutation of the 32-bit integers.
        self._factors = (random.integers(0, 1 << 32, bands * rows, np.uint64) | np.uint64(1)).astype(np.uint32)
        self._offsets = random.integers(0, 1 << 32, bands * rows, np.uint64).astype(np.uint32)[:, None]
        self.bands, self.rows = bands, rows

    def compute_keys(self, shingles: ShingleArray) -> HashArray:
        """Return the key of each band, ``uint64 (bands,)``; two documents have equal keys if all rows are equal."""
        minima = np.full(self.bands * self.rows, (1 << 32) - 1, np.uint32)
        # In blocks that fit the CPU cache, so that memory does not grow with the document.
        block = max(1, (1 << 20) // len(minima))
        for start in range(0, len(shingles), block):
            # a x + b modulo 2^32 by integer overflow, (hash functions, n-grams).
            values = np.multiply.outer(self._factors, shingles[start : start + block])
            values += self._offsets
            np.minimum(minima, values.min(axis=1), out=minima)
        # Vectorised over bands: `minima` as (rows, bands), combined into the keys row by row.
        keys = np.zeros(self.bands, np.uint64)
        for row in _mix(minima.reshape(self.bands, self.rows).T.astype(np.uint64)):
            keys = _mix(keys * np.uint64(_FACTOR) + row)
        return keys


def compute_jaccard(first: ShingleArray, second: ShingleArray) -> float:
    """Return the Jaccard similarity of two sets, given as sorted arrays of distinct values; 0 for two empty sets."""
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / max(1, len(first) + len(second) - shared)
