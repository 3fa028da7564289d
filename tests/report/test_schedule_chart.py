"""Chart of a planned learning-rate and batch-size schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from recipes_lib.errors import ConfigError
from recipes_lib.report.charts import COLOURS, draw_schedule

TOKENS = [0.0, 1e9, 5e9, 2e10]
RATES = [0.0, 3e-4, 2e-4, 3e-5]
BATCHES = [32_768.0, 65_536.0, 524_288.0, 524_288.0]


@pytest.mark.parametrize("name", ["plan.png", "folder/plan.svg"])
def test_schedule_chart_is_png_for_any_suffix(tmp_path: Path, name: str) -> None:
    draw_schedule(tmp_path / name, TOKENS, RATES, BATCHES)
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_schedule_chart_curves_and_counts(tmp_path: Path, figures: list[Figure]) -> None:
    draw_schedule(tmp_path / "plan.png", TOKENS, RATES, BATCHES)
    rate, batch = figures[0].axes
    assert [axes.lines[0].get_xdata().tolist() for axes in (rate, batch)] == [TOKENS, TOKENS]
    assert [axes.lines[0].get_ydata().tolist() for axes in (rate, batch)] == [RATES, BATCHES]
    assert batch.get_xlabel() == "tokens trained on"
    assert [axes.get_title(loc="left") for axes in (rate, batch)] == ["learning rate", "tokens in a step"]
    assert [axes.get_ylim()[0] for axes in (rate, batch)] == [0, 0]
    figures[0].draw_without_rendering()
    shown = [[label.get_text() for label in axis.get_ticklabels()] for axis in (batch.xaxis, batch.yaxis, rate.yaxis)]
    assert [(labels[0], labels[1]) for labels in shown] == [("0", "2B"), ("0", "200k"), ("0", "0.0001")]
    # The rate is constant within a step.
    assert {axes.lines[0].get_drawstyle() for axes in (rate, batch)} == {"steps-post"}
    assert [axes.lines[0].get_color() for axes in (rate, batch)] == [COLOURS["first"], COLOURS["second"]]


def test_schedule_chart_is_deterministic(tmp_path: Path) -> None:
    for name in ("one.png", "two.png"):
        draw_schedule(tmp_path / name, TOKENS, RATES, BATCHES)
    assert (imread(tmp_path / "one.png") == imread(tmp_path / "two.png")).all()


def test_unwritable_schedule_chart_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        draw_schedule(tmp_path / "file" / "plan.png", TOKENS, RATES, BATCHES)
