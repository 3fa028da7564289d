"""Who is gone, and why: told by the folders that a launcher gives its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes_lib import processes
from recipes_lib.errors import ConfigError


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders of two processes, of which this one is the first."""
    for number in "01":
        (tmp_path / number).mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    return tmp_path


def run_as(folders, number, body):
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(folders / number / "error.json")}
    subprocess.run([sys.executable, "-c", f"from recipes_lib import processes; {body}"], check=True, env=environment)


def test_a_process_that_left_in_order_is_not_missed(folders):
    processes.register_process()
    run_as(folders, "1", "processes.register_process(); processes.unregister_process()")
    assert processes.find_dead_process() is None


def test_a_process_that_was_killed_is(folders):
    processes.register_process()
    run_as(folders, "1", "processes.register_process()")
    assert processes.find_dead_process() == "process 1 of this machine ended: no error was recorded, so it was killed"


def test_a_process_that_failed_is_with_its_reason(folders):
    run_as(
        folders,
        "1",
        "processes.register_process(); processes.record_failure(ValueError('no\\nmore'), is_unforeseen=True)",
    )
    assert processes.find_dead_process() == "process 1 of this machine ended: ValueError: no"
    # As torch's own handler writes it, so that the launcher's summary has it.
    message = json.loads((folders / "1" / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: no\nmore"
    assert set(message["extraInfo"]) == {"py_callstack", "timestamp"}


def test_a_full_disk_of_the_launcher_hides_nothing(folders, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    processes.register_process()
    monkeypatch.setattr(Path, "write_text", fail)
    monkeypatch.setattr(Path, "unlink", fail)
    processes.register_process()
    processes.record_failure(ConfigError(), is_unforeseen=False)
    processes.unregister_process()
    assert not (folders / "0" / "error.json").exists()


def test_a_lost_connection_is_explained_by_who_is_gone(folders, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    run_as(folders, "1", "processes.register_process()")
    lost = processes.explain_lost_connection(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"))
    assert lost is not None
    assert "process 1" in lost
    assert processes.explain_lost_connection(RuntimeError("the shapes differ")) is None


def test_without_a_launcher_there_is_nobody_to_miss(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    processes.register_process()
    processes.record_failure(ValueError(), is_unforeseen=True)
    assert processes.find_dead_process() is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "another process ended" in str(processes.explain_lost_connection(RuntimeError("Broken pipe"), seconds=0))


@pytest.mark.parametrize("world_size", [None, "1", "x"])
def test_one_process_alone_loses_no_peer(world_size, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    assert processes.explain_lost_connection(BrokenPipeError(32, "Broken pipe"), seconds=0) is None
    assert processes.read_world_size() == 1


def test_a_command_of_one_process_refuses_several(monkeypatch) -> None:
    processes.verify_one_process("recipes synthesize")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes were started"):
        processes.verify_one_process("recipes synthesize")


def test_the_key_of_endpoints_is_in_the_environment_alone(monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "")
    assert processes.read_api_key() is None
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    assert processes.read_api_key() == "sk-1"
