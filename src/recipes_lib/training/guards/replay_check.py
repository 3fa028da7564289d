"""Replay checks (``verify_steps``) against hardware faults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from recipes_lib.errors import DivergedError
from recipes_lib.models.inference import save_random_states
from recipes_lib.training.collectives import gather_objects
from recipes_lib.training.guards.step_facts import StepInputs, TrainerView
from recipes_lib.training.layouts.fsdp import get_local

_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by bytes per element, to view the bits of a tensor."""

Figures = dict[str, int]


def compute_checksums(tensors: Mapping[str, Tensor]) -> Figures:
    """Return the sum of each tensor's bits read as integers, modulo 2^64; of a ``DTensor`` over the local shard.

    A flipped bit changes the sum by a power of two, also in NaN.
    """
    if not tensors:
        return {}
    # Integer sums, unlike those of floats, do not depend on the order of summation.
    local = [get_local(tensor) for tensor in tensors.values()]
    sums = [part.detach().contiguous().view(_WORDS[part.element_size()]).sum(dtype=torch.int64) for part in local]
    # One transfer for all tensors.
    return dict(zip(tensors, torch.stack([part.to(sums[0].device) for part in sums]).tolist(), strict=True))


def find_differences(checksums: Sequence[Figures]) -> dict[int, list[str]]:
    """Return, for each rank that deviates from the majority, the names of its differing tensors.

    Args:
        checksums: Checksums of the same tensors, by rank. Of two ranks that differ, the second is named.
    """
    differing: dict[int, list[str]] = {}
    for name in checksums[0]:
        values = [sums[name] for sums in checksums]
        usual = max(values, key=values.count)
        for rank, value in enumerate(values):
            if value != usual:
                differing.setdefault(rank, []).append(name)
    return differing


class ReplayCheck:
    """Detects hardware faults every ``verify_steps`` steps, by computing a step twice.

    Before such a step, replicated parameters and buffers are compared over all ranks. After its forward and backward
    passes, these are repeated with the same batches and random states, and must give the same losses and gradients bit
    for bit. The repetition needs deterministic kernels: a CPU, or ``full_determinism``; otherwise only weights are
    compared.

    Attributes:
        is_first: Whether no step has been computed since training began or went back to a checkpoint.

    Source: ``tests/training/guards/test_replay_check.py``, ``tests/distributed/test_guards.py``.
    """

    def __init__(self, trainer: TrainerView, every: int | None) -> None:
        """Check every ``every`` steps of ``trainer``; ``None``: never."""
        self._trainer = trainer
        self._every = every
        self._restore_random: Callable[[], None] | None = None
        self._is_logged = False
        self.is_first = True

    def begin(self, step: int) -> None:
        """Compare the weights of all ranks if ``step``, from 1, is to be checked, and keep the random states.

        Raises:
            DivergedError: The weights of a rank differ.
        """
        self._restore_random = None
        if self._every is None or step % self._every:
            return
        self._compare_weights(step)
        if self._trainer.args.device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
            self._restore_random = save_random_states()
        elif not self._is_logged:
            self._is_logged = True
            self._trainer.observer.progress.say(
                "verify_steps: kernels of this device may be nondeterministic, so only weights are compared; "
                "with full_determinism: true, steps are computed twice as well"
            )

    def compare(self, inputs: StepInputs) -> None:
        """Compute the step again if it is to be checked, and restore gradients and random states; collective.

        Args:
            inputs: Micro-batches and losses of the step; call before its gradients are clipped.

        Raises:
            DivergedError: A loss or a gradient differs.
        """
        is_first, self.is_first = self.is_first, False
        if self._restore_random is None:
            return
        named = self._trainer.model.named_parameters()
        trained = {name: parameter for name, parameter in named if parameter.grad is not None}
        gradients = {name: parameter.grad for name, parameter in trained.items()}
        restore = save_random_states()
        # The reference is computed again as well where the loss scaler of fp16 has unscaled the gradients, and after
        # the first backward pass: DDP orders its buckets by it, and with them the sums over three or more ranks.
        is_other = is_first or self._trainer.accelerator.scaler is not None
        first = self._replay(trained, inputs) if is_other else _read_figures(trained, inputs.losses)
        again = self._replay(trained, inputs)
        # Gathered, so that all ranks raise, and enter the further passes in ``_blame`` together.
        found = gather_objects([name for name in first if first[name] != again[name]])
        if any(found):
            self._blame(found, trained, inputs)
        for name, parameter in trained.items():
            parameter.grad = gradients[name]
        restore()

    def _blame(self, found: list[list[str]], trained: Mapping[str, nn.Parameter], inputs: StepInputs) -> NoReturn:
        """Blame the rank whose loss changed, or whose gradients differ without the reduction over ranks.

        Raises:
            DivergedError: Always.
        """
        step = self._trainer.state.global_step + 1
        premise = f"step {step} was computed twice from the same weights, rows and random numbers"
        # Losses only: reduced gradients have changed on all ranks.
        blamed = [[name for name in names if name not in trained] for names in found]
        if not any(blamed) and len(found) > 1:
            one, other = (self._replay(trained, inputs, is_reduced=False) for _ in range(2))
            blamed = gather_objects([name for name in one if one[name] != other[name]])
            premise += "" if any(blamed) else ", then twice more with one result, so that any rank may be at fault"
        if not any(blamed):
            blamed = found
        _raise({rank: names for rank, names in enumerate(blamed) if names}, premise)

    def _replay(self, trained: Mapping[str, nn.Parameter], inputs: StepInputs, *, is_reduced: bool = True) -> Figures:
        """Compute forward and backward of the step again, and return checksums of losses and gradients.

        Without ``is_reduced`` the gradients are those of this rank's micro-batches only.
        """
        trainer = self._trainer
        model: Any = trainer.model_wrapped
        assert self._restore_random is not None
        self._restore_random()
        for parameter in trained.values():
            parameter.grad = None
        # As in upstream's loop, gradients are reduced after the last micro-batch, under FSDP2 after each.
        reduces_each = trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        with trainer.uncounted_pass():
            for number, batch in enumerate(inputs.batches, start=1):
                reduces = is_reduced and (reduces_each or number == len(inputs.batches))
                with contextlib.nullcontext() if reduces else trainer.accelerator.no_sync(model):
                    trainer.training_step(model, dict(batch), inputs.num_terms)
            return _read_figures(trained, trainer.guard.inputs.losses)

    def _compare_weights(self, step: int) -> None:
        model: Any = self._trainer.model
        if self._trainer.args.world_size == 1:
            return
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        # Without ``DTensor``, whose shards differ between ranks.
        own = compute_checksums({name: value for name, value in tensors.items() if not hasattr(value, "to_local")})
        found = find_differences(gather_objects(own))
        if found:
            _raise(found, f"before step {step} the weights of all processes should be the same")


def _read_figures(trained: Mapping[str, nn.Parameter], losses: Sequence[Tensor]) -> Figures:
    named = {f"the loss of micro-batch {at + 1}": loss.reshape(1) for at, loss in enumerate(losses)}
    gradients = {name: parameter.grad for name, parameter in trained.items() if parameter.grad is not None}
    return compute_checksums({**named, **gradients})


def _raise(differing: Mapping[int, list[str]], premise: str) -> NoReturn:
    rank, names = next(iter(differing.items()))
    ranks = f"rank {rank}" + (f" (and {len(differing) - 1} more)" if len(differing) > 1 else "")
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise DivergedError(
        f"{premise}; {ranks} differs in {names[0]}{more}. A processor or its memory is faulty, or a module is not "
        "deterministic: remove that machine, and run the same command again"
    )
