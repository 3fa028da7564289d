"""Whether a reward model's probabilities are frequencies, and how far apart it scores answers: one chart."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipes_lib.report.charts import COLOURS, PNG_BACKGROUND, STYLE, Chart, _adopt_svg
from recipes_lib.report.reward_report import compute_wilson_interval

_NAME = "reliability"


def draw_reliability(report: Mapping[str, Any], folder: Path) -> Chart:
    """Draw the reliability of a reward model beside the histogram of its scores, and write the PNG to ``folder``.

    Of the two orders in which a pair is seen, the one with the likelier win is shown: the other mirrors it.

    Args:
        report: From ``build_reward_report``, or read again from JSON.
        folder: Where ``reliability.png`` goes; it is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({**STYLE, "svg.hashsalt": _NAME}):
        figure = Figure(figsize=(9.2, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_reliability(left, report)
        _draw_histogram(right, report["histogram"])
        figure.savefig(folder / f"{_NAME}.png", dpi=160, facecolor=PNG_BACKGROUND)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    alt = (
        f"Calibration error {report['ece']:.3f}, of which chance explains {report['ece_by_chance']:.3f}; "
        f"scores from {report['scores']['min']:.3g} to {report['scores']['max']:.3g}"
    )
    return Chart(_NAME, "Calibration and scores", alt, _adopt_svg(buffer.getvalue()), is_wide=True)


def _draw_reliability(axes: Axes, report: Mapping[str, Any]) -> None:
    shown = [row for row in report["reliability"] if row["from"] > 0.5]
    axes.plot([0.5, 1], [0.5, 1], color=COLOURS["muted"], linewidth=1.0, linestyle=(0, (3, 3)))
    intervals = [compute_wilson_interval(row["observed"] * row["num"], row["num"]) for row in shown]
    for row, interval in zip(shown, intervals, strict=True):
        axes.plot([row["predicted"]] * 2, interval, color=COLOURS["first"], linewidth=1.2, alpha=0.5)
    axes.plot(
        [row["predicted"] for row in shown],
        [row["observed"] for row in shown],
        color=COLOURS["first"],
        linewidth=2.0,
        marker="o",
        markersize=4.5,
    )
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
