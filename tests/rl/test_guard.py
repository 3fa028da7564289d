"""UpdateGuard: non-finite rollouts and steps raise before an update, with a dump of the answers."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tests.rl.test_rollout import build_rollout

from recipes_lib.errors import DivergedError
from recipes_lib.rl.update import UpdateGuard

LENGTHS = [(3, 4), (2, 1), (2, 3)]


@pytest.fixture
def guard(tmp_path):
    return UpdateGuard(tmp_path, lambda number: 100 + number)


def test_finite_rollout_passes_without_dump(guard, tmp_path):
    guard.check_rollout(build_rollout(LENGTHS), step=5)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scores", "the rewards of 1 of 3 answers are not finite"),
        ("logps", "the log-probabilities of the policy of 1 of 3"),
        ("ref_logps", "the log-probabilities of the reference of 1 of 3"),
        ("engine_logps", "the log-probabilities of generation of 1 of 3"),
        ("values", "the values of the critic of 1 of 3"),
    ],
)
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_non_finite_value_raises_and_dumps_its_answer(guard, tmp_path, name, words, number):
    rollout = build_rollout(LENGTHS)
    values = getattr(rollout, name).clone()
    values[(2, 1) if values.dim() == 2 else 2] = float(number)
    with pytest.raises(DivergedError, match=f"step 5 was stopped before its update: {words}"):
        guard.check_rollout(dataclasses.replace(rollout, **{name: values}), step=5)
    folder = tmp_path / "diverged" / "step-5"
    assert json.loads((folder / "rank-0.json").read_text())["row_ids"] == [[102]]
    tensors = load_file(folder / "rank-0.safetensors")
    answer = rollout.response_ids[2, :3].tolist()
    assert tensors["micro_batch_1.input_ids"].tolist() == [[*rollout.prompts[2].input_ids, *answer]]
    assert not torch.isfinite(tensors[f"micro_batch_1.{name}"]).all()


def test_non_finite_value_outside_mask_is_ignored(guard):
    rollout = build_rollout(LENGTHS)
    values = rollout.values.clone()
    values[1, 1:] = float("nan")
    guard.check_rollout(dataclasses.replace(rollout, values=values), step=1)


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (1.0, float("inf"))])
def test_step_raises_unless_loss_and_norm_are_finite(guard, tmp_path, loss, norm):
    rollout, weight = build_rollout(LENGTHS), torch.ones(2)
    weight.grad = torch.tensor([1.0, norm])
    critic = SimpleNamespace(name="critic", parameters={"w": weight}, learning_rate=0.5)
    step = {"parts": [rollout], "losses": [torch.tensor(loss)]}
    guard.check_step(critic, step=8, loss=1.0, norm=1.0, **step)
    with pytest.raises(DivergedError, match="step 8 was stopped before its update of the critic"):
        guard.check_step(critic, step=8, loss=loss, norm=norm, **step)
    facts = json.loads((tmp_path / "diverged" / "step-8" / "rank-0.json").read_text())
    assert (facts["learner"], facts["learning_rate"], facts["row_ids"]) == ("critic", 0.5, [[100, 101, 102]])
