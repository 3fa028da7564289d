"""What must hold between the keys of the learning rate's schedule, of its warm-up and of the batch ramp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from recipes_lib.config.settings import Settings
from recipes_lib.errors import Problem

_PLATEAU: Final = ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lr", "eps")
_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles", "warmup_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        "num_decay_steps",
        "num_stable_steps",
        "warmup_type",
        "decay_type",
        "min_lr_ratio",
        "num_cycles",
    ),
    "reduce_lr_on_plateau": _PLATEAU,
    "greedy": (*_PLATEAU, "max_lr", "warmup", "verbose", "smooth", "window_size", "reset_start"),
}
"""Upstream's schedule -> its options; the others have none.

Source: transformers ``TYPE_TO_SCHEDULER_FUNCTION``; ``tests/config/test_schedule_rules.py`` holds it to the signatures.
"""


def check_schedule(settings: Settings) -> Iterator[Problem]:
    """The length of the run, and the warm-up inside it."""
    max_steps, warmup = settings["max_steps"], settings["warmup_steps"]
    if max_steps == 0:
        yield Problem(settings.where("max_steps"), "`max_steps` is 0", "write -1 to train for `num_train_epochs`")
    if 0 < max_steps <= warmup:
        found = f"the warm-up ({warmup} steps) is as long as the run (`max_steps` {max_steps})"
        yield Problem(settings.where("warmup_steps"), found, "write a share, such as `warmup_steps: 0.03`")


def check_schedule_options(settings: Settings) -> Iterator[Problem]:
    """What upstream's schedules cannot do without, and that they take no other options."""
    kind, options = settings["lr_scheduler_type"], settings["lr_scheduler_kwargs"] or {}
    needed = {"warmup_stable_decay": {"num_decay_steps"}}.get(kind, set())
    if kind in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        needed = {"min_lr", "min_lr_rate"}
    if needed and len(needed & set(options)) != 1:
        names = " or ".join(f"`{name}`" for name in sorted(needed))
        found = f"`lr_scheduler_type: {kind}` needs {names} in `lr_scheduler_kwargs`"
        yield Problem(settings.where("lr_scheduler_type"), found, f"write lr_scheduler_kwargs: {{{min(needed)}: ...}}")
    taken = _OPTIONS.get(kind, ())
    for name in options:
        if name not in taken and not settings.broken("lr_scheduler_type"):
            found = f"`lr_scheduler_kwargs` has {str(name)[:60]!r}, which `lr_scheduler_type: {kind}` does not take"
            remedy = f"write {' or '.join(taken)}" if taken else "delete it, or choose another schedule"
            yield Problem(settings.where("lr_scheduler_kwargs"), found, remedy)


def check_shape(settings: Settings) -> Iterator[Problem]:
    """Options of one schedule, or of the batch ramp, need that schedule or the ramp."""
    for key in ("decay_steps", "decay_type"):
        if settings.gives(key) and settings["lr_scheduler_type"] != "warmup_stable_decay":
            found = f"`{key}` has no effect: `lr_scheduler_type` is {settings['lr_scheduler_type']}"
            yield Problem(settings.where(key), found, "write `lr_scheduler_type: warmup_stable_decay`, or delete it")
    if settings["decay_type"] == "exponential" and settings["min_lr_ratio"] == 0:
        found = "an exponential decay to `min_lr_ratio: 0` is at 0 with its first step"
        yield Problem(settings.where("min_lr_ratio"), found, "write `min_lr_ratio: 0.01`, or another `decay_type`")
    if settings.gives("warmup_tokens") and settings.gives("max_tokens"):
        warmup, length = settings["warmup_tokens"], settings["max_tokens"]
        if warmup >= length:
            found = f"the warm-up ({warmup:,} tokens) is as long as the run (`max_tokens` {length:,})"
            yield Problem(settings.where("warmup_tokens"), found, "lower it, or train longer")
    for key in ("batch_ramp_start", "batch_ramp_lr"):
        if settings.gives(key) and not settings.gives("batch_ramp_tokens"):
            found = f"`{key}` has no effect without `batch_ramp_tokens`"
            yield Problem(settings.where(key), found, "write `batch_ramp_tokens: ...`, or delete the line")
    if settings.gives("batch_ramp_tokens") and settings["gradient_accumulation_steps"] == 1:
        found = "`batch_ramp_tokens` has no effect: the batch grows by micro-batches, and a step has one"
        remedy = "write `gradient_accumulation_steps: 2` or more, or delete the line"
        yield Problem(settings.where("batch_ramp_tokens"), found, remedy)
