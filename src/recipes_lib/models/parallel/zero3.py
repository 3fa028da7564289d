"""DeepSpeed ZeRO-3 models outside of the engine: partitioned weights gathered for single calls and for writing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn
from transformers.integrations import deepspeed as integration

_HOOKS: Final = "_gathering"
"""Under which a module keeps what ``remove_gather_hooks`` removes."""


def register_gather_hooks(model: nn.Module) -> None:
    """Register forward hooks that all-gather the weights of each module for a call and partition them afterwards.

    For forward passes without gradients, which all ranks must make alike. No effect on a model that ZeRO-3 has not
    partitioned.

    Source: ``tests/distributed/test_zero.py``.
    """
    for module in model.modules():
        own: list[Any] = [parameter for parameter in module.parameters(recurse=False) if hasattr(parameter, "ds_id")]
        if own:
            vars(module)[_HOOKS] = _register(module, own)


def remove_gather_hooks(model: nn.Module) -> None:
    """Remove the hooks of ``register_gather_hooks``, before ``deepspeed.initialize`` registers its own."""
    for module in model.modules():
        for hook in vars(module).pop(_HOOKS, ()):
            hook.remove()


@contextmanager
def gathered_for_writing(weight: Any) -> Iterator[None]:
    """All-gather a weight for a write that all ranks make alike, then partition it again; no-op without ZeRO-3."""
    is_shared = hasattr(weight, "ds_id")
    if is_shared:
        weight.all_gather()
    yield
    if is_shared:
        weight.partition(has_been_updated=True)


@contextmanager
def zero3_init_disabled() -> Iterator[None]:
    """Load or build whole models on this rank: under ZeRO-3 transformers partitions every model that it loads."""
    # What transformers asks whether ZeRO-3 is on, in every from_pretrained.
    told = integration._hf_deepspeed_config_weak_ref
    config = None if told is None else told()
    integration.unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if config is not None:
            integration.set_hf_deepspeed_config(config)


def _register(module: nn.Module, own: list[Any]) -> list[Any]:
    def gather(*_: Any) -> None:
        own[0].all_gather(param_list=own)

    def let_go(*_: Any) -> None:
        own[0].partition(param_list=own)

    return [module.register_forward_pre_hook(gather), module.register_forward_hook(let_go)]
