"""The audit of preference pairs: counts, dropped rows, warnings and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from recipes_lib.data.packed.audit import Finding, judge_loss, sort_findings

if TYPE_CHECKING:
    import pyarrow as pa

ANSWERS = ("chosen_ids", "rejected_ids")
"""Columns of a pair's answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairAudit:
    """Figures of one split; JSON values. Of pairs whose length is told, it is that of the prompt and the longer answer.

    Attributes:
        num_pairs: Pairs to train on.
        num_prompts: Prompts that differ.
        num_duplicates: Pairs that say what an earlier one says.
        num_margins: Pairs of which the data say by how much the chosen answer is better.
        num_prompt_tokens: Tokens of the prompts, each counted once a pair.
        num_chosen_tokens: Tokens of the chosen answers.
        num_rejected_tokens: Tokens of the rejected answers.
        length_p5: 5th percentile of the pairs' lengths in tokens.
        length_p50: Median length.
        length_p95: 95th percentile.
        length_max: Longest pair.
        terminators: Last tokens of the answers, in order.
    """

    num_pairs: int
    num_prompts: int
    num_duplicates: int
    num_margins: int
    num_prompt_tokens: int
    num_chosen_tokens: int
    num_rejected_tokens: int
    length_p5: int
    length_p50: int
    length_p95: int
    length_max: int
    terminators: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens with one copy of each prompt."""
        return self.num_prompt_tokens + self.num_chosen_tokens + self.num_rejected_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCounts:
    """What of the rows was left out, and what that cost; JSON values.

    Attributes:
        num_rows: Rows read.
        num_identical: Rows whose answers are the same tokens, left out.
        num_overlong: Rows longer than ``max_length``, left out.
        num_answer_tokens: Tokens of all answers that differ.
        num_lost_tokens: Those of them that were too long.
    """

    num_rows: int = 0
    num_identical: int = 0
    num_overlong: int = 0
    num_answer_tokens: int = 0
    num_lost_tokens: int = 0

    @property
    def lost_fraction(self) -> float:
        """Share of the answers' tokens that is gone, 0 to 1."""
        return self.num_lost_tokens / max(1, self.num_answer_tokens)

    def __add__(self, other: DropCounts) -> DropCounts:
        return DropCounts(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


def compute_pair_audit(
    pairs: pa.Table, digests: npt.NDArray[np.bytes_], prompt_digests: npt.NDArray[np.bytes_]
) -> PairAudit:
    """Counts one split.

    Args:
        pairs: ``prompt_ids``, ``chosen_ids``, ``rejected_ids``, and ``margin``, null where there is none; at least one.
        digests: What each pair says.
        prompt_digests: What each prompt says.
    """
    prompt, chosen, rejected = (count_tokens(pairs, name) for name in ("prompt_ids", *ANSWERS))
    lengths = prompt + np.maximum(chosen, rejected)
    p5, p50, p95, longest = np.percentile(lengths, [5, 50, 95, 100], method="nearest").tolist()
    ends = [_last_tokens(chunk) for name in ANSWERS for chunk in pairs[name].chunks]
    return PairAudit(
        num_pairs=len(pairs),
        num_prompts=len(np.unique(prompt_digests)),
        num_duplicates=len(digests) - len(np.unique(digests)),
        num_margins=len(pairs) - pairs["margin"].null_count,
        num_prompt_tokens=int(prompt.sum()),
        num_chosen_tokens=int(chosen.sum()),
        num_rejected_tokens=int(rejected.sum()),
        length_p5=p5,
        length_p50=p50,
        length_p95=p95,
        length_max=longest,
        terminators=np.unique(np.concatenate(ends)).tolist(),
    )


def count_tokens(pairs: pa.Table, column: str) -> npt.NDArray[np.int64]:
    """Tokens of each prompt or answer, ``int64 (P,)``."""
    import pyarrow.compute as pc

    return np.asarray(pc.list_value_length(pairs[column]), np.int64)


def judge_pairs(split: str, audit: PairAudit, dropped: DropCounts, max_lost_fraction: float | None) -> list[Finding]:
    """What the figures of a split mean, worst first.

    Args:
        split: ``train`` or ``eval``, as the messages name it.
        audit: From ``compute_pair_audit``.
        dropped: What was left out.
        max_lost_fraction: ``max_truncated_fraction``.
    """
    same = f"{split}: rows whose answers are the same tokens, left out: {dropped.num_identical:,}"
    copies = f"{split}: exact duplicates of earlier rows: {audit.num_duplicates:,}"
    findings = [
        _judge_lengths(split, dropped, max_lost_fraction),
        Finding("warning" if dropped.num_identical else "ok", same),
        Finding("warning" if audit.num_duplicates else "ok", copies),
    ]
    return sort_findings(findings)


def _judge_lengths(split: str, dropped: DropCounts, max_lost_fraction: float | None) -> Finding:
    if not dropped.num_overlong:
        return Finding("ok", f"{split}: no row is longer than max_length")
    found = (
        f"{split}: rows longer than max_length, left out: {dropped.num_overlong:,}; lost with them: "
        f"{dropped.num_lost_tokens:,} tokens of answers ({dropped.lost_fraction:.2%})"
    )
    return judge_loss(found, dropped.lost_fraction, max_lost_fraction)


def _last_tokens(answers: pa.ListArray) -> npt.NDArray[np.uint32]:
    """The ids that occur as the last of an answer."""
    ids, lengths = np.asarray(answers.flatten()), np.asarray(answers.value_lengths())
    return np.unique(ids[np.cumsum(lengths) - 1])
