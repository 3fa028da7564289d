"""Experiment trackers by name: whether those that a run reports to are there."""

from __future__ import annotations

from transformers.integrations.integration_utils import get_available_reporting_integrations

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem


def verify_trackers(config: RecipeConfig) -> None:
    """Refuse a tracker that is not installed, before anything is loaded.

    Raises:
        ConfigError: Naming every one.
    """
    wanted = config.training.get("report_to", "none")
    names = [wanted] if isinstance(wanted, str) else wanted
    available = [*get_available_reporting_integrations(), "none", "all"]  # type: ignore[no-untyped-call]
    missing = [name for name in names if name not in available]
    if missing:
        remedy = "pip install {}, or write `report_to: none`: metrics.jsonl and report.html are always there"
        raise ConfigError(*(Problem("report_to", f"{name} is not installed", remedy.format(name)) for name in missing))
