"""DeepSpeed ZeRO-3 outside of the engine: gathering of partitioned weights for forward passes and writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn
from transformers.integrations import deepspeed as integration

_HOOKS: Final = "_gathering"
"""Attribute of a module with the handles of its hooks."""


def register_gather_hooks(model: nn.Module) -> None:
    """Register forward hooks that all-gather the weights of each layer before a call and partition them afterwards.

    Weights outside of layers are gathered for each module. For forward passes without gradients, which all ranks must
    enter. No effect on models not partitioned by ZeRO-3.

    Source: ``tests/distributed/test_matrix.py``.
    """
    # Whole layers, because some modules read a weight of another one without calling it: linear attention of Qwen 3.5
    # and Mamba that of its convolution.
    layers = {layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module}
    inner = {module for layer in layers for module in layer.modules() if module is not layer}
    for module in model.modules():
        if module in inner:
            continue
        weights = module.parameters(recurse=module in layers)
        own: list[Any] = [weight for weight in weights if hasattr(weight, "ds_id")]
        if own:
            vars(module)[_HOOKS] = _register(module, own)


def remove_gather_hooks(model: nn.Module) -> None:
    """Remove the hooks of ``register_gather_hooks``, before ``deepspeed.initialize`` registers its own."""
    for module in model.modules():
        for hook in vars(module).pop(_HOOKS, ()):
            hook.remove()


@contextmanager
def gathered_for_writing(weight: Any) -> Iterator[None]:
    """All-gather a weight for an equal write on all ranks, then partition it again; no effect without ZeRO-3."""
    is_partitioned = hasattr(weight, "ds_id")
    if is_partitioned:
        weight.all_gather()
    yield
    if is_partitioned:
        weight.partition(has_been_updated=True)


@contextmanager
def zero3_init_disabled() -> Iterator[None]:
    """Context in which transformers loads and builds unpartitioned models, although ZeRO-3 is enabled."""
    # transformers has no switch; from_pretrained reads this global.
    reference = integration._hf_deepspeed_config_weak_ref
    config = None if reference is None else reference()
    integration.unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if config is not None:
            integration.set_hf_deepspeed_config(config)


def _register(module: nn.Module, own: list[Any]) -> list[Any]:
    def gather(*_: Any) -> None:
        own[0].all_gather(param_list=own)

    def partition(*_: Any) -> None:
        own[0].partition(param_list=own)

    return [module.register_forward_pre_hook(gather), module.register_forward_hook(partition)]
