"""Muon for the hidden matrices and AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import nn


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon and AdamW over the groups of one optimizer, so that schedulers, scalers and accelerate see one.

    Every group names its owner under ``optimizer``: ``Muon`` or ``AdamW``. Muon's updates are scaled to the root mean
    square of AdamW's, so that one learning rate and one weight decay serve both. States are those of the two
    optimizers: a momentum (Muon), two moments and a step (AdamW).

    Source: Jordan et al. 2024 (Muon); Liu et al. 2025 (Muon is scalable for LLM training), section 2.2, the scale
    ``0.2 sqrt(max(rows, columns))``; numpy's singular values in ``tests/training/test_muon.py``.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """Build both optimizers.

        Args:
            matrices: Parameters of two dimensions, for Muon; all of them decay.
            others: AdamW's groups, each with its ``params`` and ``weight_decay``.
            lr: Learning rate of both.
            weight_decay: Muon's.
            betas: AdamW's.
            eps: AdamW's.
        """
        self._owners: dict[str, torch.optim.Optimizer] = {
            "Muon": torch.optim.Muon(
                [{"params": matrices}], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            "AdamW": torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps),
        }
        groups = [group | {"optimizer": name} for name, owner in self._owners.items() for group in owner.param_groups]
        super().__init__(groups, {"lr": lr})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; return what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, owner in self._owners.items():
            # Loading a state and sharding a model replace groups, states and parameters of this optimizer.
            owner.state = self.state
            owner.param_groups = [group for group in self.param_groups if group["optimizer"] == name]
            owner.step()
        return loss
