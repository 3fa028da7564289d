"""What the hardware probes say, against what the operating system says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipes_lib.hardware import supports_bf16

CPUINFO = Path("/proc/cpuinfo")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the accelerator answers, not the CPU")
@pytest.mark.skipif(not CPUINFO.exists(), reason="the operating system has no /proc/cpuinfo")
def test_bf16_on_a_cpu_is_what_the_kernel_reports() -> None:
    flags = set(CPUINFO.read_text().split())
    assert supports_bf16() == bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})


@pytest.mark.parametrize("is_supported", [True, False])
def test_bf16_on_a_gpu_is_what_the_gpu_has_without_emulation(
    is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def is_bf16_supported(*, including_emulation: bool = True) -> bool:
        asked.append(including_emulation)
        return is_supported or including_emulation

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    assert supports_bf16() is is_supported
    assert asked == [False]
