"""``recipes prove`` on a CPU: rows, page, resumption and failing checks."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import build_tokenizer, save_model

from recipes_lib.commands import prove
from recipes_lib.errors import EXIT_DONE, EXIT_USER, ConfigError
from recipes_lib.files import try_lock
from recipes_lib.proving import checks
from recipes_lib.proving.bench import Bench
from recipes_lib.proving.checks import Check
from recipes_lib.proving.results import PASSED, ROWS_FILE, SKIPPED
from recipes_lib.training.guards.watchdog import WATCHDOG

QUICK = ("environment", "synchronisations", "gpus")
"""Checks that take no time on a CPU: one passes, those of GPUs are skipped."""


def read_file(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / ROWS_FILE).read_text().splitlines() if line]


def test_run_writes_rows_and_page_and_skips_passed_checks(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--output", str(tmp_path / "my proof"), "--only", *QUICK]
    assert prove.main(flags) == EXIT_DONE
    rows = read_file(tmp_path / "my proof")
    assert {row["status"] for row in rows} == {PASSED, SKIPPED}
    assert {row["reason"] for row in rows if row["status"] == SKIPPED} == {"there is no GPU", "needs 2 GPUs"}
    page = (tmp_path / "my proof" / prove.PAGE).read_text()
    assert f"- torch: {version('torch')}" in page
    assert all(f"| {row['check']} |" in page for row in rows)
    capsys.readouterr()
    assert prove.main(flags) == EXIT_DONE
    output = capsys.readouterr().out
    assert output.startswith("resumed: 1 check passed before\n")
    assert "passed  environment" in output
    again = read_file(tmp_path / "my proof")
    assert len(again) == len(rows) + sum(row["status"] == SKIPPED for row in rows), "a passed check ran again"


def test_failing_check_is_a_row_and_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(bench: Bench) -> Mapping[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(checks, "list_checks", lambda: [Check("one", "fails", fail)])
    assert prove.main(["--output", str(tmp_path)]) == EXIT_USER
    assert "| one | fails | failed |" in (tmp_path / prove.PAGE).read_text()


def test_saved_models_show_no_progress_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def save(bench: Bench) -> Mapping[str, Any]:
        save_model(bench.folder, build_tokenizer())
        return {}

    monkeypatch.setattr(checks, "list_checks", lambda: [Check("one", "saves", save)])
    assert prove.main(["--output", str(tmp_path)]) == EXIT_DONE
    assert capsys.readouterr().err == ""


def test_rows_of_other_machines_and_broken_rows_are_ignored(tmp_path, monkeypatch, capsys) -> None:
    calls: list[str] = []

    def count(bench: Bench) -> Mapping[str, Any]:
        calls.append(bench.describe())
        return {"calls": len(calls)}

    monkeypatch.setattr(checks, "list_checks", lambda: [Check("one", "counts", count)])
    flags = ["--output", str(tmp_path)]
    assert prove.main(flags) == prove.main(flags) == EXIT_DONE
    assert len(calls) == 1
    rows = tmp_path / ROWS_FILE
    rows.write_text(rows.read_text().replace(calls[0], "a laptop, small sizes"))
    assert prove.main(flags) == EXIT_DONE
    assert len(calls) == 2, "rows of another machine were reused"
    rows.write_text(rows.read_text()[:-20])
    assert prove.main(flags) == EXIT_DONE
    assert len(calls) == 3
    assert prove.main(flags) == EXIT_DONE
    assert len(calls) == 3, "the row after the truncated one was lost"
    assert "calls 3" in (tmp_path / prove.PAGE).read_text()


def test_rows_of_another_commit_are_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = ["first", "first", "second"]
    calls: list[str] = []

    def count(_: Bench) -> Mapping[str, Any]:
        calls.append(commits[0])
        return {}

    monkeypatch.setattr(checks, "list_checks", lambda: [Check("one", "counts", count)])
    monkeypatch.setattr("recipes_lib.proving.bench.read_git_commit", lambda: commits[0])
    while commits:
        assert prove.main(["--output", str(tmp_path)]) == EXIT_DONE
        del commits[0]
    assert calls == ["first", "second"]


def test_check_of_several_gpus_runs_again_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def count(bench: Bench) -> Mapping[str, Any]:
        calls.append(bench.num_gpus)
        return {"gpus": bench.num_gpus}

    monkeypatch.setattr(checks, "list_checks", lambda: [Check("all", "counts", count, min_gpus=2)])
    for name, value in (("is_available", True), ("device_count", 8), ("get_device_name", "a GPU")):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for num_gpus in (2, 2, 4, 2):
        assert prove.main(["--output", str(tmp_path), "--gpus", str(num_gpus)]) == EXIT_DONE
    assert calls == [2, 4]


def test_page_is_written_after_each_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(bench: Bench) -> Mapping[str, Any]:
        raise KeyboardInterrupt

    def watch(bench: Bench) -> Mapping[str, Any]:
        return {"phase": WATCHDOG.phase, "watched": "watchdog" in {thread.name for thread in threading.enumerate()}}

    listed = [Check("one", "is quick", watch), Check("two", "is interrupted", interrupt)]
    monkeypatch.setattr(checks, "list_checks", lambda: listed)
    with pytest.raises(KeyboardInterrupt):
        prove.main(["--output", str(tmp_path)])
    assert "| one | is quick | passed |" in (page := (tmp_path / prove.PAGE).read_text())
    assert "phase the check one, watched True" in page, "a check that hangs would never end"
    listed.append(Check("three", "is asked for", lambda _: {}))
    assert prove.main(["--output", str(tmp_path), "--only", "three"]) == EXIT_DONE
    assert "| one | is quick | passed |" in (tmp_path / prove.PAGE).read_text()


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("a", encoding="utf-8") as lock:
        assert try_lock(lock)
        with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}: another `recipes prove` runs in it")):
            prove.main(["--output", str(tmp_path), "--only", "environment"])


def test_process_of_a_check_holds_the_lock_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may outlive `recipes prove`, whose next run would compete with it for the GPU."""
    code = (
        "import pathlib, sys\n"
        "held = {str(file.resolve()) for file in pathlib.Path('/proc/self/fd').iterdir()}\n"
        "sys.exit(sys.argv[1] not in held)"
    )

    def run(bench: Bench) -> dict[str, Any]:
        return {"code": bench.launch(["-c", code, str(tmp_path / "lock")], {}, tmp_path / "log")}

    monkeypatch.setattr(checks, "list_checks", lambda: [Check("holder", "holds the lock", run)])
    assert prove.main(["--output", str(tmp_path)]) == EXIT_DONE
    assert read_file(tmp_path)[0]["figures"] == {"code": 0}


def test_unknown_check_and_gpu_count_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no check speed\n    write one of environment, attention-varlen"):
        prove.main(["--only", "environment", "speed"])
    with pytest.raises(ConfigError, match="--minutes: is nan"):
        prove.main(["--minutes", "nan", "--output", str(tmp_path / "x")])
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="2 are requested, and this machine has 0"):
            prove.main(["--gpus", "2", "--output", str(tmp_path / "x")])
