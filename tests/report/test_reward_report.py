"""Statistics of a reward model against scipy and closed forms, and the bounds of its gates."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from recipes_lib.report.reward_report import (
    HeldOutScores,
    build_reward_report,
    check_gates,
    compute_accuracy,
    compute_calibration,
    compute_ece_by_chance,
    compute_wilson_interval,
    fit_temperature,
)


def make_scores(chosen: Any, rejected: Any, **columns: Any) -> HeldOutScores:
    chosen, rejected = np.asarray(chosen, np.float64), np.asarray(rejected, np.float64)
    defaults = dict.fromkeys(("chosen_lengths", "rejected_lengths"), np.full(len(chosen), 5))
    defaults |= dict.fromkeys(("swapped_chosen", "swapped_rejected"), np.full(len(chosen), np.nan))
    defaults |= {"prompts": range(len(chosen)), "probes": {}}
    return HeldOutScores(chosen=chosen, rejected=rejected, **(defaults | columns))


def sample_margins(num: int, *, sharpness: float = 1.0, seed: int = 0) -> np.ndarray:
    """Sample margins whose pairs are won with probability ``sigmoid(sharpness * margin)``."""
    random = np.random.default_rng(seed)
    margins = random.normal(0, 2, num)
    wins = random.random(num) < 1 / (1 + np.exp(-sharpness * margins))
    return np.where(wins, margins, -margins)


@pytest.mark.parametrize(("num_won", "num"), [(0, 10), (10, 10), (7, 10), (52, 100), (999, 1000)])
def test_wilson_interval_matches_scipy(num_won: int, num: int) -> None:
    expected = stats.binomtest(num_won, num).proportion_ci(method="wilson")
    assert compute_wilson_interval(num_won, num) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_accuracy_counts_tie_as_half() -> None:
    accuracy = compute_accuracy(np.array([1.0, 0.0, -1.0, 0.0, 2.0]), np.arange(5))
    assert accuracy["accuracy"] == 3 / 5
    expected = compute_wilson_interval(3, 5)
    assert (accuracy["accuracy_low"], accuracy["accuracy_high"]) == pytest.approx(expected)
    report = build_reward_report(make_scores([1, 2, 3], [1, 1, 4]))
    assert (report["num_pairs"], report["accuracy"]) == (3, 0.5)


@pytest.mark.parametrize("results", [[1.0, -1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
def test_pairs_that_repeat_a_prompt_do_not_narrow_the_interval(results: list[float]) -> None:
    single = build_reward_report(make_scores(results, [0.0] * 4))
    chosen, prompts = np.repeat(results, 9), [f"prompt {at}" for at in range(4) for _ in range(9)]
    repeated = build_reward_report(make_scores(chosen, np.zeros(36), prompts=prompts))
    names = ("accuracy", "accuracy_low", "accuracy_high")
    assert [repeated[name] for name in names] == pytest.approx([single[name] for name in names])
    # Each prompt with one pair that is won and one that is lost: not wider than that of independent pairs.
    mixed = build_reward_report(make_scores([1, -1] * 4, [0] * 8, prompts=np.repeat(range(4), 2).tolist()))
    assert (mixed["accuracy_low"], mixed["accuracy_high"]) == pytest.approx(compute_wilson_interval(4, 8))


@pytest.mark.parametrize("num_prompts", [1, 2, 5, 20])
@pytest.mark.parametrize("shape", [(1.4, 0.6), (14, 6)])
def test_interval_of_few_prompts_with_many_pairs_covers_the_expected_accuracy(
    num_prompts: int, shape: tuple[float, float]
) -> None:
    random, prompts, covered = np.random.default_rng(0), np.repeat(np.arange(num_prompts), 20), 0
    for _ in range(500):
        shares = random.beta(*shape, num_prompts)
        found = compute_accuracy(np.where(random.random(len(prompts)) < shares[prompts], 1.0, -1.0), prompts)
        covered += found["accuracy_low"] <= 0.7 <= found["accuracy_high"]
    # 95 %, less twice the standard error of 500 draws; the former interval covers 63 to 93 %.
    assert covered / 500 > 0.93


def test_nll_and_brier_score_match_closed_form() -> None:
    report = build_reward_report(make_scores([0, 1, -2], [0, 0, 0]))
    probabilities = [0.5, 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2))]
    assert report["nll"] == pytest.approx(-sum(map(math.log, probabilities)) / 3)
    assert report["brier"] == pytest.approx(sum((1 - p) ** 2 for p in probabilities) / 3)
    report = build_reward_report(make_scores([-1000, 1000], [0, 0]))
    assert (report["nll"], report["brier"]) == (500, 0.5)


def test_ece_of_equal_margins_is_distance_to_win_rate() -> None:
    # Predicted 0.85 and 0.15; 7 of 10 are won.
    margins = math.log(0.85 / 0.15) * np.array([1.0] * 7 + [-1.0] * 3)
    table, error = compute_calibration(margins)
    assert error == pytest.approx(0.15)
    assert [row["num"] for row in table] == [10, 10]
    assert [row["predicted"] for row in table] == pytest.approx([0.15, 0.85])
    assert [row["observed"] for row in table] == pytest.approx([0.3, 0.7])
    assert [(row["from"], row["to"]) for row in table] == [(2 / 15, 3 / 15), (12 / 15, 13 / 15)]
    # Weighted by the sizes of the bins: 30 pairs of 0.95 that are all won are off by 0.05.
    more = np.concatenate([margins, np.full(30, math.log(0.95 / 0.05))])
    assert compute_calibration(more)[1] == pytest.approx((10 * 0.15 + 30 * 0.05) / 40)


def test_calibration_bins_include_extreme_and_zero_margins() -> None:
    table, error = compute_calibration(np.array([1e4, 0.0]))
    assert [(row["from"], row["num"]) for row in table] == [(0, 1), (7 / 15, 2), (14 / 15, 1)]
    assert error == pytest.approx(0)
    assert compute_ece_by_chance(np.zeros(50)) == 0, "the middle bin is its own mirror image"


def test_ece_by_chance_matches_simulation() -> None:
    samples = [sample_margins(300, seed=seed) for seed in range(200)]
    errors = [compute_calibration(margins)[1] for margins in samples]
    predicted = [compute_ece_by_chance(margins) for margins in samples]
    assert np.mean(predicted) == pytest.approx(np.mean(errors), rel=0.08)
    assert np.mean(errors) > 0.02


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
def test_fitted_temperature_recovers_scale_factor(factor: float) -> None:
    margins = sample_margins(40_000) * factor
    temperature = fit_temperature(margins)
    assert temperature == pytest.approx(factor, rel=0.05)
    likelihoods = [np.logaddexp(0, -margins / (temperature * step)).mean() for step in (0.99, 1, 1.01)]
    assert min(likelihoods) == likelihoods[1]


def test_fitted_temperature_matches_closed_form() -> None:
    # 80 of 100 pairs are won by 1: the best margin is ln 4, so scores are divided by 1 / ln 4.
    assert fit_temperature(np.repeat([1.0, -1.0], [80, 20])) == pytest.approx(1 / math.log(4))


@pytest.mark.parametrize("margins", [[1.0, 2.0], [0.0, 1.0], [0.0, 0.0], [-1.0, 1.0], [-1.0, 0.5]])
def test_temperature_is_none_without_optimum(margins: list[float]) -> None:
    assert fit_temperature(np.array(margins)) is None


def test_length_statistics_match_scipy() -> None:
    random = np.random.default_rng(1)
    prompts = ["a", "b", "a", "c", "b", "a"]
    level = {"a": 10.0, "b": -10.0, "c": 0.0}
    chosen_lengths, rejected_lengths = random.integers(5, 60, (2, 6))
    chosen, rejected = (
        np.array([level[prompt] for prompt in prompts]) + 0.1 * lengths + random.normal(0, 0.5, 6)
        for lengths in (chosen_lengths, rejected_lengths)
    )
    lengths = {"chosen_lengths": chosen_lengths, "rejected_lengths": rejected_lengths}
    found = build_reward_report(make_scores(chosen, rejected, **lengths, prompts=prompts))["length"]

    scores, sizes = np.concatenate([chosen, rejected]), np.concatenate([chosen_lengths, rejected_lengths])
    assert found["pearson"] == pytest.approx(stats.pearsonr(scores, sizes).statistic)
    assert found["spearman"] == pytest.approx(stats.spearmanr(scores, sizes).statistic)
    rows = np.array(prompts * 2)
    inner = [
        values - np.array([values[rows == row].mean() for row in rows]) for values in (scores, sizes.astype(float))
    ]
    assert found["pearson_within_prompts"] == pytest.approx(stats.pearsonr(*inner).statistic)
    assert found["spearman_within_prompts"] == pytest.approx(stats.spearmanr(*np.round(inner, 6)).statistic)
    assert found["pearson_within_prompts"] > 0.9 > found["pearson"]
    line = stats.linregress(chosen_lengths - rejected_lengths, chosen - rejected)
    assert found["slope"] == pytest.approx(line.slope)


def test_longer_answer_win_rate() -> None:
    lengths = {"chosen_lengths": np.array([9, 9, 9, 2, 5, 1]), "rejected_lengths": np.array([1, 2, 3, 4, 5, 9])}
    found = build_reward_report(make_scores([1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 1], **lengths))["length"]
    assert found["share_chosen_longer"] == 3 / 6
    assert found["longer_wins_accuracy"] == pytest.approx(3.5 / 6)
    assert found["accuracy_where_chosen_is_shorter"] == compute_accuracy(np.array([1.0, -1.0]), np.arange(2))


def test_length_statistics_are_none_for_equal_lengths() -> None:
    found = build_reward_report(make_scores([1, 2], [0, 3]))["length"]
    names = ["slope", "pearson", "spearman", "pearson_within_prompts", "accuracy_where_chosen_is_shorter"]
    assert [found[name] for name in names] == [None] * 5
    assert found["longer_wins_accuracy"] == 0.5


def test_accuracy_by_length_difference() -> None:
    scores = make_scores(
        [1, 1, 0, 1, 0],
        [0, 0, 1, 0, 1],
        chosen_lengths=np.array([5, 6, 14, 5, 1000]),
        rejected_lengths=np.array([5, 5, 5, 13, 5]),
    )
    report = build_reward_report(scores)
    groups = [(group["from"], group["to"], group["num_pairs"]) for group in report["by_length_difference"]]
    assert groups == [(0, 1, 1), (1, 9, 2), (9, 33, 1), (513, None, 1)]
    assert [group["accuracy"] for group in report["by_length_difference"]] == [1, 1, 0, 0]


def test_score_statistics_and_histogram() -> None:
    report = build_reward_report(make_scores([4, 2], [0, -2]))
    assert report["scores"] == {"mean": 1, "std": pytest.approx(math.sqrt(5)), "min": -2, "max": 4}
    histogram = report["histogram"]
    assert (histogram["edges"][0], histogram["edges"][-1], len(histogram["edges"])) == (-2, 4, 31)
    assert (sum(histogram["chosen"]), sum(histogram["rejected"])) == (2, 2)
    assert (histogram["chosen"][-1], histogram["rejected"][0]) == (1, 1)


def test_probe_and_swap_counts_exclude_nan() -> None:
    nan = math.nan
    scores = make_scores(
        [1, 2, 3, 4],
        [0, 0, 0, 0],
        swapped_chosen=np.array([1, 0, nan, 2]),
        swapped_rejected=np.array([0, 1, nan, 2]),
        probes={"eos_dropped": np.array([0.5, 2, 4, nan]), "truncated": np.full(4, nan)},
    )
    report = build_reward_report(scores)
    assert report["prompt_swap"] == {"num_pairs": 3, **compute_accuracy(np.array([1.0, -1.0, 0.0]), np.arange(3))}
    dropped = {"num_answers": 3, "share_lower": pytest.approx(1 / 3), "mean_change": pytest.approx(0.5 / 3)}
    assert report["probes"] == {"eos_dropped": dropped, "truncated": None}


def test_reward_report_is_json_serialisable() -> None:
    scores = make_scores(
        np.float32([1, 2]),
        np.float32([0, 3]),
        chosen_lengths=np.array([3, 900], np.int32),
        prompts=[b"x", b"y"],
        swapped_chosen=np.float32([1, 2]),
        swapped_rejected=np.float32([1, 2]),
        probes={"eos_dropped": np.float32([0, 0])},
    )
    report = build_reward_report(scores)
    assert json.loads(json.dumps(report, allow_nan=False)) == report


@pytest.mark.parametrize("scores", [[math.nan, 1], [math.inf, 1]])
def test_non_finite_scores_are_refused(scores: list[float]) -> None:
    for chosen, rejected in ((scores, [0, 0]), ([0, 0], scores)):
        with pytest.raises(ValueError, match="a score is NaN or infinite"):
            make_scores(chosen, rejected)


PASSING: dict[str, Any] = {
    "accuracy": 0.75,
    "accuracy_low": 0.71,
    "ece": 0.04,
    "ece_by_chance": 0.01,
    "temperature": 1.2,
    "length": {"longer_wins_accuracy": 0.6},
    "prompt_swap": {"accuracy": 0.55},
    "probes": {"eos_dropped": {"share_lower": 0.9}},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"accuracy_low": 0.5, "length": {"longer_wins_accuracy": 0.4}},
            ["lower bound of its interval, 0.500", "must be above 0.5:"],
        ),
        ({"length": {"longer_wins_accuracy": 0.71}}, ["accuracy, 0.710, must be above", "longer answer, 0.710"]),
        ({"prompt_swap": {"accuracy": 0.6}}, ["swapped prompts is 0.600", "must be below 0.6:"]),
        ({"prompt_swap": None}, ["was not measured"]),
        (
            {"ece": 0.05},
            ["calibration error is 0.050", "0.010 expected by chance", "must be below 0.05:", "fewer steps"],
        ),
        ({"ece": 0.05, "temperature": 0.8}, ["must be below 0.05: train for more steps or lower label_smoothing"]),
        ({"probes": {"eos_dropped": {"share_lower": 0.8}}}, ["end token is 0.800", "must be above 0.8:"]),
        ({"probes": {"eos_dropped": None}}, ["end token is not measured"]),
        ({"probes": {}}, ["end token is not measured"]),
    ],
)
def test_gate_fails_at_its_bound(changes: dict[str, Any], words: list[str]) -> None:
    assert not list(check_gates(PASSING))
    (message,) = check_gates(PASSING | changes)
    assert all(word in message for word in words)
    assert ": " in message


def test_gates_fail_for_nan() -> None:
    nan = math.nan
    broken = {"accuracy_low": nan, "ece": nan, "prompt_swap": {"accuracy": nan}}
    assert len([*check_gates(PASSING | broken | {"probes": {"eos_dropped": {"share_lower": nan}}})]) == 5


def test_length_biased_reward_model_fails_gates() -> None:
    random = np.random.default_rng(0)
    margins = sample_margins(4000)
    longer = random.integers(1, 50, 4000)
    lengths = {"chosen_lengths": longer, "rejected_lengths": random.permutation(longer)}
    half = np.zeros(4000)
    chance = {"swapped_chosen": random.normal(size=4000), "swapped_rejected": half}
    sound = make_scores(margins, half, **lengths, **chance, probes={"eos_dropped": margins - 1})
    assert not list(check_gates(build_reward_report(sound)))

    difference = lengths["chosen_lengths"] - lengths["rejected_lengths"]
    hacked = make_scores(difference, half, **lengths, swapped_chosen=difference, swapped_rejected=half)
    failed = list(check_gates(build_reward_report(hacked)))
    assert any("preferring the longer answer" in message for message in failed)
    assert len(failed) == 4
