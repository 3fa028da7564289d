"""Start of answers with templates that render the generation prompt inside the loop over messages.

The templates are those of published models: Zephyr, AutoTrain's ChatML, Tulu, OLMo and Granite.
"""

from __future__ import annotations

import re

import pytest
from tests.data.chat_cases import answer, chat, source, spans, user
from tests.data.templates.tokenizers import build_byte_level

from recipes_lib.data.chat.encoder import RowEncoder

IN_LOOP = {
    "zephyr_loop": "</s>",
    "tulu_loop": "</s>",
    "olmo_loop": "</s>",
    "chatml_loop": "<|im_end|>",
    "granite_loop": "<|end_of_text|>",
}
SYSTEM = {"role": "system", "content": "be kind"}
TURNS = [user("hi"), answer("hello there"), user("more"), answer("bye")]
CHATS = {
    "one turn": TURNS[:2],
    "two turns": TURNS,
    "system": [SYSTEM, *TURNS],
    "two answers in a row": [*TURNS, answer("bye bye")],
    "begins with an answer": TURNS[1:],
    "system, then an answer": [SYSTEM, *TURNS[1:]],
}
SAYS = re.compile(r"\+ message\['content'\] \+ (eos_token|'<\|\w+\|>)('?)")


def mark(name: str) -> str:
    """Return the template with assistant content and its terminator in a ``{% generation %}`` block."""

    def enclose(says: re.Match[str]) -> str:
        end, quote = says.groups()
        text = "{{ message['content'] + " + end + ("" if end == "eos_token" else "'") + " }}"
        block = "{% generation %}" + text + "{% endgeneration %}"
        rest = (
            "''" if quote or end == "eos_token" else "'"
        )  # Granite's terminator is followed by a line break in the same literal.
        return " }}{% if message.role == 'assistant' %}" + block + "{% else %}" + text + "{% endif %}{{ " + rest

    return SAYS.sub(enclose, source(name))


@pytest.mark.parametrize("shape", CHATS)
@pytest.mark.parametrize("name", IN_LOOP)
def test_mask_agrees_with_transformers_generation_blocks(name: str, shape: str) -> None:
    tokenizer, messages = build_byte_level(source(name)), CHATS[shape]
    (encoded,) = RowEncoder(tokenizer).encode([chat(*messages)])
    marked = tokenizer.apply_chat_template(
        messages, chat_template=mark(name), return_dict=True, return_assistant_tokens_mask=True
    )
    assert encoded.input_ids.tolist() == marked["input_ids"]
    assert encoded.loss_mask.astype(int).tolist() == marked["assistant_masks"]
    expected = [message["content"] + IN_LOOP[name] for message in messages if message["role"] == "assistant"]
    assert spans(tokenizer, encoded) == expected


@pytest.mark.parametrize("name", IN_LOOP)
def test_answer_starts_at_end_of_generation_prompt(name: str) -> None:
    tokenizer = build_byte_level(source(name))
    encoder, row = RowEncoder(tokenizer, loss_on="last_assistant"), chat(SYSTEM, *TURNS)
    served = tokenizer.apply_chat_template([SYSTEM, *TURNS[:-1]], add_generation_prompt=True, return_dict=False)
    assert encoder.encode_prompt(chat(SYSTEM, *TURNS[:-1])).tolist() == served
    (encoded,) = encoder.encode([row])
    assert encoded.input_ids[: len(served)].tolist() == served
    assert int(encoded.loss_mask.argmax()) == len(served)


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
ASKS = "{% if loop.last and add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        # The text of the last turn depends on `add_generation_prompt`: an end of text, white space.
        "{% for m in messages %}" + TURN + "{% if loop.last and not add_generation_prompt %}</s>{% endif %}"
        "{% if loop.last and add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% endfor %}",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content|trim if add_generation_prompt else m.content }}"
        "<|im_end|>" + ASKS + "{% endfor %}",
        # The end of a turn is rendered only with the flag or a further turn, as in the first Qwen1.5.
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if not loop.last or add_generation_prompt or m.role == 'assistant' %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        # Line breaks after the loop; a flag without effect.
        "{% for m in messages %}" + TURN + ASKS + "{% endfor %}{{ '\n' }}",
        "{% set add_generation_prompt = false %}{% for m in messages %}" + TURN + ASKS + "{% endfor %}{{ '\n' }}",
    ],
    ids=["eos", "trimmed", "end of turn", "line break", "no effect"],
)
def test_turn_opening_is_masked_for_any_use_of_flag(template: str) -> None:
    tokenizer = build_byte_level(template, extra=("<|im_start|>", "<|im_end|>"))
    (encoded,) = RowEncoder(tokenizer).encode([chat(user(" hi "), answer("a"), user(" more "), answer("b"))])
    assert [text.removesuffix("</s>") for text in spans(tokenizer, encoded)] == ["a<|im_end|>", "b<|im_end|>"]


@pytest.mark.parametrize("opening", ["<|im_start|>assistant\n", "<|im_start|>", "<|im_start|>assistant\n<|think|>"])
def test_generation_prompt_at_the_end_of_every_chat_is_no_target(opening: str) -> None:
    # As in the templates for tools and documents of Cohere's Command models, which ignore the flag.
    template = "{% for m in messages %}" + TURN + "{% endfor %}{{ '" + opening + "' }}"
    tokenizer = build_byte_level(template, extra=("<|im_start|>", "<|im_end|>"))
    encoder, messages = RowEncoder(tokenizer), [user("hi"), answer("yes"), user("more"), answer("no")]
    (encoded,) = encoder.encode([chat(*messages)])
    assert encoded.input_ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    header = "<|im_start|>assistant\n"
    rest = header.removeprefix(opening) if header.startswith(opening) else ""
    assert spans(tokenizer, encoded) == [f"{rest}yes<|im_end|>", f"{rest}no<|im_end|>"]
    served = tokenizer.apply_chat_template(messages[:3], return_dict=False)
    assert encoder.encode_prompt(chat(*messages[:3])).tolist() == served
    assert encoder.cautions == []


def test_beginning_of_generation_prompt_at_the_end_of_every_chat_is_no_target() -> None:
    # As in the template of Cohere's Command A, where the flag adds the last token of the generation prompt.
    template = "{% for m in messages %}" + TURN + "{% endfor %}<|im_start|>"
    template += "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    tokenizer = build_byte_level(template, extra=("<|im_start|>", "<|im_end|>"))
    (encoded,) = RowEncoder(tokenizer).encode([chat(user("hi"), answer("yes"), user("more"), answer("no"))])
    assert spans(tokenizer, encoded) == ["yes<|im_end|>", "no<|im_end|>"]


def test_opening_that_follows_the_answer_of_a_tool_is_in_the_prompt_once() -> None:
    # As in the templates for tools of DeepSeek R1, which open every answer before it, whatever the flag.
    template = "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>"
    template += "{% elif m.role == 'tool' %}<|tool|>{{ m.content }}{% if loop.last %}<|end|>{% endif %}"
    template += (
        "{% else %}{% if loop.previtem.role == 'tool' %}<|end|>{% endif %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    tokenizer = build_byte_level(template)
    encoder, messages = RowEncoder(tokenizer), [user("hi"), {"role": "tool", "content": "21"}, answer("yes")]
    (encoded,) = encoder.encode([chat(*messages)])
    assert spans(tokenizer, encoded) == ["yes</s>"]
    assert (
        encoder.encode_prompt(chat(*messages[:2])).tolist() == encoded.input_ids[: encoded.loss_mask.argmax()].tolist()
    )
