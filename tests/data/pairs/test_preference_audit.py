"""The audit of preference pairs against direct counts, and its findings."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes_lib.data.packed.encoding import EncodedMixture
from recipes_lib.data.packed.packing import build_examples
from recipes_lib.data.packed.supervision_audit import sort_findings
from recipes_lib.data.pairs.preference_sets import (
    DropCounts,
    PairAudit,
    check_pairs,
    compute_pair_audit,
    count_tokens,
    drop_pairs,
)
from recipes_lib.data.sources.mixtures import Mixture
from recipes_lib.data.sources.rows import EncodedRow

ids = st.lists(st.integers(0, 9), min_size=1, max_size=8)
pairs = st.lists(
    st.tuples(ids, ids, ids, st.none() | st.floats(0, 1, width=16), st.integers(0, 3)), min_size=1, max_size=8
)


def build_side(rows: list) -> EncodedMixture:
    """Return encoded pairs: prompt, chosen and rejected answer concatenated, with a mixture that is never read."""
    encoded = [
        EncodedRow(
            np.array([*prompt, *chosen, *rejected], np.uint32),
            np.arange(len(prompt + chosen + rejected)) >= len(prompt),
        )
        for prompt, chosen, rejected, *_ in rows
    ]
    columns = {
        "num_chosen": np.array([len(row[1]) for row in rows], np.int32),
        "lengths": np.array([len(row[0]) + max(len(row[1]), len(row[2])) for row in rows]),
        "is_identical": np.array([row[1] == row[2] for row in rows]),
        "margins": np.array([row[3] for row in rows], np.float32),
        "prompt_digests": np.array([row[4] // 2 for row in rows]),
    }
    digests = np.array([row[4] for row in rows])
    return EncodedMixture(Mixture(parts=()), build_examples(encoded, range(len(rows))), digests, columns)


@settings(max_examples=40)
@given(pairs)
def test_pair_audit_equals_direct_count(rows: list) -> None:
    audit = compute_pair_audit(build_side(rows))
    lengths = sorted(len(prompt) + max(len(chosen), len(rejected)) for prompt, chosen, rejected, *_ in rows)
    tokens = [sum(len(row[part]) for row in rows) for part in range(3)]
    assert [audit.num_prompt_tokens, audit.num_chosen_tokens, audit.num_rejected_tokens] == tokens
    assert audit.num_tokens == sum(tokens)
    assert audit.num_pairs == len(rows)
    assert audit.num_duplicates == len(rows) - len({row[4] for row in rows})
    assert audit.num_prompts == len({row[4] // 2 for row in rows})
    assert audit.num_margins == sum(row[3] is not None for row in rows)
    assert audit.terminators == sorted({row[1][-1] for row in rows} | {row[2][-1] for row in rows})
    assert audit.length_max == lengths[-1]
    assert audit.length_p50 in lengths
    assert lengths[0] <= audit.length_p5 <= audit.length_p50 <= audit.length_p95 <= lengths[-1]
    assert PairAudit(**json.loads(json.dumps(dataclasses.asdict(audit)))) == audit
    counted = count_tokens(build_side(rows))
    assert [part.tolist() for part in counted] == [[len(row[part]) for row in rows] for part in range(3)]


@settings(max_examples=40)
@given(pairs, st.none() | st.integers(2, 20))
def test_drop_pairs_drops_overlong_and_identical_pairs(rows: list, max_length: int | None) -> None:
    kept, dropped = drop_pairs(build_side(rows), max_length)
    longest = [len(prompt) + max(len(chosen), len(rejected)) for prompt, chosen, rejected, *_ in rows]
    same = [row[1] == row[2] for row in rows]
    long = [not same[at] and length > (max_length or 10**9) for at, length in enumerate(longest)]
    answers = [len(row[1] + row[2]) for row in rows]
    assert kept.examples.row_ids.tolist() == [at for at in range(len(rows)) if not same[at] and not long[at]]
    assert dropped == DropCounts(
        num_rows=len(rows),
        num_identical=sum(same),
        num_overlong=sum(long),
        num_answer_tokens=sum(answers[at] for at in range(len(rows)) if not same[at]),
        num_lost_tokens=sum(answers[at] for at in range(len(rows)) if long[at]),
    )
    assert dropped.lost_fraction == dropped.num_lost_tokens / max(1, dropped.num_answer_tokens)


@pytest.mark.parametrize(
    ("dropped", "num_duplicates", "severities"),
    [
        (DropCounts(num_rows=10), 0, ["ok", "ok", "ok"]),
        (DropCounts(num_rows=10, num_identical=2), 0, ["warning", "ok", "ok"]),
        (DropCounts(num_rows=10), 3, ["warning", "ok", "ok"]),
        (DropCounts(num_rows=10, num_overlong=1, num_answer_tokens=100, num_lost_tokens=5), 0, ["warning", "ok", "ok"]),
        (
            DropCounts(num_rows=10, num_identical=2, num_overlong=1, num_answer_tokens=100, num_lost_tokens=6),
            0,
            ["error", "warning", "ok"],
        ),
    ],
)
def test_findings_on_dropped_pairs_have_expected_severity(dropped, num_duplicates, severities) -> None:
    audit = compute_pair_audit(build_side([([1], [2], [3], None, 0)]))
    audit = dataclasses.replace(audit, num_duplicates=num_duplicates)
    findings = sort_findings(check_pairs("train", audit, dropped, 0.05))
    assert [finding.severity for finding in findings] == severities
    if severities[0] == "error":
        assert "max_truncated_fraction is 0.05" in findings[0].remedy
        assert "6 tokens of answers (6.00%)" in findings[0].found
        assert "error" not in {finding.severity for finding in check_pairs("train", audit, dropped, None)}
