"""The audit of preference pairs: counts, dropped rows, warnings and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from recipes_lib.data.packed.encoding import EncodedMixture
from recipes_lib.data.packed.packing import IntArray
from recipes_lib.data.packed.supervision_audit import Finding, judge_loss, sort_findings


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


class PairTokens(NamedTuple):
    """Tokens of each prompt, chosen and rejected answer, ``int64 (P,)``."""

    prompt: IntArray
    chosen: IntArray
    rejected: IntArray

    @property
    def lengths(self) -> IntArray:
        """Tokens of the prompt and the longer answer, ``int64 (P,)``."""
        lengths: IntArray = self.prompt + np.maximum(self.chosen, self.rejected)
        return lengths


def count_tokens(pairs: EncodedMixture) -> PairTokens:
    """How long the parts of each pair are.

    Args:
        pairs: Each an example of prompt, chosen and rejected answer, end to end, of which the answers are the targets;
            with the column ``num_chosen``, tokens of the chosen one.
    """
    answers, chosen = pairs.examples.num_targets, pairs.columns["num_chosen"].astype(np.int64)
    return PairTokens(pairs.examples.lengths - answers, chosen, answers - chosen)


def drop_pairs(pairs: EncodedMixture, max_length: int | None) -> tuple[EncodedMixture, DropCounts]:
    """The pairs that can be trained on, and the count of the others.

    Args:
        pairs: As for ``count_tokens``; with the column ``is_identical``, True where both answers are the same tokens.
        max_length: Tokens that a prompt and either answer have room for; ``None``: any number.
    """
    tokens, is_identical = count_tokens(pairs), pairs.columns["is_identical"]
    is_overlong = ~is_identical & (tokens.lengths > (np.inf if max_length is None else max_length))
    counts = DropCounts(
        num_rows=len(is_identical),
        num_identical=int(is_identical.sum()),
        num_overlong=int(is_overlong.sum()),
        num_answer_tokens=int(pairs.examples.num_targets[~is_identical].sum()),
        num_lost_tokens=int(pairs.examples.num_targets[is_overlong].sum()),
    )
    return pairs.take(np.flatnonzero(~is_identical & ~is_overlong)), counts


def compute_pair_audit(pairs: EncodedMixture) -> PairAudit:
    """Counts one split.

    Args:
        pairs: At least one, as for ``count_tokens``; with the columns ``prompt_digests``, what each prompt says, and
            ``margins``, ``float32``, NaN where there is none.
    """
    tokens = count_tokens(pairs)
    p5, p50, p95, longest = np.percentile(tokens.lengths, [5, 50, 95, 100], method="nearest").tolist()
    terminators: set[int] = set()
    for block in pairs.examples.iterate_blocks():
        ends = np.cumsum(pairs.examples.lengths[block]) - 1
        ids, _ = pairs.examples.read(block)
        terminators.update(ids[ends].tolist(), ids[ends - tokens.rejected[block]].tolist())
    return PairAudit(
        num_pairs=len(tokens.prompt),
        num_prompts=len(np.unique(pairs.columns["prompt_digests"])),
        num_duplicates=pairs.num_duplicates,
        num_margins=int(np.isfinite(pairs.columns["margins"]).sum()),
        num_prompt_tokens=int(tokens.prompt.sum()),
        num_chosen_tokens=int(tokens.chosen.sum()),
        num_rejected_tokens=int(tokens.rejected.sum()),
        length_p5=p5,
        length_p50=p50,
        length_p95=p95,
        length_max=longest,
        terminators=sorted(terminators),
    )


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
