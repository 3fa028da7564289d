"""The adapter on upstream's own Trainer: what it writes, what it leaves out of the clock, what it resumes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from recipes_lib.training.monitoring.callbacks import MetricsCallback
from recipes_lib.training.monitoring.metrics import MetricsWriter, StepCounter, ThroughputMeter
from recipes_lib.training.monitoring.progress import PlainProgress


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.weight - x) ** 2).mean()}


class ToyTrainer(Trainer):
    """Counts two tokens and one target a row; training takes a second a step, everything else an hour."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.now = 0.0
        self.counter = StepCounter()
        self.meter = ThroughputMeter(self.counter, clock=lambda: self.now)
        self.stream = io.StringIO()
        defaults: dict[str, Any] = {"max_steps": 6, "logging_steps": 2, "save_strategy": "no"}
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            **defaults | options,
        )
        writer = MetricsWriter(folder / "metrics.jsonl")
        callback = MetricsCallback(self.counter, self.meter, writer, PlainProgress(self.stream))
        rows = [{"x": torch.ones(2)}] * 8
        super().__init__(model=Toy(), args=arguments, train_dataset=rows, eval_dataset=rows, callbacks=[callback])

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.now += 1
        self.counter.add(4, 2, 1)
        return super().training_step(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.now += 3600
        figures = {"eval_loss": 0.5, "eval_stop_rate": 1.0}
        self.log(figures)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, figures)
        return figures

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.now += 3600
        super()._save_checkpoint(*args, **kwargs)


def read_events(folder: Path, kind: str) -> list[Any]:
    events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [event for event in events if event["kind"] == kind]


def test_every_log_is_one_event_with_the_schema(tmp_path: Path) -> None:
    trainer = ToyTrainer(tmp_path)
    trainer.train()

    events = read_events(tmp_path, "train")
    assert [event["step"] for event in events] == [2, 4, 6]
    assert [event["num_tokens"] for event in events] == [8, 16, 24]
    assert [event["num_target_tokens"] for event in events] == [4, 8, 12]
    assert events[0].keys() == {
        "kind", "step", "epoch", "loss", "learning_rate", "grad_norm", "token_accuracy", "num_tokens",
        "num_target_tokens", "tokens_per_second", "target_tokens_per_second", "mfu", "num_flops",
        "memory_bytes", "seconds",
    }  # fmt: skip
    assert events[0]["token_accuracy"] == 0.5
    assert "step 6/6  loss" in trainer.stream.getvalue()


def test_trackers_behind_it_see_the_throughput(tmp_path: Path) -> None:
    seen = []

    class Tracker(TrainerCallback):
        def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            seen.append(logs)

    trainer = ToyTrainer(tmp_path)
    trainer.add_callback(Tracker)
    trainer.train()

    assert seen[0]["target_tokens_per_second"] == 2.0


@pytest.mark.parametrize(
    "options",
    [
        {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 2, "eval_on_start": True},
        {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 3},
        {"eval_strategy": "epoch", "save_strategy": "epoch"},
        {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"},
    ],
)
def test_evaluations_and_checkpoints_take_no_training_time(tmp_path: Path, options: dict[str, Any]) -> None:
    ToyTrainer(tmp_path, **options).train()

    events = read_events(tmp_path, "train")
    assert [event["seconds"] for event in events] == [event["step"] for event in events]
    assert {event["target_tokens_per_second"] for event in events} == {2.0}


def test_an_evaluation_is_an_event_of_its_own(tmp_path: Path) -> None:
    ToyTrainer(tmp_path, eval_strategy="steps", eval_steps=3, eval_on_start=True).train()

    events = read_events(tmp_path, "eval")
    assert [event["step"] for event in events] == [0, 3, 6]
    assert (events[0]["eval_loss"], events[0]["eval_stop_rate"]) == (0.5, 1.0)
    assert "tokens_per_second" not in events[0]


def test_a_resumed_run_goes_on_counting_and_logs_every_step_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 2}
    ToyTrainer(tmp_path / "whole", **options).train()
    killed = ToyTrainer(tmp_path / "killed", **options)
    killed.train()

    resumed = ToyTrainer(tmp_path / "killed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "killed" / "checkpoint-3"))

    whole, again = (read_events(tmp_path / name, "train") for name in ("whole", "killed"))
    assert [event["step"] for event in again] == [2, 4, 6]
    for name in ("num_tokens", "num_target_tokens", "seconds"):
        assert [event[name] for event in again] == [event[name] for event in whole], name


def test_upstreams_closing_summary_is_no_event(tmp_path: Path) -> None:
    ToyTrainer(tmp_path, max_steps=1, logging_steps=1).train()

    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
