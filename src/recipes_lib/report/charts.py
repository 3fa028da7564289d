"""Charts of a run, as SVG that uses the page's CSS colours, and as PNG."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from recipes_lib.config.table import read_lists
from recipes_lib.errors import escape_controls
from recipes_lib.files import explain_write_errors
from recipes_lib.quantities import format_count
from recipes_lib.report.run_files import Curve, RunFiles, find_non_finite_steps, read_curve, smooth

Kind = Literal["noisy", "exact", "points"]

_LIGHT_THEME: Final = Path(__file__).with_name("page.css").read_text(encoding="utf-8").partition("@media")[0]
COLOURS: Final[Mapping[str, str]] = dict(re.findall(r"--([\w-]+): (#\w+)", _LIGHT_THEME))
"""Colours of the light theme. They are distinct, so that ``render`` can replace each by its CSS variable."""
PNG_BACKGROUND = "#ffffff"
_PNG_DPI: Final = 160
MAX_POINTS = 800
"""Maximum points of a drawn curve."""
MAX_HOVERED = 200
"""Maximum points of a curve with values on hover."""
_MAX_ALARMS = 100
"""Maximum marked steps: each is an element of the SVG, and a diverged run may log NaN for millions of steps."""
_MAX_LABEL = 28
"""Maximum characters of a label in a legend, beside which the unit has room."""
SMOOTH_FROM = 30
"""Minimum points of a curve that is smoothed."""
_TICK_STEPS = [1, 2, 5, 10]
_LOG_FROM: Final = {"grad_norm": 20, "loss": 2, "heldout_loss": 2}
"""Charts that get a logarithmic axis -> how many times the median their largest value is then."""
_BAND: Final = ("low", "high")
METRICS: Final = read_lists(Path(__file__).with_name("metrics.yaml"))
STYLE = {
    # Keep text as text: searchable, and in the font of the page.
    "svg.fonttype": "none",
    # Labels come from untrusted files, and "$" would start a formula.
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": COLOURS["rule"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": COLOURS["rule"],
    "grid.linewidth": 0.8,
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "text.color": COLOURS["ink"],
    "ytick.left": False,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One curve of a chart.

    Attributes:
        label: Label in the legend; empty if the chart has one curve.
        curve: Finite ``(step, value)`` points, ordered by step.
        colour: Name in ``COLOURS``.
        kind: ``noisy``: drawn faintly, with a running median over it; ``exact``: drawn as a line; ``points``: markers
            joined by a line, for evaluations.
        style: Matplotlib's line style.
        metric: Key in ``metrics.jsonl``, which the page shows; empty for none.
    """

    label: str
    curve: Curve
    colour: str
    kind: Kind = "noisy"
    style: str = "-"
    metric: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure, ready for a page.

    Attributes:
        name: File name of its PNG, without suffix.
        title: Heading.
        alt: Text alternative for screen readers.
        svg: ``<svg>`` element whose colours are CSS variables of the page.
        narrow: Variant of a wide chart for narrow screens; empty for other charts.
        hover: Points of the curves with their positions in the SVG, as JSON for ``hover.js``; empty to disable.
        metrics: Keys of its curves in ``metrics.jsonl``; empty if the title says them.
    """

    name: str
    title: str
    alt: str
    svg: str
    narrow: str = ""
    hover: str = ""
    metrics: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a chart.

    Attributes:
        name: File name of its PNG, without suffix.
        title: Heading.
        lines: Curves of the same metric.
        unit: Unit, written above the axis.
        alarms: Steps marked by a vertical line, where the metric was not finite.
        is_wide: Whether the chart has the full width of a large screen.
        from_zero: Whether the y axis begins at 0.
        has_legend: Whether the chart has a legend; ``False`` if the page has one.
        healthy: Minimum and maximum of a healthy run, as documented on the recipe's page; ``None`` if unknown.
    """

    name: str
    title: str
    lines: Sequence[Line]
    unit: str = ""
    alarms: Sequence[int] = ()
    is_wide: bool = False
    from_zero: bool = False
    has_legend: bool = True
    healthy: tuple[float, float] | None = None


def draw_charts(run: RunFiles, folder: Path) -> list[Chart]:
    """Draw every chart that has data, and write the PNGs to ``folder``, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    return [draw_chart(plan, folder) for plan in _plan_charts(run) if any(line.curve for line in plan.lines)]


def _plan_charts(run: RunFiles) -> Iterator[Plan]:
    """Plan the charts of all recipes, in the order of the page; those without data are dropped later.

    One by one: the curves of a million steps take a hundred megabytes each.
    """
    is_pairs, is_rl, is_distilled = (
        bool(read_curve(run.train, name)) for name in ("rewards/margins", "objective/score", "distillation/nll")
    )
    in_bytes = bool(read_curve(run.evaluations, "eval_bits_per_byte"))
    has_targets = any(value for _, value in read_curve(run.train, "target_tokens_per_second"))
    # Without a record, the unit of the loss is unknown.
    unit = "a pair" if is_pairs else "nats per target token" if run.facts else ""
    parts = {
        "clipped surrogate, 0 on average": is_rl,
        "divergence and cross-entropy mixed": is_distilled,
        "cross-entropy and load balancing of experts": bool(run.config.get("router_aux_loss_coef")),
    }
    # The held-out loss is plain cross-entropy: if the training loss has other terms, the two have separate charts.
    mixed_unit = next((words for words, applies in parts.items() if applies), "")
    loss_alarms, norm_alarms = (find_non_finite_steps(run.train, name) for name in ("loss", "grad_norm"))
    if is_rl:
        yield from _read_plans(run, "rl")
    lines = [_read_line(run, "loss", "" if mixed_unit else "training")]
    if not mixed_unit:
        lines.append(_read_line(run, "eval_loss", "held-out"))
        lines += [Line(f"expected, {end}", read_curve(run.expected, end), "muted", "exact", ":") for end in _BAND]
    yield Plan("loss", "Loss", lines, mixed_unit or unit, loss_alarms, is_wide=not is_rl)
    # On an axis of its own: beside the larger range of the training loss, its changes are hard to see.
    yield Plan(
        "heldout_loss",
        "Held-out bits per byte" if in_bytes else "Held-out loss",
        [_read_line(run, "eval_bits_per_byte" if in_bytes else "eval_loss")],
        "independent of the tokenizer" if in_bytes else unit,
        find_non_finite_steps(run.evaluations, "eval_loss"),
    )
    yield Plan("heldout_sets", "Held-out sets", _draw_sets(run), unit)
    if is_pairs:
        yield from _read_plans(run, "reward" if run.facts.get("stage") == "reward" else "pairs")
    yield from _read_plans(run, "others")
    yield Plan("grad_norm", "Gradient norm", [_read_line(run, "grad_norm")], "before clipping", norm_alarms)
    rate = "target_tokens_per_second" if has_targets else "tokens_per_second"
    yield Plan("throughput", "Throughput", [_read_line(run, rate)], rate.replace("_", " "), from_zero=True)


def _read_plans(run: RunFiles, part: str) -> Iterator[Plan]:
    """Yield the plans of a part of ``charts`` in ``metrics.yaml``."""
    for row in METRICS["charts"][part]:
        yield Plan(**row | {"lines": [_read_line(run, *line) for line in row["lines"]]})


def _read_line(run: RunFiles, name: str, label: str = "", colour: str = "first", kind: Kind = "noisy") -> Line:
    """Return the curve of a metric; those of evaluations have a colour and a kind of their own."""
    if name.startswith("eval_"):
        return Line(label, read_curve(run.evaluations, name), "second", "points", metric=name)
    return Line(label, read_curve(run.train, name), colour, kind, metric=name)


def _draw_sets(run: RunFiles) -> list[Line]:
    """Return a curve for each set of ``eval_datasets``."""
    pattern = re.compile(r"eval_(.+)_loss")  # `eval_loss` of the main held-out set does not match.
    sets = {match[1]: match[0] for record in run.evaluations for match in map(pattern.fullmatch, record) if match}
    styles = itertools.cycle(itertools.product("-:", ("second", "first", "third", "good", "muted", "ink")))
    return [
        # Escaped: FreeType raises for the lone surrogates of an untrusted name. The end of a path is its own part.
        Line(escape_controls(name)[-_MAX_LABEL:], read_curve(run.evaluations, metric), colour, "points", style)
        for (name, metric), (style, colour) in zip(sorted(sets.items()), styles, strict=False)
    ]


def draw_chart(plan: Plan, folder: Path) -> Chart:
    """Draw a chart that has data, and write its PNG to the existing ``folder``."""
    plan = replace(plan, lines=[line for line in plan.lines if line.curve])
    # With a fixed salt, ids in the SVG are deterministic: the same run gives the same page.
    with mpl.rc_context({**STYLE, "svg.hashsalt": plan.name}):
        figure, axes = _draw_figure(plan, is_wide=plan.is_wide)
        svg = save_figure(figure, folder / f"{plan.name}.png")
        hover = json.dumps([_locate(figure, axes, line) for line in plan.lines])
        narrow = render(_draw_figure(plan, is_wide=False)[0]) if plan.is_wide else ""
    parts = [_describe(line) for line in plan.lines]
    parts += [f"healthy between {plan.healthy[0]:g} and {plan.healthy[1]:g}"] if plan.healthy else []
    alt = f"{plan.title}: {'; '.join(parts)}"
    return Chart(plan.name, plan.title, alt, svg, narrow, hover, [line.metric for line in plan.lines if line.metric])


def _draw_figure(plan: Plan, *, is_wide: bool) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9.2, 3.1) if is_wide else (4.5, 2.5), layout="constrained")
    axes = figure.add_subplot()
    for line in plan.lines:
        _draw_line(axes, line)
    _finish(figure, axes, plan, num_ticks=8 if is_wide else 5)
    return figure, axes


def _locate(figure: Figure, axes: Axes, line: Line) -> dict[str, Any]:
    """Return the points of a curve for ``hover.js``: step, value, and position in SVG units from the upper left corner.

    The figure must have been saved, which computes its layout.
    """
    points = thin_out(line.curve, MAX_HOVERED)
    # matplotlib's SVG has 72 units per inch; y points downwards.
    positions = axes.transData.transform(points) * 72 / figure.dpi
    height = figure.get_figheight() * 72
    return {
        "label": line.label,
        "colour": line.colour,
        "points": [
            [step, f"{value:.5g}", round(float(x), 1), round(float(height - y), 1)]
            for (step, value), (x, y) in zip(points, positions, strict=True)
        ],
    }


def save_figure(figure: Figure, path: Path) -> str:
    """Write a figure to ``path`` as a PNG, and return it as an ``<svg>`` element."""
    figure.set_dpi(_PNG_DPI)
    # The SVG keeps the layout of the PNG. With an engine, even one that does nothing, each ``savefig`` draws twice.
    if engine := figure.get_layout_engine():
        engine.execute(figure)
        figure.set_layout_engine(None)
    figure.savefig(path, dpi=_PNG_DPI, facecolor=PNG_BACKGROUND)
    return render(figure)


def render(figure: Figure) -> str:
    """Return a figure as an ``<svg>`` element with CSS variables for colours, hidden from screen readers."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    document = buffer.getvalue()
    element = document[document.index("<svg") :].replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)
    # The page has a light and a dark theme; matplotlib writes fixed colours.
    for name, colour in COLOURS.items():
        element = element.replace(colour, f"var(--{name})")
    return element


def _draw_line(axes: Axes, line: Line) -> None:
    colour = COLOURS[line.colour]
    bold: dict[str, Any] = {"color": colour, "linewidth": 2.0, "linestyle": line.style, "label": line.label}
    # A line through a single point is invisible.
    if line.kind == "points" or len(line.curve) == 1:
        bold |= {"marker": "o", "markersize": 4.5}
    is_smoothed = line.kind == "noisy" and len(line.curve) >= SMOOTH_FROM
    shown = smooth(line.curve) if is_smoothed else line.curve
    if is_smoothed:
        # Thinned out, because each point is text in the SVG.
        axes.plot(*zip(*thin_out(line.curve), strict=True), color=colour, linewidth=0.8, alpha=0.35)
    axes.plot(*zip(*thin_out(shown), strict=True), **bold)


def _finish(figure: Figure, axes: Axes, plan: Plan, num_ticks: int) -> None:
    values = [value for line in plan.lines for _, value in line.curve]
    if plan.from_zero:
        # `or 1`: equal limits are an error.
        axes.set_ylim(bottom=0, top=1.08 * max(values) or 1)
    # Spikes of the gradient norm, and the fall of a loss from its first steps, would flatten a linear axis.
    elif min(values) > 0 and max(values) > _LOG_FROM.get(plan.name, math.inf) * sorted(values)[len(values) // 2]:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5) if max(values) < 100 * min(values) else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
    # Ticks are round numbers, so that digits appear only where the range needs them.
    show = format_count if plan.name == "throughput" else "{:.6g}".format
    axes.yaxis.set_major_formatter(lambda value, _: show(value))
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_TICK_STEPS))
    axes.xaxis.set_major_locator(MaxNLocator(num_ticks, integer=True, steps=_TICK_STEPS, min_n_ticks=1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.margins(x=0.02)
    axes.set_xlabel("optimizer step")
    axes.set_title(plan.unit, loc="left", fontsize=9.5, color=COLOURS["muted"])
    if plan.healthy:
        _shade(axes, *plan.healthy)
    for step in plan.alarms[:: -(-len(plan.alarms) // _MAX_ALARMS) or 1]:
        axes.axvline(step, color=COLOURS["alarm"], linewidth=1.2, linestyle=(0, (2, 2)))
    labels = [line.label for line in plan.lines if line.label]
    if plan.has_legend and len(labels) > 1:
        # Above the axes, to the right of the unit.
        place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
        columns = 2 if max(map(len, labels)) <= _MAX_LABEL // 2 else 1
        axes.legend(frameon=False, labelcolor=COLOURS["ink"], ncols=columns, **place)
        # Otherwise, further rows of the legend would take their height from the axes.
        figure.set_figheight(figure.get_figheight() + 0.2 * ((len(labels) - 1) // columns))


def _shade(axes: Axes, least: float, largest: float) -> None:
    """Shade the visible part of a range of values; the limits of the axis stay those of the curves."""
    bottom, top = axes.get_ylim()
    begin, end = max(bottom, least), min(top, largest)
    if begin < end:
        axes.axhspan(begin, end, color=COLOURS["good"], alpha=0.1, linewidth=0)
        place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "left", "va": "top"}
        axes.text(0.01, end, "healthy", color=COLOURS["good"], fontsize=8, **place)
        axes.set_ylim(bottom, top)


def thin_out(curve: Curve, max_points: int = MAX_POINTS) -> Curve:
    """Reduce a curve to at most ``max_points`` points: its ends, and the minimum and maximum of equal intervals."""
    if len(curve) <= max_points:
        return curve
    # Two points per interval, and the two ends.
    size = -(-len(curve) * 2 // (max_points - 2))
    points = {curve[0][0]: curve[0][1], curve[-1][0]: curve[-1][1]}
    for start in range(0, len(curve), size):
        interval = curve[start : start + size]
        points |= dict([min(interval, key=lambda point: point[1]), max(interval, key=lambda point: point[1])])
    return sorted(points.items())


def _describe(line: Line) -> str:
    (first_step, first), (last_step, last) = line.curve[0], line.curve[-1]
    label = f"{line.label} " if line.label else ""
    if len(line.curve) == 1:
        return f"{label}{first:.4g} at step {first_step}"
    return f"{label}from {first:.4g} at step {first_step} to {last:.4g} at step {last_step}"


def draw_schedule(path: Path, tokens: Sequence[float], rates: Sequence[float], batches: Sequence[float]) -> None:
    """Draw the planned schedule of a run, and write it to ``path`` as a PNG.

    Args:
        path: Path of the PNG; its folder is created.
        tokens: Tokens trained on before each point, ascending.
        rates: Learning rate of the step that begins at each point.
        batches: Batch size of that step, in tokens.

    Raises:
        ConfigError: The file cannot be written.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 4.6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        _draw_panel(top, tokens, rates, "first", "learning rate")
        _draw_panel(bottom, tokens, batches, "second", "tokens in a step")
        bottom.set_xlabel("tokens trained on")
        bottom.xaxis.set_major_locator(MaxNLocator(10, steps=_TICK_STEPS))
        for axis in (bottom.xaxis, bottom.yaxis):
            axis.set_major_formatter(lambda value, _: format_count(value))
        with explain_write_errors(path, "name another file"):
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, format="png", dpi=_PNG_DPI, facecolor=PNG_BACKGROUND)


def _draw_panel(axes: Axes, tokens: Sequence[float], values: Sequence[float], colour: str, title: str) -> None:
    axes.plot(tokens, values, color=COLOURS[colour], linewidth=2.0, drawstyle="steps-post")
    axes.fill_between(tokens, values, step="post", color=COLOURS[colour], alpha=0.08, linewidth=0)
    axes.set_title(title, loc="left", fontsize=9.5, color=COLOURS["muted"])
    axes.set_ylim(bottom=0, top=1.08 * max(values))
    axes.set_xlim(tokens[0], tokens[-1])
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=_TICK_STEPS))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
