"""Tensor parallelism: transformers splits the weights over ranks on loading, and shards them over groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.losses.projection import VocabularyShare

PROVED_STYLES: Final = {"colwise", "rowwise"}
"""How the parts of a layer may be cut, in transformers' words; of experts and fused projections it is not proved. The
gradients of norms of queries and keys, as Qwen 3 and Gemma 3 have them, transformers 5.23 sums over the processes after
every micro-batch, and with them what it has summed before."""
_DIVIDED: Final = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


def build_distribution(sizes: Mapping[str, int], compute_dtype: torch.dtype) -> DistributedConfig | None:
    """How a model is spread over processes while it is loaded; ``None`` where its tensors are not cut.

    Args:
        sizes: Processes along ``tp`` and ``dp_shard``; an absent one is 1.
        compute_dtype: Of matrix products; in bfloat16 weights are gathered in it, and gradients summed in ``float32``.
    """
    if sizes.get("tp", 1) == 1:
        return None
    return DistributedConfig(
        tp_size=sizes["tp"],
        fsdp_size=sizes.get("dp_shard", 1),
        fsdp_mixed_precision=compute_dtype == torch.bfloat16,
    )


def verify_can_be_cut(config: PreTrainedConfig, num_parts: int) -> None:
    """Refuse a model whose tensors cannot be cut into ``num_parts``, before any of it is loaded.

    Raises:
        ConfigError: Its architecture has no plan for that, or one that is not proved; its heads, the width of its MLP
            or its vocabulary do not divide; or it has dropout.
    """
    text = config.get_text_config()
    plan: Mapping[str, str] = text.base_model_tp_plan or {}
    is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    problems = []
    if not is_known or not plan or set(plan.values()) - PROVED_STYLES:
        found = f"no way is proved to cut the tensors of a {config.model_type} model"
        problems.append(Problem("model_name_or_path", found, "launch with accelerate_configs/fsdp2.yaml"))
    for key in _DIVIDED:
        number = getattr(text, key, None)
        if isinstance(number, int) and number % num_parts:
            found = f"{key} of the model is {number}, which {num_parts} processes cannot share"
            remedy = f"write a parallelism_config_tp_size that divides {number}"
            problems.append(Problem("parallelism_config_tp_size", found, remedy))
    drops = sorted(name for name, value in vars(text).items() if "drop" in name and isinstance(value, float) and value)
    if drops:
        found = f"the model has {', '.join(drops)}, and each process would drop from its part as from the whole"
        problems.append(Problem("model_name_or_path", found, "launch with accelerate_configs/fsdp2.yaml"))
    if problems:
        raise ConfigError(*problems)


def count_tensor_parts(model: nn.Module) -> int:
    """Into how many parts the tensors of a model are cut; 1 where they are not.

    Raises:
        ConfigError: Some matrices are cut and others are not.
    """
    numbers = {name: _count_parts(tensor) for name, tensor in model.named_parameters() if tensor.ndim > 1}
    if len(set(numbers.values())) > 1:
        whole = sorted(name for name, number in numbers.items() if number == 1)
        found = f"{len(whole)} of {len(numbers)} matrices are not cut, {(whole or sorted(numbers))[0]} first"
        raise ConfigError(Problem("parallelism_config_tp_size", found, "launch with accelerate_configs/fsdp2.yaml"))
    return next(iter(numbers.values()), 1)


def distribute(model: PreTrainedModel, distribution: DistributedConfig) -> PreTrainedModel:
    """The same model with every process holding its part of it alone.

    Args:
        model: Whole, and alike on all processes.
        distribution: From ``build_distribution``.
    """
    model_class: Any = type(model)
    # Of tied tensors one: with both transformers would keep them apart.
    tied = set(model.all_tied_weights_keys)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    distributed: PreTrainedModel = model_class.from_pretrained(
        None,
        config=model.config,
        state_dict=state,
        dtype=model.dtype,
        attn_implementation=model.config._attn_implementation,
        distributed_config=distribution,
    )
    return distributed


def was_sharded_on_loading(model: nn.Module) -> bool:
    """Whether transformers spread a model over processes while it loaded it."""
    return bool(getattr(model, "is_distributed_loading_by_transformers", False))


def find_data_group(model: nn.Module) -> distributed.ProcessGroup | None:
    """One process of each group that shares tensors, this one among them; ``None`` where every process is in it."""
    meshes = getattr(model, "_mesh_manager", None)
    return None if meshes is None else cast(distributed.ProcessGroup, meshes.get_mesh("fsdp").get_group())


@contextmanager
def taken_for_whole(model: PreTrainedModel) -> Iterator[None]:
    """Keep transformers from gathering on every process what is saved, which is whole and on the main one."""
    config: Any = model.config
    distribution, config.distributed_config = getattr(config, "distributed_config", None), None
    try:
        yield
    finally:
        config.distributed_config = distribution


def find_share(weight: DTensor) -> VocabularyShare:
    """Which rows of an output embedding, ``(V, D)``, cut by rows, this process has."""
    mesh = weight.device_mesh
    # As torch cuts: equal parts, but for the last ones.
    first = min(mesh.get_local_rank() * math.ceil(len(weight) / mesh.size()), len(weight))
    return VocabularyShare(mesh.get_group(), first)


def project_on_shares(hidden: Tensor, weight: DTensor, bias: Tensor | None) -> Tensor:
    """Logits over the whole vocabulary, ``(..., V)``, on every process that shares it.

    Args:
        hidden: The same on all of them, ``(..., D)``.
        weight: ``(V, D)``, cut by rows.
        bias: ``(V,)``, cut alike.
    """
    alike = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    logits: Any = functional.linear(alike, weight, bias)
    return cast(Tensor, logits.full_tensor())


def _count_parts(tensor: torch.Tensor) -> int:
    names = (tensor.device_mesh.mesh_dim_names or ()) if isinstance(tensor, DTensor) else ()
    if not isinstance(tensor, DTensor) or "tp" not in names:
        return 1
    dimension = names.index("tp")
    is_cut = isinstance(tensor.placements[dimension], Shard)
    return tensor.device_mesh.size(dimension) if is_cut else 1
