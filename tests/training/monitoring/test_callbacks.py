"""Trainer callbacks on upstream's Trainer: metrics, loss terms, weight norms, early stopping, trackers."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.rows import read_events
from tests.training.configurations import build_recipe
from tests.training.pretraining import build_config, run_recipe
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers import trainer as trainer_module

from recipes_lib.errors import ConfigError
from recipes_lib.training.monitoring import callbacks
from recipes_lib.training.monitoring.callbacks import (
    MetricsCallback,
    TermMetrics,
    Trackers,
    WeightMonitor,
    choose_sample,
    find_exhausted,
    verify_trackers,
)
from recipes_lib.training.monitoring.metrics import MetricsWriter, StepCounter, ThroughputMeter
from recipes_lib.training.monitoring.progress import PlainProgress


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.weight - x) ** 2).mean()}


class ToyTrainer(Trainer):
    """Trainer on a simulated clock: a step takes one second, an evaluation or a save one hour."""

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


def test_log_is_written_as_one_event(tmp_path: Path) -> None:
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


def test_last_step_is_logged_between_multiples(tmp_path: Path) -> None:
    ToyTrainer(tmp_path, max_steps=5).train()
    events = read_events(tmp_path, "train")
    assert [(event["step"], event["num_tokens"]) for event in events] == [(2, 8), (4, 16), (5, 20)]


def test_later_callbacks_receive_throughput(tmp_path: Path) -> None:
    seen = []

    class Tracker(TrainerCallback):
        def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            seen.append(logs)

    trainer = ToyTrainer(tmp_path)
    trainer.add_callback(Tracker)
    trainer.train()

    assert seen[0]["target_tokens_per_second"] == 2.0


INTERRUPTIONS: list[dict[str, Any]] = [
    {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 2, "eval_on_start": True},
    {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 3},
    {"eval_strategy": "epoch", "save_strategy": "epoch"},
    {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"},
]


@pytest.mark.parametrize("options", INTERRUPTIONS)
def test_evaluation_and_saving_are_not_training_time(tmp_path: Path, options: dict[str, Any]) -> None:
    ToyTrainer(tmp_path, **options).train()

    events = read_events(tmp_path, "train")
    assert [event["seconds"] for event in events] == [event["step"] for event in events]
    assert {event["target_tokens_per_second"] for event in events} == {2.0}


@pytest.mark.parametrize("options", INTERRUPTIONS)
def test_waiting_for_data_is_training_time(tmp_path: Path, options: dict[str, Any]) -> None:
    seconds = []
    for name, keys in (("without", {"logging_steps": 6}), ("with", options | {"eval_on_start": False})):
        trainer = ToyTrainer(tmp_path / name, **keys)

        def collate(rows: list[dict[str, torch.Tensor]], trainer: ToyTrainer = trainer) -> dict[str, torch.Tensor]:
            trainer.now += 10
            return {"x": torch.stack([row["x"] for row in rows])}

        trainer.data_collator = collate
        trainer.train()
        seconds.append(trainer.meter.seconds)
    assert seconds[0] > 6
    assert seconds[0] == seconds[1]


def test_rest_of_update_on_device_is_training_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = ToyTrainer(tmp_path)
    synchronise = trainer.counter.synchronise

    def wait_for_device(*args: Any) -> None:
        trainer.now += 0.25
        synchronise(*args)

    monkeypatch.setattr(trainer.counter, "synchronise", wait_for_device)
    trainer.train()
    assert [event["seconds"] for event in read_events(tmp_path, "train")] == [2.25, 4.5, 6.75]


def test_evaluation_is_a_separate_event(tmp_path: Path) -> None:
    ToyTrainer(tmp_path, eval_strategy="steps", eval_steps=3, eval_on_start=True).train()

    events = read_events(tmp_path, "eval")
    assert [event["step"] for event in events] == [0, 3, 6]
    assert (events[0]["eval_loss"], events[0]["eval_stop_rate"]) == (0.5, 1.0)
    assert "tokens_per_second" not in events[0]


def test_resume_restores_counts_and_drops_repeated_events(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 2}
    ToyTrainer(tmp_path / "uninterrupted", **options).train()
    killed = ToyTrainer(tmp_path / "killed", **options)
    killed.train()

    resumed = ToyTrainer(tmp_path / "killed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "killed" / "checkpoint-3"))

    expected, events = (read_events(tmp_path / name, "train") for name in ("uninterrupted", "killed"))
    assert [event["step"] for event in events] == [2, 4, 6]
    for name in ("num_tokens", "num_target_tokens", "seconds"):
        assert [event[name] for event in events] == [event[name] for event in expected], name


def test_final_summary_of_upstream_is_not_written(tmp_path: Path) -> None:
    ToyTrainer(tmp_path, max_steps=1, logging_steps=1).train()

    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_term_metrics_are_reset_by_training_log_only() -> None:
    terms, state = TermMetrics(), TrainerState()

    def log(**logs):
        terms.on_log(None, state, TrainerControl(), logs)
        return logs

    terms.add({"reward": torch.tensor(3.0), "margin": torch.tensor(4.0)}, 2)
    terms.add({"margin": torch.tensor(5.0), "reward": torch.tensor(3.0)}, 1)
    terms.add({"length": torch.tensor(8.0)}, 4)  # Of another number of terms.
    assert log(eval_loss=1.0) == {"eval_loss": 1.0}
    assert log(loss=9.0) == {"loss": 9.0, "margin": 3.0, "reward": 2.0, "length": 2.0}
    assert log(loss=9.0) == {"loss": 9.0}
    terms.add({"margin": torch.tensor(1.0)}, 1)
    assert log(train_loss=1.0) == {"train_loss": 1.0}
    assert log(loss=9.0) == {"loss": 9.0, "margin": 1.0}


def test_term_metrics_accept_tensor_counts() -> None:
    terms, logs = TermMetrics(), {"loss": 1.0}
    for count in (2, 3):
        terms.add({"nll": torch.tensor(5.0)}, torch.tensor(count))
    terms.on_log(None, TrainerState(), TrainerControl(), logs)
    assert logs == {"loss": 1.0, "nll": 2.0}


def test_weight_monitor_equals_numpy(tmp_path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    state, control = TrainerState(logging_steps=2), TrainerControl()
    monitor = WeightMonitor()
    monitor.on_train_begin(args, state, control, model=model)
    flat = lambda: np.concatenate([p.detach().numpy().ravel().astype(np.float64) for p in model.parameters()])  # noqa: E731
    for step in range(4):
        state.global_step = step
        before = flat()
        monitor.on_pre_optimizer_step(args, state, control)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
        monitor.on_optimizer_step(args, state, control)
        logs = {"loss": 1.0}
        monitor.on_log(args, state, control, logs=logs)
        if step == 1:
            assert logs["parameter_norm"] == pytest.approx(np.linalg.norm(flat()), rel=1e-6)
            expected = np.linalg.norm(flat() - before) / np.linalg.norm(before)
            assert logs["update_ratio"] == pytest.approx(expected, rel=1e-5)
    evaluation = {"eval_loss": 1.0}
    monitor.on_log(args, state, control, logs=evaluation)
    assert evaluation == {"eval_loss": 1.0}


def test_weight_monitor_logs_no_stale_values_per_epoch(tmp_path) -> None:
    model = torch.nn.Linear(2, 1)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, logging_strategy="epoch", logging_first_step=True)
    state, control, monitor, logged = TrainerState(logging_steps=2), TrainerControl(), WeightMonitor(), []
    monitor.on_train_begin(args, state, control, model=model)
    for state.global_step in range(3):
        monitor.on_pre_optimizer_step(args, state, control)
        monitor.on_optimizer_step(args, state, control)
        if state.global_step != 1:  # The first step, and the end of an epoch after step 3.
            logged.append({"loss": 1.0})
            monitor.on_log(args, state, control, logs=logged[-1])
    assert ["update_ratio" in logs for logs in logged] == [True, False]


@pytest.mark.parametrize(
    ("sizes", "budget", "chosen"),
    [
        ([4, 4, 4], 12, [0, 1, 2]),
        ([4, 4, 4], 8, [0, 2]),
        ([4, 4, 4], 5, [0]),
        ([9, 3, 9], 2, [1]),
        ([99, 4, 3, 4, 3, 99], 8, [1, 3]),  # Embeddings, larger than the budget.
        ([], 5, []),
    ],
)
def test_choose_sample(sizes, budget, chosen) -> None:
    assert choose_sample(sizes, budget) == chosen


@pytest.mark.parametrize("report_to", [None, "none", "all", ["tensorboard"], ["tensorboard", "wandb"]])
def test_installed_trackers_are_accepted(monkeypatch: pytest.MonkeyPatch, report_to) -> None:
    monkeypatch.setattr(callbacks, "get_available_reporting_integrations", lambda: ["tensorboard", "wandb"])
    verify_trackers(build_recipe({"report_to": report_to}))


def test_missing_trackers_are_all_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "get_available_reporting_integrations", lambda: ["tensorboard"])
    with pytest.raises(ConfigError) as raised:
        verify_trackers(build_recipe({"report_to": ["trackio", "tensorboard", "wandb"]}))
    assert [problem.found for problem in raised.value.problems] == [
        "trackio is not installed",
        "wandb is not installed",
    ]
    assert "pip install wandb" in raised.value.problems[1].remedy


class Tracker(TrainerCallback):
    """Records the calls of upstream's callback methods."""

    calls: list[tuple[object, ...]] = []  # noqa: RUF012 (replaced by each test)

    def on_train_begin(self, args, state, control, model=None, **_):
        self.calls.append(("begin", state.global_step, state.max_steps, state.is_world_process_zero, model))

    def on_log(self, args, state, control, logs=None, **_):
        self.calls.append(("log", state.global_step, logs))

    def on_train_end(self, args, state, control, **_):
        self.calls.append(("end",))


def test_trackers_call_upstream_callbacks(monkeypatch, tmp_path) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(Tracker, "calls", calls)
    monkeypatch.setattr(callbacks, "get_reporting_integration_callbacks", lambda names: [Tracker])
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    trackers = Trackers(args, "model", None, print)
    trackers.begin(8, 4)
    trackers.log(6, {"loss": 1.0, "grad_norm": None})
    trackers.end()
    # ``None`` is omitted, because trackers warn about it.
    assert calls == [("begin", 4, 8, True, "model"), ("log", 6, {"loss": 1.0}), ("end",)]


class UnreachableTrackerCallback(TrainerCallback):
    """Tracker whose server cannot be reached from the start, or from a step on."""

    first_step = 0
    num_calls = 0

    def on_train_begin(self, args, state, control, **_):
        self._report(state)

    def on_log(self, args, state, control, **_):
        self._report(state)

    def _report(self, state):
        if state.global_step >= self.first_step:
            type(self).num_calls += 1
            raise ConnectionError("no route to host\nand more lines")


@pytest.fixture
def unreachable(monkeypatch):
    for module in (callbacks, trainer_module):
        monkeypatch.setattr(module, "get_reporting_integration_callbacks", lambda names: [UnreachableTrackerCallback])
    monkeypatch.setattr(UnreachableTrackerCallback, "num_calls", 0)
    return partial(monkeypatch.setattr, UnreachableTrackerCallback, "first_step")


def test_failing_tracker_does_not_end_the_run(unreachable, tmp_path) -> None:
    unreachable(4)
    trainer, lines = ToyTrainer(tmp_path), []
    callbacks.tolerate_tracker_failures(trainer.callback_handler, trainer.args, lines.append)
    trainer.train()
    assert trainer.state.global_step == 6
    assert lines == [
        "report_to: UnreachableTracker failed: ConnectionError: no route to host; the run continues without it, "
        "metrics.jsonl has the same figures"
    ]
    assert UnreachableTrackerCallback.num_calls == 1, "it is not asked again: each call may wait for a timeout"


def test_tracker_that_cannot_start_is_an_error_of_a_new_run_only(unreachable, tmp_path) -> None:
    args, lines = TrainingArguments(output_dir=str(tmp_path), use_cpu=True), []
    trackers = Trackers(args, "model", None, lines.append)
    with pytest.raises(ConfigError, match="report_to: UnreachableTracker failed: ConnectionError: no route to host\n"):
        trackers.begin(8, 0)
    trackers.begin(8, 4)
    assert len(lines) == 1


def test_recipe_tolerates_failing_trackers(unreachable, tiny_tokenizer_dir, tmp_path, monkeypatch, capfd) -> None:
    unreachable(1)
    run_recipe(build_config(tmp_path, tiny_tokenizer_dir, max_steps=3), monkeypatch)
    assert capfd.readouterr().err.count("report_to: UnreachableTracker failed") == 1


@pytest.mark.parametrize("rises", [False, True])
@pytest.mark.parametrize(("patience", "threshold"), [(1, 0.0), (2, 0.0), (2, 0.05), (3, 0.2)])
def test_early_stopping_equals_upstream(tmp_path: Path, rises: bool, patience: int, threshold: float) -> None:
    metric = "accuracy" if rises else "loss"
    args = TrainingArguments(output_dir=str(tmp_path), metric_for_best_model=metric, report_to=[])
    generator = np.random.default_rng(patience)
    stops = []
    for _ in range(50):
        upstream, state = EarlyStoppingCallback(patience, threshold), TrainerState()
        values = [(step, round(float(value), 3)) for step, value in enumerate(generator.normal(size=12).cumsum() / 10)]
        for at, (_, value) in enumerate(values):
            control = TrainerControl()
            upstream.on_evaluate(args, state, control, {f"eval_{metric}": value})
            if state.best_metric is None or (value > state.best_metric if rises else value < state.best_metric):
                state.best_metric = value
            found = find_exhausted(values[: at + 1], patience, threshold, rises=rises)
            assert (found is not None) == control.should_training_stop
            if found is not None:
                assert found[1] == state.best_metric
                stops.append(at)
                break
    assert len(set(stops)) > 2


def test_early_stopping_without_patience_or_values() -> None:
    worse = [(step, float(step)) for step in range(9)]
    assert find_exhausted(worse, None, 0.0, rises=False) is None
    assert find_exhausted([], 1, 0.0, rises=False) is None


@pytest.mark.parametrize("rises", [False, True])
def test_early_stopping_counts_nan_as_worse_than_any_number(rises: bool) -> None:
    nan, sign = float("nan"), 1.0 if rises else -1.0

    def find(*values: float) -> tuple[int, float] | None:
        return find_exhausted([(step, sign * value) for step, value in enumerate(values)], 2, 0.0, rises=rises)

    assert find(1.0, nan, nan) == (0, sign)
    assert find(nan, 1.0, 2.0, 3.0) is None
    assert find(nan, 2.0, 1.0, nan) == (1, 2.0 * sign)
    assert find(nan, nan, nan) == (0, float("-inf") * sign)
