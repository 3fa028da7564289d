"""Checkpoints of two ranks: complete only after every rank has verified what it wrote; faults and kills."""

from __future__ import annotations

import json
import platform
import re
import shutil
from pathlib import Path

import pytest
import torch
from tests.distributed import sealing
from tests.forked import run_forked

from recipes_lib.training.checkpoints.manifest import clear_leftovers, find_damage, find_last_complete, list_checkpoints
from recipes_lib.training.checkpoints.sharded import read_whole_weights

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", r"1\.weight is not finite"),
        ("short", r"shard-00002-model-00001-of-00001\.safetensors cannot be opened again"),
        ("unseen", r"rng_state_3\.pth cannot be read .* put output_dir on storage that all machines share"),
    ],
)
def test_fault_on_one_rank_fails_all_and_publishes_nothing(fault, message, tmp_path: Path) -> None:
    output = run_forked(sealing.__name__, tmp_path, fault)
    ends = re.findall(r"process \d ended: .*", output)
    assert sorted(end[:9] for end in ends) == ["process 0", "process 1"], output
    assert all(re.search(message, end) for end in ends), output
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1]
    clear_leftovers(tmp_path)
    assert find_last_complete(tmp_path) == tmp_path / "checkpoint-1"
    assert find_damage(tmp_path / "checkpoint-1") is None


@pytest.mark.parametrize(
    ("how", "num_told", "num_ended"),
    [("shards together", 0, 0), ("apart", 1, 0), ("shards apart", 0, 2), ("unsaved shards apart", 0, 0)],
)
def test_output_dir_that_is_not_shared_is_reported_before_training(how, num_told, num_ended, tmp_path: Path) -> None:
    """A replicated model is trained without resume; of a sharded one no checkpoint would be complete."""
    output = run_forked(sealing.__name__, tmp_path, how)
    unseen = f"{platform.node()} does not see checkpoints"
    assert output.count(f"no resume: {unseen}; put output_dir on storage") == num_told, output
    assert output.count(f"ended: output_dir: {unseen}") == num_ended


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder of two checkpoints without a fault, and the output of the ranks."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_forked(sealing.__name__, folder, "none")


def test_each_rank_verifies_weights_that_it_wrote(saved: tuple[Path, str]) -> None:
    """Tensors of other ranks may be written on another machine; rank 0 verifies only their headers."""
    folder, output = saved
    assert "ended:" not in output
    read = set(re.findall(r"process (\d) reads shard-(\d+)-", output))
    assert read == {("0", "00001"), ("1", "00002")}
    for _, checkpoint in list_checkpoints(folder):
        assert find_damage(checkpoint) is None
        files = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*.*") if path.is_file()}
        assert json.loads((checkpoint / "COMPLETE.json").read_text())["files"].keys() == files - {"COMPLETE.json"}


def test_shards_are_snapshots_while_training_continues(saved: tuple[Path, str]) -> None:
    """The script adds 1 to a weight before any shard is written."""
    first, second = (read_whole_weights(saved[0] / f"checkpoint-{step}") for step in (1, 2))
    torch.testing.assert_close(second["0.weight"], first["0.weight"] + 1)
    assert first["0.weight"].abs().max() < 0.5
    assert torch.equal(second["1.weight"], first["1.weight"])


def test_flipped_bit_in_shard_selects_previous_checkpoint(saved: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    (shard,) = (tmp_path / "checkpoint-2" / "model_shards").glob("shard-00002-*")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    output = run_forked(sealing.__name__, tmp_path, "choose")
    assert output.count(f"checkpoint-2 is damaged: model_shards/{shard.name} does not match its SHA-256") == 1
    assert sorted(re.findall(r"process \d chooses .*", output)) == [
        f"process {rank} chooses checkpoint-1" for rank in (0, 1)
    ]


@pytest.mark.parametrize("moment", sealing.MOMENTS)
def test_kill_leaves_complete_checkpoint_or_none(moment: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ended with .*-9"):
        run_forked(sealing.__name__, tmp_path, moment)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1]
    clear_leftovers(tmp_path)
    # A checkpoint with COMPLETE.json was only not renamed yet.
    assert [step for step, _ in list_checkpoints(tmp_path)] == ([2, 1] if moment == "name" else [1])
    assert not any(find_damage(checkpoint) for _, checkpoint in list_checkpoints(tmp_path))
