"""Stored reference log-probabilities: cache key, verification of a sample, damage, and interrupted writes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.forked import limit_forked
from tests.training.pairs import Setting, make_pair_trainer, make_pairs, perturb_model, train_adapter, with_preference
from torch import nn
from transformers import AutoConfig

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.data import store
from recipes_lib.errors import ConfigError, DataError
from recipes_lib.training.monitoring.progress import TrainingProgress
from recipes_lib.training.trainers.pair_batches import compute_rounding
from recipes_lib.training.trainers.reference import NUM_CHECKED, ReferenceLogps

KEY = "0123456789abcdef" * 4
FRESH = Setting(adapter=AdapterConfig(use_peft=True, lora_r=4))


class Oracle:
    """Reference model with known log-probabilities, which records the pairs of each call."""

    def __init__(self, pairs) -> None:
        self.model: Any = nn.Linear(2, 2)
        self.model.get_input_embeddings = lambda: self.model
        self.calls: list[list[int]] = []
        self._numbers = {row["prompt_ids"].tobytes(): number for number, row in enumerate(pairs)}

    def __call__(self, rows):
        assert not self.model.training
        assert not torch.is_grad_enabled()
        self.calls.append([self._numbers[row["prompt_ids"].tobytes()] for row in rows])
        return torch.tensor([[-1.5 - number, -2.5 - number] for number in self.calls[-1]]).T

    @property
    def num_scored(self) -> int:
        return sum(map(len, self.calls))


@pytest.fixture
def pairs():
    return make_pairs(100, seed=5)


def expected_logps(num_pairs):
    return np.array([[-1.5 - number, -2.5 - number] for number in range(num_pairs)], np.float32)


def build(tmp_path, pairs, run="run", key=KEY) -> ReferenceLogps:
    return ReferenceLogps(key, {"train": pairs}, root=tmp_path / "cache", output_dir=tmp_path / run)


def fill(stored, oracle, batch_size=7):
    progress = TrainingProgress()
    stored.load_or_compute(oracle.model, oracle, batch_size=batch_size, dtype=torch.float32, progress=progress)


def tamper(folder: Path, name: str, logps: np.ndarray) -> None:
    """Replace the log-probabilities of a stored set and update its hash."""
    np.save(folder / name, logps)
    complete = json.loads((folder / store.COMPLETE_FILE).read_text())
    data = (folder / name).read_bytes()
    complete["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / store.COMPLETE_FILE).write_text(json.dumps(complete))


@pytest.mark.parametrize("batch_size", [1, 7, 200])
def test_each_pair_gets_its_two_logps(tmp_path, pairs, batch_size):
    stored, oracle = build(tmp_path, pairs), Oracle(pairs)
    assert np.isnan(stored.rows["train"][3]["ref_chosen_logp"])
    fill(stored, oracle, batch_size)
    rows = stored.rows["train"]
    assert len(rows) == 100
    assert sorted(number for batch in oracle.calls for number in batch) == list(range(100))
    for number in (0, 41, 99):
        assert (rows[number]["ref_chosen_logp"], rows[number]["ref_rejected_logp"]) == (-1.5 - number, -2.5 - number)
        assert rows[number]["chosen_ids"].tolist() == pairs[number]["chosen_ids"].tolist()
    assert oracle.model.training


def test_cache_is_reused_after_recomputing_64_pairs(tmp_path, pairs):
    fill(build(tmp_path, pairs, "first"), Oracle(pairs))
    shutil.rmtree(tmp_path / "first")
    second, oracle = build(tmp_path, pairs, "second"), Oracle(pairs)
    fill(second, oracle)
    assert np.array_equal(second.rows["train"].logps, expected_logps(100))
    scored = [number for batch in oracle.calls for number in batch]
    # Once more to measure rounding.
    assert len(set(scored)) == len(scored) / 2 == NUM_CHECKED == 64
    assert list(dict.fromkeys(scored)) != list(range(64))
    assert max(map(len, oracle.calls)) == 7
    # Without the cache, the copy in ``output_dir`` is used.
    shutil.rmtree(tmp_path / "cache")
    third = build(tmp_path, pairs, "second")
    assert third.find()
    assert np.array_equal(third.rows["train"].logps, expected_logps(100))
    # One of another machine or version, which only a run that resumes takes.
    other_key = build(tmp_path, pairs, "second", key="f" + KEY[1:])
    assert not other_key.find()
    assert other_key.find(is_resumed=True)
    assert np.array_equal(other_key.rows["train"].logps, expected_logps(100))


def test_verified_sample_depends_on_cache_key(tmp_path, pairs):
    scored = []
    for key in (KEY, "f" + KEY[1:], KEY):
        fill(build(tmp_path, pairs, key=key), Oracle(pairs))
        oracle = Oracle(pairs)
        fill(build(tmp_path, pairs, key=key), oracle)
        scored.append([number for batch in oracle.calls for number in batch])
    assert scored[0] == scored[2] != scored[1]


def one_nan(logps):
    return np.where(np.arange(200).reshape(100, 2) % 3 == 0, np.float32("nan"), logps)


CHANGES = {
    "shifted": lambda logps: logps + np.float32(0.01),
    "swapped": lambda logps: logps[:, ::-1],
    "rolled": lambda logps: np.roll(logps, 1, axis=0),
    "nan": one_nan,
    "truncated": lambda logps: logps[:50],
}


@pytest.mark.parametrize("place", [f"cache/{KEY[:16]}", "run/reference/run"])
@pytest.mark.parametrize("how", CHANGES)
def test_wrong_logps_are_recomputed_and_replaced(tmp_path, pairs, how, place):
    fill(build(tmp_path, pairs), Oracle(pairs))
    if place.startswith("cache"):
        shutil.rmtree(tmp_path / "run")
    tamper(tmp_path / place, "train.npy", CHANGES[how](expected_logps(100)))
    again = build(tmp_path, pairs)
    fill(again, Oracle(pairs))
    assert np.array_equal(again.rows["train"].logps, expected_logps(100))
    for run in ("run", "another"):
        trusted, oracle = build(tmp_path, pairs, run), Oracle(pairs)
        fill(trusted, oracle)
        assert oracle.num_scored == 2 * NUM_CHECKED
        assert np.array_equal(trusted.rows["train"].logps, expected_logps(100))


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "missing", "no manifest"])
def test_damaged_files_are_not_loaded(tmp_path, pairs, damage):
    fill(build(tmp_path, pairs), Oracle(pairs))
    shutil.rmtree(tmp_path / "run")
    path = tmp_path / "cache" / KEY[:16] / "train.npy"
    data = path.read_bytes()
    if damage == "flipped bit":
        path.write_bytes(data[:-6] + bytes([data[-6] ^ 1]) + data[-5:])
    elif damage == "truncated":
        path.write_bytes(data[:-4])
    elif damage == "missing":
        path.unlink()
    else:
        (path.parent / store.COMPLETE_FILE).unlink()
    again = build(tmp_path, pairs)
    assert not again.find()
    fill(again, Oracle(pairs))
    assert build(tmp_path, pairs, "another").find()


def test_comparison_accepts_rounding_error(tmp_path, pairs):
    fill(build(tmp_path, pairs), Oracle(pairs))
    lengths = torch.tensor([[len(pair["chosen_ids"]), len(pair["rejected_ids"])] for pair in pairs])
    for factor, is_trusted in ((0.8, True), (-0.8, True), (1.5, False)):
        within = expected_logps(100) + factor * compute_rounding(lengths, torch.bfloat16).numpy()
        stored, oracle = build(tmp_path, pairs), Oracle(pairs)
        stored.rows["train"].logps[:] = within
        _, verdict = stored.compare(oracle.model, oracle, batch_size=8, dtype=torch.bfloat16)
        assert verdict == is_trusted


def test_verified_files_are_not_rewritten(tmp_path, pairs):
    fill(build(tmp_path, pairs), Oracle(pairs))
    rounded = expected_logps(100) + np.float32(1e-6)
    tamper(tmp_path / "cache" / KEY[:16], "train.npy", rounded)
    path = tmp_path / "cache" / KEY[:16] / "train.npy"
    before = path.stat()
    for run in ("run", "another"):
        fill(build(tmp_path, pairs, run), Oracle(pairs))
    assert path.stat().st_ino == before.st_ino
    assert np.array_equal(np.load(tmp_path / "another" / "reference" / "run" / "train.npy"), rounded)


KILLS = {"during save": (np, "save"), "before manifest": (store, "replace_record"), "before rename": (os, "replace")}


@pytest.mark.parametrize("moment", KILLS)
def test_kill_during_write_leaves_no_complete_set(tmp_path, pairs, monkeypatch, moment):
    module, name = KILLS[moment]
    child = os.fork()
    if child == 0:
        limit_forked()
        original = getattr(module, name)

        def die(*args, **kwargs):
            if name == "save":
                original(args[0], args[1][:50])
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(module, name, die)
        stored = build(tmp_path, pairs)
        stored.rows["train"].logps[:] = expected_logps(100)
        stored.store(replaces=False)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    stored = build(tmp_path, pairs)
    assert not stored.find()
    fill(stored, Oracle(pairs))
    assert build(tmp_path, pairs, "another").find()
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_unwritable_cache_is_refused(tmp_path, pairs):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match="cannot be read or written"):
        fill(build(tmp_path, pairs), Oracle(pairs))


def test_missing_logps_of_resumed_run_are_refused(tiny_model_dir, tmp_path):
    trainer, _ = make_pair_trainer(tiny_model_dir, tmp_path, make_pairs(), precompute_ref_log_probs=True)
    with pytest.raises(ConfigError, match=r"(?s)weights of step 7 cannot.*restore the folder, or start again"):
        trainer.begin(7)


def find_key(model_dir, folder, **options):
    """Return the cache key of a run's reference."""
    trainer, _ = make_pair_trainer(model_dir, folder, make_pairs(), precompute_ref_log_probs=True, **options)
    return trainer.stored._key


@pytest.mark.parametrize("setting", [Setting(), FRESH], ids=["full", "fresh adapter"])
def test_cache_key_ignores_keys_without_effect_on_reference(tiny_model_dir, tmp_path, setting):
    others = [
        {},
        {"learning_rate": 3e-4, "seed": 7},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.4},
        {"per_device_eval_batch_size": 3, "gradient_accumulation_steps": 2},
    ]
    keys = [find_key(tiny_model_dir, tmp_path / str(at), setting=setting, **other) for at, other in enumerate(others)]
    assert len(set(keys)) == 1


def test_cache_key_depends_on_model_data_and_precision(tiny_model_dir, tmp_path):
    other_model = perturb_model(tiny_model_dir, tmp_path / "other model", std=1e-6)
    other_shape = shutil.copytree(tiny_model_dir, tmp_path / "other shape")
    config = AutoConfig.from_pretrained(other_shape)
    config.rms_norm_eps = 2e-6
    config.save_pretrained(other_shape)
    adapter = train_adapter(tiny_model_dir, tmp_path / "adapter")
    continued = Setting(adapter=AdapterConfig(use_peft=True, adapter_name_or_path=str(adapter)))
    runs = {
        "default": (tiny_model_dir, {}),
        "weights": (other_model, {}),
        "architecture": (other_shape, {}),
        "adapter": (tiny_model_dir, {"setting": continued}),
        "pairs": (tiny_model_dir, {"setting": Setting(key="others")}),
        "precision": (tiny_model_dir, {"bf16": True}),
        "precision of the weights": (tiny_model_dir, {"setting": Setting(dtype="bfloat16")}),
        "kernel": (tiny_model_dir, {"setting": Setting(attention="eager")}),
        "layout": (tiny_model_dir, {"setting": Setting(layout="separate")}),
        "ld_alpha": (tiny_model_dir, {"ld_alpha": 0.5}),
    }
    keys = {name: find_key(model_dir, tmp_path / name, **options) for name, (model_dir, options) in runs.items()}
    assert len(set(keys.values())) == len(runs)
    # The logps of a named reference do not depend on the policy.
    named = with_preference(ref_model_name_or_path=str(other_model))
    assert find_key(tiny_model_dir, tmp_path / "named", setting=named) == keys["weights"]


@pytest.fixture
def computed(monkeypatch):
    """Record each computation of reference log-probabilities."""
    calls, compute = [], ReferenceLogps.compute
    monkeypatch.setattr(
        ReferenceLogps, "compute", lambda self, *args, **kwargs: calls.append(1) or compute(self, *args, **kwargs)
    )
    return calls


def train_step(model_dir, folder, pairs, **options):
    """Run one step with stored reference log-probabilities."""
    options = {"precompute_ref_log_probs": True, "max_steps": 1} | options
    trainer, recorder = make_pair_trainer(model_dir, folder, pairs, **options)
    trainer.train()
    return trainer, recorder


def test_resume_needs_copy_in_output_dir(tiny_model_dir, tmp_path, computed):
    pairs, options = make_pairs(), {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    stored = {"precompute_ref_log_probs": True}
    _, recorder = train_step(tiny_model_dir, tmp_path / "straight", pairs, **options)
    # A run that used the cache has a copy too.
    _, other = train_step(tiny_model_dir, tmp_path / "run", pairs, **options)
    assert any("they are used" in line for line in other.lines)
    assert not any("stored log-probabilities" in line for line in recorder.lines)
    shutil.rmtree(tmp_path / "cache")

    def resume():
        # On a machine with another attention kernel, which changes the cache key.
        trainer, second = make_pair_trainer(
            tiny_model_dir, tmp_path / "run", pairs, setting=Setting(attention="eager"), **stored, **options
        )
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
        return second.steps

    for step, expected in zip(resume(), recorder.steps[2:], strict=True):
        assert step == pytest.approx(expected, rel=1e-3)
    assert len(computed) == 1
    shutil.rmtree(tmp_path / "run" / "reference")
    with pytest.raises(ConfigError, match="the weights of step 2 cannot"):
        resume()


def test_restarted_training_keeps_reference_logps(tiny_model_dir, tmp_path, computed):
    """As after a rollback to step 0, when the reference model is released and the policy differs from it."""
    other_model = perturb_model(tiny_model_dir, tmp_path / "other model", std=1e-2)
    named = with_preference(ref_model_name_or_path=str(other_model))
    trainer, recorder = train_step(tiny_model_dir, tmp_path / "run", make_pairs(), setting=named)
    (rows,) = trainer.stored.rows.values()
    before = rows.logps.copy()
    trainer.train()
    assert len(computed) == 1
    np.testing.assert_array_equal(rows.logps, before)
    # They are not verified again either, which would need the reference model.
    assert not any("stored log-probabilities" in line for line in recorder.lines)
