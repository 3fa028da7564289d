"""Settings of a run during validation: given values, defaults, and keys that another key makes ineffective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recipes_lib.config.table import KeyTable
from recipes_lib.config.values import Entry
from recipes_lib.errors import Problem

ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class Settings:
    """Effective values before the derived ones.

    Attributes:
        table: The keys of the recipe.
        name: The file, or ``command line``; the location of missing keys.
        given: The user's entries, valid or not; a flag replaces the line that it overrides.
        values: Valid values the user gave, by key.
    """

    table: KeyTable
    name: str
    given: Mapping[str, Entry]
    values: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        """Return the effective value: the user's or the default; ``None`` for a key that the recipe does not have."""
        if key in self.values:
            return self.values[key]
        return self.table.keys[key].default if key in self.table.keys else None

    def gives(self, key: str) -> bool:
        """Return whether the user set ``key`` to something other than null."""
        return self.values.get(key) is not None

    def changes(self, key: str) -> bool:
        """Return whether the user set ``key`` to something other than null and its default."""
        return self.gives(key) and self.values[key] != self.table.keys[key].default

    def broken(self, key: str) -> bool:
        """Return whether the user wrote a value for ``key`` that was refused."""
        return key in self.given and key not in self.values

    def where(self, key: str) -> str:
        """Return where the user wrote ``key``; the file if it is missing."""
        return self.given[key].where if key in self.given else self.name

    def problem(self, key: str, found: str, remedy: str) -> Problem:
        """Return a problem at the place where the user wrote ``key``."""
        return Problem(self.where(key), found, remedy)


@dataclass(frozen=True, slots=True)
class Decision:
    """A key whose value decides that another one has no effect.

    Attributes:
        key: The key without effect.
        decider: The key that decides.
        voids: Whether a value of ``decider`` voids ``key``.
        why: The reason, as a clause.
        becomes: The value that ``key`` has then; ``ABSENT`` when it is left to upstream.
        unless: Whether something else gives ``key`` its effect.
    """

    key: str
    decider: str
    voids: Callable[[Any], bool]
    why: str
    becomes: Any = ABSENT
    unless: Callable[[Settings], bool] = lambda _: False

    def applies(self, settings: Settings) -> bool:
        """Return whether ``key`` has no effect under ``settings``."""
        return self.voids(settings[self.decider]) and not self.unless(settings)

    def contradicts(self, settings: Settings) -> bool:
        """Return whether the user asked for both; a flag that overrules a line of the file is no contradiction."""
        if not settings.gives(self.key) or settings.values[self.key] == self.becomes or not self.applies(settings):
            return False
        # `--max_steps 10` over a file with `num_train_epochs` is a short trial of the same recipe.
        overruled = settings.given[self.decider].flag and not settings.given[self.key].flag
        return not overruled


def is_local(reference: Any) -> bool:
    """Return whether a model or dataset is a file or folder that exists."""
    if not isinstance(reference, str) or not reference:
        return False
    try:
        # It raises for names that are too long or hold a zero byte (Python 3.11), and those are no paths.
        return Path(reference).exists()
    except (OSError, ValueError):
        return False


_NO_WARMUP: Final = ("constant", "reduce_lr_on_plateau", "greedy")
"""Upstream's schedules without a warm-up."""


def _warms_up_otherwise(settings: Settings) -> bool:
    """In pretraining every schedule has a warm-up; these optimizers implement their own."""
    return settings.table.recipe == "pretrain" or settings["optim"] in ("schedule_free_adamw", "schedule_free_sgd")


DECISIONS: Final = (
    Decision(
        "activation_checkpointing_kwargs",
        "activation_checkpointing",
        lambda value: value == "auto",
        "`activation_checkpointing: auto` chooses them",
    ),
    Decision("num_train_epochs", "max_steps", lambda steps: steps > 0, "`max_steps` decides the length"),
    Decision("num_train_epochs", "max_tokens", lambda tokens: tokens is not None, "`max_tokens` decides the length"),
    Decision("max_steps", "max_tokens", lambda tokens: tokens is not None, "`max_tokens` decides the length"),
    Decision("warmup_steps", "warmup_tokens", lambda tokens: tokens is not None, "`warmup_tokens` decides it"),
    Decision(
        "warmup_steps",
        "lr_scheduler_type",
        lambda kind: kind in _NO_WARMUP,
        "`lr_scheduler_type` has no warm-up",
        becomes=0,
        unless=_warms_up_otherwise,
    ),
    Decision("eval_steps", "eval_strategy", lambda strategy: strategy != "steps", "`eval_strategy` is not steps"),
    Decision("save_steps", "save_strategy", lambda strategy: strategy != "steps", "`save_strategy` is not steps"),
    Decision("logging_steps", "logging_strategy", lambda value: value != "steps", "`logging_strategy` is not steps"),
    Decision("eval_on_start", "eval_strategy", lambda strategy: strategy == "no", "`eval_strategy` is no", False),
    Decision("model_revision", "model_name_or_path", is_local, "the model is a local folder", None),
    Decision("teacher_model_revision", "teacher_model_name_or_path", is_local, "the teacher is a local folder", None),
    Decision("dataset_revision", "dataset_name", is_local, "the dataset is a local path", None),
    Decision("dataset_config", "dataset_name", is_local, "the dataset is a local path", None),
)
