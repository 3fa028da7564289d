"""A run that is asked to stop saves, ends with 75, and goes on by the same command to the very weights and figures."""

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

ROOT = Path(__file__).parents[2]
PAUSED = Path(__file__).with_name("paused.py")
NUM_STEPS = 6


@pytest.fixture(scope="module")
def keys(tiny_model_dir, tmp_path_factory):
    """A run of six steps on a few chats; three rounds of evaluation before the first and after every third step."""
    folder = tmp_path_factory.mktemp("preempted")
    rows = (
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}, yes. " * (n % 7)}]}
        for n in range(1, 60)
        if n % 7
    )
    data = folder / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model_name_or_path": tiny_model_dir,
        "dataset_name": data,
        "prepared_dir": folder / "prepared",
        "test_split_size": 6,
        "packing": "false",
        "bf16": "false",
        "use_cpu": "true",
        "max_steps": NUM_STEPS,
        "save_steps": 100,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 1,
        "learning_rate": 1e-3,
        "num_sample_prompts": 1,
        "sample_max_new_tokens": 16,
    }


def start(keys, output_dir, *, pause=None, num_processes=1, **more):
    """Start the recipe; ``pause`` is (phase, call, rank)."""
    arguments = [f"--{name}={value}" for name, value in (keys | {"output_dir": output_dir} | more).items()]
    command = [str(ROOT / "recipes" / "sft.py"), *arguments]
    if pause is not None:
        command = [str(PAUSED), str(output_dir.parent), *map(str, pause), *command]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    command = [sys.executable, *(launcher if num_processes > 1 else []), *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def wait_for(process, file):
    """Wait until a run has made a file."""
    while not file.exists():
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.05)


def find_rank(launcher_pid, rank):
    """Return the process of a rank under a launcher."""
    children = Path(f"/proc/{launcher_pid}/task/{launcher_pid}/children").read_text().split()
    return next(
        int(pid) for pid in children if f"\0RANK={rank}\0" in "\0" + Path(f"/proc/{pid}/environ").read_text() + "\0"
    )


def finish(process):
    told, _ = process.communicate(timeout=400)
    return process.returncode, told


def read_events(output_dir):
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def read_figures(output_dir):
    """Loss and norm of every training event, loss and samples of every evaluation, in the order they were written."""
    names = ("loss", "grad_norm", "learning_rate", "num_target_tokens", "eval_loss", "eval_stop_rate")
    return [
        (event["kind"], event["step"], *(event.get(name) for name in names)) for event in read_events(output_dir)
    ]


def read_samples(output_dir):
    return [json.loads(line) for line in (output_dir / "samples.jsonl").read_text().splitlines()]


def assert_same_run(one, other):
    expected, got = (load_file(path / "model.safetensors") for path in (one, other))
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert read_figures(one) == read_figures(other)
    assert read_samples(one) == read_samples(other)


@pytest.fixture(scope="module")
def straight(keys, tmp_path_factory):
    """The run that nobody stopped, by number of processes."""
    runs: dict[int, Path] = {}

    def get(num_processes):
        if num_processes not in runs:
            runs[num_processes] = tmp_path_factory.mktemp("straight") / "run"
            code, told = finish(start(keys, runs[num_processes], num_processes=num_processes))
            assert code == 0, told[-3000:]
        return runs[num_processes]

    return get


PHASES = {
    # Where the run waits when it is told, and the last finished step by then.
    "step": (("step", 4, 0), 4),
    "evaluation": (("evaluation", 9, 0), 3),
    "generation": (("generation", 20, 0), 3),
    "saving": (("saving", 1, 0), 5),
}


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("evaluation", signal.SIGTERM),
        pytest.param("step", signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param("generation", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("saving", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_run_asked_to_stop_saves_and_goes_on_as_if_nothing_had_been(keys, straight, tmp_path, phase, number):
    pause, step = PHASES[phase]
    more = {"save_steps": 5} if phase == "saving" else {}
    run = tmp_path / "run"
    process = start(keys, run, pause=pause, **more)
    wait_for(process, tmp_path / "reached")
    process.send_signal(number)
    (tmp_path / "go").touch()
    code, told = finish(process)

    assert code == 75, told[-3000:]
    assert "Traceback" not in told
    line = told.splitlines()[-1]
    assert signal.Signals(number).name in line
    assert f"checkpoint-{step} is complete" in line
    assert "same command" in line
    assert json.loads((run / "run.json").read_text())["status"] == "preempted"
    assert (run / f"checkpoint-{step}" / "COMPLETE.json").exists()
    assert finish(start(keys, run, **more))[0] == 0
    assert_same_run(straight(1), run)
