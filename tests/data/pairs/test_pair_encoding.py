"""Encoding of preference pairs, against ``apply_chat_template`` and the targets of SFT."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.chat_cases import CHATML_ENDS, answer, build_encoder, chat, plain, user
from tests.data.templates.tokenizers import build_byte_level, build_metaspace

from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.pairs.preference_sets import EncodedPair, encode_pairs
from recipes_lib.data.sources.rows import Row
from recipes_lib.errors import DataError

TEMPLATES = ["chatml", "index_loop", "macros", "marked", "no_prompt", "thinking", "bracketed", "plain"]
TURNS = [user("hi"), answer("fine"), user("And you?")]
contents = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=20).filter(
    lambda text: text.strip() == text and "<" not in text
)


build = cache(build_encoder)


def pair_of(chosen: Any, rejected: Any, *prompt: Any, **options: Any) -> Row:
    turns = prompt or TURNS
    return chat(*turns, chosen, num_prompt_messages=len(turns), rejected=[rejected], **options)


def text_pair(prompt: str, chosen: str, rejected: str) -> Row:
    return replace(plain(prompt, chosen), rejected=rejected)


def encode(encoder: RowEncoder, row: Row) -> EncodedPair:
    (pair,) = encode_pairs(encoder, [row])
    return pair


def refuse(encoder: RowEncoder, row: Row) -> str:
    with pytest.raises(DataError) as refused:
        encode_pairs(encoder, [row])
    assert [problem.where for problem in refused.value.problems] == ["train.jsonl:17"]
    return str(refused.value)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "no_prompt"])
@settings(max_examples=40)
@given(chosen=contents, rejected=contents)
def test_pair_tokens_agree_with_apply_chat_template(name: str, chosen: str, rejected: str) -> None:
    encoder, tokenizer = build(name)
    pair = encode(encoder, pair_of(answer(chosen), answer(rejected)))
    prompt = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
    assert pair.prompt_ids.tolist() == prompt
    for content, ids in ((chosen, pair.chosen_ids), (rejected, pair.rejected_ids)):
        full = tokenizer.apply_chat_template([*TURNS, answer(content)], return_dict=False)
        assert full[: len(prompt) + len(ids)] == [*prompt, *ids.tolist()]
        assert tokenizer.decode(full[len(prompt) + len(ids) :]).strip() == ""
        end = tokenizer.convert_ids_to_tokens(int(ids[-1]))
        assert end in ("<|im_end|>", "</s>")
        assert tokenizer.decode(ids[:-1]).strip() == content


def test_system_prompt_is_part_of_prompt() -> None:
    encoder, tokenizer = build("chatml")
    written = encode(encoder, pair_of(answer("yes"), answer("no"), {"role": "system", "content": "Be brief."}, *TURNS))
    added = encode(RowEncoder(tokenizer, system_prompt="Be brief."), pair_of(answer("yes"), answer("no")))
    for ids, expected in zip(added[:3], written[:3], strict=True):
        np.testing.assert_array_equal(ids, expected)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [*((name, "<think>so</think>yes") for name in TEMPLATES), ("chatml", "\n\nyes"), ("chatml", "\n")],
)
def test_chosen_answer_equals_sft_targets(name: str, chosen: str) -> None:
    encoder, _ = build(name)
    row = pair_of(answer(chosen), answer("no"))
    pair = encode(encoder, row)
    for ids, turn in ((pair.chosen_ids, row.messages[-1]), (pair.rejected_ids, row.rejected[0])):
        (tuned,) = build_encoder(name, "last_assistant")[0].encode([chat(*TURNS, turn)])
        assert tuned.input_ids[tuned.loss_mask].tolist() == ids.tolist()
        assert np.flatnonzero(tuned.loss_mask)[0] == len(pair.prompt_ids)


@pytest.mark.parametrize("build_tokenizer", [lambda: build_byte_level(""), lambda: build_metaspace(None)])
def test_text_pair_tokens_equal_prompt_completion_tokens(build_tokenizer: Any) -> None:
    tokenizer = build_tokenizer()
    pair = encode(RowEncoder(tokenizer), text_pair("What is the", " capital of France", " sun"))
    for ids, text in ((pair.chosen_ids, " capital of France"), (pair.rejected_ids, " sun")):
        whole = tokenizer("What is the" + text).input_ids
        assert [*pair.prompt_ids.tolist(), *ids.tolist()] == [*whole, tokenizer.eos_token_id]
        assert ids.tolist().count(tokenizer.eos_token_id) == 1
    assert pair.prompt_ids.tolist() == tokenizer("What is the").input_ids


def test_answer_ending_with_terminator_gets_no_second_one() -> None:
    encoder, tokenizer = build("chatml")
    with_end, without = (encode(encoder, text_pair("2 + 2 =", f" 4{end}", " 5")) for end in ("</s>", ""))
    assert with_end.chosen_ids.tolist() == without.chosen_ids.tolist()
    assert with_end.chosen_ids.tolist().count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (pair_of(answer("4<|im_end|>"), answer("5")), "message 3 is trained on and spells the end token '<|im_end|>'"),
        (pair_of(answer("4"), answer("5<|im_end|>")), "message 3 is trained on and spells the end token '<|im_end|>'"),
        (text_pair("2 + 2 =", " 4", " 5</s></s>"), "the answer is trained on and spells the end token '</s>'"),
        (text_pair("What is the ", "capital", "capital of France"), "let the answer begin with the space"),
        (text_pair("", "4", "5"), "no token that could predict"),
        (chat(*TURNS, answer("d"), num_prompt_messages=1, rejected=[answer("e")]), "`chosen` has 3 messages"),
        (chat(*TURNS[:2], num_prompt_messages=1, rejected=[answer("e"), user("f")]), "`rejected` has 2 messages"),
        (chat(*TURNS, answer("d"), num_prompt_messages=1, rejected=[answer("e")]), "the first turn in which they diff"),
    ],
)
def test_pair_that_cannot_be_trained_on_is_refused(row: Row, words: str) -> None:
    assert words in refuse(build("chatml")[0], row)


def test_generation_prompt_that_is_no_prefix_of_turn_is_refused() -> None:
    encoder, tokenizer = build("prefill")
    message = refuse(encoder, pair_of(answer("yes"), answer("no")))
    assert "`chosen` does not begin with the prompt" in message
    assert "reasoning_content" in message
    assert "chat_template_path" in message
    thought = answer("<think>\nso</think>yes")
    pair = encode(encoder, pair_of(thought, answer("<think>\n</think>no")))
    assert tokenizer.decode(pair.prompt_ids).endswith("<|im_start|>assistant\n<think>\n")
    assert tokenizer.decode(pair.chosen_ids) == "so</think>yes<|im_end|>"
    message = refuse(encoder, pair_of(thought, answer("no")))
    assert "`rejected` does not begin with the prompt" in message


MARKED_WITH_A_GAP = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %} -- {% generation %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_LATE = MARKED_WITH_A_GAP.replace("{% generation %}{{ m", ">{% generation %}{{ m").replace(
    "{% endgeneration %} -- {% generation %}", ""
)


@pytest.mark.parametrize("template", [MARKED_WITH_A_GAP, MARKED_LATE], ids=["gap", "late"])
def test_targets_not_contiguous_after_prompt_are_refused(template: str) -> None:
    tokenizer = build_byte_level(template, extra=CHATML_ENDS)
    message = refuse(RowEncoder(tokenizer), pair_of(answer("yes"), answer("no")))
    assert "not contiguous from the end of the generation prompt" in message
    assert "{% generation %}" in message


def test_prompt_tokens_that_change_before_answer_are_refused() -> None:
    """The tokenizer merges across the boundary: alone, the prompt ends in other tokens than with its answer."""
    _, tokenizer = build("chatml")
    encoder = RowEncoder(tokenizer)
    ids = encoder.encode_prompt(text_pair("2 + 2 =", " 4", " 5"))
    encoder.encode_prompt = lambda row: np.append(ids[:-1], ids[0])  # type: ignore[method-assign]
    message = refuse(encoder, text_pair("2 + 2 =", " 4", " 5"))
    assert f"token {len(ids) - 1} starts" in message
    assert "move the white space" in message


def test_encode_reports_every_broken_row_of_chunk() -> None:
    encoder, _ = build("chatml")
    rows = [
        pair_of(answer("4"), answer("5")),
        pair_of(answer("4"), answer("half a \ud800 pair")),
        chat(user("a"), answer("b"), num_prompt_messages=1, rejected=[answer("e"), user("f")]),
    ]
    rows = [replace(row, where=f"train.jsonl:{number}") for number, row in enumerate(rows, start=1)]
    with pytest.raises(DataError) as refused:
        encode_pairs(encoder, rows)
    assert sorted(problem.where for problem in refused.value.problems) == ["train.jsonl:2", "train.jsonl:3"]
    rows = [replace(rows[0], where=f"train.jsonl:{line}", messages=[*TURNS, answer("4<|im_end|>")]) for line in (5, 7)]
    with pytest.raises(DataError) as refused:
        encode_pairs(encoder, [rows[0], pair_of(answer("4"), answer("5")), rows[1]])
    assert [problem.where for problem in refused.value.problems] == ["train.jsonl:5", "train.jsonl:7"]


def test_prompt_error_is_reported_once_per_pair() -> None:
    encoder, _ = build("chatml")
    row = pair_of(answer("4"), answer("5"), user("half a \ud800 pair"))
    with pytest.raises(DataError) as refused:
        encode_pairs(encoder, [row])
    assert len(refused.value.problems) == 1


def test_tools_and_template_kwargs_are_rendered_in_pairs() -> None:
    template = (
        "{{ tools | length if tools else 0 }}{{ mood }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = build_byte_level(template, extra=CHATML_ENDS)
    row = pair_of(answer("4"), answer("5"), template_kwargs={"mood": "calm"}, tools=[{"name": "add"}])
    pair = encode(RowEncoder(tokenizer), row)
    assert tokenizer.decode(pair.prompt_ids).startswith("1calm<|im_start|>")


def test_encoder_is_thread_safe() -> None:
    encoder, _ = build("chatml")
    rows = [pair_of(answer(f"{number} yes"), answer(f"{number} no")) for number in range(20)]
    expected = [[ids.tolist() for ids in pair[:3]] for pair in encode_pairs(encoder, rows)]
    with ThreadPoolExecutor(4) as pool:
        for pairs in pool.map(lambda _: encode_pairs(encoder, rows), range(8)):
            assert [[ids.tolist() for ids in pair[:3]] for pair in pairs] == expected
