"""Weight transfer from a policy to an engine with its own weights, and its error handling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from trl.generation import vllm_client

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.adapters.saved import iterate_weights
from recipes_lib.models.inference import unwrap_adapter
from recipes_lib.training.layouts.fsdp import is_sharded

RESUME = "fix the engine, and run the same command to resume from the last complete checkpoint"


def iterate_policy(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight of a policy once, adapters merged; all ranks of a sharded policy must iterate to the end.

    Under FSDP2, one layer is gathered at a time, in the compute dtype, so that no process holds the full model. Yielded
    tensors are then copies that a receiver may keep, because the gathered layer is freed.

    Args:
        policy: Policy, sharded or not, with or without an adapter.

    Source: ``tests/rl/engines/test_link.py``; of two processes ``tests/distributed/test_engines.py``.
    """
    if not is_sharded(policy):
        yield from iterate_weights(policy)
        return
    for unit, names in _find_units(policy):
        # Collective: all ranks call it in the same order.
        unit.unshard()
        for name, tensor in iterate_weights(policy, names):
            yield name, tensor.clone()
        unit.reshard()


def _find_units(policy: nn.Module) -> Iterator[tuple[FSDPModule, set[str]]]:
    """Yield each FSDP2 module with the names of the parameters that it gathers, in the same order on all ranks."""
    base = unwrap_adapter(policy)
    prefixes: dict[str, Any] = {name: unit for name, unit in base.named_modules() if isinstance(unit, FSDPModule)}
    # FSDP2's root is the outermost module: with an adapter, the PEFT model around the base.
    prefixes[""] = policy
    units: dict[str, set[str]] = {}
    for name, _ in base.named_parameters():
        # FSDP2 assigns a parameter to the nearest sharded module around it: the one with the longest prefix.
        owner = max((prefix for prefix in prefixes if f"{name}.".startswith(f"{prefix}." if prefix else "")), key=len)
        units.setdefault(owner, set()).add(name)
    for prefix, names in units.items():
        yield prefixes[prefix], names


@contextmanager
def engine_errors(doing: str) -> Iterator[None]:
    """Convert a failure of vLLM to a ``ConfigError`` (exit code 2), because no update is lost.

    Args:
        doing: Operation for the error message, such as ``sampling answers``.

    Raises:
        ConfigError: The engine failed.
    """
    try:
        yield
    except Exception as error:  # Engines and clients raise no more specific error.
        raise ConfigError(Problem("use_vllm", f"vLLM failed at {doing}: {explain_failure(error)}", RESUME)) from error


def explain_failure(error: Exception) -> str:
    """Return the reason of an engine's failure in one line."""
    reason = " ".join(str(error).split())
    if isinstance(error, LookupError | TypeError):
        # TRL's client indexes the fields of a response without checking that they exist.
        kind = type(error).__name__
        return f"its answer has another form than expected ({kind}: {reason}); is its version supported?"
    return reason or type(error).__name__


def check_vllm() -> None:
    """Raise if vLLM is not installed.

    Raises:
        ConfigError: vLLM is not installed.
    """
    if not vllm_client.is_vllm_available():
        remedy = "install it (docs/ppo.md), or write `use_transformers_continuous_batching: true`, which needs nothing"
        raise ConfigError(Problem("use_vllm", "vLLM is not installed", remedy))
