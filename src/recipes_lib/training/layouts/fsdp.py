"""FSDP2: mixed-precision policy, sharding of frozen models, gathering and resharding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32, fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def settle_precision(accelerator: Accelerator, model: nn.Module | None = None) -> None:
    """Make FSDP2 reduce gradients and return losses in ``float32``; call it before any model is prepared.

    accelerate's default is the narrow dtype everywhere: losses and log-probabilities would have three digits, and so
    would the reduction of gradients. Only matrix products should be narrow, as under autocast.

    Args:
        accelerator: Of the run; without FSDP2, or in full precision, nothing changes.
        model: That accelerate will prepare; ``shard`` sees to those that it is given.

    Source: ``tests/training/layouts/test_fsdp.py``.
    """
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = _build_policy(plugin.mixed_precision_policy.param_dtype)
        if model is not None:
            _widen_outputs(model)


def shard(accelerator: Accelerator, model: Any) -> Any:
    """Return a model sharded in the same way as accelerate shards the trained one: layer by layer.

    Args:
        accelerator: Of FSDP2, its precision settled.
        model: On the host; where loading is sparing, with weights on the main process alone.
    """
    plugin = accelerator.state.fsdp_plugin
    named = plugin.transformer_cls_names_to_wrap
    if plugin.mixed_precision_policy is not None:
        _widen_outputs(model)
    try:
        return fsdp2_prepare_model(accelerator, model)
    finally:
        # Otherwise accelerate would search the next model, possibly of another architecture, for the layers of this
        # one.
        plugin.transformer_cls_names_to_wrap = named


def shard_head(head: nn.Module, trunk: nn.Module) -> None:
    """Shard a head beside a sharded base over the same ranks, with ``float32`` compute; in place.

    Source: ``tests/distributed/test_ppo.py``.
    """
    like = _list_groups(trunk)[0]
    fully_shard(head, mesh=like.mesh_info.mesh, mp_policy=_build_policy(None), offload_policy=like.offload_policy)


def shard_chunk(chunk: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Shard a chunk of a pipeline stage, layer by layer, over the ranks with the same stage; in place.

    Gradients are reduced over these ranks. A layer gathered by a micro-batch stays gathered to the end of the step: a
    gather per micro-batch would multiply the traffic (torchtitan does the same for FSDP in a pipeline).

    Args:
        chunk: No two have a weight in common.
        layers: Of the chunk.
        mesh: The processes, along one dimension; of a larger mesh where tensor parallelism has sharded the chunk.
        compute_dtype: Of products, in which weights are gathered.

    Source: ``tests/distributed/test_pipeline_shards.py``.
    """
    policy = _build_policy(None if compute_dtype == torch.float32 else compute_dtype)
    for module in (*layers, chunk):
        of_module = replace(policy, output_dtype=torch.float32) if module is chunk else policy
        sharded = fully_shard(module, mesh=mesh, mp_policy=of_module, reshard_after_forward=False)
        # The loss is divided by the targets of all replicas: gradients are summed, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        # gloo supports no other reduction.
        sharded.set_force_sum_reduction_for_comms(True)


def has_shards(model: nn.Module) -> bool:
    """Return whether any weight of a model is sharded."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_local(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor: its shard, or all of an unsharded one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def get_whole(tensor: Tensor) -> Tensor:
    """Return the full tensor; every process with a shard of it must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(model: Any) -> bool:
    """Return whether FSDP2 shards a model."""
    return isinstance(model, FSDPModule)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather all weights of a sharded model on every process within the context, in the compute dtype; all must enter.

    Forward passes inside need no communication, so each process can make a different number of them.

    Source: ``tests/training/layouts/test_fsdp.py``, ``tests/distributed/test_ppo.py``.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = _list_groups(model)
    # A unit would drop its weights behind its forward pass, and gather them again for the next one.
    before = [group.post_forward_mesh_info for group in groups]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for group, mesh_info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = mesh_info
        reshard(model)


def _list_groups(model: nn.Module) -> list[FSDPParamGroup]:
    """Parameter groups of the FSDP units; FSDP2 has setters for their options, but no getters."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [group for unit in units if (group := unit._get_fsdp_state()._fsdp_param_group) is not None]


def compute_total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the global norm of all tensors over all shards; a plain scalar.

    Tensors on the same device mesh are combined first, because torch has no operation across meshes.
    """
    totals: list[Any] = [get_total_norm(some) for some in _group_by_mesh(tensors)]
    # The norm of norms is the norm of all.
    norms = [get_whole(total) for total in totals]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, total_norm: Tensor) -> None:
    """Scale gradients in place so that their norm is at most ``max_norm``.

    Args:
        parameters: Each has a gradient; on whichever meshes.
        max_norm: The bound.
        total_norm: Of all gradients; a plain scalar.
    """
    for some in _group_by_mesh(parameters):
        clip_grads_with_norm_(some, max_norm, total_norm)


def _group_by_mesh(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Group tensors by device mesh: torch has no list operation across meshes."""
    together: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        together.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return together.values()


def prepare_frozen(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return a frozen model, sharded like the trained one, with the same compute dtype."""
    if accelerator.is_fsdp2:
        sharded: nn.Module = shard(accelerator, model)
        return sharded
    prepared: nn.Module = accelerator.prepare_model(model, device_placement=True, evaluation_mode=True)
    # accelerate keeps references to prepared models, for its own checkpoints.
    accelerator._models.pop()
    return prepared


def _build_policy(param_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Mixed-precision policy of every unit: outputs stay narrow, because the next layer would cast them down again."""
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)


def _widen_outputs(model: nn.Module) -> None:
    """Make the outermost model return ``float32``, as accelerate does for an unsharded one; layers are unchanged."""
    model.register_forward_hook(lambda _module, _inputs, output: convert_to_fp32(output))


def reshard(model: nn.Module) -> None:
    """Restore the shards on every process; FSDP2 leaves some weights gathered after a forward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
