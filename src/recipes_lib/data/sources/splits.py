"""Held-out splits that keep duplicates on one side, and detection of overlap between training and held-out rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from recipes_lib.config.tokenization import REASONING_KEYS
from recipes_lib.data.sources.messages import CALLS_AS_TEXT
from recipes_lib.data.sources.rows import Row
from recipes_lib.errors import DataError, Problem

Digests = npt.NDArray[np.bytes_] | npt.NDArray[np.uint64]
"""Digests of R rows, 16 bytes each, ``S16 (R,)``, or their halves; an array takes a third of a list's memory."""

IntArray = npt.NDArray[np.int64]

FindPlaces = Callable[[Collection[int]], Mapping[int, str]]
"""Function that returns the locations of rows, given their positions."""

_ENCODER: Final = json.JSONEncoder(sort_keys=True, ensure_ascii=False)
_DIGEST: Final = np.dtype("S16")
_CONTENT_KEYS: Final = frozenset(
    {"role", "content", "name", "tool_calls", "tool_plan", "tools", CALLS_AS_TEXT, *REASONING_KEYS}
)
"""Keys of a message that chat templates write, without the identifier of a call, which APIs draw at random."""
_ROWS_AT_ONCE: Final = 1 << 20
_MAX_PAIRS: Final = 5
"""Pairs of equal rows that an error names."""


SHARES_ROW: Final = "are held-out rows too"
"""Predicate of training rows that are equal to held-out ones."""


def compute_row_digest(row: Row) -> bytes:
    """Return the digest of a row's content, 16 bytes; key order and outer white space do not count.

    Location, prompt boundary, template variables and the time, address or identifier of a message (WildChat) do not
    count: the content is the same to a model.

    Raises:
        DataError: A message contains a value that JSON cannot represent.
    """
    messages, rejected = map(_select_content, (row.messages, row.rejected))
    content = (messages, row.tools, row.prompt, row.completion, row.text, rejected)
    try:
        text = _ENCODER.encode(_strip(content)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        found = f"the row cannot be written as JSON: {error}"
        raise DataError(Problem(row.where, found, "write it as text, or leave it out")) from None
    return hashlib.blake2b(text, digest_size=16).digest()


def compute_digests(rows: Iterable[Row]) -> npt.NDArray[np.bytes_]:
    """``compute_row_digest`` of each row, ``S16 (R,)``.

    Raises:
        DataError: As ``compute_row_digest``.
    """
    return np.frombuffer(b"".join(map(compute_row_digest, rows)), _DIGEST)


def count_duplicates(digests: Digests) -> int:
    """Return the number of rows with the same content as an earlier row."""
    return len(digests) - len(find_distinct(digests))


def find_distinct(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the distinct values, ascending."""
    # With counts, numpy 2.4 sorts; without, it hashes, which takes many times as long, and the memory of a hash table.
    return np.unique(values, return_counts=True)[0]


def split_rows(digests: Digests, test_split_size: float | int, seed: int) -> tuple[IntArray, IntArray]:
    """Choose held-out rows by content and seed, independent of their order; equal rows are on the same side.

    The number is exact, unless every remaining group of equal rows is larger than the remainder; then it is lower.

    Args:
        digests: Digest of each row.
        test_split_size: Share of the rows, above 0 and below 1, or number of rows, from 1.
        seed: Seed of the choice.

    Returns:
        Positions of the training and of the held-out rows, ascending.

    Raises:
        DataError: The split would leave no row on one side.
    """
    where, num_rows = f"test_split_size: {test_split_size}", len(digests)
    num_test = round(num_rows * test_split_size) if test_split_size < 1 else int(test_split_size)
    if not 0 < num_test < num_rows:
        found = f"of {num_rows:,} rows, {num_test:,} would be held out and {max(num_rows - num_test, 0):,} trained on"
        raise DataError(Problem(where, found, "choose a size that leaves rows on both sides"))
    groups, group_of, sizes = np.unique(digests, return_inverse=True, return_counts=True)
    key, content = seed.to_bytes(16, signed=True), memoryview(groups.tobytes())
    size = _DIGEST.itemsize
    draws = (
        hashlib.blake2b(content[at : at + size], key=key, digest_size=size).digest()
        for at in range(0, len(content), size)
    )
    is_drawn = np.zeros(len(groups), np.bool_)
    num_drawn = 0
    # In order of the draws: a group of equal rows is held out as a whole, if it still fits.
    for group in np.argsort(np.fromiter(draws, _DIGEST, len(groups))):
        if num_drawn + sizes[group] <= num_test:
            is_drawn[group] = True
            num_drawn += sizes[group]
        if num_drawn == num_test:
            break
    if not num_drawn:
        together = "rows that are equal or have one prompt stay together"
        found = f"no {num_test:,} of the {num_rows:,} rows can be held out: {together}"
        raise DataError(Problem(where, found, "hold out more, or remove duplicates"))
    is_test = is_drawn[group_of]
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def refuse_overlap(
    train_digests: Digests,
    eval_digests: Digests,
    find_train_places: FindPlaces,
    find_eval_places: FindPlaces,
    relation: str = SHARES_ROW,
) -> None:
    """Raise if training rows are also held-out rows, naming the first few.

    Args:
        train_digests: Digests of the training rows; read in blocks, so they may be memory-mapped.
        eval_digests: Digests of the held-out rows.
        find_train_places: Called with the positions of the named training rows; not called without overlap.
        find_eval_places: The same for the held-out rows.
        relation: Predicate of such training rows in the error.

    Raises:
        DataError: There are such rows.
    """
    held_out, positions = np.unique(eval_digests, return_index=True)
    num_rows, pairs = 0, list[tuple[int, int]]()
    for start in range(0, len(train_digests) if len(held_out) else 0, _ROWS_AT_ONCE):
        block = train_digests[start : start + _ROWS_AT_ONCE]
        # `np.unique` has sorted `held_out`; `clip` is for digests above the largest of them.
        nearest = held_out.searchsorted(block)
        shared = np.flatnonzero(held_out.take(nearest, mode="clip") == block)
        num_rows += len(shared)
        first = shared[: _MAX_PAIRS - len(pairs)]
        pairs += zip((start + first).tolist(), positions[nearest[first]].tolist(), strict=True)
    if not pairs:
        return
    train_places = find_train_places({train for train, _ in pairs})
    eval_places = find_eval_places({equal for _, equal in pairs})
    named = ", ".join(f"{train_places[train]} = {eval_places[equal]}" for train, equal in pairs)
    found = f"{num_rows:,} training rows {relation}: {named}{', ...' if num_rows > len(pairs) else ''}"
    remedy = "remove them from one side, or set `allow_eval_overlap: true`"
    raise DataError(Problem(train_places[pairs[0][0]], found, remedy))


def _select_content(chat: Any) -> Any:
    if chat is None or isinstance(chat, str):
        return chat
    turns = [{key: turn[key] for key in turn if key in _CONTENT_KEYS} for turn in chat]
    for turn in turns:
        if "tool_calls" in turn:
            turn["tool_calls"] = [call["function"] for call in turn["tool_calls"]]
    return turns


def _strip(value: Any) -> Any:
    if isinstance(value, str):
        return value.strip()
    # Types of parsed JSON: the abstract `Mapping` would take half of the time.
    if isinstance(value, dict):
        return {key: item.strip() if isinstance(item, str) else _strip(item) for key, item in value.items()}
    return [_strip(item) for item in value] if isinstance(value, (list, tuple)) else value
