"""Text and loss mask with every chat template of the installed TRL, against transformers, literals and TRL's masks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trl
from tests.data.chat_cases import FixedClock, answer, runs, spans, user
from tests.data.templates.tokenizers import build_byte_level
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.chat.templates import TemplateError
from recipes_lib.data.sources.messages import clean_messages
from recipes_lib.data.sources.rows import EncodedRow, Row
from recipes_lib.errors import DataError

FOLDER = Path(trl.__file__).parent / "chat_templates"
# These read content as a list of parts, as for images; rows have texts.
PARTS = ["idefics3", "llava_next", "smolvlm"]
ALL = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
TEMPLATES = [name for name in ALL if name not in PARTS]
TWINS = [name for name in TEMPLATES if (FOLDER / f"{name}_training.jinja").exists()]
# GLM has no end-of-turn token: a turn ends where the next one starts, and generation stops at these tokens.
OPEN_TURNS = {"glm4moe": "<|user|>"}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Which city."}},
                "required": ["city"],
            },
        },
    }
]
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}


CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [user("hi"), answer("hello there")],
    "two turns": [user("hi"), answer("hello there"), user("more"), answer("bye")],
    "system": [{"role": "system", "content": "be kind"}, user("hi"), answer("hello there")],
    "thinking": [
        user("hi"),
        answer("hello there", reasoning_content="why"),
        user("more"),
        answer("bye", reasoning_content="because"),
    ],
    "tools": [
        user("weather in Paris?"),
        answer("", tool_calls=[CALL]),
        {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "sunny"},
        answer("Sunny in Paris."),
    ],
}

# Text after the answer by template: the terminator, and the text after it in the last turn.
END = {
    "cohere2": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "diffusion_gemma": "<turn|>",
    "gemma4": "<turn|>",
    "gemma": "<end_of_turn>",
    "glm4moe": "<|user|>",
    "gptoss": "<|return|>",
    "lfm2_2_5": "<|im_end|>\n",  # Templates with {% generation %} blocks that include the line break.
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "muse_glimmer": "<|eot|>",
    "nemotron": "<|im_end|>",
    "phi3": "<|end|>\n</s>",
    "qwen": "<|im_end|>",
}
# Text between the generation prompt and the answer of a last turn without reasoning.
OPENING = {
    "glm4moe": "\n<think></think>\n",
    "gptoss": "<|channel|>final<|message|>",
    "muse_glimmer": " to=user<|message|>",
    "nemotron": "</think>",
    "qwen3_5_nothink": "",
    "qwen3_5_think": "\n\n</think>\n\n",
    "qwen3_6": "\n\n</think>\n\n",
    "qwen3_8": "\n\n</think>\n\n",
    "qwen3_instruct_2507": "",
    "qwen3_vl": "",
    "qwen3": "<think>\n\n</think>\n\n",
}


def lookup(table: dict[str, str], name: str) -> str:
    return next((value for key, value in table.items() if name.startswith(key)), "")


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def row(name: str, shape: str) -> Row:
    messages = clean_messages(CHATS[shape], "messages")
    return Row(where="chats row 0", messages=messages, tools=TOOLS if shape == "tools" else None)


@pytest.fixture(autouse=True)
def fixed_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", FixedClock)


@cache
def build(name: str) -> tuple[RowEncoder, PreTrainedTokenizerFast]:
    """Return encoder and tokenizer of a template, whose compilation takes about 0.1 s; treat them as read-only."""
    tokenizer = build_byte_level(source(name))
    return RowEncoder(tokenizer, eos_token=OPEN_TURNS.get(name)), tokenizer


def encode(name: str, shape: str) -> tuple[PreTrainedTokenizerFast, EncodedRow]:
    encoder, tokenizer = build(name)
    (encoded,) = encoder.encode([row(name, shape)])
    return tokenizer, encoded


RENDERED = [
    [user("hi"), answer("hello", thinking="why")],
    [
        {"role": "system", "content": "be"},
        user("hi"),
        answer(" hello ", reasoning="r"),
        user("x"),
        answer("<think>y</think>z"),
    ],
    [user("w?"), answer(None, tool_calls=[CALL]), {"role": "tool", "content": "sunny", "name": None}, answer("ok")],
    [user([{"type": "text", "text": "hi"}]), answer([{"type": "text", "text": "hello"}])],
]


@pytest.mark.parametrize("name", PARTS)
def test_template_that_reads_content_as_parts_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="chats row 0: "):
        encode(name, "one turn")


@pytest.mark.parametrize("name", ALL)
def test_rendered_text_agrees_with_apply_chat_template(name: str) -> None:
    encoder, tokenizer = build(name)
    # Compiled once for all tests of it, which takes most of their time.
    template, rendered = encoder._finder(row(name, "one turn"))._template, 0
    for messages in RENDERED:
        for tools, prompt in [(None, False), (TOOLS, False), (None, True)]:
            options = {"tools": tools, "add_generation_prompt": prompt}
            try:
                reference = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            except Exception:
                with pytest.raises(TemplateError):
                    template.render(messages, **options)
                continue
            assert template.render(messages, **options).text == reference
            rendered += 1
    assert rendered


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_trained_and_questions_masked(name: str) -> None:
    tokenizer, encoded = encode(name, "two turns")
    first, last = spans(tokenizer, encoded)
    assert last == lookup(OPENING, name) + "bye" + lookup(END, name)
    end = {"gptoss": "<|end|>", "phi3": "<|end|>", "phi3_5": "<|end|>"}.get(name, lookup(END, name))
    dropped = name in {"qwen3", "qwen3_5_think", "qwen3_6"}  # These remove the empty reasoning from earlier turns.
    assert first == ("" if dropped else lookup(OPENING, name)) + "hello there" + end


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "gemma"])
def test_system_message_is_masked(name: str) -> None:
    tokenizer, encoded = encode(name, "system")
    (only,) = spans(tokenizer, encoded)
    assert only == lookup(OPENING, name) + "hello there" + lookup(END, name)


def test_system_message_refused_by_template_is_row_error() -> None:
    with pytest.raises(DataError, match="chats row 0: the chat template refuses this chat: System role not supported"):
        encode("gemma", "system")


REASONING = {
    "diffusion_gemma": "<|channel>thought\nbecause\n<channel|>bye<turn|>",
    "gemma4_v5": "<|channel>thought\nbecause\n<channel|>bye<turn|>",
    "glm4moe": "\n<think>because</think>\nbye<|user|>",
    "gptoss": "<|channel|>analysis<|message|>because<|end|><|start|>assistant<|channel|>final<|message|>bye<|return|>",
    "lfm2_2_5": "<think>because</think>bye<|im_end|>\n",
    "lfm2_2_5_v2": "<think>because</think>bye<|im_end|>\n",
    "lfm2_2_5_vl": "<think>because</think>bye<|im_end|>\n",
    "muse_glimmer": " to=self<|message|>because<|eom|><|start|>assistant to=user<|message|>bye<|eot|>",
    "nemotron_3_5_lightning": "because</think>bye<|im_end|>",
    "nemotron_3_nano": "because\n</think>\nbye<|im_end|>",
    "nemotron_3_super": "because\n</think>\nbye<|im_end|>",
    "nemotron_3_ultra": "because</think>bye<|im_end|>",
    "qwen3": "<think>\nbecause\n</think>\n\nbye<|im_end|>",
    "qwen3_5_nothink": "because\n</think>\n\nbye<|im_end|>",
    "qwen3_5_think": "because\n</think>\n\nbye<|im_end|>",
    "qwen3_6": "because\n</think>\n\nbye<|im_end|>",
    "qwen3_8": "because\n</think>\n\nbye<|im_end|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_reasoning_is_trained(name: str) -> None:
    tokenizer, encoded = encode(name, "thinking")
    *_, last = spans(tokenizer, encoded)
    assert last == REASONING.get(name, lookup(OPENING, name) + "bye" + lookup(END, name))


HERMES = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
JSON_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
GEMMA_TAG = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
GEMMA_CALL = GEMMA_TAG + "<|tool_response>"  # Generation stops on the token that opens the answer of the tool.
LFM_CALL = "<|tool_call_start|>[get_weather(city='Paris')]<|tool_call_end|><|im_end|>"
ATEM_CALL = (
    '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>"
)
CALLS = {
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
    "diffusion_gemma": GEMMA_CALL,
    "gemma4": GEMMA_CALL,
    "gemma4_v2": GEMMA_TAG + "<turn|>",
    "gemma4_v3": GEMMA_CALL,
    "gemma4_v4": GEMMA_CALL,
    "gemma4_v5": GEMMA_CALL,
    "glm4moe": "\n<think></think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "</tool_call><|observation|>",
    "gptoss": ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
    "lfm2_2_5": LFM_CALL + "\n",
    "lfm2_2_5_v2": LFM_CALL + "\n",
    "lfm2_2_5_vl": LFM_CALL + "\n",
    "lfm2_v2": LFM_CALL,
    "llama3_1": '{"name": "get_weather", "parameters": {"city": "Paris"}}<|eot_id|>',
    "llama3_2": '{"name": "get_weather", "parameters": {"city": "Paris"}}<|eot_id|>',
    "muse_glimmer": " to=get_weather<|message|>" + ATEM_CALL + "<|eot|>",
    "nemotron_3_5_lightning": "</think>\n" + HERMES + "\n<|im_end|>",
    "nemotron_3_nano": "</think>\n" + HERMES + "\n<|im_end|>",
    "nemotron_3_super": "</think>\n" + HERMES + "\n<|im_end|>",
    "nemotron_3_ultra": "</think>\n" + HERMES + "\n<|im_end|>",
    "qwen2_5": JSON_CALL + "<|im_end|>",
    "qwen3": JSON_CALL + "<|im_end|>",
    "qwen3_5_nothink": HERMES + "<|im_end|>",
    "qwen3_5_think": "\n\n</think>\n\n" + HERMES + "<|im_end|>",
    "qwen3_6": "\n\n</think>\n\n" + HERMES + "<|im_end|>",
    "qwen3_8": "\n\n</think>\n\n" + HERMES + "<|im_end|>",
    "qwen3_instruct_2507": JSON_CALL + "<|im_end|>",
    "qwen3_vl": JSON_CALL + "<|im_end|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_tool_calls_are_trained_and_tool_output_masked(name: str) -> None:
    if name not in CALLS:  # The template does not render tool calls: it raises, or would train on an empty answer.
        with pytest.raises(DataError, match=r"refuses this chat|does not write that"):
            encode(name, "tools")
        return
    tokenizer, encoded = encode(name, "tools")
    call, last = spans(tokenizer, encoded)
    assert call == CALLS[name]
    # This template has no generation prompt after tool output, so that the turn opening is a target.
    opening = "<|turn>model\n" if name == "diffusion_gemma" else lookup(OPENING, name)
    assert last == opening + "Sunny in Paris." + lookup(END, name)


@pytest.mark.parametrize("name", ["qwen3_5_nothink", "qwen3_5_think", "qwen3_6"])
def test_call_of_an_earlier_turn_is_trained_from_its_tag(name: str) -> None:
    """Reasoning is dropped from earlier turns, so that `<tool_call>` is where the generation prompt has `<think>`."""
    (encoder, tokenizer), chat = build(name), row(name, "tools")
    (encoded,) = encoder.encode([replace(chat, messages=[*(chat.messages or ()), user("more"), answer("bye")])])
    call, *_ = spans(tokenizer, encoded)
    assert call == HERMES + "<|im_end|>"


@pytest.mark.parametrize("shape", CHATS)
@pytest.mark.parametrize("name", TWINS)
def test_spans_agree_with_trl_training_template(name: str, shape: str) -> None:
    """TRL also trains on the line break after a turn and, for some families, on part of the generation prompt."""
    (encoder, tokenizer), chat, twin = build(name), row(name, shape), source(f"{name}_training")
    if (shape == "tools" and name not in CALLS) or (name, shape) == ("gemma", "system"):
        with pytest.raises(DataError):
            encoder.encode([chat])
        return
    (encoded,) = encoder.encode([chat])
    reference = tokenizer.apply_chat_template(
        chat.messages, tools=chat.tools, chat_template=twin, return_dict=True, return_assistant_tokens_mask=True
    )
    text, other_text = tokenizer.decode(encoded.input_ids), tokenizer.decode(reference["input_ids"])
    if text != other_text:  # The training template renders another text: it keeps reasoning in earlier turns.
        assert name.startswith("qwen3")
        assert shape in ("two turns", "thinking", "tools")
        return
    ours, theirs = runs(encoded.loss_mask), runs(reference["assistant_masks"])
    assert len(ours) == len(theirs)
    for (start, end), (other_start, other_end) in zip(ours, theirs, strict=True):
        assert tokenizer.decode(encoded.input_ids[end:other_end]) in ("", "\n")
        if other_end < end:  # TRL does not train on the token on which Gemma stops after a call.
            assert (name, shape) == ("diffusion_gemma", "tools")
            assert tokenizer.decode(encoded.input_ids[other_end:end]) == "<|tool_response>"
        header = tokenizer.decode(encoded.input_ids[min(start, other_start) : max(start, other_start)])
        if other_start <= start:
            last = max(at for at, message in enumerate(chat.messages) if message["role"] == "assistant")
            assert header in tokenizer.decode(encoder.encode_prompt(replace(chat, num_prompt_messages=last)))
        else:
            assert (name, shape, header) == ("diffusion_gemma", "tools", "<|turn>model\n")


@pytest.mark.parametrize("shape", ["one turn", "two turns", "system"])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in OPEN_TURNS])
def test_generation_prompt_agrees_with_apply_chat_template(name: str, shape: str) -> None:
    (encoder, tokenizer), chat = build(name), row(name, shape)
    if (name, shape) == ("gemma", "system"):
        return
    prompt = encoder.encode_prompt(replace(chat, num_prompt_messages=len(chat.messages or ()) - 1))
    served = tokenizer.apply_chat_template(
        chat.messages[:-1], tokenize=True, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert prompt.tolist() == served
    (encoded,) = encoder.encode([chat])
    # The generation prompt opens reasoning that the row does not have.
    prefills = name.startswith(("deepseek", "nemotron", "qwen3_5_think", "qwen3_6", "qwen3_8"))
    if not prefills:
        assert encoded.input_ids[: len(prompt)].tolist() == prompt.tolist()
        assert encoded.loss_mask[len(prompt) :].argmax() == 0
