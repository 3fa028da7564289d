"""The verdict on a reward model: scale, probes on held-out pairs, gates for use in RL."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from recipes_lib.config.token_ids import count_before_end, find_end_tokens
from recipes_lib.errors import DataError
from recipes_lib.files import read_record
from recipes_lib.models.heads.scoring import RewardModel, compute_reward_statistics, store_reward_statistics
from recipes_lib.report.reward_report import EOS_DROPPED, HeldOutScores, build_reward_report, check_gates

TokenIds = npt.NDArray[np.int64]

Pair = Mapping[str, Any]
"""``prompt_ids``, ``chosen_ids`` and ``rejected_ids`` as pairs are prepared: an answer's last token ends it."""

_PARTS: Final = ("prompt_ids", "chosen_ids", "rejected_ids")
_SWAPPED: Final = ("swapped_chosen", "swapped_rejected")
_SENTENCE_GAP: Final = re.compile(r"(?<=[.!?])\s+")
_WHITE_SPACE: Final = "\n\n  "

REWARD_FILE: Final = "reward_report.json"
MAX_REFERENCE_ANSWERS: Final = 1024
MAX_PAIRS: Final = 1000
"""Held-out pairs that the report looks at; each is scored in eight forms."""


def score_held_out(
    reward_model: RewardModel, pairs: Sequence[Pair], *, sources: Sequence[str] | None = None
) -> HeldOutScores:
    """Scores of held-out pairs and of their altered forms, eight answers a pair, in units of the head.

    Args:
        reward_model: Whose.
        pairs: Read by their number, each once.
        sources: The data set of each.

    Raises:
        DataError: A prompt with its chosen or rejected answer is longer than the model's positions.
    """
    read = [pairs[index] for index in range(len(pairs))]
    parts = [tuple(np.asarray(pair[name], np.int64) for name in _PARTS) for pair in read]
    chosen, rejected = ([np.concatenate([row[0], row[at]]) for row in parts] for at in (1, 2))
    scores = np.array(reward_model.compute_raw_scores([*chosen, *rejected]), np.float64)
    altered = {**_swap_prompts(parts), **_alter_chosen(parts, reward_model.tokenizer)}
    measured = {name: _score_altered(reward_model, rows) for name, rows in altered.items()}
    return HeldOutScores(
        chosen=scores[: len(parts)],
        rejected=scores[len(parts) :],
        chosen_lengths=np.array([len(row[1]) for row in parts]),
        rejected_lengths=np.array([len(row[2]) for row in parts]),
        sources=sources,
        prompts=[row[0].tobytes() for row in parts],
        **{name: measured.pop(name) for name in _SWAPPED},
        probes=measured,
    )


def choose_other_prompts(prompts: Sequence[Hashable]) -> list[int | None]:
    """For each row the number of one whose prompt it gets instead: another prompt, and each row's is given once.

    Rows are ordered by prompt and turned on by as many as share the most frequent one, which leaves no row its own
    prompt unless more than half of all rows share it; those that would keep theirs get ``None``.
    """
    first = {prompt: at for at, prompt in reversed([*enumerate(prompts)])}
    order = sorted(range(len(prompts)), key=lambda row: first[prompts[row]])
    shift = max(Counter(prompts).values())
    others = dict(zip(order, [*order[shift:], *order[:shift]], strict=True))
    return [others[row] if prompts[others[row]] != prompts[row] else None for row in range(len(prompts))]


def _swap_prompts(parts: Sequence[Sequence[TokenIds]]) -> dict[str, list[TokenIds | None]]:
    others = choose_other_prompts([row[0].tobytes() for row in parts])
    return {
        name: [
            None if other is None else np.concatenate([parts[other][0], row[answer]])
            for row, other in zip(parts, others, strict=True)
        ]
        for answer, name in enumerate(_SWAPPED, start=1)
    }


def _alter_chosen(
    parts: Sequence[Sequence[TokenIds]], tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[TokenIds | None]]:
    """Chosen answers behind their prompts, altered; but for the first kind they end as they did."""
    altered: dict[str, list[TokenIds | None]] = {}
    gap = _encode(tokenizer, _WHITE_SPACE)
    end_tokens = find_end_tokens(tokenizer)
    for prompt, answer, _ in parts:
        at = count_before_end(np.asarray(answer), end_tokens)
        text, end = answer[:at], answer[at:]
        *_, sentence = _SENTENCE_GAP.split(str(tokenizer.decode(text.tolist(), skip_special_tokens=True)).strip())
        for name, changed in (
            (EOS_DROPPED, [text]),
            ("truncated", [text[: len(text) // 2], end]),
            ("sentence_repeated", [text, _encode(tokenizer, f" {sentence}"), end]),
            ("white_space_appended", [text, gap, end]),
        ):
            altered.setdefault(name, []).append(np.concatenate([prompt, *changed]))
    return altered


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> TokenIds:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)


def _score_altered(reward_model: RewardModel, rows: Sequence[TokenIds | None]) -> npt.NDArray[np.float64]:
    """Scores by row; NaN for rows that are invalid, or longer than the model's positions."""
    scores = np.full(len(rows), np.nan)
    given = [at for at, row in enumerate(rows) if row is not None]
    scores[given] = reward_model.compute_raw_scores([row for row in rows if row is not None], overlong="nan")
    return scores


class PairRows(Protocol):
    """Prepared pairs that are read by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def settle_scale(reward_model: RewardModel, pairs: PairRows) -> None:
    """Store mean and deviation of the scores of chosen training answers with the model, which scores by them then.

    Args:
        reward_model: After training; its configuration is saved with it afterwards. Where its weights are sharded
            every process must call.
        pairs: It was trained on; of the first ``MAX_REFERENCE_ANSWERS`` the chosen answers are the reference.

    Raises:
        DataError: All of them have the same score: the model has learnt nothing.
    """
    chosen = [pairs[number] for number in range(min(MAX_REFERENCE_ANSWERS, len(pairs)))]
    rows = [np.concatenate([pair["prompt_ids"], pair["chosen_ids"]]).tolist() for pair in chosen]
    store_reward_statistics(reward_model.model, compute_reward_statistics(reward_model.compute_raw_scores(rows)))


def write_verdict(
    reward_model: RewardModel, pairs: PairRows | None, folder: Path, *, is_main: bool = True
) -> Sequence[str] | None:
    """Score held-out pairs, as they are and altered, and write ``reward_report.json``.

    Args:
        reward_model: After ``settle_scale``; where its weights are sharded every process must call.
        pairs: Held-out pairs; ``None`` when nothing was held out, so that nothing is known.
        folder: The output directory.
        is_main: Whether this process writes.

    Returns:
        A sentence for each gate that it failed; ``None`` when nothing was held out.
    """
    if pairs is None:
        return None
    held_out = [pairs[number] for number in range(min(MAX_PAIRS, len(pairs)))]
    report = build_reward_report(score_held_out(reward_model, held_out))
    failed = check_gates(report)
    config = reward_model.model.config
    verdict: Mapping[str, Any] = {
        "may_serve_ppo": not failed,
        "failed_gates": failed,
        "scale": {"mean": config.reward_mean, "std": config.reward_std},
        **report,
    }
    if is_main:
        (folder / REWARD_FILE).write_text(json.dumps(verdict, indent=1), encoding="utf-8")
    return failed


def read_verdict(folder: Path) -> Mapping[str, Any] | None:
    """Return what ``write_verdict`` wrote into a run's directory; ``None`` where there is nothing whole."""
    with suppress(DataError):
        return read_record(folder / REWARD_FILE, {"failed_gates": list})
    return None
