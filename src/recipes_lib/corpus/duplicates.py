"""Exact and near duplicates of a whole corpus, and lines repeated in many documents.

Cleaning writes arrays of hashes for every task; here they are compared, in document order. Memory is that of
``count_compared_bytes``: bands are read one at a time, digests slice by slice, and both sorted in slices of
``_SLICE_ROWS``; arrays for exact comparison are memory-mapped.

Words, n-grams and MinHash signatures are arrays of hashes, without a Python object per word. A word is a run of
letters, digits and underscores in lower case; in scripts without spaces, a character.
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
from recipes_lib.errors import DataError, Problem
from recipes_lib.files import read_record, replacing

KEPT: Final = 0
EXACT: Final = 1
NEAR: Final = 2

_BYTES_COMPARED: Final = 55
"""Memory of a document while all are compared."""
_BYTES_SORTED: Final = 50
"""Memory of a document of the slice that is sorted, besides."""
_SLICE_ROWS: Final = 1 << 26
"""Hashes sorted at a time."""
_BLOCK_ROWS: Final = 1 << 20
_MAX_COMPARISONS: Final = 1000
"""Kept candidates that a document is compared with, the first ones: templates that differ in each page have more."""
_MAX_OPEN_FILES: Final = 256
_ARRAYS: Final = ("exact", "bands", "num_shingles", "shingles", "num_lines", "lines")

Ordinals = npt.NDArray[np.int64]


def count_compared_bytes(num_documents: int) -> int:
    """Return the memory for comparing so many documents in all.

    Source: ``tests/corpus/test_duplicates.py`` measures it.
    """
    return _BYTES_COMPARED * num_documents + _BYTES_SORTED * min(num_documents, _SLICE_ROWS)


class Hashes:
    """Hashes of the documents of a task."""

    def __init__(self, config: CorpusConfig) -> None:
        """Compute the hashes that ``config`` needs."""
        self.config = config
        self._minhash = MinHash(config.near_duplicates_bands, config.near_duplicates_rows, config.near_duplicates_seed)
        self._found: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _ARRAYS}

    def add(self, text: str) -> None:
        """Add a document."""
        digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()
        shingles = np.zeros(0, np.uint32)
        keys = np.zeros(self._minhash.bands, np.uint64)
        if self.config.near_duplicates != "off":
            shingles = hash_shingles(text, self.config.near_duplicates_ngram)
            keys = self._minhash.compute_keys(shingles)
        has_lines = self.config.repeated_lines != "off"
        lines = hash_lines(text, self.config.repeated_lines_unit) if has_lines else np.zeros(0, np.uint64)
        self._found["exact"].append(np.frombuffer(digest, np.uint64)[None])
        self._found["bands"].append(keys[None])
        for name, array in (("shingles", shingles), ("lines", lines)):
            self._found[f"num_{name}"].append(np.array([len(array)], np.int64))
            self._found[name].append(array)

    def write(self, folder: Path, rank: int) -> None:
        """Write the arrays of the task."""
        empty = {"exact": (0, 2), "bands": (0, self._minhash.bands)}
        for name, arrays in self._found.items():
            kind = np.uint32 if name == "shingles" else np.int64 if name.startswith("num") else np.uint64
            array = np.concatenate([np.zeros(empty.get(name, (0,)), kind), *arrays])
            with replacing(_array_path(folder, rank, name)) as partial, partial.open("wb") as file:
                np.save(file, array)


def _array_path(folder: Path, rank: int, name: str) -> Path:
    return folder / f"{rank:05d}.{name}.npy"


def split_lines(text: str, unit: str) -> list[str]:
    """Split a text into lines or paragraphs; joined by the separator they are the text again."""
    return text.split("\n" if unit == "line" else "\n\n")


def hash_lines(text: str, unit: str) -> HashArray:
    """Return a hash of every line or paragraph, ``uint64 (L,)``; 0 for blank ones, which are never removed."""
    stripped = (line.strip() for line in split_lines(text, unit))
    values = (
        int.from_bytes(hashlib.blake2b(line.encode(errors="replace"), digest_size=8).digest()) if line else 0
        for line in stripped
    )
    return np.fromiter(values, np.uint64)


@dataclass(frozen=True)
class HashFolder:
    """Hashes of a source's documents.

    Attributes:
        path: Folder of the arrays.
        num_tasks: Tasks that wrote them.
        label: The source.
    """

    path: Path
    num_tasks: int
    label: str


class HashTable:
    """Hashes of all documents, those of earlier corpora first; arrays are memory-mapped."""

    def __init__(self, folders: Sequence[HashFolder]) -> None:
        """Open them."""
        self.tasks = [(folder, rank) for folder in folders for rank in range(folder.num_tasks)]
        # A map holds a file descriptor, and processes are often limited to 1,024: a corpus has six arrays a task.
        self._open = functools.lru_cache(maxsize=_MAX_OPEN_FILES)(self._map)
        self.starts = np.cumsum([0, *(len(array) for array in self._iterate("exact"))], dtype=np.int64)
        self._shingle_starts = [np.concatenate(([0], np.cumsum(array))) for array in self._iterate("num_shingles")]

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
        """Mask of the documents with at least one n-gram, ``bool (N,)``; the others are similar to none."""
        masks = [np.diff(starts) > 0 for starts in self._shingle_starts]
        return np.concatenate([np.zeros(0, np.bool_), *masks])

    def read_band(self, band: int, chosen: npt.NDArray[np.bool_], salts: HashArray | None = None) -> HashArray:
        """Return the key of one band for the chosen documents, xor its salt."""
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
        """Return documents and digests, ``(n, 2)``, of one slice of all digests."""
        ordinals, digests = [np.zeros(0, np.int64)], [np.zeros((0, 2), np.uint64)]
        for start, array in zip(self.starts, self._iterate("exact"), strict=False):
            # By the half that has no salt: documents of different sources differ in the other.
            rows = np.flatnonzero(array[:, 1] % np.uint64(num_slices) == number)
            ordinals.append(start + rows)
            digests.append(array[rows])
        return np.concatenate(ordinals), np.concatenate(digests)

    def read_keys(self, ordinal: int) -> HashArray:
        """Return the band keys of one document."""
        task, row = self._locate(ordinal)
        return np.array(self._open("bands", task)[row])

    def read_shingles(self, ordinal: int) -> ShingleArray:
        """Return the sorted set of one document's shingles."""
        task, row = self._locate(ordinal)
        start, stop = self._shingle_starts[task][row : row + 2]
        return np.unique(self._open("shingles", task)[start:stop])

    def iterate_lines(self) -> Iterator[tuple[HashArray, Ordinals]]:
        """Yield for every task the hashes of its lines, and the document of each."""
        for start, sizes, lines in zip(
            self.starts[:-1], self._iterate("num_lines"), self._iterate("lines"), strict=True
        ):
            yield np.asarray(lines), np.repeat(np.arange(start, start + len(sizes)), sizes)

    def _locate(self, ordinal: int) -> tuple[int, int]:
        task = int(np.searchsorted(self.starts, ordinal, "right")) - 1
        return task, int(ordinal - self.starts[task])


@dataclass(frozen=True)
class Duplicates:
    """Result of the comparison for every document.

    Attributes:
        status: ``uint8 (N,)``; ``KEPT``, ``EXACT`` or ``NEAR``.
        kept_as: ``int64 (N,)``; the earlier document that it repeats, or itself.
    """

    status: npt.NDArray[np.uint8]
    kept_as: Ordinals


def find_duplicates(table: HashTable, config: CorpusConfig) -> Duplicates:
    """Compare all documents; of equal and similar ones the first is kept."""
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
    """Sort the digests slice by slice: equal ones are in one slice."""
    num_slices = max(1, -(-len(table) // _SLICE_ROWS))
    for number in range(num_slices):
        ordinals, digests = table.read_digests(number, num_slices)
        high, low = digests[:, 0] if salts is None else digests[:, 0] ^ salts[ordinals], digests[:, 1]
        order = np.lexsort((low, high))  # Stable sort: equal documents stay in order.
        repeats = np.zeros(len(order), bool)
        repeats[1:] = (high[order[1:]] == high[order[:-1]]) & (low[order[1:]] == low[order[:-1]])
        firsts = order[np.maximum.accumulate(np.where(repeats, 0, np.arange(len(order))))]
        found.status[ordinals[order[repeats]]] = EXACT
        found.kept_as[ordinals[order]] = ordinals[firsts]


def _find_near(table: HashTable, config: CorpusConfig, salts: HashArray | None, found: Duplicates) -> None:
    # An exact duplicate is removed already, and would only be compared with what its original is compared with.
    is_active = (found.status == KEPT) & table.find_long()
    active = np.flatnonzero(is_active)
    labels = np.arange(len(table), dtype=np.int64)
    for band in range(config.near_duplicates_bands):
        _unite(labels, *_find_equal(table.read_band(band, is_active, salts), active))
    members = _list_members(labels)
    components = labels[members]
    order = np.argsort(components, kind="stable")
    borders = np.flatnonzero(np.diff(components[order], prepend=-1, append=-1))
    # Candidates are in one component, so that components can be judged one after the other; inside, in document order.
    greedy = _KeepFirst(table, config, salts)
    for start, stop in itertools.pairwise(borders):
        for ordinal, kept_as in greedy.remove(members[order[start:stop]]):
            found.status[ordinal] = NEAR
            found.kept_as[ordinal] = kept_as


def _list_members(labels: Ordinals) -> Ordinals:
    """Return the documents of components with several, ascending."""
    others = [
        start + np.flatnonzero(part != np.arange(start, start + len(part)))
        for start in range(0, len(labels), _BLOCK_ROWS)
        if len(part := labels[start : start + _BLOCK_ROWS])
    ]
    later = np.concatenate([np.zeros(0, np.int64), *others])
    return np.union1d(later, labels[later])


def _find_equal(keys: HashArray, ordinals: Ordinals) -> tuple[Ordinals, Ordinals]:
    """Return pairs of documents with equal keys that connect all documents of a key."""
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
    """Label connected documents by their first document."""
    while len(first):
        ours, theirs = labels[first], labels[second]
        apart = ours != theirs
        first, second = first[apart], second[apart]
        # The larger root points to the smaller one, so labels only fall. `minimum.at`, because a root can occur in
        # several pairs, of which an assignment would keep the last.
        np.minimum.at(labels, np.maximum(ours, theirs)[apart], np.minimum(ours, theirs)[apart])
        # Pointer jumping: every round halves the length of the chains.
        while not np.array_equal(labels[labels], labels):
            labels[:] = labels[labels]


class _KeepFirst:
    """Removes documents of a connected component that are similar to an earlier, kept one."""

    def __init__(self, table: HashTable, config: CorpusConfig, salts: HashArray | None) -> None:
        self._table, self._config, self._salts = table, config, salts
        self._read = functools.lru_cache(maxsize=4096)(table.read_shingles)

    def remove(self, members: Ordinals) -> Iterator[tuple[int, int]]:
        """Yield each document to remove, with the kept one that it repeats; members are ascending."""
        if not self._config.near_duplicates_verify:
            yield from ((int(member), int(members[0])) for member in members[1:])
            return
        # Kept documents by band and key: only those that share a whole band are candidates.
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
                kept.setdefault(bucket, []).append(member)

    def _is_similar(self, first: int, second: int) -> bool:
        return compute_jaccard(self._read(first), self._read(second)) >= self._config.near_duplicates_threshold


def find_repeated_lines(table: HashTable, status: npt.NDArray[np.uint8], least: int) -> tuple[HashArray, Ordinals]:
    """Return the hashes of lines in at least ``least`` kept documents, sorted, and the first document of each."""
    num_lines = sum(len(lines) for lines, _ in table.iterate_lines())
    num_slices = max(1, -(-num_lines // _SLICE_ROWS))
    hashes, firsts = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for number in range(num_slices):
        collected = []
        for lines, owners in table.iterate_lines():
            chosen = (lines != 0) & (status[owners] == KEPT) & (lines % np.uint64(num_slices) == number)
            collected.append((lines[chosen], owners[chosen]))
        keys = np.concatenate([lines for lines, _ in collected])
        owners = np.concatenate([own for _, own in collected])
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
    """Return everything that determines the hashes, as JSON values; corpora must agree in it to be compared."""
    return {name: getattr(config, f"near_duplicates_{name}") for name in ("ngram", "bands", "rows", "seed")} | {
        "near": config.near_duplicates != "off"
    }


def open_earlier(name: str, config: CorpusConfig) -> list[HashFolder]:
    """Return the hashes of an earlier corpus, including those of removed documents.

    Raises:
        DataError: It is none, its hashes are gone, or they are of another kind.
    """
    remedy = "name the output_dir of a finished corpus, whose folder `.work` is still there"
    fields: Mapping[str, type] = {"hashes": dict, "work": dict}
    manifest = read_record(Path(name) / "corpus.json", fields, remedy=remedy)
    if manifest["hashes"] != describe_hashes(config):
        found = f"its hashes are {manifest['hashes']}, and this corpus asks for {describe_hashes(config)}"
        raise DataError(Problem(name, found, "set the near_duplicates keys as they were there"))
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
"""Characters hashed at once: some 40 bytes of memory each."""
# Both odd, so that a product with them modulo 2^64 can be inverted and loses nothing: the golden ratio, as in
# splitmix64, and a constant of MurmurHash3's finaliser.
_FACTOR: Final = 0x9E3779B97F4A7C15
_MIX: Final = np.uint64(0xFF51AFD7ED558CCD)
_UNSPACED: Final = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF))
"""Thai and Lao, Burmese, Khmer, kana, and Chinese characters of the first plane."""
_MAX_CODE: Final = 0xFFFF
"""Characters beyond the first plane, mostly emoji, are no words."""


class Words(NamedTuple):
    """The words of a text.

    Attributes:
        hashes: ``uint64 (W,)``.
        starts: ``int64 (W,)``; where each begins, in characters.
        ends: ``int64 (W,)``; where each ends, exclusive.
    """

    hashes: HashArray
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


@functools.cache
def _tables() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64], HashArray, HashArray]:
    """Class of a character (0: none, 1: of a word, 2: a word by itself), its folded code, powers and their inverses."""
    kinds = np.zeros(_MAX_CODE + 1, np.uint8)
    folded = np.zeros(_MAX_CODE + 1, np.uint64)
    for code in range(_MAX_CODE):
        char = chr(code)
        if re.match(r"\w", char):
            compatible = unicodedata.normalize("NFKC", char).lower()
            kinds[code], folded[code] = 1, ord(compatible if len(compatible) == 1 else char)
    for first, last in _UNSPACED:
        kinds[first : last + 1] *= 2
    powers = np.full(_PIECE + 1, _FACTOR, np.uint64)
    inverses = np.full(_PIECE + 1, pow(_FACTOR, -1, 1 << 64), np.uint64)
    # The products overflow on purpose: all of this is modulo 2^64.
    powers[0] = inverses[0] = 1
    return kinds, folded, np.cumprod(powers), np.cumprod(inverses)


def hash_words(text: str) -> Words:
    """Return the hashes of the words of a text, without case and compatibility forms, and their positions."""
    pieces = [_hash_piece(codes, start) for start, codes in _cut(text)]
    if len(pieces) == 1:
        return pieces[0]
    return Words(*(np.concatenate(parts) for parts in zip(*pieces, strict=True)))


def _cut(text: str) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
    """Yield the text as code points, in pieces that end at word boundaries."""
    kinds, start = _tables()[0], 0
    while True:
        piece = text[start : start + _PIECE]
        codes = np.minimum(np.frombuffer(piece.encode("utf-32-le", "surrogatepass"), np.uint32), _MAX_CODE)
        if start + len(codes) < len(text):
            outside = np.flatnonzero(kinds[codes] != 1)
            # A word of a million characters is split anywhere.
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
    # A word's hash is a polynomial in its codes, by differences of prefix sums modulo 2^64.
    # The difference of two prefix sums has the factor of the word's position, which the inverse takes out: equal words
    # have equal hashes wherever they are.
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
    """Return 32-bit hashes of the n-grams of a text, in order, with repetitions; empty for a shorter text.

    Two documents of n distinct n-grams share about n^2 / 2^32 of these by chance, a fraction of n / 2^32.
    """
    # The upper half: in a product modulo 2^64, the low bits depend on the low bits of its factors only.
    return (hash_ngrams(hash_words(text).hashes, size) >> np.uint64(32)).astype(np.uint32)


class MinHash:
    """MinHash signatures, reduced to band keys.

    Source: Broder 1997; hash functions a x + b modulo 2^32. ``tests/corpus/test_shingles.py`` holds the share of equal
    keys against 1 - (1 - s^rows)^bands.
    """

    def __init__(self, bands: int, rows: int, seed: int) -> None:
        """Sample ``bands * rows`` hash functions."""
        random = np.random.default_rng(seed)
        # An odd factor: x -> a x + b is a permutation.
        self._factors = (random.integers(0, 1 << 32, bands * rows, np.uint64) | np.uint64(1)).astype(np.uint32)
        self._offsets = random.integers(0, 1 << 32, bands * rows, np.uint64).astype(np.uint32)[:, None]
        self.bands, self.rows = bands, rows

    def compute_keys(self, shingles: ShingleArray) -> HashArray:
        """Return the key of each band, ``uint64 (bands,)``: equal if all rows of the band are equal."""
        minima = np.full(self.bands * self.rows, (1 << 32) - 1, np.uint32)
        # In blocks that fit the CPU cache, so that memory does not grow with the document.
        block = max(1, (1 << 20) // len(minima))
        for start in range(0, len(shingles), block):
            # a x + b modulo 2^32, by overflow: (hash functions, n-grams)
            values = np.multiply.outer(self._factors, shingles[start : start + block])
            values += self._offsets
            np.minimum(minima, values.min(axis=1), out=minima)
        # The bands of a row side by side: one run of ``rows`` words for each band would be as many small arrays.
        keys = np.zeros(self.bands, np.uint64)
        for row in _mix(minima.reshape(self.bands, self.rows).T.astype(np.uint64)):
            keys = _mix(keys * np.uint64(_FACTOR) + row)
        return keys


def compute_jaccard(first: ShingleArray, second: ShingleArray) -> float:
    """Return the Jaccard similarity of two sets, sorted and without repetitions; 0 for two empty ones."""
    shared = len(np.intersect1d(first, second, assume_unique=True))
    union = len(first) + len(second) - shared
    return shared / union if union else 0.0
