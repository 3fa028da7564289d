"""Prompts of any layout as a server would be asked, and the columns that rewards read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trl
from tests.rows import write_rows

from recipes_lib.config.loader import load_config
from recipes_lib.data.prompts import load_prompt_data
from recipes_lib.errors import DataError

QUESTION = [{"role": "user", "content": "What is 2 plus 2?"}]
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("Four.", "Five."))


@pytest.fixture
def load(tmp_path, tiny_tokenizer):
    def load_rows(rows, held_out=(), **keys):
        path = tmp_path / "prompts.jsonl"
        write_rows(path, rows)
        if held_out:
            write_rows(tmp_path / "held_out.jsonl", held_out)
            keys["dataset_test_split"] = tmp_path / "held_out.jsonl"
        given = {
            "model_name_or_path": "owner/model",
            "dataset_name": path,
            "output_dir": tmp_path,
            "reward_funcs": "[a.b:c]",
            "response_length": 10,
            **keys,
        }
        config = load_config("ppo", [f"--{name}={value}" for name, value in given.items()])
        return load_prompt_data(config, tiny_tokenizer)

    return load_rows


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": QUESTION},
        {"messages": [*QUESTION, FOUR]},
        {"prompt": "What is 2 plus 2?", "messages": [*QUESTION, FOUR]},
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
        {"problem": "What is 2 plus 2?", "answer": "4"},
        {"messages": [*QUESTION, FOUR], "chosen": [*QUESTION, FOUR], "rejected": [*QUESTION, FIVE]},
        {"prompt": json.dumps(QUESTION)},
    ],
)
def test_a_chat_is_asked_as_a_server_asks_it(load, tiny_tokenizer, row):
    data = load([{**row, "solution": 4}])
    (prompt,) = data.train
    expected = tiny_tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert tiny_tokenizer.decode(prompt.input_ids) == expected
    assert prompt.content == QUESTION
    assert prompt.columns["solution"] == 4
    assert data.terminators == [tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert data.max_length == len(prompt.input_ids) + 10


def test_a_plain_text_is_given_as_it_is(load, tiny_tokenizer):
    data = load([{"prompt": "Once upon a time"}])
    assert tiny_tokenizer.decode(data.train[0].input_ids) == "Once upon a time"
    assert data.train[0].content == "Once upon a time"
    assert data.terminators == []


def test_a_question_is_asked_with_its_system_prompt_and_context_as_in_training(load):
    row = {"system_prompt": "Be brief.", "question": "How many?", "context": "Four rivers.", "answer": "4"}
    (prompt,) = load([row]).train
    assert prompt.content == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many?\nFour rivers."},
    ]


def test_a_chat_that_ends_with_a_question_is_asked_to_its_end(load):
    turns = [*QUESTION, FOUR, {"role": "user", "content": "Why?"}]
    (prompt,) = load([{"messages": turns}]).train
    assert prompt.content == turns


def test_the_prompt_of_a_pair_of_dialogues_is_given_as_it_is(load):
    asked = "\n\nHuman: What is 2 plus 2?\n\nAssistant:"
    (prompt,) = load([{"chosen": f"{asked} Four.", "rejected": f"{asked} Five."}]).train
    assert prompt.content == asked


def test_a_prompt_may_stand_in_a_column_of_another_name(load):
    data = load([{"problem": "Once upon a time", "answer": "4"}], dataset_columns="{prompt: problem}")
    assert data.train[0].content == "Once upon a time"
    assert data.train[0].columns == {"answer": "4"}


@pytest.mark.parametrize("is_chat_first", [False, True])
@pytest.mark.parametrize("is_held_out", [False, True])
def test_texts_among_chats_are_refused_once_for_all(load, is_chat_first, is_held_out):
    rows = [{"prompt": "Once upon a time"}, {"prompt": QUESTION}][:: -1 if is_chat_first else 1]
    words = r"1 prompts are plain text, first .*\.jsonl:\d, and 1 are chats, first .*\.jsonl:\d"
    with pytest.raises(DataError, match=words) as caught:
        load(rows[:1] if is_held_out else rows, rows[1:] if is_held_out else ())
    assert len(caught.value.problems) == 1


def test_every_prompt_has_the_columns_of_all(load):
    rows = [{"prompt": "a", "level": 1}, {"prompt": "b", "answer": "2"}]
    for given in (rows, rows[::-1]):
        data = load(given, [{"prompt": "c", "hint": "h"}])
        columns = {prompt.content: prompt.columns for prompt in (*data.train, *data.eval)}
        assert columns == {
            "a": {"level": 1, "answer": None, "hint": None},
            "b": {"level": None, "answer": "2", "hint": None},
            "c": {"level": None, "answer": None, "hint": "h"},
        }


def test_each_template_of_a_tokenizer_ends_answers_as_it_trains_them(load, tiny_tokenizer, monkeypatch):
    turns = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}END{% endfor %}"
    turns += "{% if add_generation_prompt %}assistant:\n{% endif %}"
    ends = {"default": "<|im_end|>", "tool_use": "<|endoftext|>"}
    monkeypatch.setattr(
        tiny_tokenizer, "chat_template", {name: turns.replace("END", end) for name, end in ends.items()}
    )
    chat = [*QUESTION, FOUR]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    data = load([{"messages": chat}, {"messages": chat, "tools": tools}])
    assert data.terminators == sorted(map(tiny_tokenizer.convert_tokens_to_ids, ends.values()))


def test_a_line_break_that_a_template_trains_on_ends_no_answer(load, tiny_tokenizer, monkeypatch):
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja"
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template.read_text(encoding="utf-8"))
    assert load([{"messages": [*QUESTION, FOUR]}]).terminators == [tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_a_held_out_prompt_may_be_the_longest(load):
    data = load([{"prompt": "Once"}], [{"prompt": "Once upon a time there was a king"}])
    assert data.max_length == len(data.eval[0].input_ids) + 10 > len(data.train[0].input_ids) + 10


def test_a_text_beside_an_answer_in_messages_is_refused_as_in_training(load):
    with pytest.raises(DataError, match="`prompt` is a string, `completion` is a list"):
        load([{"prompt": "What is 2 plus 2?", "completion": [FOUR]}])


def test_prompts_are_held_out_and_never_trained_on(load):
    rows = [{"prompt": f"Question {n % 10}"} for n in range(20)]
    data = load(rows, test_split_size=4)
    sides = [{prompt.content for prompt in side} for side in (data.train, data.eval)]
    assert len(data.eval) == 4
    assert not sides[0] & sides[1]
    assert data.record["num_prompts"] == 16


def test_a_held_out_prompt_that_is_trained_on_is_refused(load):
    rows = [{"prompt": f"Question {n}"} for n in range(3)]
    with pytest.raises(DataError, match="ask what held-out rows ask"):
        load(rows, rows[1:2])
    assert len(load(rows, rows[1:2], allow_eval_overlap=True).eval) == 1


def test_what_is_too_long_is_an_error_or_left_out(load):
    rows = [{"prompt": "short"}, {"prompt": "a long prompt " * 20}]
    with pytest.raises(DataError, match=r"prompts\.jsonl:2"):
        load(rows, max_length=24)
    data = load(rows, max_length=24, overlong="drop")
    assert (len(data.train), data.record["num_overlong"]) == (1, 1)
    with pytest.raises(DataError, match="every prompt is too long"):
        load(rows[1:], max_length=24, overlong="drop")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": [{"role": "nobody", "content": "x"}]}, "role"),
        ({"text": "just a text"}, "no prompt"),
        ({"prompt": 3}, "not a list"),
        ({"messages": [FOUR]}, "no message before its answer"),
    ],
)
def test_every_broken_row_is_named(load, row, words):
    with pytest.raises(DataError, match=words) as caught:
        load([{"prompt": "sound"}, row, row])
    (problem,) = caught.value.problems
    assert problem.where.endswith(":2")
    assert "so in 2 of 3 rows (66.7%)" in problem.found
    dropped = load([*[{"prompt": "sound"}] * 9, row], broken_rows="drop", max_broken_fraction=0.1)
    assert len(dropped.train) == 9
    assert dropped.record["broken_rows"] == {"num_rows": 10, "num_broken": 1}
    with pytest.raises(DataError, match=r"1 of 3 rows \(33.33%\) are broken, and max_broken_fraction is 0.1"):
        load([row, {"prompt": "sound"}, {"prompt": "sound"}], broken_rows="drop", max_broken_fraction=0.1)


def test_a_set_without_rows_is_refused(load):
    with pytest.raises(DataError, match="no rows"):
        load([])
