"""Where the stages differ: their defaults, the keys they leave out and why, and the values they take.

What holds for all stages is in ``policy.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from recipes_lib.config.policy import CHOICES, DEFAULTS, REFUSED
from recipes_lib.config.retired import Retired, dropped, each, undecided
from recipes_lib.config.schema import PretrainingConfig, ScheduleConfig

_STAGE_DEFAULTS: Final[Mapping[str, Mapping[str, tuple[Any, str]]]] = {
    "sft": {
        "lr_scheduler_type": ("cosine", "the decay to zero that published fine-tunings use"),
        "warmup_steps": (0.03, "Adam's second moment is unreliable in the first steps"),
    },
    "pretrain": {
        "adam_beta2": (0.95, "what GPT-3, Llama, Mistral and Chinchilla trained with"),
        "learning_rate": (
            3e-4,
            "a rate of pretraining; published runs take 6e-4 at 124M to 6e-5 at 175B parameters",
        ),
        "lr_scheduler_type": ("cosine", "with `min_lr_ratio`: the decay to a tenth of the peak of published runs"),
        "num_train_epochs": (1.0, "a repeated token teaches less than a new one"),
        "warmup_steps": (0.01, "published runs warm up over 0.1 to 2 % of their steps"),
        "weight_decay": (0.1, "what GPT-3, Llama, Mistral and Chinchilla trained with"),
    },
}

_OF_PRETRAINING: Final = undecided("is a key of pretraining", "delete the line")
_FULL_ROWS: Final = dropped("has no effect: documents are cut into full rows of `max_length`, and nothing is lost")

_LEFT_OUT: Final[Mapping[str, Mapping[str, Retired]]] = {
    "sft": {
        **{
            field.name: _OF_PRETRAINING
            for section in (PretrainingConfig, ScheduleConfig)
            for field in dataclasses.fields(section)
        },
        "min_lr_ratio": undecided(
            "is a key of pretraining",
            "write `lr_scheduler_type: cosine_with_min_lr` and `lr_scheduler_kwargs: {min_lr_rate: 0.1}`",
        ),
        "model_config": undecided("is a key of pretraining", "write `model_name_or_path`: fine-tuning needs a model"),
    },
    "pretrain": {
        **each("packing overlong max_truncated_fraction packing_strategy truncation_mode", _FULL_ROWS),
        **each("loss_on assistant_only_loss completion_only_loss", dropped("has no effect: every token is trained on")),
        "lr_scheduler_kwargs": undecided(
            "is not read; each of them is a key of its own", "use `min_lr_ratio`, `decay_steps`, `decay_type`"
        ),
        "neftune_noise_alpha": undecided("is a key of fine-tuning", "delete the line"),
        "train_sampling_strategy": dropped("has no effect: the order of rows follows from `seed` alone"),
    },
}

_STAGE_CHOICES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "pretrain": {"lr_scheduler_type": ("constant", "linear", "cosine", "warmup_stable_decay", "inverse_sqrt")},
}

ADDED_CHOICES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "sft": {},
    "pretrain": {"optim": ("muon", "adamw_bf16_stochastic")},
}
"""Stage -> values of an upstream key that upstream has not."""


def read_defaults(stage: str) -> Mapping[str, tuple[Any, str]]:
    """Return the effective defaults of a stage that are not upstream's: key -> (value, reason)."""
    return {**DEFAULTS, **_STAGE_DEFAULTS[stage]}


def read_refused(stage: str) -> Mapping[str, Retired]:
    """Return the keys that upstream or another stage has and this one has not, each with what to say about it."""
    return {**REFUSED, **_LEFT_OUT[stage]}


def read_choices(stage: str) -> Mapping[str, tuple[str, ...]]:
    """Return the values honoured where upstream allows more."""
    return {**CHOICES, **_STAGE_CHOICES.get(stage, {})}
