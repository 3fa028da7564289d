"""Figures are means over the terms since the last log; over several processes, see the tests of the stages."""

from __future__ import annotations

import torch
from transformers import TrainerControl, TrainerState

from recipes_lib.training.monitoring.callbacks import TermMetrics


def test_figures_are_cleared_by_a_log_of_training_and_by_no_other() -> None:
    figures, state = TermMetrics(), TrainerState()

    def log(**logs):
        figures.on_log(None, state, TrainerControl(), logs)
        return logs

    figures.add({"loss": torch.tensor(3.0), "margin": torch.tensor(4.0)}, 2)
    figures.add({"loss": torch.tensor(1.0), "margin": torch.tensor(5.0)}, 1)
    assert log(eval_loss=1.0) == {"eval_loss": 1.0}
    assert log(loss=9.0) == {"loss": 9.0, "margin": 3.0}
    assert log(loss=9.0) == {"loss": 9.0}
    figures.add({"margin": torch.tensor(1.0)}, 1)
    assert log(train_loss=1.0) == {"train_loss": 1.0}
    assert log(loss=9.0) == {"loss": 9.0, "margin": 1.0}


def test_terms_may_be_counted_on_their_device() -> None:
    figures, logs = TermMetrics(), {"loss": 1.0}
    for count in (2, 3):
        figures.add({"nll": torch.tensor(5.0)}, torch.tensor(count))
    figures.on_log(None, TrainerState(), TrainerControl(), logs)
    assert logs == {"loss": 1.0, "nll": 2.0}
