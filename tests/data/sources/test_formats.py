"""Detection of dataset layouts and conversion to the canonical row, against literals and TRL; rows that are refused."""

from __future__ import annotations

import copy
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.sources.layout_cases import (
    ANSWER,
    CASES,
    CHAT,
    DIALOGUE,
    GPT,
    HUMAN,
    RESULT,
    SYSTEM,
    TEXT_PAIR,
    USER,
    WRONG,
    pair,
)
from trl.data_utils import extract_prompt, maybe_convert_to_chatml

from recipes_lib.config.schema import DatasetFormat
from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.pairs.preference_sets import encode_pairs
from recipes_lib.data.sources.formats import RowFormat, canonicalize, detect_format
from recipes_lib.data.sources.rows import RawRow, Row
from recipes_lib.errors import DataError


def convert(raw: dict[str, Any], declared: DatasetFormat = "auto") -> Row:
    entry = RawRow("data.jsonl:1", 1, raw)
    return canonicalize(entry, detect_format(entry, declared))


def detect(raw: dict[str, Any], declared: DatasetFormat = "auto") -> RowFormat:
    return detect_format(RawRow("data.jsonl:1", 1, raw), declared)


@pytest.mark.parametrize("kind", CASES)
def test_layout_is_detected_and_converted(kind: str) -> None:
    layout, raw, fields = CASES[kind]
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


CHATS = [name for name, case in CASES.items() if case[0] in ("messages", "sharegpt") and "untrained" not in case[2]]


@pytest.mark.parametrize("kind", CHATS)
def test_conversion_is_idempotent(kind: str) -> None:
    once = convert(CASES[kind][1])
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
    chinese = "请用一句话解释为什么天空是蓝色的。"
    with pytest.raises(DataError, match="`chosen` and `rejected` repeat the prompt"):
        convert({"prompt": chinese, "chosen": f"{chinese}因为散射。", "rejected": f"{chinese}不知道。"})
    raw = {"prompt": "What is 2 plus 2?", "chosen": "What is 2 plus 2? Four.", "rejected": "What is 2 plus 2? Five."}
    with pytest.raises(DataError, match="`chosen` and `rejected` repeat the prompt"):
        convert(raw)
    row = convert({"chosen": raw["chosen"], "rejected": raw["rejected"]})
    assert (row.prompt, row.completion, row.rejected) == (raw["prompt"], " Four.", " Five.")
    for apart in ({**raw, "rejected": "Five."}, {"prompt": "Hi", "chosen": "Hi!", "rejected": "Hi there"}):
        assert convert(apart).completion == apart["chosen"]


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


def test_text_with_an_id_of_a_message_and_no_role_is_a_text() -> None:
    assert convert({"message_id": "1", "text": "Hi"}).text == "Hi"


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


@pytest.mark.parametrize(
    "raw",
    [
        {"messages": [USER, ANSWER], "rejected_messages": [USER, WRONG]},
        {"messages": [USER, ANSWER], "rejected_response": "5"},
        {"query": "What is 2 + 2?", "response": "4", "rejected_response": "5", "history": None},
    ],
)
def test_pairs_of_ms_swift_are_read_where_pairs_are_trained_on(raw: dict[str, Any]) -> None:
    assert convert(raw, "preference") == Row(where="data.jsonl:1", **pair(USER))
    assert convert(raw) == Row(where="data.jsonl:1", **CHAT)


def test_column_of_chosen_answers_precedes_a_response() -> None:
    raw = {"question": "What is 2 + 2?", "response": "four", "chosen_response": "4", "rejected_response": "5"}
    assert convert(raw, "preference") == Row(where="data.jsonl:1", **pair(USER))


def test_list_of_texts_in_data_beside_an_answer_is_no_chat() -> None:
    raw = {"input": "What is 2 + 2?", "output": "4", "data": ["a", "b"]}
    assert detect(raw).name == "question_answer"
    assert convert(raw) == Row(where="data.jsonl:1", **CHAT)


def test_verdict_columns_are_described_as_published() -> None:
    entry = RawRow("d:1", 1, CASES["PKU-SafeRLHF"][1])
    expected = "`preference` layout, from response_1, response_0, prompt; ignored: better_response_id"
    assert str(detect_format(entry)) == expected


def test_verdict_beside_a_pair_is_not_read() -> None:
    raw = {**CASES["PKU-SafeRLHF"][1], "chosen": "Yes.", "rejected": "No."}
    row = convert(raw)
    assert (row.prompt, row.completion, row.rejected) == (raw["prompt"], "Yes.", "No.")


def test_column_with_two_meanings_in_a_layout_is_described_once() -> None:
    entry = RawRow("d:1", 1, CASES["distilabel-math-preference"][1])
    assert str(detect_format(entry)).count("instruction") == 1


def test_other_spelling_of_an_optional_column_is_described() -> None:
    entry = RawRow("d:1", 1, CASES["function-calling-chatml"][1])
    expected = "`sharegpt` layout, from conversations, system_message as system; ignored: function_description"
    assert str(detect_format(entry)) == expected


BY_FORMAT, BY_COLUMNS = "dataset_format: question_answer", "name them with `dataset_columns`"
NO_QUESTION = "the dataset that has the questions"
BATTLE = {"prompt": '["a"]', "response_a": '["b"]', "response_b": '["c"]', "winner_model_a": 1}
# dataset -> row that is refused, a part of the remedy
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "openchat": ({"items": [HUMAN, GPT], "tags": ["a", "b"]}, "write `dataset_columns: {conversations: items}`"),
    "OpenRLHF's prompts": ({"context_messages": [USER], "context": "USER:"}, "{conversations: context_messages}"),
    "NeMo Gym": (
        {"responses_create_params": {"input": [USER], "tools": []}},
        "{conversations: responses_create_params.input}",
    ),
    "arena": ({"conversation_a": [USER, ANSWER], "conversation_b": [USER, WRONG], "winner": "tie"}, "remove such rows"),
    "Nectar": ({"prompt": "2 + 2?", "answers": [{"answer": "4", "rank": 1}], "turns": 1}, "an object of `answers`"),
    "glaive": ({"system": "SYSTEM: Be brief.", "chat": "USER: 2 + 2?\n\nASSISTANT: 4"}, "{text: chat}"),
    "SWE-rebench": ({"trajectory": [USER, ANSWER, RESULT], "tools": "[]"}, "{conversations: trajectory}"),
    "OpenCodeReasoning": ({"input": "2 + 2?", "output": "Add: 4", "solution": "4"}, BY_FORMAT),
    "xlam-irrelevance": (
        {"query": "2 + 2?", "answers": "[]", "tools": '[{"name": "add"}]'},
        "write at least one function call",
    ),
    "truthy-dpo": ({"system": "Be brief.", "prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, "{question: prompt}"),
    "oasst1": ({"message_id": "1", "parent_id": None, "text": "Hi", "role": "prompter"}, "join the messages of each"),
    "NuminaMath 1.5": ({"problem": "2 + 2?", "solution": "Add: 4", "answer": "4", "source": "x"}, BY_FORMAT),
    "MMLU": ({"question": "2 + 2?", "choices": ["3", "4"], "answer": 1}, "write it as a string"),
    "RACE": (
        {"article": "A dog and a cat.", "question": "Who barks?", "options": ["a cat", "a dog"], "answer": "B"},
        "write them into the question",
    ),
    "ARC with its key as answer": (
        {"question": "Who barks?", "choices": {"text": ["a cat", "a dog"], "label": ["A", "B"]}, "answer": "B"},
        "write them into the question",
    ),
    "C-Eval": ({"question": "Who barks?", "A": "a cat", "B": "a dog", "answer": "B"}, "write them into the question"),
    "choices in a text": (
        {"question": "Who barks?", "options": "a) a cat b) a dog", "answer": "b"},
        "write them into the question",
    ),
    "Chinese R1": ({"input": "2 + 2?", "content": "4", "prompt": "?", "score": 9}, "name them with"),
    "MedQA with its index as answer": (
        {"question": "Who barks?", "options": {"A": "a cat", "B": "a dog"}, "answer": "B"},
        "write them into the question",
    ),
    "HotpotQA": ({"question": "2 + 2?", "context": {"title": ["x"]}, "answer": "4"}, "{context: null}"),
    "s1K": ({"question": "2 + 2?", "solution": "4", "attempt": "Add: 4"}, BY_FORMAT),
    "OpenCodeReasoning 2": ({"question": "-", "r1_generation": "Add: 4", "solution": "4"}, BY_FORMAT),
    "OpenCodeReasoning 2, its solution": ({"question": "-", "solution": "4"}, NO_QUESTION),
    "Nemotron 1, chat": ({"messages": [{**USER, "content": ""}, ANSWER]}, NO_QUESTION),
    "Nemotron 1, code": ({"messages": [SYSTEM, {**USER, "content": " -\n"}, ANSWER]}, NO_QUESTION),
    "Super-NaturalInstructions": ({"definition": "Add.", "inputs": "2 + 2", "targets": "4"}, BY_COLUMNS),
    "Codeforces": ({"description": "Add.", "examples": [{"input": "2 2", "output": "4"}]}, BY_COLUMNS),
    "The Stack 2": ({"repo_name": "a/b", "files": [{"blob_id": "1", "path": "a.py"}]}, BY_COLUMNS),
    "NaturalReasoning": (
        {"question": "2 + 2?", "responses": [{"response": "4", "model": "x"}]},
        "an object of `responses`",
    ),
    "UltraFeedback": (
        {"instruction": "2 + 2?", "completions": [{"response": "4", "score": 1}]},
        "an object of `completions`",
    ),
    "55k battles, tie": ({**BATTLE, "winner_model_a": 0, "winner_model_b": 0}, "remove such rows"),
    "55k battles, two answers": ({**BATTLE, "response_a": '["b", "c"]'}, "as many as prompts"),
    "55k battles, no answer": ({**BATTLE, "response_a": "[null]"}, "the text of the turn"),
    "55k battles, not JSON": ({**BATTLE, "response_a": "[b"}, "write it as JSON"),
    "axolotl's segments": (
        {"segments": [{"label": False, "text": "2 + 2?"}, {"label": True, "text": "4"}]},
        "the masked text of `segm",
    ),
    "Gemini, file": ({"contents": [{"role": "user", "parts": [{"fileData": {"fileUri": "a"}}]}]}, "only text parts"),
    "The Cauldron": (
        {"images": [{"path": "a.png"}], "texts": [{"user": "2 + 2?", "assistant": "4"}]},
        "{images: null}",
    ),
    "FineVision, text only": (
        {"images": [], "texts": [{"user": "2 + 2?", "assistant": "4"}], "source": "x"},
        "{conversations: texts}",
    ),
    "VQA": ({"image": {"path": "a.png"}, "question": "What is it?", "answer": "a cat"}, "{image: null}"),
    "RLAIF-V": ({"image": {"path": "a.png"}, "question": "?", "chosen": "a cat", "rejected": "a dog"}, "{image: null}"),
    "P3": ({"inputs": [1, 2], "inputs_pretokenized": "2 + 2?", "targets": [3, 1]}, "{inputs: inputs_pretokenized"),
    "Alpaca whose history is no pairs": (
        {"instruction": "Add.", "input": "2 + 2", "output": "4", "history": ["Hi"]},
        "write [[question, answer], ...]",
    ),
    "medical-o1-reasoning": (
        {"Question": "2 + 2?", "Complex_CoT": "Two and two are four.", "Response": "4"},
        "`dataset_columns: {reasoning_content: Complex_CoT}` to train on it, or `{Complex_CoT: null}`",
    ),
    "medical-o1-reasoning, Chinese": (
        {
            "Question": "二加二等于几？",
            "Complex_CoT": "我们先看第一个数是二，再看第二个数也是二，把它们加起来，结果就应该是四。",
            "Response": "四",
        },
        "{reasoning_content: Complex_CoT}",
    ),
    "Opus 4.6 reasoning": (
        {"problem": "2 + 2?", "thinking": "It is a sum.", "solution": "4"},
        "{reasoning_content: thinking}",
    ),
    "Alpaca with reasoning": (
        {"instruction": "2 + 2?", "cot": "Two and two are four.", "output": "4"},
        "{reasoning_content: cot}",
    ),
}


@pytest.mark.parametrize("dataset", REFUSED)
def test_other_public_row_is_refused_with_a_remedy(dataset: str) -> None:
    raw, remedy = REFUSED[dataset]
    with pytest.raises(DataError) as refused:
        convert(raw)
    (problem,) = refused.value.problems
    assert remedy in str(problem.remedy)


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_chat_with_an_answer_of_its_own_beside_a_pair_is_refused(column: str) -> None:
    with pytest.raises(DataError, match=rf"`{column}` ends with an answer .*\n.*{column}: null"):
        convert({column: [USER, ANSWER], "chosen": "4", "rejected": "5"}, "preference")


def test_other_spellings_are_read_if_the_layout_is_declared() -> None:
    raw = {"text": "Once upon a time", "problem": "What is 2 + 2?", "solution": "4"}
    assert detect(raw).name == "text"
    assert convert(raw, "question_answer").messages == [USER, ANSWER]


@pytest.mark.parametrize("column", ["system", "system_prompt", "System", " System_Prompt"])
@pytest.mark.parametrize("has_null", [False, True])
def test_optional_column_is_read_though_the_first_row_has_none(column: str, has_null: bool) -> None:
    question = {"query": "What is 2 + 2?", "response": "4"}
    row_format = detect_format(RawRow("d:1", 1, question | ({column: None} if has_null else {})))
    assert (column in row_format.columns) == has_null
    assert column not in row_format.ignored
    row = canonicalize(RawRow("d:2", 2, {**question, column: "Be brief."}), row_format)
    assert row.messages == [SYSTEM, USER, ANSWER]


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"input": "What is 2 + 2?", "output": "4", "instruction": None}, {"instruction": "Answer in French."}),
        ({"instruction": "What is 2 + 2?", "completion": "4"}, {"input": "x = 2"}),
        ({"answer": None, "problem": "What is 2 + 2?", "solution": "4"}, {"answer": "four"}),
        ({"problem": "What is 2 + 2?", "solution": "4", "answer": None}, {"answer": "four"}),
    ],
)
def test_second_question_or_answer_that_the_first_row_lacks_is_refused(
    first: dict[str, Any], later: dict[str, Any]
) -> None:
    row_format = detect_format(RawRow("d:1", 1, first))
    assert canonicalize(RawRow("d:1", 1, first), row_format).messages == [USER, ANSWER]
    with pytest.raises(DataError, match=r"d:2: .* and another column may each be `(question|answer)`"):
        canonicalize(RawRow("d:2", 2, first | later), row_format)
