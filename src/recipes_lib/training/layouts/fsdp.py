"""FSDP2: mixed-precision policy, sharding of frozen models, gathering and resharding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import convert_model_to_fp8_ao, convert_to_fp32, fsdp2_prepare_model
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from recipes_lib.models.inference import unwrap_adapter


def set_precision(accelerator: Accelerator, model: nn.Module | None = None) -> None:
    """Make FSDP2 reduce gradients and return losses in ``float32``; must precede the preparation of any model.

    accelerate's default is the compute dtype for outputs and reductions too: in bfloat16, losses, log-probabilities and
    summed gradients would have three digits. Only matrix products should have the compute dtype, as under autocast.

    Args:
        accelerator: Accelerator of the run; without FSDP2, or in full precision, nothing changes.
        model: Model that accelerate will prepare; for other models, ``shard`` does the same.

    Source: ``tests/training/layouts/test_fsdp.py``.
    """
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = _build_policy(plugin.mixed_precision_policy.param_dtype)
        if model is not None:
            _widen_outputs(model)


def shard(accelerator: Accelerator, model: Any) -> Any:
    """Return a model sharded layer by layer, as accelerate shards the trained one; all ranks must call.

    Args:
        accelerator: Accelerator with FSDP2, after ``set_precision``.
        model: Model on the host; with ``cpu_ram_efficient_loading``, only rank 0 has its weights.
    """
    plugin = accelerator.state.fsdp_plugin
    class_names = plugin.transformer_cls_names_to_wrap
    if plugin.mixed_precision_policy is not None:
        _widen_outputs(model)
    try:
        with sharding(accelerator, model):
            return fsdp2_prepare_model(accelerator, model)
    finally:
        # accelerate stores the layer classes it finds, and would search a model of another architecture for them.
        plugin.transformer_cls_names_to_wrap = class_names


@contextmanager
def sharding(accelerator: Accelerator, model: Any) -> Iterator[None]:
    """Context in which accelerate shards a model with buffers in its state, or with names of layers that it lacks.

    If only rank 0 has read the weights, accelerate 1.15 takes every tensor of the state for a sharded parameter, also
    the routing biases of DeepSeek V3 and GLM-4.5 (https://github.com/huggingface/accelerate/issues/3898), and ties the
    embeddings again, which fails for copies of them that an adapter trains. And it searches the language model of
    Gemma 4 or Qwen 3.5 for the layers of the vision tower.

    Args:
        accelerator: Accelerator of the run; without FSDP2, nothing changes.
        model: Model that is sharded in the context.

    Source: ``tests/training/layouts/test_fsdp.py``.
    """
    if not accelerator.is_fsdp2:
        yield
        return
    kinds = {type(module).__name__ for module in model.modules()}
    model._no_split_modules = [name for name in getattr(model, "_no_split_modules", None) or () if name in kinds]
    is_read_once = accelerator.state.fsdp_plugin.cpu_ram_efficient_loading
    buffers = [
        (module, name)
        for module in (model.modules() if is_read_once else ())
        for name in sorted(module._buffers.keys() - module._non_persistent_buffers_set)
        if module._buffers[name] is not None
    ]
    for module, name in buffers:
        module._non_persistent_buffers_set.add(name)
        if module._buffers[name].is_meta:  # On other ranks than 0.
            module._buffers[name] = torch.zeros_like(module._buffers[name], device="cpu")
    if is_read_once and _trains_tied_embeddings(model):
        model.tie_weights = partial(_tie_copies, model)
    yield
    vars(model).pop("tie_weights", None)
    for module, name in buffers:
        module._non_persistent_buffers_set.remove(name)
        module._buffers[name] = module._buffers[name].to(accelerator.device)
        distributed.broadcast(module._buffers[name], 0)


def _trains_tied_embeddings(model: Any) -> bool:
    """Return whether an adapter trains copies of two embeddings that are tied (``lora_modules_to_save``)."""
    if unwrap_adapter(model) is model:
        return False
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    return hasattr(outputs, "modules_to_save") and inputs.weight is outputs.weight


def _tie_copies(model: Any) -> None:
    """Tie the copies of two embeddings, and the originals, which moving the model to another device has separated."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    outputs.original_module.weight = inputs.original_module.weight
    for name, copy in inputs.modules_to_save.items():
        outputs.modules_to_save[name].weight = copy.weight


def shard_head(head: nn.Module, trunk: nn.Module) -> None:
    """Shard a head beside a sharded base over the same ranks, with ``float32`` compute; in place.

    Source: ``tests/distributed/test_ppo.py``.
    """
    group = _list_groups(trunk)[0]
    fully_shard(head, mesh=group.mesh_info.mesh, mp_policy=_build_policy(None), offload_policy=group.offload_policy)


def shard_chunk(chunk: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Shard a chunk of a pipeline stage, layer by layer, over the ranks with the same stage; in place.

    A layer gathered by a micro-batch stays gathered until the end of the step: an all-gather per micro-batch would
    multiply the communication (torchtitan does the same for FSDP in a pipeline).

    Args:
        chunk: Chunk of the model, without weights in common with other chunks.
        layers: Decoder layers of the chunk.
        mesh: One-dimensional mesh of the ranks with this stage; with tensor parallelism, a slice of a larger mesh.
        compute_dtype: Dtype of matrix products and of gathered weights.

    Source: ``tests/distributed/test_pipeline_shards.py``.
    """
    policy = _build_policy(None if compute_dtype == torch.float32 else compute_dtype)
    for module in (*layers, chunk):
        module_policy = replace(policy, output_dtype=torch.float32) if module is chunk else policy
        sharded = fully_shard(module, mesh=mesh, mp_policy=module_policy, reshard_after_forward=False)
        # The loss is already divided by the targets of all replicas: gradients are summed, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        # A divide factor selects ``PREMUL_SUM``, which gloo does not support.
        sharded.set_force_sum_reduction_for_comms(True)


def has_shards(model: nn.Module) -> bool:
    """Return whether any weight of a model is a ``DTensor``, by FSDP2 or tensor parallelism."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_local(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor: its shard, or all of an unsharded one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def get_full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor; all ranks with a shard of it must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(model: Any) -> bool:
    """Return whether a model was sharded by FSDP2."""
    return isinstance(model, FSDPModule)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Context in which every rank has all weights of a sharded model, in the compute dtype; all ranks must enter.

    Forward passes inside need no communication, so ranks may run different numbers of them.

    Source: ``tests/training/layouts/test_fsdp.py``, ``tests/distributed/test_ppo.py``.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = _list_groups(model)
    # By default, a unit reshards its weights after each forward pass.
    mesh_infos = [group.post_forward_mesh_info for group in groups]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        # ``set_reshard_after_forward`` changes this attribute, and torch has no getter for the previous value.
        for group, mesh_info in zip(groups, mesh_infos, strict=True):
            group.post_forward_mesh_info = mesh_info
            # FSDP2 records forward passes, also those without gradients, and prefetches by that order in the next
            # backward pass: after different numbers of passes, ranks would gather different weights and deadlock.
            getattr(group.comm_ctx, "post_forward_order", []).clear()  # Missing before the first pass.
            group._post_forward_indices.clear()
        reshard(model)


def _list_groups(model: nn.Module) -> list[FSDPParamGroup]:
    """Parameter groups of the FSDP units; FSDP2 has setters for their options, but no getters."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [group for unit in units if (group := unit._get_fsdp_state()._fsdp_param_group) is not None]


def compute_total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the global L2 norm of all tensors over all shards, as a ``float32`` scalar that is not a ``DTensor``."""
    parts = map(_compute_norms, _group_by_mesh(tensors))
    # The norm over the groups' norms is the norm over all tensors.
    norms = [get_full_tensor(torch.linalg.vector_norm(torch.stack(part))) for part in parts]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _compute_norms(tensors: list[Tensor]) -> tuple[Tensor, ...] | list[Tensor]:
    """Return the ``float32`` norm of each tensor; a 16-bit one would have 8 bits, or be infinite from 65,520."""
    if all(tensor.dtype == torch.float32 for tensor in tensors):
        return torch._foreach_norm(tensors)
    if isinstance(tensors[0], DTensor):
        # Not at once: DTensor of torch 2.14 takes the dtype below for a dimension (vector_norm_single_dim_strategy).
        return [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    return torch._foreach_norm(tensors, dtype=torch.float32)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, total_norm: Tensor) -> None:
    """Scale gradients in place so that their norm is at most ``max_norm``.

    Args:
        parameters: Parameters with gradients, on any device meshes.
        max_norm: Upper bound of the norm.
        total_norm: Norm of all gradients, from ``compute_total_norm``.
    """
    for group in _group_by_mesh(parameters):
        clip_grads_with_norm_(group, max_norm, total_norm)


def _group_by_mesh(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Group tensors by device mesh: foreach operations of torch do not support several meshes."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return groups.values()


def prepare_frozen(accelerator: Accelerator, model: nn.Module, *, is_compiled: bool = True) -> nn.Module:
    """Return a frozen model with the sharding and compute dtype of the trained one; all ranks must call.

    Args:
        accelerator: Accelerator of the run.
        model: The model, which is modified in place.
        is_compiled: Whether ``match_kernels`` compiles it like the trained one; 8-bit products are slow otherwise.

    Source: ``tests/training/layouts/test_fsdp.py``.
    """
    recipe = accelerator.ao_recipe_handler
    # The weights of a quantised teacher are no floating-point numbers.
    if is_compiled and recipe is not None and not getattr(model, "is_quantized", False):
        # accelerate 1.15 converts to fp8 only what is prepared for training: a reference would differ from the policy.
        convert_model_to_fp8_ao(model, config=recipe.config, module_filter_func=recipe.module_filter_func)
    if accelerator.is_fsdp2:
        sharded: nn.Module = shard(accelerator, model)
        return sharded
    prepared: nn.Module = accelerator.prepare_model(model, device_placement=True, evaluation_mode=True)
    # accelerate appends every prepared model to the models that its own checkpoints contain.
    accelerator._models.pop()
    return prepared


def _build_policy(param_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Mixed-precision policy of every unit. Outputs keep the compute dtype: the next layer would cast them back."""
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)


def _widen_outputs(model: nn.Module) -> None:
    """Convert the outputs of the root module to ``float32``, as accelerate does without FSDP."""
    model.register_forward_hook(lambda _module, _inputs, output: convert_to_fp32(output))


def reshard(model: nn.Module) -> None:
    """Reshard all units: the root unit keeps its weights gathered after a forward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
