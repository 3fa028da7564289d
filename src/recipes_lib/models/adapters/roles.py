"""Policy, critic, reference and reward model as adapters on one shared base model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from recipes_lib.models.adapters.lora import adapters_off, attach_scorer, without_old_name
from recipes_lib.models.heads.score_head import ScoreOutput
from recipes_lib.models.inference import evaluating, kernel_precision

Role = Literal["policy", "critic", "reference", "reward"]

CRITIC: Final = "critic"
REWARD: Final = "reward"
"""PEFT's names of the adapters of critic and reward model; the policy's is the one that was there before."""


class AdapterScorer(nn.Module):
    """Score per position: a separate adapter on the policy's base model, and a linear head.

    Its parameters are those of the head; the adapter belongs to the base model. The trainer runs forward and backward
    passes in ``role(model, "critic")``; the scorer activates its role itself.

    Attributes:
        head: In ``float32``, whatever the trunk's precision.
        config: Of the trunk; a copy, for what is said of this scorer alone.
    """

    def __init__(self, model: Any, name: Literal["critic", "reward"], weight: Tensor | None = None) -> None:
        """Use a base model that has the adapter.

        Args:
            model: A PEFT model with a loss head (``add_loss_head``).
            name: Of the role.
            weight: Of the head, ``(1, D)``; ``None`` for one that says 0.
        """
        super().__init__()
        width = model.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, device=next(model.parameters()).device, dtype=torch.float32)
        nn.init.zeros_(self.head.bias)
        with torch.no_grad():
            self.head.weight.copy_(torch.zeros(1, width) if weight is None else weight)
        self.config = copy.deepcopy(model.config)
        self._name: Role = name
        # Not a submodule: the parameters of the base are not the scorer's.
        self._model = (model,)

    def forward(self, *, last_positions: Tensor, **inputs: Tensor) -> ScoreOutput:
        """Score positions, as a model with a score head does (``add_score_head``)."""
        (model,) = self._model
        with role(model, self._name), kernel_precision(model):
            # Call the outermost module, which FSDP2 gathers first.
            output = model(**inputs, states_at=last_positions)
        with torch.autocast(output.result.device.type, enabled=False):
            scores = self.head(output.result.float()).squeeze(-1)
        return ScoreOutput(scores, output.aux_loss)


def add_critic(model: Any, folder: Path | None = None) -> AdapterScorer:
    """Add a trainable critic to a model.

    Args:
        model: A PEFT model whose active adapter is the policy's.
        folder: A saved adapter with a score head to begin with; ``None`` for an adapter shaped like the policy's and a
            head of 0, so that every value is 0 at the beginning.

    Raises:
        ConfigError: As ``attach_scorer``.
    """
    weight = None
    if folder is not None:
        weight = attach_scorer(model, folder, CRITIC)
    else:
        with without_old_name():
            model.add_adapter(CRITIC, copy.deepcopy(model.peft_config[model.active_adapter]))
    for name, parameter in model.named_parameters():
        if f".{CRITIC}." in name:
            parameter.requires_grad_(True)
    return AdapterScorer(model, "critic", weight)


def add_reward(model: Any, folder: Path) -> AdapterScorer:
    """Add a saved reward model to a model as a frozen adapter.

    Args:
        model: A PEFT model.
        folder: Of the adapter, with its head.

    Raises:
        ConfigError: As ``attach_scorer``.
    """
    return AdapterScorer(model, "reward", attach_scorer(model, folder, REWARD)).requires_grad_(False)


def drop_scorers(model: Any) -> None:
    """Remove all adapters except the policy's."""
    for name in {CRITIC, REWARD} & set(model.peft_config):
        model.delete_adapter(name)


@contextmanager
def role(model: Any, name: Role) -> Iterator[None]:
    """Activate one of the four roles of a PEFT model with several adapters in the context.

    Afterwards the previous adapter is active again, and ``requires_grad`` of all parameters is restored, because PEFT's
    ``set_adapter`` freezes all others. As ``reference``, all adapters are disabled; ``reference`` and ``reward`` are in
    evaluation mode without gradients.

    Source: ``tests/models/adapters/test_roles.py``.
    """
    if name == "reference":
        with adapters_off(model):
            yield
        return
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    before = model.active_adapter
    (policy,) = (adapter for adapter in model.peft_config if adapter not in (CRITIC, REWARD))
    try:
        _switch(model, {"policy": policy, "critic": CRITIC, "reward": REWARD}[name], flags)
        if name == "reward":
            with evaluating(model):
                yield
        else:
            yield
    finally:
        _switch(model, before, flags)


def _switch(model: Any, adapter: str, flags: list[tuple[nn.Parameter, bool]]) -> None:
    if model.active_adapter != adapter:
        model.set_adapter(adapter)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
