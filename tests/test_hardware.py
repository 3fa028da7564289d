"""Hardware probes, compared with what the operating system reports."""

from __future__ import annotations

import os
import timeit
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch.torch_version import TorchVersion

from recipes_lib import hardware
from recipes_lib.hardware import read_free_memory, supports_bf16

CPUINFO = Path("/proc/cpuinfo")


def test_gpu_is_hidden_from_tests_of_the_cpu() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.cuda.is_available()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the accelerator answers, not the CPU")
@pytest.mark.skipif(not CPUINFO.exists(), reason="the operating system has no /proc/cpuinfo")
def test_bf16_support_of_cpu_matches_cpuinfo() -> None:
    flags = set(CPUINFO.read_text().split())
    assert supports_bf16() == bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})


@pytest.mark.parametrize("is_supported", [True, False])
def test_bf16_support_of_gpu_excludes_emulation(is_supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = []

    def is_bf16_supported(*, including_emulation: bool = True) -> bool:
        arguments.append(including_emulation)
        return is_supported or including_emulation

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    assert supports_bf16() is is_supported
    assert arguments == [False]


@pytest.mark.parametrize("has_gpu", [True, False])
def test_bf16_support_without_gpu_is_that_of_cpu(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a CUDA build of torch on a machine without a GPU, and with ``use_cpu`` on one that has it."""

    def find_device(check_available: bool = False) -> torch.device | None:
        return None if check_available and not has_gpu else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", find_device)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    for capabilities in ({"amx_bf16": True}, {"avx512_bf16": False}, {}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert supports_bf16(use_cpu=has_gpu) == any(capabilities.values())


def test_measured_flops_are_those_of_fastest_product(monkeypatch) -> None:
    clock = iter([0.0, 0.01, 9.0, 9.5, 9.5, 9.6, 9.6, 10.6])  # The first product, 0.01 s, is the warm-up.

    def repeat(product, **options):
        assert product().dtype == torch.bfloat16
        return timeit.repeat(product, timer=lambda: next(clock), **options)

    monkeypatch.setattr(hardware, "timeit", SimpleNamespace(repeat=repeat))
    assert hardware.measure_matmul_flops(torch.bfloat16, size=10, repeats=3) == pytest.approx(2 * 10**3 / 0.1)


@pytest.mark.parametrize("groups", [None, "", "\n", "strange"])
def test_free_memory_without_cgroups_is_that_of_machine(tmp_path, monkeypatch, groups: str | None) -> None:
    monkeypatch.setattr(hardware, "_PROCESSES", tmp_path)
    (tmp_path / "meminfo").write_text("MemAvailable: 9216 kB\n")
    if groups is not None:
        (tmp_path / "self").mkdir()
        (tmp_path / "self/cgroup").write_text(groups)
    assert read_free_memory() == 9 << 20


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="the operating system has no /proc/meminfo")
def test_free_memory_is_at_most_total_memory() -> None:
    total = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    assert 0 < read_free_memory() <= total * 1024


V2 = ("memory.max", "memory.current", "")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "inactive_file 7\ntotal_")
"""Files of limit and use, and what precedes the page cache: that of v1 without "total_" excludes the groups below."""


@pytest.mark.parametrize(
    ("limit", "left"), [("1000", 450), ("500", 0), ("max", 9 << 20), (None, 9 << 20), ("9223372036854771712", 9 << 20)]
)
@pytest.mark.parametrize(
    ("own", "limited", "version"),
    [
        ("0::/", ".", V2),
        ("4:cpu:/x\n0::/slurm/job_7/step_0/task_0", "slurm/job_7", V2),
        ("0::/\n9:memory:/docker/a1b2", "memory", V1),
        ("9:memory:/slurm/uid_0/job_7/task_0", "memory/slurm/uid_0/job_7", V1),
    ],
)
def test_limit_of_container_or_job_excludes_page_cache(tmp_path, monkeypatch, own, limited, version, limit, left):
    for name in ("_PROCESSES", "_CGROUPS"):
        monkeypatch.setattr(hardware, name, tmp_path)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(f"{own}\n")
    (tmp_path / "meminfo").write_text("MemAvailable: 9216 kB\n")
    if limit is not None:
        folder, (limit_file, use_file, prefix) = tmp_path / limited, version
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_file).write_text(f"{limit}\n")
        (folder / use_file).write_text("600\n")
        (folder / "memory.stat").write_text(f"anon 550\n{prefix}inactive_file 50\nactive_file 10\n")
    assert read_free_memory() == left


def test_device_memory_is_that_of_first_device(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.read_device_memory() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=index + 5))
    assert hardware.read_device_memory() == 5


@pytest.mark.parametrize(
    ("compilers", "has_header", "capability", "expected"),
    [
        ({"g++"}, True, None, ""),
        ({"x86_64-conda-linux-gnu-c++"}, True, None, ""),
        ({"gcc"}, True, None, "no C++ compiler"),
        ({"g++"}, False, None, "no Python.h"),
        ({"g++"}, True, (7, 0), ""),
        ({"g++"}, True, (6, 1), "no Triton for its GPU, which needs compute capability 7.0 or later"),
    ],
)
def test_compiler_obstacle_names_what_is_missing(monkeypatch, tmp_path, compilers, has_header, capability, expected):
    monkeypatch.setattr(hardware.shutil, "which", lambda name: name if name in compilers else None)
    monkeypatch.setattr(hardware.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(hardware, "find_spec", lambda name: name)
    monkeypatch.setattr(torch, "__file__", "/opt/torch/__init__.py")
    monkeypatch.setattr(hardware.sysconfig, "get_path", lambda name: {"include": str(tmp_path)}[name])
    if has_header:
        (tmp_path / "Python.h").touch()
    assert hardware.find_compiler_obstacle() == expected
    monkeypatch.setattr(hardware, "find_spec", lambda _: None)
    assert ("Triton" in hardware.find_compiler_obstacle()) is (capability is not None)
    assert hardware.find_extension_obstacle() == (expected if "C++" in expected else "")


@pytest.mark.parametrize(
    ("is_cuda", "version", "compiles"), [(False, "2.13.0", False), (False, "2.14.1", True), (True, "2.13.0", True)]
)
def test_linker_flags_of_torch_lose_path_with_space(monkeypatch, is_cuda, version, compiles) -> None:
    monkeypatch.setattr(torch, "__file__", "/opt/a b/torch/__init__.py")
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for name in ("_has_compiler", "find_spec", "Path"):
        monkeypatch.setattr(hardware, name, MagicMock())
    assert hardware.find_extension_obstacle() == "torch in a path with a space"
    assert (hardware.find_compiler_obstacle() == "") is compiles


@pytest.mark.parametrize(
    ("build", "visible", "has_device", "expected"),
    [
        ("13.0", None, True, "The NVIDIA driver on your system is too old (found version 12040)."),
        (None, None, True, "is a build without CUDA"),
        ("13.0", "GPU-x", True, "CUDA_VISIBLE_DEVICES is 'GPU-x': unset it if it names no GPU"),
        ("13.0", "", True, ""),
        ("13.0", None, False, ""),
    ],
)
def test_gpu_obstacle_is_the_reason_of_torch(monkeypatch, tmp_path, build, visible, has_device, expected) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nPlease update it.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(hardware, "_DEVICES", tmp_path)
    (tmp_path / "nvidiactl").touch()
    if has_device:
        (tmp_path / "nvidia0").touch()
    found = hardware.find_gpu_obstacle({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert found.endswith(expected)
    assert bool(found) == bool(expected)
