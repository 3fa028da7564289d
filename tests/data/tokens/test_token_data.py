"""Token data of a pretraining run: preparation per source, held-out tokens, and collected problems."""

from __future__ import annotations

import functools
import json

import pytest
from rich.console import Console

from recipes_lib.data.packed import encoding
from recipes_lib.data.tokens.token_data import prepare_tokens
from recipes_lib.errors import DataError


@pytest.fixture
def build(build_config, write_rows, make_chats, tmp_path):
    """Build a configuration over 40 texts and 30 chats with these weights and rows of 16 tokens."""
    write_rows("texts.jsonl", [{"text": f"Text {number} of the baker"} for number in range(40)])
    write_rows("chats.jsonl", make_chats(30))

    def run(*weights, **options):
        names = [str(tmp_path / f"{name}.jsonl") for name in ("texts", "chats")]
        entries = [{"name": name} for name in names]
        for entry, weight in zip(entries, weights, strict=False):
            entry["weight"] = weight
        if "dataset_name" not in options:
            options = {"dataset_mixture": entries} | options
        return build_config(**{"max_length": 16} | options)

    return run


def decode(source, tokenizer) -> str:
    return tokenizer.decode(source.read(0, source.num_tokens))


def test_token_sources_hold_documents_and_names(build, load_tokenizer, tiny_tokenizer, tmp_path):
    data = prepare_tokens(build(), load_tokenizer)
    texts, chats = data.train
    assert texts.name == str(tmp_path / "texts.jsonl")
    assert (texts.num_documents, chats.num_documents) == (40, 30)
    assert decode(texts, tiny_tokenizer) == "".join(f"Text {number} of the baker<|endoftext|>" for number in range(40))
    assert decode(chats, tiny_tokenizer).startswith(
        "<|im_start|>user\nQuestion 0: ?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [source.dtype for source in data.train] == ["<u2", "<u2"]
    assert not data.eval
    assert load_tokenizer.calls == 1


def test_weights_are_configured_or_by_size(build, load_tokenizer):
    sizes = [source.num_tokens for source in prepare_tokens(build(), load_tokenizer).train]
    assert prepare_tokens(build(), load_tokenizer).weights == pytest.approx([size / sum(sizes) for size in sizes])
    assert prepare_tokens(build(3.0), load_tokenizer).weights == [0.75, 0.25]


def test_unrelated_option_does_not_tokenise_again(build, load_tokenizer, tokenized):
    first = prepare_tokens(build(), load_tokenizer)
    before = sum(tokenized)
    for config in (build(), build(1.0, 9.0), build(max_length=32), build(seed=3)):
        again = prepare_tokens(config, load_tokenizer)
        assert again.train == first.train
        assert not again.is_new
    assert (first.is_new, load_tokenizer.calls, sum(tokenized)) == (True, 1, before)


def test_only_new_source_is_tokenised(build, load_tokenizer, tmp_path, write_rows, tokenized):
    prepare_tokens(build(), load_tokenizer)
    before = sum(tokenized)
    path = write_rows("more.jsonl", [{"text": "one more text about rivers and sand and snow"}])
    names = [str(tmp_path / "chats.jsonl"), str(path), str(tmp_path / "texts.jsonl")]
    data = prepare_tokens(build(dataset_mixture=[{"name": name} for name in names]), load_tokenizer)
    assert [source.name for source in data.train] == names
    assert sum(tokenized) == before + 1
    assert data.is_new


def test_held_out_tokens_are_kept_per_source(build, load_tokenizer, tiny_tokenizer):
    whole = prepare_tokens(build(), load_tokenizer)
    data = prepare_tokens(build(test_split_size=0.3), load_tokenizer)
    assert list(data.eval) == [source.name for source in data.train]
    for source, everything in zip(data.train, whole.train, strict=True):
        held_out = data.eval[source.name]
        assert source.num_documents + held_out.num_documents == everything.num_documents
        assert source.num_tokens + held_out.num_tokens == everything.num_tokens
        ends = "<|endoftext|>" if "texts" in source.name else "<|im_start|>user"
        documents = [set(filter(None, decode(side, tiny_tokenizer).split(ends))) for side in (source, held_out)]
        assert not documents[0] & documents[1]


def test_dataset_test_split_is_single_held_out_source(build, load_tokenizer, write_rows):
    path = str(write_rows("held_out.jsonl", [{"text": "nothing of the kind"}]))
    data = prepare_tokens(build(dataset_test_split=path), load_tokenizer)
    assert {name: source.num_documents for name, source in data.eval.items()} == {path: 1}
    assert data.record["held_out"]["name"] == path
    assert load_tokenizer.calls == 1


def test_document_overlap_is_refused_unless_allowed(build, load_tokenizer, write_rows):
    rows = [{"text": "nothing of the kind"}, {"text": "Text 7 of the baker "}, {"text": "Text 3 of the baker"}]
    path = write_rows("held_out.jsonl", rows)
    for _ in range(2):  # The second call finds the set in the store.
        with pytest.raises(DataError) as raised:
            prepare_tokens(build(dataset_test_split=str(path)), load_tokenizer)
        text = str(raised.value)
        assert "2 training rows are held-out rows too" in text
        assert f"texts.jsonl:4 = {path}:3" in text
        assert f"texts.jsonl:8 = {path}:2" in text
    allowed = prepare_tokens(build(dataset_test_split=str(path), allow_eval_overlap=True), load_tokenizer)
    assert allowed.eval[str(path)].num_documents == 3


def test_document_of_two_sources_is_held_out_of_both_or_refused(build, load_tokenizer, write_rows):
    path = write_rows("copies.jsonl", [{"text": f"Text {number} of the baker"} for number in range(0, 40, 4)])
    mixture = [{"name": str(path.with_name("texts.jsonl"))}, {"name": str(path)}]
    shares = prepare_tokens(build(dataset_mixture=mixture, test_split_size=0.3), load_tokenizer)
    held_out = {digest for source in shares.eval.values() for digest in source.digests.tolist()}
    assert not held_out & {digest for source in shares.train for digest in source.digests.tolist()}
    # The fourth of 10 draws is above the fourth of 40, so that a document held out of the copies is a text to train on.
    with pytest.raises(DataError, match=r"training rows are held-out rows too: .*texts.jsonl:\d+ = .*copies.jsonl:\d+"):
        prepare_tokens(build(dataset_mixture=mixture, test_split_size=4), load_tokenizer)
    prepare_tokens(build(dataset_mixture=mixture, test_split_size=4, allow_eval_overlap=True), load_tokenizer)


def test_problems_of_all_sources_are_raised_together(build, load_tokenizer, write_rows, tokenized):
    write_rows("texts.jsonl", [{"text": "a"}, {"text": ""}, {"text": 3}])
    held_out = write_rows("held_out.jsonl", [{"text": "b"}, {"text": []}])
    with pytest.raises(DataError) as raised:
        prepare_tokens(build(dataset_test_split=str(held_out)), load_tokenizer)
    places = [problem.where.rpartition("/")[2] for problem in raised.value.problems]
    assert places == ["texts.jsonl:2", "texts.jsonl:3", "held_out.jsonl:2"]
    before = sum(tokenized)
    write_rows("texts.jsonl", [{"text": "a text that is long enough by far for a row of sixteen tokens"}])
    prepare_tokens(build(), load_tokenizer)
    assert sum(tokenized) == before + 1


def test_source_shorter_than_max_length_is_error(build, load_tokenizer, write_rows):
    path = write_rows("texts.jsonl", [{"text": "a"}])
    with pytest.raises(DataError) as raised:
        prepare_tokens(build(), load_tokenizer)
    (problem,) = raised.value.problems
    assert problem.where == str(path)
    assert problem.found == "2 tokens to train on, and a row has max_length: 16"
    assert "lower max_length" in problem.remedy
    assert prepare_tokens(build(max_length=2), load_tokenizer).train[0].num_tokens == 2


def test_source_held_out_entirely_is_error(build, load_tokenizer):
    with pytest.raises(DataError, match=r"holds out all \d+ documents\n.*`eval_datasets`"):
        prepare_tokens(build(test_split_size=1000), load_tokenizer)


def test_share_that_holds_out_nothing_is_refused(build, load_tokenizer):
    with pytest.raises(DataError, match=r"no document of \d+ is held out\n.*`eval_datasets`"):
        prepare_tokens(build(test_split_size=1e-9), load_tokenizer)


def test_stream_is_read_only_as_far_as_needed(build, load_tokenizer, monkeypatch, tokenized):
    monkeypatch.setattr("recipes_lib.data.packed.encoding.ROWS_PER_CHUNK", 2)
    whole = prepare_tokens(build(), load_tokenizer)
    before = sum(tokenized)
    data = prepare_tokens(build(1.0, 3.0, dataset_streaming=True), load_tokenizer, num_tokens=160)
    assert sum(tokenized) - before < 40
    for source, everything, share in zip(data.train, whole.train, (40, 120), strict=True):
        assert share + 16 <= source.num_tokens < everything.num_tokens
        assert source.read(0, source.num_tokens).tolist() == everything.read(0, source.num_tokens).tolist()
    assert not prepare_tokens(build(1.0, 3.0, dataset_streaming=True), load_tokenizer, num_tokens=160).is_new
    assert prepare_tokens(build(1.0, 3.0, dataset_streaming=True), load_tokenizer, num_tokens=320).is_new


def test_record_is_json_with_sources(build, load_tokenizer):
    data = prepare_tokens(build(3.0, test_split_size=4), load_tokenizer)
    record = json.loads(json.dumps(data.record))
    for part, source in zip(record["sources"], data.train, strict=True):
        assert part["name"] == source.name
        assert source.folder.is_relative_to(part["path"])
        assert part["path"].endswith(part["key"][:16])
        assert part["train"]["num_tokens"] == source.num_tokens
        assert part["eval"]["num_documents"] == 4
    assert [part["weight"] for part in record["sources"]] == [0.75, 0.25]
    assert record["held_out"] is None


def test_progress_is_shown_only_on_terminal(build, load_tokenizer, capfd, monkeypatch):
    prepare_tokens(build(), load_tokenizer)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(encoding, "Console", functools.partial(Console, force_terminal=True, width=200))
    prepare_tokens(build(test_split_size=4), load_tokenizer)
    shown = capfd.readouterr().err
    assert "40 rows" in shown
    assert "tokens/s" in shown
