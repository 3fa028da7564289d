"""``load_best_model_at_end``: the final model, records, report and card are those of the best checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.distributed import sharding
from tests.evaluation.conftest import write_tasks
from tests.faults import recipe_runs
from tests.rows import read_rows

from recipes_lib.config.rules import METRICS
from recipes_lib.report.overview import describe_result
from recipes_lib.report.page import find_problems
from recipes_lib.report.run_files import read_run

# At this learning rate losses are not monotonic.
KEYS = {"learning_rate": 0.6, "lr_scheduler_type": "constant", "load_best_model_at_end": "true", "save_total_limit": 9}


def run(inputs: Path, name: str, folder: Path, **keys: Any) -> list[dict[str, Any]]:
    given = recipe_runs.make_keys(inputs, name, **{**KEYS, "num_sample_prompts": 0, **keys}, output_dir=folder)
    assert sharding.run_recipe(name, given) == 0
    return read_rows(folder / "metrics.jsonl")


def read_curve(events: list[dict[str, Any]], figure: str) -> list[tuple[int, float]]:
    return [(event["step"], float(event[figure])) for event in events if event["kind"] == "eval"]


def list_metrics(events: list[dict[str, Any]]) -> set[str]:
    names = {name for event in events if event["kind"] == "eval" for name in event if name.startswith("eval_")}
    return {name.removeprefix("eval_") for name in names}


def hash_weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_best_checkpoint_is_final_model_in_every_record(inputs: Path, tmp_path: Path) -> None:
    # The loss falls, so that the first checkpoint is the best one if more is better.
    keys = {"eval_steps": 2, "save_steps": 4, "max_steps": 12, "learning_rate": 1e-3, "greater_is_better": "true"}
    events = run(inputs, "dpo", tmp_path / "run", **keys)
    assert list_metrics(events) == set(METRICS["pairs"])
    curve = dict(read_curve(events, "eval_loss"))
    best = 4
    assert curve[4] > curve[8] > curve[12]
    assert hash_weights(tmp_path / "run") == hash_weights(tmp_path / "run" / f"checkpoint-{best}")
    event = {"kind": "best", "step": 12, "metric": "eval_loss", "best": curve[best], "best_step": best}
    assert json.loads((tmp_path / "run" / "run.json").read_text())["best_model"] == event == events[-1]
    files, card = read_run(tmp_path / "run"), (tmp_path / "run" / "README.md").read_text()
    assert files.find_figures()["eval_loss"] == curve[best]
    assert files.find_figures(12)["eval_loss"] == curve[12]
    assert f"| eval_loss | {curve[best]:.4f} |" in card.replace("\\", "")
    assert f"| weights | of step {best} of 12, the best by eval_loss |" in card.replace("\\", "")
    assert f"{files.held_out[-1]['eval_rewards/accuracies']:.4g}, 12 steps" in describe_result(files)
    # Resumed in another folder after a kill, before and after the last checkpoint: the same model.
    for step in (8, 12):
        for kept in {best, step}:
            sharding.cut(tmp_path / "run", tmp_path / f"killed at {step}", kept)
        again = run(inputs, "dpo", tmp_path / f"killed at {step}", **keys)
        assert again[-1] == event
        assert hash_weights(tmp_path / f"killed at {step}") == hash_weights(tmp_path / "run")


@pytest.mark.parametrize(("name", "figure"), [("sft", "perplexity"), ("pretrain", "bits_per_byte")])
def test_lower_is_better_for_perplexity_and_bits_per_byte(inputs: Path, tmp_path: Path, name: str, figure: str) -> None:
    keys = {"eval_steps": 1, "save_steps": 1, "max_steps": 4, "metric_for_best_model": figure}
    keys |= {"lr_scheduler_type": None} if name == "pretrain" else {}
    events = run(inputs, name, tmp_path, **keys)
    assert list_metrics(events) == set(METRICS["text"])
    curve = read_curve(events, f"eval_{figure}")[1:]
    best = json.loads((tmp_path / "run.json").read_text())["best_model"]
    assert (best["best_step"], best["best"]) == min(curve, key=lambda point: point[1])


def test_best_strategy_saves_steps_with_lower_held_out_loss(inputs: Path, tmp_path: Path) -> None:
    keys = {
        "save_strategy": "best",
        "save_steps": None,
        "load_best_model_at_end": None,
        "eval_steps": 1,
        "max_steps": 5,
    }
    curve = read_curve(run(inputs, "sft", tmp_path, **keys), "eval_loss")[1:]
    lowest = [step for step, loss in curve if loss == min(other for at, other in curve if at <= step)]
    assert 0 < len(lowest) < 5
    assert sorted(int(path.name.rpartition("-")[2]) for path in tmp_path.glob("checkpoint-*")) == lowest


def test_run_without_evaluated_checkpoint_reports_last_weights(inputs, tmp_path, capsys) -> None:
    run(inputs, "sft", tmp_path, eval_steps=1, save_steps=6, early_stopping_patience=2)
    assert "no checkpoint is of a step with a finite eval_loss; the last weights" in capsys.readouterr().err
    assert json.loads((tmp_path / "run.json").read_text())["best_model"] is None
    assert any("load_best_model_at_end" in problem for problem in find_problems(read_run(tmp_path)))


def test_step_at_end_of_epoch_is_evaluated_once(inputs: Path, tmp_path: Path) -> None:
    """A second evaluation would count against ``early_stopping_patience``."""
    tasks = write_tasks(tmp_path)
    benchmarks = {"eval_tasks": "[local_choice]", "eval_tasks_include_path": f"[{tasks}]", "eval_tasks_limit": 4}
    strategies = dict.fromkeys(("eval_strategy", "save_strategy"), "epoch")
    unset = dict.fromkeys(("eval_steps", "save_steps", "max_steps"))
    epochs = {"num_train_epochs": 2, "per_device_train_batch_size": 8, "test_split_size": 27}
    events = run(inputs, "sft", tmp_path / "run", **strategies, **unset, **epochs, **benchmarks, eval_tasks_steps=1)
    assert [step for step, _ in read_curve(events, "eval_loss")] == [0, 1, 2, 3, 4]
