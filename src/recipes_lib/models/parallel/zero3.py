"""Models that DeepSpeed ZeRO-3 partitioned on loading, used outside of its engine: weights gathered for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn
from transformers.integrations import deepspeed as integration

_HOOKS: Final = "_gathering"
"""Under which a module keeps what ``leave_to_engine`` removes."""


def gather_where_used(model: nn.Module) -> None:
    """Have every module of a model gather its weights for a call and let go of them after it, as the engine would.

    Forward passes without gradients only, which all processes must make alike. Nothing happens to a model whose weights
    ZeRO-3 has not shared out.

    Source: ``tests/distributed/test_zero.py``.
    """
    for module in model.modules():
        own: list[Any] = [parameter for parameter in module.parameters(recurse=False) if hasattr(parameter, "ds_id")]
        if own:
            vars(module)[_HOOKS] = _register(module, own)


def leave_to_engine(model: nn.Module) -> None:
    """Undo ``gather_where_used``, before DeepSpeed takes a model over."""
    for module in model.modules():
        for hook in vars(module).pop(_HOOKS, ()):
            hook.remove()


@contextmanager
def written_whole(weight: Any) -> Iterator[None]:
    """Hold a weight whole on every process, which all write alike; it is shared out again after that, if it was."""
    is_shared = hasattr(weight, "ds_id")
    if is_shared:
        weight.all_gather()
    yield
    if is_shared:
        weight.partition(has_been_updated=True)


@contextmanager
def loaded_whole() -> Iterator[None]:
    """Load or build models on this process alone meanwhile: where ZeRO-3 trains, transformers shares out every one."""
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
