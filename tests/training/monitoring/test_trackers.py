from __future__ import annotations

import pytest
from transformers import TrainerCallback, TrainingArguments

from recipes_lib.config.schema import DataConfig, EvaluationConfig, ModelConfig, RecipeConfig, TokensConfig
from recipes_lib.errors import ConfigError
from recipes_lib.training.monitoring import callbacks
from recipes_lib.training.monitoring.callbacks import Trackers, verify_trackers


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
    monkeypatch.setattr(callbacks, "get_available_reporting_integrations", lambda: ["tensorboard", "wandb"])
    verify_trackers(run_reporting_to(wanted))


def test_every_missing_tracker_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "get_available_reporting_integrations", lambda: ["tensorboard"])
    with pytest.raises(ConfigError) as raised:
        verify_trackers(run_reporting_to(["trackio", "tensorboard", "wandb"]))
    assert [problem.found for problem in raised.value.problems] == [
        "trackio is not installed",
        "wandb is not installed",
    ]
    assert "pip install wandb" in raised.value.problems[1].remedy


class Tracker(TrainerCallback):
    """Notes what upstream's callbacks are told."""

    def __init__(self, told):
        self.told = told

    def on_train_begin(self, args, state, control, model=None, **_):
        self.told.append(("begin", state.global_step, state.max_steps, state.is_world_process_zero, model))

    def on_log(self, args, state, control, logs=None, **_):
        self.told.append(("log", state.global_step, logs))

    def on_train_end(self, args, state, control, **_):
        self.told.append(("end",))


def test_a_loop_of_our_own_reaches_upstreams_callbacks(monkeypatch, tmp_path) -> None:
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(callbacks, "get_reporting_integration_callbacks", lambda names: [Tracker(told)])
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    one = Trackers(args, "model", None)
    one.begin(8, 4)
    one.log(6, {"loss": 1.0, "grad_norm": None})
    one.end()
    # Trackers complain of figures that are not known.
    assert told == [("begin", 4, 8, True, "model"), ("log", 6, {"loss": 1.0}), ("end",)]
