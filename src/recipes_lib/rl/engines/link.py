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
    """Yield each weight of a policy once, as ``iterate_weights``; all ranks of a sharded one must iterate to the end.

    Under FSDP2, one layer is gathered at a time, in the compute dtype, so no process holds the full model beside its
    shards. Yielded tensors are copies that a receiver may keep, because the gathered layer is freed afterwards.

    Args:
        policy: Whole or sharded; with an adapter, which is added to the weights.

    Source: ``tests/rl/engines/test_link.py``; of two processes ``tests/distributed/test_engines.py``.
    """
    if not is_sharded(policy):
        yield from iterate_weights(policy)
        return
    for unit, names in _find_units(policy):
        # A collective operation, which all ranks reach in the same order.
        unit.unshard()
        for name, tensor in iterate_weights(policy, names):
            yield name, tensor.clone()
        unit.reshard()


def _find_units(policy: nn.Module) -> Iterator[tuple[FSDPModule, set[str]]]:
    """Parameters that FSDP2 gathers together, with their names below an adapter; the same order on all ranks."""
    base = unwrap_adapter(policy)
    prefixes: dict[str, Any] = {name: unit for name, unit in base.named_modules() if isinstance(unit, FSDPModule)}
    # With an adapter, the root is the model around the base.
    prefixes[""] = policy
    units: dict[str, set[str]] = {}
    for name, _ in base.named_parameters():
        # The innermost unit: FSDP2 leaves a parameter to the nearest sharded module around it.
        owner = max((prefix for prefix in prefixes if f"{name}.".startswith(f"{prefix}." if prefix else "")), key=len)
        units.setdefault(owner, set()).add(name)
    for prefix, names in units.items():
        yield prefixes[prefix], names


@contextmanager
def engine_errors(doing: str) -> Iterator[None]:
    """Convert a failure of vLLM to a ``ConfigError`` with exit code 2: no update is lost.

    Args:
        doing: What it was asked to do: ``sampling answers``.

    Raises:
        ConfigError: The engine failed.
    """
    try:
        yield
    except Exception as error:  # Engines and clients raise no more specific error.
        raise ConfigError(Problem("use_vllm", f"vLLM failed at {doing}: {explain_failure(error)}", RESUME)) from error


def explain_failure(error: Exception) -> str:
    """Return the reason of an engine's failure in one line."""
    words = " ".join(str(error).split())
    if isinstance(error, LookupError | TypeError):
        # TRL's client reads the fields of an answer without checking that they are there.
        return f"its answer has another form than expected ({type(error).__name__}: {words}); is its version supported?"
    return words or type(error).__name__


def check_vllm() -> None:
    """Raise if a run needs vLLM and it is not installed.

    Raises:
        ConfigError: It is not.
    """
    if not vllm_client.is_vllm_available():
        remedy = "install it (docs/ppo.md), or write `use_transformers_continuous_batching: true`, which needs nothing"
        raise ConfigError(Problem("use_vllm", "vLLM is not installed", remedy))
