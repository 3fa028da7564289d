"""Terminators in answers: the one at the end is accepted, any other is an error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.chat_cases import answer, chat, spans, user
from tests.data.templates.tokenizers import build_byte_level

from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.chat.spans import refuse_inner_ends
from recipes_lib.data.sources.rows import Remark
from recipes_lib.errors import DataError

ENDS = ["</s>", "<|im_end|>"]
pieces = st.lists(st.sampled_from(["a", " ", "<", *ENDS]), max_size=4).map("".join)


@given(answer=pieces, added=st.sampled_from(["", "</s>", "<|im_end|>\n"]))
def test_accepted_answer_has_one_terminator_at_its_end(answer: str, added: str) -> None:
    turn = answer + added
    try:
        refuse_inner_ends("row 1", "message 1", [answer], turn, ENDS)
    except DataError:
        assert any(end in answer for end in ENDS)
        return
    num_ends = sum(answer.count(end) for end in ENDS)
    assert not turn.rstrip().endswith(tuple(end + end for end in ENDS))
    assert num_ends == 0 or (num_ends == 1 and not added.strip() and answer.rstrip().endswith(tuple(ENDS)))


def test_terminator_error_shows_position() -> None:
    with pytest.raises(DataError) as refused:
        refuse_inner_ends("row 1", "message 1", ["well, " * 20 + "Paris</s>Berlin"], "Paris</s>Berlin</s>", ENDS)
    (problem,) = refused.value.problems
    assert problem.where == "row 1"
    assert "message 1 is trained on and spells the end token '</s>'" in problem.found
    assert "Paris</s>Berlin" in problem.found
    assert len(problem.found) < 200


CALL = {"type": "function", "function": {"name": "sky", "arguments": {}}}
TOOL = {"role": "tool", "content": "blue"}
# As Gemma 4's: the answer of the tool is part of the turn, before text beside the call.
GEMMA = (
    "{% for m in messages %}{% if m.role != 'tool' %}<|turn>{{ m.role }}\n"
    "{% if m.tool_calls %}<|call>{{ m.tool_calls[0].function.name }}<call|>"
    "{% for other in messages[loop.index:loop.index + 1] %}<|answer>{{ other.content }}<answer|>"
    "{% else %}<|answer>{% endfor %}{% endif %}"
    "{{ m.content }}{% if not m.tool_calls %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("beside", "rest"),
    [("", []), ("", [TOOL]), ("", [TOOL, answer("It is blue.")]), ("Let me see.", [TOOL, answer("It is blue.")])],
    ids=["call", "tool", "answer", "beside"],
)
def test_call_ends_in_the_token_that_opens_the_answer_of_its_tool(beside: str, rest: list[dict[str, Any]]) -> None:
    tokenizer = build_byte_level(GEMMA)
    (row,) = RowEncoder(tokenizer).encode([chat(user("sky?"), answer(beside, tool_calls=[CALL]), *rest)])
    assert spans(tokenizer, row) == ["<|call>sky<call|><|answer>", *["It is blue.<turn|>" for _ in rest[1:]]]
    assert (Remark.LOST_BESIDE_CALL in row.remarks) == bool(beside)


@pytest.mark.parametrize("end", ["", "<|other>", "<|answer>:", "\\n"])
def test_token_of_a_tool_turn_is_no_target_after_a_call_that_ends_without_it(end: str) -> None:
    template = GEMMA.replace("{% else %}<|answer>", "{% else %}{{ '" + end + "' }}")
    tokenizer = build_byte_level(template.replace("<|answer>{{ other", "{{ '\\n' }}<|answer>{{ other"))
    (row,) = RowEncoder(tokenizer).encode([chat(user("sky?"), answer("", tool_calls=[CALL]), TOOL)])
    assert spans(tokenizer, row) == ["<|call>sky<call|>"]


# As GLM's: turns have no end tokens, and the token that opens the next turn stops generation.
OPEN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}</call>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("rest", [[], [TOOL], [TOOL, answer("It is blue.")]], ids=["call", "tool", "answer"])
def test_open_turn_with_a_call_ends_in_the_token_that_opens_the_answer_of_its_tool(rest: list[dict[str, Any]]) -> None:
    tokenizer = build_byte_level(OPEN, extra=("<|user|>", "<|assistant|>", "<|tool|>"))
    encoder = RowEncoder(tokenizer, eos_token="<|user|>")
    (row,) = encoder.encode([chat(user("sky?"), answer("", tool_calls=[CALL]), *rest)])
    assert spans(tokenizer, row) == ["<call>sky</call><|tool|>", *["It is blue.<|user|>" for _ in rest[1:]]]


def test_call_ends_in_eos_token_under_a_template_that_refuses_answers_of_tools() -> None:
    template = OPEN.replace("<|{{", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}<|{{")
    tokenizer = build_byte_level(template, extra=("<|user|>", "<|assistant|>"))
    (row,) = RowEncoder(tokenizer, eos_token="<|user|>").encode([chat(user("sky?"), answer("", tool_calls=[CALL]))])
    assert spans(tokenizer, row) == ["<call>sky</call><|user|>"]
