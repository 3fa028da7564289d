"""Rules of learning-rate schedules, against the signatures and warm-up of the functions in transformers."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR, get_scheduler

from recipes_lib.config.loader import load_config
from recipes_lib.config.table import load_table

KINDS = load_table("sft").keys["lr_scheduler_type"].schema["enum"]
# Functions that forward all keyword arguments, and the class that receives them.
CLASSES = {"reduce_lr_on_plateau": torch.optim.lr_scheduler.ReduceLROnPlateau, "greedy": GreedyLR}
NOT_OPTIONS = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
NEEDED = {
    "cosine_with_min_lr": "min_lr",
    "cosine_warmup_with_min_lr": "min_lr",
    "warmup_stable_decay": "num_decay_steps",
}


@pytest.mark.parametrize("kind", KINDS)
def test_scheduler_kwargs_match_signature_of_upstream_function(problems_of, kind: str) -> None:
    function = CLASSES.get(kind, TYPE_TO_SCHEDULER_FUNCTION[kind])
    taken = set(inspect.signature(function).parameters) - NOT_OPTIONS
    every = taken | NOT_OPTIONS | {"min_lr", "min_lr_rate", "num_cycles", "power", "nobody's"}
    needed = {NEEDED[kind]} if kind in NEEDED else set()
    for name in sorted(every - {"min_lr_rate" if needed == {"min_lr"} else ""}):
        options = ", ".join(f'"{option}": 1' for option in {name} | needed)
        problems = problems_of(f"lr_scheduler_type: {kind}\nlr_scheduler_kwargs: {{{options}}}\ntest_split_size: 9\n")
        assert [problem.where for problem in problems] == ([] if name in taken else ["recipe.yaml:6"]), name
        assert all(repr(name) in problem.found and kind in problem.found for problem in problems)


def test_scheduler_kwargs_error_lists_accepted_options(problems_of) -> None:
    (problem,) = problems_of("lr_scheduler_kwargs: {min_lr_rate: 0.1}\n")
    assert problem.found == "`lr_scheduler_kwargs` has 'min_lr_rate', which `lr_scheduler_type: cosine` does not take"
    assert problem.remedy == "write num_cycles"


@pytest.mark.parametrize("value", ["x", "-4", "true", "[1]", ".nan", ".inf"])
def test_scheduler_kwargs_are_numbers_that_are_not_negative(problems_of, value: str) -> None:
    (problem,) = problems_of(f"lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {{lr_end: {value}}}\n")
    assert problem.remedy == "write a number, 0 or more"


def test_scheduler_kwargs_take_texts_and_null(problems_of) -> None:
    options = "{num_decay_steps: 4, num_stable_steps: null, decay_type: linear}"
    assert not problems_of(f"lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {options}\n")


@pytest.mark.parametrize("kind", sorted(set(KINDS) - NEEDED.keys()))
def test_warmup_is_refused_iff_upstream_scheduler_has_none(problems_of, write, minimal_text: str, kind: str) -> None:
    rates = []
    for num_warmup_steps in (0, 5):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        get_scheduler(kind, optimizer, num_warmup_steps=num_warmup_steps, num_training_steps=10)
        rates.append(optimizer.param_groups[0]["lr"])
    has_warmup = rates[0] != rates[1]
    problems = problems_of(f"lr_scheduler_type: {kind}\nwarmup_steps: 5\ntest_split_size: 9\n")
    assert [problem.where for problem in problems] == ([] if has_warmup else ["recipe.yaml:6"])
    config = load_config(
        "sft", ["--config", str(write(f"{minimal_text}lr_scheduler_type: {kind}\ntest_split_size: 9\n"))]
    )
    assert bool(config.training["warmup_steps"]) is has_warmup


@pytest.mark.parametrize(("optim", "takes"), [("adamw", True), ("sgd", True), ("radam", False)])
def test_schedule_free_optimizer_accepts_warmup_steps(problems_of, optim: str, takes: bool) -> None:
    lines = f"optim: schedule_free_{optim}\nlr_scheduler_type: constant\nwarmup_steps: 5\n"
    assert (not problems_of(lines)) is takes


def test_pretrain_constant_scheduler_accepts_warmup(problems_of) -> None:
    assert not problems_of("lr_scheduler_type: constant\nwarmup_steps: 5\n", recipe="pretrain")


@pytest.mark.parametrize(("accumulation", "is_sound"), [(1, False), (2, True)])
def test_batch_ramp_needs_gradient_accumulation(problems_of, accumulation: int, is_sound: bool) -> None:
    lines = f"gradient_accumulation_steps: {accumulation}\nbatch_ramp_tokens: 1000\n"
    problems = problems_of(lines, recipe="pretrain")
    assert [problem.where for problem in problems] == ([] if is_sound else ["recipe.yaml:6"])
