"""Prompts of any dataset layout, rendered with a generation prompt, and the columns that rewards read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trl
from tests.rows import write_rows

from recipes_lib.config.loader import load_config
from recipes_lib.data import prompts
from recipes_lib.data.prompts import load_prompt_data
from recipes_lib.data.sources.rows import Remark
from recipes_lib.errors import DataError

QUESTION = [{"role": "user", "content": "What is 2 plus 2?"}]
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("Four.", "Five."))


@pytest.fixture
def load(tmp_path, tiny_tokenizer, tiny_tokenizer_dir):
    def load_rows(rows, held_out=(), **keys):
        path = tmp_path / "prompts.jsonl"
        write_rows(path, rows)
        if held_out:
            write_rows(tmp_path / "held_out.jsonl", held_out)
            keys["dataset_test_split"] = tmp_path / "held_out.jsonl"
        values = {
            "model_name_or_path": tiny_tokenizer_dir,
            "prepared_dir": tmp_path / "prepared",
            "dataset_name": path,
            "output_dir": tmp_path,
            "reward_funcs": "[a.b:c]",
            "response_length": 10,
            **keys,
        }
        config = load_config("ppo", [f"--{name}={value}" for name, value in values.items()])
        return load_prompt_data(config, tiny_tokenizer)

    return load_rows


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": QUESTION},
        {"messages": [*QUESTION, FOUR]},
        {"messages": [*QUESTION, FOUR], "label": True},
        {"prompt": QUESTION, "messages": [{"role": "user", "content": "ignored"}, FOUR]},
        {"prompt": "What is 2 plus 2?", "messages": [*QUESTION, FOUR]},
        {"question": "What is 2 plus 2?", "samples": str([*QUESTION, FOUR])},
        {"prompt": "What is 2 plus 2?", "conversations": [*QUESTION, FOUR]},
        {"prompt": "What is 2 plus 2?", "chosen": [*QUESTION, FOUR], "rejected": [*QUESTION, FIVE]},
        {"prompt": QUESTION, "chosen": [FOUR], "rejected": [FIVE]},
        {"instruction": "What is 2 plus 2?", "output": "Four."},
        {"question": "What is 2 plus 2?", "answer": "2 + 2 = 4 #### 4"},
        {"question": "ignored", "messages": [*QUESTION, FOUR]},
        {"question": "What is 2 plus 2?", "chosen": "Four.", "rejected": "Five."},
        {"conversations": QUESTION, "chosen": FOUR, "rejected": FIVE},
        {"conversations": [{"from": "human", "value": "What is 2 plus 2?"}, {"from": "gpt", "value": "Four."}]},
        {"messages": QUESTION},
        {"messages": [*QUESTION, FOUR], "chosen": None, "rejected": None},
        {"problem": "What is 2 plus 2?", "answer": "4"},
        {"messages": [*QUESTION, FOUR], "chosen": [*QUESTION, FOUR], "rejected": [*QUESTION, FIVE]},
        {"prompt": json.dumps(QUESTION)},
        {"prompt": "What is 2 plus 2?", "completion": [FOUR]},
        {"input": QUESTION, "output": "Four."},
        {"instruction": "What is 2 plus 2?", "completions": ["Four.", "Five."]},
        {"instruction": "What is 2 plus 2?", "input": "", "output": 4},
    ],
)
def test_chat_prompt_is_rendered_with_generation_prompt(load, tiny_tokenizer, row):
    data = load([{**row, "solution": 4}])
    (prompt,) = data.train
    expected = tiny_tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert tiny_tokenizer.decode(prompt.input_ids) == expected
    assert prompt.content == QUESTION
    assert prompt.columns["solution"] == 4
    assert data.terminators == [tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert data.max_length == len(prompt.input_ids) + 10


def test_plain_text_prompt_is_not_rendered(load, tiny_tokenizer, caplog):
    assert not load([{"prompt": QUESTION}]).eval
    assert not caplog.messages
    data = load([{"prompt": "Once upon a time"}])
    (warning,) = caplog.messages
    assert Remark.PLAIN_TEXT.found in warning
    assert Remark.PLAIN_TEXT.remedy in warning
    assert tiny_tokenizer.decode(data.train[0].input_ids) == "Once upon a time"
    assert data.train[0].content == "Once upon a time"
    assert data.terminators == []


def test_question_includes_system_prompt_and_context(load):
    question = {"question": "How many?", "context": "Four rivers.", "answer": "4"}
    turn = {"role": "user", "content": "How many?\nFour rivers."}
    for asked in (question, {"prompt": [turn]}):
        (prompt,) = load([{"system_prompt": "Be brief.", **asked}]).train
        assert prompt.content == [{"role": "system", "content": "Be brief."}, turn]


def test_system_prompt_is_in_prompts_and_messages_of_rewards(load, tiny_tokenizer):
    turns = [{"role": "system", "content": "Be brief."}, *QUESTION]
    own = [{"role": "system", "content": "Be long."}, *QUESTION]
    added, kept = load([{"prompt": QUESTION}, {"prompt": own}], system_prompt="Be brief.").train
    assert [added.content, kept.content] == [turns, own]
    expected = tiny_tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert tiny_tokenizer.decode(added.input_ids) == expected
    with pytest.raises(DataError, match="`system_prompt` is a message of a chat"):
        load([{"prompt": "What is 2 plus 2?"}], system_prompt="Be brief.")


def test_instruction_includes_its_input(load):
    (prompt,) = load([{"instruction": "Add.", "input": "2 + 2"}]).train
    assert prompt.content == [{"role": "user", "content": "Add.\n2 + 2"}]


@pytest.mark.parametrize("text", ["", " -\n"])
def test_chat_prompt_without_a_question_is_refused(load, text):
    with pytest.raises(DataError, match="the question is empty, or `-` in place of one"):
        load([{"prompt": [{"role": "user", "content": text}]}])


@pytest.mark.parametrize("column", ["system", "system_prompt", "history"])
def test_column_of_a_chat_beside_plain_text_prompt_is_refused(load, column):
    with pytest.raises(DataError, match=r"is part of a chat, .*\n.*{question: prompt}"):
        load([{"prompt": "What is 2 plus 2?", column: "Be brief."}])
    load([{"prompt": "What is 2 plus 2?", column: ""}])


@pytest.mark.parametrize("column", ["prompt", "problem", "messages"])
def test_prompt_about_an_image_is_refused(load, column):
    def write(text, **images):
        return {column: [{"role": "user", "content": text}] if column == "messages" else text, **images}

    with pytest.raises(DataError, match="the text refers to `images`"):
        load([write("<image>Find x.", images=["a.png"])])
    load([write("Find x.", images=[])])
    # A chat has placeholders, a question beside an image often none.
    with contextlib.nullcontext() if column == "messages" else pytest.raises(DataError, match="may be about `images`"):
        load([write("Find x.", images=["a.png"])])


@pytest.mark.parametrize("column", ["answer", "solution", "answerKey", "correct"])
def test_choices_belong_to_the_prompt(load, column: str):
    """Also of a chat beside other columns, whose fields are not known at first."""
    row = {"options": ["a cat", "a dog"], column: "B"}
    with pytest.raises(DataError, match="one of the choices, which the question does not have"):
        load([{"messages": [{"role": "user", "content": "Who barks?"}], **row}])
    load([{"messages": [{"role": "user", "content": "Who barks: (A) a cat or (B) a dog?"}], **row}])


def test_chat_ending_with_user_turn_is_used_whole(load):
    turns = [*QUESTION, FOUR, {"role": "user", "content": "Why?"}]
    (prompt,) = load([{"messages": turns}]).train
    assert prompt.content == turns


def test_prompt_of_text_dialogue_pair_is_not_rendered(load):
    asked = "\n\nHuman: What is 2 plus 2?\n\nAssistant:"
    (prompt,) = load([{"chosen": f"{asked} Four.", "rejected": f"{asked} Five."}]).train
    assert prompt.content == asked


def test_dataset_columns_select_prompt_column(load):
    data = load([{"problem": "Once upon a time", "answer": "4"}], dataset_columns="{prompt: problem}")
    assert data.train[0].content == "Once upon a time"
    assert data.train[0].columns == {"answer": "4"}
    with pytest.raises(DataError, match="the `text` layout has no prompt"):
        load([{"text": "Write f.", "test_list": ["assert f"]}])
    data = load([{"text": "Write f.", "test_list": ["assert f"]}], dataset_columns="{question: text, tests: test_list}")
    assert (data.train[0].content[0]["content"], data.train[0].columns["tests"]) == ("Write f.", ["assert f"])


@pytest.mark.parametrize("is_chat_first", [False, True])
@pytest.mark.parametrize("is_held_out", [False, True])
def test_mixing_text_and_chat_prompts_is_one_error(load, is_chat_first, is_held_out):
    rows = [{"prompt": "Once upon a time"}, *[{"prompt": QUESTION}] * 2][:: -1 if is_chat_first else 1]
    words = r"1 prompts are plain text, first .*\.jsonl:\d, and 2 are chats, first .*\.jsonl:\d"
    with pytest.raises(DataError, match=words) as caught:
        load(rows[:1] if is_held_out else rows, rows[1:] if is_held_out else ())
    assert len(caught.value.problems) == 1


def test_prompts_have_union_of_columns(load):
    rows = [{"prompt": "a", "level": 1}, {"prompt": "b", "answer": "2"}]
    for order in (rows, rows[::-1]):
        data = load(order, [{"prompt": "c", "hint": "h"}])
        columns = {prompt.content: prompt.columns for prompt in (*data.train, *data.eval)}
        assert columns == {
            "a": {"level": 1, "answer": None, "hint": None},
            "b": {"level": None, "answer": "2", "hint": None},
            "c": {"level": None, "answer": None, "hint": "h"},
        }


def test_columns_and_contents_are_as_in_the_dataset(load, tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "\u201ccaf\u00e9\u201d", "name": "x"}], "solution": ["1", 2.5, None]},
        {"prompt": QUESTION, "solution": {"a": {"b": [True, -0.0, 10**30]}}},
        {"prompt": [{"role": "user", "content": "Why?"}], "solution": "\ud800 alone"},
    ]
    write_rows(tmp_path / "rows.jsonl", rows, ensure_ascii=True)
    train = load(rows[:1], dataset_name=tmp_path / "rows.jsonl").train
    assert [(prompt.content, prompt.columns["solution"]) for prompt in train] == [tuple(row.values()) for row in rows]
    assert [prompt.where.rpartition(":")[2] for prompt in train[1:]] == ["2", "3"]
    assert train[-1] == train[2] == list(train)[2]
    with pytest.raises(IndexError):
        train[3]


def test_columns_that_json_lacks_stay_bytes_or_become_text(load, tmp_path):
    path = tmp_path / "other.parquet"
    values = {"image_hash": [b"\x00\xff"], "time_limit": pa.array([timedelta(seconds=2)])}
    pq.write_table(pa.table({"prompt": ["a"], **values}), path)
    assert load([], dataset_name=path).train[0].columns == {"image_hash": b"\x00\xff", "time_limit": "0:00:02"}


def test_file_name_that_is_not_utf8_is_named(load, tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    write_rows(path, [{"prompt": [{"role": "user", "content": "a"}]}])  # Without a warning: xdist cannot send the name.
    assert load([], dataset_name=path).train[0].where == f"{path}:1"


def test_terminators_are_not_those_of_a_broken_row(load, tiny_tokenizer, monkeypatch):
    template = "{{ raise_exception('no') if messages[0].content == 'bad' }}{% for m in messages %}{{ m.content }}"
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template + "<|im_end|>{% endfor %}")
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("bad", *"good")]
    data = load(rows, broken_rows="drop", max_broken_fraction=0.5)
    assert data.terminators == [tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_terminators_cover_every_template_in_use(load, tiny_tokenizer, monkeypatch):
    turns = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}END{% endfor %}"
    turns += "{% if add_generation_prompt %}assistant:\n{% endif %}"
    ends = {"default": "<|im_end|>", "tool_use": "<|endoftext|>"}
    monkeypatch.setattr(
        tiny_tokenizer, "chat_template", {name: turns.replace("END", end) for name, end in ends.items()}
    )
    chat = [*QUESTION, FOUR]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    # Tools beside a prompt of messages are rendered too.
    data = load([{"messages": chat}, {"prompt": QUESTION, "tools": tools}])
    assert data.terminators == sorted(map(tiny_tokenizer.convert_tokens_to_ids, ends.values()))


def test_trained_line_break_is_no_terminator(load, tiny_tokenizer, monkeypatch):
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja"
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template.read_text(encoding="utf-8"))
    assert load([{"messages": [*QUESTION, FOUR]}]).terminators == [tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_max_length_includes_held_out_prompts(load):
    data = load([{"prompt": "Once"}], [{"prompt": "Once upon a time there was a king"}])
    assert [len(data.train), len(data.eval)] == [1, 1]
    assert data.max_length == len(data.eval[0].input_ids) + 10 > len(data.train[0].input_ids) + 10


def test_split_separates_equal_prompts_from_training(load):
    rows = [{"prompt": f"Question {n % 10}"} for n in range(20)]
    data = load(rows, test_split_size=4)
    sides = [{prompt.content for prompt in side} for side in (data.train, data.eval)]
    assert len(data.eval) == 4
    assert not sides[0] & sides[1]
    assert data.record["num_prompts"] == 16


def test_held_out_prompt_in_training_set_is_refused(load):
    rows = [{"prompt": f"Question {n}"} for n in range(3)]
    with pytest.raises(DataError, match="ask what held-out rows ask"):
        load(rows, rows[1:2])
    assert len(load(rows, rows[1:2], allow_eval_overlap=True).eval) == 1


def test_overlong_prompt_is_error_or_dropped(load):
    rows = [{"prompt": "short"}, {"prompt": "a long prompt " * 20}]
    with pytest.raises(DataError, match=r"prompts\.jsonl:2"):
        load(rows, max_length=24)
    data = load(rows, max_length=24, overlong="drop")
    assert (len(data.train), data.record["num_overlong"]) == (1, 1)
    with pytest.raises(DataError, match="every prompt is too long"):
        load(rows[1:], max_length=24, overlong="drop")
    assert load(rows[1:], max_length=load(rows).max_length).record["num_overlong"] == 0


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": [{"role": "nobody", "content": "x"}]}, "role"),
        ({"text": "just a text"}, "no prompt"),
        ({"prompt": 3}, "not a list"),
        ({"prompt": '["What is 2 + 2?", "And 3 + 3?"]'}, "a list of texts in JSON"),
        ({"messages": [FOUR]}, "no message before its answer"),
        (3, "the row is a number"),
    ],
)
def test_broken_rows_are_reported_or_dropped(load, row, words, caplog):
    with pytest.raises(DataError, match=words) as caught:
        load([{"prompt": "sound"}, row, row])
    (problem,) = caught.value.problems
    assert problem.where.endswith(":2")
    assert "so in 2 of 3 rows (66.7%)" in problem.found
    dropped = load([*[{"prompt": "sound"}] * 9, row], broken_rows="drop", max_broken_fraction=0.1)
    assert len(dropped.train) == 9
    assert dropped.record["broken_rows"] == {"num_rows": 10, "num_broken": 1}
    assert "1 of 10 rows (10.00%) are broken and left out" in caplog.text
    with pytest.raises(DataError, match=r"1 of 3 rows \(33.33%\) are broken, and max_broken_fraction is 0.1"):
        load([row, {"prompt": "sound"}, {"prompt": "sound"}], broken_rows="drop", max_broken_fraction=0.1)


def test_full_disk_is_data_error_that_names_the_prepared_sets(load, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(prompts.np, "save", fail)
    with pytest.raises(DataError, match=r"prepared: .*No space left on device\n.*prepared_dir"):
        load([{"prompt": QUESTION}])


def test_empty_dataset_is_refused(load):
    with pytest.raises(DataError, match="no rows"):
        load([])
