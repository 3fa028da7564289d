"""The batch script that requeues itself, with SLURM's commands played by stubs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "docs" / "slurm_requeue.sh"
STUBS = {
    "srun": """#!/bin/bash
echo "srun $*" >> "$LOG"
touch "$OUT/started"
[ "$ENDS" = at_once ] || while [ ! -e "$OUT/STOP" ]; do sleep 0.05; done
[ -z "$STATUS" ] || echo "{\\"status\\": \\"$STATUS\\"}" > "$OUT/run.json"
exit 1
""",
    "scontrol": """#!/bin/bash
[ "$1" = show ] && echo node-1 || echo "scontrol $*" >> "$LOG"
""",
}


@pytest.fixture
def start(tmp_path):
    """Start the script under SLURM's stubs; the run ends with that status, when it is asked to or at once."""
    for name, text in STUBS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    out = tmp_path / "a run"

    def start(status, *, ends="when asked"):
        out.mkdir(exist_ok=True)
        slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_JOB_NUM_NODES": "2"}
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        stubs = {"PATH": path, "OUT": str(out), "LOG": str(tmp_path / "log"), "STATUS": status, "ENDS": ends}
        return subprocess.Popen(["bash", SCRIPT, "sft.yaml", out], env=os.environ | slurm | stubs)

    return start


def read_calls(tmp_path):
    return (tmp_path / "log").read_text().splitlines()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_before_the_time_is_over_the_run_is_asked_to_stop_and_the_job_is_queued_again(start, tmp_path, number):
    process = start("preempted")
    while not (tmp_path / "a run" / "started").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=30) == 0
    launched, requeued = read_calls(tmp_path)
    assert "--nnodes 2" in launched
    assert "--rdzv_endpoint node-1:29500 recipes/sft.py --config sft.yaml" in launched
    assert requeued == "scontrol requeue 77"


@pytest.mark.parametrize("status", ["done", "failed", "diverged", "refused", "running"])
def test_a_run_that_ended_otherwise_is_not(start, tmp_path, status):
    assert start(status, ends="at_once").wait(timeout=30) is not None
    assert len(read_calls(tmp_path)) == 1


def test_what_an_earlier_job_left_is_not_taken_for_the_end_of_this_one(start, tmp_path):
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "run.json").write_text('{"status": "preempted"}')
    os.utime(tmp_path / "a run" / "run.json", (1, 1))
    assert start("", ends="at_once").wait(timeout=30) is not None
    assert len(read_calls(tmp_path)) == 1
