"""Memory and network traffic of parallel layouts, from closed forms: the tables of ``docs/multi_node.md``.

python benchmarks/layout_costs.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

WEIGHT_BYTES: Final = 2
GRADIENT_BYTES: Final = 2
STATE_BYTES: Final = 12
"""AdamW's master weight and two moments, in ``float32``."""
DEVICES_PER_NODE: Final = 8
LAYOUTS: Final = ("ddp", "zero1", "zero2", "fsdp2", "hsdp")
SIZES: Final = {"8B": 8.03e9, "70B": 70e9, "405B": 405e9}
NUM_DEVICES: Final = (8, 64, 256, 1024)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory and traffic of a layout per device.

    Attributes:
        state_bytes: Weights, gradients and optimizer states between steps.
        node_bytes: Sent by it in an optimizer step to devices of its own node, where a group ends there.
        network_bytes: Sent by it in a step in groups that go over nodes.
    """

    state_bytes: float
    node_bytes: float
    network_bytes: float


def compute_footprint(layout: str, num_parameters: float, num_devices: int) -> Footprint:
    """Return the footprint of AdamW with 16-bit weights and gradients per device, without activations.

    A ring sends ``(d - 1) / d`` of what ``d`` devices gather or reduce and scatter. A gradient that every device is to
    have is reduced, scattered and gathered; weights that nobody holds are gathered for the forward and for the backward
    pass, and their gradients scattered.

    Args:
        layout: One of ``LAYOUTS``. ``hsdp`` shards inside a node and replicates over nodes.
        num_parameters: All of them trained.
        num_devices: In whole nodes, or fewer than a node has.

    Source: Rajbhandari et al. 2020 (ZeRO), sections 5 and 7; Zhao et al. 2023 (FSDP), section 3.2;
    ``tests/test_layout_costs.py``.
    """
    shards = min(num_devices, DEVICES_PER_NODE) if layout == "hsdp" else num_devices
    replicas = num_devices // shards
    parts = {
        "ddp": (1, 1, 1),
        "zero1": (1, 1, shards),
        "zero2": (1, shards, shards),
        "fsdp2": (shards, shards, shards),
        "hsdp": (shards, shards, shards),
    }[layout]
    held = sum(size / part for size, part in zip((WEIGHT_BYTES, GRADIENT_BYTES, STATE_BYTES), parts, strict=True))
    passes = 3 if layout in ("fsdp2", "hsdp") else 2
    sent = passes * WEIGHT_BYTES * num_parameters * (shards - 1) / shards
    # Of its shard alone each device makes one sum with those of the other nodes.
    across = 2 * GRADIENT_BYTES * num_parameters / shards * (replicas - 1) / replicas
    is_inside = shards <= DEVICES_PER_NODE
    return Footprint(held * num_parameters, sent if is_inside else 0.0, across + (0.0 if is_inside else sent))


def format_tables() -> str:
    """Return the tables of ``docs/multi_node.md``."""
    return "\n".join(_format_rows())


def _format_rows() -> Iterator[str]:
    for name, num_parameters in SIZES.items():
        yield f"### {name}"
        yield ""
        yield "| layout | " + " | ".join(f"{number:,} GPUs" for number in NUM_DEVICES) + " |"
        yield "|---" * (1 + len(NUM_DEVICES)) + "|"
        for layout in LAYOUTS:
            cells = [_format(compute_footprint(layout, num_parameters, number)) for number in NUM_DEVICES]
            yield f"| {layout} | " + " | ".join(cells) + " |"
        yield ""


def _format(footprint: Footprint) -> str:
    held, node, network = (
        f"{number / 1e9:,.0f}" if number >= 1e10 else f"{number / 1e9:.1f}"
        for number in (footprint.state_bytes, footprint.node_bytes, footprint.network_bytes)
    )
    return f"{held}; {node}, {network}"


if __name__ == "__main__":
    print(format_tables())
