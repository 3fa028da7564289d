"""Images of the documentation, compared with the tables that they show."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from xml.sax.saxutils import escape

import pytest
from benchmarks import healthy, pictures

from recipes_lib.report.run_files import read_run


@pytest.mark.parametrize(
    ("name", "draw"), [("benchmarks", pictures.draw_benchmarks), ("forgetting", pictures.draw_forgetting)]
)
def test_committed_images_match_committed_tables(name, draw):
    found = (pictures.IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert found == draw(pictures.RESULTS.read_text(encoding="utf-8")), "run make pictures"


def test_caption_of_benchmarks_names_the_machine():
    assert "Measured on a CPU: Intel " in (pictures.IMAGES / "benchmarks.svg").read_text(encoding="utf-8")
    text = pictures.RESULTS.read_text(encoding="utf-8").replace("Machine of this page", "Machine")
    with pytest.raises(KeyError, match="names no machine"):
        pictures.draw_benchmarks(text)


def test_point_is_at_its_medians():
    figures = {
        "a": "1 / 2 / 3 | 0.1 / 0.2 / 0.3",
        "`b: 1`": "3 / 4 / 5 | 0.3 / 0.4 / 0.5",
        "c": "2 / 3 / 4 | 0.2 / 0.3 / 0.4",
    }
    rows = "".join(f"| {label} | {found} |\n" for label, found in figures.items())
    text = f"\n## Forgetting\n\n| arm | gained, min / median / max | lost |\n|---|---|---|\n{rows}\n## Other\n"
    assert [point.label for point in pictures.read_points(text)] == ["a", "b: 1", "c"]
    svg = ET.fromstring(pictures.draw_forgetting(text))
    second, middle, first = svg.iter("{http://www.w3.org/2000/svg}circle")
    for axis in ("cx", "cy"):
        ends = (float(first.get(axis)), float(second.get(axis)))
        assert float(middle.get(axis)) == pytest.approx(sum(ends) / 2, abs=0.1)
    assert float(first.get("cx")) < float(second.get("cx"))
    assert float(first.get("cy")) > float(second.get("cy")), "more gain is higher"
    with pytest.raises(KeyError):
        pictures.read_points("\n## Forgetting\n\nnothing\n")


def test_bar_shows_median_and_whisker_shows_range():
    svg = ET.fromstring(pictures.draw([pictures.Bar("a < b", 1.0, 2.0, 4.0), pictures.Bar("c", 1.0, 1.0, 1.0)], ["x"]))
    name = "{http://www.w3.org/2000/svg}"
    widths = [float(bar.get("width")) for bar in svg.iter(f"{name}rect")]
    one, whisker, _ = svg.iter(f"{name}line")
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)
    assert float(whisker.get("x1")) == pytest.approx(float(one.get("x1")))
    assert float(whisker.get("x2")) - float(whisker.get("x1")) == pytest.approx(3 * widths[1], abs=0.2)
    assert "a < b" in [text.text for text in svg.iter(f"{name}text")]


@pytest.mark.parametrize(
    "place",
    [
        pictures.Place("Trainings", "a", "ours / this"),
        pictures.Place("Training", "b", "ours / this"),
        pictures.Place("Training", "a", "this / ours"),
        pictures.Place("Other", "a", "ours / this"),
    ],
)
def test_read_bar_rejects_changed_table(place):
    text = "\n## Training\n\n| variant | ours / this |\n|---|---|\n| a | 1 / 2 / 3 |\n\n## Other\n"
    assert pictures.read_bar(text, "x", pictures.Place("Training", "a", "ours / this")) == ("x", 1, 2, 3)
    with pytest.raises(KeyError):
        pictures.read_bar(text, "x", place)


def test_screenshots_require_finished_demo(tmp_path):
    with pytest.raises(SystemExit, match=r"make demo|no Chromium"):
        pictures.take_screenshots(tmp_path, tmp_path)


def test_notes_of_healthy_run_are_drawn(tmp_path):
    events = [{"kind": "train", "step": step, "loss": 2 / step} for step in range(1, 41)]
    events += [{"kind": "eval", "step": step, "eval_loss": 2.0} for step in (1, 40)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    notes = [healthy.Note(0.1, "a < b", 10, 10), healthy.Note(1.0, "the end", 0, -10)]
    svg = ET.fromstring(healthy.draw(read_run(tmp_path), [healthy.Panel("loss", "eval_loss", notes)], tmp_path))
    output = ["".join(text.itertext()).strip() for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "the end", "loss", "eval_loss"} <= set(output)


@pytest.mark.parametrize("recipe", healthy.HEALTHY)
def test_committed_image_has_notes_of_recipe(recipe):
    picture = pictures.IMAGES / f"healthy_{recipe}.svg"
    output = picture.read_text(encoding="utf-8")
    page = pictures.IMAGES.parent / f"{'pretraining' if recipe == 'pretrain' else recipe}.md"
    assert f"images/{picture.name}" in page.read_text(encoding="utf-8")
    for panel in healthy.HEALTHY[recipe]:
        for note in panel.notes:
            assert all(escape(line) in output for line in note.words.split("\n")), "make demo && make pictures"
