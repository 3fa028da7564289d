"""Layers of each pipeline stage: every layer once, in chunks of equal size."""

from __future__ import annotations

import pytest

from recipes_lib.errors import ConfigError
from recipes_lib.models.parallel.pipeline_part import PipelinePart


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_chunks_of_all_stages_cover_layers_in_order(num_stages: int, num_chunks: int) -> None:
    by_chunk = {}
    for stage in range(num_stages):
        part = PipelinePart(stage, num_stages, num_chunks)
        by_chunk |= dict(zip(part.chunks, part.share_layers(16), strict=True))
    assert sorted(by_chunk) == list(range(num_stages * num_chunks))
    assert [layer for chunk in sorted(by_chunk) for layer in by_chunk[chunk]] == list(range(16))
    assert {len(layers) for layers in by_chunk.values()} == {16 // (num_stages * num_chunks)}


def test_interleaved_chunks_alternate_between_stages() -> None:
    """So that what the first process hands on to the last comes back to it."""
    assert list(PipelinePart(0, 2, 2).chunks) == [0, 2]
    assert list(PipelinePart(1, 2, 2).chunks) == [1, 3]


@pytest.mark.parametrize(
    ("part", "num_layers", "remedy"),
    [
        (PipelinePart(0, 4), 6, "launch 1 or 2 or 3 or 6 stages"),
        (PipelinePart(1, 4, 2), 12, "launch 1 or 2 or 3 or 6 stages of 2"),
        (PipelinePart(0, 2, 2), 1, "1 layers cannot be split into 4 equal chunks"),
    ],
)
def test_indivisible_number_of_layers_is_refused(part: PipelinePart, num_layers: int, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        part.share_layers(num_layers)
