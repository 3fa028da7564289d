"""Detection of dead processes by the folders that torch's launcher gives its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes_lib import processes
from recipes_lib.boundary import run_command
from recipes_lib.errors import ConfigError


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Launcher folders of two processes; this process is the first."""
    for number in "01":
        (tmp_path / number).mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    return tmp_path


def run_as(folders, number, body):
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(folders / number / "error.json")}
    subprocess.run([sys.executable, "-c", f"from recipes_lib import processes; {body}"], check=True, env=environment)


def test_unregistered_process_is_not_dead(folders):
    processes.register_process()
    run_as(folders, "1", "processes.register_process(); processes.unregister_process()")
    assert processes.find_dead_process() is None


def test_process_that_was_preempted_alone_gives_its_code_to_others(folders):
    code = (
        "from recipes_lib.boundary import run_command\ndef stop(): raise PreemptedError('SIGTERM')\nrun_command(stop)"
    )
    run_as(folders, "1", f"from recipes_lib.errors import PreemptedError; processes.register_process()\n{code}")
    assert processes.find_dead_process() is None
    assert processes.read_failure_code() == 75


def test_killed_process_is_reported(folders):
    processes.register_process()
    run_as(folders, "1", "processes.register_process()")
    assert processes.find_dead_process() == "process 1 of this machine ended: no error was recorded, so it was killed"


def test_failed_process_is_reported_with_reason(folders):
    assert processes.read_failure_code() == 1
    run_as(folders, "1", "processes.register_process(); processes.record_failure(ValueError('no\\nmore'), 3)")
    assert processes.read_failure_code() == 3
    assert processes.find_dead_process() == "process 1 of this machine ended: ValueError: no"
    # The format of torch's own handler, which the launcher's summary reads.
    message = json.loads((folders / "1" / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: no\nmore"
    assert set(message["extraInfo"]) == {"py_callstack", "timestamp"}
    assert message["extraInfo"]["py_callstack"] == "no\nmore"  # A traceback only of a bug.
    processes.record_failure(ValueError("no"), 1)
    message = json.loads((folders / "0" / "error.json").read_text())["message"]
    assert "ValueError: no" in message["extraInfo"]["py_callstack"]


def test_reason_that_is_being_written_is_the_earlier_one_until_it_is_whole(folders, monkeypatch):
    write, read = Path.write_text, []

    def write_in_parts(path, text, **options):
        write(path, text[: len(text) // 2], **options)
        read.append(processes.read_failure_code())
        return write(path, text, **options)

    processes.record_failure(ValueError("no"), 3)
    monkeypatch.setattr(Path, "write_text", write_in_parts)
    processes.record_failure(ValueError("no"), 75)
    assert [*read, processes.read_failure_code()] == [3, 75]


def test_full_disk_of_launcher_is_ignored(folders, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    processes.register_process()
    monkeypatch.setattr(Path, "write_text", fail)
    monkeypatch.setattr(Path, "unlink", fail)
    processes.register_process()
    processes.record_failure(ConfigError(), 2)
    processes.unregister_process()
    assert not (folders / "0" / "error.json").exists()


def test_lost_connection_names_dead_process(folders, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    run_as(folders, "1", "processes.register_process()")
    of_nccl = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
    for message in ("[gloo] Connection closed by peer [127.0.0.1]:1", of_nccl):
        assert "process 1" in str(processes.explain_lost_connection(RuntimeError(message)))
    assert processes.explain_lost_connection(RuntimeError("the shapes differ")) is None
    assert processes.explain_lost_connection(TimeoutError("operation timeout")) == processes.find_dead_process()
    # The kernel closes a process's connections before it ends the process.
    ends = iter([None, "process 1 ended"])
    monkeypatch.setattr(processes, "find_dead_process", lambda: next(ends))
    assert processes.explain_lost_connection(RuntimeError(of_nccl)) == "process 1 ended"


@pytest.mark.parametrize(
    "message",
    [
        "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
        "Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
        "wait timeout after 600000ms, keys: /default_pg/0//cpu//0/0",
    ],
)
def test_silent_process_is_not_a_bug(message, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    lost = str(processes.explain_lost_connection(RuntimeError(message), seconds=0))
    assert lost.startswith("another process has not answered in time")
    assert message in lost
    assert "ddp_timeout" in lost


def test_silent_process_is_named_and_those_that_wait_for_it_are_not(folders, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    (folders / "2").mkdir()
    (folders / "2" / "pid").write_text(f"{os.getppid()}")
    processes.register_process()
    lost = processes.explain_lost_connection(RuntimeError("operation timeout"), seconds=0)
    assert str(lost).startswith(f"process 2 (pid {os.getppid()}) of this machine has not answered in time")
    run_as(folders, "2", "processes.unregister_process()")
    lost = processes.explain_lost_connection(RuntimeError("operation timeout"), seconds=0)
    assert str(lost).startswith("another process has not answered in time")


def test_error_with_a_path_that_is_not_utf8_is_reported_once(tmp_path, monkeypatch):
    (tmp_path / "0").mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    assert [processes.is_first_to_report("\udcff is not a file") for _ in range(2)] == [True, False]


def test_without_launcher_no_process_is_dead(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    processes.register_process()
    processes.record_failure(ValueError(), 1)
    assert processes.find_dead_process() is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    closed = RuntimeError("Connection closed by peer [10.0.0.2]:1234. This is typically caused by")
    found = "another process ended: see its output for the reason (Connection closed by peer [10.0.0.2]:1234)"
    assert processes.explain_lost_connection(closed, seconds=0) == found


@pytest.mark.parametrize("world_size", [None, "1", "x"])
def test_single_process_has_no_lost_connection(world_size, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    assert processes.explain_lost_connection(BrokenPipeError(32, "Broken pipe"), seconds=0) is None
    assert processes.read_world_size() == 1


def test_single_process_command_rejects_larger_world_size(monkeypatch) -> None:
    processes.verify_one_process("recipes synthesize")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes were started"):
        processes.verify_one_process("recipes synthesize")


def test_api_key_is_read_from_environment(monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "")
    assert processes.read_api_key() is None
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    assert processes.read_api_key() == "sk-1"


def write_quota(tmp_path, monkeypatch, quota, affinity):
    """Write the files of cgroup v2 for a text, and of v1 for a pair of quota and period."""
    monkeypatch.setattr(processes, "_CGROUP", tmp_path)
    (tmp_path / "cpu").mkdir()
    if isinstance(quota, str):
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    for name, text in zip(("quota", "period"), quota if isinstance(quota, tuple) else (), strict=False):
        (tmp_path / "cpu" / f"cpu.cfs_{name}_us").write_text(f"{text}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        (None, 3),
        ("max 100000", 3),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ((-1, 100000), 3),
        ((250000, 100000), 2),
        ((765000, 100000), 3),
        ("100000 0", 3),
        ("abc", 3),
    ],
)
def test_cores_are_those_of_affinity_and_of_quota_of_container(tmp_path, monkeypatch, quota, expected):
    write_quota(tmp_path, monkeypatch, quota, affinity=3)
    assert processes.count_cores() == expected
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert processes.count_cores() == expected


@pytest.mark.parametrize(
    ("quota", "variables", "expected"),
    [
        ("765000 100000", {}, "7"),
        ((765000, 100000), {"OMP_NUM_THREADS": "48"}, "7"),
        ("400000 100000", {"OMP_NUM_THREADS": "48", "LOCAL_WORLD_SIZE": "2"}, "2"),
        ("100000 100000", {"LOCAL_WORLD_SIZE": "2"}, "1"),
        ("400000 100000", {"OMP_NUM_THREADS": "1"}, "1"),
        ("400000 100000", {"OMP_NUM_THREADS": "4,2"}, "4,2"),
        ("max 100000", {}, None),
        ("9600000 100000", {}, None),
    ],
)
def test_commands_limit_threads_to_quota_of_container(tmp_path, monkeypatch, quota, variables, expected):
    write_quota(tmp_path, monkeypatch, quota, affinity=96)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run_command(lambda: None) == 0
    assert os.environ.get("OMP_NUM_THREADS") == expected
