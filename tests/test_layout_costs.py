"""Memory and traffic of layouts, against published tables and against a ring that is walked through."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.layout_costs import compute_bubble, compute_footprint, format_tables

PAGE = Path(__file__).parents[1] / "docs" / "multi_node.md"


@pytest.mark.parametrize(("layout", "published"), [("ddp", 120), ("zero1", 31.4), ("zero2", 16.6), ("fsdp2", 1.9)])
def test_the_table_of_zero(layout, published):
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 devices."""
    assert compute_footprint(layout, 7.5e9, 64).state_bytes / 1e9 == pytest.approx(published, abs=0.06)


@pytest.mark.parametrize(("layout", "published"), [("ddp", 1120), ("fsdp2", 140), ("hsdp", 140)])
def test_seventy_billion_parameters_on_eight_devices(layout, published):
    assert compute_footprint(layout, 70e9, 8).state_bytes / 1e9 == pytest.approx(published)


def walk_a_ring(num_devices, size):
    """Bytes that one device sends while ``num_devices`` pass the parts of ``size`` bytes on until each has all."""
    return sum(size / num_devices for _ in range(num_devices - 1))


@pytest.mark.parametrize("num_devices", [1, 2, 8, 64])
@pytest.mark.parametrize(("layout", "passes"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("fsdp2", 3)])
def test_traffic_is_that_of_rings(layout, passes, num_devices):
    found = compute_footprint(layout, 1e9, num_devices)
    assert found.node_bytes + found.network_bytes == pytest.approx(passes * walk_a_ring(num_devices, 2e9))
    assert (found.network_bytes > 0) == (num_devices > 8)


def test_sharding_weights_costs_half_as_much_again():
    """Rajbhandari et al. 2020, section 7: ZeRO-3 sends 1.5 times what data parallelism does."""
    one, other = (compute_footprint(layout, 1e9, 64).network_bytes for layout in ("ddp", "fsdp2"))
    assert other / one == pytest.approx(1.5)


def test_replicating_over_nodes_takes_the_weights_off_the_network():
    hsdp, fsdp = (compute_footprint(layout, 70e9, 64) for layout in ("hsdp", "fsdp2"))
    assert hsdp.network_bytes == pytest.approx(2 * walk_a_ring(8, 140e9 / 8))
    assert hsdp.node_bytes == pytest.approx(3 * walk_a_ring(8, 140e9))
    assert hsdp.network_bytes < fsdp.network_bytes / 10
    assert hsdp.state_bytes == 8 * fsdp.state_bytes


def test_the_bubble_of_a_pipeline():
    assert compute_bubble(8, 32) == pytest.approx(0.219, abs=1e-3)
    assert compute_bubble(8, 32, 2) == compute_bubble(8, 32) / 2


def test_the_page_holds_these_tables():
    assert format_tables() in PAGE.read_text(encoding="utf-8")
