"""The command that keeps what a teacher says, and the run that learns from it without the teacher."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.recipes.preferences import load_recipe, run_here
from tests.recipes.test_distill import write
from tests.rows import read_events

from recipes_lib import cli

__all__ = ["write"]


def run_command(config: Path) -> int:
    return cli.main(["distill-store", "--config", str(config)])


def find_shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("prepared sets/*/shard-*.npy"))


def test_a_run_learns_from_the_store_without_the_teachers_weights(tmp_path, tiny_model_dir, write, capsys) -> None:
    config = write(teacher_top_k=16, eval_strategy="no", num_sample_prompts=0)
    assert run_here(load_recipe("distill"), config, recipe="distill") == 2
    assert "run `recipes distill-store` with this configuration first" in capsys.readouterr().err

    assert run_command(config) == 0
    told = capsys.readouterr().out
    (shard,) = find_shards(tmp_path)
    size = 16 * 4 + 8
    assert f"{len(np.load(shard)):,} targets of {size} bytes" in told
    before = shard.stat().st_mtime_ns
    # Found again, it is held against the teacher and not written anew.
    assert run_command(config) == 0
    assert "recomputed" in capsys.readouterr().out
    assert shard.stat().st_mtime_ns == before

    weights = tiny_model_dir / "model.safetensors"
    identity = weights.read_bytes()
    loaded: list[str] = []
    patch = pytest.MonkeyPatch()
    patch.setattr("recipes_lib.distillation.teacher_store.load_causal_lm", lambda *args: loaded.append("a teacher"))
    try:
        assert run_here(load_recipe("distill"), config, recipe="distill") == 0
    finally:
        patch.undo()
    assert not loaded
    assert weights.read_bytes() == identity
    steps = read_events(tmp_path / "a run")
    assert len(steps) == 4
    assert all(event["distillation/divergence"] > 0 for event in steps)


def test_a_store_that_was_tampered_with_is_written_again(tmp_path, write) -> None:
    config = write(teacher_top_k=16)
    assert run_command(config) == 0
    (shard,) = find_shards(tmp_path)
    sound = shard.read_bytes()
    records = np.load(shard)
    records["logps"] -= 1
    np.save(shard, records)
    assert run_command(config) == 0, "its bytes are not those that were sealed"
    assert shard.read_bytes() == sound


def test_without_a_number_of_tokens_there_is_nothing_to_store(write, capsys) -> None:
    assert run_command(write()) == 2
    assert "`teacher_top_k`, the number of tokens" in capsys.readouterr().err
