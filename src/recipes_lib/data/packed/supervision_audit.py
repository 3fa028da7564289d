"""Supervision audit of a prepared set: counts of target tokens and of lost data, with warnings and errors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from recipes_lib.config.schema import TokensConfig
from recipes_lib.config.tokenization import NUM_OF_END
from recipes_lib.data.packed.packing import Bins, Examples, LengthCounts, choose_bins, fit_to_length, split_blocks
from recipes_lib.data.sources.rows import Remark, RemarkBits, find_remarked
from recipes_lib.data.sources.splits import Digests, FindPlaces, count_duplicates
from recipes_lib.errors import Problem, raise_problems

MAX_FRACTION_WITHOUT_TARGET = 0.01
"""Share of rows without targets above which they are an error instead of a warning."""

Severity = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitAudit:
    """Figures of one split, as JSON values. Figures of rows are before truncation, those of packs after it.

    Attributes:
        num_rows: Number of rows.
        num_rows_without_target: Rows without target tokens.
        num_duplicates: Rows with the same content as an earlier row.
        num_tokens: Tokens of all rows.
        stop_fraction: Share of rows whose last targets include an end token, or were cut off, among rows with targets;
            1 if there are none.
        terminators: Ids of these end tokens, ascending; of the rows that end with their last targets, if there are any.
        length_p5: 5th percentile of the lengths of rows, in tokens.
        length_p50: Median length, in tokens.
        length_p95: 95th percentile of the lengths, in tokens.
        length_max: Length of the longest row, in tokens.
        num_packs: Number of packs, the training rows.
        num_packed_tokens: Tokens of all packs.
        num_target_tokens: Target tokens of all packs.
    """

    num_rows: int
    num_rows_without_target: int
    num_duplicates: int
    num_tokens: int
    stop_fraction: float
    terminators: list[int]
    length_p5: int
    length_p50: int
    length_p95: int
    length_max: int
    num_packs: int
    num_packed_tokens: int
    num_target_tokens: int

    @property
    def target_fraction(self) -> float:
        """Share of target tokens in packed tokens, from 0 to 1."""
        return self.num_target_tokens / max(1, self.num_packed_tokens)

    def packing_efficiency(self, capacity: int) -> float:
        """Return the share of non-padding tokens if every pack is padded to ``capacity`` tokens, from 0 to 1."""
        return self.num_packed_tokens / max(1, self.num_packs * capacity)


def read_audit(figures: Mapping[str, Any]) -> SplitAudit:
    """Return the audit of a split from its entry in a manifest, which also has ``cut``, the ``LengthCounts``."""
    return SplitAudit(**{name: value for name, value in figures.items() if name != "cut"})


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check of the audit.

    Attributes:
        severity: ``ok``, ``warning`` or ``error``.
        found: Finding, in one clause.
        remedy: What to do, in one clause; may be empty.
    """

    severity: Severity
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.found, self.remedy)))


@dataclass(frozen=True, slots=True)
class PackedSplit:
    """Examples after truncation and packing, with their audit.

    Attributes:
        examples: Examples after truncation.
        bins: Assignment of the examples to packs.
        audit: Figures of the split.
        cut: Counts of what truncation lost.
        findings: Findings of ``check_audit`` and ``check_remarks``, worst first.
    """

    examples: Examples
    bins: Bins
    audit: SplitAudit
    cut: LengthCounts
    findings: Sequence[Finding]


def pack_split(
    split: str,
    examples: Examples,
    tokens: TokensConfig,
    capacity: int,
    end_token_ids: Collection[int],
    find_places: FindPlaces,
    digests: Digests,
) -> PackedSplit:
    """Truncate, pack, count and check one split; errors are findings, and not raised.

    Args:
        split: Name of the split in the findings, ``train`` or ``eval``.
        examples: All tokenised rows; at least one.
        tokens: Options.
        capacity: Maximum length of a pack in tokens, configured or derived.
        end_token_ids: Ids of tokens that end answers.
        find_places: As for ``check_remarks``.
        digests: Digest of each row's content.
    """
    fitted, cut = fit_to_length(examples, capacity, tokens.overlong)
    bins = choose_bins(fitted.lengths, capacity, packing=tokens.packing)
    audit = compute_split_audit(examples, fitted, bins, end_token_ids, count_duplicates(digests))
    findings = [
        *check_audit(split, audit, cut, tokens.max_truncated_fraction),
        *check_remarks(split, examples.remarks, find_places),
    ]
    return PackedSplit(fitted, bins, audit, cut, sort_findings(findings))


def describe_overlong(where: str, length: int, capacity: int) -> Problem:
    """Return the problem of a row that has ``length`` tokens, more than ``capacity``."""
    found = f"{length:,} tokens, max_length is {capacity:,}"
    return Problem(where, found, "raise max_length, or write another value of overlong", size=length)


def compute_split_audit(
    examples: Examples, fitted: Examples, bins: Bins, end_token_ids: Collection[int], num_duplicates: int
) -> SplitAudit:
    """Compute the figures of one split.

    Args:
        examples: All tokenised rows; at least one.
        fitted: Examples after truncation.
        bins: Assignment of ``fitted`` to packs.
        end_token_ids: Ids of tokens that end answers.
        num_duplicates: Number of rows with the same content as an earlier row.
    """
    num_with_target = num_stopped = 0
    # The end of a cut text is not tokenised.
    is_cut = np.isin(np.arange(len(examples)), find_remarked(examples.remarks).get(Remark.CUT, ()))
    # gpt-oss ends a last answer with another token than earlier ones, on which generation must not stop. Therefore, the
    # end tokens of rows in which other turns follow the last targets count only if there are no others.
    terminators: dict[bool, set[int]] = {True: set(), False: set()}
    for block in split_blocks(examples.lengths):
        # (NUM_OF_END, rows with targets), from the last target backwards. Templates can train on a line break after
        # the end token, so the end token need not be the last target.
        input_ids, loss_mask = examples.read(block)
        has_target = examples.num_targets[block] > 0
        last = _find_last_targets(loss_mask, examples.num_targets[block][has_target])
        is_end = np.isin(input_ids[last], list(end_token_ids))
        stops = np.logical_or.reduce(is_end, axis=0)
        # `argmax` finds the first True, which is the last end token of each row.
        ends = np.take_along_axis(input_ids[last], is_end.argmax(axis=0)[None], axis=0)[0]
        is_last_turn = np.cumsum(examples.lengths[block])[has_target] - last[0] <= NUM_OF_END
        num_with_target += len(stops)
        num_stopped += int((stops | is_cut[block][has_target]).sum())
        for is_last, found in terminators.items():
            found.update(ends[stops & (is_last_turn == is_last)].tolist())
    return SplitAudit(
        num_rows=len(examples),
        num_rows_without_target=len(examples) - num_with_target,
        num_duplicates=num_duplicates,
        num_tokens=int(examples.lengths.sum()),
        stop_fraction=num_stopped / num_with_target if num_with_target else 1.0,
        terminators=sorted(terminators[True] or terminators[False]),
        **summarize_lengths(examples.lengths),
        num_packs=len(bins),
        num_packed_tokens=int(fitted.lengths.sum()),
        num_target_tokens=int(fitted.num_targets.sum()),
    )


def summarize_lengths(lengths: npt.NDArray[np.int64]) -> dict[str, int]:
    """Return the percentiles of lengths in tokens, by their names in an audit."""
    names = ("length_p5", "length_p50", "length_p95", "length_max")
    return dict(zip(names, np.percentile(lengths, [5, 50, 95, 100], method="nearest").tolist(), strict=True))


def check_audit(split: str, audit: SplitAudit, lengths: LengthCounts, max_lost_fraction: float | None) -> list[Finding]:
    """Return the findings on the figures of a split.

    Args:
        split: Name of the split in the findings, ``train`` or ``eval``.
        audit: Figures from ``compute_split_audit``.
        lengths: Counts from ``fit_to_length``.
        max_lost_fraction: Share of lost target tokens above which they are an error (``max_truncated_fraction``).
    """
    overlong = (
        f"{split}: rows longer than max_length: {lengths.num_overlong:,}; lost with them: "
        f"{lengths.num_lost_targets:,} target tokens ({lengths.lost_fraction:.2%}), "
        f"{lengths.num_lost_rows:,} of the rows entirely"
    )
    return [
        _check_targets(split, audit),
        _check_stops(split, audit),
        check_lengths(split, overlong, lengths.num_overlong, lengths.lost_fraction, max_lost_fraction),
        check_duplicates(split, audit.num_duplicates),
    ]


def check_remarks(split: str, remarks: RemarkBits, find_places: FindPlaces) -> list[Finding]:
    """Return a warning for each remark that occurs, with the number of rows and the first of them.

    Args:
        split: Name of the split in the findings, ``train`` or ``eval``.
        remarks: Remarks on all rows of the split, ``uint16 (R,)``.
        find_places: Function that returns the locations of rows, given their positions in the split.
    """
    remarked = find_remarked(remarks)
    places = find_places({int(rows[0]) for rows in remarked.values()}) if remarked else {}
    return [
        Finding(
            "warning",
            f"{split}: {len(rows):,} of {len(remarks):,} rows {remark.found}; the first is {places[int(rows[0])]}",
            remark.remedy,
        )
        for remark, rows in remarked.items()
    ]


def check_lengths(
    split: str, overlong: str, num_overlong: int, lost_fraction: float, max_lost_fraction: float | None
) -> Finding:
    """Return the finding on targets lost to ``max_length``: a warning, or an error above the limit.

    Args:
        split: Name of the split in the finding, ``train`` or ``eval``.
        overlong: Text of the finding, with the counts.
        num_overlong: Number of rows longer than ``max_length``.
        lost_fraction: Share of lost target tokens.
        max_lost_fraction: Limit of that share (``max_truncated_fraction``); ``None`` for no limit.
    """
    if not num_overlong:
        return Finding("ok", f"{split}: no row is longer than max_length")
    if max_lost_fraction is None or lost_fraction <= max_lost_fraction:
        return Finding("warning", overlong)
    remedy = f"raise max_length, or accept the loss: max_truncated_fraction is {max_lost_fraction:g}"
    return Finding("error", overlong, remedy)


def check_duplicates(split: str, num_duplicates: int) -> Finding:
    """Return the finding on rows with the same content as an earlier row."""
    found = f"{split}: exact duplicates of earlier rows: {num_duplicates:,}"
    return Finding("warning" if num_duplicates else "ok", found)


def sort_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings sorted by severity, worst first."""
    order: Sequence[Severity] = ("error", "warning", "ok")
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def refuse_errors(where: str, findings: Sequence[Finding]) -> None:
    """Raise the findings of severity ``error``, if there are any.

    Args:
        where: Name of the dataset in the error.
        findings: All findings.

    Raises:
        DataError: There are such findings; has all of them.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    raise_problems([Problem(where, error.found, error.remedy) for error in errors], where)


def _check_targets(split: str, audit: SplitAudit) -> Finding:
    fraction = audit.num_rows_without_target / audit.num_rows
    found = f"{split}: {audit.num_rows_without_target} of {audit.num_rows} rows ({fraction:.1%}) hold no target token"
    if not audit.num_packs and fraction < 1:
        return Finding("error", f"{split}: no row is left after the cut to max_length", "raise max_length")
    if not fraction:
        return Finding("ok", f"{split}: {audit.target_fraction:.1%} of the tokens are trained on, some in every row")
    severity: Severity = "error" if fraction > MAX_FRACTION_WITHOUT_TARGET else "warning"
    return Finding(severity, found, "look at them with `recipes preview`, and remove them or change loss_on")


def _check_stops(split: str, audit: SplitAudit) -> Finding:
    found = f"{split}: {audit.stop_fraction:.1%} of the rows end their last answer with an end token that is trained on"
    if audit.stop_fraction == 1:
        return Finding("ok", found)
    severity: Severity = "error" if audit.stop_fraction == 0 else "warning"
    return Finding(severity, found, "the model would not learn to stop: check eos_token and the chat template")


def _find_last_targets(loss_mask: npt.NDArray[np.bool_], num_targets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the positions of the last targets of each row, ``(NUM_OF_END, rows)``, from the last one backwards.

    A row with fewer targets repeats its first one.

    Args:
        loss_mask: Loss mask of all rows, concatenated.
        num_targets: Number of targets of each row that has targets.
    """
    # Indices into all targets of the block, in which those of a row are contiguous.
    ends = np.cumsum(num_targets)
    at = np.maximum(ends[None] - 1 - np.arange(NUM_OF_END)[:, None], (ends - num_targets)[None])
    positions: npt.NDArray[np.int64] = np.flatnonzero(loss_mask)[at]
    return positions
