"""Comparison of runs: metrics, differing keys, overlaid charts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.report.test_overview import SFT, write_run
from tests.report.test_page import HOSTILE, SAMPLE, Page, write_rows

from recipes_lib.report.overview import describe_result
from recipes_lib.report.run_comparison import _build_row, compare_figures, compare_keys
from recipes_lib.report.run_files import read_run


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    better = [{**event, **({"eval_loss": 1.5} if event.get("eval_loss") == 2.0 else {})} for event in SFT]
    write_run(tmp_path / "a", SFT, config={"learning_rate": 1e-5, "seed": 0, "output_dir": "a"})
    write_run(tmp_path / "b", better, config={"learning_rate": 3e-5, "seed": 0, "output_dir": "b"}, git_commit=HOSTILE)
    return [tmp_path / "a", tmp_path / "b"]


def test_differences_are_relative_to_first_run(folders: list[Path]) -> None:
    rows = {row.name: row for row in compare_figures([read_run(folder) for folder in folders], is_one_recipe=True)}
    assert (rows["eval_loss"].values, rows["eval_loss"].differences) == (["2", "1.5"], ["-0.5 (-25.0%)"])
    assert rows["steps"].differences == ["="]
    assert rows["training time"].values == ["2 min 0 s", "2 min 0 s"]


def test_last_value_of_a_diverged_run_is_not_the_last_finite_one(tmp_path: Path) -> None:
    nan = [{"kind": "train", "step": 31, "loss": "nan"}, {"kind": "eval", "step": 31, "eval_loss": "nan"}]
    write_run(tmp_path / "broken", [{"kind": "train", "step": 1, "loss": 1e301}])
    assert compare_figures([read_run(tmp_path / "broken")], is_one_recipe=True)[0].name == "loss"
    write_run(tmp_path / "a", SFT)
    write_run(tmp_path / "b", [*SFT, *nan])
    runs = [read_run(tmp_path / name) for name in ("a", "b")]
    rows = {row.name: row for row in compare_figures(runs, is_one_recipe=True)}
    for name in ("loss", "eval_loss"):
        assert (rows[name].values[1], rows[name].differences) == ("nan", [""])
    assert describe_result(runs[1]).startswith("eval_loss 5 -> nan")


@pytest.mark.parametrize(
    ("base", "value", "words"),
    [
        *((2, 1.5, "-0.5 (-25.0%)"), (-2, 1, "+3"), (0, 1, "+1"), (2, 2, "="), (None, 2, ""), (2, None, "")),
        (983_040, 8192, "-974,848 (-99.2%)"),
    ],
)
def test_percentage_requires_positive_base(base, value, words) -> None:
    """A reward that rises from -2 to 1 has not changed by -150 %."""
    assert _build_row("eval_reward", [base, value]).differences == [words]


def test_divergence_on_own_answers_is_compared(tmp_path: Path) -> None:
    """With other shares of on-policy steps, the losses of two runs are not of the same kind."""
    for name, value in (("a", 0.2), ("b", 0.1)):
        write_run(tmp_path / name, [{"kind": "train", "step": 1, "loss": 1.0, "on_policy/divergence": value}])
    write_run(tmp_path / "begun", [])
    rows = compare_figures([read_run(tmp_path / name) for name in ("a", "b", "begun")], is_one_recipe=True)
    assert {row.name: row.values for row in rows}["on_policy/divergence"] == ["0.2", "0.1", ""]


def test_compare_keys_lists_meaningful_differences(folders: list[Path]) -> None:
    rows = compare_keys([read_run(folder) for folder in folders])
    assert [(row.name, row.values[0]) for row in rows] == [("learning_rate", "1e-05"), ("commit", "")]


def test_comparison_page_overlays_runs(recipes, folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "pages" / "c.html"
    out.parent.mkdir()
    recipes("report", *folders, "--compare", "--output", out)
    html = out.read_text()
    page = Page(html)
    assert page.elements.count("script") == 1
    # Only in the legend: a tooltip has its text in that colour.
    rules = re.findall(r"(.*)\.first \{ background: var\(--first\)", html)
    assert rules == [".legend "]
    assert f"eval_loss: {folders[0]} from 5 at step 0 to 2 at step 30; {folders[1]} from 5" in html
    assert (out.with_suffix("") / "loss.png").is_file()


def test_last_answers_to_shared_prompts_stand_side_by_side(recipes, folders: list[Path], tmp_path: Path) -> None:
    for folder, word in zip(folders, ("red", "blue"), strict=True):
        answers = [(0, "colour?", "none"), (30, "colour?", word), (30, "same?", "yes"), (30, f"of {word}?", "alone")]
        rows = [SAMPLE | {"step": step, "prompt": prompt, "completion": text} for step, prompt, text in answers]
        write_rows(folder / "samples.jsonl", rows)
    out = tmp_path / "c.html"
    recipes("report", *folders, "--compare", "--output", out)
    shown = Page(out.read_text()).text.partition("Prompts that all runs answered")[2]
    # The answers that differ come first.
    words = ["colour?", str(folders[0]), "red", str(folders[1]), "blue", "same?", "yes", "yes"]
    assert re.search(".*".join(map(re.escape, words)), shown, re.DOTALL)
    assert "none" not in shown
    assert "alone" not in shown


@pytest.mark.parametrize(
    ("name", "page"), [(".", "compare.html"), ("new", "new/compare.html"), ("v1.2", "v1.2/compare.html")]
)
def test_output_may_be_a_folder(recipes, folders, tmp_path, monkeypatch, name, page) -> None:
    """Charts are written beside the page: a page without suffix would have the name of their folder."""
    (tmp_path / "v1.2").mkdir()
    monkeypatch.chdir(tmp_path)
    recipes("report", *folders, "--compare", "--output", name)
    assert (tmp_path / page).is_file()
    assert list((tmp_path / page).with_suffix("").glob("*.png"))


def test_losses_of_different_recipes_are_omitted(recipes, folders: list[Path], tmp_path: Path) -> None:
    write_run(tmp_path / "dpo", [{**event, "grad_norm": 1.0} for event in SFT], stage="dpo")
    out = tmp_path / "c.html"
    recipes("report", folders[0], tmp_path / "dpo", "--compare", "--output", out)
    page = Page(out.read_text())
    assert "Losses of different recipes" in page.text
    assert page.elements.count("figure") == 1
    assert "grad_norm" in page.text
    assert "eval_loss" not in page.text


def test_unrecorded_configurations_are_not_called_equal(recipes, folders: list[Path], tmp_path: Path) -> None:
    (folders[0] / "run.json").unlink()
    (folders[1] / "run.json").unlink()
    out = tmp_path / "c.html"
    recipes("report", *folders, "--compare", "--output", out)
    assert "A run has no record of its configuration." in Page(out.read_text()).text


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", "b", "c", "d", "e"]])
def test_number_of_compared_runs_is_limited(recipes, folders: list[Path], names: list[str], tmp_path: Path) -> None:
    recipes("report", *(str(tmp_path / name) for name in names), "--compare", code=2)


def test_output_without_comparison_is_refused(recipes, folders: list[Path], tmp_path: Path) -> None:
    recipes("report", folders[0], "--output", tmp_path / "page.html", code=2)
    assert not (folders[0] / "report.html").exists()
