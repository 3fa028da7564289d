"""Held-out metrics of preference pairs: means over pairs for any batch size, without side effects."""

from __future__ import annotations

import pytest
import torch
from tests.training.pairs import make_pair_trainer, make_pairs, perturb_model, with_preference
from torch import nn

from recipes_lib.training.evaluation.held_out import EvaluatePairs
from recipes_lib.training.monitoring.progress import TrainingProgress
from recipes_lib.training.trainers.pair_batches import PairScores

VALUES = [0.5, -1.0, 3.0, 0.25, 7.0, -2.0, 0.0]


def score(model, batch):
    assert not model.training
    assert not torch.is_grad_enabled()
    values = torch.tensor(batch)
    torch.rand(3)
    return PairScores(losses=values.exp(), figures={"rewards/accuracies": (values > 0).float(), "reward": values})


def build_hook(held_out, batch_size, **options):
    defaults = {"collate": list, "score": score, "progress": TrainingProgress()}
    return EvaluatePairs(held_out=held_out, batch_size=batch_size, **defaults | options)


def evaluate(batch_size, values=VALUES):
    hook = build_hook({"pairs": values}, batch_size)
    figures = hook(nn.Linear(1, 1), 3)
    assert figures.pop("seconds") >= 0
    return figures


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 50])
def test_metrics_are_means_over_pairs(batch_size):
    share, values = 4 / 7, torch.tensor(VALUES, dtype=torch.float64)
    expected = {
        "loss": values.exp().mean().item(),
        "reward": values.mean().item(),
        "rewards/accuracies": share,
        "rewards/accuracies_stderr": (share * (1 - share) / 7) ** 0.5,
        "num_pairs": 7,
    }
    assert evaluate(batch_size) == pytest.approx(expected, rel=1e-6)


def test_training_mode_and_rng_state_are_preserved():
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    model[1].eval()
    hook = build_hook({"pairs": VALUES}, 2)
    before = torch.get_rng_state()
    hook(model, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert (model.training, model[0].training, model[1].training) == (True, True, False)


def test_named_sets_are_reported_separately():
    sets = {"pairs": VALUES, "other": VALUES[:3]}
    figures = build_hook(sets, 2, named=("other",))(nn.Linear(1, 1), 0)
    alone, other = evaluate(2), evaluate(2, VALUES[:3])
    assert {name: figures[name] for name in alone} == pytest.approx(alone)
    assert {name: figures[f"other_{name}"] for name in other} == pytest.approx(other)
    only = build_hook(sets, 2, named=("pairs", "other"))(nn.Linear(1, 1), 0)
    assert only["loss"] == pytest.approx(evaluate(2, [*VALUES, *VALUES[:3]])["loss"])


def test_metrics_depend_neither_on_batch_size_nor_on_stored_logps(tiny_model_dir, tmp_path):
    other = perturb_model(tiny_model_dir, tmp_path / "other")
    keys = {
        "loss_type": ["sigmoid", "sft", "orpo"],
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
        "max_steps": 2,
        "setting": with_preference(ref_model_name_or_path=str(other)),
        "eval_pairs": make_pairs(11, seed=8),
    }
    runs = []
    for batch_size, is_stored in ((1, True), (4, False)):  # Of 11 pairs: the last batch of four is smaller.
        folder = tmp_path / str(batch_size)
        options = keys | {"per_device_eval_batch_size": batch_size, "precompute_ref_log_probs": is_stored}
        trainer, recorder = make_pair_trainer(tiny_model_dir, folder, make_pairs(), **options)
        trainer.train()
        runs.append([log for log in recorder.logs if "eval_loss" in log])
    names = [name for name in runs[0][0] if name.startswith("eval_") and name != "eval_seconds"]
    assert {"eval_loss", "eval_rewards/margins", "eval_logps/chosen_shift", "eval_num_pairs"} <= set(names)
    assert len(runs[0]) == 2
    for expected, metrics in zip(*runs, strict=True):
        for name in names:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
