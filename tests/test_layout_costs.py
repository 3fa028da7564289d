"""Memory and traffic of layouts, compared with published tables and a step-by-step ring collective."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.layout_costs import compute_footprint, format_tables

PAGE = Path(__file__).parents[1] / "docs" / "multi_node.md"


@pytest.mark.parametrize(("layout", "published"), [("ddp", 120), ("zero1", 31.4), ("zero2", 16.6), ("fsdp2", 1.9)])
def test_state_bytes_match_zero_paper(layout, published):
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 devices."""
    assert compute_footprint(layout, 7.5e9, 64).state_bytes / 1e9 == pytest.approx(published, abs=0.06)


@pytest.mark.parametrize(("layout", "published"), [("ddp", 1120), ("fsdp2", 140), ("hsdp", 140)])
def test_state_bytes_of_70b_model_on_eight_devices(layout, published):
    assert compute_footprint(layout, 70e9, 8).state_bytes / 1e9 == pytest.approx(published)


def count_ring_bytes(num_devices, size):
    """Return the bytes that one device sends in a ring all-gather of ``size`` bytes over ``num_devices``."""
    return sum(size / num_devices for _ in range(num_devices - 1))


@pytest.mark.parametrize("num_devices", [1, 2, 8, 64])
@pytest.mark.parametrize(("layout", "passes"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("fsdp2", 3)])
def test_traffic_matches_ring_algorithms(layout, passes, num_devices):
    found = compute_footprint(layout, 1e9, num_devices)
    assert found.node_bytes + found.network_bytes == pytest.approx(passes * count_ring_bytes(num_devices, 2e9))
    assert (found.network_bytes > 0) == (num_devices > 8)


def test_zero3_traffic_is_1_5_times_data_parallel():
    """Rajbhandari et al. 2020, section 7: ZeRO-3 sends 1.5 times what data parallelism does."""
    one, other = (compute_footprint(layout, 1e9, 64).network_bytes for layout in ("ddp", "fsdp2"))
    assert other / one == pytest.approx(1.5)


def test_hsdp_keeps_weight_traffic_within_node():
    hsdp, fsdp = (compute_footprint(layout, 70e9, 64) for layout in ("hsdp", "fsdp2"))
    assert hsdp.network_bytes == pytest.approx(2 * count_ring_bytes(8, 140e9 / 8))
    assert hsdp.node_bytes == pytest.approx(3 * count_ring_bytes(8, 140e9))
    assert hsdp.network_bytes < fsdp.network_bytes / 10
    assert hsdp.state_bytes == 8 * fsdp.state_bytes


def test_page_contains_tables():
    assert format_tables() in PAGE.read_text(encoding="utf-8")
