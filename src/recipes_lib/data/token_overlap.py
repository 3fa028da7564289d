"""Documents that are trained on although they are held out."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Final

import numpy as np

from recipes_lib.data.splits import Overlap, compute_row_digest, refuse_overlap
from recipes_lib.data.token_documents import halve_digests
from recipes_lib.data.token_shards import TokenSource
from recipes_lib.data.token_sources import Corpus
from recipes_lib.errors import DataError

_MAX_PAIRS: Final = 5
_DOCUMENTS_AT_ONCE: Final = 1 << 20


def find_repeats(train: TokenSource, held_out: TokenSource) -> Overlap:
    """Find the training documents that say what a held-out one says; positions are numbers of documents."""
    digests, places = np.unique(held_out.read_digests(0, held_out.num_documents), return_index=True)
    num_documents = 0
    pairs: list[tuple[int, int]] = []
    for start in range(0, train.num_documents, _DOCUMENTS_AT_ONCE):
        found = train.read_digests(start, min(start + _DOCUMENTS_AT_ONCE, train.num_documents))
        nearest = digests.searchsorted(found)
        shared = np.flatnonzero(digests.take(nearest, mode="clip") == found)
        num_documents += len(shared)
        first = shared[: _MAX_PAIRS - len(pairs)]
        pairs += zip((start + first).tolist(), places[nearest[first]].tolist(), strict=True)
    return Overlap(num_documents, pairs)


def refuse_repeats(corpus: Corpus, train: TokenSource, held_out: Corpus, held_out_source: TokenSource) -> None:
    """Raise when documents are trained on although they are held out, naming the first few by their places.

    Args:
        corpus: What is trained on; nothing is held out of it, so that its rows are its documents.
        train: Its tokens.
        held_out: What is held out.
        held_out_source: Its tokens.

    Raises:
        DataError: There are such documents.
    """
    overlap = find_repeats(train, held_out_source)
    if overlap.num_rows:
        train_places = _find_places(corpus, train, [position for position, _ in overlap.pairs])
        held_out_places = _find_places(held_out, held_out_source, [position for _, position in overlap.pairs])
        refuse_overlap(overlap, train_places.__getitem__, held_out_places.__getitem__)


def _find_places(corpus: Corpus, tokens: TokenSource, positions: Collection[int]) -> dict[int, str]:
    """The places of the first rows that say what these documents do; reads the source again."""
    digests = {position: int(tokens.read_digests(position, position + 1)[0]) for position in positions}
    places: dict[int, str] = {}
    for row in corpus.rows():
        with suppress(DataError):  # A broken row is no document.
            digest = int(halve_digests([compute_row_digest(row)])[0])
            if digest in digests.values():
                places.setdefault(digest, row.where)
        if len(places) == len(set(digests.values())):
            break
    return {position: places[digest] for position, digest in digests.items()}
