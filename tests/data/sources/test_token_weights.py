"""A weight is a share of the tokens; a stream is read as far as its share of the run, and no less."""

from __future__ import annotations

import numpy as np
import pytest

from recipes_lib.data.sources.mixtures import compute_budgets, compute_weights, list_entries
from recipes_lib.data.tokens.dataset import RowOrder
from recipes_lib.errors import ConfigError


@pytest.fixture
def mix(build_config):
    """Builds a run over a mixture with these weights; ``None`` leaves the weight out."""

    def build(*weights, **options):
        entries = [{"name": f"{at}.jsonl"} | ({} if w is None else {"weight": w}) for at, w in enumerate(weights)]
        return build_config(dataset_mixture=entries, max_length=10, dataset_streaming=True, **options)

    return build


@pytest.mark.parametrize(
    ("weights", "num_tokens", "expected"),
    [
        ((None, None, None), (10, 30, 60), (0.1, 0.3, 0.6)),
        ((1.0, 1.0, 2.0), (10, 30, 60), (0.25, 0.25, 0.5)),
        ((3.0, None), (10, 30), (0.75, 0.25)),
        ((5.0,), (10,), (1.0,)),
        ((None,), (10,), (1.0,)),
    ],
)
def test_weights_are_shares_of_the_tokens_and_by_size_unless_given(mix, weights, num_tokens, expected):
    assert compute_weights(mix(*weights), num_tokens) == pytest.approx(expected)


def test_a_repeat_is_how_often_a_source_is_read_beside_the_others(build_config):
    entries = [{"name": "a"}, {"name": "b", "repeat": 2}, {"name": "c", "repeat": 0.5}]
    weights = compute_weights(build_config(dataset_mixture=entries), (10, 30, 60))
    assert weights == pytest.approx((0.1, 0.6, 0.3))


def test_the_one_dataset_is_an_entry_too(build_config):
    config = build_config(dataset_name="a/b", dataset_config="c", dataset_revision="d", dataset_train_split="e")
    entry = {"name": "a/b", "config": "c", "revision": "d", "split": "e", "columns": None}
    assert list_entries(config.data) == [entry]
    assert compute_weights(config, [7]) == [1]


def draw(phases, num_tokens, max_length, num_sources) -> list[int]:
    """Tokens that a run of whole rows takes of each source."""
    rows = [(-(-start // max_length), weights) for start, weights in phases if start < num_tokens]
    order = RowOrder([10**6] * num_sources, rows, seed=0)
    return (order.count_rows(-(-num_tokens // max_length)) * max_length).tolist()


@pytest.mark.parametrize("num_tokens", [10, 1000, 12_340])
@pytest.mark.parametrize("weights", [(1.0,), (0.7, 0.2, 0.1), (1.0, 1.0), (2.0, None, 0.5)])
def test_a_stream_is_read_far_enough_and_a_window_at_most_too_far(mix, weights, num_tokens):
    budgets = compute_budgets(mix(*weights), num_tokens)
    drawn = draw([(0, [1.0 if w is None else w for w in weights])], num_tokens, 10, len(weights))
    total = sum(1.0 if w is None else w for w in weights)
    for budget, tokens, weight in zip(budgets, drawn, weights, strict=True):
        assert tokens <= budget
        assert budget <= num_tokens * (1.0 if weight is None else weight) / total + 10 + 1


@pytest.mark.parametrize("num_tokens", [100, 1000, 5000])
def test_a_curriculum_shares_the_run_by_its_phases(mix, num_tokens):
    phases = [(0, [1.0, 0.0, 3.0]), (305, [0.0, 1.0, 1.0]), (2000, [2.0, 5.0, 0.0])]
    curriculum = [{"start_tokens": start, "weights": weights} for start, weights in phases]
    budgets = compute_budgets(mix(None, None, None, dataset_curriculum=curriculum), num_tokens)
    drawn = draw(phases, num_tokens, 10, 3)
    assert all(tokens <= budget <= tokens + 100 for tokens, budget in zip(drawn, budgets, strict=True))


def test_what_makes_the_end_of_a_stream_unknown_is_refused_all_at_once(mix):
    with pytest.raises(ConfigError) as raised:
        compute_budgets(mix(None, None, test_split_size=5), None)
    assert [problem.where for problem in raised.value.problems] == [
        "test_split_size",
        "dataset_streaming",
        "dataset_streaming",
    ]
    assert all(problem.remedy for problem in raised.value.problems)


def test_a_share_may_be_held_out_of_a_stream(mix):
    assert compute_budgets(mix(1.0, test_split_size=0.1), 1000) == [1010]
    assert np.sum(compute_budgets(mix(1.0, 1.0), 1000)) == 1020
