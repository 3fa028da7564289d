"""Rendering of chat templates, against ``apply_chat_template``, and attribution of the text to messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.chat_cases import FixedClock, answer, user
from transformers.utils import chat_template_utils

from recipes_lib.config.tokenization import TEMPLATE_DATE
from recipes_lib.data.chat.templates import ChatTemplate, Rendered, Span, TemplateError

TEMPLATES = {path.stem: path.read_text() for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")}
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}


def pieces(rendered: Rendered) -> list[tuple[int, str]]:
    return [(turn.message, rendered.text[turn.start : turn.end]) for turn in rendered.turns]


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> Rendered:
    return ChatTemplate(source, VARIABLES).render(messages, **options)


def test_texts_of_all_messages_take_one_pass_over_the_turns() -> None:
    passes = []

    class Turns(list[Span]):
        def __iter__(self) -> Iterator[Span]:
            passes.append(len(self))
            return super().__iter__()

    rendered = Rendered("abcd", Turns([Span(0, 0, 1), Span(1, 1, 3), Span(0, 3, 4)]), [], asks=False)
    assert [rendered.turn(message) for message in (0, 1, 2)] == ["ad", "bc", ""]
    assert passes == [3]


@pytest.mark.parametrize("name", sorted(name for name in TEMPLATES if name.endswith("_training")))
def test_generation_blocks_agree_with_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", FixedClock)
    texts = ("hi", "hello", "again", "bye")
    if "idefics3" in name or "llava" in name or "smolvlm" in name:
        texts = tuple([{"type": "text", "text": text}] for text in texts)
    chat = [(user, answer)[number % 2](text) for number, text in enumerate(texts)]
    rendered = render(TEMPLATES[name], chat)
    (text,), (reference,) = chat_template_utils.render_jinja_template(
        [chat], chat_template=TEMPLATES[name], return_assistant_tokens_mask=True, **VARIABLES
    )
    assert rendered.text == text
    assert [(block.start, block.end) for block in rendered.generated] == list(reference)
    assert reference


FOR = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def test_messages_that_a_template_copies_are_attributed_in_order() -> None:
    # As in templates of mistral-common, which merge adjacent turns of a role, and write reasoning as a part.
    copies = (
        "{% set ns = namespace(all=[]) %}{% for m in messages %}{% set content = m.content if m.thinking is undefined "
        "else [{'type': 'thinking'}, {'type': 'text', 'text': m.content}] %}"
        "{% set ns.all = ns.all + [{'role': m.role, 'content': content}] %}{% endfor %}{% for m in ns.all %}"
        "<{{ m.role }}>{{ m.content if m.content is string else m.content[1].text }}{% endfor %}"
    )
    chat = [user("a"), answer("b"), user("a"), answer("b", thinking="c"), user("")]
    turns = [(0, "<user>a"), (1, "<assistant>b"), (2, "<user>a"), (3, "<assistant>b"), (4, "<user>")]
    assert pieces(render(copies, chat)) == turns
    last = "{% for m in messages[:4] + [{'role': 'user', 'content': 'x'}] %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert pieces(render(last, chat)) == turns[:4]


THREE = [user("a"), answer("b"), user("c")]
EACH = [(0, "<user>a"), (1, "<assistant>b"), (2, "<user>c")]


@pytest.mark.parametrize(
    "source",
    [
        FOR,
        "{% for m in messages %}{% if loop.index0 == 0 %}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "{% for i in range(messages|length) %}<{{ messages[i].role }}>{{ messages[i]['content'] }}{% endfor %}",
        "{% for i in range(messages|length) %}{% set m = messages[i] %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "{% set chat = messages[:] %}{% for m in chat %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}",
        "{% macro say(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
        "{% for m in messages[::-1] %}{% set last = m %}{% endfor %}" + FOR,
        "{% for m in messages %}{% for x in messages %}{% if x.z %}{% endif %}{% endfor %}<{{ m.role }}>"
        "{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% if m.skip %}{% continue %}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    ],
    ids=["for", "if", "index", "indexed name", "slice", "macro", "backward scan", "nested scan", "continue"],
)
def test_loop_text_is_attributed_to_its_message(source: str) -> None:
    assert pieces(render(source, THREE)) == EACH


def test_text_outside_loop_has_no_author_and_ends_with_tail() -> None:
    rendered = render("{{ bos_token }}" + FOR + "{{ eos_token }}", THREE)
    assert pieces(rendered) == EACH
    assert (rendered.text[: rendered.turns[0].start], rendered.tail) == ("<s>", "</s>")


def test_same_message_object_at_two_positions_is_two_messages() -> None:
    same = answer("b")
    assert pieces(render(FOR, [same, same])) == [(0, "<assistant>b"), (1, "<assistant>b")]


def test_tool_message_rendered_in_other_turn_keeps_author() -> None:
    source = (
        "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{% for k in range(messages|length) %}"
        "{% if m.tool_calls and messages[k].role == 'tool' %}[{{ messages[k].content }}]{% endif %}{% endfor %}"
        "{{ m.content }}{% endif %}{% endfor %}"
    )
    chat = [user("a"), answer("b", tool_calls=[CALL]), {"role": "tool", "content": "t"}]
    assert pieces(render(source, chat)) == [(0, "<user>a"), (1, "<assistant>"), (2, "[t]"), (1, "b")]


def test_message_created_by_template_has_no_author() -> None:
    source = (
        "{% for m in [messages[0], {'role': 'system', 'content': 'be'}, messages[1]] %}{{ m.content }}.{% endfor %}"
    )
    rendered = render(source, THREE[:2])
    assert rendered.text == "a.be.b."
    assert pieces(rendered) == [(0, "a."), (1, "b.")]


def test_captured_messages_have_no_author() -> None:
    rendered = render("{% set all %}" + FOR + "{% endset %}{{ all }}", THREE)
    assert rendered.text == "<user>a<assistant>b<user>c"
    assert rendered.turns == []


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text()), min_size=1, max_size=5))
def test_turns_cover_any_chat(chat: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": content} for role, content in chat]
    rendered = render(FOR, messages)
    assert pieces(rendered) == [(at, f"<{role}>{content}") for at, (role, content) in enumerate(chat)]


@pytest.mark.parametrize("enable_thinking", [None, True, False])
@pytest.mark.parametrize(
    "name", ["llama3", "gemma", "qwen2_5", "qwen3", "qwen3_6", "cohere", "phi3", "nemotron_3_nano"]
)
def test_generation_prompt_from_source_equals_rendered_one(name: str, enable_thinking: bool | None) -> None:
    template = ChatTemplate(TEMPLATES[name], VARIABLES)
    variables = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    # An empty chat cannot be rendered, so this prompt was read from the source.
    read = template.generation_prompt([], variables=variables)
    assert read
    assert template.render([user("hi")], variables=variables, add_generation_prompt=True).tail == read


HARD = "{{% for m in messages if m.content == 'hard' %}}{}{{% endfor %}}"


@pytest.mark.parametrize(
    ("before", "mark"),
    [
        ("", "messages[0].content == 'hard'"),
        ("{% set is_hard = messages[0].content == 'hard' %}", "is_hard"),
        ("{% macro is_hard() %}{{ 'x' if messages[0].content == 'hard' }}{% endmacro %}", "is_hard()"),
        ("{% set hard = false %}{% if messages[0].content == 'hard' %}{% set hard = true %}{% endif %}", "hard"),
        ("{% set it = namespace(hard=false) %}" + HARD.format("{% set it.hard = true %}"), "it.hard"),
    ],
)
def test_chat_dependent_generation_prompt_is_rendered(before: str, mark: str) -> None:
    prompt = "<assistant>{{ '<think>' if " + mark + " }}{% endif %}"
    template = ChatTemplate(before + FOR + "{% if add_generation_prompt %}" + prompt, VARIABLES)
    assert template.generation_prompt([user("easy")]) == "<assistant>"
    assert template.generation_prompt([user("hard")]) == "<assistant><think>"


def test_error_in_generation_prompt_has_the_message_of_the_template() -> None:
    source = FOR + "{% if add_generation_prompt %}{{ raise_exception('no prompt') if strict }}<assistant>{% endif %}"
    template = ChatTemplate(source, VARIABLES)
    assert template.generation_prompt([user("hi")]) == "<assistant>"
    with pytest.raises(TemplateError, match="no prompt"):
        template.generation_prompt([user("hi")], variables={"strict": True})


def test_disabled_generation_prompt_is_none() -> None:
    source = "{% set add_generation_prompt = false %}" + FOR + "{% if add_generation_prompt %}<assistant>{% endif %}"
    assert ChatTemplate(source, VARIABLES).generation_prompt([user("hi")]) == ""


def test_loop_in_macro_or_capture_keeps_author() -> None:
    scan = "{% for x in messages %}{{ x.content }}{% endfor %}"
    for build in ("{% macro all() %}" + scan + "{% endmacro %}", "{% set ns = 1 %}"):
        inner = "{{ all() }}" if "macro" in build else "{% set all %}" + scan + "{% endset %}{{ all }}"
        source = build + "{% for m in messages %}<{{ m.role }}>" + inner + "{% endfor %}"
        assert pieces(render(source, THREE)) == [(0, "<user>abc"), (1, "<assistant>abc"), (2, "<user>abc")]


def test_documents_are_a_template_variable() -> None:
    source = FOR + "{% for document in documents or [] %}[{{ document }}]{% endfor %}"
    assert render(source, [user("hi")]).text == "<user>hi"
    assert render(source, [user("hi")], variables={"documents": ["a"]}).text == "<user>hi[a]"


def test_row_template_kwargs_override_defaults() -> None:
    source = FOR + "{{ eos_token }}{{ enable_thinking }}"
    assert render(source, THREE[:1], variables={"eos_token": "!", "enable_thinking": True}).tail == "!True"


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('no') }}", "{{ messages[0].nothing.at.all }}", "{{ 1 + 'a' }}", "{{ messages.clear() }}"],
)
def test_any_exception_in_template_is_template_error(source: str) -> None:
    with pytest.raises(TemplateError, match=r"\w"):
        render(source, THREE)


def test_template_syntax_error_names_line() -> None:
    with pytest.raises(TemplateError, match="line 2: "):
        ChatTemplate("\n{% for %}", VARIABLES)


def test_clock_is_fixed_and_reported() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", VARIABLES)
    assert template.reads_clock
    assert template.render(THREE).text == TEMPLATE_DATE.date().isoformat()
    assert not ChatTemplate(FOR, VARIABLES).reads_clock
