"""GPUs: peak FLOPS, memory, bandwidth, link and power by name, and published MFU of kinds of training."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.config.table import read_lists
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.planning.activations import read_checkpointing

TORCHTITAN: Final = "torchtitan, Llama 3.1 8B on 8 H100 (benchmarks/llama3_h100_202412_torchtitan.md, table 1)"
_TOKENS_PER_SECOND: Final = {False: 5762, True: 6667}
"""Tokens per second and GPU, without and with ``torch.compile``; neither run recomputes matrix products.

Source: ``TORCHTITAN``; with rows of 8,192 tokens, each token takes ``_FLOPS_PER_TOKEN``.
"""
_FLOPS_PER_TOKEN: Final = 6 * (8_030_261_248 - 128_256 * 4096) + 12 * 32 * 4096 * 8192
_PEAK: Final = 989e12
_PCIE_5: Final = 64e9
"""Bytes a second of 16 lanes in one direction."""
_DEQUANTIZING: Final = 0.9
"""Factor on MFU of dequantising 4- or 8-bit weights before each product; smaller micro-batches lose more.

Source: 42 % by QLoRA and 46 % by LoRA, 8B in micro-batches of 4,096 tokens on one H200 (docs/results.md).
"""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU; sizes in bytes, rates per second.

    Attributes:
        name: Name by which it was requested.
        flops: Peak FLOP/s of dense 16-bit matrix products with 32-bit accumulation; 0 if only the memory is known.
        memory: Size of its memory.
        bandwidth: Bytes per second of its memory.
        link: Bytes per second to another GPU of the machine, in one direction.
        num_links: Number of such links, each to another GPU; 1 with a switch, which gives all bandwidth to any GPU.
        num_bridged: GPUs that the link connects; larger groups communicate over PCIe.
        watts: Rated power of a board; ``None`` if unknown.
        has_bf16: Whether products in bfloat16 are as fast as in float16.
        assumed: Board that is assumed for an ambiguous short name; may be empty.
    """

    name: str
    flops: float
    memory: float
    bandwidth: float = 0
    link: float = 0
    num_links: int = 1
    num_bridged: float = math.inf
    watts: int | None = None
    has_bf16: bool = True
    assumed: str = ""

    def find_rate(self, num_ranks: int) -> float:
        """Return the bytes per second that a GPU sends within a group of ``num_ranks`` GPUs of its machine."""
        if num_ranks > self.num_bridged:
            return _PCIE_5
        return self.link * min(self.num_links, max(num_ranks - 1, 1))


_DEVICES: Final = read_lists(Path(__file__).with_name("devices.yaml"))
_UNITS: Final = {"flops": 1e12, "memory": 1e9, "bandwidth": 1e9, "link": 1e9}
"""Units of the columns of the table; the others are attributes of ``Device`` as they are."""

_SMALLER: Final = re.compile(r"laptop|mobile|max-q|\b\dg\.\d+gb\b", re.IGNORECASE)
"""Signs of the GPU of a laptop or of a MIG instance, which is smaller than the board of its name."""


def find_device(name: str) -> Device | None:
    """Return the GPU of a name, in the spelling of a vendor, ``nvidia-smi -L`` or a user; ``None`` if unknown.

    Args:
        name: Name of a GPU, optionally with its memory, as in ``A100-SXM4-80GB``; or only a memory, as in ``48GB``.
    """
    if _SMALLER.search(name):
        return None
    # Names of clouds and of Kubernetes have other signs between their words.
    text = re.sub("[_-]", " ", name)
    memory_gb = re.search(r"\b([1-9]\d*) ?Gi?B?\b", text, re.IGNORECASE)
    # The first match counts: devices.yaml lists longer names before those that they contain.
    for known, row in _DEVICES.items():
        # Spaces and `RTX` are optional, so that RTX4090 and 4090 match.
        pattern = row.get("pattern", known).replace("RTX ", "(?:RTX ?)?").replace(" ", " ?")
        if re.search(rf"\b{pattern}\b", text, re.IGNORECASE):
            found = {column: row[column] for column in row.keys() - {"pattern", "source"}}
            # A100-80 has no GB. In the name of a GH200, the number may be the memory of its CPU.
            if (size := memory_gb or re.search(r"[-: ](\d{2,3})$", text)) and not known.startswith("GH200"):
                found["memory"] = float(size[1])
            if name.upper() != known:
                found.pop("assumed", None)
            return Device(name, **found | {column: found[column] * unit for column, unit in _UNITS.items()})
    # Not of a machine such as a2-ultragpu-8g.
    return Device(name, 0, float(memory_gb[1]) * 1e9) if memory_gb and memory_gb[0].upper().endswith("B") else None


def choose_device(name: str) -> Device:
    """Return the GPU of a name.

    Raises:
        ConfigError: The GPU is unknown, or one of several of its name; the error has the names to write.
    """
    if (device := find_device(name)) is not None:
        return device
    part = name.strip().upper()
    models = {*re.findall(r"\b[A-Z]*\d+\b", part)}
    alike = [known for known in _DEVICES if models & {*re.split("[ -]", known)} and not _SMALLER.search(name)]
    near = alike or [known for known in _DEVICES if part and part in known.upper()]
    near = near or difflib.get_close_matches(part, _DEVICES)
    remedy = "write a name as `nvidia-smi -L` has it, such as H100 or A100-80GB, or a size such as 80GB"
    if near:
        remedy = f"did you mean {' or '.join(f'`{known}`' for known in near)}?"
    raise ConfigError(Problem("--gpu", f"the GPU {name!r} is {'one of several' if alike else 'not known'}", remedy))


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the dense peak of one device in FLOP/s; ``None`` if unknown: a CPU, ``float32``, an unlisted GPU.

    Args:
        device_name: Name by ``torch.cuda.get_device_name``, such as ``NVIDIA H100 80GB HBM3``.
        dtype: Compute dtype.
    """
    device = find_device(device_name)
    if device is None or not device.flops:
        return None
    return device.flops if dtype == torch.float16 or (dtype == torch.bfloat16 and device.has_bf16) else None


def verify_peak(device: Device, config: RecipeConfig) -> None:
    """Raise if ``Device.flops`` is not the peak of a device in the compute dtype of a run.

    Raises:
        ConfigError: Its peak in this dtype is unknown.
    """
    dtype = choose_compute_dtype(config)
    if peak_flops(device.name, dtype) is not None:
        return
    remedy = "write a name as `nvidia-smi -L` has it, such as H100 or A100-80GB"
    if device.flops:
        remedy = "write `bf16: true`, or leave out --gpu"
    if device.flops and dtype == torch.bfloat16:
        remedy = "write `bf16: false` and `fp16: true`"
    found = f"the peak of {device.name!r} in {str(dtype).removeprefix('torch.')} is not known"
    raise ConfigError(Problem("--gpu", found, remedy))


def choose_compute_dtype(config: RecipeConfig) -> torch.dtype:
    """Return the dtype of matrix products on a device that supports it: by default bfloat16."""
    if config.training.get("fp16"):
        return torch.float16
    if config.training.get("bf16") is not False:
        return torch.bfloat16
    # Without autocast, the compute dtype is that of the weights.
    return torch.float32 if config.model.dtype == "auto" else getattr(torch, config.model.dtype)


class Kind(NamedTuple):
    """Class of training runs that share a measured MFU.

    Attributes:
        compiles: Whether layers are compiled.
        uses_adapter: Whether only an adapter is trained.
    """

    compiles: bool
    uses_adapter: bool

    @classmethod
    def of(cls, config: RecipeConfig) -> Kind:
        """Return the class of a run."""
        compiles = config.training.get("torch_compile")
        return cls(config.recipe == "pretrain" if compiles is None else bool(compiles), config.adapter.use_peft)

    @property
    def published(self) -> float:
        """Published MFU of full training, which also stands for adapters."""
        return _TOKENS_PER_SECOND[self.compiles] * _FLOPS_PER_TOKEN / _PEAK


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured MFU of classes of runs.

    Attributes:
        shares: MFU by class, at least one, of runs without recomputation and quantization.
        source: Source of the measurements, for the report.
    """

    shares: Mapping[Kind, float]
    source: str

    def estimate(self, kind: Kind) -> tuple[float, str]:
        """Return the MFU of a class, and its source.

        That of an unmeasured class is scaled from the nearest one by the ratio of published MFU. Compilation changes
        MFU more than an adapter does, so a class with equal ``compiles`` is nearer.
        """
        near = min(self.shares, key=lambda one: (one.compiles != kind.compiles, one != kind))
        source = f"by {self.source}"
        if near.compiles != kind.compiles:
            source += f", from its {'compiled' if near.compiles else 'eager'} runs by the ratio that {TORCHTITAN} has"
        return self.shares[near] * kind.published / near.published, source


def find_efficiency(config: RecipeConfig, measured: Measured | None = None) -> tuple[float, str]:
    """Return the expected MFU of a run, and its source.

    Args:
        config: Configuration of the run.
        measured: Measured MFU; ``None`` for that of published runs.
    """
    kind = Kind.of(config)
    share, source = measured.estimate(kind) if measured else (kind.published, f"by {TORCHTITAN}")
    factor, reasons = find_overhead(config)
    text = f"{share:.0%} {'compiled' if kind.compiles else 'eager'} {source}"
    # Three digits, however small: the MFU of a tiny model must not become 0, by which times are divided.
    return float(f"{share * factor:.3g}"), ", ".join([text, *reasons])


def find_overhead(config: RecipeConfig) -> tuple[float, list[str]]:
    """Return the factor, at most 1, by which recomputation and quantisation lower MFU, and the reasons.

    MFU does not count recomputed FLOPs. Recomputing a layer repeats one of the three forward-sized passes of full
    training (forward, gradients of inputs, gradients of weights), or of the two with an adapter.
    """
    factor, reasons = 1.0, list[str]()
    checkpointing = read_checkpointing(config)
    if checkpointing.every and not checkpointing.keeps_products:
        passes = 2 if config.adapter.use_peft else 3
        factor *= passes / (passes + 1 / checkpointing.every)
        reasons.append("less what is recomputed")
    if config.quantization.is_quantized:
        factor *= _DEQUANTIZING
        reasons.append("less a tenth for quantized weights")
    return factor, reasons
