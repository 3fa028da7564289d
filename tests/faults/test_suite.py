"""Failure costs nothing: whatever happens to a run, it ends as documented, and the same command ends with the bits."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
from tests.faults import suite
from tests.faults.laboratory import Laboratory, Trial, Violation, verify_equal
from tests.faults.moments import Moments
from tests.forked import ROOT
from tests.recipes import paused


def run_suite(output, *flags):
    """Run it as ``make soak`` does, and return every trial."""
    command = [sys.executable, "-m", "tests.faults.suite", "--output", str(output), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return json.loads((output / "faults.json").read_text())["trials"], done.stdout


def test_a_few_faults_of_each_cheap_kind_cost_nothing(tmp_path):
    trials, told = run_suite(tmp_path, "--tier", "quick", "--seed", "11")
    kinds = {trial["kind"] for trial in trials}
    assert kinds >= {"kill inside a write", "kill -9 in saving", "NaN in the loss", "the same command twice at once"}
    assert all(trial["ended"] and trial["equal"] for trial in trials)
    table = (tmp_path / "faults.md").read_text()
    assert table in told
    assert "| kill -9 in saving | 1 | 1 | 1 | 1 |" in table


@pytest.mark.parametrize("phase", paused.WHERE)
def test_every_place_that_a_fault_waits_for_is_there(phase):
    module, _, kind = paused.WHERE[phase][0].partition(":")
    owner = importlib.import_module(module)
    assert callable(getattr(getattr(owner, kind) if kind else owner, paused.WHERE[phase][1]))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", suite.FULL)
def test_no_fault_of_any_kind_costs_anything(tmp_path, kind):
    if kind == "the disk is full" and subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    trials, _ = run_suite(tmp_path, "--kind", kind, "--seed", "11")
    assert len(trials) == suite.FULL[kind][1]


def test_a_violation_is_told_with_the_way_to_repeat_it_and_ends_a_soak(tmp_path, monkeypatch, capsys):
    def violate(lab, trial, random):
        trial.what = f"drawn {random.random()}"
        trial.ended = True
        raise Violation("the weights differ")

    monkeypatch.setattr(suite, "FULL", {"a planted fault": (violate, 3, 1)})
    monkeypatch.setattr(suite, "import_recipes", lambda: None)
    monkeypatch.setattr(Laboratory, "prepare", lambda self: None)
    monkeypatch.setattr(suite.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    assert suite.main(["--seed", "5", "--minutes", "1"], can_mount=True) == 1
    told = capsys.readouterr().out
    assert told.count("VIOLATION: the weights differ") == 1
    again = 'python -m tests.faults.suite --kind "a planted fault" --number 0 --seed 5'
    assert again in told
    assert "| a planted fault | 1 | 1 | 0 | 0 |" in told
    # The very same moment is drawn again.
    suite.main(["--kind", "a planted fault", "--number", "0", "--seed", "5"], can_mount=True)
    (drawn,) = {line.partition("drawn ")[2] for line in told.splitlines() if "drawn" in line}
    assert drawn in capsys.readouterr().out


def test_what_could_not_be_resumed_or_equal_counts_for_neither():
    trials = [Trial("one", "0", ended=True, resumed=None, equal=True), Trial("one", "1", ended=True, resumed=None)]
    assert suite.tabulate(trials).splitlines()[-1] == "| one | 2 | 2 | – | 1 |"


def test_one_bit_is_a_difference(tmp_path):
    import torch
    from safetensors.torch import save_file

    for name, value in (("one", 0.0), ("other", -0.0)):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.tensor([1.0, value])}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 1.0, "grad_norm": 2.0}\n')
    verify_equal(tmp_path / "one", tmp_path / "one")
    with pytest.raises(Violation, match="1 tensors differ"):
        verify_equal(tmp_path / "one", tmp_path / "other")


def test_moments_act_once_and_are_counted():
    acted = []
    moments = Moments(2, lambda: acted.append(moments.count))
    assert not moments.was_met
    for _ in range(3):
        moments.meet()
    assert acted == [2]
    assert moments.was_met
    assert moments.count == 3
