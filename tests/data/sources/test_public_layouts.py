"""Rows of public datasets, in the columns of their publication: read as they are meant, or refused with a remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from recipes_lib.config.schema import DatasetFormat
from recipes_lib.data.sources.formats import canonicalize, detect_format
from recipes_lib.data.sources.rows import RawRow, Row
from recipes_lib.errors import DataError

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
HUMAN, GPT = {"from": "human", "value": "What is 2 + 2?"}, {"from": "gpt", "value": "4"}
CHAT, BRIEF = {"messages": [USER, ANSWER]}, {"messages": [SYSTEM, USER, ANSWER]}
PAIR = {**CHAT, "num_prompt_messages": 1, "rejected": [WRONG]}
CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
RESULT = {"role": "tool", "content": "4"}

# dataset -> layout, row of the dataset, fields of the canonical row
PUBLIC: dict[str, tuple[DatasetFormat, dict[str, Any], dict[str, Any]]] = {
    "UltraChat": ("sharegpt", {"id": "0", "data": ["What is 2 + 2?", "4"]}, CHAT),
    "Capybara": ("sharegpt", {"source": "x", "conversation": [{"input": "What is 2 + 2?", "output": "4"}]}, CHAT),
    "Dolci": (
        "messages",
        {"messages": [USER, {"role": "assistant", "content": None, "function_calls": "add(2, 2)", "functions": None}]},
        {"messages": [USER, {"role": "assistant", "content": "", "function_calls": "add(2, 2)"}]},
    ),
    "Toucan": ("messages", {**CHAT, "available_tools": '[{"name": "add"}]'}, {**CHAT, "tools": [{"name": "add"}]}),
    "OpenAI's older chats": (
        "messages",
        {**CHAT, "functions": [{"name": "add", "parameters": {}}]},
        {**CHAT, "tools": [{"name": "add", "parameters": {}}]},
    ),
    "DeepSeek-R1's distillations": (
        "question_answer",
        {"input": "What is 2 + 2?", "output": "4", "reasoning_content": "It is even."},
        {"messages": [USER, {**ANSWER, "reasoning_content": "It is even."}]},
    ),
    "Nemotron, switch": (
        "question_answer",
        {"input": "What is 2 + 2?", "output": "4", "reasoning": "detailed thinking on"},
        CHAT,
    ),
    "VQA, text only": ("question_answer", {"image": None, "question": "What is 2 + 2?", "answer": "4"}, CHAT),
    "RLAIF-V, text only": (
        "preference",
        {"images": [], "question": "What is 2 + 2?", "chosen": "4", "rejected": "5"},
        PAIR,
    ),
    "reasoning twice": (
        "question_answer",
        {"input": "What is 2 + 2?", "output": "<think>It is even.</think>4", "thinking": "It is even, I think."},
        {"messages": [USER, {**ANSWER, "content": "<think>It is even.</think>4"}]},
    ),
    "XTuner": (
        "sharegpt",
        {
            "conversation": [
                {"system": "Be brief.", "input": "What is 2 + 2?", "output": "4"},
                {"system": "", "input": "What is 2 + 2?", "output": "4"},
            ]
        },
        {"messages": [SYSTEM, USER, ANSWER, USER, ANSWER]},
    ),
    "SlimOrca": (
        "sharegpt",
        {
            "conversations": [
                {"from": "system", "value": "Be brief.", "weight": None},
                {**HUMAN, "weight": 0.0},
                {**GPT, "weight": 1.0},
            ]
        },
        {**BRIEF, "untrained": {1}},
    ),
    "AgentInstruct": (
        "sharegpt",
        {
            "conversations": [
                {**HUMAN, "loss": None},
                {**GPT, "value": "OK.", "loss": False},
                {**HUMAN, "loss": None},
                {**GPT, "loss": True},
            ],
            "id": "os_0",
        },
        {"messages": [USER, {**ANSWER, "content": "OK."}, USER, ANSWER], "untrained": {1}},
    ),
    "APIGen-MT": (
        "sharegpt",
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "4"},
                GPT,
            ],
            "tools": json.dumps([{"name": "add"}]),
            "system": "Be brief.",
        },
        {"messages": [SYSTEM, USER, CALLED, RESULT, ANSWER], "tools": [{"name": "add"}]},
    ),
    "ms-swift's tool calls": (
        "messages",
        {"messages": [USER, {"role": "tool_call", "content": json.dumps(CALL)}, {**RESULT, "role": "tool_response"}]},
        {"messages": [USER, CALLED, RESULT]},
    ),
    "OpenAI's Responses": (
        "question_answer",
        {"input": [{**USER, "content": [{"type": "input_text", "text": "What is 2 + 2?"}]}], "output": "4"},
        CHAT,
    ),
    "Anthropic's thinking": (
        "messages",
        {
            "messages": [
                USER,
                {
                    **ANSWER,
                    "content": [
                        {"type": "thinking", "thinking": "Count.", "signature": "x"},
                        {"type": "text", "text": ANSWER["content"]},
                    ],
                },
            ]
        },
        {"messages": [USER, {**ANSWER, "reasoning_content": "Count."}]},
    ),
    "Mistral's thinking": (
        "messages",
        {
            "messages": [
                USER,
                {
                    **ANSWER,
                    "content": [
                        {
                            "type": "thinking",
                            "thinking": [{"type": "text", "text": "Count"}, {"type": "text", "text": "."}],
                        },
                        {"type": "text", "text": "4"},
                    ],
                },
            ]
        },
        {"messages": [USER, {**ANSWER, "reasoning_content": "Count."}]},
    ),
    "reasoning as a part": (
        "messages",
        {
            "messages": [
                USER,
                {**ANSWER, "content": [{"type": "reasoning", "text": "Count."}, {"type": "text", "text": "4"}]},
            ]
        },
        {"messages": [USER, {**ANSWER, "reasoning_content": "Count."}]},
    ),
    "OpenRouter's reasoning": (
        "messages",
        {
            "messages": [
                USER,
                {
                    **ANSWER,
                    "reasoning_details": [
                        {"type": "reasoning.text", "text": "Count", "index": 0},
                        {"type": "reasoning.summary", "summary": ".", "text": None},
                        {"type": "reasoning.encrypted", "data": "x"},
                    ],
                },
            ]
        },
        {"messages": [USER, {**ANSWER, "reasoning": "Count."}]},
    ),
    "OpenRouter's reasoning, as text too": (
        "messages",
        {"messages": [USER, {**ANSWER, "reasoning": "Count.", "reasoning_details": [{"summary": "It counts."}]}]},
        {"messages": [USER, {**ANSWER, "reasoning": "Count."}]},
    ),
    "Gemini": (
        "sharegpt",
        {
            "systemInstruction": {"role": "user", "parts": [{"text": "Be brief."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "What is "}, {"text": "2 + 2?", "fileData": None}]},
                {"role": "model", "parts": [{"text": "4"}]},
            ],
        },
        BRIEF,
    ),
    "Bedrock": (
        "messages",
        {
            "system": [{"text": "Be "}, {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [{**turn, "content": [{"text": turn["content"]}]} for turn in (USER, ANSWER)],
        },
        BRIEF,
    ),
    "torchtune's pairs": (
        "preference",
        {"chosen_conversations": [HUMAN, GPT], "rejected_conversations": [HUMAN, {**GPT, "value": "5"}]},
        PAIR,
    ),
    "OpenAI's pairs": (
        "preference",
        {
            "input": {"messages": [USER], "tools": [{"name": "add"}], "parallel_tool_calls": True},
            "preferred_output": [ANSWER],
            "non_preferred_output": [WRONG],
        },
        {**PAIR, "tools": [{"name": "add"}]},
    ),
    "Llama 3's roles": (
        "messages",
        {"messages": [USER, ANSWER, {**RESULT, "role": "ipython"}]},
        {"messages": [USER, ANSWER, RESULT]},
    ),
    "Cohere's roles": (
        "messages",
        {"messages": [{**SYSTEM, "role": "System"}, {**USER, "role": "User"}, {**ANSWER, "role": "Chatbot"}]},
        BRIEF,
    ),
    "Magpie": (
        "sharegpt",
        {"uuid": "1", "instruction": "?", "response": "!", "conversations": [HUMAN, GPT], "intent": "sum"},
        CHAT,
    ),
    "Firefly": ("question_answer", {"kind": "math", "input": "What is 2 + 2?", "target": "4"}, CHAT),
    "HelpSteer": ("question_answer", {"prompt": "What is 2 + 2?", "response": "4", "helpfulness": 3}, CHAT),
    "RedPajama 2": ("text", {"raw_content": "x = 4", "doc_id": "1", "meta": "{}"}, {"text": "x = 4"}),
    "FineWeb": (
        "text",
        {"text": "x = 4", "id": "1", "dump": "CC", "url": "u", "language_score": 0.9},
        {"text": "x = 4"},
    ),
    "stack-exchange-paired": (
        "preference",
        {"qid": 1, "question": "What is 2 + 2?", "date": "2012", "response_j": "4", "response_k": "5"},
        PAIR,
    ),
    "distilabel-math-preference": (
        "preference",
        {"instruction": "What is 2 + 2?", "chosen_response": "4", "rejected_response": "5", "chosen_rating": 9.0},
        PAIR,
    ),
    "SHP": (
        "preference",
        {"history": "What is 2 + 2?", "score_A": 1, "human_ref_A": "5", "human_ref_B": "4", "labels": 0},
        PAIR,
    ),
    "PKU-SafeRLHF": (
        "preference",
        {"prompt": "What is 2 + 2?", "response_0": "5", "response_1": "4", "better_response_id": 1},
        PAIR,
    ),
    "PKU-SafeRLHF, as CSV": (
        "preference",
        {"prompt": "What is 2 + 2?", "response_0": "5", "response_1": "4", "better_response_id": "1"},
        PAIR,
    ),
    "HelpSteer2": (
        "preference",
        {"prompt": "What is 2 + 2?", "response_1": "4", "response_2": "5", "preference_strength": -1},
        PAIR,
    ),
    "HelpSteer3": (
        "preference",
        {"context": [USER], "response1": "5", "response2": "4", "overall_preference": 3},
        PAIR,
    ),
    "Chatbot Arena": (
        "preference",
        {
            "model_a": "x",
            "model_b": "y",
            "winner": "model_b",
            "conversation_a": [USER, WRONG],
            "conversation_b": [USER, ANSWER],
        },
        PAIR,
    ),
    "Chatbot Arena's 55k battles": (
        "preference",
        {
            "prompt": '["What is 2 + 2?"]',
            "response_a": '["5"]',
            "response_b": '["4"]',
            "winner_model_a": "0",
            "winner_model_b": "1",
            "winner_tie": "0",
        },
        PAIR,
    ),
    "Chatbot Arena's 55k battles, two questions": (
        "preference",
        {
            "prompt": '["What is 2 + 2?", "What is 2 + 2?"]',
            "response_a": '["5", "4"]',
            "response_b": '["5", "5"]',
            "winner_model_a": 1,
            "winner_model_b": 0,
        },
        {"messages": [USER, WRONG, USER, ANSWER], "num_prompt_messages": 3, "rejected": [WRONG]},
    ),
    "Search Arena": (
        "preference",
        {"winner": "model_b", "messages_a": [USER, WRONG], "messages_b": [USER, ANSWER], "turn": 1},
        PAIR,
    ),
    "function-calling-chatml": (
        "sharegpt",
        {"system_message": "Be brief.", "function_description": "", "conversations": [HUMAN, GPT]},
        BRIEF,
    ),
    "When2Call": (
        "preference",
        {"tools": "[]", "messages": [USER], "chosen": ANSWER, "rejected": WRONG},
        PAIR,
    ),
    "OpenMathInstruct": (
        "question_answer",
        {"question": "What is 2 + 2?", "expected_answer": "4", "is_correct": True, "generated_solution": "4"},
        CHAT,
    ),
    "MOSS": ("sharegpt", {"conversation": [{"human": "What is 2 + 2?", "assistant": "4"}], "category": "x"}, CHAT),
    "LLaMA-Factory 1": (
        "messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": "What is 2 + 2?"}], "loss_weight": 0.0},
                {"role": "assistant", "content": [{"type": "text", "value": "4"}], "loss_weight": 0.0},
                {**USER, "loss_weight": 0.0},
                {**ANSWER, "loss_weight": 1.0},
            ]
        },
        {"messages": [USER, ANSWER, USER, ANSWER], "untrained": {0, 1, 2}},
    ),
    "LLaMA-Factory 1, pairs": (
        "preference",
        {"chosen_messages": [USER, {**ANSWER, "loss_weight": 1.0}], "rejected_messages": [USER, WRONG]},
        PAIR,
    ),
    "Magpie's pairs": (
        "preference",
        {"instruction": "What is 2 + 2?", "chosen": [USER, ANSWER], "rejected": [USER, WRONG], "responses": []},
        PAIR,
    ),
}


def detect_and_convert(raw: dict[str, Any], declared: DatasetFormat = "auto") -> tuple[DatasetFormat, Row]:
    entry = RawRow("d:1", 1, raw)
    row_format = detect_format(entry, declared)
    return row_format.name, canonicalize(entry, row_format)


@pytest.mark.parametrize("dataset", PUBLIC)
def test_public_row_is_read_as_published(dataset: str) -> None:
    layout, raw, fields = PUBLIC[dataset]
    assert detect_and_convert(raw) == (layout, Row(where="d:1", **fields))
    assert detect_and_convert(raw, layout) == detect_and_convert(raw)


@pytest.mark.parametrize(
    "raw",
    [
        {"messages": [USER, ANSWER], "rejected_messages": [USER, WRONG]},
        {"messages": [USER, ANSWER], "rejected_response": "5"},
        {"query": "What is 2 + 2?", "response": "4", "rejected_response": "5", "history": None},
    ],
)
def test_pairs_of_ms_swift_are_read_where_pairs_are_trained_on(raw: dict[str, Any]) -> None:
    assert detect_and_convert(raw, "preference")[1] == Row(where="d:1", **PAIR)
    assert detect_and_convert(raw)[1] == Row(where="d:1", **CHAT)


def test_column_of_chosen_answers_precedes_a_response() -> None:
    raw = {"question": "What is 2 + 2?", "response": "four", "chosen_response": "4", "rejected_response": "5"}
    assert detect_and_convert(raw, "preference")[1] == Row(where="d:1", **PAIR)


def test_list_of_texts_in_data_beside_an_answer_is_no_chat() -> None:
    raw = {"input": "What is 2 + 2?", "output": "4", "data": ["a", "b"]}
    assert detect_and_convert(raw) == ("question_answer", Row(where="d:1", **CHAT))


def test_verdict_columns_are_described_as_published() -> None:
    entry = RawRow("d:1", 1, PUBLIC["PKU-SafeRLHF"][1])
    expected = "`preference` layout, from response_1, response_0, prompt; ignored: better_response_id"
    assert str(detect_format(entry)) == expected


def test_column_with_two_meanings_in_a_layout_is_described_once() -> None:
    entry = RawRow("d:1", 1, PUBLIC["distilabel-math-preference"][1])
    assert str(detect_format(entry)).count("instruction") == 1


def test_other_spelling_of_an_optional_column_is_described() -> None:
    entry = RawRow("d:1", 1, PUBLIC["function-calling-chatml"][1])
    expected = "`sharegpt` layout, from conversations, system_message as system; ignored: function_description"
    assert str(detect_format(entry)) == expected


@pytest.mark.parametrize(
    ("raw", "remedy"),
    [
        ({"items": [HUMAN, GPT], "tags": ["a", "b"]}, r"write `dataset_columns: {conversations: items}`"),
        ({"context_messages": [USER], "context": "USER:"}, "{conversations: context_messages}"),
        ({"responses_create_params": {"input": [USER], "tools": []}}, "{conversations: responses_create_params.input}"),
        ({"conversation_a": [USER, ANSWER], "conversation_b": [USER, WRONG], "winner": "tie"}, "remove such rows"),
        ({"prompt": "2 + 2?", "answers": [{"answer": "4", "rank": 1}], "turns": 1}, "an object of `answers`"),
        ({"system": "SYSTEM: Be brief.", "chat": "USER: 2 + 2?\n\nASSISTANT: 4"}, "{text: chat}"),
        ({"trajectory": [USER, ANSWER, RESULT], "tools": "[]"}, "{conversations: trajectory}"),
        ({"input": "2 + 2?", "output": "Add: 4", "solution": "4"}, "dataset_format: question_answer"),
        ({"query": "2 + 2?", "answers": "[]", "tools": '[{"name": "add"}]'}, "write at least one function call"),
        ({"system": "Be brief.", "prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, r"{question: prompt}"),
        ({"message_id": "1", "parent_id": None, "text": "Hi", "role": "prompter"}, "join the messages of each"),
        ({"problem": "2 + 2?", "solution": "Add: 4", "answer": "4", "source": "x"}, "dataset_format: question_answer"),
        ({"question": "2 + 2?", "choices": ["3", "4"], "answer": 1}, "write it as a string"),
        ({"question": "2 + 2?", "context": {"title": ["x"]}, "answer": "4"}, "{context: null}"),
        ({"question": "2 + 2?", "solution": "4", "attempt": "Add: 4"}, "dataset_format: question_answer"),
        ({"question": "-", "r1_generation": "Add: 4", "solution": "4"}, "dataset_format: question_answer"),
        ({"question": "-", "solution": "4"}, "the dataset that has the questions"),
        ({"messages": [{**USER, "content": ""}, ANSWER]}, "the dataset that has the questions"),
        ({"messages": [SYSTEM, {**USER, "content": " -\n"}, ANSWER]}, "the dataset that has the questions"),
        ({"definition": "Add.", "inputs": "2 + 2", "targets": "4"}, "name them with `dataset_columns`"),
        ({"description": "Add.", "examples": [{"input": "2 2", "output": "4"}]}, "name them with `dataset_columns`"),
        ({"repo_name": "a/b", "files": [{"blob_id": "1", "path": "a.py"}]}, "name them with `dataset_columns`"),
        ({"question": "2 + 2?", "responses": [{"response": "4", "model": "x"}]}, "an object of `responses`"),
        ({"instruction": "2 + 2?", "completions": [{"response": "4", "score": 1}]}, "an object of `completions`"),
        (
            {"prompt": '["a"]', "response_a": '["b"]', "response_b": '["c"]', "winner_model_a": 0, "winner_model_b": 0},
            "remove such rows",
        ),
        (
            {"prompt": '["a"]', "response_a": '["b", "c"]', "response_b": '["c"]', "winner_model_a": 1},
            "as many as prompts",
        ),
        (
            {"prompt": '["a"]', "response_a": "[null]", "response_b": '["c"]', "winner_model_a": 1},
            "the text of the turn",
        ),
        ({"prompt": '["a"]', "response_a": "[b", "response_b": '["c"]', "winner_model_a": 1}, "write it as JSON"),
        ({"segments": [{"label": False, "text": "2 + 2?"}, {"label": True, "text": "4"}]}, "the masked text of `segm"),
        ({"contents": [{"role": "user", "parts": [{"fileData": {"fileUri": "a"}}]}]}, "only text parts"),
        ({"images": [{"path": "a.png"}], "texts": [{"user": "2 + 2?", "assistant": "4"}]}, "{images: null}"),
        ({"images": [], "texts": [{"user": "2 + 2?", "assistant": "4"}], "source": "x"}, "{conversations: texts}"),
        ({"image": {"path": "a.png"}, "question": "What is it?", "answer": "a cat"}, "{image: null}"),
        ({"image": {"path": "a.png"}, "question": "?", "chosen": "a cat", "rejected": "a dog"}, "{image: null}"),
        ({"inputs": [1, 2], "inputs_pretokenized": "2 + 2?", "targets": [3, 1]}, "{inputs: inputs_pretokenized"),
        (
            {"Question": "2 + 2?", "Complex_CoT": "Two and two are four.", "Response": "4"},
            r"`dataset_columns: {reasoning_content: Complex_CoT}` to train on it, or `{Complex_CoT: null}`",
        ),
        (
            {"problem": "2 + 2?", "thinking": "It is a sum.", "solution": "4"},
            "{reasoning_content: thinking}",
        ),
        ({"instruction": "2 + 2?", "cot": "Two and two are four.", "output": "4"}, "{reasoning_content: cot}"),
    ],
    ids=[
        "openchat",
        "OpenRLHF's prompts",
        "NeMo Gym",
        "arena",
        "Nectar",
        "glaive",
        "SWE-rebench",
        "OpenCodeReasoning",
        "xlam-irrelevance",
        "truthy-dpo",
        "oasst1",
        "NuminaMath 1.5",
        "MMLU",
        "HotpotQA",
        "s1K",
        "OpenCodeReasoning 2",
        "OpenCodeReasoning 2, its solution",
        "Nemotron 1, chat",
        "Nemotron 1, code",
        "Super-NaturalInstructions",
        "Codeforces",
        "The Stack 2",
        "NaturalReasoning",
        "UltraFeedback",
        "55k battles, tie",
        "55k battles, two answers",
        "55k battles, no answer",
        "55k battles, not JSON",
        "axolotl's segments",
        "Gemini, file",
        "The Cauldron",
        "FineVision, text only",
        "VQA",
        "RLAIF-V",
        "P3",
        "medical-o1-reasoning",
        "Opus 4.6 reasoning",
        "Alpaca with reasoning",
    ],
)
def test_other_public_row_is_refused_with_a_remedy(raw: dict[str, Any], remedy: str) -> None:
    with pytest.raises(DataError) as refused:
        detect_and_convert(raw)
    (problem,) = refused.value.problems
    assert remedy in str(problem.remedy)


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_chat_with_an_answer_of_its_own_beside_a_pair_is_refused(column: str) -> None:
    with pytest.raises(DataError, match=rf"`{column}` ends with an answer .*\n.*{column}: null"):
        detect_and_convert({column: [USER, ANSWER], "chosen": "4", "rejected": "5"}, "preference")


def test_other_spellings_are_read_if_the_layout_is_declared() -> None:
    raw = {"text": "Once upon a time", "problem": "What is 2 + 2?", "solution": "4"}
    assert detect_and_convert(raw)[0] == "text"
    assert detect_and_convert(raw, "question_answer")[1].messages == [USER, ANSWER]


@pytest.mark.parametrize("column", ["system", "system_prompt", "System", " System_Prompt"])
@pytest.mark.parametrize("has_null", [False, True])
def test_optional_column_is_read_though_the_first_row_has_none(column: str, has_null: bool) -> None:
    question = {"query": "What is 2 + 2?", "response": "4"}
    row_format = detect_format(RawRow("d:1", 1, question | ({column: None} if has_null else {})))
    assert (column in row_format.columns) == has_null
    assert column not in row_format.ignored
    row = canonicalize(RawRow("d:2", 2, {**question, column: "Be brief."}), row_format)
    assert row.messages == [SYSTEM, USER, ANSWER]
