"""Which checkpoints a run of another length would have made too."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.training.pretraining import build_config

from recipes_lib.config.schema import flatten_config
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
    found = find_common_checkpoint(now, before, differing, world_size=1)
    return found and found.name


def test_a_stable_phase_goes_on_from_before_the_old_decay(build) -> None:
    # The decay of the old run begins with step 6, whose rate the checkpoint of 6 steps still has at the peak.
    assert find(build(max_steps=15, **WSD), build(max_steps=10, **WSD)) == "checkpoint-6"


def test_of_other_schedules_nothing_is_common(build) -> None:
    assert find(build(max_steps=15), build(max_steps=10)) is None
    assert find(build(max_steps=15, warmup_steps=14), build(max_steps=10, warmup_steps=9)) is None


def test_a_constant_rate_goes_on_from_the_end_and_a_shorter_run_is_none(build) -> None:
    keys = {"lr_scheduler_type": "constant", "warmup_steps": 2}
    assert find(build(max_steps=15, **keys), build(max_steps=10, **keys)) == "checkpoint-10"
    assert find(build(max_steps=8, **keys), build(max_steps=10, **keys)) == "checkpoint-7"


def test_another_batch_or_another_key_is_not_an_extension(build) -> None:
    then = build(max_steps=10, **WSD)
    assert find(build(max_steps=15, gradient_accumulation_steps=8, **WSD), then) is None
    assert find(build(max_steps=15, learning_rate=0.5, **WSD), then) is None
    assert find(replace(build(max_steps=15, **WSD), recipe="sft"), then) is None


def test_a_checkpoint_that_is_not_whole_is_passed_over(build, tmp_path) -> None:
    (tmp_path / "out" / "checkpoint-6" / "model.safetensors").write_bytes(b"")
    assert find(build(max_steps=15, **WSD), build(max_steps=10, **WSD)) == "checkpoint-2"
