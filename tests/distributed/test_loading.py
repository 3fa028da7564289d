"""Host memory of loading a checkpoint in several layouts."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from tests.distributed import loading


def test_watching_measures_peak_of_allocated_pages() -> None:
    size = 64 << 20
    with loading.watching() as peak:
        # New pages: an allocator might reuse pages that the process has already.
        held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for page in range(0, size, mmap.PAGESIZE):
            held[page] = 1
    assert 0.9 * size < peak[0] < 1.5 * size


@pytest.mark.slow
@pytest.mark.multiprocess
def test_sharded_loading_holds_no_whole_model(tmp_path: Path) -> None:
    """DDP, which holds the whole model, is the control."""
    num_bytes = loading.write_inputs(tmp_path)
    peaks = {
        layout: [[peak / num_bytes for peak in of_process] for of_process in loading.measure(tmp_path, layout)]
        for layout in ("DDP", "FSDP2", "TP", "pipeline")
    }
    for layout in ("FSDP2", "TP", "pipeline"):
        assert max(loaded for loaded, _ in peaks[layout]) < 0.25, layout
        assert max(begun for _, begun in peaks[layout]) < 1.0, layout
    assert min(begun for _, begun in peaks["DDP"]) > 1.5
