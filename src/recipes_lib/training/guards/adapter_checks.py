"""Adapter checks: identity at the start, gradients, an unchanged base."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.errors import DivergedError
from recipes_lib.models.adapters.lora import (
    adapters_off,
    compute_probe_logits,
    find_logit_shift,
    is_taken_out_of_weights,
)
from recipes_lib.training.layouts.fsdp import reshard
from recipes_lib.training.trainers.arguments import get_rounding_dtype

SAMPLE_SIZE: Final = 1024
"""Numbers of a frozen tensor that are kept to see whether it moves: an optimizer moves all of them or none."""


class AdapterChecks(TrainerCallback):
    """Stops a run in which something else learns than the adapter, or only a part of it.

    Before the first step a fresh adapter changes no logit. At the first steps every trained tensor has a finite
    gradient that is not zero; an A matrix is judged as soon as its B is no longer zero. After the first step and at the
    end the frozen tensors are what they were, and at the end the trained ones are not.

    Source: ``tests/training/guards/test_adapter_checks.py``.
    """

    def __init__(
        self, model: nn.Module, config: AdapterConfig, *, say: Callable[[str], None], may_be_idle: bool = False
    ) -> None:
        """Remember how the adapter begins.

        Args:
            model: Under its adapter, before a checkpoint is read and before it is wrapped.
            config: Says whether the adapter is a fresh one.
            say: Takes one line for each check that has passed.
            may_be_idle: Whether there are steps from which nothing is to be learnt, as when all answers are worth the
                same; in such a step all gradients are zero, and none is judged.
        """
        self._may_be_idle = may_be_idle
        self._is_fresh = config.adapter_name_or_path is None
        self._say = say
        self._initial = {name: _summarise(parameter) for name, parameter in _find_trained(model).items()}
        self._unjudged = set(self._initial)
        self._must_move: set[str] = set()
        self._frozen: dict[str, Tensor] = {}
        self._is_first_step = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at the fresh adapter, and remember what must not move."""
        model = kwargs["model"]
        if self._is_fresh and state.global_step == 0 and not is_taken_out_of_weights(model):
            verify_no_effect(model, get_rounding_dtype(model, args))
            self._say("adapter: it changes no logit before it is trained")
        self._frozen = sample_frozen(model)
        if getattr(args, "deepspeed_plugin", None) is not None:
            self._unjudged.clear()
            self._say("adapter: DeepSpeed keeps the gradients to itself, so nobody looks whether all of it has one")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Judge the gradients until each was found sound."""
        if not self._unjudged:
            return
        verdicts = judge_gradients(kwargs["model"])
        if self._may_be_idle and set(verdicts.values()) == {ZERO}:
            return
        if args.fp16:  # The loss scaler is still looking for its scale, and skips such a step.
            verdicts = {name: fault for name, fault in verdicts.items() if fault != NOT_FINITE}
        if faults := [f"{name} ({fault})" for name, fault in verdicts.items() if fault]:
            raise DivergedError(
                f"at step {state.global_step + 1} {len(faults)} of {len(self._initial)} trained tensors would learn "
                f"nothing: {_shorten(faults)}. Their gradients are lost on the way: try activation_checkpointing: false"
            )
        # A warm-up begins at a rate of 0, at which nothing moves.
        if any(group["lr"] for group in kwargs["optimizer"].param_groups):
            self._must_move |= verdicts.keys()
        self._unjudged -= verdicts.keys()
        if not self._unjudged:
            self._say(f"adapter: all {len(self._initial)} trained tensors have a gradient")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """See after the first step of this process that the base stands still."""
        if self._is_first_step:
            self._is_first_step = False
            verify_frozen(self._frozen, kwargs["model"])
            self._say(f"adapter: all {len(self._frozen)} frozen tensors stand still")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """See that the base has stood still, and that the adapter has not."""
        verify_frozen(self._frozen, kwargs["model"])
        trained = _find_trained(kwargs["model"])
        if unmoved := [name for name in sorted(self._must_move) if _summarise(trained[name]) == self._initial[name]]:
            raise DivergedError(
                f"{len(unmoved)} of {len(trained)} trained tensors are what they were before training: "
                f"{_shorten(unmoved)}. They have gradients, so the optimizer has let them out"
            )


NOT_FINITE: Final = "its gradient is not finite"
ZERO: Final = "its gradient is zero"


def judge_gradients(model: nn.Module) -> dict[str, str | None]:
    """Return what is wrong with the gradient of each trained parameter; ``None`` when nothing is.

    An A matrix whose B is zero is left out: its gradient is zero by the chain rule.
    """
    trained = _find_trained(model)
    verdicts: dict[str, str | None] = {}
    for name, parameter in trained.items():
        twin = trained.get(name.replace(".lora_A.", ".lora_B."), parameter)
        if twin is not parameter and not _gather(twin).any():
            continue
        if parameter.grad is None:
            verdicts[name] = "it has no gradient"
        else:
            norm = float(_gather(parameter.grad.float().norm()))
            verdicts[name] = None if 0 < norm < float("inf") else ZERO if norm == 0 else NOT_FINITE
    return verdicts


def verify_no_effect(model: Any, dtype: torch.dtype) -> None:
    """Compare the logits of eight tokens with the adapter on and off.

    Args:
        model: Under an adapter; when its weights are sharded every process must call.
        dtype: Precision of the products.

    Raises:
        DivergedError: They differ by more than rounding explains.
    """
    with adapters_off(model):
        off = compute_probe_logits(model)
    shift = find_logit_shift(off, compute_probe_logits(model), dtype)
    if shift is not None:
        raise DivergedError(
            f"the adapter moves logits by {shift:.2g} of the largest before anything is trained; it should begin as "
            "nothing"
        )


def sample_frozen(model: nn.Module) -> dict[str, Tensor]:
    """Return up to ``SAMPLE_SIZE`` numbers of each frozen parameter, of this process's shards, as bytes."""
    reshard(model)
    return {name: _sample(parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad}


def verify_frozen(samples: Mapping[str, Tensor], model: nn.Module) -> None:
    """Compare the frozen parameters with what they were.

    Args:
        samples: From ``sample_frozen``.
        model: The same model.

    Raises:
        DivergedError: Some have moved.
    """
    now = sample_frozen(model)
    if moved := [name for name, sample in samples.items() if not torch.equal(sample, now[name])]:
        raise DivergedError(
            f"{len(moved)} of {len(samples)} frozen tensors have moved: {_shorten(moved)}. The adapter no longer "
            "belongs to the model that it is said to"
        )


def _find_trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _summarise(parameter: nn.Parameter) -> tuple[float, float]:
    """Two sums that change with any number: of an embedding only the rows of the tokens that occur may move."""
    values = _gather(parameter.detach())
    return float(values.sum(dtype=torch.float64)), float(values.float().norm())


def _sample(parameter: nn.Parameter) -> Tensor:
    # ZeRO-3 puts something empty in the place of what it shares out.
    values = getattr(parameter, "ds_tensor", parameter).detach()
    values = (values.to_local() if hasattr(values, "to_local") else values).reshape(-1)
    # As bytes: 4-bit codes that are stored as floating-point numbers may look like NaN.
    return values[:: max(1, values.numel() // SAMPLE_SIZE)][:SAMPLE_SIZE].clone().view(torch.uint8)


def _gather(values: Any) -> Tensor:
    """The whole of a tensor, of which each process may hold a shard."""
    whole: Tensor = values.full_tensor() if hasattr(values, "full_tensor") else values
    return whole


def _shorten(names: Iterable[str]) -> str:
    """The first three, and how many more."""
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
