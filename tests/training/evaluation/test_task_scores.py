"""Benchmark scores during training, against an evaluation of the saved model, without effect on training."""

from __future__ import annotations

import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.distributed import sharding
from tests.evaluation.conftest import write_tasks
from tests.faults import recipe_runs
from tests.rows import read_rows
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes_lib.cli import main as run_recipes
from recipes_lib.config.evaluation import EvalConfig
from recipes_lib.config.schema import EvaluationConfig
from recipes_lib.errors import ConfigError, DataError, PreemptedError
from recipes_lib.evaluation.harness import evaluate_model
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.publish.card import build_card
from recipes_lib.report.page import build_report
from recipes_lib.report.run_files import read_run
from recipes_lib.stopping import STOP
from recipes_lib.training.evaluation import task_scores
from recipes_lib.training.evaluation.task_scores import EvaluateTasks, build_task_scores, load_training_tasks
from recipes_lib.training.guards.watchdog import WATCHDOG

NAMES = ["local_group", "local_written", "local_rolling"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    recipe_runs.write_inputs(folder)
    return folder


def build(tasks: Path, model: Path, every: int | None = None, names: list[str] = NAMES) -> EvaluateTasks:
    keys = EvaluationConfig(
        eval_tasks=names, eval_tasks_include_path=[str(tasks)], eval_tasks_limit=20, eval_tasks_steps=every
    )
    (hook,) = build_task_scores(keys, AutoTokenizer.from_pretrained(model), 512, 4)
    return hook


def read_states() -> list[Any]:
    numpy_state: Any = np.random.get_state()  # noqa: NPY002 - the global generator must not change
    return [random.getstate(), numpy_state[1].tolist(), torch.get_rng_state().tolist()]


def test_scores_equal_evaluation_of_saved_model(tasks: Path, inputs: Path, tmp_path: Path) -> None:
    folder = inputs / "model"
    keys = {"include_path": [str(tasks)], "limit": 20, "use_cpu": True, "output_dir": str(tmp_path)}
    record = evaluate_model(EvalConfig(model_name_or_path=str(folder), tasks=NAMES, batch_size=4, **keys))
    assert record is not None
    expected = {
        f"{name}_{metric}": score["value"]
        for name, found in {**record["groups"], **record["tasks"]}.items()
        for metric, score in found["scores"].items()
        if name not in ("local_choice", "local_other")
    }
    assert {"local_group_acc", "local_written_exact_match", "local_rolling_bits_per_byte"} <= expected.keys()

    model = AutoModelForCausalLM.from_pretrained(folder).train()
    add_loss_head(model)
    hook = build(tasks, folder)
    hook.tokenizer.pad_token = None
    model.model.layers[0].eval()  # A frozen part.
    before, states = {name: tensor.clone() for name, tensor in model.state_dict().items()}, read_states()
    modes, tokenizer = [module.training for module in model.modules()], repr(hook.tokenizer)
    for step in (0, 7):
        assert hook(model, step) == pytest.approx(expected, rel=1e-5)
    assert read_states() == states
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert repr(hook.tokenizer) == tokenizer
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_adapter_with_trained_tied_embeddings_is_evaluated_on_its_base(tasks: Path, inputs: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(inputs / "model", tie_word_embeddings=True)
    hook = build(tasks, inputs / "model", names=["local_rolling"])
    bare = hook(model, 0)
    copied: dict[str, Any] = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False, **copied))
    changed = hook(adapted, 0)
    with adapted.disable_adapter():
        assert hook(adapted, 0) == bare
    assert changed != bare


def test_progress_bars_are_hidden_but_not_other_messages(tasks, inputs, capsys) -> None:
    def warn(*_: Any) -> None:
        thread = threading.Thread(target=lambda: sys.stderr.write("no progress for 600 s\n"))
        thread.start()
        thread.join()

    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    hook = build(tasks, inputs / "model", names=["local_rolling"])
    model.register_forward_hook(warn)
    tqdm._instances.clear()  # Bars left open by earlier tests would move the cursor.
    capsys.readouterr()
    hook(model, 0)
    assert set(capsys.readouterr().err.splitlines()) == {"no progress for 600 s"}


def test_other_ranks_wait_in_a_silent_phase(tasks: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_scores, "get_rank", lambda: 1)
    monkeypatch.setattr(task_scores, "compute_on_main", lambda _: {WATCHDOG.phase: 1.0})
    hook = build(tasks, inputs / "model", names=["local_rolling"])
    assert hook(torch.nn.Module(), 0) == {"waiting for benchmark scores": 1.0}


def test_non_finite_logits_are_an_error(tasks: Path, inputs: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    with pytest.raises(DataError, match="not finite"):
        build(tasks, inputs / "model")(model, 0)


def test_stop_request_ends_the_evaluation_at_the_next_batch(tasks: Path, inputs: Path, monkeypatch) -> None:
    """All questions may take longer than the grace time of a scheduler."""
    monkeypatch.setattr(STOP, "reason", None)
    model: Any = AutoModelForCausalLM.from_pretrained(inputs / "model")
    num_batches = [0]

    def stop(*_: Any) -> None:
        num_batches[0] += 1
        STOP.request("SIGTERM")

    model.register_forward_hook(stop)
    with pytest.raises(PreemptedError, match=r"^SIGTERM$"), STOP.deferred():
        build(tasks, inputs / "model")(model, 0)
    assert num_batches == [1]


def test_tasks_of_a_group_without_a_score_have_theirs(tasks: Path, inputs: Path, tmp_path: Path) -> None:
    for name in ("choice", "other"):
        (tmp_path / f"{name}.yaml").write_text((tasks / f"{name}.yaml").read_text())
    (tmp_path / "group.yaml").write_text(json.dumps({"group": "listed", "task": ["local_choice", "local_other"]}))
    model: Any = AutoModelForCausalLM.from_pretrained(inputs / "model")
    scores = build(tmp_path, inputs / "model", names=["listed"])(model, 0)
    assert {"local_choice_acc", "local_other_acc"} <= scores.keys()


def test_metric_that_fails_is_an_error_of_the_task(tasks: Path, inputs: Path, tmp_path: Path) -> None:
    """F1 of more than two classes needs an average."""
    task = json.loads((tasks / "choice.yaml").read_text())
    (tmp_path / "f1.yaml").write_text(json.dumps(task | {"metric_list": [{"metric": "f1", "aggregation": "f1"}]}))
    model: Any = AutoModelForCausalLM.from_pretrained(inputs / "model")
    with pytest.raises(ConfigError, match="tasks: local_choice: their metrics cannot be computed: ValueError"):
        build(tmp_path, inputs / "model", names=["local_choice"])(model, 0)


@pytest.mark.parametrize(
    ("name", "positions", "message"),
    [
        ("local_broken", 512, "do not fit its first row"),
        ("local_code", 512, "runs the code that the model writes"),
        ("local_written", 8, "an answer of 8 tokens does not fit the 8 positions"),
    ],
)
def test_unusable_task_is_rejected(tasks: Path, name: str, positions: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_training_tasks(EvaluationConfig(eval_tasks=[name], eval_tasks_include_path=[str(tasks)]), positions)
    (problem,) = caught.value.problems
    assert problem.where.startswith("eval_tasks")
    assert message in f"{problem.found}; {problem.remedy}"


def train(inputs: Path, folder: Path, recipe: str, **keys: Any) -> list[dict[str, Any]]:
    defaults = {"max_steps": 5, "logging_steps": 1, "save_steps": 5}
    flags = recipe_runs.make_keys(inputs, recipe, **defaults | keys, output_dir=folder)
    assert sharding.run_recipe(recipe.split()[0], flags) == 0
    return read_rows(folder / "metrics.jsonl")


@pytest.mark.parametrize(
    "recipe",
    ["sft", pytest.param("pretrain", marks=pytest.mark.slow), pytest.param("dpo adapter", marks=pytest.mark.slow)],
)
def test_task_scores_do_not_change_training(inputs: Path, tasks: Path, tmp_path: Path, recipe: str) -> None:
    keys = {"eval_tasks": json.dumps(NAMES), "eval_tasks_include_path": json.dumps([str(tasks)])}
    runs = [
        train(inputs, tmp_path / str(at), recipe, **more)
        for at, more in enumerate(({}, {**keys, "eval_tasks_steps": 2, "eval_tasks_limit": 5}))
    ]
    figures = [
        [{key: event[key] for key in event if key in ("step", "loss", "grad_norm")} for event in run if "loss" in event]
        for run in runs
    ]
    assert figures[0] == figures[1]
    assert len(figures[0]) == 5
    scored = [event for event in runs[1] if "eval_local_group_acc" in event]
    assert [event["step"] for event in scored] == [0, 2, 4, 5]
    assert [event["step"] for event in runs[1] if "eval_loss" in event] == [0, 2, 4, 5]
    assert {"eval_local_written_exact_match", "eval_local_rolling_bits_per_byte"} <= scored[0].keys()
    assert not any("local_choice" in key for key in scored[0])


def test_task_score_selects_best_model(inputs, tasks, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("recipes_lib.report.page.draw_charts", lambda run, folder: [])
    keys = {"eval_tasks": "[local_choice]", "eval_tasks_include_path": json.dumps([str(tasks)]), "eval_steps": 1}
    best = {"save_steps": 1, "load_best_model_at_end": "true", "learning_rate": 0.05, "max_steps": 3}
    metric = {"metric_for_best_model": "local_choice_acc", "save_total_limit": 9, "test_split_size": 6}
    events = train(inputs, tmp_path, "sft", **keys, **best, **metric)
    scores = [float(event["eval_local_choice_acc"]) for event in events if event["kind"] == "eval" and event["step"]]
    assert len(set(scores)) > 1
    state = json.loads(max(tmp_path.glob("checkpoint-*")).joinpath("trainer_state.json").read_text())
    assert state["best_metric"] == max(scores)
    run = read_run(tmp_path)
    last = {name: value for name, value in run.evaluations[-1].items() if name.startswith("eval_local")}
    assert "eval_local_choice_acc" in build_card(tmp_path, run.facts, last).replace("\\", "")
    assert "local choice acc" in build_report(tmp_path).read_text()


def test_missing_metric_for_best_model_is_a_config_error(inputs, tasks, tmp_path, capsys) -> None:
    keys = {"eval_tasks": "[local_choice]", "eval_tasks_include_path": json.dumps([str(tasks)]), "eval_tasks_steps": 4}
    metric = {"metric_for_best_model": "local_choice_acc", "eval_steps": 1, "max_steps": 2, "save_steps": 1}
    flags = recipe_runs.make_keys(inputs, "sft", **keys, **metric, eval_on_start="false", output_dir=tmp_path)
    assert sharding.run_recipe("sft", flags) == 2
    assert "the evaluation of step 1 has no `eval_local_choice_acc`" in " ".join(capsys.readouterr().err.split())


def test_check_reports_number_of_questions_and_errors(inputs, tasks, tmp_path, capsys) -> None:
    def check(name: str) -> tuple[int, str]:
        keys = {"eval_tasks": f"[{name}]", "eval_tasks_include_path": json.dumps([str(tasks)]), "eval_tasks_limit": 5}
        flags = recipe_runs.make_keys(inputs, "sft", **keys, output_dir=tmp_path)
        code = run_recipes(["check", "--recipe", "sft", *(f"--{key}={value}" for key, value in flags.items())])
        return code, "".join(capsys.readouterr())

    code, output = check("local_written")
    assert "local_written: 5 of 9 questions" in output
    code, output = check("local_code")
    assert code == 2
    assert "eval_tasks: local_code: runs the code" in " ".join(output.split())
