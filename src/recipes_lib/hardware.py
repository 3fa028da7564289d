"""Capabilities of the local processor or accelerator. Cheap: imports torch and nothing else."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch


def supports_bf16() -> bool:
    """Return whether this machine's device supports bfloat16 in hardware; emulation is slower than float32."""
    # A build with CUDA names its device even where there is none.
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def find_compiler() -> str | None:
    """Return the path of a C++ compiler, which torch.compile needs; ``None`` without one."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def count_accelerators() -> int:
    """Return how many GPUs, or other accelerators that torch knows, this machine has."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def measure_matmul_flops(dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    """Measure the FLOP/s of square matrix products on the CPU with all torch threads; the best of several.

    What a data sheet says of a CPU is far from what its cores reach together; this is what there is to be used.

    Args:
        dtype: Of the matrices.
        size: Rows and columns.
        repeats: Products timed; one more goes before them.
    """
    # One product before the clock counts: threads and memory are made by the first.
    left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
    best = float("inf")
    for number in range(repeats + 1):
        began = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - began) if number else best
    return 2.0 * size * size * size / best


def read_device_memory() -> int | None:
    """Return the memory of the first accelerator, in bytes; ``None`` without one."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def read_free_memory() -> int:
    """Return the available host memory in bytes: of the machine, or of the container if that has less.

    0 where the system does not say (outside Linux).
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0
    return min([free, *_read_container_memory(Path("/sys/fs/cgroup"))])


def _read_container_memory(group: Path) -> list[int]:
    """Return the memory left under a cgroup limit, if there is one; the page cache counts as free."""
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    return [] if limit == "max" else [max(0, int(limit) - int(used) + int(stat.get("inactive_file", 0)))]
