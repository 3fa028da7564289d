"""Trained character spans of a rendered chat, before tokenisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes_lib.data.chat.spans import SpanFinder
from recipes_lib.data.chat.templates import ChatTemplate
from recipes_lib.data.sources.rows import Row
from recipes_lib.errors import DataError

FOLDER = Path(__file__).parents[1] / "templates"
SPECIAL = ["<|im_start|>", "<|im_end|>", "</s>", "<|end|>"]
LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"


def row(*contents: Any, **options: Any) -> Row:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]
    return Row(where="rows row 3", messages=messages, **options)


def find(template: str, chat: Row, *trained: int, eos_token: str | None = None) -> list[tuple[int, str]]:
    finder = SpanFinder(ChatTemplate(template, {"eos_token": "</s>"}), SPECIAL, eos_token)
    text, spans, _ = finder.find(chat, trained)
    return [(span.message, text[span.start : span.end]) for span in spans]


def test_only_requested_messages_are_trained() -> None:
    chat = row("a", "b", "c", "d")
    assert find(LOOP + PROMPT, chat, 1, 3) == [(1, "b<|im_end|>"), (3, "d<|im_end|>")]
    assert find(LOOP + PROMPT, chat, 3) == [(3, "d<|im_end|>")]
    assert find(LOOP + PROMPT, chat) == []
    assert find("{{ messages[0].content }}{{ messages[1].content }}", row("a", "b")) == [], "as with loss_on: all"


def test_chat_dependent_generation_prompt_is_rendered_per_turn() -> None:
    template = LOOP.replace("m.role }}:", "m.role }}:{{ '!' if messages[0].content == 'hard' and loop.index0 == 1 }}")
    template += (
        "{% if add_generation_prompt %}<|im_start|>assistant:{{ '!' if messages[0].content == 'hard' }}{% endif %}"
    )
    assert find(template, row("hard", "b"), 1) == [(1, "b<|im_end|>")]
    assert find(template, row("easy", "!b"), 1) == [(1, "!b<|im_end|>")]


def test_eos_after_loop_belongs_to_last_answer() -> None:
    template = LOOP + "{% if add_generation_prompt %}<|im_start|>assistant:{% else %}</s>{% endif %}"
    assert find(template, row("a", "b", "c", "d"), 1, 3) == [(1, "b<|im_end|>"), (3, "d<|im_end|></s>")]
    assert find(template, row("a", "b", "c"), 1) == [(1, "b<|im_end|>")]


def test_eos_after_loop_that_repeats_turn_end_is_error() -> None:
    template = LOOP + "{% if add_generation_prompt %}<|im_start|>assistant:{% else %}<|im_end|>{% endif %}"
    with pytest.raises(DataError, match="message 3 ends twice"):
        find(template, row("a", "b", "c", "d"), 1, 3)


def test_chat_starting_with_answer_is_trained() -> None:
    guard = "{% if messages[0].role is undefined %}{{ raise_exception('empty') }}{% endif %}"
    messages = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "a"}]
    chat = Row(where="rows row 3", messages=messages)
    assert find(guard + LOOP + "{{ '' }}" + PROMPT, chat, 0) == [(0, "hello<|im_end|>")]
    # Qwen 1.5 and 2.
    default = "{% if loop.first and m.role != 'system' %}<|im_start|>system:be<|im_end|>{% endif %}"
    assert find(LOOP.replace("%}", "%}" + default, 1) + PROMPT, chat, 0) == [(0, "hello<|im_end|>")]


@pytest.mark.parametrize("opening", ["assistant:", "assistant:<think>"])
def test_last_turn_after_the_loop_is_trained(opening: str) -> None:
    # As in Nemotron Nano 2's template, which removes the last answer from the messages of its loop.
    template = "{% set rest = messages[:-1] if messages[-1].role == 'assistant' else messages %}"
    template += LOOP.replace("in messages", "in rest") + PROMPT.replace("assistant:", opening)
    template += "{% if rest != messages %}<|im_start|>" + opening + "{{ messages[-1].content }}<|im_end|>{% endif %}"
    assert find(template, row("a", "b"), 1) == [(1, "b<|im_end|>")]
    assert find(template, row("a", "b", "c", "d"), 1, 3) == [(1, "b<|im_end|>"), (3, "d<|im_end|>")]
    other = template.replace(opening + "{{ messages[-1]", "other:{{ messages[-1]")
    with pytest.raises(DataError, match="the chat template writes nothing for message 1"):
        find(other, row("a", "b"), 1)


def test_generation_prompt_may_begin_in_the_turn_of_the_question() -> None:
    # As in Alpaca's format: line breaks between turns, which end the question or begin the generation prompt.
    template = "{% for m in messages %}### {{ m.role }}:{{ m.content }}{{ '</s>' if m.role == 'assistant' }}"
    template += "{{ '\n\n' if not loop.last }}{% endfor %}{% if add_generation_prompt %}\n\n### assistant:{% endif %}"
    assert find(template, row("a", "b", "c", "d"), 1, 3) == [(1, "b</s>"), (3, "d</s>")]


def test_turn_that_shares_only_white_space_with_generation_prompt_is_error() -> None:
    template = LOOP.replace("<|im_start|>", " <|im_start|>") + PROMPT.replace("<|im_start|>", "  <|im_start|>")
    with pytest.raises(DataError, match=r"message 1 opens with .*assistant:b.*, but the generation prompt is"):
        find(template, row("a", "b"), 1)


def test_eos_token_ends_turn_without_terminator() -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    finder = SpanFinder(ChatTemplate(template, {}), ["<|user|>", "<|assistant|>", "<|stop|>"], "<|stop|>")
    text, spans, _ = finder.find(row("a", "b", "c", "d"), [1, 3])
    assert [text[span.start : span.end] for span in spans] == ["b<|user|>", "d<|stop|>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LOOP.replace("{{ m.role }}", "bot") + PROMPT.replace("<|im_start|>", "@"), "message 1 opens with"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}" + PROMPT,
            "writes nothing for message 1",
        ),
        (
            LOOP.replace("{{ m.content }}", "{{ m.content if m.content in ('question', 'reply') }}"),
            "writes no generation prompt, and no answer where one was expected",
        ),
        ("{{ messages[1].content }}<|im_end|>", "does not loop over the messages"),
        ("{% generation %}{{ messages[1].content }}<|im_end|>{% endgeneration %}", "does not loop over the messages"),
        (LOOP + "{% generation %}{% endgeneration %}" + PROMPT, "message 1 has no {% generation %} block"),
        ("{% for m in messages %}{{ 1 / 0 }}{% endfor %}", "the chat template refuses this chat: division by zero"),
    ],
)
def test_ambiguous_span_is_row_error(template: str, message: str) -> None:
    with pytest.raises(DataError) as refused:
        find(template, row("question", "reply"), 1)
    (problem,) = refused.value.problems
    assert problem.where == "rows row 3"
    assert message in problem.found
    assert problem.remedy


def test_generation_block_after_loop_belongs_to_last_turn() -> None:
    template = LOOP.replace("{{ m.content }}<|im_end|>", "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}")
    template += "{% generation %}</s>{% endgeneration %}"
    assert find(template, row("a", "b"), 1) == [(1, "b<|im_end|>"), (1, "</s>")]


def test_generation_block_around_turn_includes_no_generation_prompt() -> None:
    turn = "<|im_start|>assistant:{{ m.content }}<|im_end|>"  # As in SmolLM3's template.
    block = f"{{% if m.role == 'assistant' %}}{{% generation %}}{turn}{{% endgeneration %}}{{% else %}}"
    template = LOOP.replace("<|im_start|>", block + "<|im_start|>", 1).replace("{% endfor", "{% endif %}{% endfor")
    assert find(template + PROMPT, row("a", "b", "c", "d"), 1, 3) == [(1, "b<|im_end|>"), (3, "d<|im_end|>")]
    assert find(template, row("a", "b"), 1) == [(1, "b<|im_end|>")]
    inner = template.replace("{% generation %}<|im_start|>", "<|im_start|>{% generation %}")
    assert find(inner + PROMPT, row("a", "b", "c", "d"), 1, 3) == [(1, "b<|im_end|>"), (3, "d<|im_end|>")]
