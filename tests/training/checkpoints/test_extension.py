"""Checkpoints that a pretraining run and its extension have in common."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.training.pretraining import build_config

from recipes_lib.config.schema import flatten_config
from recipes_lib.errors import ConfigError
from recipes_lib.training.checkpoints.manifest import write_complete
from recipes_lib.training.checkpoints.resume import find_common_checkpoint

WSD = {"lr_scheduler_type": "warmup_stable_decay", "decay_steps": 4, "warmup_steps": 2}


@pytest.fixture
def build(tmp_path, tiny_tokenizer_dir):
    for step in (2, 6, 7, 10):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"w")
        write_complete(folder, step=step, world_size=1)
    return lambda **keys: build_config(tmp_path, tiny_tokenizer_dir, **keys)


def find(now, then):
    before = flatten_config(then)
    differing = [name for name, value in flatten_config(now).items() if before.get(name) != value]
    differing += [name for name in before if name not in flatten_config(now)]
    checkpoint = find_common_checkpoint(now, before, differing, world_size=1)
    return checkpoint and checkpoint.name


def test_wsd_run_extends_from_before_old_decay(build) -> None:
    # The old decay starts at step 6, for which checkpoint-6 still has the peak learning rate.
    assert find(build(max_steps=15, **WSD), build(max_steps=10, **WSD)) == "checkpoint-6"
    # A step has 64 tokens.
    lengths = ({"max_steps": None, "max_tokens": 64 * num_steps} for num_steps in (15, 10))
    assert find(*(build(**length, **WSD) for length in lengths)) == "checkpoint-6"
    assert find(build(max_steps=10, **WSD | {"decay_steps": 8}), build(max_steps=10, **WSD)) == "checkpoint-2"


def test_linear_schedule_cannot_be_extended(build) -> None:
    assert find(build(max_steps=15), build(max_steps=10)) is None
    assert find(build(max_steps=15, warmup_steps=14), build(max_steps=10, warmup_steps=9)) is None


def test_constant_schedule_extends_from_last_checkpoint(build) -> None:
    keys = {"lr_scheduler_type": "constant", "warmup_steps": 2}
    assert find(build(max_steps=15, **keys), build(max_steps=10, **keys)) == "checkpoint-10"
    assert find(build(max_steps=8, **keys), build(max_steps=10, **keys)) == "checkpoint-7"
    assert find(build(max_steps=7, **keys), build(max_steps=10, **keys)) == "checkpoint-6", "a step is left to make"


def test_other_key_or_recipe_is_not_an_extension(build) -> None:
    then = build(max_steps=10, **WSD)
    assert find(build(max_steps=15, gradient_accumulation_steps=8, **WSD), then) is None
    assert find(build(max_steps=15, learning_rate=0.5, **WSD), then) is None
    assert find(replace(build(max_steps=15, **WSD), recipe="sft"), then) is None


def test_stream_is_not_extended(build) -> None:
    """A longer run permutes the rows of a longer part of the stream: none of its steps has the same rows."""
    keys = {"lr_scheduler_type": "constant", "dataset_streaming": True}
    assert find(build(max_steps=15, **keys), build(max_steps=10, **keys)) is None


def test_length_in_epochs_is_not_extended(build) -> None:
    for now, then in ((15, -1), (-1, 10)):
        before = flatten_config(build(max_steps=then, **WSD))
        # `start_run` has filled in the default number of epochs.
        assert find_common_checkpoint(build(max_steps=now, **WSD), before, ["max_steps"], world_size=1) is None


def test_schedule_that_does_not_fit_is_an_error(build) -> None:
    with pytest.raises(ConfigError, match="decay"):
        find(build(max_steps=3, **WSD), build(max_steps=10, **WSD))


def test_extension_skips_incomplete_checkpoint(build, tmp_path) -> None:
    (tmp_path / "out" / "checkpoint-6" / "model.safetensors").write_bytes(b"")
    assert find(build(max_steps=15, **WSD), build(max_steps=10, **WSD)) == "checkpoint-2"
