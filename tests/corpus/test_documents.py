"""Counts, samples and intermediate shards of documents."""

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from datatrove.data import Document

from recipes_lib.corpus.documents import SOURCE, Apply, Ledger, Samples, read_shard, write_shard
from recipes_lib.errors import DataError


class Shorten:
    name = "shorten"

    def apply(self, document, found):
        found["seen"] += 1
        if document.text == "bad":
            return "is bad"
        document.text = document.text.removesuffix("!")
        return None


def run(texts, mode="apply"):
    ledger = Ledger(["shorten"], 2)
    documents = [Document(text=text, id=str(at), metadata={SOURCE: "s"}) for at, text in enumerate(texts)]
    kept = list(Apply(Shorten(), mode, ledger).run(iter(documents)))
    return kept, ledger


TEXTS = ["good", "bad", "é!", "!", "good!"]


def test_apply_counts_every_document_once():
    kept, ledger = run(TEXTS)
    tally = ledger.tallies["shorten"]
    assert [document.text for document in kept] == ["good", "é", "good"]
    assert (tally.documents_in, tally.documents_out, tally.changed) == (5, 3, 3)
    assert tally.removed == {"is bad": 1, "nothing left": 1}
    assert tally.removed_bytes == {"is bad": 3, "nothing left": 1}
    assert tally.bytes_in == sum(len(text.encode()) for text in TEXTS)
    assert tally.bytes_out == sum(len(document.text.encode()) for document in kept)
    assert tally.documents_in == tally.documents_out + sum(tally.removed.values())


def test_annotate_mode_changes_nothing():
    kept, ledger = run(TEXTS, "annotate")
    assert [document.text for document in kept] == TEXTS
    flags = [document.metadata.get("flags") for document in kept]
    assert flags == [None, ["shorten: is bad"], ["shorten: changed"], ["shorten: nothing left"], ["shorten: changed"]]
    assert ledger.tallies["shorten"].found == {"seen": 5, "is bad": 1, "nothing left": 1}


@pytest.mark.parametrize("column", [None, "blue", ["blue", "red"]])
def test_annotate_mode_keeps_a_column_named_flags(column):
    document = Document(text="bad", id="0", metadata={SOURCE: "s", "flags": column})
    (kept,) = Apply(Shorten(), "annotate", Ledger(["shorten"], 2)).run(iter([document]))
    assert kept.metadata["flags"] == [*(column if isinstance(column, list) else [column]), "shorten: is bad"]


def test_samples_are_independent_of_order_and_tasks():
    documents = [Document(text=f"text {at}", id=f"d{at}") for at in range(100)]
    shuffled = random.Random(0).sample(documents, 100)
    taken = []
    for order in (documents, shuffled):
        whole, merged = Samples(3), Samples(3)
        for document in [*order, *order]:  # Two documents may have the same id.
            whole.add("x", document)
        for half in (order[:50], order[50:]):
            part = Samples(3)
            for document in half:
                part.add("x", document)
            for sample in part.list()["x"]:
                merged.merge("x", sample)
        taken += [whole.list(), merged.list()]
    assert len(taken[0]["x"]) == 3
    assert all(samples == taken[0] for samples in taken)
    assert Samples(0).list() == {}


def test_shard_round_trips(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents = [
        Document(text=f"é {at}", id=str(at), metadata={SOURCE: "s", "source": None, "n": {"a": [at]}})
        for at in range(1200)
    ]
    path = Path("run:1/a.parquet")  # No address.
    path.parent.mkdir()
    write_shard(path, iter(documents))
    assert [(d.text, d.id, d.metadata) for d in read_shard(path)] == [(d.text, d.id, d.metadata) for d in documents]
    write_shard(path, iter([]))
    assert list(read_shard(path)) == []
    path.write_bytes(b"PAR1 broken")
    with pytest.raises(DataError, match=r"\.work"):
        list(read_shard(path))


def test_row_group_is_bounded_in_rows_and_characters(tmp_path, monkeypatch):
    """Both are in memory as a whole, when written and when read."""
    monkeypatch.setattr("recipes_lib.corpus.documents._BATCH_ROWS", 3)
    monkeypatch.setattr("recipes_lib.corpus.documents._BATCH_CHARACTERS", 100)
    texts = [character * length for character, length in zip("abcdefg", (60, 60, 200, 1, 2, 3, 4), strict=True)]
    write_shard(path := tmp_path / "a.parquet", (Document(text=t, id=t[0], metadata={SOURCE: "s"}) for t in texts))
    groups = pq.read_metadata(path)
    assert [groups.row_group(at).num_rows for at in range(groups.num_row_groups)] == [2, 1, 3, 1]
    assert [document.text for document in read_shard(path)] == texts
