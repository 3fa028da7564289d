"""The audit of pairs counts what is there, and says what it means."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes_lib.data.pairs.audit import DropCounts, PairAudit, compute_pair_audit, count_tokens, judge_pairs

ids = st.lists(st.integers(0, 9), min_size=1, max_size=8)
pairs = st.lists(
    st.tuples(ids, ids, ids, st.none() | st.floats(0, 1, width=16), st.integers(0, 3)), min_size=1, max_size=8
)


def table_of(rows: list) -> pa.Table:
    """In several chunks, the first of which is empty and the last a slice."""
    columns = list(zip(*rows, strict=True))
    whole = pa.table(
        {
            **{
                name: pa.array([np.array(values, np.uint32) for values in column], pa.list_(pa.uint32()))
                for name, column in zip(("prompt_ids", "chosen_ids", "rejected_ids"), columns, strict=False)
            },
            "margin": pa.array(columns[3], pa.float32()),
        }
    )
    return pa.concat_tables([whole.slice(0, 0), whole.slice(0, 1), whole.slice(1)])


@given(pairs)
def test_the_figures_are_those_of_a_plain_count(rows: list) -> None:
    digests, prompt_digests = [bytes([row[4]]) for row in rows], [bytes([row[4] // 2]) for row in rows]
    audit = compute_pair_audit(table_of(rows), digests, prompt_digests)
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
    assert count_tokens(table_of(rows), "prompt_ids").tolist() == [len(row[0]) for row in rows]


def test_the_counts_of_chunks_add_up() -> None:
    one = DropCounts(num_rows=10, num_identical=1, num_overlong=2, num_answer_tokens=100, num_lost_tokens=30)
    two = DropCounts(num_rows=5, num_answer_tokens=50)
    assert one + two == DropCounts(
        num_rows=15, num_identical=1, num_overlong=2, num_answer_tokens=150, num_lost_tokens=30
    )
    assert one.lost_fraction == 0.3
    assert DropCounts().lost_fraction == 0


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
def test_what_was_left_out_is_judged_worst_first(
    dropped: DropCounts, num_duplicates: int, severities: list[str]
) -> None:
    audit = compute_pair_audit(table_of([([1], [2], [3], None, 0)]), [b"a"], [b"a"])
    audit = dataclasses.replace(audit, num_duplicates=num_duplicates)
    findings = judge_pairs("train", audit, dropped, 0.05)
    assert [finding.severity for finding in findings] == severities
    if severities[0] == "error":
        assert "max_truncated_fraction is 0.05" in findings[0].remedy
        assert "6 tokens of answers (6.00%)" in findings[0].found
        assert "error" not in {finding.severity for finding in judge_pairs("train", audit, dropped, None)}
