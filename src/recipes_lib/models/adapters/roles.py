"""Policy, critic, reference model and reward model as adapters of one shared base model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from recipes_lib.models.adapters.lora import adapters_off, attach_scorer, suppress_peft_warnings
from recipes_lib.models.heads.score_head import ScoreOutput
from recipes_lib.models.inference import evaluating, kernel_precision

Role = Literal["policy", "critic", "reference", "reward"]

CRITIC: Final = "critic"
REWARD: Final = "reward"
"""Names of the critic's and the reward model's adapter in PEFT; the adapter of the policy keeps its name."""


class AdapterScorer(nn.Module):
    """Scores of positions from a separate adapter of the policy's base model and a linear head.

    The module's parameters are those of the head; the adapter's belong to the base model. The forward pass activates
    its role. For a trained scorer, the backward pass must run in ``role(model, "critic")`` too.

    Attributes:
        head: Linear head, ``float32`` in models of any dtype.
        config: Copy of the base model's configuration, which can hold statistics of this scorer.
    """

    def __init__(self, model: Any, name: Literal["critic", "reward"], weight: Tensor | None = None) -> None:
        """Initialise on a base model that has the adapter.

        Args:
            model: PEFT model with a loss head (``add_loss_head``).
            name: Role of the scorer.
            weight: Weight of the head, ``(1, D)``; ``None`` for 0.
        """
        super().__init__()
        width = model.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, device=next(model.parameters()).device, dtype=torch.float32)
        nn.init.zeros_(self.head.bias)
        with torch.no_grad():
            self.head.weight.copy_(torch.zeros(1, width) if weight is None else weight)
        self.config = copy.deepcopy(model.config)
        self._name: Role = name
        # In a tuple, so that the base model is not registered as a submodule.
        self._model = (model,)

    def forward(self, *, last_positions: Tensor, **inputs: Tensor) -> ScoreOutput:
        """Return the scores of ``last_positions``, as a model with a score head (``add_score_head``)."""
        (model,) = self._model
        with role(model, self._name), kernel_precision(model):
            # The outermost module, whose call FSDP2 prepares in its root pre-forward hook. (S, D).
            output = model(**inputs, states_at=last_positions)
        # In float32, as in add_score_head: differences of scores have few significant digits.
        with torch.autocast(output.result.device.type, enabled=False):
            scores = self.head(output.result.float()).squeeze(-1)
        return ScoreOutput(scores, output.aux_loss)


def add_critic(model: Any, folder: Path | None = None) -> AdapterScorer:
    """Add a trainable critic to a model.

    Args:
        model: PEFT model whose active adapter is that of the policy.
        folder: Saved adapter with a score head to start from; ``None`` for a new adapter of the policy's shape and a
            head of 0, so that all initial values are 0.

    Raises:
        ConfigError: As ``attach_scorer``.
    """
    weight = None if folder is None else attach_scorer(model, folder, CRITIC)
    if folder is None:
        with suppress_peft_warnings():
            model.add_adapter(CRITIC, copy.deepcopy(model.peft_config[model.active_adapter]))
    # PEFT adds further adapters frozen.
    for name, parameter in model.named_parameters():
        if f".{CRITIC}." in name:
            parameter.requires_grad_(True)
    return AdapterScorer(model, "critic", weight)


def add_reward(model: Any, folder: Path) -> AdapterScorer:
    """Add a saved reward model to a model as a frozen adapter.

    Args:
        model: PEFT model whose active adapter is that of the policy.
        folder: Saved adapter with a score head.

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
    """Context in which one of the four roles of a PEFT model with several adapters is active.

    It restores the active adapter and ``requires_grad`` of all parameters, because PEFT's ``set_adapter`` freezes all
    other adapters. In ``reference``, all adapters are disabled; ``reference`` and ``reward`` run in evaluation mode
    without gradients.

    Source: ``tests/models/adapters/test_roles.py``.
    """
    if name == "reference":
        with adapters_off(model):
            yield
        return
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    before = model.active_adapter
    # Exactly one adapter is neither critic nor reward model, whose names are those of their roles.
    (policy,) = (adapter for adapter in model.peft_config if adapter not in (CRITIC, REWARD))
    try:
        _switch(model, policy if name == "policy" else name, flags)
        with evaluating(model) if name == "reward" else nullcontext():
            yield
    finally:
        _switch(model, before, flags)


def _switch(model: Any, adapter: str, flags: list[tuple[nn.Parameter, bool]]) -> None:
    # set_adapter walks all modules, so it is called only if needed.
    if model.active_adapter != adapter:
        model.set_adapter(adapter)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
