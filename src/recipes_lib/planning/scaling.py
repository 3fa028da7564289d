"""Scaling laws of loss in parameters and tokens, fitted or published: compute-optimal sizes, with intervals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from scipy.optimize import minimize, minimize_scalar
from scipy.special import huber

from recipes_lib.errors import DataError, Problem
from recipes_lib.planning.compute import FLOPS_PER_TOKEN, compute_training_flops

MAX_EXTRAPOLATION: Final = 10.0
"""Largest extrapolation of a law without an interval, in FLOPs of the largest run."""
_INTERVAL: Final = (5.0, 95.0)
_DELTA: Final = 1e-3
_LEAST_FLOPS: Final = 1e17
"""Smallest compute budget that the laws of learning rate and batch were fitted to."""
FEWEST: Final = 3
"""Number of model sizes, and of numbers of tokens, that a law needs."""
_MIN_RUNS: Final = 6
_BOUNDS: Final = (*((None, None),) * 3, *((0, None),) * 2)
"""Bounds of the fit: no negative exponents, with which noise of few runs would reverse an extrapolation."""
_STARTS: Final = tuple(itertools.product((0, 10, 20), (0, 10, 20), (-0.5, 0.5), (0.3, 0.8), (0.3, 0.8)))

_DATA_DECAY: Final = 15.39
"""``R*_D``: repetitions after which a token has lost most of its value. Source: Muennighoff et al. 2023, section 6."""
_SIZE_DECAY: Final = 5.31
"""``R*_N``: the same for parameters beyond the optimum of the different tokens."""
_NUM_SHARES: Final = 20
"""Number of shares of a run's steps at which the loss curves of runs are compared."""

Array = np.ndarray[Any, np.dtype[np.float64]]


class Optimum(NamedTuple):
    """Compute-optimal allocation of a FLOP budget.

    Attributes:
        num_parameters: Parameters ``N``.
        num_tokens: Training tokens ``D``.
        loss: Expected loss in nats per token.
    """

    num_parameters: float
    num_tokens: float
    loss: float


@dataclass(frozen=True, slots=True)
class Law:
    """Scaling law ``L = E + A / N^alpha + B / D^beta``, in nats per token.

    Attributes:
        irreducible: Irreducible loss ``E``.
        size_factor: Factor ``A`` of the term in parameters.
        token_factor: Factor ``B`` of the term in tokens.
        size_exponent: Exponent ``alpha`` of the parameters.
        token_exponent: Exponent ``beta`` of the tokens.
    """

    irreducible: float
    size_factor: float
    token_factor: float
    size_exponent: float
    token_exponent: float

    def compute_loss(self, num_parameters: float, num_tokens: float) -> float:
        """Return the expected loss in nats per token."""
        by_size = _compute_term(self.size_factor, num_parameters, self.size_exponent)
        return self.irreducible + by_size + _compute_term(self.token_factor, num_tokens, self.token_exponent)

    def find_optimum(self, num_flops: float) -> Optimum:
        """Return the parameters and tokens with the lowest loss for a FLOP budget.

        Of a law without one of its terms, as a fit to resampled runs may be, one is infinite and the other 0.

        Source: Hoffmann et al. 2022, equation 4.
        """
        alpha, beta = self.size_exponent, self.token_exponent
        by_size, by_tokens = alpha * self.size_factor, beta * self.token_factor
        if min(by_size, by_tokens) <= 0:
            return Optimum(math.inf, 0.0, math.nan) if by_size > by_tokens else Optimum(0.0, math.inf, math.nan)
        # In logarithms, because powers of exponents near 0 overflow; e^200 is beyond any size.
        log_size = (math.log(by_size / by_tokens) + beta * math.log(num_flops / FLOPS_PER_TOKEN)) / (alpha + beta)
        num_parameters = math.exp(min(max(log_size, -200.0), 200.0))
        num_tokens = num_flops / FLOPS_PER_TOKEN / num_parameters
        return Optimum(num_parameters, num_tokens, self.compute_loss(num_parameters, num_tokens))

    def find_overtrained(self, loss: float, num_parameters: float) -> float:
        """Return the tokens with which a smaller model reaches a loss; infinite if it never does.

        Source: Sardana et al. 2023, equation 2, solved for the tokens.
        """
        rest = loss - self.irreducible - _compute_term(self.size_factor, num_parameters, self.size_exponent)
        if rest <= 0 or self.token_exponent <= 0:
            return math.inf
        log_tokens = math.log(max(self.token_factor / rest, 1e-300)) / self.token_exponent
        return math.exp(log_tokens) if log_tokens < 700 else math.inf

    def find_repeated_optimum(self, num_flops: float, num_unique: float) -> tuple[Optimum, float]:
        """Return the optimum if data are repeated, and how many tokens of new data are worth as much as its tokens.

        The law needs both of its terms.

        Args:
            num_flops: Training FLOPs.
            num_unique: Number of different tokens.

        Source: Muennighoff et al. 2023, equations 5 to 8. Their decay, fitted to repeated C4, is used for every law.
        """
        alpha, beta = self.size_exponent, self.token_exponent
        # Optimal parameters for the different tokens: equal marginal gains, as in `find_optimum`.
        log_suited = (
            math.log(alpha * self.size_factor / (beta * self.token_factor)) + beta * math.log(num_unique)
        ) / alpha
        suited = math.exp(min(max(log_suited, -200.0), 200.0))

        def weigh(log_size: float) -> tuple[float, float]:
            size = math.exp(log_size)
            tokens = num_flops / FLOPS_PER_TOKEN / size
            return _discount(size, suited, _SIZE_DECAY), _discount(tokens, num_unique, _DATA_DECAY)

        middle = math.log(self.find_optimum(num_flops).num_parameters)
        bounds = middle - 10, middle + 10
        best = minimize_scalar(lambda log_size: self.compute_loss(*weigh(log_size)), bounds=bounds, method="bounded")
        size = math.exp(best.x)
        return Optimum(size, num_flops / FLOPS_PER_TOKEN / size, float(best.fun)), weigh(best.x)[1]


def _discount(number: float, num_different: float, decay: float) -> float:
    """Return the worth of ``number`` tokens or parameters, of which ``num_different`` have their full value."""
    repeats = max(number / num_different - 1, 0.0)
    return min(number, num_different) + num_different * decay * -math.expm1(-repeats / decay)


def _compute_term(factor: float, number: float, exponent: float) -> float:
    """Return ``factor / number ** exponent``; fits to few runs have exponents whose powers overflow."""
    return math.exp(min(math.log(factor) - exponent * math.log(number), 700.0)) if factor > 0 else 0.0


PUBLISHED: Final[Mapping[str, Law]] = {
    "Besiroglu et al. 2024": Law(1.8172, 482.01, 2085.43, 0.3478, 0.3658),
    "Hoffmann et al. 2022, as printed": Law(1.69, 406.4, 410.7, 0.34, 0.28),
}
"""Laws fitted to Chinchilla's runs; the first corrects the second, and agrees with 20 tokens per parameter."""


class Run(NamedTuple):
    """A run with a completed learning-rate decay.

    Attributes:
        num_parameters: Parameters, with or without embeddings alike in all runs of a fit.
        num_tokens: Training tokens.
        loss: Held-out loss in nats per token.
    """

    num_parameters: float
    num_tokens: float
    loss: float

    @property
    def num_flops(self) -> float:
        """Training FLOPs, ``6 N D``."""
        return compute_training_flops(self.num_parameters, self.num_tokens)


@dataclass(frozen=True, slots=True)
class ExpectedCurve:
    """Expected loss of a run over its steps, in nats per token, with a band.

    Attributes:
        metric: ``eval_loss``, or ``loss``, compared by ``average_recent``.
        shares: Shares of the steps, ascending; the last is 1.
        losses: Expected loss at each share.
        low: Lower end of the band.
        high: Upper end of the band.
    """

    metric: str
    shares: Sequence[float]
    losses: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]

    def find_band(self, share: float) -> tuple[float, float] | None:
        """Return the ends of the band at a share of the steps; ``None`` before the first known share."""
        if share < self.shares[0]:
            return None
        return float(np.interp(share, self.shares, self.low)), float(np.interp(share, self.shares, self.high))


@dataclass(frozen=True, slots=True)
class Fit:
    """A law fitted to the user's runs.

    Attributes:
        law: Best fit to all runs.
        resampled: Fits to resampled runs, whose spread gives intervals; empty for published laws.
        max_flops: Training FLOPs of the largest run.
        curve: Course of the loss, from ``fit_curve``; ``None`` for published laws.
    """

    law: Law
    resampled: Sequence[Law]
    max_flops: float
    curve: Mapping[str, Any] | None = None

    def compute_interval(self, read: Any) -> tuple[float, float] | None:
        """Return the 5th and 95th percentile of ``read`` over resampled laws; ``None`` without them."""
        if not self.resampled:
            return None
        low, high = np.percentile([read(law) for law in self.resampled], _INTERVAL)
        return float(low), float(high)

    def predict_curve(self, run: Run) -> ExpectedCurve | None:
        """Return the expected curve of a run; its band has the interval of the last loss and the spread of the runs."""
        loss, rest = self.law.compute_loss(*run[:2]), self.law.irreducible
        if self.curve is None:
            return None
        low, high = self.compute_interval(lambda law: law.compute_loss(*run[:2])) or (loss, loss)
        ends = {"losses": (loss, "mean"), "low": (low, "smallest"), "high": (high, "largest")}
        lines = {name: [rest + (end - rest) * at for at in self.curve[of]] for name, (end, of) in ends.items()}
        return ExpectedCurve(self.curve["metric"], self.curve["shares"], **lines)


def fit_law(runs: Sequence[Run], num_resamples: int = 200) -> Fit:
    """Fit a law to runs: Huber loss of log losses, summed, by L-BFGS-B from a grid of starts.

    Args:
        runs: Runs of at least six pairs of size and tokens, of three sizes and three numbers of tokens or more.
        num_resamples: Number of bootstrap fits, each initialised with the best fit to all runs.

    Raises:
        DataError: There are too few runs, sizes, numbers of tokens or losses.

    Source: Hoffmann et al. 2022, section D.2. Besiroglu et al. 2024: the objective is summed, not averaged, and solved
    to the end, or it stops early; ``tests/planning/test_scaling.py``.
    """
    # Repeated runs and other seeds reduce noise, but determine nothing.
    pairs, *counts = (len(set(values)) for values in ((run[:2] for run in runs), *zip(*runs, strict=True)))
    if pairs < _MIN_RUNS or min(counts) < FEWEST:
        found = f"{pairs} different runs of {counts[0]} sizes, {counts[1]} numbers of tokens and {counts[2]} losses"
        remedy = f"train {_MIN_RUNS} or more, of three sizes and three lengths at least"
        raise DataError(Problem("runs", f"{found} determine no law", remedy))
    logs = np.log(np.array(runs, dtype=np.float64))
    best = min((_solve(logs, np.array(start, dtype=np.float64)) for start in _STARTS), key=lambda found: found[1])[0]
    random = np.random.default_rng(0)
    draws = (logs[random.integers(len(logs), size=len(logs))] for _ in range(num_resamples))
    resampled = [_build_law(_solve(draw, best)[0]) for draw in draws]
    return Fit(_build_law(best), resampled, max(run.num_flops for run in runs))


def _solve(logs: Array, start: Array) -> tuple[Array, float]:
    options = {"maxiter": 2000, "ftol": 1e-15, "gtol": 1e-10}
    found = minimize(_compute_objective, start, (logs,), "L-BFGS-B", True, bounds=_BOUNDS, options=options)
    return found.x, float(found.fun)


def _compute_objective(values: Array, logs: Array) -> tuple[float, Array]:
    """Return the sum of Huber losses and its gradient with respect to ``log A, log B, log E, alpha, beta``."""
    log_size, log_token, log_rest, alpha, beta = values
    size, token, loss = logs.T
    terms = np.stack([log_size - alpha * size, log_token - beta * token, np.full_like(size, log_rest)])
    total = np.logaddexp.reduce(terms, axis=0)
    error = total - loss
    parts = np.clip(error, -_DELTA, _DELTA) * np.exp(terms - total)
    return float(huber(_DELTA, error).sum()), np.array(
        [*parts.sum(axis=1), -(parts[0] * size).sum(), -(parts[1] * token).sum()]
    )


def _build_law(values: Array) -> Law:
    log_size, log_token, log_rest, alpha, beta = map(float, values)
    rest, size, token = (math.exp(min(value, 700.0)) for value in (log_rest, log_size, log_token))
    return Law(rest, size, token, alpha, beta)


def fit_isoflops(runs: Sequence[Run]) -> tuple[float, list[Optimum]]:
    """Fit a parabola in log N to the losses of each FLOP budget, and a power law to their minima.

    Args:
        runs: Runs of at least two budgets, three sizes of each; budgets within 10 % count as one.

    Returns:
        The exponent ``a`` of ``N ~ C^a``, and the minimum of each budget.

    Raises:
        DataError: There are too few budgets of three sizes, or the sizes of a budget do not enclose a minimum.

    Source: Hoffmann et al. 2022, section 3.2.
    """
    budgets: list[list[Run]] = []
    for run in sorted(runs, key=lambda run: run.num_flops):
        if budgets and run.num_flops <= 1.1 * budgets[-1][0].num_flops:
            budgets[-1].append(run)
        else:
            budgets.append([run])
    minima = []
    # Three sizes: repeated runs with other seeds determine no parabola.
    for alike in (alike for alike in budgets if len({run.num_parameters for run in alike}) >= FEWEST):
        sizes, flops = np.log([run.num_parameters for run in alike]), alike[0].num_flops
        curve, slope, start = np.polyfit(sizes, [run.loss for run in alike], 2)
        lowest = -slope / (2 * curve) if curve > 0 else math.inf
        if not min(sizes) <= lowest <= max(sizes):
            found = f"the losses at {flops:.3g} operations have no minimum among their sizes"
            raise DataError(Problem("runs", found, "train smaller and larger models there"))
        size = math.exp(lowest)
        minima.append(Optimum(size, flops / FLOPS_PER_TOKEN / size, float(start - slope**2 / (4 * curve))))
    if len(minima) < 2:
        raise DataError(Problem("runs", "fewer than two budgets have three sizes", "train three sizes at two budgets"))
    at = [math.log(compute_training_flops(one.num_parameters, one.num_tokens)) for one in minima]
    return float(np.polyfit(at, np.log([one.num_parameters for one in minima]), 1)[0]), minima


def average_recent(losses: Iterable[tuple[float, float]], share: float) -> float:
    """Return the mean of the losses of the last 5 % of the run before ``share``; NaN without any.

    Args:
        losses: Share of the steps and training loss, descending by share; read to the first earlier one.
        share: Share of the steps.
    """
    recent = [
        loss
        for at, loss in itertools.takewhile(lambda point: point[0] > share - 1 / _NUM_SHARES, losses)
        if at <= share
    ]
    return float(np.mean(recent)) if recent else math.nan


def fit_curve(
    law: Law, runs: Sequence[Run], curves: Sequence[Sequence[tuple[float, float]]], metric: str
) -> dict[str, Any]:
    """Fit the course of the loss: the reducible loss at shares of the steps, relative to that of the law at the end.

    Args:
        law: Law fitted to ``runs``, whose last losses are spread around 1.
        runs: Runs with the same schedule.
        curves: Share of the steps and loss of each run, ascending by share.
        metric: ``eval_loss``, interpolated, or ``loss``, averaged by ``average_recent``.

    Returns:
        ``metric``, ``shares``, and over the runs ``smallest``, ``mean`` and ``largest`` of each share.

    Source: Qiu et al. 2025, "Scaling Collapse": curves of compute-optimal runs of all sizes coincide in these units.
    """
    shares = np.arange(1, _NUM_SHARES + 1) / _NUM_SHARES
    rows = []
    for run, curve in zip(runs, curves, strict=True):
        if metric == "loss":
            losses = np.array([average_recent(reversed(curve), share) for share in shares])
        else:
            at, values = zip(*curve, strict=True)
            losses = np.interp(shares, at, values, left=math.nan)
        rows.append((losses - law.irreducible) / (law.compute_loss(*run[:2]) - law.irreducible))
    known = np.isfinite(rows).all(axis=0)
    table = np.array(rows)[:, known]
    spread = {"smallest": table.min(axis=0), "mean": table.mean(axis=0), "largest": table.max(axis=0)}
    return {"metric": metric, "shares": shares[known].tolist()} | {name: row.tolist() for name, row in spread.items()}


def fit_power(runs: Sequence[Run]) -> tuple[float, float]:
    """Return ``(N_c, alpha)`` of ``L = (N_c / N)^alpha``, fitted to the longest run of each size.

    Such a law holds as long as the tokens do not limit the loss.

    Source: Kaplan et al. 2020, equation 1.1, whose parameters are without embeddings.
    """
    longest = {run.num_parameters: run.loss for run in sorted(runs, key=lambda run: run.num_tokens)}
    slope, start = np.polyfit(np.log([*longest]), np.log([*longest.values()]), 1)
    return math.exp(min(-start / slope, 700.0)), -float(slope)


def suggest_rate(num_flops: float) -> float:
    """Return the best learning rate of AdamW, ``0.3118 C^-0.125``, with ``C`` at least ``_LEAST_FLOPS``.

    Extrapolated to 1e12 FLOPs, the law would give twice the best rate (``benchmarks/scaling_study.py``).

    Source: Bi et al. 2024 (DeepSeek LLM), equation 1.
    """
    return 0.3118 * math.pow(max(num_flops, _LEAST_FLOPS), -0.125)


def suggest_batch(num_flops: float) -> float:
    """Return the best batch in tokens, ``0.2920 C^0.3271``. Source: Bi et al. 2024 (DeepSeek LLM), equation 1."""
    return 0.2920 * math.pow(num_flops, 0.3271)
