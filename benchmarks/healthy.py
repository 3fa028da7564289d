"""Annotated curves of healthy runs, from a finished demo: ``docs/images/healthy_RECIPE.svg`` on the pages of recipes.

    make demo && python benchmarks/healthy.py [demo]

Notes are placed by the fraction of the run. Axes and colours are the same as in reports.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes_lib.report.charts import COLOURS, STYLE, save_figure, smooth
from recipes_lib.report.run_files import RunFiles, read_curve, read_run

IMAGES: Final = Path(__file__).parents[1] / "docs" / "images"
_THEMES: Final = (
    "<style>svg{--ink:#1c2024;--muted:#60666d;--rule:#d9dce0;--first:#2563c9;--second:#b04c08}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e8eaed;--muted:#9aa1a9;--rule:#343940;--first:#7fb0ff;"
    "--second:#f2a65a}}</style>"
)


class Note(NamedTuple):
    """Annotation at a fraction of the run; ``across`` and ``up`` are the offset of the text in points."""

    at: float
    words: str
    across: int
    up: int


class Panel(NamedTuple):
    """Names of a training metric and of its held-out counterpart in ``metrics.jsonl``; ``held_out`` may be empty."""

    train: str
    held_out: str
    notes: Sequence[Note]


HEALTHY: Final[Mapping[str, Sequence[Panel]]] = {
    "pretrain": (
        Panel(
            "loss",
            "eval_loss",
            [Note(0.85, "held-out and training loss\nstay together", 0, 40)],
        ),
        Panel(
            "grad_norm", "", [Note(0.06, "settles after warm-up", 14, 34), Note(0.8, "no jump of ten times", 10, 26)]
        ),
    ),
    "sft": (
        Panel(
            "loss",
            "eval_loss",
            [
                Note(0.06, "falls in the first tenth", 90, 75),
                Note(0.8, "held-out and training loss\nstay together", 0, 20),
            ],
        ),
        Panel("grad_norm", "", [Note(0.08, "settles after warm-up", 14, 40)]),
    ),
    "lora": (
        Panel(
            "loss",
            "eval_loss",
            [Note(0.2, "falls in the first quarter", 60, 75), Note(0.8, "flat: enough epochs", 0, 22)],
        ),
        Panel("grad_norm", "", [Note(0.7, "falls with the rate, without jumps", 0, 40)]),
    ),
    "reward": (
        Panel(
            "loss",
            "eval_loss",
            [Note(0.0, "near ln 2 = 0.69: no preference yet", 20, 16), Note(0.9, "held-out loss still falls", 0, 30)],
        ),
        Panel(
            "rewards/accuracies",
            "eval_rewards/accuracies",
            [Note(0.9, "below 1: answers do not\ndiffer by form alone", 0, -36)],
        ),
    ),
    "dpo": (
        Panel("rewards/accuracies", "eval_rewards/accuracies", [Note(0.9, "held-out pairs too", -10, -40)]),
        Panel("logps/chosen_shift", "", [Note(0.9, "near 0: the chosen answer\nstays probable", -30, 30)]),
    ),
    "ppo": (
        Panel("objective/score", "eval_reward", [Note(0.75, "noisy, and rises", 0, -60)]),
        Panel(
            "objective/kl_seq", "", [Note(0.0, "0 at the start", 14, -8), Note(0.9, "stays below a few nats", 0, -40)]
        ),
    ),
    "grpo": (
        Panel("objective/score", "eval_reward", [Note(0.75, "noisy, and rises", 0, -60)]),
        Panel("frac_reward_zero_std", "", [Note(0.35, "well below 1: half of the\ngroups have a gradient", 0, 50)]),
    ),
    "distill": (
        Panel("distillation/divergence", "", [Note(0.3, "distance to the teacher falls", 14, 30)]),
        Panel("distillation/agreement", "", [Note(0.7, "tokens where both\nprefer the same", 10, -44)]),
    ),
}
"""Recipe -> its panels, drawn side by side."""


def draw(run: RunFiles, panels: Sequence[Panel], folder: Path) -> str:
    """Return an SVG of annotated curves, legible on light and dark pages.

    Args:
        run: A finished run.
        panels: At least one; each has data.
        folder: Existing folder for a PNG of the same figure.
    """
    with mpl.rc_context({**STYLE, "svg.hashsalt": "healthy"}):
        figure = Figure(figsize=(9.2, 2.7), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw_panel(axes, run, panel)
        svg = save_figure(figure, folder / "healthy.png")
    return svg.replace(">", f">{_THEMES}", 1) + "\n"


def _draw_panel(axes: Axes, run: RunFiles, panel: Panel) -> None:
    curve = smooth(read_curve(run.train, panel.train))
    axes.plot(*zip(*curve, strict=True), color=COLOURS["first"], linewidth=2.0)
    if held_out := read_curve(run.evaluations, panel.held_out) if panel.held_out else []:
        axes.plot(*zip(*held_out, strict=True), color=COLOURS["second"], linewidth=2.0, marker="o", markersize=4.5)
        axes.set_title(panel.held_out, loc="right", fontsize=9.5, color=COLOURS["second"])
    axes.set_title(panel.train, loc="left", fontsize=9.5, color=COLOURS["first"])
    axes.set_xlabel("optimizer step")
    axes.margins(x=0.02, y=0.25)
    for note in panel.notes:
        step, value = curve[round(note.at * (len(curve) - 1))]
        axes.annotate(
            note.words, (step, value), (note.across, note.up), textcoords="offset points", color=COLOURS["ink"],
            ha="left" if note.across > 0 else "right" if note.across < 0 else "center",
            arrowprops={"arrowstyle": "-", "color": COLOURS["muted"], "shrinkB": 3},
        )  # fmt: skip


def main() -> None:
    """Draw the curves of all recipes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, nargs="?", default=Path("demo"), help="folder of a finished demo")
    demo = parser.parse_args().demo
    with tempfile.TemporaryDirectory() as folder:
        for recipe, panels in HEALTHY.items():
            svg = draw(read_run(demo / recipe), panels, Path(folder))
            (IMAGES / f"healthy_{recipe}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
