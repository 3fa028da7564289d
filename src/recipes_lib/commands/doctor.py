"""``recipes doctor``: one verdict per capability of this machine, and one line on how to get what is absent."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recipes_lib.errors import EXIT_DONE, EXIT_USER

DISTRIBUTION = "recipes-lib"
MIN_FREE_GB = 10
"""Below this, the checkpoints of even a small model no longer fit."""

TRIAL_SECONDS = 60
"""An import that takes longer counts as broken."""

Verdict = Literal["ok", "missing", "broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One capability: whether it is there, what was seen, and how to get it.

    Attributes:
        name: The capability.
        verdict: ``broken`` means installed but unusable.
        detail: What was seen: a version, a device, the error of a failed import.
        remedy: How to get it, or what to beware of; empty when there is nothing to do.
        is_core: True where no recipe runs without it.
    """

    name: str
    verdict: Verdict
    detail: str
    remedy: str = ""
    is_core: bool = False

    def __str__(self) -> str:
        line = f"{self.verdict:8}{self.name:18}{self.detail}"
        return line + (f"\n{'':26}{self.remedy}" if self.remedy else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every finding; return ``EXIT_USER`` when something that every recipe needs is missing or broken."""
    parser = argparse.ArgumentParser(prog="recipes doctor", description="Say what this machine can do.")
    parser.add_argument("--online", action="store_true", help="also ask the Hub whether the login is valid")
    options = parser.parse_args(arguments)
    findings = examine(is_online=options.online)
    sys.stdout.write("\n".join(map(str, findings)) + "\n")
    return EXIT_USER if any(finding.is_core and finding.verdict != "ok" for finding in findings) else EXIT_DONE


def examine(*, is_online: bool = False) -> list[Finding]:
    """Return the findings of every probe; a probe that fails is itself a finding, never an error."""
    trials = [
        _Trial(name="flash-attn", module="flash_attn", remedy=f"{_extra('flash')} --no-build-isolation"),
        _Trial(name="bitsandbytes", module="bitsandbytes", remedy=_extra("gpu")),
        _Trial(name="liger-kernel", module="liger_kernel", remedy=_extra("gpu")),
        _Trial(name="torchao", module="torchao", remedy=_extra("gpu")),
        _Trial(name="deepspeed", module="deepspeed", remedy=_extra("deepspeed")),
        _Trial(name="datatrove", module="datatrove", remedy=_extra("corpus")),
    ]
    started = [(trial, trial.start()) for trial in trials]
    probes: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("python", _probe_python),
        ("packages", _probe_packages),
        ("torch", _probe_torch),
        ("bf16", _probe_bf16),
        ("varlen_attn", _probe_varlen_attention),
        ("torch.compile", _probe_compile),
        ("trackers", _probe_trackers),
        ("hub login", lambda: [_probe_hub_login(is_online)]),
        ("disk", _probe_disk),
        ("launch default", _probe_launch_default),
        ("compiled packages", lambda: [trial.finish(process) for trial, process in started]),
    ]
    return [finding for name, probe in probes for finding in _run_probe(name, probe)]


def _run_probe(name: str, probe: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return list(probe())
    except Exception as error:
        return [Finding(name=name, verdict="broken", detail=_first_line(error))]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _extra(name: str) -> str:
    return f'pip install -c constraints.txt -e ".[{name}]"'


def _probe_python() -> Iterator[Finding]:
    detail = f"{platform.python_version()} at {sys.executable}"
    yield Finding(name="python", verdict="ok", detail=detail, is_core=True)


def _probe_packages() -> list[Finding]:
    """Compare what is installed with the ranges that the package itself declares."""
    from packaging.requirements import Requirement

    try:
        declared = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION) or []]
    except importlib.metadata.PackageNotFoundError:
        return [_core_package(DISTRIBUTION, "missing", "not installed")]
    required = [requirement for requirement in declared if requirement.marker is None]
    findings = []
    for requirement in required:
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            findings.append(_core_package(requirement.name, "missing", "not installed"))
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            detail = f"{version} is installed, {requirement.specifier} is needed"
            findings.append(_core_package(requirement.name, "broken", detail))
    if findings:
        return findings
    named = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "trl", "accelerate"))
    return [Finding(name="packages", verdict="ok", detail=f"all {len(required)}, among them {named}", is_core=True)]


def _core_package(name: str, verdict: Verdict, detail: str) -> Finding:
    return Finding(name=name, verdict=verdict, detail=detail, remedy="run `make install`", is_core=True)


def _probe_torch() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:
        yield _core_package("torch", "broken", _first_line(error))
        return
    yield Finding(name="torch", verdict="ok", detail=torch.__version__, is_core=True)
    threads = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} of them (OMP_NUM_THREADS decides)"
    yield Finding(name="cpu", verdict="ok", detail=threads)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            detail = f"{device.name}, {device.total_memory / 1e9:.0f} GB"
            yield Finding(name=f"gpu {index}", verdict="ok", detail=detail)
    elif torch.version.cuda is None and shutil.which("nvidia-smi"):
        detail = f"there is an NVIDIA driver, but torch {torch.__version__} is a build without CUDA"
        remedy = "install a CUDA build of the same torch version"
        yield Finding(name="gpu", verdict="broken", detail=detail, remedy=remedy)
    else:
        yield Finding(name="gpu", verdict="missing", detail="no CUDA device; recipes run on the CPU")


def _probe_bf16() -> Iterator[Finding]:
    from recipes_lib.hardware import supports_bf16

    if supports_bf16():
        yield Finding(name="bf16", verdict="ok", detail="multiplied in hardware")
    else:
        yield Finding(name="bf16", verdict="missing", detail="not in this hardware; recipes compute in float32")


def _probe_varlen_attention() -> list[Finding]:
    import torch

    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        detail = f"not in torch {torch.__version__}"
        return [Finding(name="varlen_attn", verdict="missing", detail=detail, remedy="install torch >= 2.11")]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0):
        return [Finding(name="varlen_attn", verdict="ok", detail="packed rows use torch's flash kernel")]
    detail = "in this torch, but needs an NVIDIA GPU of compute capability 8.0; packed rows use sdpa"
    return [Finding(name="varlen_attn", verdict="missing", detail=detail)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """The import of a compiled package in a process of its own, where a crash or a slow start harms nobody."""

    name: str
    module: str
    remedy: str

    def start(self) -> subprocess.Popen[str] | None:
        """Begin the import; ``None`` when the package is not installed."""
        if importlib.util.find_spec(self.module) is None:
            return None
        command = [sys.executable, "-c", f"import {self.module}"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def finish(self, process: subprocess.Popen[str] | None) -> Finding:
        """Wait for the import and tell how it went."""
        if process is None:
            return Finding(name=self.name, verdict="missing", detail="not installed", remedy=self.remedy)
        try:
            told = process.communicate(timeout=TRIAL_SECONDS)[1].strip()
        except subprocess.TimeoutExpired:
            process.kill()
            told = f"its import did not end within {TRIAL_SECONDS} s"
        if process.wait() != 0:
            detail = told.splitlines()[-1] if told else f"its import ended with code {process.returncode}"
            return Finding(name=self.name, verdict="broken", detail=detail, remedy=self.remedy)
        return Finding(name=self.name, verdict="ok", detail=importlib.metadata.version(self.name))


def _probe_compile() -> list[Finding]:
    from recipes_lib.hardware import find_compiler

    compiler = find_compiler()
    if compiler is None:
        remedy = "install a C++ compiler (on Debian: apt install g++)"
        return [Finding(name="torch.compile", verdict="missing", detail="no C++ compiler", remedy=remedy)]
    return [Finding(name="torch.compile", verdict="ok", detail=f"with {compiler}")]


def _probe_trackers() -> Iterator[Finding]:
    for name in ("tensorboard", "trackio", "wandb"):
        try:
            yield Finding(name=name, verdict="ok", detail=importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            remedy = _extra("track") if name == "tensorboard" else f"pip install {name}"
            yield Finding(name=name, verdict="missing", detail="not installed", remedy=remedy)


def _probe_hub_login(is_online: bool) -> Finding:
    """Look for a token; ask the Hub about it only when told to. The token itself never leaves this function."""
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        remedy = "hf auth login (needed only for gated models and for publishing)"
        return Finding(name="hub login", verdict="missing", detail="no token", remedy=remedy)
    if not is_online:
        return Finding(name="hub login", verdict="ok", detail="a token is stored; --online asks whether it is valid")
    try:
        return Finding(name="hub login", verdict="ok", detail=f"as {huggingface_hub.whoami()['name']}")
    except Exception as error:
        detail = f"the Hub did not accept the token or was not reached ({type(error).__name__})"
        return Finding(name="hub login", verdict="broken", detail=detail, remedy="hf auth login")


def _probe_disk() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HOME

    for name, folder, key in (("disk here", Path.cwd(), "output_dir"), ("disk cache", Path(HF_HOME), "HF_HOME")):
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        free_gb = shutil.disk_usage(existing).free / 1e9
        detail = f"{free_gb:.0f} GB free in {folder}"
        if free_gb >= MIN_FREE_GB:
            yield Finding(name=name, verdict="ok", detail=detail)
        else:
            remedy = f"free some space, or set {key} to another disk"
            yield Finding(name=name, verdict="missing", detail=detail, remedy=remedy)


def _probe_launch_default() -> list[Finding]:
    """Look for the file that ``accelerate config`` leaves behind, which decides launches that do not name one."""
    from huggingface_hub.constants import HF_HOME

    folder = Path(HF_HOME) / "accelerate"
    found = [path for path in (folder / "default_config.yaml", folder / "default_config.json") if path.is_file()]
    if not found:
        return [Finding(name="launch default", verdict="ok", detail="none; a launch is what its --config_file says")]
    detail = f"{found[0]} decides every `accelerate launch` that names no file"
    return [Finding(name="launch default", verdict="ok", detail=detail, remedy="always pass --config_file")]
