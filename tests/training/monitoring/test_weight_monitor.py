"""The norms that a run reports, against numpy, and that reporting changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.training.pretraining import build_config, read_steps, run_recipe
from transformers import TrainerControl, TrainerState, TrainingArguments

from recipes_lib.training.monitoring.callbacks import WeightMonitor, choose_sample


def test_the_figures_are_those_of_numpy(tmp_path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    state, control = TrainerState(logging_steps=2), TrainerControl()
    monitor = WeightMonitor()
    monitor.on_train_begin(args, state, control, model=model)
    flat = lambda: np.concatenate([p.detach().numpy().ravel().astype(np.float64) for p in model.parameters()])  # noqa: E731
    for step in range(4):
        state.global_step = step
        before = flat()
        monitor.on_pre_optimizer_step(args, state, control)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
        monitor.on_optimizer_step(args, state, control)
        logs = {"loss": 1.0}
        monitor.on_log(args, state, control, logs=logs)
        if step == 1:
            assert logs["parameter_norm"] == pytest.approx(np.linalg.norm(flat()), rel=1e-6)
            expected = np.linalg.norm(flat() - before) / np.linalg.norm(before)
            assert logs["update_ratio"] == pytest.approx(expected, rel=1e-5)
    evaluation = {"eval_loss": 1.0}
    monitor.on_log(args, state, control, logs=evaluation)
    assert evaluation == {"eval_loss": 1.0}


@pytest.mark.parametrize(
    ("sizes", "budget", "chosen"),
    [([4, 4, 4], 12, [0, 1, 2]), ([4, 4, 4], 8, [0, 2]), ([4, 4, 4], 5, [0]), ([9, 3, 9], 2, [1]), ([], 5, [])],
)
def test_the_sample_is_spread_over_the_model_and_fits(sizes, budget, chosen) -> None:
    assert choose_sample(sizes, budget) == chosen


def test_a_run_reports_them_each_step(tmp_path, tiny_tokenizer_dir, monkeypatch) -> None:
    run_recipe(build_config(tmp_path, tiny_tokenizer_dir, max_steps=3), monkeypatch)
    for step in read_steps(tmp_path / "out"):
        assert 0 < step["update_ratio"] < 1
        assert step["parameter_norm"] > 0
        assert step["mfu"] is None or step["mfu"] > 0
