"""Token counts, throughput on a simulated clock, and ``metrics.jsonl``, also after a kill or on a full disk."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import tracemalloc
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tests.rows import read_rows
from tests.training.clock import Clock

from recipes_lib.errors import ConfigError
from recipes_lib.planning.compute import TokenFlops
from recipes_lib.training.monitoring.metrics import (
    MetricsWriter,
    StepCounter,
    ThroughputMeter,
    measure_run,
    read_peak_memory,
)


def write_events(path: Path, *steps: int) -> None:
    for step in steps:
        MetricsWriter(path).write({"kind": "train", "step": step, "loss": 1.0 / (step + 1)})


def test_counts_are_synchronised_and_restored() -> None:
    counter = StepCounter()
    counter.add(10, torch.tensor(4), torch.tensor(1))
    counter.add(torch.tensor(5), 2)
    assert counter.totals.num_tokens == 0

    counter.synchronise()
    counter.synchronise()
    resumed = StepCounter()
    resumed.add(7, 7, 7)  # Of a step that is rolled back.
    resumed.restore(json.loads(json.dumps(counter.totals._asdict())))
    resumed.add(1, 1, 1)
    resumed.synchronise()

    assert counter.totals == (15, 6, 1)
    assert resumed.totals == (16, 7, 2)


def test_stopped_meter_does_not_count_time() -> None:
    clock, counter = Clock(), StepCounter()
    meter = ThroughputMeter(counter, clock=clock)
    for seconds, trains in ((7, False), (2, True), (60, False), (3, True)):
        if trains:
            meter.resume()
            clock.now += 1
            meter.resume()
            counter.add(100, 30)
        clock.now += seconds - trains
        meter.stop()
        meter.stop()
    counter.synchronise()

    figures = meter.measure()

    assert figures["seconds"] == 5
    assert figures["tokens_per_second"] == 200 / 5
    assert figures["target_tokens_per_second"] == 60 / 5


def test_rates_are_of_window_and_counts_of_run() -> None:
    clock, counter = Clock(), StepCounter()
    meter = ThroughputMeter(counter, flops=TokenFlops(body=6.0, head=10.0), peak_flops=1000.0, clock=clock)
    counter.restore({"num_tokens": 1000, "num_targets": 500})
    meter.begin(50.0)
    figures = []
    for seconds in (1, 4):
        meter.resume()
        counter.add(200, 40, 10)
        counter.synchronise()
        clock.now += seconds
        meter.stop()
        figures.append(meter.measure())

    assert [figure["tokens_per_second"] for figure in figures] == [200, 50]
    assert [figure["num_target_tokens"] for figure in figures] == [540, 580]
    assert [figure["seconds"] for figure in figures] == [51, 55]
    assert [figure["mfu"] for figure in figures] == [(6 * 200 + 10 * 40) / 1000, (6 * 200 + 10 * 40) / 4000]
    assert [figure["num_flops"] for figure in figures] == [6 * 1200 + 10 * 540, 6 * 1400 + 10 * 580]
    assert figures[0]["token_accuracy"] == 0.25
    memory = figures[0]["memory_bytes"]
    assert memory is not None
    assert memory > 2**20


def test_unknown_values_are_null() -> None:
    meter = ThroughputMeter(StepCounter(), peak_flops=None, clock=Clock())

    figures = meter.measure()

    unknown = {name for name, value in figures.items() if value is None}
    assert unknown == {"mfu", "num_flops", "tokens_per_second", "target_tokens_per_second", "token_accuracy"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1, None, "text", [1, 2], 7])
def test_line_is_strict_json(tmp_path: Path, value: object) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path).write({"kind": "train", "step": 1, "loss": value})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(path.read_text(), parse_constant=refuse)
    (event,) = read_rows(path)
    is_finite = not isinstance(value, float) or math.isfinite(value)
    assert repr(event["loss"] if is_finite else float(event["loss"])) == repr(value)


def test_only_main_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_events(path, 1, 2)
    before = path.read_bytes()
    other = MetricsWriter(path, is_main=False)

    other.write({"kind": "train", "step": 3})
    other.rewind(1)

    assert path.read_bytes() == before


def test_rewind_drops_events_after_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_events(path, 0, 5, 10, 15)
    with path.open("a") as file:
        file.write('{"kind": "train", "st')

    MetricsWriter(path).rewind(10)
    write_events(path, 15)

    assert [event["step"] for event in read_rows(path)] == [0, 5, 10, 15]


def test_rewind_to_0_empties_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path).rewind(0)
    assert not path.exists()
    write_events(path, 0, 5)

    MetricsWriter(path).rewind(0)

    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "line", ['{"kind": "train", "st', "[1, 2]", "null", '{"loss": 1.0}', "\x00", "3", '{"kind": "best", "step": 1}']
)
def test_rewind_drops_invalid_lines_and_best_step_of_ended_run(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write_events(path, 1)
    with path.open("a") as file:
        file.write(line + "\n\n")
    write_events(path, 2)

    MetricsWriter(path).rewind(2)

    assert [event["step"] for event in read_rows(path)] == [1, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the operating system has no /dev/full")
def test_full_disk_error_names_file(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=str(tmp_path / "metrics.jsonl")) as caught:
        MetricsWriter(tmp_path / "metrics.jsonl").write({"step": 1})
    assert caught.value.errno == errno.ENOSPC


def test_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match="is a pipe, not a file"):
        MetricsWriter(tmp_path / "metrics.jsonl")


def test_rewind_drops_evaluation_that_is_repeated(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for kind, step in (("train", 1), ("eval", 1), ("train", 2), ("eval", 2)):
        writer.write({"kind": kind, "step": step})
    writer.rewind(2, is_evaluated=False)
    events = read_rows(tmp_path / "metrics.jsonl")
    assert [(event["kind"], event["step"]) for event in events] == [("train", 1), ("eval", 1), ("train", 2)]


def test_rewind_reads_one_line_at_a_time(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "text": "{"x" * 4000}"}}\n' for step in range(1, 501)))
    tracemalloc.start()
    MetricsWriter(path).rewind(400)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < path.stat().st_size / 4
    assert len(read_rows(path)) == 400


def test_write_terminates_truncated_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    MetricsWriter(path, is_main=True).write({"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n'


def test_memory_of_a_run_on_the_cpu_beside_a_gpu_is_that_of_the_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert read_peak_memory() > 2**20


class NVMLError(Exception):
    """The error of NVML."""


def test_energy_is_that_of_training_and_of_a_gpu_that_measures_it(monkeypatch):
    """By a stand-in of NVML, whose counter is 1 J a second of the clock; an evaluation of 60 s is left out."""
    clock, counter = Clock(), StepCounter()
    nvml = ModuleType("pynvml")
    nvml.NVMLError, nvml.nvmlInit = NVMLError, lambda: None
    nvml.nvmlDeviceGetHandleByUUID = {"GPU-1234": "device"}.__getitem__
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda device: 1000 * clock.now if device == "device" else None
    nvml.__spec__ = ModuleSpec("pynvml", None)
    meter = ThroughputMeter(counter, clock=clock)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="1234"))

    def train() -> dict[str, object]:
        for seconds, trains in ((2, True), (60, False), (3, True)):
            if trains:
                meter.resume()
            clock.now += seconds
            meter.stop()
        return meter.measure()

    assert "energy_joules" not in train()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert train()["energy_joules"] == 5
    meter.begin(10.0, 100.0)
    assert train()["energy_joules"] == 105

    def fail(device: str) -> float:
        raise NVMLError

    nvml.nvmlDeviceGetTotalEnergyConsumption = fail
    meter.begin()
    assert "energy_joules" not in train()


def test_measured_run_lacks_figures_that_were_not_logged() -> None:
    events = [{"kind": "train", "step": 10, "seconds": None, "memory_bytes": None}, {"kind": "train", "step": 20}]
    assert measure_run(events) == {}
    assert measure_run([*events, {"kind": "train", "step": 30, "seconds": 9.0}]) == {}
    last = {"kind": "train", "step": 50, "seconds": 15.0, "memory_bytes": 7}
    known = [*events, {"kind": "train", "step": 40, "seconds": 10.0, "memory_bytes": 9}, {"eval_loss": 2.5}, last]
    measured = {"memory_bytes": 9, "eval_loss": 2.5, "step_seconds": 0.5}
    assert measure_run(iter(known)) == measured, "events are read once, so that they need not be held"
    assert measure_run([]) == {}, "as with `logging_strategy: no`"
