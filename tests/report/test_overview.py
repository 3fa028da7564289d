"""Overview of a folder of runs and pipelines, and `recipes runs`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.locks import locked
from tests.report.test_page import HOSTILE, Page

from recipes_lib.cli import main as run_recipes
from recipes_lib.report import overview
from recipes_lib.report.overview import describe_result, draw_spark, list_entries, show_figure, write_overview
from recipes_lib.report.page import build_report
from recipes_lib.report.run_files import read_run


def write_run(folder: Path, events: list[dict[str, Any]], **facts: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"stage": "sft", "status": "done", **facts}))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))


SFT = [
    {"kind": "eval", "step": 0, "eval_loss": 5.0},
    *({"kind": "train", "step": n, "loss": 5.0 / n, "seconds": 4.0 * n} for n in range(1, 31)),
    {"kind": "eval", "step": 30, "eval_loss": 2.0},
]


@pytest.mark.parametrize(
    ("losses", "figure"),
    [
        ([4.0, *[1.0] * 78, 9.0], "loss 4 -> 1"),  # The last running median, as on the page of the run.
        ([4.0, *[1.0] * 78, "nan"], "loss 4 -> nan"),
        (["nan", "nan"], "loss nan"),
        ([], ""),
    ],
)
def test_training_loss_is_that_of_the_page_unless_the_run_has_diverged(tmp_path, losses, figure) -> None:
    write_run(tmp_path / "sft", [{"kind": "train", "step": n, "loss": loss} for n, loss in enumerate(losses, 1)])
    assert [show_figure(entry) for entry in list_entries(tmp_path)] == [figure]


def test_overview_has_the_cost_of_all_devices(tmp_path: Path) -> None:
    priced = {"num_processes": 8, "config": {"device_hour_price": 30}}
    write_run(tmp_path / "sft", SFT, **priced)
    write_run(tmp_path / "free", SFT)
    # 120 seconds, of 8 devices: 8 dollars.
    assert [entry.cost for entry in list_entries(tmp_path)] == [None, 8]
    text = Page(write_overview(tmp_path).read_text()).text
    assert "sum of durations 4 min 0 s, cost 8.00" in text
    assert text.count("cost 8.00") == 2


def test_describe_result(tmp_path: Path) -> None:
    write_run(tmp_path / "sft", SFT)
    assert describe_result(read_run(tmp_path / "sft")) == "eval_loss 5 -> 2, 30 steps, 2 min 0 s of training"
    ppo = [{"kind": "train", "step": 4, "loss": -0.1, "objective/score": 0.25}]
    write_run(tmp_path / "ppo", [*ppo, {"kind": "eval", "step": 4, "eval_reward": 0.5, "eval_loss": 9}], stage="ppo")
    assert describe_result(read_run(tmp_path / "ppo")) == "eval_reward 0.5, 4 steps"
    # Texts in one step, and answers in another: their losses differ whatever the student learns.
    distill = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 0.4, "on_policy/divergence": 0.2}]
    distill += [{"step": step, "loss": 0.2, "on_policy/divergence": 0.1} for step in (4, 5, 6)]
    write_run(tmp_path / "distill", [{"kind": "train", **event} for event in distill], stage="distill")
    assert describe_result(read_run(tmp_path / "distill")) == "on_policy/divergence 0.2 -> 0.1, 6 steps"
    write_run(tmp_path / "none", [])
    assert describe_result(read_run(tmp_path / "none")) == ""


def test_list_entries_finds_nested_runs_but_not_checkpoints(tmp_path: Path) -> None:
    write_run(tmp_path / "b" / "deep", SFT)
    write_run(tmp_path / "a", SFT, status="running")
    write_run(tmp_path / "a" / "checkpoint-3", [])
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "corpus.json").write_text("{}")
    (tmp_path / "link").symlink_to("a")
    assert [(entry.name, entry.kind, entry.status, entry.step) for entry in list_entries(tmp_path)] == [
        ("a", "sft", "killed", 30), ("b/deep", "sft", "done", 30), ("corpus", "corpus", "done", None),
    ]  # fmt: skip


def test_run_is_running_while_a_process_holds_its_lock_and_killed_after_it(tmp_path: Path, recipes) -> None:
    write_run(tmp_path / "a", SFT, status="running")
    with locked(tmp_path / "a" / "_lock"):
        assert list_entries(tmp_path)[0].status == "running"
        assert "its status is “running”" in build_report(tmp_path / "a").read_text()
    assert recipes("runs", tmp_path).splitlines()[1].split()[:3] == ["a", "sft", "killed"]
    assert "its status is “killed”" in build_report(tmp_path / "a").read_text()


@pytest.mark.parametrize("lock", ["pipeline.json.lock", "pipeline.json.sft.lock"])
def test_stage_is_running_while_a_process_holds_a_lock_of_it_and_killed_after_it(tmp_path: Path, lock: str) -> None:
    stages = [{"name": name, "output": name} for name in ("sft", "../x")]
    state = {"pipeline": stages, "stages": {stage["name"]: {"status": "running"} for stage in stages}}
    (tmp_path / "pipeline.json").write_text(json.dumps(state))
    with locked(tmp_path / lock, "flock"):
        assert list_entries(tmp_path)[0].status == "running"
    assert [entry.status for entry in list_entries(tmp_path)] == ["killed", "killed"]


def test_runs_of_a_sweep_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("sft-10", "sft-2", "sft-1", "7", "sft"):
        write_run(tmp_path / name, SFT)
    assert [entry.name for entry in list_entries(tmp_path)] == ["7", "sft", "sft-1", "sft-2", "sft-10"]


@pytest.mark.parametrize("name", ["objective/score", "on_policy/divergence", "loss"])
def test_sparkline_is_labelled_by_its_metric(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "a", [{"kind": "train", "step": step, "loss": 0.0, name: 0.1 * step} for step in (1, 2)])
    assert f"<title>{name} over 2 steps</title>" in write_overview(tmp_path).read_text()


@pytest.mark.parametrize(("method", "error"), [("iterdir", FileNotFoundError), ("is_file", PermissionError)])
def test_folder_that_is_deleted_meanwhile_or_of_another_user_is_skipped(tmp_path, monkeypatch, method, error) -> None:
    write_run(tmp_path / "a", SFT)
    (tmp_path / "b").mkdir()
    call = getattr(Path, method)

    def refuse(path: Path) -> Any:
        if "b" in (path.name, path.parent.name):
            raise error(path)
        return call(path)

    monkeypatch.setattr(Path, method, refuse)
    assert [entry.name for entry in list_entries(tmp_path)] == ["a"]


def test_runs_are_read_once_and_listed_before_the_page_fails(recipes, tmp_path: Path, monkeypatch) -> None:
    """As for the runs of a colleague, in a folder that only they may write to."""
    write_run(tmp_path / "a", SFT)
    (tmp_path / "index.html").mkdir()
    reads: list[Path] = []
    monkeypatch.setattr(overview, "read_run", lambda path, names: reads.append(path) or read_run(path, names))
    assert "eval_loss 5 -> 2" in recipes("runs", tmp_path, code=2)
    assert reads == [tmp_path / "a"]


def test_overview_lists_pipeline_stages_in_order(tmp_path: Path) -> None:
    write_run(tmp_path / "z", SFT)
    (tmp_path / "z" / "report.html").write_text("")
    state = {
        "pipeline": [
            {"name": "first", "recipe": "sft", "output": "z", "about": HOSTILE},
            {"name": "second", "recipe": "dpo", "output": "a", "about": ""},
        ],
        "stages": {"first": {"status": "done", "seconds": 125}},
    }
    (tmp_path / "pipeline.json").write_text(json.dumps(state))
    html = write_overview(tmp_path).read_text()
    page = Page(html)
    assert page.text.index("first") < page.text.index("second")
    assert ("href", "z/report.html") in page.attributes
    assert page.elements.count("polyline") == 1
    assert page.elements.count("script") == 1
    assert "img" not in page.elements
    for words in ("1 of 2 done, sum of durations 2 min 5 s", "5 → 2", "not run"):
        assert words in page.text


def test_output_of_a_command_is_linked(tmp_path: Path) -> None:
    """A file, as of `recipes eval compare --output`, and a folder without a record."""
    stages = ("comparison.json", "pairs", "missing")
    state = {
        "pipeline": [{"name": name, "recipe": "eval", "output": name} for name in stages],
        "stages": {name: {"status": "done"} for name in stages},
    }
    (tmp_path / "pipeline.json").write_text(json.dumps(state))
    (tmp_path / "comparison.json").write_text("[]")
    (tmp_path / "pairs").mkdir()
    links = [value for name, value in Page(write_overview(tmp_path).read_text()).attributes if name == "href"]
    assert {"comparison.json", "pairs/"} <= set(links)
    assert not any(link.startswith("missing") for link in links)


def test_overview_of_moved_folder_is_unchanged(tmp_path: Path) -> None:
    write_run(tmp_path / "one" / "sft", SFT)
    state = {"pipeline": [{"name": "sft", "output": "sft"}], "stages": {"sft": {"status": "done"}}}
    (tmp_path / "one" / "pipeline.json").write_text(json.dumps(state))
    before = list_entries(tmp_path / "one")[0]
    (tmp_path / "one").rename(tmp_path / "two")
    after = list_entries(tmp_path / "two")[0]
    assert (before.figure, before.after, before.step) == (after.figure, after.after, after.step) == ("eval_loss", 2, 30)


@pytest.mark.parametrize(
    "record",
    [
        "{",
        "[]",
        '{"stages": 1}',
        '{"stages": {}, "pipeline": [3]}',
        '{"stages": {"a": [1]}, "pipeline": [{"name": "a"}]}',
    ],
)
def test_invalid_pipeline_record_is_tolerated(tmp_path: Path, record: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pipeline.json").write_text(record)
    assert run_recipes(["runs", str(tmp_path)]) in (0, 2)
    assert "is a bug" not in capsys.readouterr().err


def test_runs_command_prints_status_step_metric_and_age(tmp_path, recipes, monkeypatch) -> None:
    write_run(tmp_path / "sft", SFT, status="preempted")
    for file in (tmp_path / "sft").iterdir():
        os.utime(file, (0, 0))
    output = recipes("runs", tmp_path).splitlines()
    assert output[1].startswith("sft  sft     preempted  30    eval_loss 5 -> 2  2 min 0 s  ")
    assert output[1].endswith(" ago")
    assert output[2] == str(tmp_path / "index.html")
    monkeypatch.chdir(tmp_path)
    assert recipes("runs").splitlines()[2] == "index.html"
    (tmp_path / "runs").mkdir()
    assert "runs: has no run" in recipes("runs", code=2)
    recipes("runs", tmp_path / "none", code=2)
    (tmp_path / "empty").mkdir()
    assert "has no run and no pipeline" in recipes("report", tmp_path / "empty", code=2)
    assert str(tmp_path / "sft" / "report.html") in recipes("report", tmp_path / "sft")
    recipes("report", tmp_path)


def test_runs_command_escapes_control_characters_and_non_utf8_names(tmp_path: Path, recipes) -> None:
    write_run(tmp_path / "a\x1b[31m", SFT, status="done\x1b]0;owned\x07\n")
    try:
        write_run(tmp_path / os.fsdecode(b"b\xff"), SFT)
    except OSError:
        pytest.skip("the file system has UTF-8 names alone")
    (tmp_path / os.fsdecode(b"b\xff") / "report.html").write_text("")
    assert 'href="b%FF/report.html"' in write_overview(tmp_path).read_text()
    output = recipes("runs", tmp_path)
    assert "\x1b" not in output
    assert "\\udcff" in output


def test_sparkline_fits_box_and_keeps_ends() -> None:
    def read(curve: list[tuple[int, float]]) -> list[tuple[float, ...]]:
        return [tuple(map(float, point.split(","))) for point in draw_spark(curve).split()]

    points = read([(n, float(-n)) for n in range(1000)])
    assert len(points) <= 61
    assert points[0] == (0.0, 2.0)
    assert points[-1] == (120.0, 26.0)
    assert draw_spark([(1, 2.0)]) == ""
    assert {y for _, y in read([(1, 3.0), (2, 3.0)])} == {26.0}


def test_evaluation_entry_shows_model_and_first_score(tmp_path):
    scores = {"scores": {"acc": {"value": 0.25, "stderr": 0.1}}}
    record = {"model": {"name": "sft"}, "groups": {}, "tasks": {"pairs": scores, "other": scores}}
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / "eval.json").write_text(json.dumps(record))
    (entry,) = list_entries(tmp_path)
    assert (entry.kind, entry.status, show_figure(entry)) == ("eval", "done", "sft: pairs acc 0.25")
    for damaged in ("{", json.dumps(record | {"tasks": {"pairs": 3, "other": {"scores": {"acc": "x"}}}})):
        (tmp_path / "scores" / "eval.json").write_text(damaged)
        (entry,) = list_entries(tmp_path)
        assert show_figure(entry) == ""
