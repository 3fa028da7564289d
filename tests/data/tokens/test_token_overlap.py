"""Detection of documents that are both trained on and held out, and their locations."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes_lib.data.sources import splits
from recipes_lib.data.sources.splits import compute_row_digest, find_overlap, refuse_overlap
from recipes_lib.data.tokens.shards import TokenSource, TokenWriter
from recipes_lib.data.tokens.token_data import find_places
from recipes_lib.data.tokens.token_sets import halve_digests, load_corpora
from recipes_lib.errors import DataError

digest_lists = st.lists(st.integers(0, 12) | st.integers(2**64 - 3, 2**64 - 1), min_size=1, max_size=30)


def write(folder, digests) -> TokenSource:
    ones = np.ones(len(digests), np.int64)
    with TokenWriter(folder, num_ids=2) as writer:
        writer.append(ones.astype(np.uint32), ones, np.array(digests, np.uint64))
        return TokenSource("a source", folder, **writer.describe())


@settings(max_examples=40)
@given(digest_lists, digest_lists, st.integers(1, 7))
def test_overlap_is_independent_of_block_size(tmp_path_factory, train, held_out, at_once):
    folder = tmp_path_factory.mktemp("overlap")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(splits, "_ROWS_AT_ONCE", at_once)
        sides = write(folder / "train", train), write(folder / "held_out", held_out)
        found = find_overlap(*(side.digests for side in sides))
    expected = [(at, held_out.index(digest)) for at, digest in enumerate(train) if digest in held_out]
    assert (found.num_rows, found.pairs) == (len(expected), expected[:5])


def test_first_overlaps_are_located(build_config, tmp_path):
    (tmp_path / "train.txt").write_text("".join(f"line {number}\n\n" for number in range(9)))
    (tmp_path / "held_out.txt").write_text("something else\nline 8\nline 5\n")
    train, held_out = (
        load_corpora(build_config(dataset_name=str(tmp_path / f"{name}.txt"), text_documents="line"))[0]
        for name in ("train", "held_out")
    )
    tokens = [
        write(tmp_path / side, halve_digests([compute_row_digest(row) for row in corpus.rows()]))
        for side, corpus in (("train", train), ("held_out", held_out))
    ]
    find_train, find_held_out = (partial(find_places, *side) for side in zip((train, held_out), tokens, strict=True))
    with pytest.raises(DataError, match="2 training rows are held-out rows too") as raised:
        refuse_overlap(tokens[0].digests, tokens[1].digests, find_train, find_held_out)
    text = str(raised.value)
    assert f"{train.name}:11 = {held_out.name}:3, {train.name}:17 = {held_out.name}:2" in text
    assert "allow_eval_overlap" in text
