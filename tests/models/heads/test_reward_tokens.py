"""Tokens that a reward model scores equal the tokens it was trained on, for any template and tokenizer."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.chat_cases import CHATML_ENDS, answer, chat, plain, source, user
from tests.data.templates.tokenizers import build_byte_level, build_metaspace
from transformers import PreTrainedTokenizerFast

from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.sources.rows import Row
from recipes_lib.errors import ConfigError, DataError
from recipes_lib.models.heads.scoring import encode_answers

SHIPPED = Path(trl.__file__).parent / "chat_templates"
# These read content as a list of parts, as for images; rows have texts.
READS_PARTS = ("idefics3", "llava_next", "smolvlm")
# Later versions of a template, and its variants for other model sizes, share most of its code.
SHIPPED_NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if re.search(r"_v\d|diffusion|_(super|ultra|lightning)", name) else [])
    for name in sorted(path.stem for path in SHIPPED.glob("*.jinja"))
    if not name.startswith(READS_PARTS)
]
OURS = ["chatml", "index_loop", "macros", "marked", "no_prompt", "thinking", "bracketed", "plain"]
TURNS = [user("hi"), answer("hello there"), user("And you?")]
contents = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=20).filter(
    lambda text: text.strip() == text and "<" not in text
)


def read_trained(tokenizer: PreTrainedTokenizerFast, row: Row, eos_token: str | None = None) -> list[int]:
    """Tokens of a training row up to the last target, at which training reads the score."""
    (encoded,) = RowEncoder(tokenizer, loss_on=None if row.prompt else "last_assistant", eos_token=eos_token).encode(
        [row]
    )
    last = max(at for at, is_trained in enumerate(encoded.loss_mask) if is_trained)
    return encoded.input_ids[: last + 1].tolist()


def build_chat(name: str, **more: str) -> tuple[PreTrainedTokenizerFast, list[dict[str, Any]]]:
    """Tokenizer with a template of TRL or ours, and a chat."""
    template = SHIPPED / f"{name}.jinja"
    text = template.read_text(encoding="utf-8") if template.exists() else source(name)
    tokenizer = copy.deepcopy(build_byte_level(text, extra=CHATML_ENDS))
    if name.startswith("glm4moe"):  # The template has no end of turn; generation stops at this token.
        tokenizer.eos_token = "<|user|>"
    return tokenizer, [*TURNS, answer("bye", **more)]


@pytest.mark.parametrize("name", SHIPPED_NAMES)
def test_scored_end_equals_trained_end_for_every_shipped_template(name: str) -> None:
    for more in ({}, {"reasoning": "because"}):
        tokenizer, messages = build_chat(name, **more)
        trained = read_trained(tokenizer, chat(*messages), tokenizer.eos_token)
        assert encode_answers(tokenizer, [messages]) == [trained], more


def test_repeated_last_token_and_empty_answer() -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    tokenizer = build_byte_level(template)
    twice, empty = encode_answers(tokenizer, [[answer("zz")], [answer("")]])
    assert twice == tokenizer("z", add_special_tokens=False).input_ids * 2
    assert empty == []


@pytest.mark.parametrize("name", [*SHIPPED_NAMES, *OURS])
def test_truncated_answer_has_no_end_of_turn(name: str) -> None:
    """It has neither end of turn nor end of text, and all tokens of the answer."""
    tokenizer, messages = build_chat(name)
    whole, broken = encode_answers(tokenizer, [messages] * 2, finished=[True, False])
    assert tokenizer.decode(broken).rstrip("\n").endswith("bye")
    assert broken == whole[: len(broken)]
    assert all(
        tokenizer.decode([index]).isspace() or index in tokenizer.all_special_ids for index in whole[len(broken) :]
    )


@pytest.mark.parametrize("name", ["chatml", "marked", "thinking"])
@settings(max_examples=10)
@given(content=contents)
def test_truncated_answer_is_encoded_as_in_training(name: str, content: str) -> None:
    tokenizer = build_byte_level(source(name), extra=CHATML_ENDS)
    trained = read_trained(tokenizer, chat(*TURNS, answer(content)))
    asked: list[Any] = [[*TURNS, answer(content)], [*TURNS, answer(content)]]
    assert encode_answers(tokenizer, asked, finished=[False, True]) == [trained[:-1], trained]


def test_truncated_answer_keeps_trailing_whitespace(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    (ids,) = encode_answers(tiny_tokenizer, [[user("hi"), answer("One,\n\n")]], finished=[False])
    assert tiny_tokenizer.decode(ids).endswith("One,\n\n")


@pytest.mark.parametrize("name", OURS)
@settings(max_examples=10)
@given(content=contents)
def test_scored_tokens_equal_trained_tokens_for_any_text(name: str, content: str) -> None:
    tokenizer = build_byte_level(source(name), extra=CHATML_ENDS)
    messages = [*TURNS, answer(content, name=None)]
    assert encode_answers(tokenizer, [messages]) == [read_trained(tokenizer, chat(*messages))]


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("prompt", ["Say:", "<s>Say:"])
def test_plain_text_tokens_equal_trained_tokens(prompt: str, adds_bos: bool) -> None:
    tokenizer = build_metaspace(None, adds_bos=adds_bos)
    ids, broken = encode_answers(tokenizer, [(prompt, " hello there")] * 2, finished=[True, False])
    assert ids == [*broken, ids[-1]] == read_trained(tokenizer, plain(prompt, " hello there"))
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.bos_token_id) == (adds_bos or "<s>" in prompt)


def test_message_keys_with_none_are_dropped_as_in_training() -> None:
    named = "{{ message['content'] }}{{ message.name if message.name is defined }}<|im_end|>"
    tokenizer = build_byte_level(f"{{% for message in messages %}}{named}{{% endfor %}}", extra=CHATML_ENDS)
    messages = [user("hi"), answer("bye", name=None)]
    assert encode_answers(tokenizer, [messages]) == [read_trained(tokenizer, chat(*messages))]
    assert "None" not in tokenizer.decode(encode_answers(tokenizer, [messages])[0])


def test_template_date_is_fixed_as_in_training() -> None:
    tokenizer = build_byte_level("{{ strftime_now('%d %b %Y') }}" + source("chatml"), extra=CHATML_ENDS)
    messages = [user("hi"), answer("bye")]
    (ids,) = encode_answers(tokenizer, [messages])
    assert tokenizer.decode(ids).startswith("01 Jan 2025")
    assert ids == read_trained(tokenizer, chat(*messages))
    # Prompts rendered for generation still have today's date.
    assert "01 Jan 2025" not in tokenizer.apply_chat_template(messages, tokenize=False)


def test_scored_tokens_have_one_end_token(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    ends = {name: tiny_tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|endoftext|>")}
    answers: list[Any] = [
        [user("hi"), answer("bye")],
        [user("hi"), answer("bye<|im_end|>")],
        ("hi ", "bye"),
        ("hi ", "bye<|endoftext|>"),
        ("hi ", "bye<|endoftext|><|endoftext|>"),
    ]
    first, second, *rest = encode_answers(tiny_tokenizer, answers)
    assert first == second
    assert first[-1] == ends["<|im_end|>"] != first[-2]
    assert rest[0] == rest[1] == rest[2]
    assert rest[0][-1] == ends["<|endoftext|>"] != rest[0][-2]


def test_turn_without_end_token_is_ended_by_eos() -> None:
    tokenizer = build_byte_level("{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}")
    (ids,) = encode_answers(tokenizer, [[user("hi"), answer("bye")]])
    assert tokenizer.decode(ids) == "hi\nbye\n</s>"


def test_encode_answers_keeps_order_and_accepts_empty_list(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    answers: list[Any] = [("a", "b"), [user("hi"), answer("bye")], ("c", "d")]
    assert encode_answers(tiny_tokenizer, answers) == [encode_answers(tiny_tokenizer, [one])[0] for one in answers]
    assert encode_answers(tiny_tokenizer, []) == []


def test_all_unscorable_chats_are_reported(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    answers: list[Any] = [[user("hi")], [user("hi"), answer("bye")], [user("hi"), {"role": "assistant"}]]
    with pytest.raises(DataError) as caught:
        encode_answers(tiny_tokenizer, answers)
    assert [problem.where for problem in caught.value.problems] == ["answer 0", "answer 2"]
    with pytest.raises(DataError, match=r"mine\.jsonl:3: cannot be rendered"):
        encode_answers(tiny_tokenizer, answers, where=[f"mine.jsonl:{line}" for line in (1, 2, 3)])
    assert "the last message has the role 'user'" in caught.value.problems[0].found


def test_tokenizer_without_template_scores_plain_text_only() -> None:
    tokenizer = build_metaspace(None)
    assert encode_answers(tokenizer, [("a ", "b")])
    with pytest.raises(ConfigError, match="has no chat template"):
        encode_answers(tokenizer, [[user("hi"), answer("bye")]])
