"""Capabilities of the local CPU and accelerators. Imports torch only."""

from __future__ import annotations

import platform
import shutil
import sysconfig
import timeit
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

INSTALL_CUDA: Final = (
    "update the driver, or install torch for a CUDA version that it supports (PIP_EXTRA_INDEX_URL); error 802: start "
    "the fabric manager of the driver's version"
)
INSTALL_COMPILER: Final = (
    "install what is missing: C++ compiler, headers of Python (Debian: g++ python3-dev), triton, a path without spaces"
)
_SPACE: Final = "torch in a path with a space"

_DEVICES: Final = Path("/dev")
_PROCESSES: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_MEMORY_FILES: Final = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Controller in ``/proc/self/cgroup``, of cgroup v2 and v1 -> folder, files of limit and use, page cache in the
statistics."""


def supports_bf16(*, use_cpu: bool = False) -> bool:
    """Return whether this machine's device supports bfloat16 in hardware; emulation is slower than float32."""
    # Without ``check_available`` a CUDA build of torch returns "cuda" on a machine without a GPU.
    device = None if use_cpu else torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def find_gpu_obstacle(environment: Mapping[str, str]) -> str:
    """Return why torch cannot use this machine's NVIDIA GPU; empty if it can, or if there is none or it is hidden.

    Args:
        environment: Variables of the process, of which ``CUDA_VISIBLE_DEVICES`` may hide all GPUs.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available() or visible in ("", "-1") or not any(_DEVICES.glob("nvidia[0-9]*")):
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        found = "torch finds no CUDA device"
    except (RuntimeError, AssertionError) as error:  # Such as a driver that is older than the CUDA version of torch.
        found = str(error).partition("\n")[0]
    return found if visible is None else f"{found}; CUDA_VISIBLE_DEVICES is {visible!r}: unset it if it names no GPU"


def find_compiler_obstacle() -> str:
    """Return why Inductor and Triton cannot compile kernels on this machine; empty if they can."""
    if not _has_compiler():
        return "no C++ compiler"
    # Not torch's ``has_triton``, whose imports take seconds.
    if torch.cuda.is_available() and (find_spec("triton") is None or torch.cuda.get_device_capability() < (7, 0)):
        return "no Triton for its GPU, which needs compute capability 7.0 or later"
    # Inductor's linker flags for CPUs: https://github.com/pytorch/pytorch/pull/191010.
    if not torch.cuda.is_available() and " " in torch.__file__ and torch.__version__ < "2.14":
        return _SPACE
    # Kernels are launched by extension modules, which are compiled on first use. Debian and Ubuntu package the header
    # separately from the interpreter.
    return "" if Path(sysconfig.get_path("include"), "Python.h").exists() else "no Python.h"


def find_extension_obstacle() -> str:
    """Return why torch cannot compile C++ extensions, such as DeepSpeed's AdamW on the host; empty if it can."""
    # In torch 2.14, the linker flags of extensions are still not quoted.
    return _SPACE if " " in torch.__file__ else "" if _has_compiler() else "no C++ compiler"


def _has_compiler() -> bool:
    # An activated environment of conda has a compiler of another name, and CXX names it.
    return any(map(shutil.which, ("c++", "g++", "clang++", f"{platform.machine()}-conda-linux-gnu-c++")))


def count_accelerators() -> int:
    """Return the number of accelerators (GPUs and others that torch supports) of this machine."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def measure_matmul_flops(dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    """Measure the FLOP/s of square matrix products on the CPU with all torch threads: the best of several runs.

    Measured, because the peak in a CPU's data sheet is far above what all its cores reach together.

    Args:
        dtype: Dtype of the matrices.
        size: Number of rows and columns.
        repeats: Number of timed products, after one for warm-up.
    """
    left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
    # The first product does not count: it starts the threads and allocates memory.
    _, *seconds = timeit.repeat(lambda: left @ right, number=1, repeat=repeats + 1)
    return 2.0 * size**3 / min(seconds)


def read_device_memory() -> int | None:
    """Return the total memory of the first CUDA device in bytes; ``None`` without one."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def read_free_memory() -> int:
    """Return the available host memory in bytes: that of the machine, or of the container or SLURM job if it is less.

    0 if it is unknown (outside Linux).
    """
    try:
        lines = (_PROCESSES / "meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0
    return min([free, *_list_group_memory()])


def _list_group_memory() -> Iterator[int]:
    """Yield the memory left under each limit of this process's cgroups and those above them; page cache is free."""
    groups = ""
    with suppress(OSError):  # A kernel without cgroups.
        groups = (_PROCESSES / "self/cgroup").read_text()
    for line in groups.splitlines():  # number:controller:path
        controller, _, path = line.partition(":")[2].partition(":")
        if controller in _MEMORY_FILES:
            folder, limit, use, cached = _MEMORY_FILES[controller]
            # In a container, the path may be the host's, which does not exist here; its own group is the root.
            group = _CGROUPS / folder / path.lstrip("/")
            for one in (group, *group.parents):
                with suppress(OSError, ValueError):  # No such file, or no number without a limit.
                    stat = dict(line.split() for line in (one / "memory.stat").read_text().splitlines())
                    left = int((one / limit).read_text()) - int((one / use).read_text())
                    yield max(0, left + int(stat.get(cached, 0)))
