"""Token sets: content, kills and disk errors during preparation, and streams."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.faults.moments import kill_at_call
from tests.rows import read_files

from recipes_lib.data import store
from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.packed import encoding
from recipes_lib.data.sources.rows import RawRow
from recipes_lib.data.store import find_set
from recipes_lib.data.tokens import shards as token_shards
from recipes_lib.data.tokens import token_sets
from recipes_lib.data.tokens.shards import TokenSource
from recipes_lib.data.tokens.token_sets import Corpus, load_corpora, make_token_set
from recipes_lib.errors import DataError, Problem

KEY = "0123456789abcdef" * 4
NUM_ROWS = 60


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Shards of 64 tokens and chunks of four documents."""
    monkeypatch.setattr(token_shards, "SHARD_BYTES", 128)
    monkeypatch.setattr(encoding, "ROWS_PER_CHUNK", 4)


@pytest.fixture
def make(build_config, write_rows, tiny_tokenizer, monkeypatch):
    """Make the token set of 60 texts, or of another file, in a root folder."""

    def load_encoder():
        return RowEncoder(tiny_tokenizer, loss_on="all")

    # Of documents, a column beside the text is no answer.
    texts = [
        {"text": f"Text {number}: " + "the baker opens " * (number % 7), "target": "two words"}
        for number in range(NUM_ROWS)
    ]
    path = write_rows("texts.jsonl", texts)

    def run(root: Path, num_tokens=None, on_rows=lambda *_: None, path=path, **options):
        (corpus,) = load_corpora(build_config(dataset_name=str(path), **options))
        corpus = dataclasses.replace(corpus, num_tokens=num_tokens)
        monkeypatch.setattr(token_sets, "show_progress", lambda _: nullcontext(on_rows))
        return make_token_set(root, KEY, identify(corpus), corpus, load_encoder)

    make = run
    make.rows = lambda **options: list(load_corpora(build_config(**options))[0].rows())
    return make


def identify(corpus: Corpus) -> dict[str, dict[str, str]]:
    """Return the inputs of the key that the preparation reads."""
    return {"sources": {"documents": corpus.source.fingerprint()}}


def read_documents(prepared, side) -> list[list[int]]:
    source = TokenSource("a source", prepared.path / side, **prepared.manifest[side])
    ids, start, documents = source.read(0, source.num_tokens).tolist(), 0, []
    for length in source.read_document_lengths(0, source.num_tokens).tolist():
        documents.append(ids[start : start + length])
        start += length
    return documents


@pytest.mark.parametrize("size", [None, 0.3, 9])
def test_token_set_splits_encoder_output(make, tmp_path, tiny_tokenizer, size):
    prepared = make(tmp_path / "root", test_split_size=size)
    rows = make.rows(dataset_name=str(tmp_path / "texts.jsonl"))
    expected = [row.input_ids.tolist() for row in RowEncoder(tiny_tokenizer).encode(rows)]
    train, held_out = read_documents(prepared, "train"), read_documents(prepared, "eval")
    assert sorted(train + held_out) == sorted(expected)
    for side in (train, held_out):
        assert side == [document for document in expected if document in side]
    if size is None or size >= 1:
        assert len(held_out) == (size or 0)
    assert len(held_out) > 0 or size is None


def test_progress_reports_documents_and_tokens(make, tmp_path):
    counts = []
    prepared = make(tmp_path / "root", on_rows=lambda *pair: counts.append(pair), test_split_size=0.3)
    sides = [prepared.manifest[side] for side in ("train", "eval")]
    assert counts[0] == (0, 0)
    assert counts == sorted(counts)
    assert counts[-1] == tuple(sum(side[name] for side in sides) for name in ("num_documents", "num_tokens"))


MOMENTS = [
    *((token_sets._Sides, "append", call) for call in (1, 9)),
    (token_shards.TokenWriter, "_open_shard", 5),
    *((token_sets, "replace_record", call) for call in (1, 4)),
    *((os, "fsync", call) for call in (1, 30)),
    (store, "replace_record", 2),
    (os, "replace", 1),
]
MORE_MOMENTS = [
    *((token_sets._Sides, "append", call) for call in (2, 5)),
    (token_shards.TokenWriter, "_open_shard", 2),
    (token_sets, "replace_record", 2),
    *((os, "fsync", call) for call in (7, 8)),
    (store, "replace_record", 1),
]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("module", "function", "call", "num_tokens"),
    [
        *((*moment, None) for moment in MOMENTS),
        *((*moment, 700) for moment in MOMENTS[1::3]),
        *(pytest.param(*moment, 700, marks=pytest.mark.slow) for moment in MORE_MOMENTS),
    ],
)
def test_killed_preparation_resumes_to_equal_bytes(make, tmp_path, module, function, call, num_tokens):
    root, options = tmp_path / "root", {"test_split_size": 0.3, "num_tokens": num_tokens}
    whole = make(tmp_path / "whole", **options)
    kill_at_call(lambda: make(root, **options), module, function, call)
    assert find_set(root, KEY) is None
    assert read_files(make(root, **options).path) == read_files(whole.path)
    assert [path.name for path in root.iterdir() if not path.name.endswith(".lock")] == [KEY[:16]]
    assert not list(whole.path.rglob(".*"))


@pytest.mark.multiprocess
@pytest.mark.parametrize(("call", "num_tokens"), [(2, None), (9, 700)])
def test_dropped_rows_are_counted_alike_after_resume(make, write_rows, tmp_path, call, num_tokens):
    rows = [{"prompt": f"Text {at}: ", "completion": "the baker " * (at % 7 + 1)} for at in range(NUM_ROWS)]
    sound = write_rows("sound.jsonl", rows)
    for at in (0, 5, 17, 18, 19, 20, 40):
        # Rows that cannot be read, and rows that cannot be encoded.
        rows.insert(at, {"prompt": "Text:", "completion": None if at % 2 else "an end<|endoftext|> inside"})
    options = {"num_tokens": num_tokens, "broken_rows": "drop", "max_broken_fraction": 0.2}
    path, root = write_rows("broken.jsonl", rows), tmp_path / "root"
    whole = make(tmp_path / "whole", path=path, **options)
    kill_at_call(lambda: make(root, path=path, **options), token_sets._Sides, "append", call)
    assert read_files(make(root, path=path, **options).path) == read_files(whole.path)
    alone = make(tmp_path / "alone", path=sound, num_tokens=num_tokens)
    assert read_documents(whole, "train") == read_documents(alone, "train")
    if num_tokens is None:
        assert whole.manifest["broken_rows"] == {"num_rows": NUM_ROWS + 7, "num_broken": 7}
    with pytest.raises(DataError, match=r"are broken, and max_broken_fraction is 0\.01"):
        make(tmp_path / "strict", path=path, broken_rows="drop")
    with pytest.raises(DataError, match=r"broken\.jsonl:1: "):
        make(tmp_path / "error", path=path)


@pytest.mark.multiprocess
def test_full_shards_are_not_tokenised_again(make, tmp_path, tokenized):
    kill_at_call(lambda: make(tmp_path / "root"), token_sets._Sides, "append", 13)
    before, counts = sum(tokenized), []
    make(tmp_path / "root", on_rows=lambda *pair: counts.append(pair))
    assert counts[0][0] == 48, "each chunk fills a shard, so that all of them are kept"
    assert sum(tokenized) - before == NUM_ROWS - 48


def interrupt(make, root: Path, monkeypatch) -> Path:
    """Interrupt the preparation of a set before its publication, and return the staging folder."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store, "publish_set", stop)
        with pytest.raises(KeyboardInterrupt):
            make(root, test_split_size=0.3)
    (partial,) = root.glob(".*.partial")
    return partial


def lose_a_shard(partial: Path) -> None:
    (partial / "train" / "tokens-00001.bin").unlink()


def lose_the_end_of_a_file(partial: Path) -> None:
    os.truncate(partial / "eval" / "document_ends.bin", 8)


def lose_the_progress(partial: Path) -> None:
    (partial / ".progress.json").unlink()


def break_the_progress(partial: Path) -> None:
    (partial / ".progress.json").write_text('{"num_rows": 4')


@pytest.mark.parametrize(
    "damage", [lose_a_shard, lose_the_end_of_a_file, lose_the_progress, break_the_progress, lambda partial: None]
)
def test_damaged_partial_set_is_restarted(make, tmp_path, monkeypatch, damage, tokenized):
    whole = make(tmp_path / "whole", test_split_size=0.3)
    damage(interrupt(make, tmp_path / "root", monkeypatch))
    before = sum(tokenized)
    assert read_files(make(tmp_path / "root", test_split_size=0.3).path) == read_files(whole.path)
    num_tokenized = sum(tokenized) - before
    assert num_tokenized == (NUM_ROWS if damage.__name__ != "<lambda>" else 0)


def test_progress_on_a_failing_disk_is_kept(make, tmp_path, monkeypatch):
    def fail(path, *_):
        raise DataError(Problem(str(path), "cannot be read")) from OSError(errno.EIO, os.strerror(errno.EIO))

    progress = interrupt(make, tmp_path / "root", monkeypatch) / ".progress.json"
    monkeypatch.setattr("recipes_lib.data.tokens.token_sets.read_record", fail)
    with pytest.raises(DataError, match="Input/output error"):
        make(tmp_path / "root", test_split_size=0.3)
    assert progress.exists()


@pytest.mark.parametrize(("failing", "call"), [("fsync", 1), ("fsync", 3), ("replace", 1)])
def test_full_disk_is_data_error_and_next_call_resumes(make, tmp_path, monkeypatch, failing, call):
    whole = make(tmp_path / "whole")
    original, calls = getattr(os, failing), 0

    def fail(*args):
        nonlocal calls
        calls += 1
        if calls >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(os, failing, fail)
        with pytest.raises(DataError, match="free some space, or set prepared_dir") as raised:
            make(tmp_path / "root")
    assert len(raised.value.problems) == 1
    assert find_set(tmp_path / "root", KEY) is None
    assert read_files(make(tmp_path / "root").path) == read_files(whole.path)


@pytest.mark.parametrize("size", [None, 0.3, 5])
def test_broken_documents_are_raised_together_and_leave_no_files(make, write_rows, tmp_path, size):
    rows = [{"text": f"text {number}"} for number in range(40)]
    rows[3] = {"text": ""}
    rows[30] = {"text": ["not a text"]}
    with pytest.raises(DataError) as raised:
        make(tmp_path / "root", path=write_rows("broken.jsonl", rows), test_split_size=size)
    assert [problem.where.rpartition(":")[2] for problem in raised.value.problems] == ["4", "31"]
    assert [path for path in (tmp_path / "root").iterdir() if not path.name.endswith(".lock")] == []


@dataclasses.dataclass(frozen=True)
class Stream:
    """A streamed source that fails once, before the rows whose indices are in ``breaks``."""

    breaks: list[int]
    name = "a/stream"
    streaming = True

    def fingerprint(self):
        return "the commit"

    def rows(self):
        for index in range(NUM_ROWS):
            if [index] == self.breaks:
                self.breaks.clear()
                raise DataError(Problem(self.name, "the connection broke off"))
            yield RawRow(f"{self.name} row {index}", index, {"text": f"text {index} of the baker"})


def test_interrupted_stream_resumes_from_full_shards(tmp_path, tiny_tokenizer, tokenized):
    def run(root, *breaks):
        corpus = Corpus(name="a/stream", source=Stream(list(breaks)), format="auto", num_tokens=400)
        encoder = RowEncoder(tiny_tokenizer, loss_on="all")
        return lambda: make_token_set(root, KEY, identify(corpus), corpus, lambda: encoder)

    whole, broken = run(tmp_path / "whole")(), run(tmp_path / "root", 30)
    with pytest.raises(DataError, match="broke off"):
        broken()
    before = sum(tokenized)
    assert read_files(broken().path) == read_files(whole.path)
    assert sum(tokenized) - before <= NUM_ROWS - 28


def test_data_changed_during_preparation_is_refused(make, write_rows, tmp_path):
    path = write_rows("changing.jsonl", [{"text": f"text {number}"} for number in range(40)])

    def grow(documents, _):
        if documents:
            with path.open("a") as file:
                file.write('{"text": "one more"}\n')

    with pytest.raises(DataError, match=r"changing\.jsonl: the data changed while they were prepared"):
        make(tmp_path / "root", path=path, on_rows=grow)
    assert [path for path in (tmp_path / "root").iterdir() if not path.name.endswith(".lock")] == []


def test_set_written_by_two_processes_is_refused(make, tmp_path):
    def intrude(documents, _):
        if documents:
            (shard, *_rest) = (tmp_path / "root").glob(".*.partial/train/tokens-00000.bin")
            with shard.open("ab") as file:
                file.write(b"theirs")

    with pytest.raises(DataError, match="two processes have written the same set"):
        make(tmp_path / "root", on_rows=intrude)
    assert [path for path in (tmp_path / "root").iterdir() if not path.name.endswith(".lock")] == []
    assert make(tmp_path / "root").is_new


@pytest.mark.parametrize(("rows_per_chunk", "num_tokens"), [(1, 500), (3, 1), (3, 500), (100, 500), (3, 10**6)])
def test_stream_is_read_to_document_that_reaches_budget(make, tmp_path, monkeypatch, rows_per_chunk, num_tokens):
    monkeypatch.setattr(encoding, "ROWS_PER_CHUNK", rows_per_chunk)
    prepared = make(tmp_path / "root", num_tokens=num_tokens, test_split_size=0.3)
    whole = make(tmp_path / "whole", test_split_size=0.3)
    train = read_documents(prepared, "train")
    assert train == read_documents(whole, "train")[: len(train)]
    total = sum(map(len, train))
    assert total - len(train[-1]) < num_tokens
    assert total >= min(num_tokens, whole.manifest["train"]["num_tokens"])
    held_out = read_documents(prepared, "eval")
    assert held_out == read_documents(whole, "eval")[: len(held_out)]


def test_writers_without_locks_use_separate_folders(make, tmp_path, monkeypatch):
    partial = interrupt(make, tmp_path / "root", monkeypatch)
    shutil.rmtree(partial / "train")

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert make(tmp_path / "root", test_split_size=0.3).is_new
    assert find_set(tmp_path / "root", KEY, check_bytes=True)
    assert partial.exists(), "a living process may be writing there"
    assert not list((tmp_path / "root").glob(".*.tmp"))
