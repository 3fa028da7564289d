"""Probes and prompt swaps of held-out pairs, against texts that a recording model has seen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.pairs.preference_sets import encode_pairs
from recipes_lib.data.sources.rows import Row
from recipes_lib.errors import DataError
from recipes_lib.report.reward_report import build_reward_report, choose_other_prompts, score_held_out

PAIRS = [
    ("Which city?", "It is Paris. It lies in France.", "No"),
    ("How many days?", "There are seven days in a week", "Nine, I think"),
    ("Which city?", "The capital of France is Paris!", "Rome"),
    ("What does a baker weigh?", "Flour and water. Every morning? Yes.", "The sun"),
]


class Recorder:
    """Reward model that scores a row by its index and records the row's text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, limit: int = 1000) -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self.texts: dict[float, str] = {}

    def compute_raw_scores(self, rows: Sequence[Any], *, overlong: str = "error") -> list[float]:
        scores = []
        for row in rows:
            assert len(row) <= self.limit or overlong == "nan"
            score = float(len(self.texts)) if len(row) <= self.limit else math.nan
            self.texts[score] = self.tokenizer.decode(row)
            scores.append(score)
        return scores


def encode_rows(tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    rows = [
        Row(
            where=f"pairs row {index}",
            messages=[{"role": "user", "content": prompt}, {"role": "assistant", "content": chosen}],
            num_prompt_messages=1,
            rejected=[{"role": "assistant", "content": rejected}],
        )
        for index, (prompt, chosen, rejected) in enumerate(PAIRS)
    ]
    return [pair._asdict() for pair in encode_pairs(RowEncoder(tokenizer), rows)]


def render_row(prompt: str, answer: str, end: str = "<|im_end|>") -> str:
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{answer}{end}"


def test_score_columns_belong_to_their_rows(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    judge = Recorder(tiny_tokenizer)
    scores = score_held_out(judge, encode_rows(tiny_tokenizer))

    def read(column: np.ndarray) -> list[str]:
        return [judge.texts[score] for score in column]

    assert read(scores.chosen) == [render_row(prompt, chosen) for prompt, chosen, _ in PAIRS]
    assert read(scores.rejected) == [render_row(prompt, rejected) for prompt, _, rejected in PAIRS]
    # Sorted by prompt, rows 0 2 1 3 receive the prompts of rows 1 3 0 2.
    others = [PAIRS[1][0], PAIRS[0][0], PAIRS[3][0], PAIRS[2][0]]
    assert read(scores.swapped_chosen) == [
        render_row(o, chosen) for o, (_, chosen, _) in zip(others, PAIRS, strict=True)
    ]
    assert read(scores.swapped_rejected) == [
        render_row(o, answer) for o, (*_, answer) in zip(others, PAIRS, strict=True)
    ]
    assert scores.prompts[0] == scores.prompts[2] != scores.prompts[1]
    for column, at in ((scores.chosen_lengths, 1), (scores.rejected_lengths, 2)):
        assert column.tolist() == [len(tiny_tokenizer(pair[at])["input_ids"]) + 1 for pair in PAIRS]

    probes = {name: read(column) for name, column in scores.probes.items()}
    assert probes.pop("eos_dropped") == [render_row(prompt, chosen, end="") for prompt, chosen, _ in PAIRS]
    assert probes.pop("white_space_appended") == [render_row(prompt, f"{chosen}\n\n  ") for prompt, chosen, _ in PAIRS]
    last = ["It lies in France.", "There are seven days in a week", "The capital of France is Paris!", "Yes."]
    repeated = [render_row(prompt, f"{chosen} {end}") for (prompt, chosen, _), end in zip(PAIRS, last, strict=True)]
    assert probes.pop("sentence_repeated") == repeated
    for (prompt, chosen, _), text, length in zip(PAIRS, probes.pop("truncated"), scores.chosen_lengths, strict=True):
        assert text.endswith("<|im_end|>")
        kept = text.removeprefix(render_row(prompt, "", "")).removesuffix("<|im_end|>")
        assert chosen.startswith(kept)
        assert len(tiny_tokenizer(kept)["input_ids"]) == (length - 1) // 2
    assert probes == {}


def test_overlong_probe_is_nan(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    pairs = encode_rows(tiny_tokenizer)
    longest = max(len(pair["prompt_ids"]) + len(pair["chosen_ids"]) for pair in pairs)
    scores = score_held_out(Recorder(tiny_tokenizer, limit=longest), pairs)
    assert np.isnan(scores.probes["sentence_repeated"]).any()
    assert not np.isnan(scores.probes["truncated"]).any()
    assert build_reward_report(scores)["probes"]["sentence_repeated"]["num_answers"] < len(pairs)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=30))
def test_other_prompts_are_distinct_and_differ(prompts: list[str]) -> None:
    others = choose_other_prompts(prompts)
    assert others == choose_other_prompts(prompts)
    given_away = [other for other in others if other is not None]
    assert len(set(given_away)) == len(given_away)
    assert all(prompts[other] != prompt for prompt, other in zip(prompts, others, strict=True) if other is not None)
    most = max(Counter(prompts).values())
    if 2 * most <= len(prompts):
        assert None not in others
    else:
        assert others.count(None) == 2 * most - len(prompts)


def test_distinct_prompts_are_rotated() -> None:
    assert choose_other_prompts(["x", "y", "z"]) == [1, 2, 0]


def test_prompt_swap_is_none_for_a_single_prompt(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    pairs = encode_rows(tiny_tokenizer)
    report = build_reward_report(score_held_out(Recorder(tiny_tokenizer), [pairs[0], pairs[2]]))
    assert report["prompt_swap"] is None


def test_scores_of_prepared_pairs_match_scored_chats(reward_model, tiny_tokenizer) -> None:
    scores = score_held_out(reward_model, encode_rows(tiny_tokenizer))
    for column, at in ((scores.chosen, 1), (scores.rejected, 2)):
        chats = [[{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[at]}] for pair in PAIRS]
        assert column.tolist() == pytest.approx(reward_model.score(chats), abs=1e-5)
    assert all(np.isfinite(column).all() for column in scores.probes.values())


def test_pair_longer_than_model_positions_is_refused(reward_model, tiny_tokenizer) -> None:
    pairs = encode_rows(tiny_tokenizer)
    pairs[1]["chosen_ids"] = np.full(600, 7, np.uint32)
    with pytest.raises(DataError, match="answer 1: "):
        score_held_out(reward_model, pairs)
