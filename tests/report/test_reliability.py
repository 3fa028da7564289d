"""Reliability chart of a reward model against the numbers of its report."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats
from tests.report.test_reward_report import make_scores

from recipes_lib.report.charts import COLOURS
from recipes_lib.report.reward_report import build_reward_report, draw_reliability


def make_report(margins: list[float]) -> dict[str, Any]:
    return build_reward_report(make_scores(margins, np.zeros(len(margins))))


SURE, UNSURE = math.log(9), math.log(1.5)
"""Margins with predicted win probability 0.9 and 0.6."""
MARGINS = [SURE] * 7 + [-SURE] * 3 + [UNSURE] * 6 + [-UNSURE] * 4
REPORT = make_report(MARGINS)


def test_reliability_chart_is_png_and_themed_svg_equal_from_json(tmp_path: Path) -> None:
    chart = draw_reliability(REPORT, tmp_path / "report")
    assert (tmp_path / "report" / f"{chart.name}.png").read_bytes().startswith(b"\x89PNG")
    assert ET.fromstring(chart.svg).tag.endswith("svg")
    assert "var(--first)" in chart.svg
    assert "var(--second)" in chart.svg
    assert not any(colour in chart.svg for colour in COLOURS.values())
    assert ET.fromstring(chart.narrow).tag.endswith("svg")
    assert draw_reliability(json.loads(json.dumps(REPORT)), tmp_path) == chart
    # By chance ``sqrt(2 / pi) (sqrt(10 * .9 * .1) + sqrt(10 * .6 * .4)) / 20``.
    assert chart.alt == "Calibration error 0.100, of which chance explains 0.100; scores from -2.2 to 2.2"


def test_reliability_points_and_intervals_match_report(tmp_path: Path, figures: list[Figure]) -> None:
    # Ties count once as a win and once as a loss and give no point.
    draw_reliability(make_report([*MARGINS, 0.0, 0.01]), tmp_path)
    diagonal, *intervals, points = figures[0].axes[0].lines
    assert diagonal.get_xydata().tolist() == [[0.5, 0.5], [1, 1]]
    assert points.get_xydata() == pytest.approx(np.array([[0.6, 0.6], [0.9, 0.7]]))
    for line, num_won, at in zip(intervals, (6, 7), (0.6, 0.9), strict=True):
        expected = stats.binomtest(num_won, 10).proportion_ci(method="wilson")
        assert line.get_xydata() == pytest.approx(np.array([[at, expected.low], [at, expected.high]]), abs=1e-6)
        assert figures[0].axes[0].get_ylim()[0] < expected.low


def test_score_histogram_matches_report(tmp_path: Path, figures: list[Figure]) -> None:
    draw_reliability(REPORT, tmp_path)
    axes = figures[0].axes[1]
    outlines = {patch.get_label(): patch.get_data() for patch in axes.patches if patch.get_label()}
    assert {name: data.values.tolist() for name, data in outlines.items()} == {
        name: REPORT["histogram"][name] for name in ("chosen", "rejected")
    }
    assert outlines["chosen"].edges.tolist() == REPORT["histogram"]["edges"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["chosen", "rejected"]


@pytest.mark.parametrize("margins", [[0.0], [-1e4, 3.0]])
def test_extreme_margins_can_be_drawn(tmp_path: Path, margins: list[float]) -> None:
    draw_reliability(make_report(margins), tmp_path)
