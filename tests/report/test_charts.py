"""Charts of a run: thinning, smoothing, hover points, alternative text, healthy ranges."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.forked import ROOT
from tests.rows import write_rows

from recipes_lib.report.charts import COLOURS, Chart, _plan_charts, draw_chart, draw_charts, thin_out
from recipes_lib.report.run_files import RunFiles, read_run, smooth

CURVES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300).map(lambda values: list(enumerate(values)))


def build_run(train: list[dict[str, Any]], evaluations: list[dict[str, Any]] | None = None) -> RunFiles:
    return RunFiles(name="run", facts={}, train=train, evaluations=evaluations or [], samples=[], num_torn_lines=0)


@given(curve=CURVES, max_points=st.integers(10, 60))
def test_thin_out_keeps_ends_extremes_and_order(curve: list[tuple[int, float]], max_points: int) -> None:
    thin = thin_out(curve, max_points)

    assert len(thin) <= max(max_points, 2)
    assert set(thin) <= set(curve)
    assert list(thin) == sorted(thin)
    assert (thin[0], thin[-1]) == (curve[0], curve[-1])
    assert {min(v for _, v in thin), max(v for _, v in thin)} == {min(v for _, v in curve), max(v for _, v in curve)}


def test_smooth_preserves_line_and_ignores_spike() -> None:
    line = [(step, float(step)) for step in range(400)]
    assert smooth(line[:380])[:-10] == line[:370]

    spiked = [(step, 100.0 if step == 200 else 1.0) for step in range(400)]
    assert {value for _, value in smooth(spiked)} == {1.0}
    smoothed = smooth([(step, 1.0) for step in range(20_000)])
    assert len(smoothed) <= 402
    assert smoothed[-1][0] == 19_999


@pytest.mark.parametrize("is_log", [False, True])
def test_hover_points_lie_on_drawn_curve(tmp_path: Path, is_log: bool) -> None:
    """The reference is the path data in the SVG."""
    norms = [1.0, 2.0, 0.5, 1.5, 1.0, 1.0, 900.0 if is_log else 2.5, 1.0]
    train = [{"step": 10 * n, "grad_norm": norm} for n, norm in enumerate(norms)]
    (chart,) = draw_charts(build_run(train), tmp_path)
    (line,) = json.loads(chart.hover)
    assert [(step, float(value)) for step, value, _, _ in line["points"]] == [(10 * n, v) for n, v in enumerate(norms)]
    drawn = [re.findall(r"[ML] ([\d.]+) ([\d.]+)", path) for path in re.findall(r' d="([^"]*)"', chart.svg)]
    expected = [pytest.approx(point[2:], abs=0.1) for point in line["points"]]
    assert any([[float(x), float(y)] for x, y in path] == expected for path in drawn if len(path) == len(norms))


METRICS = {"loss": 1.0, "learning_rate": 1e-4, "grad_norm": 1.0, "target_tokens_per_second": 9e3}


@pytest.mark.parametrize(
    ("num_steps", "metrics", "names"),
    [
        (1, ["loss"], ["loss", "heldout_loss"]),
        (29, ["loss"], ["loss", "heldout_loss"]),
        (2000, METRICS, ["loss", "heldout_loss", "learning_rate", "grad_norm", "throughput"]),
    ],
    ids=["one step", "not smoothed", "smoothed and thinned"],
)
def test_charts_are_written_as_png_and_themed_svg(tmp_path, num_steps, metrics, names) -> None:
    train = [{"step": n, **{name: METRICS[name] / n for name in metrics}} for n in range(1, num_steps + 1)]
    charts = draw_charts(build_run(train, [{"step": 0, "eval_loss": 3.0}, {"step": 9, "eval_loss": 2.0}]), tmp_path)

    assert [chart.name for chart in charts] == names
    for chart in charts:
        assert (tmp_path / f"{chart.name}.png").read_bytes().startswith(b"\x89PNG")
        assert ET.fromstring(chart.svg).tag.endswith("svg")
        assert "var(--first)" in chart.svg or "var(--second)" in chart.svg
        assert not any(colour in chart.svg for colour in COLOURS.values())


@pytest.mark.usefixtures("figures")
def test_ppo_charts(tmp_path: Path) -> None:
    figures = {
        **{f"objective/{name}": 0.5 for name in ("score", "kl_seq", "finish_rate", "length")},
        **{"policy/entropy": 2.0, "policy/clipfrac": 0.1, "value/explained_var": 0.3, "frac_reward_zero_std": 0.2},
    }
    train = [{"step": n, "loss": -0.01, **figures} for n in (4, 8)]
    charts = draw_charts(build_run(train, [{"step": 0, "eval_reward": 0.2}]), tmp_path)
    leading = ["score", "kl", "entropy", "clip_fraction", "finish_rate", "length"]
    assert [chart.name for chart in charts] == [*leading, "flat_groups", "explained_variance", "loss"]
    assert "samples" in charts[0].alt


@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize("config", [None, {"router_aux_loss_coef": 0.01}])
def test_held_out_loss_of_mixed_loss_has_own_chart(tmp_path: Path, config: dict[str, float] | None) -> None:
    """The held-out loss is only one term of a mixed training loss, so the two must not share axes."""
    train = [{"step": 1, "loss": 4.0, **({} if config else {"distillation/nll": 3.0})}]
    run = build_run(train, [{"step": 1, "eval_loss": 3.5}])
    charts = {chart.name: chart.alt for chart in draw_charts(replace(run, facts={"config": config}), tmp_path)}
    assert charts["loss"] == "Loss: 4 at step 1"
    assert charts["heldout_loss"] == "Held-out loss: 3.5 at step 1"
    plain = draw_charts(build_run([{"step": 1, "loss": 4.0}], [{"step": 1, "eval_loss": 3.5}]), tmp_path)
    assert plain[0].alt == "Loss: training 4 at step 1; held-out 3.5 at step 1"


@pytest.mark.usefixtures("figures")
def test_expected_band_is_drawn_beside_losses(tmp_path: Path) -> None:
    band = [{"kind": "expected", "step": 9, "eval_loss": 3.5, "low": 3.0, "high": "much"}]
    events = [{"kind": "train", "step": 9, "loss": 4.0}, *band, {"kind": "expected", "step": 10, "low": 2.5, "high": 3}]
    write_rows(tmp_path / "metrics.jsonl", events)
    chart = draw_charts(read_run(tmp_path), tmp_path)[0]
    words = "training 4 at step 9; expected, low from 3 at step 9 to 2.5 at step 10; expected, high 3 at step 10"
    assert chart.alt == f"Loss: {words}"


@pytest.mark.usefixtures("figures")
def test_distillation_charts_follow_logged_losses(tmp_path: Path) -> None:
    parts = ("divergence", "agreement", "feature", "attention", "similarity", "distance", "angle")
    figures = {f"distillation/{name}": 0.5 for name in ("nll", "teacher_nll", *parts)}
    charts = draw_charts(build_run([{"step": 1, "loss": 1.0, **figures}]), tmp_path)
    assert [chart.name for chart in charts] == ["loss", "nll", *(f"distillation_{name}" for name in parts)]
    assert "student" in charts[1].alt
    assert "teacher" in charts[1].alt
    del figures["distillation/feature"]
    charts = draw_charts(build_run([{"step": 1, "loss": 1.0, **figures}]), tmp_path)
    assert "distillation_feature" not in {chart.name for chart in charts}


@pytest.mark.usefixtures("figures")
def test_preference_charts(tmp_path: Path) -> None:
    train = [
        {
            "step": n,
            "loss": 0.7,
            "target_tokens_per_second": 0.0,
            "tokens_per_second": 9e3,
            **{f"rewards/{name}": 0.1 * n for name in ("chosen", "rejected", "margins", "accuracies")},
        }
        for n in range(1, 4)
    ]
    charts = {chart.name: chart for chart in draw_charts(build_run(train), tmp_path)}

    assert set(charts) == {"loss", "rewards", "accuracy", "throughput"}
    assert charts["rewards"].alt == "Rewards: " + "; ".join(
        f"{name} from 0.1 at step 1 to 0.3 at step 3" for name in ("chosen", "rejected")
    )
    assert "9000" in charts["throughput"].alt


def test_svg_is_deterministic(tmp_path: Path) -> None:
    run = build_run([{"step": n, "grad_norm": 1.0 / n} for n in range(1, 9)])

    assert draw_charts(run, tmp_path) == draw_charts(run, tmp_path)


def test_chart_without_finite_points_is_omitted(tmp_path: Path) -> None:
    assert draw_charts(build_run([{"step": 1, "loss": "nan", "grad_norm": None}]), tmp_path) == []


def test_alt_text_has_first_and_last_value_of_each_curve(tmp_path: Path) -> None:
    train = [{"step": 1, "loss": 4.0}, {"step": 5, "loss": 2.0}]
    loss, held_out = draw_charts(build_run(train, [{"step": 0, "eval_bits_per_byte": 1.5, "eval_loss": 6}]), tmp_path)

    assert loss.alt == "Loss: training from 4 at step 1 to 2 at step 5; held-out 6 at step 0"
    assert held_out.alt == "Held-out bits per byte: 1.5 at step 0"
    # The wide chart has a second version for narrow screens.
    assert "<svg" in loss.narrow
    assert not held_out.narrow


@pytest.mark.usefixtures("figures")
def test_held_out_sets_chart_names_each_set(tmp_path: Path) -> None:
    evaluations = [
        {"step": step, "eval_loss": 2.0, "eval_web_loss": 3.0 - step, "eval_code_loss": 4.0} for step in (0, 1)
    ]
    charts = {chart.name: chart.alt for chart in draw_charts(build_run([], evaluations), tmp_path)}
    assert (
        charts["heldout_sets"]
        == "Held-out sets: code from 4 at step 0 to 4 at step 1; web from 3 at step 0 to 2 at step 1"
    )
    none = draw_charts(build_run([], [{"step": 0, "eval_loss": 2.0}]), tmp_path)
    assert "heldout_sets" not in {chart.name for chart in none}


@pytest.mark.parametrize("names", [["web", "/data/" + "corpus" * 12], [f"set{number}" for number in range(12)]])
def test_legend_of_held_out_sets_leaves_room_for_curves(names: list[str], tmp_path: Path) -> None:
    evaluations = [{"step": step, **{f"eval_{name}_loss": float(step) for name in names}} for step in (0, 1)]
    (chart,) = draw_charts(build_run([], evaluations), tmp_path)
    (_, _, left, bottom), (_, _, right, top) = json.loads(chart.hover)[0]["points"]
    assert right - left > 200, "of a width of 324"
    assert bottom - top > 100, "of a height of 180 without further rows of the legend"
    (plan,) = (plan for plan in _plan_charts(build_run([], evaluations)) if plan.name == "heldout_sets")
    assert len({(line.colour, line.style) for line in plan.lines}) == len(names)
    assert ("stroke-dasharray" in chart.svg) == (len(names) > 6)


@pytest.mark.parametrize(("num_steps", "num_marks"), [(1, 1), (5000, 100)])
def test_non_finite_steps_are_marked(tmp_path: Path, num_steps: int, num_marks: int) -> None:
    train = [{"step": 0, "grad_norm": 1.0}, *({"step": n, "grad_norm": "nan"} for n in range(1, num_steps + 1))]
    (chart,) = draw_charts(build_run(train), tmp_path)
    # Every drawn path has its colour once.
    assert chart.svg.count("stroke: var(--alarm)") == num_marks


@pytest.mark.parametrize(("smallest", "scale"), [(1.0, "log"), (0.0, "linear")])
def test_gradient_norm_axis_is_logarithmic_with_spike(tmp_path, figures, smallest, scale) -> None:
    norms = [smallest, *[1.0] * 10, 500.0]
    draw_charts(build_run([{"step": n, "grad_norm": norm} for n, norm in enumerate(norms)]), tmp_path)
    assert {axes.get_yscale() for figure in figures for axes in figure.axes} == {scale}


@pytest.mark.parametrize(("first", "scale"), [(11.0, "log"), (5.0, "linear")])
def test_loss_axis_is_logarithmic_after_a_fall_and_has_ticks(tmp_path, figures, first, scale) -> None:
    losses = [first, *[3.1] * 10, 2.9]
    (chart,) = draw_charts(build_run([{"step": n, "loss": loss} for n, loss in enumerate(losses)]), tmp_path)
    assert {axes.get_yscale() for figure in figures for axes in figure.axes} == {scale}
    for axes in (axes for figure in figures for axes in figure.axes):
        low, high = axes.get_ylim()
        assert sum(low <= tick <= high for tick in axes.get_yticks()) >= 3
    assert chart.metrics == ["loss"]


HEALTHY = {
    # Recipe and metric -> chart, and the range in the docs page of the recipe.
    ("reward", "rewards/accuracies"): ("accuracy", "0.65", "0.8"),
    ("dpo", "rewards/accuracies"): ("accuracy", "0.6", "0.8"),
    ("ppo", "policy/clipfrac"): ("clip_fraction", "0.01", "0.2"),
    ("ppo", "value/explained_var"): ("explained_variance", "0", "0.8"),
    ("distill", "distillation/agreement"): ("distillation_agreement", "0.6", "0.9"),
}


@pytest.mark.parametrize(("recipe", "name"), HEALTHY)
def test_healthy_range_matches_docs_and_is_shaded_in_view(recipe: str, name: str, tmp_path: Path) -> None:
    chart_name, least, largest = HEALTHY[recipe, name]
    extra = {"rewards/margins": 1.0, "objective/score": 1.0, "distillation/nll": 1.0}

    def draw(*values: float) -> Chart:
        run = build_run([{"step": step, name: value, **extra} for step, value in enumerate(values)])
        plans = _plan_charts(replace(run, facts={"stage": recipe}))
        return draw_chart(next(plan for plan in plans if plan.name == chart_name), tmp_path)

    seen = draw(float(least) / 2 - 0.1, (float(least) + float(largest)) / 2)
    assert f"healthy between {least} and {largest}" in seen.alt
    assert ">healthy</text>" in seen.svg
    # Values far below the range do not stretch the axis up to it.
    far = draw(-0.004, -0.003)
    assert ">healthy</text>" not in far.svg
    page = (ROOT / "docs" / f"{recipe}.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}") and "|" in line[2:]][:1]
    assert {least, largest} <= set(re.findall(r"\d(?:\.\d+)?", row))


def test_ticks_of_a_narrow_range_differ_and_steps_are_whole_numbers(tmp_path: Path) -> None:
    train = [{"step": 125_000 * number, "loss": 20_000.0 + number} for number in range(9)]
    (chart,) = draw_charts(build_run(train), tmp_path)
    assert {"20002", "20004", "200,000", "1,000,000"} <= set(re.findall(r">([\d.e+,]+)</text>", chart.svg))


@pytest.mark.parametrize(
    ("facts", "metrics", "unit"),
    [
        ({}, {}, ""),
        ({"stage": "sft"}, {}, "nats per target token"),
        ({"stage": "dpo"}, {"rewards/margins": 1.0}, "a pair"),
        ({"stage": "grpo"}, {"objective/score": 1.0}, "clipped surrogate, 0 on average"),
        ({"stage": "distill"}, {"distillation/nll": 1.0}, "divergence and cross-entropy mixed"),
    ],
)
def test_unit_of_the_training_loss(facts: dict[str, Any], metrics: dict[str, float], unit: str) -> None:
    run = replace(build_run([{"step": 1, "loss": 1.0, **metrics}]), facts=facts)
    assert next(plan.unit for plan in _plan_charts(run) if plan.name == "loss") == unit
