"""The audit of targets and lengths against direct counts, and its findings."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes_lib.config.schema import TokensConfig
from recipes_lib.data.packed.packing import LengthCounts, build_examples, choose_bins, fit_to_length, pack_best_fit
from recipes_lib.data.packed.supervision_audit import (
    Finding,
    SplitAudit,
    check_audit,
    check_remarks,
    compute_split_audit,
    pack_split,
    refuse_errors,
)
from recipes_lib.data.sources.rows import EncodedRow, Remark, build_bits
from recipes_lib.errors import DataError

END = 9
rows_strategy = st.lists(
    st.lists(st.tuples(st.integers(5, 9), st.booleans()), min_size=1, max_size=12), min_size=1, max_size=15
)


def examples_of(rows):
    encoded = [
        EncodedRow(np.array([t for t, _ in row], np.uint32), np.array([flag for _, flag in row], np.bool_))
        for row in rows
    ]
    return build_examples(encoded, range(len(rows)))


def audit_of(rows, capacity=12, end_token_ids=(END,), num_duplicates=0):
    examples = examples_of(rows)
    fitted, counts = fit_to_length(examples, capacity, "truncate")
    bins = pack_best_fit(fitted.lengths, capacity)
    return compute_split_audit(examples, fitted, bins, end_token_ids, num_duplicates), counts


@settings(max_examples=40)
@given(rows_strategy)
def test_audit_equals_direct_count(rows):
    audit, _ = audit_of(rows, capacity=8)
    targets = [[(at, token) for at, (token, flag) in enumerate(row) if flag and at] for row in rows]
    # A line break may follow the end token.
    stops = [END in [token for _, token in row_targets[-3:]] for row_targets in targets if row_targets]
    assert audit.num_rows == len(rows)
    assert audit.num_rows_without_target == sum(not row_targets for row_targets in targets)
    assert audit.num_tokens == sum(map(len, rows))
    assert audit.stop_fraction == pytest.approx(np.mean(stops) if stops else 1.0)
    assert audit.length_max == max(map(len, rows))
    assert audit.length_p50 in map(len, rows)
    assert audit.num_target_tokens == sum(at < 8 for row_targets in targets for at, _ in row_targets)
    assert SplitAudit(**json.loads(json.dumps(asdict(audit)))) == audit


def test_packing_efficiency_is_filled_share():
    rows = [[(5, False), (6, True), (9, True)]] * 3
    examples = examples_of(rows)
    audit = compute_split_audit(examples, examples, pack_best_fit(examples.lengths, 6), [END], 0)
    assert audit.num_packs == 2
    assert audit.packing_efficiency(6) == pytest.approx(9 / 12)
    apart = compute_split_audit(examples, examples, choose_bins(examples.lengths, 6, packing=False), [END], 0)
    assert apart.packing_efficiency(6) == pytest.approx(9 / 18)
    assert apart.target_fraction == pytest.approx(6 / 9)


def test_end_token_before_trained_line_break_counts():
    newline = 5
    examples = examples_of([[(6, True), (7, True), (END, True), (newline, True)], [(6, True), (7, True), (8, True)]])
    bins = pack_best_fit(examples.lengths, 12)
    audit = compute_split_audit(examples, examples, bins, [END], 0)
    assert audit.stop_fraction == 0.5
    assert audit.terminators == [END]


@pytest.mark.parametrize("num_final", [0, 1])
def test_end_token_of_earlier_turns_counts_only_without_last_turns(num_final):
    # As with gpt-oss: <|end|> after earlier answers, <|return|> after the last one.
    end, final, other = 9, 8, 5
    earlier = [(6, False), (7, True), (end, True), (other, False), (other, False), (other, False)]
    last = [*earlier, (7, True), (final, True)]
    audit, _ = audit_of([earlier, [(other, False)], *[last] * num_final], end_token_ids=(end, final))
    assert audit.terminators == [final if num_final else end]
    assert audit.stop_fraction == 1


GOOD = [(5, False), (6, True), (END, True)]
NO_TARGET = [(5, False), (6, False)]
NO_END = [(5, False), (6, True)]


@pytest.mark.parametrize(
    ("rows", "severity", "words"),
    [
        ([GOOD, [(7, False), (6, True), (END, True)]], "ok", "100.0% of the rows end"),
        ([NO_TARGET] + [GOOD] * 99, "warning", "1 of 100 rows (1.0%) hold no target"),
        ([NO_TARGET] * 2 + [GOOD] * 98, "error", "2 of 100 rows (2.0%) hold no target"),
        ([NO_TARGET] * 3, "error", "3 of 3 rows (100.0%) hold no target"),
        ([NO_END] * 3, "error", "0.0% of the rows end"),
        ([NO_END, GOOD], "warning", "50.0% of the rows end"),
    ],
)
def test_findings_have_expected_severity_and_text(rows, severity, words):
    audit, counts = audit_of(rows)
    matching = [finding for finding in check_audit("train", audit, counts, 0.01) if words in finding.found]
    assert [finding.severity for finding in matching] == [severity]


@pytest.mark.parametrize(("num_duplicates", "severity"), [(0, "ok"), (4, "warning")])
def test_duplicates_are_a_warning(num_duplicates, severity):
    findings = check_audit("train", *audit_of([GOOD] * 5, num_duplicates=num_duplicates), 0.01)
    matching = [finding for finding in findings if f"duplicates of earlier rows: {num_duplicates}" in finding.found]
    assert [finding.severity for finding in matching] == [severity]


def lost(num_lost: int, num_overlong: int = 1) -> LengthCounts:
    return LengthCounts(
        num_overlong=num_overlong,
        num_without_target=0,
        num_lost_rows=0,
        num_lost_tokens=num_lost,
        num_lost_targets=num_lost,
        num_targets=1000,
    )


@pytest.mark.parametrize(
    ("counts", "severity"), [(lost(0, 0), "ok"), (lost(10), "warning"), (lost(11), "error"), (lost(0), "warning")]
)
def test_lost_targets_above_limit_are_error(counts, severity):
    audit, _ = audit_of([GOOD])
    findings = [
        finding for finding in check_audit("train", audit, counts, 0.01) if "longer than max_length" in finding.found
    ]
    assert [finding.severity for finding in findings] == [severity]


def find_places(positions):
    return {at: f"a:{at + 1}" for at in positions}


def test_remarks_are_warnings_with_count_and_first_row():
    lost, forged = Remark.LOST_REASONING, Remark.SPECIAL_TEXT
    on_rows = {1: [lost], 4: [forged, lost], 5: [lost]}
    findings = check_remarks("train", build_bits(on_rows.get(at, []) for at in range(1000)), find_places)
    assert [finding.severity for finding in findings] == ["warning", "warning"]
    assert findings[0].found == f"train: 3 of 1,000 rows {lost.found}; the first is a:2"
    assert findings[1].found == f"train: 1 of 1,000 rows {forged.found}; the first is a:5"
    assert [finding.remedy for finding in findings] == [lost.remedy, forged.remedy]
    assert check_remarks("train", build_bits([[]] * 1000), lambda _: pytest.fail("read again")) == []


def test_packed_split_reports_remarks():
    examples = replace(examples_of([GOOD, GOOD]), remarks=build_bits([[], [Remark.LOST_TOOLS]]))
    packed = pack_split("eval", examples, TokensConfig(), 12, [END], find_places, np.array([b"a", b"b"]))
    assert [finding.found for finding in packed.findings if "tool schemas" in finding.found] == [
        f"eval: 1 of 2 rows {Remark.LOST_TOOLS.found}; the first is a:2"
    ]


def test_findings_are_ordered_by_severity():
    examples = examples_of([NO_END, NO_END, NO_TARGET])
    packed = pack_split("eval", examples, TokensConfig(), 12, [END], find_places, np.array([b"a", b"a", b"b"]))
    severities = [finding.severity for finding in packed.findings]
    assert severities == sorted(severities, key=["error", "warning", "ok"].index)


def test_all_error_findings_are_raised_together():
    findings = [Finding("error", "a", "do x"), Finding("warning", "b"), Finding("error", "c", "do y")]
    with pytest.raises(DataError) as raised:
        refuse_errors("train.jsonl", findings)
    assert [problem.found for problem in raised.value.problems] == ["a", "c"]
    refuse_errors("train.jsonl", [Finding("warning", "b"), Finding("ok", "d")])
