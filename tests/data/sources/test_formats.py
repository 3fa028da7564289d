"""Detection of dataset layouts and conversion to the canonical row, against literals and TRL."""

from __future__ import annotations

import copy
import json
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.data_utils import extract_prompt, maybe_convert_to_chatml

from recipes_lib.config.schema import DatasetFormat
from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.pairs.preference_sets import encode_pairs
from recipes_lib.data.sources.formats import RowFormat, canonicalize, detect_format
from recipes_lib.data.sources.rows import RawRow, Row
from recipes_lib.errors import DataError

USER = {"role": "user", "content": "What is 2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "Be brief."}
JSON_CHAT = json.dumps([USER, ANSWER])
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
WRITTEN_CALL = {"name": "add", "arguments": '{"a": 2, "b": 2}'}
RESULT = {"role": "tool", "content": "4"}
HUMAN, GPT = {"from": "human", "value": "What is 2 + 2?"}, {"from": "gpt", "value": "4"}
ADD = {"role": "user", "content": "Add.\n2 + 2"}
CHAT, BRIEF = {"messages": [USER, ANSWER]}, {"messages": [SYSTEM, USER, ANSWER]}
TEXT_PAIR = {"prompt": "2 + 2 =", "completion": " 4", "rejected": " 5"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


DIALOGUE = "\n\nHuman: What is 2 + 2?\n\nAssistant:"


def pair(*prompt: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*prompt, ANSWER], "num_prompt_messages": len(prompt), "rejected": [WRONG]}


def convert(raw: dict[str, Any], declared: DatasetFormat = "auto") -> Row:
    entry = RawRow("data.jsonl:1", 1, raw)
    return canonicalize(entry, detect_format(entry, declared))


def detect(raw: dict[str, Any], declared: DatasetFormat = "auto") -> RowFormat:
    return detect_format(RawRow("data.jsonl:1", 1, raw), declared)


# case -> layout, row of the dataset, fields of the canonical row
GOLDEN: dict[str, tuple[DatasetFormat, dict[str, Any], dict[str, Any]]] = {
    "chat": ("messages", BRIEF, BRIEF),
    "chat with tools": (
        "messages",
        {**CHAT, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}},
        {**CHAT, "tools": TOOLS, "template_kwargs": {"enable_thinking": False}},
    ),
    "tools as JSON": ("messages", {**CHAT, "tools": '[{"name": "add"}]'}, {**CHAT, "tools": [{"name": "add"}]}),
    "function calls as the answer, as in xlam": (
        "question_answer",
        {
            "id": 1,
            "query": "What is 2 + 2?",
            "answers": json.dumps([WRITTEN_CALL], indent=1),
            "tools": '[{"name": "add"}]',
        },
        {"messages": [USER, CALLED], "tools": [{"name": "add"}]},
    ),
    "no tools": ("messages", {**CHAT, "tools": "[]"}, CHAT),
    "chat ending with the user": ("messages", {"messages": [USER, ANSWER, USER]}, {"messages": [USER, ANSWER, USER]}),
    "two answers in a row": ("messages", {"messages": [USER, ANSWER, ANSWER]}, {"messages": [USER, ANSWER, ANSWER]}),
    "text parts": (
        "messages",
        {
            "messages": [
                {**USER, "content": [{"type": "text", "text": part} for part in ("What is ", "2 + 2?")]},
                ANSWER,
            ]
        },
        CHAT,
    ),
    "tool calls as OpenAI writes them": (
        "messages",
        {
            "messages": [
                USER,
                {**CALLED, "content": None, "tool_calls": [{"type": "function", "function": WRITTEN_CALL}]},
                {**RESULT, "tool_call_id": "1"},
                ANSWER,
            ]
        },
        {"messages": [USER, CALLED, {**RESULT, "tool_call_id": "1"}, ANSWER]},
    ),
    "null keys": (
        "messages",
        {"messages": [{**USER, "name": None, "tool_calls": None}, {**ANSWER, "tool_calls": []}]},
        CHAT,
    ),
    "keys of the template": (
        "messages",
        {"messages": [USER, {**ANSWER, "reasoning_content": "easy"}]},
        {"messages": [USER, {**ANSWER, "reasoning_content": "easy"}]},
    ),
    "prompt and completion": (
        "prompt_completion",
        {"prompt": "2 + 2 =", "completion": " 4"},
        {"prompt": "2 + 2 =", "completion": " 4"},
    ),
    "empty prompt": ("prompt_completion", {"prompt": "", "completion": "a"}, {"prompt": "", "completion": "a"}),
    "prompt and completion as chats": (
        "prompt_completion",
        {"prompt": [SYSTEM, USER], "completion": [ANSWER]},
        {**BRIEF, "num_prompt_messages": 2},
    ),
    "prompt as a chat and completion as text": (
        "prompt_completion",
        {"prompt": [SYSTEM, USER], "completion": "4"},
        {**BRIEF, "num_prompt_messages": 2},
    ),
    "prompt as text and completion as a chat": (
        "prompt_completion",
        {"prompt": "What is 2 + 2?", "completion": [ANSWER], "system_prompt": "Be brief."},
        {**BRIEF, "num_prompt_messages": 2},
    ),
    "text": ("text", {"text": " To be, or not to be \n"}, {"text": " To be, or not to be \n"}),
    "ShareGPT": ("sharegpt", {"conversations": [HUMAN, GPT]}, CHAT),
    "ShareGPT with system column": ("sharegpt", {"conversations": [HUMAN, GPT], "system": "Be brief."}, BRIEF),
    "ShareGPT in role and content": ("sharegpt", {"conversations": [{**USER, "role": "human"}, ANSWER]}, CHAT),
    "ShareGPT with tools": (
        "sharegpt",
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
                {"from": "observation", "value": "4"},
                GPT,
            ]
        },
        {"messages": [USER, CALLED, RESULT, ANSWER]},
    ),
    "Alpaca": ("alpaca", {"instruction": "Add.", "input": "2 + 2", "output": "4"}, {"messages": [ADD, ANSWER]}),
    "Alpaca with history": (
        "alpaca",
        {"instruction": "Add.", "input": "2 + 2", "output": "4", "system": "Be brief.", "history": [["Hi", "Hello"]]},
        {
            "messages": [
                SYSTEM,
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
                ADD,
                ANSWER,
            ]
        },
    ),
    "preference": ("preference", {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}, TEXT_PAIR),
    "preference as chats": ("preference", {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG]}, pair(USER)),
    "preference with a margin": (
        "preference",
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5", "margin": 2},
        {**TEXT_PAIR, "margin": 2.0},
    ),
    "preference as chats with a margin": (
        "preference",
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG], "margin": 0.5},
        {**pair(USER), "margin": 0.5},
    ),
    "preference with the prompt inside": (
        "preference",
        {"chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, WRONG]},
        pair(SYSTEM, USER),
    ),
    "preference with its prompt in a dialogue": (
        "preference",
        {"chosen": f"\n\nHuman: Hi\n\nAssistant: Hello{DIALOGUE} It is 4"}
        | {"rejected": f"\n\nHuman: Hi\n\nAssistant: Hello{DIALOGUE} It is 5"},
        {"prompt": f"\n\nHuman: Hi\n\nAssistant: Hello{DIALOGUE}", "completion": " It is 4", "rejected": " It is 5"},
    ),
    "preference with its prompt in the texts": (
        "preference",
        {"chosen": "Post: a b\nTL;DR: forty", "rejected": "Post: a b\nTL;DR: fourteen"},
        {"prompt": "Post: a b\nTL;DR:", "completion": " forty", "rejected": " fourteen"},
    ),
    "preference with a text prompt and messages": (
        "preference",
        {"prompt": "What is 2 + 2?", "chosen": [ANSWER], "rejected": [WRONG]},
        pair(USER),
    ),
    "preference with a chat and texts": (
        "preference",
        {"prompt": [SYSTEM, USER], "chosen": "4", "rejected": "5"},
        pair(SYSTEM, USER),
    ),
    "orca": (
        "preference",
        {"system": "Be brief.", "question": "What is 2 + 2?", "chosen": "4", "rejected": "5"},
        pair(SYSTEM, USER),
    ),
    "LLaMA-Factory's pairs as objects": (
        "preference",
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "5"}},
        pair(USER),
    ),
    "LLaMA-Factory's pairs as strings": (
        "preference",
        {"conversations": [HUMAN], "system": "Be brief.", "chosen": "4", "rejected": "5"},
        pair(SYSTEM, USER),
    ),
    "LLaMA-Factory's pairs of instructions": (
        "preference",
        {"instruction": "Add.", "input": "2 + 2", "chosen": "4", "rejected": "5"},
        pair(ADD),
    ),
    "Alpaca with its text": (
        "alpaca",
        {"instruction": "What is 2 + 2?", "input": "", "output": "4", "text": "Q: What is 2 + 2?\nA: 4"},
        CHAT,
    ),
    "Dolly": (
        "dolly",
        {"instruction": "Add.", "context": "2 + 2", "response": "4", "category": "closed_qa"},
        {"messages": [ADD, ANSWER]},
    ),
    "question and answer": ("question_answer", {"question": "What is 2 + 2?", "answer": "4"}, CHAT),
    "a chat beside a question and an answer": ("messages", {**CHAT, "question": "What is 2 + 2?", "answer": "4"}, CHAT),
    "chat under the keys of ShareGPT": (
        "messages",
        {"messages": [HUMAN, {"role": "Assistant", "value": "4", "from": None}]},
        CHAT,
    ),
    "chat in a cell": ("messages", {"messages": json.dumps([USER, ANSWER])}, CHAT),
    "chat with its system prompt beside it": ("messages", {**CHAT, "system": "Be brief."}, BRIEF),
    "chat with its system prompt beside it and inside": ("messages", {**BRIEF, "system": "Be brief."}, BRIEF),
    "parts that are strings": ("messages", {"messages": [{**USER, "content": ["What is ", "2 + 2?"]}, ANSWER]}, CHAT),
    "OpenAI's functions": (
        "messages",
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": WRITTEN_CALL},
                {"role": "function", "name": "add", "content": "4"},
                ANSWER,
            ]
        },
        {"messages": [USER, CALLED, {**RESULT, "name": "add"}, ANSWER]},
    ),
    "chat beside a null column": ("messages", {**CHAT, "text": None}, CHAT),
    "LMSYS": ("sharegpt", {"conversation": [USER, ANSWER], "model": "vicuna"}, CHAT),
    "ShareGPT with a system prompt": (
        "sharegpt",
        {"conversations": [USER, ANSWER], "system_prompt": "Be brief."},
        BRIEF,
    ),
    "OpenOrca": (
        "question_answer",
        {"id": "1", "system_prompt": "Be brief.", "question": "What is 2 + 2?", "response": "4"},
        BRIEF,
    ),
    "MetaMathQA": (
        "question_answer",
        {"type": "t", "query": "What is 2 + 2?", "original_question": "?", "response": "4"},
        CHAT,
    ),
    "a problem and its solution": ("question_answer", {"problem": "What is 2 + 2?", "solution": "4", "level": 1}, CHAT),
    "a prompt and its response": (
        "question_answer",
        {"prompt": "What is 2 + 2?", "response": "4", "label": "good"},
        CHAT,
    ),
    "an instruction and its completion": (
        "question_answer",
        {"instruction": "What is 2 + 2?", "completion": "4"},
        CHAT,
    ),
    "Aya": ("question_answer", {"inputs": "What is 2 + 2?", "targets": "4", "language": "English"}, CHAT),
    "OpenMathInstruct": (
        "question_answer",
        {"problem": "What is 2 + 2?", "generated_solution": "4", "expected_answer": "4"},
        CHAT,
    ),
    "a question about a context": (
        "question_answer",
        {"question": "Add.", "context": "2 + 2", "answer": "4"},
        {"messages": [ADD, ANSWER]},
    ),
    "GPTeacher": (
        "dolly",
        {"instruction": "Add.", "input": "2 + 2", "response": "4"},
        {"messages": [ADD, ANSWER]},
    ),
    "LIMA": ("sharegpt", {"conversations": ["What is 2 + 2?", "4"], "source": "web"}, CHAT),
    "The Stack's file of a chat": ("text", {"content": JSON_CHAT, "original": str([USER])}, {"text": JSON_CHAT}),
    "an answer that is JSON of a chat": (
        "alpaca",
        {"instruction": "Write a chat.", "output": JSON_CHAT},
        {"messages": [{**USER, "content": "Write a chat."}, {**ANSWER, "content": JSON_CHAT}]},
    ),
    "The Stack": ("text", {"content": "x = 4", "lang": "Python"}, {"text": "x = 4"}),
    "distilabel's pairs of Orca": (
        "preference",
        {"system": "Be brief.", "input": "What is 2 + 2?", "chosen": "4", "rejected": "5"},
        pair(SYSTEM, USER),
    ),
    "pairs of chats in cells": (
        "preference",
        {"chosen": json.dumps([USER, ANSWER]), "rejected": json.dumps([USER, WRONG], indent=2)},
        pair(USER),
    ),
    "messages as an object of lists": (
        "messages",
        {"messages": {"role": ["user", "assistant"], "content": ["What is 2 + 2?", "4"]}},
        CHAT,
    ),
    "pairs of objects of lists": (
        "preference",
        {
            "chosen": {"from": ["human", "gpt"], "value": ["What is 2 + 2?", "4"]},
            "rejected": {"from": ["human", "gpt"], "value": ["What is 2 + 2?", "5"]},
        },
        pair(USER),
    ),
    "tools as texts": ("messages", {**CHAT, "tools": [json.dumps({"name": "f"})]}, {**CHAT, "tools": [{"name": "f"}]}),
    "images beside text": ("messages", {**CHAT, "images": ["a.png"]}, CHAT),
    "no tools and variables in cells": ("messages", {**CHAT, "tools": "null", "chat_template_kwargs": "null"}, CHAT),
    "template variables in a cell": (
        "messages",
        {**CHAT, "chat_template_kwargs": '{"enable_thinking": true}'},
        {**CHAT, "template_kwargs": {"enable_thinking": True}},
    ),
    "preference with the prompt inside and as text": (
        "preference",
        {"prompt": "What is 2 + 2?", "chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
        pair(USER),
    ),
    "preference with the prompt inside and as a chat": (
        "preference",
        {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
        pair(USER),
    ),
    "preference with the prompt inside and its system prompt beside it": (
        "preference",
        {"system": "Be brief.", "chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
        pair(SYSTEM, USER),
    ),
    "Nemotron": (
        "question_answer",
        {"input": [USER], "output": "4", "system_prompt": "Be brief.", "reasoning": "off"},
        BRIEF,
    ),
    "medical-o1": ("question_answer", {"Question": "What is 2 + 2?", "Complex_CoT": "?", "Response": "4"}, CHAT),
    "Alpaca in upper case": (
        "alpaca",
        {"Instruction": "Add.", "Input ": "2 + 2", "OUTPUT": "4", "Text": "Add. 2 + 2 4", "ID": 1},
        {"messages": [ADD, ANSWER]},
    ),
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_layout_is_detected_and_converted(kind: str) -> None:
    layout, raw, fields = GOLDEN[kind]
    untouched = copy.deepcopy(raw)
    assert detect(raw).name == layout
    assert convert(raw) == Row(where="data.jsonl:1", **fields)
    assert convert(raw, layout) == convert(raw)
    assert raw == untouched


MARKED = {**ANSWER, "weight": 0}


@pytest.mark.parametrize(
    ("raw", "untrained"),
    [
        ({"messages": [USER, MARKED, USER, ANSWER]}, {1}),
        ({"conversations": [USER, MARKED, USER, ANSWER], "system": "Be brief."}, {2}),
        ({"prompt": [USER, MARKED, USER], "completion": [MARKED, USER, ANSWER]}, {1, 3}),
        ({"chosen": [USER, MARKED, USER, ANSWER], "rejected": [USER, MARKED, USER, WRONG]}, {1}),
    ],
    ids=["messages", "sharegpt", "prompt_completion", "preference"],
)
def test_excluded_turns_are_recorded_by_index(raw: dict[str, Any], untrained: set[int]) -> None:
    row = convert(raw)
    assert row.untrained == untrained
    assert all(set(message) == {"role", "content"} for message in row.messages or ())


@pytest.mark.parametrize("name", ["chosen", "rejected"])
def test_excluded_answer_of_pair_is_refused(name: str) -> None:
    raw = {"chosen": [USER, ANSWER], "rejected": [USER, WRONG]}
    raw[name] = [USER, {**raw[name][1], "train": False}]
    with pytest.raises(DataError, match=f"data.jsonl:1: a turn of `{name}` is marked not to be trained on"):
        convert(raw)


@pytest.mark.parametrize("kind", [kind for kind in GOLDEN if GOLDEN[kind][0] in ("messages", "sharegpt")])
def test_conversion_is_idempotent(kind: str) -> None:
    once = convert(GOLDEN[kind][1])
    again = convert({"messages": once.messages, "tools": once.tools, "chat_template_kwargs": once.template_kwargs})
    assert again == once


def test_conversations_agree_with_trl() -> None:
    raw = {"conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hello"}]}
    assert convert(raw).messages == maybe_convert_to_chatml(copy.deepcopy(raw))["messages"]


def test_implicit_chat_prompt_agrees_with_trl() -> None:
    turns = [SYSTEM, USER, ANSWER, USER]
    raw = {"chosen": [*turns, ANSWER, USER, ANSWER], "rejected": [*turns, WRONG, USER, ANSWER]}
    row, theirs = convert(raw), extract_prompt(raw)
    assert row.messages is not None
    assert row.messages[: row.num_prompt_messages] == theirs["prompt"]
    assert row.messages[row.num_prompt_messages :] == theirs["chosen"]
    assert row.rejected == theirs["rejected"]


def test_prompt_repeated_by_both_answers_is_error() -> None:
    """An answer can begin with a short prompt, such as a greeting; one of the two can quote a long one."""
    raw = {"prompt": "What is 2 plus 2?", "chosen": "What is 2 plus 2? Four.", "rejected": "What is 2 plus 2? Five."}
    with pytest.raises(DataError, match="`chosen` and `rejected` repeat the prompt"):
        convert(raw)
    row = convert({"chosen": raw["chosen"], "rejected": raw["rejected"]})
    assert (row.prompt, row.completion, row.rejected) == (raw["prompt"], " Four.", " Five.")
    for pair in ({**raw, "rejected": "Five."}, {"prompt": "Hi", "chosen": "Hi!", "rejected": "Hi there"}):
        assert convert(pair).completion == pair["chosen"]


WORDS = st.lists(st.text(string.ascii_letters, min_size=1, max_size=4), max_size=4)


@settings(max_examples=40)
@given(prompt=WORDS.filter(bool), chosen=WORDS, rejected=WORDS)
def test_implicit_text_prompt_agrees_with_trl(prompt: list[str], chosen: list[str], rejected: list[str]) -> None:
    # Answers start with different letters: TRL splits differently if one is a prefix of the other.
    raw = {"chosen": " ".join([*prompt, "x", *chosen]), "rejected": " ".join([*prompt, "y", *rejected])}
    row, theirs = convert(raw), extract_prompt(raw)
    assert (row.prompt, row.completion, row.rejected) == (theirs["prompt"], theirs["chosen"], theirs["rejected"])


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        (DIALOGUE, " It is green.", " It is grey."),
        (DIALOGUE, " It", " It is"),
        (f"{DIALOGUE} It is{DIALOGUE}", " four", " five"),
        ("The sky is", " green", " grey"),
        ("The sky is", " grey", " grey as ash"),
        ("A line\n", "grey", "green"),
        ("A line\n\n", "  grey", "  green"),
    ],
)
def test_implicit_text_prompt_ends_at_token_boundary(prompt, chosen, rejected, tiny_tokenizer) -> None:
    """The boundary is neither inside a word nor after a space."""
    row = convert({"chosen": prompt + chosen, "rejected": prompt + rejected})
    assert row == convert({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    (pair,) = encode_pairs(RowEncoder(tiny_tokenizer), [row])
    assert tiny_tokenizer.decode(pair.prompt_ids) == prompt
    assert tiny_tokenizer.decode(pair.chosen_ids) == chosen + "<|endoftext|>"
    assert tiny_tokenizer.decode(pair.rejected_ids) == rejected + "<|endoftext|>"


def test_text_column_without_instruction_is_ambiguous() -> None:
    with pytest.raises(DataError, match=r"several layouts: `text` \(text\) and `alpaca`"):
        convert({"instruction": "What is 2 + 2?", "output": "4", "text": "Once upon a time"})


def test_format_description_lists_read_and_ignored_columns() -> None:
    raw = {"id": 7, "messages": [USER, ANSWER], "tools": None, "source": "web"}
    assert str(detect(raw)) == "`messages` layout, from messages, tools; ignored: id, source"
    raw = {"query": "a", "response": "b", "system_prompt": None, "n": 1}
    expected = "`question_answer` layout, from query as question, response as answer, system_prompt; ignored: n"
    assert str(detect(raw)) == expected


def test_answer_beside_solution_is_ambiguous() -> None:
    raw = {"problem": "What is 2 + 2?", "solution": "Add: 4", "answer": "4"}  # NuminaMath 1.5
    for columns in (raw, {name.title(): value for name, value in raw.items()}):
        with pytest.raises(DataError, match="each of `solution`, `answer` may be the answer to train on"):
            detect(columns)
    assert detect({"question": "2 + 2?", "answer": "4"}).name == "question_answer"


def test_content_column_of_message_or_question_is_no_text() -> None:
    for raw in ({"role": "user", "content": "Hi."}, {"content": "Hi.", "query": "What?"}):
        with pytest.raises(DataError, match="the columns match no layout"):
            detect(raw)


def test_chat_in_unknown_column_beside_answers_is_refused() -> None:
    raw = {"trajectory": [HUMAN], "chosen": "Step 1: 4", "rejected": "Step 1: 5"}  # UltraInteract
    with pytest.raises(DataError, match=r"`trajectory` may be the chat .*\n.*{conversations: trajectory}"):
        convert(raw)


def test_messages_in_python_notation_are_refused() -> None:
    with pytest.raises(DataError, match="`chosen` has messages in Python's notation"):
        convert({"prompt": "2 + 2?", "chosen": str([USER, ANSWER]), "rejected": str([USER, WRONG])})


def test_json_answer_stays_text() -> None:
    answer = '[{"value": 4, "unit": "m"}]'
    assert convert({"prompt": "2 + 2?", "completion": answer}).completion == answer


@pytest.mark.parametrize("label", [True, False, "True", "false"])
def test_boolean_label_is_refused(label: bool | str) -> None:
    with pytest.raises(DataError, match="`label` says which answers are good"):
        convert({"prompt": "2 + 2?", "completion": "5", "label": label})
    with pytest.raises(DataError, match="`is_correct` says which answers are good"):
        convert({"Question": "2 + 2?", "Answer": "5", "Is_Correct": False})


def test_boolean_label_of_texts_and_of_pairs_has_another_meaning() -> None:
    assert convert({"text": "a", "label": True}).text == "a"
    assert convert({**TEXT_PAIR, "chosen": "4", "rejected": "5", "is_safe": False}, "preference").rejected == "5"


@pytest.mark.parametrize("columns", [("answer", "Answer"), ("Answer", "answer")])
def test_of_columns_that_differ_in_case_the_lower_one_is_read(columns: tuple[str, str]) -> None:
    raw = {"question": "What is 2 + 2?", **{name: "4" if name == "answer" else "5" for name in columns}}
    assert convert(raw).messages == [USER, ANSWER]


@pytest.mark.parametrize(("extras", "answer"), [({"tools": '[{"name": "add"}]'}, "4"), ({}, '[{"name": "add"}]')])
def test_answer_is_calls_only_if_it_is_a_list_beside_tools(extras: dict[str, str], answer: str) -> None:
    row = convert({"question": "What is 2 + 2?", "answer": answer, **extras})
    assert row.messages == [USER, {**ANSWER, "content": answer}]


def test_ambiguous_columns_need_dataset_format() -> None:
    raw = {"messages": [USER, ANSWER], "text": "plain"}
    with pytest.raises(DataError, match="`dataset_format: messages` or `dataset_format: text`"):
        detect(raw)
    assert convert(raw, "text").text == "plain"
    assert convert(raw, "messages").messages == [USER, ANSWER]


def test_declared_layout_mismatch_names_missing_columns() -> None:
    with pytest.raises(DataError, match=r"`prompt_completion` layout needs `completion`; found `prompt`, `text`"):
        detect({"prompt": "a", "text": "b"}, "prompt_completion")


@pytest.mark.parametrize("margin", ["large", "nan", "1e999", True, float("nan"), float("inf"), 10**39, 10**400, [1.0]])
def test_margin_that_is_no_finite_number_is_refused(margin: object) -> None:
    with pytest.raises(DataError, match="`margin` is not a finite number"):
        convert({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5", "margin": margin})


@pytest.mark.parametrize(
    ("margin", "expected"), [(None, None), ("", None), (" ", None), ("0.5", 0.5), (" -1e-3 ", -0.001)]
)
def test_margin_is_read_from_number_or_cell(margin: str | None, expected: float | None) -> None:
    row = convert({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5", "margin": margin})
    assert row.margin == expected
