from __future__ import annotations

import pytest

from recipes_lib.errors import ConfigError
from recipes_lib.training import trackers
from recipes_lib.training.trackers import verify_trackers


@pytest.mark.parametrize("wanted", ["none", "all", ["tensorboard"], ["tensorboard", "wandb"]])
def test_what_is_installed_is_accepted(monkeypatch: pytest.MonkeyPatch, wanted) -> None:
    monkeypatch.setattr(trackers, "get_available_reporting_integrations", lambda: ["tensorboard", "wandb"])
    verify_trackers({"report_to": wanted})


def test_every_missing_tracker_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "get_available_reporting_integrations", lambda: ["tensorboard"])
    with pytest.raises(ConfigError) as raised:
        verify_trackers({"report_to": ["trackio", "tensorboard", "wandb"]})
    assert [problem.found for problem in raised.value.problems] == [
        "trackio is not installed",
        "wandb is not installed",
    ]
    assert "pip install wandb" in raised.value.problems[1].remedy
