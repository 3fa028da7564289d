"""Content that a chat template does not render: errors for targets, remarks for the rest."""

from __future__ import annotations

from typing import Any

import pytest
from tests.data.chat_cases import answer, chat, refusal, source, spans, user
from tests.data.templates.tokenizers import build_byte_level

from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.sources.rows import Remark, Row
from recipes_lib.errors import DataError

ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OPEN, CLOSE = "<|im_start|>{{ m.role }}\n", "<|im_end|>\n"


def loop(body: str, before: str = "") -> str:
    return before + "{% for m in messages %}" + OPEN + body + CLOSE + "{% endfor %}" + ASKS


def encoder(template: str) -> RowEncoder:
    return RowEncoder(build_byte_level(template, extra=("<|im_start|>", "<|im_end|>")))


def remarks(template: str, *messages: dict[str, Any], **options: Any) -> list[Remark]:
    (encoded,) = encoder(template).encode([chat(*messages, **options)])
    return list(encoded.remarks)


CONTENT = loop("{{ m.content }}")
SYSTEM = {"role": "system", "content": "be \u201ckind\u201d"}
TOOL = {"role": "tool", "content": '{"sky": "blue"}'}
CALL = {"type": "function", "function": {"name": "sky", "arguments": {"city": "Paris", "days": [1, True]}}}
NO_SYSTEM = CONTENT.replace("in messages", "in messages if m.role != 'system'")
NO_TOOL = CONTENT.replace("in messages", "in messages if m.role != 'tool'")


@pytest.mark.parametrize(
    ("template", "row", "found"),
    [
        (NO_SYSTEM, chat(SYSTEM, user("hi"), answer("yes")), "does not write message 0, of the role 'system'"),
        (NO_TOOL, chat(user("hi"), TOOL, answer("yes")), "does not write message 1, of the role 'tool'"),
        (loop("{{ m.content if m.role != 'user' }}"), chat(user("hi"), answer("yes")), "of the role 'user'"),
        (loop("{{ m.content if m.role != 'tool' else 'tool' }}"), chat(user("hi"), TOOL, answer("y")), "message 1"),
        (source("zephyr_loop"), chat(user("hi"), TOOL, answer("yes")), "does not write message 1, of the role 'tool'"),
        (CONTENT, chat(user("hi"), answer("", tool_calls=[CALL]), TOOL, answer("yes")), "message 1 calls 'sky', but"),
        (
            CONTENT,
            chat(user("hi"), answer("So:", tool_calls=[CALL]), TOOL, answer("yes")),
            "message 1 calls 'sky', but",
        ),
    ],
    ids=["system", "tool", "content", "constant", "zephyr", "call", "call beside words"],
)
def test_message_not_rendered_by_template_is_error(template: str, row: Row, found: str) -> None:
    with pytest.raises(DataError, match=found):
        encoder(template).encode_prompt(row)
    for loss_on in (None, "all", "last_assistant"):
        one = RowEncoder(build_byte_level(template, extra=("<|im_start|>", "<|im_end|>")), loss_on=loss_on)
        assert found in refusal(one, row)


@pytest.mark.parametrize(
    "template",
    [
        CONTENT,
        loop("{{ m.content | trim }}"),
        loop("{{ m.content | tojson if m.role != 'assistant' else m.content }}"),
        loop("{{ m.content | upper if m.role != 'assistant' else m.content }}"),
        # The system message before the loop, or in the last user turn.
        "{{ messages[0].content }}" + NO_SYSTEM,
        NO_SYSTEM.replace("{{ m.content", "{{ messages[0].content if loop.index == 3 }}{{ m.content"),
    ],
    ids=["content", "trimmed", "JSON", "upper", "before", "later"],
)
def test_message_rendered_in_other_form_is_accepted(template: str) -> None:
    messages = [SYSTEM, user(' say\n"yes" '), answer("yes"), user("placeholder"), answer("no")]
    assert remarks(template, *messages) == []
    assert len(encoder(template).encode_prompt(chat(*messages)))


def test_empty_or_untrained_message_may_be_omitted_by_template() -> None:
    chatml = NO_SYSTEM.replace("m.content", "m.content.split('</think>')[-1]")
    assert (
        remarks(chatml, {"role": "system", "content": " "}, user("hi"), answer("a</think>b"), user("x"), answer("y"))
        == []
    )
    turns = [user("hi"), answer("<think>a</think>b"), user("x"), answer("y")]
    assert remarks(chatml, *turns, untrained={1}) == []


KEYED = loop("{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}")
LAST = loop("{% if loop.last and m.reasoning_content %}{{ m.reasoning_content | upper }}{% endif %}{{ m.content }}")
SPLIT = loop("{{ m.content.split('</think>')[-1] }}")
THOUGHT = answer("yes", reasoning_content="why")


@pytest.mark.parametrize(
    ("template", "messages", "is_lost"),
    [
        (CONTENT, [user("hi"), THOUGHT], True),
        (CONTENT, [user("hi"), answer("yes", thinking="why")], True),
        (CONTENT, [user("hi"), THOUGHT, user("more"), answer("no")], False),
        (CONTENT, [user("hi"), answer("<think>why</think>yes")], False),
        (KEYED, [user("hi"), THOUGHT], False),
        (KEYED, [user("hi"), answer("yes", thinking="why")], False),
        (LAST, [user("hi"), THOUGHT, user("more"), THOUGHT], False),
        (SPLIT, [user("hi"), answer("<think>why</think>yes")], True),
        (SPLIT, [user("hi"), answer("<think>why</think>yes"), user("more"), answer("no")], False),
        (SPLIT, [user("hi"), answer("<think>\n</think>yes")], False),
        (source("chatml"), [user("hi"), THOUGHT], True),
    ],
)
def test_dropped_reasoning_of_last_turn_is_remarked(template, messages, is_lost) -> None:
    assert remarks(template, *messages) == ([Remark.LOST_REASONING] if is_lost else [])


def test_calls_as_text_are_trained_on_or_refused() -> None:
    row = chat(user("hi"), answer("So:", function_calls="sky(city='Paris')"))
    tokenizer = build_byte_level(CONTENT, extra=("<|im_start|>", "<|im_end|>"))
    written = encoder(loop("{{ m.content }}{% if m.function_calls %} {{ m.function_calls }}{% endif %}"))
    assert spans(tokenizer, *written.encode([row])) == ["So: sky(city='Paris')<|im_end|>"]
    assert "(\"sky(city='Paris')\") is not in the text that would be trained on" in refusal(encoder(CONTENT), row)


@pytest.mark.parametrize(("content", "is_remarked"), [("<tool_response>\n4</tool_response>", True), ("4", False)])
def test_result_with_the_tag_of_the_template_is_remarked(content: str, is_remarked: bool) -> None:
    messages = user("hi"), {"role": "tool", "content": content}, answer("yes")
    tagging = loop("{{ '<tool_response>\n' if m.role == 'tool' }}{{ m.content }}")
    assert remarks(tagging, *messages) == ([Remark.TAGGED_RESULT] if is_remarked else [])
    assert remarks(CONTENT, *messages) == []


TAGGED = answer("<think>why</think>yes")
BLOCK = loop("<think>{{ m.reasoning_content }}</think>{{ m.content }}")


@pytest.mark.parametrize(
    ("template", "turn", "expected"),
    [
        (BLOCK, TAGGED, [Remark.TAGGED_REASONING]),
        (BLOCK, answer("why\n</think>\nyes"), [Remark.TAGGED_REASONING]),  # The tag is in the generation prompt.
        (BLOCK, THOUGHT, []),
        # Reasoning is written only on request: beside the empty block of the template, that of an answer is a second.
        (loop("{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}"), TAGGED, [Remark.TAGGED_REASONING]),
        (loop("{{ m.content }}", before="Reason in <think></think>."), TAGGED, []),
        (KEYED, TAGGED, []),
        (SPLIT, answer("<think>\n</think>yes"), []),
    ],
    ids=["block", "half a block", "key", "second block", "described", "same form", "none"],
)
def test_reasoning_in_other_tags_than_those_of_the_template_is_remarked(template, turn, expected) -> None:
    assert remarks(template, user("hi"), turn) == expected
    assert remarks(template, user("hi"), turn, user("more"), answer("no")) == expected
    assert remarks(template, user("hi"), turn, user("more"), answer("NO"), untrained={1}) == []


THINKS = ASKS.replace("assistant\n", "assistant\n<think>{{ '</think>' if enable_thinking is false }}")
PLAIN, OTHER = CONTENT.replace(ASKS, THINKS), [Remark.OTHER_OPENING]
EMPTY = CONTENT.replace("{{ m.content", "{{ '<think></think>' if m.role == 'assistant' }}{{ m.content").replace(
    ASKS, THINKS
)
MARKED = PLAIN.replace("{{ m.content }}" + CLOSE, "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n")


@pytest.mark.parametrize(
    ("template", "messages", "options", "expected"),
    [
        (PLAIN, [user("hi"), answer("yes")], {}, OTHER),
        (PLAIN, [user("hi"), TAGGED], {}, []),
        (PLAIN, [user("hi"), TAGGED], {"template_kwargs": {"enable_thinking": False}}, OTHER),
        (PLAIN, [user("hi"), answer("yes"), user("more"), TAGGED], {}, []),
        (PLAIN, [user("hi"), TAGGED, user("more"), answer("no")], {}, OTHER),
        (PLAIN, [user("hi"), answer("yes"), user("more")], {}, []),
        (PLAIN, [user("hi"), answer("yes")], {"untrained": {1}}, []),
        (MARKED, [user("hi"), answer("yes")], {}, OTHER),
        (MARKED, [user("hi"), TAGGED, user("more"), answer("no")], {}, OTHER),
        (MARKED, [user("hi"), TAGGED], {}, []),  # The block encloses the tag, which is in the generation prompt.
        (EMPTY, [user("hi"), answer("yes")], {"template_kwargs": {"enable_thinking": False}}, []),
        (PLAIN.replace(THINKS, ""), [user("hi"), answer("yes")], {}, []),
    ],
)
def test_last_answer_that_does_not_follow_the_generation_prompt_is_remarked(template, messages, options, expected):
    assert remarks(template, *messages, **options) == expected


def calls(written: str, content: str = "{{ m.content }}") -> str:
    return loop(content + "{% for c in m.tool_calls %}{{ c.function.name }}" + written + "{% endfor %}")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (calls("{{ c.function.arguments | tojson }}"), []),
        (calls("{{ c.function | tojson }}"), []),
        (calls("{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v | tojson }}</>{% endfor %}"), []),
        (calls("{{ c.function.arguments }}"), [Remark.PYTHON_ARGUMENTS]),
        (calls("{{ c.function | tojson }}", "{{ m.content if not m.tool_calls }}"), [Remark.LOST_BESIDE_CALL]),
        (calls("{{ c.function | tojson }}", "{{ m.content | upper }}"), []),
    ],
    ids=["JSON", "whole", "XML", "Python", "beside", "in other words"],
)
def test_tool_call_and_content_remarks(template: str, expected: list[Remark]) -> None:
    tools, turn = [{"name": "sky"}], answer("Let me see.", tool_calls=[CALL])
    other = answer("", tool_calls=[{"function": {"name": "now", "arguments": {}}}])
    template = "{{ tools }}" + template
    assert remarks(template, user("hi"), turn, tools=tools) == expected
    assert remarks(template, user("hi"), other, tools=tools) == []
    assert remarks(template, user("hi"), turn) == [Remark.NO_TOOLS, *expected]
    assert remarks(template, user("hi"), turn, user("more"), answer("NO"), untrained={1}) == []


@pytest.mark.parametrize(
    ("kwargs", "is_lost"),
    [
        ({"mood": "kind"}, False),
        ({"mood": "", "tone": "", "xml_tools": []}, False),
        ({"mood": 1, "tone": "kind"}, True),
    ],
)
def test_template_variables_that_are_not_read_are_remarked(kwargs: dict[str, Any], is_lost: bool) -> None:
    found = remarks("{{ mood }}" + CONTENT, user("hi"), answer("yes"), template_kwargs=kwargs)
    assert found == ([Remark.LOST_VARIABLES] if is_lost else [])


def test_tool_arguments_not_rendered_are_error() -> None:
    row = chat(user("hi"), answer("", tool_calls=[CALL]))
    assert "message 1 calls 'sky', but the chat template writes no arguments" in refusal(encoder(calls("")), row)


@pytest.mark.parametrize("tool", [{"function": {"name": "sky", "description": 'the "sky"'}}, {"name": "sky"}])
def test_tool_schemas_not_rendered_are_remarked(tool: dict[str, Any]) -> None:
    turns = [user("use sky"), answer("sky")]
    assert remarks(CONTENT, *turns, tools=[tool]) == [Remark.LOST_TOOLS]
    assert remarks("{{ tools | tojson }}" + CONTENT, *turns, tools=[tool]) == []
    assert remarks(loop("{{ m.content }}{{ tools | length if m.role == 'user' }}"), *turns, tools=[tool]) == []
    assert remarks(CONTENT, *turns) == []
