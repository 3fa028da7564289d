"""Trainer of a launch with pipeline parallelism, and its description (training: ``tests/distributed``)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from recipes_lib.models.parallel.pipeline_part import PipelinePart
from recipes_lib.training.layouts.launch_environment import Launch, Layout
from recipes_lib.training.layouts.pipeline_schedule import PipelineTrainer, _describe, choose_trainer
from recipes_lib.training.trainers.next_token_trainer import PretrainTrainer


def test_trainer_is_chosen_by_launch() -> None:
    assert choose_trainer(Launch(0, 0, 2, "")) is PretrainTrainer
    assert choose_trainer(Launch(0, 0, 2, "", layout=Layout(pipeline_stages=2))) is PipelineTrainer


@pytest.mark.parametrize(
    ("part", "schedule", "num_batches", "words"),
    [
        (PipelinePart(0, 2), "1f1b", 4, "2 stages by 1f1b, 4 micro-batches a step; the bubble adds 25%"),
        (PipelinePart(0, 4), "gpipe", 4, "4 stages by gpipe, 4 micro-batches a step; the bubble adds 75%"),
        (PipelinePart(0, 2, 2), "interleaved", 4, "2 stages of 2 chunks each by interleaved, 4 micro-batches a step; "),
        (PipelinePart(0, 2, 2), "interleaved", 4, "the bubble adds 12%"),
    ],
)
def test_description_reports_bubble(part: PipelinePart, schedule: str, num_batches: int, words: str) -> None:
    pipeline: Any = SimpleNamespace(part=part)
    assert words in _describe(pipeline, schedule, num_batches=num_batches)
