"""The learning rate and the batch of a planned run over its tokens, as one PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.report.charts import COLOURS, PNG_BACKGROUND
from recipes_lib.report.charts import STYLE as STYLE

_TICK_STEPS = [1, 2, 5, 10]
_UNITS = ((1e12, "trillions"), (1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))


def draw_schedule(path: Path, tokens: Sequence[float], rates: Sequence[float], batches: Sequence[float]) -> None:
    """Draw what a run will do, and write it to ``path`` as a PNG, whatever its suffix.

    Args:
        path: File to write; its folder is made.
        tokens: Tokens trained on, ascending, one for each point.
        rates: Learning rate of the step that begins there.
        batches: Tokens of that step.

    Raises:
        ConfigError: The file cannot be written.
    """
    scale, unit = _choose_unit(tokens[-1])
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 4.6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        _draw_panel(top, [token / scale for token in tokens], rates, "first", "learning rate")
        batch_scale, batch_unit = _choose_unit(max(batches))
        steps = [batch / batch_scale for batch in batches]
        _draw_panel(bottom, [token / scale for token in tokens], steps, "second", f"tokens in a step, {batch_unit}")
        bottom.set_xlabel(f"tokens trained on, {unit}")
        bottom.xaxis.set_major_locator(MaxNLocator(10, steps=_TICK_STEPS))
        bottom.xaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, format="png", dpi=160, facecolor=PNG_BACKGROUND)
        except OSError as error:
            problem = Problem(str(path), f"cannot be written: {error.strerror}", "name another file")
            raise ConfigError(problem) from error


def _draw_panel(axes: Axes, tokens: Sequence[float], values: Sequence[float], colour: str, title: str) -> None:
    axes.plot(tokens, values, color=COLOURS[colour], linewidth=2.0, drawstyle="steps-post")
    axes.fill_between(tokens, values, step="post", color=COLOURS[colour], alpha=0.08, linewidth=0)
    axes.set_title(title, loc="left", fontsize=9.5, color=COLOURS["muted"])
    axes.set_ylim(bottom=0, top=1.08 * max(values))
    axes.set_xlim(tokens[0], tokens[-1])
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=_TICK_STEPS))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")


def _choose_unit(largest: float) -> tuple[float, str]:
    """Return the largest unit that is not larger than the number, and its name."""
    return next(((size, name) for size, name in _UNITS if largest >= size), (1.0, "units"))
