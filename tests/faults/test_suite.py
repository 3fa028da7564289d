"""The fault suite: runs with an injected fault end as documented and resume bit-identically."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
from tests.faults import suite
from tests.faults.laboratory import Harness, Trial, Violation, verify_equal
from tests.faults.moments import EventCounter
from tests.forked import ROOT, Launch
from tests.recipes import paused


def read_trials(output, done):
    """Return the trials of a run of the suite that ended without a violation."""
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return json.loads((output / "faults.json").read_text())["trials"]


def test_quick_tier_resumes_bit_identically(tmp_path):
    done = Launch("tests.faults.suite", "--output", tmp_path, "--tier", "quick", "--seed", "11").finish(600)
    trials = read_trials(tmp_path, done)
    kinds = {trial["kind"] for trial in trials}
    assert kinds >= {"kill -9 in a write", "damaged checkpoint file", "NaN in the loss", "same command twice at once"}
    assert all(trial["ended"] and trial["equal"] for trial in trials)
    table = (tmp_path / "faults.md").read_text()
    assert table in done.stdout
    assert "| kill -9 in a write | 1 | 1 | 1 | 1 |" in table


@pytest.mark.parametrize("phase", paused.WHERE)
def test_patched_function_of_phase_exists(phase):
    module, _, kind = paused.WHERE[phase][0].partition(":")
    owner = importlib.import_module(module)
    assert callable(getattr(getattr(owner, kind) if kind else owner, paused.WHERE[phase][1]))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", suite.FULL)
def test_full_tier_of_kind(tmp_path, kind):
    if kind == "full disk" and subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    command = [sys.executable, "-m", "tests.faults.suite", "--output", tmp_path, "--kind", kind, "--seed", "11"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert len(read_trials(tmp_path, done)) == suite.FULL[kind][1]


def test_violation_is_reported_and_ends_soak(tmp_path, monkeypatch, capsys):
    def violate(harness, trial, random):
        trial.what = f"drawn {random.random()}"
        trial.ended = True
        raise Violation("the weights differ")

    monkeypatch.setattr(suite, "FULL", {"a planted fault": (violate, 3, 1)})
    monkeypatch.setattr(suite, "import_recipes", lambda: None)
    monkeypatch.setattr(Harness, "prepare", lambda self: None)
    monkeypatch.setattr(suite.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    assert suite.main(["--seed", "5", "--minutes", "1"], can_mount=True) == 1
    output = capsys.readouterr().out
    assert output.count("VIOLATION: the weights differ") == 1
    again = 'python -m tests.faults.suite --kind "a planted fault" --number 0 --seed 5'
    assert again in output
    assert "| a planted fault | 1 | 1 | 0 | 0 |" in output
    # Trials are reproducible.
    suite.main(["--kind", "a planted fault", "--number", "0", "--seed", "5"], can_mount=True)
    (drawn,) = {line.partition("drawn ")[2] for line in output.splitlines() if "drawn" in line}
    assert drawn in capsys.readouterr().out


def test_table_shows_dash_if_not_applicable():
    trials = [Trial("one", "0", ended=True, resumed=None, equal=True), Trial("one", "1", ended=True, resumed=None)]
    assert suite.tabulate(trials).splitlines()[-1] == "| one | 2 | 2 | – | 1 |"


def test_verify_equal_detects_sign_of_zero(tmp_path):
    import torch
    from safetensors.torch import save_file

    for name, value in (("one", 0.0), ("other", -0.0)):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.tensor([1.0, value])}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 1.0, "grad_norm": 2.0}\n')
    verify_equal(tmp_path / "one", tmp_path / "one")
    with pytest.raises(Violation, match="1 tensors differ"):
        verify_equal(tmp_path / "one", tmp_path / "other")


def test_event_counter_acts_once():
    acted = []
    events = EventCounter(2, lambda: acted.append(events.count))
    assert not events.has_acted
    for _ in range(3):
        events.count_event()
    assert acted == [2]
    assert events.has_acted
    assert events.count == 3
