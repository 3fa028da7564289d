"""The checkpoint dry run: files reopened and compared with the live model and optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.trainer_pt_utils import safe_globals

from recipes_lib.models.adapters.lora import read_adapter_state
from recipes_lib.models.adapters.saved import ADAPTER_WEIGHTS
from recipes_lib.models.saved_weights import (
    INDEX,
    WEIGHTS,
    BrokenSaveError,
    read_published_shapes,
    read_shapes,
    verify_weights,
)
from recipes_lib.planning.disk import DiskPlan
from recipes_lib.training.checkpoints.writer import iterate_tensors
from recipes_lib.training.monitoring.progress import format_count

_STATES: Final = ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth")


def is_adapter(model: nn.Module) -> bool:
    """Return whether a model is under an adapter, which alone is saved then."""
    return hasattr(model, "peft_config")


def read_expected(model: Any, *, is_replicated: bool) -> dict[str, torch.Size]:
    """Return the shapes that the saved weights of a model must have, by their names in the file.

    Args:
        model: The model, or the model under an adapter.
        is_replicated: Whether every process holds all of it; upstream saves sharded weights as for publication.
    """
    if is_adapter(model):
        return {name: tensor.shape for name, tensor in read_adapter_state(model).items()}
    return read_shapes(model) if is_replicated else read_published_shapes(model)


def verify_saved(checkpoint: Path, expected: Mapping[str, torch.Size], *, is_replicated: bool) -> None:
    """Open the weights of a checkpoint again.

    Args:
        checkpoint: Its folder.
        expected: From ``read_expected``.
        is_replicated: As there. Sharded weights are saved in a form of the engine's own besides, or in that alone.

    Raises:
        BrokenSaveError: A file or a tensor is missing, of another shape, empty or not finite.
    """
    weights = WEIGHTS if (checkpoint / WEIGHTS).exists() or (checkpoint / INDEX).exists() else ADAPTER_WEIGHTS
    if is_replicated or (checkpoint / weights).exists():
        verify_weights(checkpoint, expected, weights)


def compare_with_live(checkpoint: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Hold a checkpoint against what it was made from, to the bit.

    Args:
        checkpoint: Its folder, of weights that every process holds all of.
        model: The model, unchanged since.
        optimizer: Its optimizer, unchanged since.

    Raises:
        BrokenSaveError: A tensor differs, or a state cannot be read without running code.
    """
    live = read_adapter_state(model) if is_adapter(model) else model.state_dict()
    for file in sorted(checkpoint.glob("*.safetensors")):
        compare_weights(file, live)
    for file in sorted(file for pattern in _STATES for file in checkpoint.glob(pattern)):
        compare_state(file, optimizer.state_dict() if file.name == "optimizer.pt" else None)


def compare_weights(file: Path, live: Mapping[str, torch.Tensor]) -> None:
    """Hold saved weights against those that are trained, to the bit.

    Raises:
        BrokenSaveError: A tensor differs.
    """
    differing = [name for name, saved in load_file(file).items() if not torch.equal(saved, live[name].cpu())]
    if differing:
        raise BrokenSaveError(f"{file}: {', '.join(differing)} differ from what is trained")


def compare_state(file: Path, live: Any = None) -> None:
    """Read a state as a later start would, and hold its tensors against those of the live one, if it is given.

    Raises:
        BrokenSaveError: A tensor differs, or the file cannot be read without running code.
    """
    try:
        # numpy's random state is allowed by name, as upstream does when it loads it.
        with safe_globals():  # type: ignore[no-untyped-call]
            saved = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # Whatever it is, a later start could not read it either.
        raise BrokenSaveError(f"{file} cannot be read back: {error}") from error
    if live is None:
        return
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]] = zip(iterate_tensors(saved), iterate_tensors(live), strict=True)
    if not all(torch.equal(one, other.cpu()) for one, other in pairs):
        raise BrokenSaveError(f"{file}: a state differs from the optimizer's")


def count_bytes(*states: Any) -> int:
    """Return the bytes of all tensors in some states; what is shared is counted once."""
    tensors = {id(tensor): tensor for state in states for tensor in iterate_tensors(state)}
    return sum(tensor.nbytes for tensor in tensors.values())


def describe_dry_run(size: int, seconds: float, plan: DiskPlan) -> str:
    """Return what a dry run showed, in one line: bytes of a checkpoint, seconds, and what the run will take."""
    return (
        f"checkpoints: {_format_bytes(size)} each, written and opened again in {seconds:.1f} s; up to "
        f"{plan.num_checkpoints} of them and the model take {_format_bytes(plan.total_bytes)} of "
        f"{_format_bytes(plan.free_bytes)} free"
    )


def _format_bytes(size: int) -> str:
    return f"{format_count(size).replace('B', 'G')}B"
