"""Evaluation of a reward model: accuracy, calibration, length bias, probes, gates for use in RL, and its chart."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipes_lib.config.tokenization import count_before_end, find_end_tokens
from recipes_lib.errors import DataError
from recipes_lib.files import read_record, replace_record
from recipes_lib.report.charts import COLOURS, STYLE, Chart, render, save_figure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from recipes_lib.models.heads.scoring import RewardModel

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]

NUM_BINS: Final = 15
"""Equal-width bins of the probability that an answer is the chosen one."""
NUM_HISTOGRAM_BINS: Final = 30
LENGTH_BIN_EDGES: Final = (0, 1, 9, 33, 129, 513, math.inf)
"""Difference in length of two answers, in tokens; a bin includes its lower edge."""
_Z: Final = 1.959964
"""Standard normal quantile of a two-sided 95 % interval."""

EOS_DROPPED: Final = "eos_dropped"

MIN_ACCURACY: Final = 0.5
MAX_SWAPPED_ACCURACY: Final = 0.6
MAX_ECE: Final = 0.05
MIN_EOS_SHARE: Final = 0.8

_NAME = "reliability"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScores:
    """Raw scores of P held-out pairs: not normalised, because calibration is defined on the head's output.

    Attributes:
        chosen: Scores of the chosen answers, ``(P,)``.
        rejected: Scores of the rejected answers, ``(P,)``.
        chosen_lengths: Lengths of the chosen answers in tokens, ``(P,)``.
        rejected_lengths: Lengths of the rejected answers in tokens, ``(P,)``.
        prompts: Identifiers of the pairs' prompts, equal for equal prompts.
        swapped_chosen: Scores of the chosen answers after another pair's prompt, ``(P,)``; NaN if there is none, or it
            does not fit.
        swapped_rejected: Scores of the rejected answers after the same other prompt, ``(P,)``; NaN likewise.
        probes: Alteration -> scores of the chosen answers with it, each ``(P,)``; NaN if they do not fit.

    Raises:
        ValueError: A score of an unaltered answer is not finite.
    """

    chosen: Floats
    rejected: Floats
    chosen_lengths: Ints
    rejected_lengths: Ints
    prompts: Sequence[Hashable]
    swapped_chosen: Floats
    swapped_rejected: Floats
    probes: Mapping[str, Floats]

    def __post_init__(self) -> None:
        if not (np.isfinite(self.chosen).all() and np.isfinite(self.rejected).all()):
            raise ValueError("a score is NaN or infinite")


def build_reward_report(scores: HeldOutScores) -> dict[str, Any]:
    """Return the metrics of a reward model as JSON values, ``None`` if undefined.

    A tie (two equal scores) counts as half a win. A probe counts only strictly lower scores.

    Source: ``tests/report/test_reward_report.py`` compares each metric with scipy, a closed form or a computed value.
    """
    margins = np.asarray(scores.chosen - scores.rejected, dtype=np.float64)
    both = np.concatenate([scores.chosen, scores.rejected])
    reliability, ece = compute_calibration(margins)
    names: dict[Hashable, int] = {}
    prompts = np.array([names.setdefault(prompt, len(names)) for prompt in scores.prompts])
    edges = np.histogram_bin_edges(both, bins=NUM_HISTOGRAM_BINS)
    counts = {name: np.histogram(getattr(scores, name), edges)[0].tolist() for name in ("chosen", "rejected")}
    return {
        "num_pairs": len(margins),
        **compute_accuracy(margins, prompts),
        "by_length_difference": _group_by_length(scores, margins, prompts),
        "nll": float(np.logaddexp(0, -margins).mean()),
        "brier": float((_sigmoid(-margins) ** 2).mean()),
        "ece": ece,
        "ece_by_chance": compute_ece_by_chance(margins),
        "reliability": reliability,
        "temperature": fit_temperature(margins),
        "scores": {name: float(getattr(both, name)()) for name in ("mean", "std", "min", "max")},
        "histogram": {"edges": edges.tolist(), **counts},
        "length": _diagnose_length(scores, margins, prompts),
        "prompt_swap": _compare_swapped(scores, prompts),
        "probes": {name: _compare_probe(scores.chosen, altered) for name, altered in scores.probes.items()},
    }


def check_gates(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the failed gates of a reward model, one sentence each: the metric, its bound, and the remedy.

    Source: the gates' bounds are those of ``docs/reward.md``.
    """
    low, longer_wins = report["accuracy_low"], report["length"]["longer_wins_accuracy"]
    eos = report["probes"].get(EOS_DROPPED)
    swapped = report["prompt_swap"]
    if not low > MIN_ACCURACY:
        yield (
            f"accuracy is {report['accuracy']:.3f}, and the lower bound of its interval, {low:.3f}, must be above "
            f"{MIN_ACCURACY}: train longer, on more pairs, or check the labels; or hold more pairs out"
        )
    if not low > longer_wins:
        yield (
            f"the lower bound of the accuracy, {low:.3f}, must be above that of preferring the longer answer, "
            f"{longer_wins:.3f}: add pairs whose chosen answer is the shorter one, or hold more pairs out"
        )
    if swapped is None:
        yield "accuracy after swapped prompts was not measured: hold out pairs with different prompts"
    elif not swapped["accuracy"] < MAX_SWAPPED_ACCURACY:
        yield (
            f"accuracy after swapped prompts is {swapped['accuracy']:.3f}, and must be below {MAX_SWAPPED_ACCURACY}: "
            "scores ignore the prompts; add pairs whose rejected answer is a good answer to another prompt"
        )
    if not report["ece"] < MAX_ECE:
        is_underconfident = report["temperature"] is None or report["temperature"] < 1
        remedy = "train for more steps or lower" if is_underconfident else "train for fewer steps or raise"
        yield (
            f"the calibration error is {report['ece']:.3f} ({report['ece_by_chance']:.3f} expected by chance), "
            f"and must be below {MAX_ECE}: {remedy} label_smoothing; or hold more pairs out"
        )
    if eos is None or not eos["share_lower"] > MIN_EOS_SHARE:
        share = "not measured" if eos is None else f"{eos['share_lower']:.3f}"
        yield (
            f"the share of answers whose score drops without their end token is {share}, and must be above "
            f"{MIN_EOS_SHARE}: train with `unfinished_share: 0.1`; pad_token must end no answer"
        )


def compute_accuracy(margins: Floats, prompts: Ints) -> dict[str, Any]:
    """Return the share of pairs whose chosen answer scores higher, with the bounds of its 95 % interval.

    Pairs of one prompt are not independent: the interval is that of P divided by the design effect, the variance of the
    share over prompts relative to that of independent pairs, from 1 to that of equal pairs of a prompt. With n prompts,
    the variance is multiplied by n / (n - 1), and Student's quantile replaces the normal one.

    Args:
        margins: Score of the chosen answer minus that of the rejected one, ``(P,)``.
        prompts: Numbers of the prompts, ``(P,)``.

    Source: Kish 1965 (design effect); Miller 2024, "Adding Error Bars to Evals", section 2.2; Korn and Graubard 1998
    (degrees of freedom). Coverage is tested in ``tests/report/test_reward_report.py``.
    """
    from scipy import stats  # Takes a third of a second to import.

    won = np.where(margins == 0, 0.5, margins > 0)
    share = float(won.mean())
    deviations = won - share
    sums, counts = np.bincount(prompts, weights=deviations), np.bincount(prompts)
    spread, num_prompts = float(deviations @ deviations), int((counts > 0).sum())
    effect = largest = float(counts @ counts) / len(won)
    if spread and num_prompts > 1:
        widening = (stats.t.ppf(0.975, num_prompts - 1) / _Z) ** 2 * num_prompts / (num_prompts - 1)
        effect = min(largest, max(1.0, widening * float(sums @ sums) / spread))
    low, high = compute_wilson_interval(share * len(won) / effect, len(won) / effect)
    return {"accuracy": share, "accuracy_low": low, "accuracy_high": high}


def compute_wilson_interval(num_won: float, num: float) -> tuple[float, float]:
    """Return the bounds of the 95 % Wilson interval of ``num_won / num``, where a tie is half a win.

    Source: Wilson 1927; ``scipy.stats.binomtest(...).proportion_ci(method="wilson")``.
    """
    share, z2 = num_won / num, _Z**2
    centre = (share + z2 / (2 * num)) / (1 + z2 / num)
    reach = _Z / (1 + z2 / num) * math.sqrt(share * (1 - share) / num + z2 / (4 * num**2))
    return max(0.0, centre - reach), min(1.0, centre + reach)


def compute_calibration(margins: Floats) -> tuple[list[dict[str, Any]], float]:
    """Return the reliability table and the expected calibration error (ECE), in units of probability.

    Each pair is used in both orders, because in one order the chosen answer always wins: prediction ``sigmoid(margin)``
    with a win, ``1 - sigmoid(margin)`` with a loss. A row of the table has the bounds ``from`` and ``to`` of a bin, the
    mean prediction and the share of wins; the ECE is their mean absolute difference, weighted by the bin sizes.

    Source: Guo et al. 2017, equation 3, over the 15 equal bins that it uses.
    """
    predicted, bins = _bin_predictions(margins)
    has_won = np.repeat([1.0, 0.0], len(margins))
    table, error = [], 0.0
    for number in np.unique(bins):
        inside = bins == number
        mean, won, num = float(predicted[inside].mean()), float(has_won[inside].mean()), int(inside.sum())
        edges = {"from": float(number) / NUM_BINS, "to": float(number + 1) / NUM_BINS}
        table.append({**edges, "num": num, "predicted": mean, "observed": won})
        error += num / len(predicted) * abs(mean - won)
    return table, error


def compute_ece_by_chance(margins: Floats) -> float:
    """Return the expected ECE of a perfectly calibrated model with these predictions, which is not 0 for finite P.

    The number of wins in a bin has variance ``sum p (1 - p)``, and the mean absolute deviation of a normal variable is
    ``sqrt(2 / pi)`` times its standard deviation. The middle bin contains both orders of its pairs, so that its share
    of wins is exactly its mean prediction.
    """
    predicted, bins = _bin_predictions(margins)
    variances = np.bincount(bins, weights=predicted * (1 - predicted), minlength=NUM_BINS)
    variances[NUM_BINS // 2] = 0
    return float(np.sqrt(2 / math.pi * variances).sum() / len(predicted))


def fit_temperature(margins: Floats) -> float | None:
    """Return the temperature of the scores that minimises their negative log-likelihood.

    Above 1, the model is overconfident. ``None`` if there is no optimum: the likelihood increases towards temperature 0
    if no pair is ranked wrongly, and towards infinity if the mean margin is at most 0.
    """
    if margins.mean() <= 0 or margins.min() >= 0:
        return None

    # The log-likelihood is concave in the inverse temperature; its derivative is positive at 0 and negative for large
    # values, because one margin is negative.
    def slope(sharpness: float) -> float:
        return float((margins * _sigmoid(-margins * sharpness)).mean())

    high = 1.0
    while slope(high) > 0:
        high *= 2
    from scipy.optimize import brentq

    return 1 / float(brentq(slope, 0.0, high, rtol=1e-14))


def compute_correlation(first: Floats, second: Floats) -> float | None:
    """Return the Pearson correlation; ``None`` if one variable is constant."""
    return float(np.corrcoef(first, second)[0, 1]) if np.ptp(first) and np.ptp(second) else None


def _sigmoid(values: Floats) -> Floats:
    # `1 / (1 + exp(-x))` would overflow for large negative x.
    return np.asarray(np.exp(-np.logaddexp(0, -values)))


def _bin_predictions(margins: Floats) -> tuple[Floats, Ints]:
    """Return the probability that an answer is the chosen one, chosen answers first, and its bin; each ``(2P,)``."""
    # `minimum` puts a probability of exactly 1 into the last bin.
    predicted = _sigmoid(np.concatenate([margins, -margins]))
    return predicted, np.minimum(predicted * NUM_BINS, NUM_BINS - 1).astype(np.int64)


def _group_by_length(scores: HeldOutScores, margins: Floats, prompts: Ints) -> list[dict[str, Any]]:
    difference = np.abs(scores.chosen_lengths - scores.rejected_lengths)
    groups = []
    for low, high in pairwise(LENGTH_BIN_EDGES):
        inside = (difference >= low) & (difference < high)
        if inside.any():
            edges = {"from": low, "to": None if math.isinf(high) else high}
            accuracy = compute_accuracy(margins[inside], prompts[inside])
            groups.append({**edges, "num_pairs": int(inside.sum()), **accuracy})
    return groups


def _diagnose_length(scores: HeldOutScores, margins: Floats, prompts: Ints) -> dict[str, Any]:
    """Return correlations of length and score over answers and within prompts, and the baseline of length.

    ``slope`` is the change of the margin per additional token of the chosen answer, by least squares.
    """
    # Takes a third of a second to import, and reports of other runs import this module too.
    from scipy.stats import rankdata

    difference = np.asarray(scores.chosen_lengths - scores.rejected_lengths, dtype=np.float64)
    short = difference < 0
    both = np.concatenate([scores.chosen, scores.rejected])
    lengths = np.concatenate([scores.chosen_lengths, scores.rejected_lengths])
    groups = np.tile(prompts, 2)
    inner_scores, inner_lengths = _subtract_means(both, groups), _subtract_means(lengths, groups)
    centred = difference - difference.mean()
    return {
        "share_chosen_longer": float((difference > 0).mean()),
        "longer_wins_accuracy": float((difference > 0).mean() + 0.5 * (difference == 0).mean()),
        "accuracy_where_chosen_is_shorter": compute_accuracy(margins[short], prompts[short]) if short.any() else None,
        "pearson": compute_correlation(both, lengths),
        "spearman": compute_correlation(rankdata(both), rankdata(lengths)),
        "pearson_within_prompts": compute_correlation(inner_scores, inner_lengths),
        "spearman_within_prompts": compute_correlation(rankdata(inner_scores), rankdata(inner_lengths)),
        "slope": float(centred @ margins) / float(centred @ centred) if centred.any() else None,
    }


def _subtract_means(values: Floats | Ints, groups: Ints) -> Floats:
    means = np.bincount(groups, weights=values) / np.bincount(groups)
    # Rounded, so that floating-point noise does not break ties in ranks.
    return np.asarray(np.round(values - means[groups], 9))


def _compare_swapped(scores: HeldOutScores, prompts: Ints) -> dict[str, Any] | None:
    margins = scores.swapped_chosen - scores.swapped_rejected
    known = ~np.isnan(margins)
    return {"num_pairs": int(known.sum()), **compute_accuracy(margins[known], prompts[known])} if known.any() else None


def _compare_probe(chosen: Floats, altered: Floats) -> dict[str, Any] | None:
    """Return the share of answers whose score drops, and the mean change; ``None`` if nothing was measured."""
    change = (altered - chosen)[~np.isnan(altered)]
    if not len(change):
        return None
    return {"num_answers": len(change), "share_lower": float((change < 0).mean()), "mean_change": float(change.mean())}


def draw_reliability(report: Mapping[str, Any], folder: Path) -> Chart:
    """Draw the reliability diagram of a reward model and the histogram of its scores; write ``reliability.png``.

    Only predictions above 0.5 are shown: those of the other order of a pair are their mirror image.

    Args:
        report: Report from ``build_reward_report``, or ``reward_report.json``.
        folder: Folder of the PNG, which is created.

    Raises:
        KeyError, TypeError, ValueError: ``report`` is not a valid report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({**STYLE, "svg.hashsalt": _NAME}):
        figures = []
        for size, rows, columns in (((9.2, 3.4), 1, 2), ((4.5, 6.4), 2, 1)):
            figures.append(figure := Figure(figsize=size, layout="constrained"))
            left, right = figure.subplots(rows, columns)
            _draw_reliability(left, report)
            _draw_histogram(right, report["histogram"])
        svg, narrow = save_figure(figures[0], folder / f"{_NAME}.png"), render(figures[1])
    alt = (
        f"Calibration error {report['ece']:.3f}, of which chance explains {report['ece_by_chance']:.3f}; "
        f"scores from {report['scores']['min']:.3g} to {report['scores']['max']:.3g}"
    )
    return Chart(_NAME, "Calibration and scores", alt, svg, narrow)


def _draw_reliability(axes: Axes, report: Mapping[str, Any]) -> None:
    shown = [row for row in report["reliability"] if row["from"] > 0.5]
    predicted, observed = ([row[name] for row in shown] for name in ("predicted", "observed"))
    axes.plot([0.5, 1], [0.5, 1], color=COLOURS["muted"], linewidth=1.0, linestyle=(0, (3, 3)))
    intervals = [compute_wilson_interval(row["observed"] * row["num"], row["num"]) for row in shown]
    for at, interval in zip(predicted, intervals, strict=True):
        axes.plot([at] * 2, interval, color=COLOURS["first"], linewidth=1.2, alpha=0.5)
    axes.plot(predicted, observed, color=COLOURS["first"], linewidth=2.0, marker="o", markersize=4.5)
    axes.set_xlim(0.49, 1.01)
    axes.set_ylim(min([0.5, *(low for low, _ in intervals)]) - 0.02, 1.02)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.set_xlabel("predicted probability that the higher score is right")
    title = "share in which it is, 95 % intervals; dashed: as predicted"
    axes.set_title(title, loc="left", fontsize=9.5, color=COLOURS["muted"])


def _draw_histogram(axes: Axes, histogram: Mapping[str, Any]) -> None:
    for name, colour in (("chosen", "first"), ("rejected", "second")):
        axes.stairs(histogram[name], histogram["edges"], color=COLOURS[colour], linewidth=1.6, label=name)
        axes.stairs(histogram[name], histogram["edges"], color=COLOURS[colour], alpha=0.12, fill=True)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.margins(x=0.02)
    axes.set_ylim(bottom=0, top=1.2 * max(*histogram["chosen"], *histogram["rejected"]))
    axes.set_xlabel("score")
    axes.set_title("answers", loc="left", fontsize=9.5, color=COLOURS["muted"])
    axes.legend(frameon=False, labelcolor=COLOURS["ink"], loc="upper right", ncols=2)


Pair = Mapping[str, Any]
"""Prepared pair: ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``, whose answers end with an end token."""

_PARTS: Final = ("prompt_ids", "chosen_ids", "rejected_ids")
_SWAPPED: Final = ("swapped_chosen", "swapped_rejected")
_SENTENCE_GAP: Final = re.compile(r"(?<=[.!?])\s+")
_WHITE_SPACE: Final = "\n\n  "

REWARD_FILE: Final = "reward_report.json"
MAX_REFERENCE_ANSWERS: Final = 1024
"""Maximum training answers that define mean and standard deviation of the scores."""
MAX_PAIRS: Final = 1000
"""Maximum held-out pairs in the report; each is scored in eight forms."""


def score_held_out(reward_model: RewardModel, pairs: Sequence[Pair]) -> HeldOutScores:
    """Return raw scores of held-out pairs and of their altered forms, eight answers per pair.

    Args:
        reward_model: Reward model that scores them.
        pairs: At least one pair.

    Raises:
        DataError: A prompt with its chosen or rejected answer is longer than the model's maximum length.
    """
    parts = [tuple(np.asarray(pair[name], np.int64) for name in _PARTS) for pair in pairs]
    chosen, rejected = ([np.concatenate([row[0], row[at]]) for row in parts] for at in (1, 2))
    scores = np.array(reward_model.compute_raw_scores([*chosen, *rejected]), np.float64)
    altered = {**_swap_prompts(parts), **_alter_chosen(parts, reward_model.tokenizer)}
    measured = {name: _score_altered(reward_model, rows) for name, rows in altered.items()}
    return HeldOutScores(
        chosen=scores[: len(parts)],
        rejected=scores[len(parts) :],
        chosen_lengths=np.array([len(row[1]) for row in parts]),
        rejected_lengths=np.array([len(row[2]) for row in parts]),
        prompts=[row[0].tobytes() for row in parts],
        **{name: measured.pop(name) for name in _SWAPPED},
        probes=measured,
    )


def choose_other_prompts(prompts: Sequence[Hashable]) -> list[int | None]:
    """Return for each row the index of another row with a different prompt; each index is used at most once.

    Rows are sorted by prompt and rotated by the count of the most frequent prompt. Only if more than half of the rows
    share a prompt, some of them keep it: these rows get ``None``.
    """
    first = {prompt: at for at, prompt in reversed([*enumerate(prompts)])}
    # Equal prompts are adjacent, in the order of their first occurrence.
    order = sorted(range(len(prompts)), key=lambda row: first[prompts[row]])
    shift = max(Counter(prompts).values())
    others = dict(zip(order, [*order[shift:], *order[:shift]], strict=True))
    return [others[row] if prompts[others[row]] != prompts[row] else None for row in range(len(prompts))]


def _swap_prompts(parts: Sequence[Sequence[Ints]]) -> dict[str, list[Ints | None]]:
    others = choose_other_prompts([row[0].tobytes() for row in parts])
    return {
        name: [
            None if other is None else np.concatenate([parts[other][0], row[answer]])
            for row, other in zip(parts, others, strict=True)
        ]
        for answer, name in enumerate(_SWAPPED, start=1)
    }


def _alter_chosen(parts: Sequence[Sequence[Ints]], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Ints | None]]:
    """Return alteration -> prompts with altered chosen answers; all but ``eos_dropped`` keep the end token."""
    altered: dict[str, list[Ints | None]] = {}
    gap = _encode(tokenizer, _WHITE_SPACE)
    end_tokens = find_end_tokens(tokenizer)
    for prompt, answer, _ in parts:
        # The end token, and what the chat template adds after it, stays at the end.
        at = count_before_end(np.asarray(answer), end_tokens)
        text, end = answer[:at], answer[at:]
        *_, sentence = _SENTENCE_GAP.split(str(tokenizer.decode(text.tolist(), skip_special_tokens=True)).strip())
        for name, changed in (
            (EOS_DROPPED, [text]),
            ("truncated", [text[: len(text) // 2], end]),
            ("sentence_repeated", [text, _encode(tokenizer, f" {sentence}"), end]),
            ("white_space_appended", [text, gap, end]),
        ):
            altered.setdefault(name, []).append(np.concatenate([prompt, *changed]))
    return altered


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Ints:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)


def _score_altered(reward_model: RewardModel, rows: Sequence[Ints | None]) -> npt.NDArray[np.float64]:
    """Return the raw score of each row; NaN for a row that is ``None`` or longer than the model's maximum length."""
    scores = np.full(len(rows), np.nan)
    given = [at for at, row in enumerate(rows) if row is not None]
    scores[given] = reward_model.compute_raw_scores([row for row in rows if row is not None], overlong="nan")
    return scores


def store_score_statistics(reward_model: RewardModel, pairs: Sequence[Pair]) -> None:
    """Store mean and standard deviation of the scores of chosen training answers in the model's configuration.

    RL normalises scores by them.

    Args:
        reward_model: Trained reward model, saved after this call. If its weights are sharded, all ranks must call.
        pairs: Training pairs; the chosen answers of the first ``MAX_REFERENCE_ANSWERS`` are scored.

    Raises:
        DivergedError: A score is not finite.
        DataError: All scores are equal: the model has learnt nothing.
    """
    # Not at module level: `recipes report` imports this module, and torch takes longer than the page.
    from recipes_lib.models.heads.scoring import compute_reward_statistics, store_reward_statistics

    chosen = [pairs[number] for number in range(min(MAX_REFERENCE_ANSWERS, len(pairs)))]
    rows = [np.concatenate([pair["prompt_ids"], pair["chosen_ids"]]).tolist() for pair in chosen]
    store_reward_statistics(reward_model.model, compute_reward_statistics(reward_model.compute_raw_scores(rows)))


def write_reward_report(
    reward_model: RewardModel, pairs: Sequence[Pair] | None, folder: Path, *, is_main: bool = True
) -> Sequence[str] | None:
    """Score held-out pairs, unchanged and altered, and write ``reward_report.json``.

    Args:
        reward_model: Reward model after ``store_score_statistics``. If its weights are sharded, all ranks must call.
        pairs: Held-out pairs; ``None`` if there are none.
        folder: The output directory.
        is_main: Whether this process writes the file.

    Returns:
        One sentence for each failed gate; ``None`` without held-out pairs.
    """
    if pairs is None:
        return None
    # All ranks score: a forward pass of sharded weights is a collective.
    held_out = [pairs[number] for number in range(min(MAX_PAIRS, len(pairs)))]
    report = build_reward_report(score_held_out(reward_model, held_out))
    failed = list(check_gates(report))
    config = reward_model.model.config
    verdict: Mapping[str, Any] = {
        "may_serve_ppo": not failed,
        "failed_gates": failed,
        "scale": {"mean": config.reward_mean, "std": config.reward_std},
        **report,
    }
    if is_main:
        replace_record(folder / REWARD_FILE, verdict)
    return failed


def read_reward_report(folder: Path) -> Mapping[str, Any]:
    """Return the contents of ``reward_report.json`` in a run's directory; empty without a valid file."""
    with suppress(DataError):
        return read_record(folder / REWARD_FILE, {"failed_gates": list})
    return {}
