"""``recipes doctor``: the verdict of each capability, for installed, missing and broken packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tomllib
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from packaging.requirements import Requirement
from tests.forked import ROOT

from recipes_lib import hardware
from recipes_lib.commands import doctor
from recipes_lib.models.attention import kernels

CANARY = "hf_canary0123456789"


@pytest.fixture
def no_compiled_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report compiled packages as missing, so that no import process starts."""
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)


def find(findings: list[doctor.Finding], name: str) -> doctor.Finding:
    (match,) = [finding for finding in findings if finding.name == name]
    return match


def test_each_capability_has_one_verdict_without_network(no_compiled_packages, monkeypatch, capsys) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: CANARY)
    monkeypatch.setattr(huggingface_hub, "whoami", lambda: pytest.fail("sent a request"))
    findings = {finding.name: finding for finding in doctor.examine()}
    assert {"python", "packages", "torch", "cpu", "bf16", "attention", "torch.compile"} <= findings.keys()
    assert {"flash-attn", "bitsandbytes", "deepspeed", "tensorboard", "trackio", "wandb"} <= findings.keys()
    assert {"hub login", "disk here", "disk cache"} <= findings.keys()
    assert findings["deepspeed"].verdict == "missing"
    assert findings["deepspeed"].remedy == "pip install 'recipes-lib[deepspeed]'", "works without a checkout"
    declared = [Requirement(line) for line in importlib.metadata.requires(doctor.DISTRIBUTION) or []]
    core = [requirement for requirement in declared if requirement.marker is None]
    assert f"all {len(core)}," in findings["packages"].detail
    assert findings["hub login"].verdict == "ok"
    assert doctor.main([]) == 0
    names = [line.split()[1] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert len(names) == len(findings), "one line per finding"


@pytest.mark.parametrize(("variable", "is_coloured"), [("FORCE_COLOR", True), ("NO_COLOR", False)])
def test_verdicts_have_colours_on_a_terminal(variable: str, is_coloured: bool, monkeypatch, capsys) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding(v, v, "[b]" * 40) for v in ("ok", "broken")])
    doctor.main([])
    codes = ["\x1b[32m", "\x1b[0m", "\x1b[31m", "\x1b[0m"] if is_coloured else ["", "", "", ""]
    expected = "{}ok{}      ok                {rest}\n{}broken{}  broken            {rest}\n"
    assert capsys.readouterr().out == expected.format(*codes, rest="[b]" * 40)


def test_named_extras_exist_in_pyproject() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"""_extra\(['"](\w+)""", Path(doctor.__file__).read_text())
    assert "gpu" in named
    assert set(named) <= set(extras)


@pytest.mark.parametrize(
    ("version", "verdict"), [("0.1", "broken"), (None, "missing")], ids=["too old", "not installed"]
)
def test_exit_code_is_2_for_invalid_core_package(version, verdict, no_compiled_packages, monkeypatch, capsys) -> None:
    real = doctor.find_version
    monkeypatch.setattr(doctor, "find_version", lambda name: version if name == "trl" else real(name))
    assert doctor.main([]) == 2
    lines = capsys.readouterr().out.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.split()[1] == "trl"]
    assert lines[at].startswith(verdict)
    assert lines[at + 1].strip().startswith("pip install recipes-lib,")


def test_failing_probe_becomes_finding(no_compiled_packages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError("no entry\nsecond line")

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    finding = find(doctor.examine(), "disk")
    assert finding == doctor.Finding(name="disk", verdict="broken", detail="PermissionError: no entry")


@pytest.mark.parametrize(
    ("source", "verdict", "detail"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", "broken", "ImportError: libcudart.so.13: cannot open"),
        ("import os; os.abort()", "broken", "its import ended with code -6"),
        ("", "ok", "of unknown version"),
    ],
    ids=["raises", "crashes", "has no metadata"],
)
def test_import_of_compiled_package(source, verdict, detail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    finding = doctor._try_import("flash-attn", "compile it again")
    assert (finding.verdict, finding.remedy) == (verdict, "compile it again" if verdict == "broken" else "")
    assert finding.detail.startswith(detail)


def test_import_reports_version_or_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor._try_import("packaging", "")
    assert (finding.verdict, finding.detail) == ("ok", importlib.metadata.version("packaging"))
    monkeypatch.setattr(doctor, "TRIAL_SECONDS", 0)
    finding = doctor._try_import("packaging", "compile it again")
    assert (finding.verdict, finding.detail) == ("broken", "its import did not end within 0 s")
    assert "run it again" in finding.remedy, "a first import from a slow disk takes longer than the limit"


@pytest.mark.parametrize(
    ("capability", "installed", "verdict", "detail"),
    [
        ((9, 0), "flash_attention_3", "ok", "packed rows use flash_attention_3"),
        ((9, 0), "flash_attention_2", "ok", "packed rows use flash_attention_2 (flash_attention_3 is not installed)"),
        ((8, 0), "", "ok", "varlen (flash_attention_3 needs a GPU of compute capability 9.0; flash_attention_2 is not"),
        ((10, 0), "flash_attention_3", "ok", "varlen (flash_attention_3 needs a GPU of compute capability 9.0; "),
        ((7, 5), "", "missing", "packed rows use sdpa (flash_attention_3 needs a GPU of compute capability 9.0; "),
    ],
)
def test_attention_matches_training_choice(capability, installed, verdict, detail, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for name in kernels.FLASH_IS_INSTALLED:
        monkeypatch.setitem(kernels.FLASH_IS_INSTALLED, name, lambda name=name: name == installed)
    (finding,) = doctor._probe_attention()
    assert finding.verdict == verdict
    assert detail in finding.detail


def test_gpu_that_torch_cannot_use_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "find_gpu_obstacle", lambda _: "the driver is too old")
    finding = find(doctor._probe_torch(), "gpu")
    assert finding.verdict == "broken"
    assert "the driver is too old" in finding.detail
    assert "PIP_EXTRA_INDEX_URL" in finding.remedy
    assert "error 802: start the fabric manager" in finding.remedy, "NVSwitches of machines with eight GPUs"


def test_broken_torch_is_a_core_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (finding,) = doctor._run_probe("torch", doctor._probe_torch)
    assert (finding.verdict, finding.is_core) == ("broken", True)


def test_gpu_whose_properties_cannot_be_read_is_a_core_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (finding,) = doctor._run_probe("torch", doctor._probe_torch)
    assert (finding.verdict, finding.is_core) == ("broken", True)


def test_each_gpu_is_listed_with_its_memory_and_has_run_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch without kernels for the GPU (V100 with CUDA 13) fails at the first one, not before."""

    def run_kernel(size: int, device: str) -> torch.Tensor:
        if device == "cuda:1":
            raise torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device\nhint")
        return torch.zeros(size)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="V100", total_memory=34e9))
    monkeypatch.setattr(torch, "ones", run_kernel)
    first, second = (finding for finding in doctor._probe_torch() if finding.name.startswith("gpu"))
    assert (first.name, first.verdict, first.detail) == ("gpu 0", "ok", "V100, 34 GB")
    assert (second.name, second.verdict) == ("gpu 1", "broken")
    assert "V100, 34 GB: CUDA error: no kernel image is available" in second.detail
    assert "older GPUs need torch for an older CUDA" in second.remedy


@pytest.mark.parametrize(("supported", "verdict"), [(True, "ok"), (False, "missing")])
def test_bf16_verdict_is_that_of_the_hardware(supported: bool, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "supports_bf16", lambda: supported)
    assert [finding.verdict for finding in doctor._probe_bf16()] == [verdict]


@pytest.mark.parametrize(("token", "verdict"), [(CANARY, "ok"), (None, "missing")])
def test_hub_login_does_not_show_the_token(token: str | None, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    finding = find(list(doctor._probe_hub_login()), "hub login")
    assert finding.verdict == verdict
    assert CANARY not in str(finding)


@pytest.mark.parametrize(("free", "verdict"), [(9e9, "missing"), (11e9, "ok")])
def test_low_disk_space_has_remedy(free: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1e12, 1e12 - free, free))
    monkeypatch.setattr(os, "access", lambda path, mode: True)  # A user may have no home.
    for finding in doctor._probe_disk():
        assert finding.verdict == verdict
        assert bool(finding.remedy) == (verdict == "missing")


def test_unwritable_folder_has_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the superuser, who may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    findings = list(doctor._probe_disk())
    assert [finding.verdict for finding in findings] == ["missing", "missing"]
    assert [finding.remedy.split()[1] for finding in findings] == ["output_dir", "HF_HOME"]
