"""Experiment trackers by name: whether those of a run are there, and how a loop of our own reports to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import (
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem


class Trackers:
    """Upstream's callbacks of ``report_to``, for a loop that is not upstream's trainer; on every process.

    Source: ``transformers.Trainer``, which reports by the same callbacks;
    ``tests/training/monitoring/test_trackers.py``.
    """

    def __init__(self, args: TrainingArguments, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Connect nothing yet; ``model`` and ``tokenizer`` are described to the trackers."""
        self._args = args
        kinds: list[Any] = get_reporting_integration_callbacks(args.report_to)  # type: ignore[no-untyped-call]
        # Without the first one, which decides what is due in upstream's loop, there is a warning.
        callbacks = [DefaultFlowCallback, *kinds]
        self._handler: Any = CallbackHandler(callbacks, model, tokenizer, None, None)  # type: ignore[no-untyped-call]
        self._state, self._control = TrainerState(), TrainerControl()

    def begin(self, num_steps: int, step: int) -> None:
        """A run of ``num_steps`` begins, or goes on after ``step`` of them."""
        self._state = TrainerState(
            global_step=step,
            max_steps=num_steps,
            is_local_process_zero=self._args.local_process_index == 0,
            is_world_process_zero=self._args.process_index == 0,
        )
        self._handler.on_train_begin(self._args, self._state, self._control)

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """Report what is known after ``step`` steps."""
        self._state.global_step = step
        known = {name: value for name, value in figures.items() if value is not None}
        self._handler.on_log(self._args, self._state, self._control, known)

    def end(self) -> None:
        """The run is done."""
        self._handler.on_train_end(self._args, self._state, self._control)


def verify_trackers(config: RecipeConfig) -> None:
    """Refuse a tracker that is not installed, before anything is loaded.

    Raises:
        ConfigError: Naming every one.
    """
    wanted = config.read("report_to")
    names = [wanted] if isinstance(wanted, str) else wanted
    available = [*get_available_reporting_integrations(), "none", "all"]  # type: ignore[no-untyped-call]
    missing = [name for name in names if name not in available]
    if missing:
        remedy = "pip install {}, or write `report_to: none`: metrics.jsonl and report.html are always there"
        raise ConfigError(*(Problem("report_to", f"{name} is not installed", remedy.format(name)) for name in missing))
