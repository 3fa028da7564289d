"""How large the weights are and how far a step moves them: what tells a rate that is too high or too low."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes_lib.training.layouts.fsdp import compute_total_norm

MAX_COPIED: Final = 32 * 2**20
"""Parameters of this process whose values before a step are kept to compare: 128 MiB in float32."""


class WeightMonitor(TrainerCallback):
    """Adds ``parameter_norm`` and ``update_ratio`` to the figures of a logged step.

    ``update_ratio`` is the norm of the last step's update over the norm of what it updated, of a sample of matrices
    spread over the layers where the model is too large to be copied. About 1e-3 is usual; far above, the rate is too
    high.

    Source: ``tests/training/monitoring/test_weight_monitor.py``.
    """

    def __init__(
        self,
        measure_norm: Callable[[Sequence[Tensor]], Tensor] = compute_total_norm,
        list_counted: Callable[[Iterable[nn.Parameter]], list[nn.Parameter]] = list,
    ) -> None:
        """Watch nothing yet.

        Args:
            measure_norm: Gives the norm of some tensors of the model, over all processes that hold such.
            list_counted: Gives those parameters of this process that no other one counts.
        """
        self._measure, self._list_counted = measure_norm, list_counted
        self._parameters: list[nn.Parameter] = []
        self._sample: list[int] = []
        self._before: list[Tensor] = []
        self._figures: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Find the trained parameters; FSDP2 has put others in the place of those that the model was built with."""
        trained = [parameter for parameter in kwargs["model"].parameters() if parameter.requires_grad]
        self._parameters = self._list_counted(trained)
        self._sample = choose_sample([parameter.numel() for parameter in self._parameters], MAX_COPIED)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep the sampled weights of a step that will be logged."""
        self._before = [self._parameters[at].detach().clone() for at in self._sample] if _is_logged(args, state) else []

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare them with what the step made of them."""
        if not self._before:
            return
        now = [self._parameters[at].detach() for at in self._sample]
        update = [after - before for after, before in zip(now, self._before, strict=True)]
        self._figures = {
            "parameter_norm": self._compute_norm([parameter.detach() for parameter in self._parameters]),
            "update_ratio": self._compute_norm(update) / max(self._compute_norm(self._before), 1e-30),
        }
        self._before = []

    def _compute_norm(self, tensors: Sequence[Tensor]) -> float:
        return float(self._measure(tensors))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Hand the figures of a training step to whoever logs."""
        if logs is not None and "loss" in logs:
            logs.update(self._figures)


def choose_sample(sizes: Sequence[int], budget: int) -> list[int]:
    """Return positions of parameters, spread evenly over the model, that together hold at most ``budget`` numbers.

    The smallest is taken where none fits.
    """
    for stride in range(1, len(sizes) + 1):
        chosen = list(range(0, len(sizes), stride))
        if sum(sizes[at] for at in chosen) <= budget:
            return chosen
    return [min(range(len(sizes)), key=sizes.__getitem__)] if sizes else []


def _is_logged(args: TrainingArguments, state: TrainerState) -> bool:
    step = state.global_step + 1
    every = max(1, int(state.logging_steps))
    return step % every == 0 or (step == 1 and args.logging_first_step)
