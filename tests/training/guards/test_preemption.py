"""Preemption: agreement of all ranks, saving of the last step, and repetition of an interrupted evaluation."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.forked import FORKING, limit_forked
from tests.training.trajectories import assert_equal_weights, make_packs, make_trainer, weights_of
from torch import distributed
from torch.multiprocessing import start_processes
from transformers import TrainerState, TrainingArguments

from recipes_lib.errors import PreemptedError
from recipes_lib.stopping import STOP, StopPendingError
from recipes_lib.training.evaluation.held_out import share_rows
from recipes_lib.training.guards.preemption import raise_if_stop_pending, read_evaluation, stop_if_agreed
from recipes_lib.training.monitoring.callbacks import EVALUATION_KEY, EarlyStopping, MetricsCallback
from recipes_lib.training.monitoring.metrics import MetricsWriter, StepCounter, ThroughputMeter
from recipes_lib.training.monitoring.progress import TrainingProgress


def read_rows_until_stop(rank: int, stops_after: dict[int, int]) -> list[Any]:
    """Read the rows of a rank until the end or a stop, which ranks request after ``stops_after`` rows."""
    read: list[Any] = []
    try:
        for rows, _ in share_rows(14, 2, TrainingProgress(), "evaluate"):
            read += rows
            if len(read) >= stops_after.get(rank, 10**9):
                STOP.request(f"request of {rank}")
    except PreemptedError as error:
        return [*read, str(error)]
    return read


def run_process(rank: int, folder: Path) -> None:
    limit_forked()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = []
    for stops_after in ({}, {0: 4}, {1: 2}, {0: 2, 1: 2}):
        STOP.reset()
        STOP.is_deferred = True
        results.append(read_rows_until_stop(rank, stops_after))
    (folder / f"{rank}.json").write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.multiprocess
def test_ranks_stop_at_same_batch(tmp_path):
    start_processes(run_process, (tmp_path,), nprocs=2, start_method=FORKING.get_start_method())
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first[0] == [0, 1, 4, 5, 8, 9, 12, 13]
    assert first[1][:-1] == [0, 1, 4, 5]
    assert second[1][:-1] == [2, 3, 6, 7]
    assert first[1][-1] == second[1][-1] == "request of 0 on rank 0"
    assert (first[2], second[2]) == ([0, 1, "request of 1 on rank 1"], [2, 3, "request of 1 on rank 1"])
    assert first[3][-1] == second[3][-1] == "request of 0 on rank 0"


def test_stop_is_not_collective_outside_deferred():
    STOP.request("SIGTERM")
    stop_if_agreed()
    with pytest.raises(PreemptedError), STOP.deferred():
        stop_if_agreed()


def test_old_trainer_state_has_no_pending_evaluation(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert read_evaluation(args, TrainerState(stateful_callbacks=[])) == (-1, False)


class Hook:
    """Evaluation hook that records its steps and requests a stop at one of them."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.steps: list[int] = []
        self._stop_at = stop_at

    def __call__(self, model, step):
        if step == self._stop_at:
            STOP.request("SIGTERM")
            stop_if_agreed()
        self.steps.append(step)
        return {"loss": sum(parameter.sum().item() for parameter in model.parameters()), "step": step}


@pytest.mark.parametrize(
    ("step", "changed"),
    [
        pytest.param(2, {}, id="between steps"),
        pytest.param(5, {}, id="after the last epoch"),
        pytest.param(2, {"eval_strategy": "epoch", "save_steps": 2}, id="of an epoch whose last step is saved"),
    ],
)
def test_interrupted_evaluation_is_repeated_on_resume(tiny_model_dir, tmp_path, step, changed):
    keys = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
        "max_steps": 5,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 4,
        "metric_for_best_model": "eval_step",
        "greater_is_better": True,
    } | changed
    packs = make_packs()
    hook = Hook()
    uninterrupted, expected = make_trainer(tiny_model_dir, tmp_path / "uninterrupted", packs, hooks=[hook], **keys)
    uninterrupted.train()
    evaluated = hook.steps
    assert evaluated == ([0, 2, 4, 5] if keys["eval_strategy"] == "steps" else [0, 1, 2, 3, 4, 5])

    stopped, first = make_trainer(tiny_model_dir, tmp_path / "run", packs, hooks=[Hook(stop_at=step)], **keys)
    with pytest.raises(PreemptedError, match=f"SIGTERM: stopped after step {step}; checkpoint-{step} is complete"):
        stopped.train()
    STOP.reset()
    hook = Hook()
    resumed, second = make_trainer(tiny_model_dir, tmp_path / "run", packs, hooks=[hook], **keys)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))

    assert hook.steps == evaluated[evaluated.index(step) :]
    assert_equal_weights(weights_of(uninterrupted), weights_of(resumed))
    assert first.steps + second.steps == expected.steps
    assert resumed.state.best_metric == uninterrupted.state.best_metric
    assert resumed.state.best_global_step == uninterrupted.state.best_global_step


@pytest.mark.parametrize("delay", [0, 3], ids=["evaluated", "before eval_delay"])
def test_kill_between_save_and_evaluation_of_an_epoch_loses_no_evaluation(tiny_model_dir, tmp_path, delay):
    """Upstream saves the last step of an epoch first, so that the checkpoint does not have the evaluation."""
    keys = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "epoch", "eval_delay": delay}

    def train(hook, checkpoint=None):
        trainer, _ = make_trainer(
            tiny_model_dir, tmp_path / "run", make_packs(), hooks=[hook], gradient_accumulation_steps=2, **keys
        )
        counter, writer = StepCounter(), MetricsWriter(tmp_path / "metrics.jsonl")
        trainer.add_figures(MetricsCallback(counter, ThroughputMeter(counter), writer, trainer.observer.progress))
        trainer.train(resume_from_checkpoint=checkpoint)
        events = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        return [(event["kind"], event["step"]) for event in events]

    first, second = Hook(), Hook()
    expected = train(first)
    assert train(second, str(tmp_path / "run" / "checkpoint-2")) == expected
    assert second.steps == [step for step in first.steps if step >= 2]


def test_repeated_evaluation_stops_early(tiny_model_dir, tmp_path):
    keys = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 6, "save_strategy": "steps", "save_steps": 6}

    def make_stopping(hook):
        trainer, _ = make_trainer(tiny_model_dir, tmp_path / "run", make_packs(64), hooks=[hook], **keys)
        # A threshold that no evaluation reaches.
        writer = MetricsWriter(tmp_path / "metrics.jsonl")
        trainer.add_callback(EarlyStopping(2, math.inf, writer, trainer.observer.progress))
        return trainer

    with pytest.raises(PreemptedError, match="stopped after step 3"):
        make_stopping(Hook(stop_at=3)).train()
    STOP.reset()
    resumed = make_stopping(hook := Hook())
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert hook.steps == [3]
    assert resumed.state.global_step == 3


def test_save_strategy_no_saves_nothing_on_stop(tiny_model_dir, tmp_path):
    trainer, _ = make_trainer(tiny_model_dir, tmp_path / "run", make_packs(), hooks=[Hook(stop_at=2)], eval_steps=2,
                              eval_strategy="steps")  # fmt: skip
    with pytest.raises(PreemptedError, match="stopped after step 2; there was nothing to save"):
        trainer.train()
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_stop_between_epochs_saves_rng_state_of_last_step(tiny_model_dir, tmp_path):
    """The sampler of the next epoch draws before the stop is seen; with dropout, other states change the weights."""
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    tiny_model_dir = tmp_path / "model"
    config = json.loads((tiny_model_dir / "config.json").read_text()) | {"attention_dropout": 0.3}
    (tiny_model_dir / "config.json").write_text(json.dumps(config))
    keys = {"max_steps": 12, "save_strategy": "steps", "save_steps": 100, "per_device_train_batch_size": 4}
    packs = make_packs()
    uninterrupted, _ = make_trainer(tiny_model_dir, tmp_path / "uninterrupted", packs, **keys)
    uninterrupted.train()

    stopped, recorder = make_trainer(tiny_model_dir, tmp_path / "run", packs, **keys)
    steps_per_epoch = len(packs) // 4
    recorder.on_epoch_end = lambda *_, **__: STOP.request("SIGTERM")
    with pytest.raises(PreemptedError, match=f"checkpoint-{steps_per_epoch} is complete"):
        stopped.train()
    STOP.reset()
    resumed, _ = make_trainer(tiny_model_dir, tmp_path / "run", packs, **keys)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{steps_per_epoch}"))
    assert_equal_weights(weights_of(uninterrupted), weights_of(resumed))
    assert read_evaluation(resumed.args, resumed.state) == (-1, False)
    assert EVALUATION_KEY in stopped.state.stateful_callbacks


@pytest.mark.parametrize("max_steps", [3, 4], ids=["within an epoch", "end of an epoch"])
def test_resume_at_last_step_trains_no_further_step(tiny_model_dir, tmp_path, max_steps):
    keys = {"max_steps": max_steps, "save_strategy": "steps", "save_steps": 100, "lr_scheduler_type": "constant"}
    keys |= {"eval_strategy": "steps", "eval_steps": max_steps, "eval_on_start": True}
    packs, hook = make_packs(), Hook()
    finished, _ = make_trainer(tiny_model_dir, tmp_path / "run", packs, hooks=[hook], **keys)
    finished.train()
    resumed, recorder = make_trainer(tiny_model_dir, tmp_path / "run", packs, hooks=[hook], **keys)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{max_steps}"))
    assert (resumed.state.global_step, recorder.steps) == (max_steps, [])
    assert hook.steps == [0, max_steps]  # Not evaluated twice.
    assert_equal_weights(weights_of(finished), weights_of(resumed))


def test_stop_during_last_save_reports_checkpoint(tiny_model_dir, tmp_path):
    keys = {"max_steps": 5, "save_strategy": "steps", "save_steps": 5}
    trainer, recorder = make_trainer(tiny_model_dir, tmp_path / "run", make_packs(), **keys)
    recorder.on_save = lambda *_, **__: STOP.request("SIGTERM")
    # The message of a stop agreed by all ranks: an immediate one does not name the checkpoint.
    with pytest.raises(PreemptedError, match="step 5; checkpoint-5 is complete; run the same command to resume"):
        trainer.train()


@pytest.mark.parametrize(("moment", "saved"), [("evaluate", 3), ("_load_best_model", 1)])
def test_checkpoint_of_last_step_never_has_best_weights(tiny_model_dir, tmp_path, monkeypatch, moment, saved):
    evaluated = {}

    def evaluate(model, step):
        evaluated[step] = weights_of(trainer)
        return {"loss": float(step)}

    best = {"save_strategy": "best", "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(), hooks=[evaluate], max_steps=3, **best)
    function = getattr(trainer, moment)

    def stop_at_end(*args, **kwargs):
        if trainer.state.global_step == 3:
            STOP.request("SIGTERM")
        return function(*args, **kwargs)

    monkeypatch.setattr(trainer, moment, stop_at_end)
    with pytest.raises(PreemptedError, match=f"step 3; checkpoint-{saved} is complete"):
        trainer.train()
    for folder in tmp_path.glob("checkpoint-*"):
        stored = evaluated[int(folder.name.removeprefix("checkpoint-"))]
        assert_equal_weights(load_file(folder / "model.safetensors"), stored)


def test_raise_if_stop_pending_only_inside_deferred(monkeypatch):
    raise_if_stop_pending()
    STOP.request("SIGTERM")
    raise_if_stop_pending()
    monkeypatch.setattr(STOP, "is_deferred", True)
    with pytest.raises(StopPendingError):
        raise_if_stop_pending()
