"""Tensor parallelism: weights sharded over ranks by transformers on loading, combined with FSDP over groups of them.

Hidden states are replicated within a tensor-parallel group; the logits are vocabulary-parallel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import (  # type: ignore[attr-defined]
    ALL_PARALLEL_STYLES,
    ReplicatedWithGradAllReduce,
)

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.losses.projection import VocabularyShard

HEAD_NORM_STYLE: Final = "replicated_with_grad_allreduce"
"""Style of query and key norms, as in Qwen 3 and Gemma 3: each rank computes their gradient for its own heads."""
PROVED_STYLES: Final = {"colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", HEAD_NORM_STYLE}
"""Styles of ``base_model_tp_plan`` with a parity test; experts and fused projections have none."""
_PARTIAL: Final = {
    *("gemma3", "got_ocr2", "gpt_neox", "moss_transcribe_diarize", "olmo_hybrid", "phi4_multimodal", "qwen3_5"),
    *("qwen3_5_text", "youtu"),
}
"""Models whose plan leaves some matrices whole, in transformers 5.23: those of images, an embedding, a convolution."""
_DIVIDED: Final = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


class SummedGradient(ReplicatedWithGradAllReduce):
    """Replicated weights whose gradient is summed over the tensor-parallel group in each backward pass.

    The style of transformers 5.23 sums the accumulated gradient instead: under gradient accumulation, gradients of
    earlier micro-batches are summed again. Goes when transformers registers a hook of the gradient.
    """

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Install the hooks in the first forward pass, when the weights are loaded."""
        forward, hooked = module.forward, set[nn.Parameter]()

        def add(gradient: Tensor) -> Tensor:
            total = gradient.clone()
            distributed.all_reduce(total, group=mesh.get_group())
            return total

        def hook_and_run(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                # Under FSDP2, those are the gathered weights.
                for weight in set(module.parameters(recurse=False)) - hooked:
                    if weight.requires_grad:
                        weight.register_hook(add)  # type: ignore[no-untyped-call]
                        hooked.add(weight)
            return forward(*args, **kwargs)

        module.forward = hook_and_run
        return module


def build_distribution(sizes: Mapping[str, int], compute_dtype: torch.dtype) -> DistributedConfig | None:
    """Build the ``distributed_config`` for loading; ``None`` without tensor parallelism.

    Args:
        sizes: Mesh sizes, in ranks, of ``tp`` and ``dp_shard``; an absent one is 1.
        compute_dtype: Dtype of matrix products; with bfloat16, weights are gathered in it, and gradients are reduced in
            ``float32``.
    """
    if sizes.get("tp", 1) == 1:
        return None
    ALL_PARALLEL_STYLES[HEAD_NORM_STYLE] = SummedGradient()
    return DistributedConfig(
        tp_size=sizes["tp"],
        fsdp_size=sizes.get("dp_shard", 1),
        fsdp_mixed_precision=compute_dtype == torch.bfloat16,
    )


def verify_tensor_parallel(config: PreTrainedConfig, num_parts: int) -> None:
    """Raise for a model that does not support ``num_parts`` tensor-parallel ranks, before any weight is loaded.

    Args:
        config: Configuration of the model.
        num_parts: Size of the tensor-parallel group.

    Raises:
        ConfigError: The architecture has no tensor-parallel plan, or one without a parity test; the number of heads,
            the MLP width or the vocabulary size is no multiple of ``num_parts``; or it has dropout.
    """
    text = config.get_text_config()
    plan: Mapping[str, str] = text.base_model_tp_plan or {}
    # Of models with embeddings for each layer, too, plans leave some matrices out.
    is_partial = config.model_type in _PARTIAL or bool(getattr(text, "hidden_size_per_layer_input", 0))
    has_plan = plan and not is_partial and not text.is_heterogeneous and set(plan.values()) <= PROVED_STYLES
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not has_plan:
        found = f"tensor parallelism is not supported for a {config.model_type} model"
        raise ConfigError(Problem("model_name_or_path", found, "launch with accelerate_configs/fsdp2.yaml"))
    problems = []
    for key in _DIVIDED:
        number = getattr(text, key, None)
        if isinstance(number, int) and number % num_parts:
            found = f"{key} of the model is {number}, no multiple of {num_parts} tensor-parallel ranks"
            remedy = f"write a parallelism_config_tp_size that divides {number}"
            problems.append(Problem("parallelism_config_tp_size", found, remedy))
    drops = sorted(name for name, value in vars(text).items() if "drop" in name and isinstance(value, float) and value)
    if drops:
        found = f"the model has {', '.join(drops)}, and tensor parallelism does not support dropout"
        problems.append(Problem("model_name_or_path", found, "launch with accelerate_configs/fsdp2.yaml"))
    if problems:
        raise ConfigError(*problems)


def count_tensor_parallel_ranks(model: nn.Module) -> int:
    """Return the size of the tensor-parallel group over which a model is sharded; 1 without tensor parallelism.

    Raises:
        ConfigError: Some matrices are sharded and others are not.
    """
    # Norms and biases are replicated by design; only matrices must be sharded.
    numbers = {name: _count_parts(tensor) for name, tensor in model.named_parameters() if tensor.ndim > 1}
    if len(set(numbers.values())) > 1:
        whole = sorted(name for name, number in numbers.items() if number == 1)
        found = f"{len(whole)} of {len(numbers)} matrices are not sharded, {whole[0]} first"
        raise ConfigError(Problem("parallelism_config_tp_size", found, "launch with accelerate_configs/fsdp2.yaml"))
    return next(iter(numbers.values()), 1)


def distribute(model: PreTrainedModel, distribution: DistributedConfig) -> PreTrainedModel:
    """Return the same model, sharded for tensor parallelism.

    Args:
        model: Unsharded model, identical on all ranks.
        distribution: Result of ``build_distribution``.
    """
    model_class: Any = type(model)
    # Only one of each pair of tied tensors: given both, transformers 5.23 unties them.
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


def find_data_group(model: nn.Module) -> distributed.ProcessGroup | None:
    """Return the data-parallel group: one rank of each tensor-parallel group; ``None`` where all ranks are in it."""
    meshes = getattr(model, "_mesh_manager", None)
    return None if meshes is None else cast(distributed.ProcessGroup, meshes.get_mesh("fsdp").get_group())


def find_vocabulary_shard(weight: DTensor) -> VocabularyShard:
    """Return the rows of a vocabulary-parallel output embedding, ``(V, D)``, that this rank holds."""
    mesh = weight.device_mesh
    # DTensor shards into parts of ceil(V / ranks) rows; the last ones may be smaller or empty.
    first = min(mesh.get_local_rank() * math.ceil(len(weight) / mesh.size()), len(weight))
    return VocabularyShard(mesh.get_group(), first)


def project_vocabulary_parallel(hidden: Tensor, weight: DTensor, bias: Tensor | None) -> Tensor:
    """Return logits over the whole vocabulary, ``(..., V)``, on every rank of a tensor-parallel group.

    Args:
        hidden: Hidden states, replicated over the group, ``(..., D)``.
        weight: ``(V, D)``, sharded by rows.
        bias: ``(V,)``, sharded alike.
    """
    # The matrix product of a replicated DTensor and a row-sharded weight gives logits sharded by vocabulary.
    alike = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    logits: Any = functional.linear(alike, weight, bias)
    return cast(Tensor, logits.full_tensor())


def _count_parts(tensor: torch.Tensor) -> int:
    if not isinstance(tensor, DTensor) or "tp" not in (names := tensor.device_mesh.mesh_dim_names or ()):
        return 1
    dimension = names.index("tp")
    is_cut = isinstance(tensor.placements[dimension], Shard)
    return tensor.device_mesh.size(dimension) if is_cut else 1
