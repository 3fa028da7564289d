"""Preempted recipes save, exit with 75 and resume bit-identically; lost ranks and launchers end a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.faults import recipe_runs
from tests.forked import ROOT, Launch, name_processes
from tests.rows import read_rows

PAUSED = Path(__file__).with_name("paused.py")
NUM_STEPS = 6


@pytest.fixture(scope="module")
def keys(inputs):
    """Keys of a run of six steps with an evaluation of three batches before step 1 and after steps 3 and 6."""
    sizes = {"gradient_accumulation_steps": 1, "per_device_eval_batch_size": 1, "sample_max_new_tokens": 16}
    steps = {"max_steps": NUM_STEPS, "save_steps": 100, "eval_steps": 3}
    return recipe_runs.make_keys(inputs, "sft", packing="false", **sizes, **steps)


def start(keys, output_dir, *, pause=None, **more):
    """Start the recipe in a forked process, which pauses at ``pause``: phase, call and rank."""
    return Launch(*write_command(keys, output_dir, pause, more))


def launch(keys, output_dir, *, pause=None, env=None, **more):
    """Start the recipe on two processes with torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += map(str, write_command(keys, output_dir, pause, more))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=env, **pipes)


def write_command(keys, output_dir, pause, more):
    script = ROOT / "recipes" / "sft.py"
    flags = [f"--{name}={value}" for name, value in (keys | {"output_dir": output_dir} | more).items()]
    # Call 0 does not exist: the run does not pause.
    return [PAUSED, output_dir.parent, *(pause or ("step", 0, 0)), script, *flags]


def wait_for(process, file):
    """Wait until a run has created a file."""
    while not file.exists():
        assert process.poll() is None, finish(process)[1][-3000:]
        time.sleep(0.05)


def start_ranks(keys, output_dir, pause):
    """Start the recipe in two forked processes with the environment of torchrun."""
    processes = []
    for rank, variables in enumerate(name_processes(2)):
        folder = output_dir.parent / "errors" / str(rank)
        folder.mkdir(parents=True)
        variables["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
        processes.append(Launch(*write_command(keys, output_dir, pause, {}), variables=variables))
    return processes


def finish(process):
    """Return exit code and output of a process."""
    if isinstance(process, Launch):
        done = process.finish()
        return done.returncode, done.stdout + done.stderr
    output, _ = process.communicate(timeout=400)
    return process.returncode, output


def read_figures(output_dir):
    """Return step and metrics of every event, in order."""
    names = ("loss", "grad_norm", "learning_rate", "num_target_tokens", "eval_loss", "eval_stop_rate")
    return [
        (event["kind"], event["step"], *(event.get(name) for name in names))
        for event in read_rows(output_dir / "metrics.jsonl")
    ]


def read_samples(output_dir):
    return read_rows(output_dir / "samples.jsonl")


def assert_same_run(one, other):
    expected, got = (load_file(path / "model.safetensors") for path in (one, other))
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert read_figures(one) == read_figures(other)
    assert read_samples(one) == read_samples(other)


@pytest.fixture(scope="module")
def uninterrupted(keys, tmp_path_factory):
    """Output directory of a run that was not stopped."""
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    code, output = finish(start(keys, run))
    assert code == 0, output[-3000:]
    return run


def stop_at(keys, run, pause):
    """Start a run, send SIGTERM where it pauses, and return exit code and output."""
    process = start(keys, run, pause=pause)
    wait_for(process, run.parent / "reached")
    process.send_signal(signal.SIGTERM)
    (run.parent / "go").touch()
    return finish(process)


def test_sigterm_saves_and_resume_is_bit_identical(keys, uninterrupted, tmp_path):
    """All phases and recipes are tested in ``tests/faults/kills.py``."""
    run = tmp_path / "run"
    code, output = stop_at(keys, run, ("evaluation", 9, 0))
    assert code == 75, output[-3000:]
    assert "Traceback" not in output
    line = output.splitlines()[-1]
    assert "SIGTERM" in line
    assert "checkpoint-3 is complete" in line
    assert "same command" in line
    assert json.loads((run / "run.json").read_text())["status"] == "preempted"
    assert (run / "checkpoint-3" / "COMPLETE.json").exists()
    assert finish(start(keys, run))[0] == 0
    assert_same_run(uninterrupted, run)


def test_sigterm_during_preparation_leaves_no_partial_data(keys, tmp_path):
    run = tmp_path / "run"
    code, output = stop_at(keys | {"prepared_dir": tmp_path / "prepared"}, run, ("preparation", 1, 0))
    assert code == 75, output[-3000:]
    assert output.splitlines()[-1].startswith("SIGTERM: stopped with nothing to save; run the same command")
    assert json.loads((run / "run.json").read_text())["status"] == "preempted"
    assert [path for path in (tmp_path / "prepared").iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.slow
def test_data_loader_workers_ignore_sigterm_of_process_group(keys, uninterrupted, tmp_path):
    run = tmp_path / "run"
    more = {"dataloader_num_workers": 1}
    process = start(keys, run, pause=("step", 3, 0), **more)
    wait_for(process, tmp_path / "reached")
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert workers
    for pid in (process.pid, *map(int, workers)):
        os.kill(pid, signal.SIGTERM)
    (tmp_path / "go").touch()
    code, output = finish(process)
    assert code == 75, output[-3000:]
    assert "checkpoint-3 is complete" in output
    # Workers that ended are zombies until init reaps them.
    states = [Path(f"/proc/{pid}/status") for pid in workers]
    assert [path for path in states if path.exists() and "State:\tZ" not in path.read_text()] == []
    assert finish(start(keys, run, **more))[0] == 0
    assert_same_run(uninterrupted, run)


@pytest.mark.slow
def test_death_of_launcher_stops_run(keys, tmp_path):
    run = tmp_path / "run"
    # Long enough for the watchdog to poll for the launcher.
    process = launch(keys | {"max_steps": 2000, "eval_steps": 5000}, run, pause=("step", 3, 0))
    wait_for(process, tmp_path / "reached")
    process.send_signal(signal.SIGUSR1)  # Ends torchrun, but not its processes.
    assert process.wait(timeout=60) == -signal.SIGUSR1
    (tmp_path / "go").touch()
    output = process.communicate(timeout=400)[0]  # Its processes keep the pipe open.
    assert "the launcher is gone" in output
    assert json.loads((run / "run.json").read_text())["status"] == "preempted"


@pytest.mark.multiprocess
def test_killed_rank_ends_run_and_is_named(keys, tmp_path):
    run = tmp_path / "run"
    survivor, killed = start_ranks(keys, run, ("step", 2, 1))
    wait_for(killed, tmp_path / "reached")
    killed.send_signal(signal.SIGKILL)
    code, output = finish(survivor)
    assert code == 1
    assert "recipe_trainer.py" not in output
    assert "rank 0 exits: process 1 of this machine ended: no error was recorded, so it was killed" in output
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "failed"
    assert "process 1" in record["error"]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("rank", [0, 1])
def test_exception_of_one_rank_is_reported_first(keys, tmp_path, rank):
    (tmp_path / "scores.py").write_text(METRIC.format(rank=rank))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    run = tmp_path / "run"
    code, output = finish(launch(keys | {"metrics": "[scores:Failing]"}, run, env=environment))
    assert code == 1
    reason = "Failing failed on 1 samples: ValueError: not on this rank"
    assert output.index(reason) < output.index(f"rank {1 - rank} exits: process {rank} of this machine ended: Config")
    assert output.index("Root Cause") < output.rindex(reason)
    assert "recipe_trainer.py" not in output
    assert json.loads((run / "run.json").read_text())["status"] == "refused"


METRIC = """
import os
import evaluate
from datasets import Features, Value

class Failing(evaluate.Metric):
    def _info(self):
        features = Features({{"predictions": Value("string"), "references": Value("string")}})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        if os.environ["RANK"] == "{rank}":
            raise ValueError("not on this rank")
        return {{"fine": 1.0}}
"""
