"""The batch script ``docs/slurm_requeue.sh``, with stubs for SLURM's commands."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from recipes_lib.commands import launch as launching

SCRIPT = Path(__file__).parents[1] / "docs" / "slurm_requeue.sh"
STUBS = {
    "srun": """#!/bin/bash
echo "srun $*" >> "$LOG"
touch "$OUT/started"
[ "$ENDS" = at_once ] || while [ ! -e "$OUT/saved" ]; do sleep 0.05; done
[ -z "$STATUS" ] || echo "{\\"status\\": \\"$STATUS\\"}" > "$OUT/run.json"
# The clock of the file server may be behind.
[ -z "$STATUS" ] || touch -d @9 "$OUT/run.json"
exit 1
""",
    "scontrol": """#!/bin/bash
echo "scontrol $*" >> "$LOG"
""",
}


@pytest.fixture
def start(install, tmp_path):
    """Return a function that starts the script; the stub run ends with ``status``, at once or on a stop request."""
    install(STUBS)
    out = tmp_path / "a run"

    def start(status, *, ends="on_request", more=()):
        out.mkdir(exist_ok=True)
        stubs = {"SLURM_JOB_ID": "77", "OUT": str(out), "LOG": str(tmp_path / "log"), "STATUS": status, "ENDS": ends}
        command = ["bash", SCRIPT, "sft.yaml", out, *more]
        return subprocess.Popen(command, env=os.environ | stubs, preexec_fn=reset_signals)

    return start


def reset_signals():
    """Restore default signal handling: a shell cannot trap signals that it inherits as ignored."""
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def wait_for(file, process):
    while not file.exists():
        assert process.poll() is None
        time.sleep(0.05)


def read_calls(tmp_path):
    return (tmp_path / "log").read_text().splitlines()


@pytest.mark.parametrize(
    ("numbers", "is_requeued"),
    [([signal.SIGUSR1], True), ([signal.SIGTERM], False), ([signal.SIGUSR1, signal.SIGTERM], True)],
    ids=["before the time limit", "scancel", "time limit during the save"],
)
def test_preempted_run_is_requeued_unless_cancelled(start, tmp_path, numbers, is_requeued):
    """``scontrol requeue`` would bring a job back that ``scancel`` has ended."""
    process, out = start("preempted"), tmp_path / "a run"
    wait_for(out / "started", process)
    for number in numbers:
        process.send_signal(number)
        wait_for(out / "STOP", process)
        (out / "STOP").unlink()
    (out / "saved").touch()
    assert process.wait(timeout=30) == (0 if is_requeued else 1)
    launched, *requeued = read_calls(tmp_path)
    assert launched.startswith(
        "srun --kill-on-bad-exit=1 --ntasks-per-node=1 --cpu-bind=none recipes launch --config sft.yaml "
    )
    assert launched.endswith(f"--hardware ddp --output_dir {tmp_path / 'a run'}")
    assert requeued == (["scontrol requeue 77"] if is_requeued else [])


@pytest.mark.parametrize(
    ("more", "hardware", "recipe"),
    [((), "ddp", "sft"), (("fsdp2",), "fsdp2", "sft"), (("hsdp", "reward"), "hsdp", "reward")],
)
def test_script_starts_requested_launch_on_node(start, tmp_path, monkeypatch, capsys, more, hardware, recipe):
    """The arguments are parsed by ``recipes launch --dry_run`` on the second of two nodes with eight GPUs."""
    monkeypatch.setattr("recipes_lib.hardware.count_accelerators", lambda: 8)
    monkeypatch.chdir(SCRIPT.parents[1])
    start("done", ends="at_once", more=more).wait(timeout=30)
    (launched,) = read_calls(tmp_path)
    step = {"SLURM_JOB_ID": "77", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    for name, value in (step | {"SLURM_STEP_NODELIST": "node-[1-2]", "SLURM_NODEID": "1"}).items():
        monkeypatch.setenv(name, value)
    words = launched.partition("recipes launch ")[2].replace("sft.yaml", f"recipes/configs/llama3-8b/{recipe}.yaml")
    assert launching.main([*words.replace(str(tmp_path / "a run"), "out").split(), "--dry_run"]) == 0
    command = capsys.readouterr().err
    assert f"SLURM, 2 nodes, 16 processes by accelerate_configs/{hardware}.yaml" in command
    assert f"--machine_rank 1 --main_process_ip node-1 --main_process_port 20077 recipes/{recipe}.py " in command


@pytest.mark.parametrize("status", ["stalled", "done", "failed", "diverged", "refused", "running"])
def test_run_that_ended_is_requeued_only_if_stalled(start, tmp_path, status):
    assert start(status, ends="at_once").wait(timeout=30) is not None
    assert read_calls(tmp_path)[1:] == (["scontrol requeue 77"] if status == "stalled" else [])


def test_status_of_earlier_job_is_ignored(start, tmp_path):
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "run.json").write_text('{"status": "preempted"}')
    os.utime(tmp_path / "a run" / "run.json", (1, 1))
    assert start("", ends="at_once").wait(timeout=30) is not None
    assert len(read_calls(tmp_path)) == 1
