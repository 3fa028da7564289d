"""Rows of every layout, in the columns of public datasets, with the canonical rows that they are read as."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from recipes_lib.config.schema import DatasetFormat

Fields = dict[str, Any]
Rows = Mapping[DatasetFormat, Mapping[str, Fields]]
"""Layout -> dataset -> its row."""

Case = tuple[DatasetFormat, Fields, Fields]
"""Layout, row of the dataset, fields of the canonical row."""

ASKED = "What is 2 + 2?"
USER = {"role": "user", "content": ASKED}
ANSWER = {"role": "assistant", "content": "4"}
LATEX = '2 + 2? A) \\frac{8}{2} B) it\'s\n"5"'
WRONG = {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "Be brief."}
JSON_CHAT = json.dumps([USER, ANSWER])
CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
WRITTEN_CALL = {"name": "add", "arguments": '{"a": 2, "b": 2}'}
RESULT = {"role": "tool", "content": "4"}
HUMAN, GPT = {"from": "human", "value": ASKED}, {"from": "gpt", "value": "4"}
ADD = {"role": "user", "content": "Add.\n2 + 2"}
CHAT, BRIEF = {"messages": [USER, ANSWER]}, {"messages": [SYSTEM, USER, ANSWER]}
ANSWERS = {"chosen": [ANSWER], "rejected": [WRONG]}
TEXTS = {"chosen": "4", "rejected": "5"}
WHOLE = {"chosen": [USER, ANSWER], "rejected": [USER, WRONG]}
TEXT_PAIR = {"prompt": "2 + 2 =", "completion": " 4", "rejected": " 5"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
DIALOGUE = "\n\nHuman: What is 2 + 2?\n\nAssistant:"


def answered(**keys: Any) -> Fields:
    return {"messages": [USER, {**ANSWER, **keys}]}


def pair(*prompt: dict[str, Any]) -> Fields:
    return {"messages": [*prompt, ANSWER], "num_prompt_messages": len(prompt), "rejected": [WRONG]}


UNCHANGED: Rows = {
    "messages": {
        "chat": BRIEF,
        "chat ending with the user": {"messages": [USER, ANSWER, USER]},
        "two answers in a row": {"messages": [USER, ANSWER, ANSWER]},
        "keys of the template": answered(reasoning_content="easy"),
    },
    "prompt_completion": {
        "prompt and completion": {"prompt": "2 + 2 =", "completion": " 4"},
        "empty prompt": {"prompt": "", "completion": "a"},
    },
    "text": {"text": {"text": " To be, or not to be \n"}},
}
AS_CHAT: Rows = {
    "messages": {
        "no tools": {**CHAT, "tools": "[]"},
        "text parts": {
            "messages": [
                {**USER, "content": [{"type": "text", "text": part} for part in ("What is ", "2 + 2?")]},
                ANSWER,
            ]
        },
        "null keys": {"messages": [{**USER, "name": None, "tool_calls": None}, {**ANSWER, "tool_calls": []}]},
        "a chat beside a question and an answer": {**CHAT, "question": ASKED, "answer": "4"},
        "chat under the keys of ShareGPT": {"messages": [HUMAN, {"role": "Assistant", "value": "4", "from": None}]},
        "chat in a cell": {"messages": json.dumps([USER, ANSWER])},
        "parts that are strings": {"messages": [{**USER, "content": ["What is ", "2 + 2?"]}, ANSWER]},
        "chat beside a null column": {**CHAT, "text": None},
        "messages as an object of lists": {"messages": {"role": ["user", "assistant"], "content": [ASKED, "4"]}},
        "images beside text": {**CHAT, "images": ["a.png"]},
        "no tools and variables in cells": {**CHAT, "tools": "null", "chat_template_kwargs": "null"},
    },
    "sharegpt": {
        "ShareGPT": {"conversations": [HUMAN, GPT]},
        "ShareGPT in role and content": {"conversations": [{**USER, "role": "human"}, ANSWER]},
        "LMSYS": {"conversation": [USER, ANSWER], "model": "vicuna"},
        "LIMA": {"conversations": [ASKED, "4"], "source": "web"},
        "UltraChat": {"id": "0", "data": [ASKED, "4"]},
        "Capybara": {"source": "x", "conversation": [{"input": ASKED, "output": "4"}]},
        "Magpie": {"uuid": "1", "instruction": "?", "response": "!", "conversations": [HUMAN, GPT], "intent": "sum"},
        "MOSS": {"conversation": [{"human": ASKED, "assistant": "4"}], "category": "x"},
    },
    "alpaca": {
        "Alpaca with its text": {"instruction": ASKED, "input": "", "output": "4", "text": "Q: What is 2 + 2?\nA: 4"}
    },
    "question_answer": {
        "question and answer": {"question": ASKED, "answer": "4"},
        "MetaMathQA": {"type": "t", "query": ASKED, "original_question": "?", "response": "4"},
        "a problem and its solution": {"problem": ASKED, "solution": "4", "level": 1},
        "a prompt and its response": {"prompt": ASKED, "response": "4", "label": "good"},
        "an instruction and its completion": {"instruction": ASKED, "completion": "4"},
        "Aya": {"inputs": ASKED, "targets": "4", "language": "English"},
        "OpenMathInstruct": {"problem": ASKED, "generated_solution": "4", "expected_answer": "4"},
        "medical-o1": {"Question": ASKED, "Complex_CoT": "?", "Response": "4"},
        "Nemotron, switch": {"input": ASKED, "output": "4", "reasoning": "detailed thinking on"},
        "VQA, text only": {"image": None, "question": ASKED, "answer": "4"},
        "OpenAI's Responses": {"input": [{**USER, "content": [{"type": "input_text", "text": ASKED}]}], "output": "4"},
        "Firefly": {"kind": "math", "input": ASKED, "target": "4"},
        "HelpSteer": {"prompt": ASKED, "response": "4", "helpfulness": 3},
        "OpenMathInstruct with verdicts": {
            "question": ASKED,
            "expected_answer": "4",
            "is_correct": True,
            "generated_solution": "4",
        },
    },
}
AS_BRIEF: Rows = {
    "sharegpt": {
        "ShareGPT with system column": {"conversations": [HUMAN, GPT], "system": "Be brief."},
        "ShareGPT with a system prompt": {"conversations": [USER, ANSWER], "system_prompt": "Be brief."},
        "Gemini": {
            "systemInstruction": {"role": "user", "parts": [{"text": "Be brief."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "What is "}, {"text": "2 + 2?", "fileData": None}]},
                {"role": "model", "parts": [{"text": "4"}]},
            ],
        },
        "function-calling-chatml": {
            "system_message": "Be brief.",
            "function_description": "",
            "conversations": [HUMAN, GPT],
        },
    },
    "messages": {
        "chat with its system prompt beside it": {**CHAT, "system": "Be brief."},
        "chat with its system prompt beside it and inside": {**BRIEF, "system": "Be brief."},
        "Bedrock": {
            "system": [{"text": "Be "}, {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [{**turn, "content": [{"text": turn["content"]}]} for turn in (USER, ANSWER)],
        },
        "Cohere's roles": {
            "messages": [{**SYSTEM, "role": "System"}, {**USER, "role": "User"}, {**ANSWER, "role": "Chatbot"}]
        },
    },
    "question_answer": {
        "OpenOrca": {"id": "1", "system_prompt": "Be brief.", "question": ASKED, "response": "4"},
        "Nemotron": {"input": [USER], "output": "4", "system_prompt": "Be brief.", "reasoning": "off"},
    },
}
AS_COMPLETION: Rows = {
    "prompt_completion": {
        "prompt and completion as chats": {"prompt": [SYSTEM, USER], "completion": [ANSWER]},
        "prompt as a chat and completion as text": {"prompt": [SYSTEM, USER], "completion": "4"},
        "prompt as text and completion as a chat": {
            "prompt": ASKED,
            "completion": [ANSWER],
            "system_prompt": "Be brief.",
        },
    }
}
AS_ADDITION: Rows = {
    "alpaca": {
        "Alpaca": {"instruction": "Add.", "input": "2 + 2", "output": "4"},
        "Alpaca in upper case": {
            "Instruction": "Add.",
            "Input ": "2 + 2",
            "OUTPUT": "4",
            "Text": "Add. 2 + 2 4",
            "ID": 1,
        },
    },
    "dolly": {
        "Dolly": {"instruction": "Add.", "context": "2 + 2", "response": "4", "category": "closed_qa"},
        "GPTeacher": {"instruction": "Add.", "input": "2 + 2", "response": "4"},
    },
    "question_answer": {
        "a question about a context": {"question": "Add.", "context": "2 + 2", "answer": "4"},
        "a question about a passage": {"question": "Add.", "Passage": "2 + 2", "answer": "4", "label": 3},
    },
}
AS_PAIR: Rows = {
    "preference": {
        "preference as chats": {"prompt": [USER], **ANSWERS},
        "preference with a text prompt and messages": {"prompt": ASKED, **ANSWERS},
        "LLaMA-Factory's pairs as objects": {
            "conversations": [HUMAN],
            "chosen": GPT,
            "rejected": {"from": "gpt", "value": "5"},
        },
        "pairs of chats in cells": {
            "chosen": json.dumps([USER, ANSWER]),
            "rejected": json.dumps([USER, WRONG], indent=2),
        },
        "pairs of objects of lists": {
            "chosen": {"from": ["human", "gpt"], "value": [ASKED, "4"]},
            "rejected": {"from": ["human", "gpt"], "value": [ASKED, "5"]},
        },
        "preference with the prompt inside and as text": {"prompt": ASKED, **WHOLE},
        "preference with the prompt inside and as a chat": {"prompt": [USER], **WHOLE},
        "RLAIF-V, text only": {"images": [], "question": ASKED, **TEXTS},
        "torchtune's pairs": {
            "chosen_conversations": [HUMAN, GPT],
            "rejected_conversations": [HUMAN, {**GPT, "value": "5"}],
        },
        "stack-exchange-paired": {"qid": 1, "question": ASKED, "date": "2012", "response_j": "4", "response_k": "5"},
        "distilabel-math-preference": {
            "instruction": ASKED,
            "chosen_response": "4",
            "rejected_response": "5",
            "chosen_rating": 9.0,
        },
        "SHP": {"history": ASKED, "score_A": 1, "human_ref_A": "5", "human_ref_B": "4", "labels": 0},
        "PKU-SafeRLHF": {"prompt": ASKED, "response_0": "5", "response_1": "4", "better_response_id": 1},
        "PKU-SafeRLHF, as CSV": {"prompt": ASKED, "response_0": "5", "response_1": "4", "better_response_id": "1"},
        "HelpSteer2": {"prompt": ASKED, "response_1": "4", "response_2": "5", "preference_strength": -1},
        "HelpSteer3": {"context": [USER], "response1": "5", "response2": "4", "overall_preference": 3},
        "Chatbot Arena": {
            "model_a": "x",
            "model_b": "y",
            "winner": "model_b",
            "conversation_a": [USER, WRONG],
            "conversation_b": [USER, ANSWER],
        },
        "Chatbot Arena's 55k battles": {
            "prompt": '["What is 2 + 2?"]',
            "response_a": '["5"]',
            "response_b": '["4"]',
            "winner_model_a": "0",
            "winner_model_b": "1",
            "winner_tie": "0",
        },
        "Search Arena": {"winner": "model_b", "messages_a": [USER, WRONG], "messages_b": [USER, ANSWER], "turn": 1},
        "When2Call": {"tools": "[]", "messages": [USER], "chosen": ANSWER, "rejected": WRONG},
        "LLaMA-Factory 1, pairs": {
            "chosen_messages": [USER, {**ANSWER, "loss_weight": 1.0}],
            "rejected_messages": [USER, WRONG],
        },
        "Magpie's pairs": {"instruction": ASKED, "responses": [], **WHOLE},
    }
}
AS_BRIEF_PAIR: Rows = {
    "preference": {
        "preference with the prompt inside": {"chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, WRONG]},
        "preference with a chat and texts": {"prompt": [SYSTEM, USER], **TEXTS},
        "orca": {"system": "Be brief.", "question": ASKED, **TEXTS},
        "LLaMA-Factory's pairs as strings": {"conversations": [HUMAN], "system": "Be brief.", **TEXTS},
        "distilabel's pairs of Orca": {"system": "Be brief.", "input": ASKED, **TEXTS},
        "preference with the prompt inside and its system prompt beside it": {"system": "Be brief.", **WHOLE},
    }
}
AS_CODE: Rows = {
    "text": {
        "The Stack": {"content": "x = 4", "lang": "Python"},
        "RedPajama 2": {"raw_content": "x = 4", "doc_id": "1", "meta": "{}"},
        "FineWeb": {"text": "x = 4", "id": "1", "dump": "CC", "url": "u", "language_score": 0.9},
    }
}
AS_REASONED: Rows = {
    "messages": {
        "Anthropic's thinking": answered(
            content=[
                {"type": "thinking", "thinking": "Count.", "signature": "x"},
                {"type": "text", "text": ANSWER["content"]},
            ]
        ),
        "Mistral's thinking": answered(
            content=[
                {"type": "thinking", "thinking": [{"type": "text", "text": "Count"}, {"type": "text", "text": "."}]},
                {"type": "text", "text": "4"},
            ]
        ),
        "reasoning as a part": answered(
            content=[{"type": "reasoning", "text": "Count."}, {"type": "text", "text": "4"}]
        ),
        "LLaMA-Factory's parts": answered(
            content=[{"type": "reasoning", "value": "Count."}, {"type": "text", "value": "4"}]
        ),
    }
}
OTHER: dict[str, Case] = {
    "chat with tools": (
        "messages",
        {**CHAT, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}},
        {**CHAT, "tools": TOOLS, "template_kwargs": {"enable_thinking": False}},
    ),
    "tools as JSON": ("messages", {**CHAT, "tools": '[{"name": "add"}]'}, {**CHAT, "tools": [{"name": "add"}]}),
    "Toucan": ("messages", {**CHAT, "available_tools": '[{"name": "add"}]'}, {**CHAT, "tools": [{"name": "add"}]}),
    "function calls as the answer, as in xlam": (
        "question_answer",
        {"id": 1, "query": ASKED, "answers": json.dumps([WRITTEN_CALL], indent=1), "tools": '[{"name": "add"}]'},
        {"messages": [USER, CALLED], "tools": [{"name": "add"}]},
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
    "preference with a margin": (
        "preference",
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5", "margin": 2},
        {**TEXT_PAIR, "margin": 2.0},
    ),
    "preference as chats with a margin": (
        "preference",
        {"prompt": [USER], "margin": 0.5, **ANSWERS},
        {**pair(USER), "margin": 0.5},
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
    "LLaMA-Factory's pairs of instructions": (
        "preference",
        {"instruction": "Add.", "input": "2 + 2", **TEXTS},
        pair(ADD),
    ),
    "OpenAI's functions": (
        "messages",
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": WRITTEN_CALL},
                {"role": "function", "name": "add", "content": "4"},
                {**ANSWER, "function_call": ""},
            ]
        },
        {"messages": [USER, CALLED, {**RESULT, "name": "add"}, ANSWER]},
    ),
    "The Stack's file of a chat": ("text", {"content": JSON_CHAT, "original": str([USER])}, {"text": JSON_CHAT}),
    "an answer that is JSON of a chat": (
        "alpaca",
        {"instruction": "Write a chat.", "output": JSON_CHAT},
        {"messages": [{**USER, "content": "Write a chat."}, {**ANSWER, "content": JSON_CHAT}]},
    ),
    "choices in the question": (
        "question_answer",
        {"question": LATEX, "choices": ["\\frac{8}{2} ", 'it\'s\n"5"'], "answer": "A"},
        {"messages": [{**USER, "content": LATEX}, {**ANSWER, "content": "A"}]},
    ),
    "a pair about a context": (
        "preference",
        {"instruction": "Add.", "context": "2 + 2", **TEXTS},
        {"messages": [ADD, ANSWER], "num_prompt_messages": 1, "rejected": [WRONG]},
    ),
    "a pair about a passage": (
        "preference",
        {"question": "Add.", "passage": "2 + 2", **TEXTS},
        {"messages": [ADD, ANSWER], "num_prompt_messages": 1, "rejected": [WRONG]},
    ),
    "choices as answers": ("question_answer", {"question": ASKED, "choices": ["3", "4"], "answer": "4"}, CHAT),
    "tools as texts": ("messages", {**CHAT, "tools": [json.dumps({"name": "f"})]}, {**CHAT, "tools": [{"name": "f"}]}),
    "template variables in a cell": (
        "messages",
        {**CHAT, "chat_template_kwargs": '{"enable_thinking": true}'},
        {**CHAT, "template_kwargs": {"enable_thinking": True}},
    ),
    "Dolci": (
        "messages",
        {"messages": [USER, {"role": "assistant", "content": None, "function_calls": "add(2, 2)", "functions": None}]},
        {"messages": [USER, {"role": "assistant", "content": "", "function_calls": "add(2, 2)"}]},
    ),
    "OpenAI's older chats": (
        "messages",
        {**CHAT, "functions": [{"name": "add", "parameters": {}}]},
        {**CHAT, "tools": [{"name": "add", "parameters": {}}]},
    ),
    "DeepSeek-R1's distillations": (
        "question_answer",
        {"input": ASKED, "output": "4", "reasoning_content": "It is even."},
        answered(reasoning_content="It is even."),
    ),
    "reasoning twice": (
        "question_answer",
        {"input": ASKED, "output": "<think>It is even.</think>4", "thinking": "It is even, I think."},
        answered(content="<think>It is even.</think>4"),
    ),
    "XTuner": (
        "sharegpt",
        {
            "conversation": [
                {"system": "Be brief.", "input": ASKED, "output": "4"},
                {"system": "", "input": ASKED, "output": "4"},
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
    "OpenRouter's reasoning": (
        "messages",
        answered(
            reasoning_details=[
                {"type": "reasoning.text", "text": "Count", "index": 0},
                {"type": "reasoning.summary", "summary": ".", "text": None},
                {"type": "reasoning.encrypted", "data": "x"},
            ]
        ),
        answered(reasoning="Count."),
    ),
    "OpenRouter's reasoning, as text too": (
        "messages",
        answered(reasoning="Count.", reasoning_details=[{"summary": "It counts."}]),
        answered(reasoning="Count."),
    ),
    "OpenAI's pairs": (
        "preference",
        {
            "input": {"messages": [USER], "tools": [{"name": "add"}], "parallel_tool_calls": True},
            "preferred_output": [ANSWER],
            "non_preferred_output": [WRONG],
        },
        {**pair(USER), "tools": [{"name": "add"}]},
    ),
    "Llama 3's roles": (
        "messages",
        {"messages": [USER, ANSWER, {**RESULT, "role": "ipython"}]},
        {"messages": [USER, ANSWER, RESULT]},
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
    "LLaMA-Factory 1": (
        "messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": ASKED}], "loss_weight": 0.0},
                {"role": "assistant", "content": [{"type": "text", "value": "4"}], "loss_weight": 0.0},
                {**USER, "loss_weight": 0.0},
                {**ANSWER, "loss_weight": 1.0},
            ]
        },
        {"messages": [USER, ANSWER, USER, ANSWER], "untrained": {0, 1, 2}},
    ),
}
READ_AS: list[tuple[Fields | None, Rows]] = [
    (None, UNCHANGED),
    (CHAT, AS_CHAT),
    (BRIEF, AS_BRIEF),
    ({**BRIEF, "num_prompt_messages": 2}, AS_COMPLETION),
    ({"messages": [ADD, ANSWER]}, AS_ADDITION),
    (pair(USER), AS_PAIR),
    (pair(SYSTEM, USER), AS_BRIEF_PAIR),
    ({"text": "x = 4"}, AS_CODE),
    (answered(reasoning_content="Count."), AS_REASONED),
]
CASES: dict[str, Case] = OTHER | {
    name: (layout, row, row if fields is None else fields)
    for fields, layouts in READ_AS
    for layout, rows in layouts.items()
    for name, row in rows.items()
}
