"""Written shards: text, chats, metadata and tokens."""

import json
import math
import random

import pyarrow.parquet as pq
import pytest
from datatrove.data import Document
from tests.corpus.texts import make_text, read_corpus
from tokenizers import Tokenizer

from recipes_lib.config.corpus_keys import CorpusConfig
from recipes_lib.corpus.cleaning import make_corpus
from recipes_lib.corpus.documents import CHAT, HTML, SOURCE, Ledger, read_shard, split_chat, write_shard
from recipes_lib.corpus.output import WriteClean, load_tokenizer, write_lines
from recipes_lib.errors import DataError


def test_json_lines_have_text_id_source_and_metadata(tmp_path):
    documents = [Document(text="é\n", id="1", metadata={SOURCE: "s", "source": "u"})]
    write_lines(tmp_path / "a.jsonl", documents)
    (line,) = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {"text": "é\n", "id": "1", "source": "s", "metadata": {"source": "u"}}


def test_metadata_that_json_or_utf8_lacks_is_written_as_null_or_escaped(tmp_path):
    metadata = {SOURCE: "s", "score": math.nan, "more": [{"least": -math.inf, "n": 1, "é\ud83d": "é\udc00"}]}
    document = Document(text="a", id="1", metadata=metadata)
    write_lines(tmp_path / "a.jsonl", [document])
    write_shard(tmp_path / "a.parquet", iter([document]))
    expected = {"score": None, "more": [{"least": None, "n": 1, "é\\ud83d": "é\\udc00"}]}
    refuse = {"parse_constant": pytest.fail}
    assert json.loads((tmp_path / "a.jsonl").read_text(), **refuse)["metadata"] == expected
    (stored,) = pq.read_table(tmp_path / "a.parquet")["metadata"].to_pylist()
    assert json.loads(stored, **refuse) == expected


def test_non_finite_chat_field_is_written_as_null(tmp_path):
    text, left = split_chat({"messages": [{"role": "user", "content": "a", "score": math.nan}]})
    write_lines(tmp_path / "a.jsonl", [Document(text=text, id="1", metadata={SOURCE: "s", CHAT: left})])
    (message,) = json.loads((tmp_path / "a.jsonl").read_text())["messages"]
    assert message == {"role": "user", "content": "a", "score": None}


def test_page_that_was_not_extracted_has_no_mark_in_its_metadata(tmp_path):
    page = Document(text="<p>a</p>", id="1", metadata={SOURCE: "s", HTML: True})
    WriteClean(tmp_path, CorpusConfig(), Ledger([], 0)).run(iter([page]))
    assert [document.metadata for document in read_shard(tmp_path / "00000.parquet")] == [{SOURCE: "s"}]


def test_load_tokenizer_takes_folder_or_file(tiny_tokenizer, tiny_tokenizer_dir, tmp_path):
    text = "hello world " * 50
    expected = len(tiny_tokenizer(text, add_special_tokens=False)["input_ids"])
    for name in (tiny_tokenizer_dir, tiny_tokenizer_dir / "tokenizer.json"):
        assert len(load_tokenizer(str(name)).encode(text, add_special_tokens=False)) == expected
    assert load_tokenizer(None) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer_name_or_path: .*tokenizer\.json cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_chats_that_differ_only_in_calls_tools_or_reasoning_are_no_duplicates(tmp_path):
    asked = {"role": "user", "content": make_text(random.Random(0), 50)}
    answer = {"role": "assistant", "content": "Done."}
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in "ab"]
    answers = [answer, *({**answer, "tool_calls": [call]} for call in calls)]
    answers += [{**answer, "reasoning_content": make_text(random.Random(1), 50)}]
    chats = [{"messages": [asked, turn]} for turn in answers] + [{"messages": [asked, answer], "tools": calls}]
    lines = "".join(json.dumps(chat) + "\n" for chat in chats)
    # The copies have identifiers of their calls, as APIs draw them.
    lines += lines.replace('"tool_calls": [{', '"tool_calls": [{"id": "call_1", ')
    (tmp_path / "chat.jsonl").write_text(lines)
    source = {"name": str(tmp_path / "chat.jsonl"), "kind": "chat"}
    make_corpus(CorpusConfig(sources=[source], output_dir=str(tmp_path / "out"), workers=1))
    kept = [{name: row[name] for name in ("messages", "tools") if name in row} for row in read_corpus(tmp_path / "out")]
    assert kept == chats


def test_tokenizer_neither_truncates_nor_pads(tiny_tokenizer_dir, tmp_path):
    """As files of sentence encoders do, whose counts of tokens would be wrong."""
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer_dir / "tokenizer.json"))
    expected = [len(tokenizer.encode(text).ids) for text in ("a", "seven days in a week")]
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    assert [len(one.ids) for one in loaded.encode_batch(["a", "seven days in a week"])] == expected
