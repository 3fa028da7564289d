"""``eval_datasets``: metrics equal those of the same rows as held-out set; selection of the best model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.distributed import sharding
from tests.faults import recipe_runs
from tests.rows import read_events, read_rows, write_rows

from recipes_lib.models.attention import kernels
from recipes_lib.models.heads import loss_head
from recipes_lib.publish.card import build_card
from recipes_lib.report.run_files import read_run
from recipes_lib.training.trainers import dpo_trainer, pair_trainer


@pytest.fixture(scope="module")
def inputs(inputs: Path) -> Path:
    """The last eight rows of each dataset are a second one."""
    for name in ("chats", "pairs", "documents"):
        rows = read_rows(inputs / f"{name}.jsonl")
        write_rows(inputs / f"{name}.jsonl", rows[:-8])
        write_rows(inputs / f"{name} web.jsonl", rows[-8:])
    return inputs


def run(inputs: Path, folder: Path, recipe: str, **keys: Any) -> list[dict[str, Any]]:
    data = recipe_runs.DATA[recipe]
    sets = json.dumps({"web": str(inputs / f"{data} web.jsonl"), "own": {"name": str(inputs / f"{data} web.jsonl")}})
    usual = {"max_steps": 2, "eval_steps": 1, "save_steps": 1, "eval_datasets": sets}
    if "dataset_test_split" in keys:
        usual["test_split_size"] = None
    if recipe != "reward":
        usual["num_sample_prompts"] = 0
    if recipe == "dpo":
        usual |= {"loss_type": '["sigmoid"]', "precompute_ref_log_probs": "true"}
    assert sharding.run_recipe(recipe, recipe_runs.make_keys(inputs, recipe, **usual | keys, output_dir=folder)) == 0
    return read_events(folder, "eval")


def record_checks(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of the checks before step 1, as they are called by recipes or trainers."""
    called: set[str] = set()

    def record(name: str, check: Callable[..., None], *args: Any) -> None:
        called.add(name)
        check(*args)

    monkeypatch.delitem(sys.modules, "sft", raising=False)  # Of recipes/lora.py: it has the checks by name.
    for module in (loss_head, kernels, dpo_trainer, pair_trainer):
        for name in {"verify_loss_head", "verify_isolation"} & vars(module).keys():
            monkeypatch.setattr(module, name, partial(record, name, getattr(module, name)))
    return called


@pytest.mark.parametrize(
    "recipe",
    [
        "sft",
        "pretrain",
        "dpo",
        pytest.param("lora", marks=pytest.mark.slow),
        pytest.param("reward", marks=pytest.mark.slow),
        pytest.param("distill", marks=pytest.mark.slow),
    ],
)
def test_named_dataset_has_metrics_of_held_out_set(
    inputs: Path, tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = record_checks(monkeypatch)
    own = str(inputs / f"{recipe_runs.DATA[recipe]} web.jsonl")
    events = run(inputs, tmp_path, recipe, dataset_test_split=own)
    assert len(events) >= 2
    if recipe != "reward":  # Layouts of pairs have checks of their own.
        # Rows of these runs of DPO and LoRA are padded.
        assert verified == {"verify_loss_head", *(["verify_isolation"] if recipe not in ("dpo", "lora") else [])}
    for event in events:
        figures = [name for name in event if name.startswith("eval_web_")]
        assert "eval_web_loss" in figures
        assert ("eval_web_rewards/accuracies" if recipe in ("dpo", "reward") else "eval_web_token_accuracy") in figures
        for name in figures:
            assert event[name] == pytest.approx(event[name.replace("web_", "")], rel=1e-5, abs=1e-6)
            assert event[name] == event[name.replace("web_", "own_")]
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["data"]["eval_datasets"].keys() == {"web", "own"}


def test_named_datasets_alone_select_best_model(inputs: Path, tmp_path: Path) -> None:
    keys = {"load_best_model_at_end": "true", "metric_for_best_model": "web_loss", "learning_rate": 0.5}
    events = run(inputs, tmp_path, "sft", test_split_size="null", max_steps=3, save_total_limit=9, **keys)
    assert [event["eval_loss"] for event in events] == [pytest.approx(event["eval_web_loss"]) for event in events]
    best = min((event for event in events if event["step"]), key=lambda event: float(event["eval_web_loss"]))
    state = json.loads(max(tmp_path.glob("checkpoint-*")).joinpath("trainer_state.json").read_text())
    assert state["best_metric"] == best["eval_web_loss"]
    read = read_run(tmp_path)
    card = build_card(tmp_path, read.facts, {name: read.evaluations[-1][name] for name in ("eval_web_loss",)})
    assert "eval_web_loss" in card.replace("\\", "")
