"""Values of a run during validation: user values, defaults, and keys without effect because of another key."""

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
    """User values and defaults of a run, before ``DECISIONS`` are applied.

    Attributes:
        table: Keys of the recipe.
        name: File name, or ``command line``; the location of missing keys.
        given: Key -> user entry, valid or not; a flag replaces the line that it overrides.
        values: Key -> valid user value.
    """

    table: KeyTable
    name: str
    given: Mapping[str, Entry]
    values: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        """Return the user value or the default of a key; ``None`` for a key that the recipe does not have."""
        if key in self.values:
            return self.values[key]
        return self.table.keys[key].default if key in self.table.keys else None

    def gives(self, key: str) -> bool:
        """Return whether the user set ``key`` to a valid value other than null."""
        return self.values.get(key) is not None

    def changes(self, key: str) -> bool:
        """Return whether the user set ``key`` to a valid value other than null and the default."""
        return self.gives(key) and self.values[key] != self.table.keys[key].default

    def broken(self, key: str) -> bool:
        """Return whether the user set ``key`` to an invalid value."""
        return key in self.given and key not in self.values

    def where(self, key: str) -> str:
        """Return the location of ``key`` in the file or flags; the file name if it is missing."""
        return self.given[key].where if key in self.given else self.name

    def problem(self, key: str, found: str, remedy: str) -> Problem:
        """Return a problem at the location of ``key``."""
        return Problem(self.where(key), found, remedy)


@dataclass(frozen=True, slots=True)
class Decision:
    """A key that has no effect at some values of another key.

    Attributes:
        key: Key without effect.
        decider: Key whose value decides.
        voids: Predicate: whether ``key`` has no effect at this value of ``decider``.
        why: Reason, as a clause.
        becomes: Value that ``key`` is set to; ``ABSENT`` omits it, so that upstream's default applies.
        unless: Predicate: whether ``key`` has an effect nevertheless.
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
        """Return whether the user set both keys; a flag that overrides a line of the file is not a contradiction."""
        if not settings.gives(self.key) or settings.values[self.key] == self.becomes or not self.applies(settings):
            return False
        # `--max_steps 10` over a file with `num_train_epochs` is a short trial of the same recipe.
        is_overridden = settings.given[self.decider].flag and not settings.given[self.key].flag
        return not is_overridden


def _is_local_file(reference: Any) -> bool:
    return is_local(reference) and not Path(reference).is_dir()


def is_local(reference: Any) -> bool:
    """Return whether a model or dataset reference is an existing file or folder."""
    if not isinstance(reference, str) or not reference:
        return False
    try:
        return Path(reference).exists()
    except (OSError, ValueError):  # A name that is too long, or has a null byte (ValueError on Python 3.11).
        return False


def _warms_up_otherwise(settings: Settings) -> bool:
    """Return whether warm-up is independent of the schedule: in pretraining, and for schedule-free optimizers."""
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
        lambda kind: kind in ("constant", "reduce_lr_on_plateau", "greedy"),
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
    # A folder can have configurations, in its dataset card.
    Decision("dataset_config", "dataset_name", _is_local_file, "the dataset is a local file", None),
)
