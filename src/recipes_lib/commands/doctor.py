"""``recipes doctor``: report the capabilities of this machine, and how to install missing ones."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from recipes_lib.config.command_flags import CommandParser
from recipes_lib.environment import find_version
from recipes_lib.errors import EXIT_DONE, EXIT_USER, explain_refusal
from recipes_lib.quantities import pluralize

DISTRIBUTION = "recipes-lib"
MIN_FREE_GB = 10
"""Free disk space in GB that checkpoints of a small model need."""

TRIAL_SECONDS = 60
"""Time limit of an import."""

Verdict = Literal["ok", "missing", "broken"]
_COLOURS: Final[Mapping[Verdict, str]] = {"ok": "green", "missing": "yellow", "broken": "red"}
"""Colours on a terminal, except where ``NO_COLOR`` is set."""


class Finding(NamedTuple):
    """One capability: verdict, details, and how to install it.

    Attributes:
        name: Name of the capability.
        verdict: ``broken`` means installed but unusable.
        detail: A version, a device, or the error of a failed import.
        remedy: How to install or repair it, or a caveat; empty if there is nothing to do.
        is_core: Whether every recipe needs it.
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
    """Run the command; return ``EXIT_USER`` if something that every recipe needs is missing or broken."""
    CommandParser("doctor").parse_args(arguments)
    findings = examine()
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        line = Text(str(finding))
        line.stylize(_COLOURS[finding.verdict], 0, len(finding.verdict))
        console.print(line)
    return EXIT_USER if any(finding.is_core and finding.verdict != "ok" for finding in findings) else EXIT_DONE


def examine() -> list[Finding]:
    """Return the findings of every probe; a failing probe is a finding, not an error."""
    compiled = {
        "flash-attn": f"{_extra('flash')} --no-build-isolation",
        **dict.fromkeys(("bitsandbytes", "liger-kernel", "torchao"), _extra("gpu")),
        "deepspeed": _extra("deepspeed"),
        "datatrove": _extra("corpus"),
    }
    python = Finding("python", "ok", f"{platform.python_version()} at {sys.executable}", is_core=True)
    probes: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("packages", _probe_packages),
        ("torch", _probe_torch),
        ("bf16", _probe_bf16),
        ("attention", _probe_attention),
        ("torch.compile", _probe_compile),
        ("trackers", _probe_trackers),
        ("hub login", _probe_hub_login),
        ("disk", _probe_disk),
    ]
    # In parallel, because each of these imports takes seconds.
    with ThreadPoolExecutor() as pool:
        imports = pool.map(lambda name: _run_probe(name, lambda: [_try_import(name, compiled[name])]), compiled)
        return list(itertools.chain([python], *(_run_probe(*probe) for probe in probes), *imports))


def _run_probe(name: str, probe: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return list(probe())
    except Exception as error:
        detail = f"{type(error).__name__}: {error}".splitlines()[0]
        is_core = name in ("packages", "torch")
        return [_core_package(name, "broken", detail) if is_core else Finding(name, "broken", detail)]


def _judge(name: str, obstacle: str, works: str, remedy: str = "") -> Finding:
    """Return a finding: ``works`` without an obstacle."""
    return Finding(name, "missing", obstacle, remedy) if obstacle else Finding(name, "ok", works)


def _extra(name: str) -> str:
    # Of the installed package, so that it works without a checkout.
    return f"pip install 'recipes-lib[{name}]'"


def _probe_packages() -> list[Finding]:
    """Compare installed versions with the requirements in the metadata of the package."""
    from packaging.requirements import Requirement

    declared = map(Requirement, importlib.metadata.requires(DISTRIBUTION) or [])
    # Requirements of extras have a marker, `extra == "gpu"`.
    required = [requirement for requirement in declared if requirement.marker is None]
    findings = []
    for requirement in required:
        version = find_version(requirement.name)
        if version is None:
            findings.append(_core_package(requirement.name, "missing", "not installed"))
        elif not requirement.specifier.contains(version, prereleases=True):
            detail = f"{version} is installed, {requirement.specifier} is needed"
            findings.append(_core_package(requirement.name, "broken", detail))
    if findings:
        return findings
    named = ", ".join(f"{name} {find_version(name)}" for name in ("transformers", "trl", "accelerate"))
    return [Finding("packages", "ok", f"all {len(required)}, among them {named}", is_core=True)]


def _core_package(name: str, verdict: Verdict, detail: str) -> Finding:
    return Finding(name, verdict, detail, "pip install recipes-lib, which installs what it needs", is_core=True)


def _probe_torch() -> Iterator[Finding]:
    import torch

    from recipes_lib.hardware import INSTALL_CUDA, find_gpu_obstacle
    from recipes_lib.processes import count_cores
    from recipes_lib.training.layouts.launch_environment import read_environment

    yield Finding("torch", "ok", torch.__version__, is_core=True)
    threads = f"torch uses {pluralize(torch.get_num_threads(), 'thread')} (OMP_NUM_THREADS sets them)"
    yield Finding("cpu", "ok", f"{pluralize(count_cores(), 'core')}, {threads}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            detail = f"{device.name}, {device.total_memory / 1e9:.0f} GB"
            try:
                # A kernel is run: a GPU that this build of torch has no kernels for is available, too.
                torch.ones(1, device=f"cuda:{index}").item()
                yield Finding(f"gpu {index}", "ok", detail)
            except RuntimeError as error:
                found = f"{detail}: {error}".splitlines()[0]
                known = explain_refusal(error)
                yield Finding(f"gpu {index}", "broken", found, known.remedy if known else INSTALL_CUDA)
    elif obstacle := find_gpu_obstacle(read_environment()):
        yield Finding("gpu", "broken", f"torch cannot use it: {obstacle}", INSTALL_CUDA)
    else:
        yield Finding("gpu", "missing", "no CUDA device; recipes run on the CPU")


def _probe_bf16() -> Iterator[Finding]:
    from recipes_lib.hardware import supports_bf16

    obstacle = "" if supports_bf16() else "not supported by the hardware; recipes compute in float32"
    yield _judge("bf16", obstacle, "supported by the hardware")


def _probe_attention() -> Iterator[Finding]:
    """Report the attention implementation that training chooses here for packed rows of a Llama, and why."""
    import torch
    from transformers import LlamaConfig

    from recipes_lib.models.attention.kernels import choose_kernel, explain_choice

    if not torch.cuda.is_available():
        yield Finding("attention", "missing", "no CUDA device; packed rows use sdpa")
        return
    config, device = LlamaConfig(), torch.device("cuda")
    chosen = choose_kernel(config, None, device=device, compute_dtype=torch.bfloat16, packing=True).implementation
    reason = explain_choice(chosen, config, device, torch.bfloat16)
    yield Finding("attention", "missing" if chosen == "sdpa" else "ok", f"packed rows use {reason}")


def _try_import(name: str, remedy: str) -> Finding:
    """Import a compiled package in a subprocess, so that a crash or a hang is contained."""
    module = name.replace("-", "_")
    if importlib.util.find_spec(module) is None:
        return Finding(name, "missing", "not installed", remedy)
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TRIAL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        detail = f"its import did not end within {TRIAL_SECONDS} s"
        return Finding(name, "broken", detail, "run it again: the first import is slow, and it is broken if none ends")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"its import ended with code {done.returncode}"]
        return Finding(name, "broken", lines[-1], remedy)
    # Importable without metadata: a source tree on the path, or a build under another distribution name.
    return Finding(name, "ok", find_version(name) or "of unknown version")


def _probe_compile() -> Iterator[Finding]:
    from recipes_lib.hardware import INSTALL_COMPILER, find_compiler_obstacle

    works = "Inductor and Triton can compile kernels"
    yield _judge("torch.compile", find_compiler_obstacle(), works, INSTALL_COMPILER)


def _probe_trackers() -> Iterator[Finding]:
    for name in ("tensorboard", "trackio", "wandb"):
        remedy = _extra("track") if name == "tensorboard" else f"pip install {name}"
        version = find_version(name) or ""
        yield _judge(name, "" if version else "not installed", version, remedy)


def _probe_hub_login() -> Iterator[Finding]:
    import huggingface_hub

    obstacle = "no token" if huggingface_hub.get_token() is None else ""
    works = "a token is stored; `hf auth whoami` asks whether it is valid"
    yield _judge("hub login", obstacle, works, "hf auth login (only for gated models and for publishing)")


def _probe_disk() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HOME

    for name, folder, key in (("disk here", Path.cwd(), "output_dir"), ("disk cache", Path(HF_HOME), "HF_HOME")):
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        free_gb = shutil.disk_usage(existing).free / 1e9
        detail, remedy = f"{free_gb:.0f} GB free in {folder}", f"free some space, or set {key} to another disk"
        if not os.access(existing, os.W_OK):
            free_gb, detail, remedy = 0, f"{folder} cannot be written by this user", f"set {key} to another folder"
        yield _judge(name, "" if free_gb >= MIN_FREE_GB else detail, detail, remedy)
