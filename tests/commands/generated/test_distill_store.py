"""`recipes distill-store`, and a distillation run that uses the store instead of the teacher."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.recipes.preferences import load_recipe, run_here
from tests.recipes.test_distill import write
from tests.rows import read_events

from recipes_lib.commands.generated import distill_store

__all__ = ["write"]


def find_shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("prepared sets/*/shard-*.npy"))


def test_run_with_store_does_not_load_teacher(recipes, tmp_path, tiny_model_dir, write, capfd, monkeypatch) -> None:
    config = write(teacher_top_k=16, eval_strategy="no", num_sample_prompts=0)
    assert run_here(load_recipe("distill"), config, recipe="distill") == 2
    assert "run `recipes distill-store` with this configuration first" in capfd.readouterr().err

    output = recipes("distill-store", "--config", config)
    (shard,) = find_shards(tmp_path)
    size = 16 * 4 + 8
    assert f"{len(np.load(shard)):,} targets of {size} bytes" in output
    before = shard.stat().st_mtime_ns
    # The existing store is compared with the teacher and not rewritten.
    assert "recomputed" in recipes("distill-store", "--config", config)
    assert shard.stat().st_mtime_ns == before

    weights = tiny_model_dir / "model.safetensors"
    identity = weights.read_bytes()
    monkeypatch.setattr("recipes_lib.distillation.teacher_store.load_causal_lm", lambda *_: pytest.fail("a teacher"))
    script, verified = load_recipe("distill"), list[str]()
    for check in ("verify_isolation", "verify_loss_head"):
        monkeypatch.setattr(script, check, lambda *_, check=check: verified.append(check))
    assert run_here(script, config, recipe="distill") == 0
    assert verified == ["verify_isolation", "verify_loss_head"]
    assert weights.read_bytes() == identity
    steps = read_events(tmp_path / "a run")
    assert len(steps) == 4
    assert all(event["distillation/divergence"] > 0 for event in steps)


def test_modified_store_is_rewritten(recipes, tmp_path, write) -> None:
    config = write(teacher_top_k=16)
    recipes("distill-store", "--config", config)
    (shard,) = find_shards(tmp_path)
    sound = shard.read_bytes()
    records = np.load(shard)
    records["logps"] -= 1
    np.save(shard, records)
    recipes("distill-store", "--config", config)  # Its hash does not match the manifest.
    assert shard.read_bytes() == sound


def test_tolerance_is_that_of_half_precision_weights(recipes, write, monkeypatch) -> None:
    monkeypatch.setitem(distill_store.ALLOWED, "float32", -1.0)
    recipes("distill-store", "--config", write(teacher_top_k=16, teacher_dtype="bfloat16", bf16="false"))


def test_missing_teacher_top_k_is_rejected(recipes, write) -> None:
    assert "`teacher_top_k`, the number of tokens" in recipes("distill-store", "--config", write(), code=2)
