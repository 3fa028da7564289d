"""What the processor or accelerator at hand can do. Cheap: imports torch and nothing else."""

from __future__ import annotations

import torch


def supports_bf16() -> bool:
    """Return whether the device at hand multiplies bfloat16 in hardware; emulation is slower than float32."""
    device = torch.accelerator.current_accelerator()
    if device is not None:
        return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))
