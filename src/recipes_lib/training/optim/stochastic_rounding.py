"""AdamW for bfloat16 weights: an update too small for the last bit of a weight arrives on the average of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch.optim.optimizer import ParamsT, StateDict

_DROPPED_BITS = 16
"""A bfloat16 is the upper half of a float32."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAX_PARAMETERS = 2**20
"""Tensors of a model; so many seeds stand between two steps."""


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return ``values`` in bfloat16, each rounded to one of its two neighbours so that its expectation is the value.

    Args:
        values: ``float32``, finite, of any shape. What bfloat16 represents is returned as it is.
        generator: On the device of ``values``.

    Source: Gupta et al. 2015, section 2.1; as torchao's ``_fp32_to_bf16_sr``. The expectation and its standard error
    are measured in ``tests/training/optim/test_stochastic_rounding.py``.
    """
    noise = torch.randint(2**_DROPPED_BITS, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    # Signs and exponents stand above the fraction: a carry out of it is the next number away from 0.
    bits: torch.Tensor = (values.view(torch.int32) + noise) & -(2**_DROPPED_BITS)
    return bits.view(torch.float32).to(torch.bfloat16)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW in float32 on bfloat16 weights, which it rounds stochastically; other weights it trains as AdamW does.

    A weight, its gradient and two float32 moments take 12 bytes, where float32 weights take 16. The noise follows from
    the number of the step alone, so that replicas stay equal and a resumed run goes on to the bit. For parameters that
    are not sharded.

    Source: Loshchilov and Hutter 2019, algorithm 2; equal to ``torch.optim.AdamW`` on float32 weights in
    ``tests/training/optim/test_stochastic_rounding.py``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._generators: dict[torch.device, torch.Generator] = {}

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
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                index += 1
                if parameter.grad is not None:
                    self._update(parameter, index, group)
        return loss

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state as it was saved; torch alone would round the moments to the precision of the weights."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter = parameters[index]
            self.state[parameter] |= {name: saved[name].to(parameter.device) for name in _MOMENTS}

    def _update(self, parameter: torch.Tensor, index: int, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state |= {"step": 0} | {name: torch.zeros_like(parameter, dtype=torch.float32) for name in _MOMENTS}
        state["step"] += 1
        (beta1, beta2), step = group["betas"], state["step"]
        gradient, (mean, square) = parameter.grad.float(), (state[name] for name in _MOMENTS)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weights = parameter.float() * (1 - group["lr"] * group["weight_decay"])
        scale = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weights.addcdiv_(mean, scale, value=-group["lr"] / (1 - beta1**step))
        if parameter.dtype == torch.bfloat16:
            generator = self._generators.setdefault(parameter.device, torch.Generator(parameter.device))
            weights = round_stochastically(weights, generator.manual_seed(step * _MAX_PARAMETERS + index))
        parameter.copy_(weights)
