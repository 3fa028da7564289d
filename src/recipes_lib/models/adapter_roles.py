"""Policy, critic and reference on one trunk: two adapters, of which one or none is on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from recipes_lib.models.adapters import _without_old_name, adapters_off
from recipes_lib.models.heads import _run_backbone
from recipes_lib.models.score_head import ScoreOutput

Role = Literal["policy", "critic", "reference"]

CRITIC: Final = "critic"
"""PEFT's name of the critic's adapter; the policy's is the one that was there before."""


class AdapterCritic(nn.Module):
    """A value for each position: an adapter of the critic's own on the policy's trunk, and a linear head.

    It is called inside ``role(model, "critic")``. Its parameters are the head's; the adapter's are the trunk's.
    """

    def __init__(self, model: Any) -> None:
        """Give the model a second adapter, shaped like its first; at the beginning every value is 0.

        Args:
            model: A PEFT model with one adapter, the policy's.
        """
        super().__init__()
        (policy,) = model.peft_config
        with _without_old_name():
            model.add_adapter(CRITIC, copy.deepcopy(model.peft_config[policy]))
        for name, parameter in model.named_parameters():
            if f".{CRITIC}." in name:
                parameter.requires_grad_(True)
        width = model.config.get_text_config().hidden_size
        device = next(model.parameters()).device
        self.head = nn.Linear(width, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        # Not as a submodule: the trunk's parameters are not the critic's.
        self._model = (model,)

    def forward(self, *, last_positions: Tensor, **inputs: Tensor) -> ScoreOutput:
        """Score positions, as a model with a score head does (``add_score_head``)."""
        (model,) = self._model
        hidden, aux_loss = _run_backbone(model.get_base_model(), dict(inputs))
        with torch.autocast(hidden.device.type, enabled=False):
            scores = self.head(hidden.flatten(0, 1)[last_positions].float()).squeeze(-1)
        return ScoreOutput(scores, aux_loss)


@contextmanager
def role(model: Any, name: Role) -> Iterator[None]:
    """Let a PEFT model with a policy's and a critic's adapter be one of the three inside the block.

    Afterwards the adapter is on that was, and every parameter is trained that was: PEFT's ``set_adapter`` freezes all
    others. As ``reference`` the model is its base, in evaluation mode and without gradients.

    Source: ``tests/models/test_adapter_roles.py``.
    """
    if name == "reference":
        with adapters_off(model):
            yield
        return
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    before = model.active_adapter
    (policy,) = (adapter for adapter in model.peft_config if adapter != CRITIC)
    try:
        _switch(model, CRITIC if name == "critic" else policy, flags)
        yield
    finally:
        _switch(model, before, flags)


def _switch(model: Any, adapter: str, flags: list[tuple[nn.Parameter, bool]]) -> None:
    if model.active_adapter != adapter:
        model.set_adapter(adapter)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
