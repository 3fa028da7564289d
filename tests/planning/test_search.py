"""A search keeps the method's batch, and prefers what is fastest of what fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoConfig

from recipes_lib.config.loader import load_config
from recipes_lib.planning.devices import Device, choose_device
from recipes_lib.planning.memory_plan import Held, Layout
from recipes_lib.planning.search import Candidate, count_traffic, search

WHOLE, SHARED = Layout("ddp", 2), Layout("fsdp2", 2, Held(2, 2, 2))


def build(model_dir: Path, recipe: str = "sft", **keys: object):
    flags = {"model_name_or_path": model_dir, "dataset_name": "a/b", "output_dir": "out", "max_length": 256, **keys}
    return load_config(recipe, [f"--{key}={value}" for key, value in flags.items()])


@pytest.fixture(scope="module")
def find(tiny_model_dir: Path):
    def find(memory: float, rows: int = 8, layouts: Sequence[Layout] = (WHOLE, SHARED)) -> list[Candidate]:
        device: Device = dataclasses.replace(choose_device("H100"), memory=memory)
        config, model = build(tiny_model_dir), AutoConfig.from_pretrained(tiny_model_dir)
        return search(config, model, layouts, rows, device, 989e12)

    return find


def test_every_candidate_has_the_batch_of_the_method(find) -> None:
    for one in find(80e9):
        rows = one.keys["per_device_train_batch_size"] * one.keys["gradient_accumulation_steps"]
        assert rows * one.layout.num_processes == 8
    assert not find(80e9, rows=7)


def test_the_first_is_the_fastest_that_fits(find) -> None:
    large = find(80e9)
    assert large[0].fits
    assert large[0].seconds == min(one.seconds for one in large)
    assert large[0].mode in ("none", "save_matmuls")
    # With less memory than it takes, another one that is no faster.
    middle = sorted(one.memory.peak for one in large)[4]
    small = find(middle)
    assert small[0].fits
    assert small[0].memory.peak <= middle
    assert small[0].seconds >= large[0].seconds
    fits = [one.fits for one in small]
    assert fits == sorted(fits, reverse=True)


def test_where_nothing_fits_the_nearest_comes_first(find) -> None:
    found = find(1e9)
    assert not any(one.fits for one in found)
    assert found[0].memory.peak == min(one.memory.peak for one in found)


def test_traffic_is_that_of_rings(tiny_model_dir: Path) -> None:
    """DDP sums gradients once a step; FSDP2 gathers weights twice and sums gradients for each micro-batch."""
    config = build(tiny_model_dir, gradient_accumulation_steps=3)
    assert count_traffic(config, 1000, WHOLE) == (0.5 * 2 * 4 * 1000, 0)
    assert count_traffic(config, 1000, SHARED) == (0.5 * 3 * (2 * 2 + 4) * 1000, 0)
    sent, moved = count_traffic(config, 1000, Layout("fsdp2_offload", 2, Held(0, 0, 0)))
    assert (sent, moved) == (0.5 * 3 * 8 * 1000, 3 * 8 * 1000 / 2)
    adapter = build(tiny_model_dir, "lora", gradient_accumulation_steps=3)
    assert count_traffic(adapter, 1000, WHOLE) == (0, 0)
