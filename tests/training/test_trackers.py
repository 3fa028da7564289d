from __future__ import annotations

import pytest

from recipes_lib.config.schema import DataConfig, EvaluationConfig, ModelConfig, RecipeConfig, TokensConfig
from recipes_lib.errors import ConfigError
from recipes_lib.training import trackers
from recipes_lib.training.trackers import verify_trackers


def run_reporting_to(wanted) -> RecipeConfig:
    return RecipeConfig(
        stage="sft",
        path=None,
        data=DataConfig(),
        tokens=TokensConfig(),
        model=ModelConfig(),
        evaluation=EvaluationConfig(),
        training={"report_to": wanted},
    )


@pytest.mark.parametrize("wanted", ["none", "all", ["tensorboard"], ["tensorboard", "wandb"]])
def test_what_is_installed_is_accepted(monkeypatch: pytest.MonkeyPatch, wanted) -> None:
    monkeypatch.setattr(trackers, "get_available_reporting_integrations", lambda: ["tensorboard", "wandb"])
    verify_trackers(run_reporting_to(wanted))


def test_every_missing_tracker_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "get_available_reporting_integrations", lambda: ["tensorboard"])
    with pytest.raises(ConfigError) as raised:
        verify_trackers(run_reporting_to(["trackio", "tensorboard", "wandb"]))
    assert [problem.found for problem in raised.value.problems] == [
        "trackio is not installed",
        "wandb is not installed",
    ]
    assert "pip install wandb" in raised.value.problems[1].remedy
