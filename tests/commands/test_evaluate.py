"""``recipes eval``, ``eval compare``, ``eval watch`` and ``recipes check`` of an evaluation."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests import tiny
from tests.commands.test_export import build, write_model_checkpoint
from tests.evaluation.conftest import write_tasks
from tests.locks import locked

from recipes_lib.cli import main as run_recipes
from recipes_lib.commands.evaluate import _parse, describe
from recipes_lib.pipelines.runner import list_figures
from recipes_lib.training.checkpoints.manifest import write_complete


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with ``run.json``, evaluated on local tasks, in a path with a space."""
    folder = tmp_path_factory.mktemp("a folder")
    tasks = write_tasks(folder)
    for seed, name in enumerate(("one", "two")):
        save_run(folder / name, seed)
        flags = ["--tasks", "local_choice,local_rolling", "--include_path", str(tasks), "--use_cpu"]
        assert run_recipes(["eval", str(folder / name), *flags]) == 0
    return folder


def save_run(folder: Path, seed: int) -> None:
    tiny.save_model(folder, tiny.build_tokenizer(), seed=seed)
    record = {"stage": "sft", "status": "done", "config": {"output_dir": str(folder), "dataset_name": "d"}}
    (folder / "run.json").write_text(json.dumps(record))


def read_card(folder: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the model card and the metrics of its ``model-index`` by dataset."""
    card = (folder / "README.md").read_text().replace("\\", "")
    (model,) = yaml.safe_load(card.split("---")[1]).get("model-index") or [{"results": []}]
    return card, {one["dataset"]["name"]: one["metrics"][0] for one in model["results"]}


def test_scores_are_in_record_card_and_reports(evaluated: Path) -> None:
    record = json.loads((evaluated / "one" / "eval" / "eval.json").read_text())
    acc = record["tasks"]["local_choice"]["scores"]["acc"]["value"]
    run = json.loads((evaluated / "one" / "run.json").read_text())
    assert run["scores"]["local_choice"]["scores"]["acc"]["value"] == acc
    card, listed = read_card(evaluated / "one")
    assert (listed["local_choice"]["name"], listed["local_choice"]["value"]) == ("acc", acc)
    assert f"local_choice | acc | {acc:.4f}" in card
    assert "local_choice, acc" in (evaluated / "one" / "report.html").read_text()
    assert "local_choice" in (evaluated / "one" / "eval" / "report.html").read_text()


def test_record_that_takes_no_scores_is_a_warning(evaluated: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    record = json.loads((evaluated / "one" / "eval" / "eval.json").read_text())
    monkeypatch.setattr("recipes_lib.evaluation.harness.evaluate_model", lambda config: record)
    for name, text in (
        ("of-another-program", '{"stage": 3}'),
        ("of-a-stranger", '{"stage": "sft", "config": {}, "scores": 5}'),
        ("read-only", '{"stage": "sft", "config": {}}'),
    ):
        folder = tmp_path / name
        shutil.copytree(evaluated / "one" / "eval", folder / "eval")
        (folder / "run.json").write_text(text)
        (folder / "run.json.partial").mkdir()  # Where a new record would be written.
        capsys.readouterr()
        assert run_recipes(["eval", str(folder), "--tasks", "local_choice", "--output_dir", str(folder / "eval")]) == 0
        printed = capsys.readouterr()
        assert "local_choice: acc" in printed.out
        assert "card and report of the model lack these scores" in printed.err
        assert (folder / "run.json").read_text() == text


def test_card_lists_groups_and_marks_limited_scores(recipes, evaluated: Path) -> None:
    folder = evaluated / "three"
    save_run(folder, 3)
    flags = ["--tasks", "local_group", "--include_path", str(evaluated / "tasks"), "--use_cpu"]
    recipes("eval", folder, *flags, "--limit", "5")
    card, listed = read_card(folder)
    assert "| local_group | acc |" in card
    assert "first 5 of each task" in card
    assert "local_group" not in listed
    recipes("eval", folder, *flags)
    card, listed = read_card(folder)
    assert "| local_group | acc |" in card
    assert "local_other" not in card
    record = json.loads((folder / "eval" / "eval.json").read_text())
    score = record["groups"]["local_group"]["scores"]["acc"]
    assert record["groups"]["local_group"]["num_questions"] == 72
    assert score["value"] == record["tasks"]["local_choice"]["scores"]["acc"]["value"]
    assert listed["local_group"]["value"] == score["value"]
    assert listed["local_group"]["args"] == {"stderr": score["stderr"]}
    assert list_figures(folder)["local_group.acc"] == score["value"]
    assert "local_group, acc" in (folder / "report.html").read_text()
    assert "local_group" in (folder / "eval" / "report.html").read_text()


def test_compare_writes_confidence_intervals(evaluated: Path, recipes) -> None:
    table = evaluated / "a new folder" / "table.json"
    assert "95 % interval" in recipes("eval", "compare", evaluated / "one", evaluated / "two", "--output", table)
    rows = json.loads(table.read_text())
    assert {(row["task"], row["metric"]) for row in rows} >= {("local_choice", "acc"), ("local_choice", "acc_norm")}
    assert all(row["low"] <= row["other"] - row["base"] <= row["high"] for row in rows)
    recipes("eval", "compare", evaluated / "one", code=2)
    recipes("eval", "compare", evaluated / "one", evaluated / "tasks", code=2)


def test_check_needs_no_weights(evaluated: Path, recipes) -> None:
    path = evaluated / "eval.yaml"
    path.write_text(
        f"model_name_or_path: {evaluated}/one\ntasks: [local_choice, local_code]\ninclude_path: ['{evaluated}/tasks']\n"
    )
    assert "confirm_run_unsafe_code: true" in recipes("check", "--config", path, code=2)
    output = recipes("check", "--config", path, "--confirm_run_unsafe_code")
    assert "local_choice: 36 questions, 1 example\n" in output
    assert output.endswith("ready to evaluate\n")


def test_help_needs_no_extra(recipes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    assert recipes("eval", "--help").startswith("usage: recipes eval MODEL --tasks core,gsm8k")
    assert "pip install 'recipes-lib[eval]'" in recipes("eval", tmp_path, "--tasks", "core", code=2)


@pytest.mark.parametrize("words", [["--tasks", "a, b"], ["--tasks=a,b"], ["--tasks", '["a", "b"]'], ["--tasks=[a, b]"]])
def test_task_lists_have_commas_or_are_json(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    config = _parse([str(tmp_path), *words, "--include_path=x,y"])
    assert (config.tasks, config.include_path) == (["a", "b"], ["x", "y"])


def test_truncated_questions_and_scored_reasoning_are_warnings() -> None:
    task = {"scores": {"acc": {"value": 0.5, "stderr": 0.1}}, "num_questions": 4, "num_cut": 3, "num_empty": 0}
    task |= {"num_reasoning": 1}
    group = {"scores": {"acc": {"value": 0.25, "stderr": None}}, "num_questions": 9}
    *lines, last = describe({"groups": {"g": group}, "tasks": {"t": task}})
    assert lines == [
        "g: acc 0.2500, 9 questions",
        "t: acc 0.5000 ± 0.1960, 4 questions",
        "warning: t: 3 of 4 questions did not fit and were truncated at the start",
    ]
    assert last.startswith("warning: t: 1 of 4 questions have an answer whose reasoning")


def write_checkpoint(run: Path, step: int, *, is_complete: bool = True) -> Path:
    folder = run / f"checkpoint-{step}"
    tiny.save_model(folder, tiny.build_tokenizer(), seed=step)
    (folder / "optimizer.pt").write_bytes(b"state")
    if is_complete:
        write_complete(folder, step=step)
    return folder


def write_status(run: Path, status: str) -> None:
    run.mkdir(exist_ok=True)
    (run / "run.json").write_text(json.dumps({"stage": "sft", "status": status, "config": {}}))


def run_here(words: Sequence[Any], **_: Any) -> subprocess.CompletedProcess[str]:
    """Stand-in for ``subprocess.run``: run the command in this process."""
    assert words[:4] == [sys.executable, "-P", "-m", "recipes_lib.cli"]
    return subprocess.CompletedProcess(words, run_recipes([str(word) for word in words[4:]]))


def test_watch_evaluates_each_complete_checkpoint_once(evaluated, tmp_path, monkeypatch, recipes) -> None:
    monkeypatch.setattr("subprocess.run", run_here)
    run = tmp_path / "a run"
    write_status(run, "done")
    first, _ = write_checkpoint(run, 2), write_checkpoint(run, 4, is_complete=False)
    before = {file.name: file.read_bytes() for file in first.iterdir()}
    command = ["eval", "watch", str(run), "--tasks", "local_choice", "--include_path", str(evaluated / "tasks")]
    assert "checkpoint-2" in recipes(*command, "--use_cpu")
    results = run / "eval" / "checkpoint-2"
    assert json.loads((results / "eval.json").read_text())["tasks"]["local_choice"]["num_questions"] == 36
    assert {file.name: file.read_bytes() for file in first.iterdir()} == before
    assert not (results / "model").exists()
    assert [folder.name for folder in (run / "eval").iterdir()] == ["checkpoint-2"]
    assert "checkpoint-2" not in recipes(*command, "--use_cpu")
    other = [*command, "--use_cpu", "--limit", "3"]
    assert "checkpoint-2: holds results with another value of limit" in recipes(*other, code=2)
    (results / "watch.json").unlink()  # As after `recipes eval`.
    assert "checkpoint-2: holds results with another value of limit" in recipes(*other, code=2)
    recipes(*other, "--output_dir", tmp_path / "others")
    found = json.loads((tmp_path / "others" / "checkpoint-2" / "eval.json").read_text())
    assert found["tasks"]["local_choice"]["num_questions"] == 3
    assert "--limt: unknown key `limt`" in recipes(*command, "--limt", "3", code=2)
    recipes("eval", "watch", tmp_path / "none", code=2)


class RecordedCommands:
    """Stand-in for ``subprocess.run``: record the commands, and write the result of an evaluation."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.code = 0

    def __call__(self, words: Sequence[Any], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(words[4])
        if words[4] == "export":
            return run_here(words)
        assert (Path(words[5]) / "model.safetensors").exists()
        if not self.code:
            (Path(words[words.index("--output_dir") + 1]) / "eval.json").write_text("{}")
        return subprocess.CompletedProcess(words, self.code)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedCommands:
    monkeypatch.setattr("subprocess.run", recorded := RecordedCommands())
    return recorded


def test_watch_follows_run_until_it_ends(recipes, recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    write_status(run, "running")
    write_checkpoint(run, 2)
    (run / "metrics.jsonl").touch()  # Written just now, which counts only if no lock was seen.
    with locked(run / "_lock") as trainer:
        num_commands = []

        def sleep(_: float) -> None:
            num_commands.append(len(recorded.commands))
            assert len(num_commands) < 3, "it waits for a run that has ended"
            if len(num_commands) == 2:
                write_checkpoint(run, 4)
                trainer.kill()  # `run.json` still says running.
                trainer.wait()

        monkeypatch.setattr("time.sleep", sleep)
        recipes("eval", "watch", run, "--tasks", "core")
    assert num_commands == [1, 1]
    assert recorded.commands == ["eval", "eval"]


@pytest.mark.parametrize("last", [0, 2**33], ids=["hours ago", "in the future"])
def test_watch_follows_run_whose_lock_another_machine_holds(
    recipes, recorded, tmp_path: Path, monkeypatch, last: int
) -> None:
    write_status(tmp_path, "running")
    write_checkpoint(tmp_path, 2)
    (metrics := tmp_path / "metrics.jsonl").write_text("{}")

    def sleep(_: float) -> None:
        write_checkpoint(tmp_path, 4)
        os.utime(metrics, (last, last))

    monkeypatch.setattr("time.sleep", sleep)
    recipes("eval", "watch", tmp_path, "--tasks", "core")
    assert recorded.commands == ["eval", "eval"]


@pytest.fixture
def sharded(tmp_path: Path, tiny_tokenizer_dir: Path) -> Path:
    """A finished run with a sharded checkpoint."""
    write_status(tmp_path / "run", "done")
    write_model_checkpoint(tmp_path / "run" / "checkpoint-2", build("untied"), tiny_tokenizer_dir)
    return tmp_path / "run"


def test_watch_exports_sharded_checkpoint_and_stops_on_error(recipes, recorded, sharded: Path) -> None:
    recipes("eval", "watch", sharded, "--tasks", "core")
    assert recorded.commands == ["export", "eval"]
    (sharded / "eval" / "checkpoint-2" / "eval.json").unlink()
    for recorded.code, code in ((2, 2), (-signal.SIGKILL, 137)):
        assert f"its evaluation ended with exit code {code}" in recipes(
            "eval", "watch", sharded, "--tasks", "core", code=code
        )


def test_watch_evaluates_finished_export_of_deleted_checkpoint(recipes, recorded, sharded: Path, monkeypatch) -> None:
    def run_and_delete(words: Sequence[Any], **_: Any) -> subprocess.CompletedProcess[str]:
        done = recorded(words)
        (sharded / "checkpoint-2" / "COMPLETE.json").unlink(missing_ok=True)
        return done

    monkeypatch.setattr("subprocess.run", run_and_delete)
    recipes("eval", "watch", sharded, "--tasks", "core")
    assert recorded.commands == ["export", "eval"]


def test_watch_skips_checkpoint_deleted_while_linking(recipes, recorded, tmp_path: Path, monkeypatch) -> None:
    run = tmp_path / "run"
    write_status(run, "done")
    checkpoint = write_checkpoint(run, 2)
    link = os.link

    def link_and_delete(file: Path, copy: Path) -> None:
        link(file, copy)
        (checkpoint / "config.json").unlink(missing_ok=True)

    monkeypatch.setattr("os.link", link_and_delete)
    assert "checkpoint-2: skipped, the run has deleted it" in recipes("eval", "watch", run, "--tasks", "core")
    assert recorded.commands == []
    assert not list((run / "eval").glob("*/*"))
