"""Scaling laws: optimality conditions, and recovery of laws from synthetic runs."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from recipes_lib.errors import DataError
from recipes_lib.planning import scaling
from recipes_lib.planning.scaling import PUBLISHED, Fit, Law, Run, fit_curve, fit_isoflops, fit_law

BESIROGLU, HOFFMANN = PUBLISHED.values()


def draw_runs(law: Law, noise: float = 0.0, *, num_outliers: int = 0) -> list[Run]:
    random, runs = np.random.default_rng(0), []
    for flops, size in itertools.product(np.geomspace(6e18, 3e21, 6), np.geomspace(5e7, 1.6e10, 9)):
        tokens = flops / 6 / size
        if 0.3 < tokens / size < 3000:
            runs.append(Run(size, tokens, law.compute_loss(size, tokens) * np.exp(random.normal(0, noise))))
    return [run._replace(loss=run.loss * 1.05) if at < num_outliers else run for at, run in enumerate(runs)]


@pytest.mark.parametrize("law", PUBLISHED.values(), ids=PUBLISHED)
def test_optimum_satisfies_first_order_condition(law) -> None:
    """Equal marginal gains of parameters and tokens; published values are in ``test_known_answers.py``."""
    best = law.find_optimum(5.76e23)
    by_size = law.size_exponent * law.size_factor / best.num_parameters**law.size_exponent
    assert by_size == pytest.approx(law.token_exponent * law.token_factor / best.num_tokens**law.token_exponent)
    assert law.find_overtrained(best.loss, best.num_parameters) == pytest.approx(best.num_tokens)
    assert law.find_overtrained(best.loss, best.num_parameters / 2) > 2 * best.num_tokens
    assert law.find_overtrained(best.loss, 1e6) == float("inf")


@pytest.mark.parametrize(
    ("law", "every"), [(BESIROGLU, 1), pytest.param(HOFFMANN, 1, marks=pytest.mark.slow), (HOFFMANN, 12)]
)
def test_fit_recovers_law_of_runs(law, every, monkeypatch) -> None:
    monkeypatch.setattr(scaling, "_STARTS", scaling._STARTS[::every])
    found = fit_law(draw_runs(law), 0).law
    for name in Law.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(law, name), rel=1e-3)


def test_fit_is_robust_to_outliers_and_interval_covers_noise(monkeypatch) -> None:
    monkeypatch.setattr(scaling, "_STARTS", scaling._STARTS[::12])
    found = fit_law(draw_runs(BESIROGLU, num_outliers=4), 0).law
    assert found.size_exponent == pytest.approx(0.348, abs=0.015)
    fit = fit_law(draw_runs(BESIROGLU, 0.003), 20)
    low, high = fit.compute_interval(lambda law: law.compute_loss(70e9, 1.4e12))
    assert low < BESIROGLU.compute_loss(70e9, 1.4e12) < high
    assert high - low < 0.1


def test_exponents_are_not_negative_under_noise(monkeypatch) -> None:
    monkeypatch.setattr(scaling, "_STARTS", scaling._STARTS[::12])
    """Losses rise with size at equal tokens: the fit is flat in size."""
    sizes, tokens = np.geomspace(1e5, 4e5, 3), np.geomspace(2e5, 2e6, 4)
    runs = [Run(size, count, 3 + 40 / count**0.3 + 1e-7 * size) for size in sizes for count in tokens]
    law = fit_law(runs, 0).law
    assert min(law.size_exponent, law.token_exponent) >= 0
    assert law.compute_loss(1e7, 1e6) <= law.compute_loss(1e5, 1e6)


@pytest.mark.parametrize(
    "runs",
    [
        [Run(1e6, 10.0**power, 3.0 - power / 10) for power in range(7, 14)],
        # Equal losses, as of runs that learnt nothing.
        [Run(size, tokens, 3.0) for size in (1e6, 1e7, 1e8) for tokens in (1e7, 1e8, 1e9)],
    ],
)
def test_too_few_sizes_or_losses_raise(runs) -> None:
    with pytest.raises(DataError, match="determine no law"):
        fit_law(runs)


def test_isoflop_exponent_matches_law() -> None:
    around = [
        Run(size, flops / 6 / size, BESIROGLU.compute_loss(size, flops / 6 / size))
        for flops in (1e19, 1e20, 1e21)
        for size in BESIROGLU.find_optimum(flops).num_parameters * np.geomspace(0.5, 2, 5)
    ]
    exponent, minima = fit_isoflops(around)
    assert exponent == pytest.approx(0.3658 / (0.3478 + 0.3658), abs=0.005)
    assert minima[1].num_parameters == pytest.approx(BESIROGLU.find_optimum(1e20).num_parameters, rel=0.03)
    for few in (around[:5], [*around[:2], *around[5:7]] * 3):
        with pytest.raises(DataError, match="fewer than two budgets have three sizes"):
            fit_isoflops(few)
    beyond = [run._replace(num_parameters=9 * run.num_parameters, num_tokens=run.num_tokens / 9) for run in around]
    with pytest.raises(DataError, match="no minimum among their sizes"):
        fit_isoflops([run._replace(loss=BESIROGLU.compute_loss(*run[:2])) for run in beyond])


@pytest.mark.parametrize("name", ["parameters", "tokens"])
def test_fit_to_losses_constant_in_one_variable_does_not_overflow(name, monkeypatch) -> None:
    monkeypatch.setattr(scaling, "_STARTS", scaling._STARTS[::12])
    lengths = [(size, tokens) for size in (1e6, 1e7, 1e8) for tokens in (1e8, 1e9, 1e10)]
    runs = [Run(n, d, 2 + 100 / (d if name == "parameters" else n) ** 0.3) for n, d in lengths]
    law = fit_law(runs, 0).law
    assert all(
        law.compute_loss(run.num_parameters, run.num_tokens) == pytest.approx(run.loss, rel=1e-3) for run in runs
    )
    assert not math.isnan(law.find_optimum(1e19).num_parameters)
    assert law.find_overtrained(2.5, 1e6) >= 0


@pytest.mark.parametrize(
    ("law", "size", "tokens"),
    [
        (Law(2.0, 100.0, 0.0, 0.3, 0.3), math.inf, 0.0),
        (Law(2.0, 100.0, 100.0, 0.0, 0.3), 0.0, math.inf),
        # Exponents of 0.001 would overflow without logarithms.
        (Law(2.0, 1e9, 1.0, 0.001, 0.001), pytest.approx(math.exp(200)), pytest.approx(1e21 / 6 / math.exp(200))),
    ],
)
def test_law_without_a_term_has_optimum_at_boundary(law, size, tokens) -> None:
    found = law.find_optimum(1e21)
    assert (found.num_parameters, found.num_tokens) == (size, tokens)
    assert law.find_overtrained(2.5, 1e9) >= 0


def test_repeated_data_lose_value_as_published() -> None:
    """Muennighoff et al. 2023: figure 1 (25e9 different tokens), and nearly full value of four epochs."""
    law = Law(1.87, 521.0, 1488.0, 0.353, 0.353)
    best, worth = law.find_repeated_optimum(9.3e21, 25e9)
    assert (best.num_parameters, best.num_tokens) == pytest.approx((6.34e9, 242e9), rel=0.1)
    plain = law.find_optimum(9.3e21)
    assert (plain.num_parameters, plain.num_tokens) == pytest.approx((8.67e9, 178e9), rel=0.05)
    assert plain.loss < best.loss < law.compute_loss(plain.num_parameters, 25e9)
    assert 25e9 < worth < best.num_tokens
    enough, worth = law.find_repeated_optimum(9.3e21, 1e30)
    assert enough == pytest.approx(plain, rel=1e-3)
    assert worth == pytest.approx(enough.num_tokens)


@pytest.mark.parametrize(("epochs", "worth"), [(1, 1.0), (4, 3.73), (16, 10.6), (1000, 16.39)])
def test_worth_of_epochs(epochs, worth) -> None:
    """``1 + R* (1 - exp(-(epochs - 1) / R*))`` different epochs, by hand."""
    assert scaling._discount(epochs * 1e9, 1e9, 15.39) == pytest.approx(worth * 1e9, rel=1e-2)


@pytest.mark.parametrize(
    ("flops", "rate", "batch"), [(6 * 6.9e9 * 2e12, 4.2e-4, 2304 * 4096), (8e23, 3.2e-4, 4608 * 4096)]
)
def test_rate_and_batch_are_those_of_deepseek_llm(flops, rate, batch) -> None:
    """Bi et al. 2024, table 2: 7B and 67B on 2e12 tokens."""
    assert scaling.suggest_rate(flops) == pytest.approx(rate, rel=0.03)
    assert scaling.suggest_batch(flops) == pytest.approx(batch, rel=0.03)
    assert scaling.suggest_rate(1e12) == scaling.suggest_rate(1e17)


def test_power_law_is_that_of_the_longest_run_of_each_size() -> None:
    runs = [
        Run(size, ratio * size, (8.8e13 / size) ** 0.076 / ratio**0.1 * 80**0.1)
        for size in (1e6, 1e7, 1e8)
        for ratio in (80, 20)
    ]
    assert scaling.fit_power(runs) == pytest.approx((8.8e13, 0.076))


@pytest.mark.parametrize("metric", ["eval_loss", "loss"])
def test_expected_curve_is_that_of_runs_whose_curves_collapse(metric) -> None:
    """Reducible losses are a power of the share of the steps, times those at the end, within 1 % from run to run."""
    law = BESIROGLU
    runs = [Run(size, 20 * size, 0.0) for size in (1e7, 3e7, 1e8)]

    def draw(run: Run, factor: float) -> list[tuple[float, float]]:
        rest = law.compute_loss(*run[:2]) - law.irreducible
        return [(step / 200, law.irreducible + rest * factor * (step / 200) ** -0.3) for step in range(1, 201)]

    curves = [draw(run, factor) for run, factor in zip(runs, (0.99, 1.0, 1.01), strict=True)]
    larger = Run(1e9, 2e10, 0.0)
    found = Fit(law, [], 1e17, fit_curve(law, runs, curves, metric)).predict_curve(larger)
    assert (found.metric, found.shares[0], found.shares[-1]) == (metric, 0.05, 1.0)
    for share, loss in draw(larger, 1.0)[19::20]:
        if metric == "loss":
            loss = np.mean([value for at, value in draw(larger, 1.0) if share - 0.05 < at <= share])
        low, high = found.find_band(share)
        rest = loss - law.irreducible
        assert (low, high) == pytest.approx((law.irreducible + 0.99 * rest, law.irreducible + 1.01 * rest))
        assert np.interp(share, found.shares, found.losses) == pytest.approx(loss)
    assert found.find_band(0.04) is None


def test_expected_curve_starts_where_all_runs_have_losses_and_has_interval_of_law() -> None:
    law, wider = BESIROGLU, dataclasses.replace(BESIROGLU, irreducible=BESIROGLU.irreducible + 0.1)
    runs = [Run(1e7, 2e8, 0.0), Run(3e7, 6e8, 0.0)]
    curves = [[(start, 4.0), (1.0, law.compute_loss(*run[:2]))] for start, run in zip((0.1, 0.3), runs, strict=True)]
    found = Fit(law, [law, wider], 1e17, fit_curve(law, runs, curves, "eval_loss")).predict_curve(Run(1e8, 2e9, 0.0))
    assert found.shares[0] == 0.3
    loss = law.compute_loss(1e8, 2e9)
    assert found.find_band(1.0) == pytest.approx((loss + 0.005, loss + 0.095))
    assert Fit(law, [], 1e17).predict_curve(runs[0]) is None
