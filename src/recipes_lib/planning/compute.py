"""FLOPs of training steps, sizes of models without weights, and training hours."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from recipes_lib.config.schema import ModelConfig, RecipeConfig
from recipes_lib.config.table import read_lists
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.adapters.saved import INITS_CHANGING_BASE
from recipes_lib.models.architecture import explaining_model, find_model_config
from recipes_lib.models.loading import choose_teacher, load_model_config, load_tokenizer
from recipes_lib.models.quantization import check_quantization
from recipes_lib.models.structure import find_head_dims, freeze_outside_text, list_layer_configs

FORWARD_AND_BACKWARD = 3
"""FLOPs of a forward and a backward pass over those of the forward pass; the backward pass takes two products, for the
gradients of inputs and of weights."""
FLOPS_PER_TOKEN: Final = 2 * FORWARD_AND_BACKWARD
"""Training FLOPs per parameter and token, as in ``C = 6 N D``."""


@dataclass(frozen=True, slots=True)
class TokenFlops:
    """FLOPs of training, forward and backward, without recomputation.

    Attributes:
        body: FLOPs per token of all layers, attention included.
        head: FLOPs per target of the output projection, which the loss computes at targets only.
    """

    body: float
    head: float

    def total(self, num_tokens: int, num_targets: int) -> float:
        """Return the FLOPs of a batch of ``num_tokens`` tokens, ``num_targets`` of which are targets."""
        return self.body * num_tokens + self.head * num_targets


def compute_flops_per_token(config: PreTrainedConfig, sequence_length: int, *, is_frozen: bool = False) -> TokenFlops:
    """Return the FLOPs per token of training: ``3 * (2 * weights + attention)``, for any causal language model.

    ``weights`` counts every matrix that multiplies a token, of routed experts only the selected ones. It is read from
    the model on the meta device, so that gated, biased, tied and shared layers need no special case. Attention is ``2 *
    S * heads * (d_qk + d_v)`` per layer with ``S`` the sequence length, at most the window of a sliding layer.

    Args:
        config: Configuration of the model; nothing is downloaded.
        sequence_length: Length of a document (not of a packed row) in tokens. Every token counts as attending to all of
            them, causal or not, as in PaLM, Megatron and TRL.
        is_frozen: Whether the weights are frozen under an adapter and have no gradients: ``2 * (2 * weights) + 3 *
            attention``. The adapter's own matrices, about a percent of the weights, are not counted.

    Source: Chowdhery et al. 2022 (PaLM), appendix B; equal to ``torch.utils.flop_counter`` in
    ``tests/planning/test_compute.py``.
    """
    model = build_on_meta(config)
    inner = _list_inner(model)
    text_config: Any = config.get_text_config(decoder=True)
    head, num_weights = model.get_output_embeddings(), _count_active_weights(inner, text_config)
    passes = FORWARD_AND_BACKWARD - is_frozen
    attention = FORWARD_AND_BACKWARD * 2.0 * count_attended(text_config, sequence_length)
    # Indexers have no gradients.
    attention += 2.0 * _count_indexed(text_config) * sequence_length
    return TokenFlops(passes * 2 * num_weights + attention, passes * 2.0 * head.weight.numel())


PAIR_RECIPES: Final = ("reward", "dpo")
"""Recipes whose rows are pairs of answers."""
RL_RECIPES: Final = ("ppo", "rloo", "grpo")
"""Recipes that train on sampled answers."""


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step.

    Attributes:
        num_rows: Rows over all processes; each answer of a pair is one.
        length: Tokens per row, including padding.
        num_flops: FLOPs, forward and backward, without recomputation.
    """

    num_rows: int
    length: int
    num_flops: float

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, including padding."""
        return self.num_rows * self.length


def count_step(config: RecipeConfig, model_config: PreTrainedConfig, num_processes: int) -> Step:
    """Count the FLOPs of an optimizer step of any recipe but reinforcement learning.

    Args:
        config: Configuration of the run, with ``max_length``.
        model_config: Configuration of the trained model.
        num_processes: Data-parallel processes.

    Raises:
        ConfigError: The teacher's configuration cannot be loaded.

    Source: ``compute_flops_per_token``; ``tests/planning/test_compute.py``.
    """
    length = config.tokens.max_length
    assert length is not None
    rows_per_process = config.read("per_device_train_batch_size") * config.read("gradient_accumulation_steps")
    num_rows = rows_per_process * num_processes * (2 if config.recipe in PAIR_RECIPES else 1)
    flops = compute_flops_per_token(model_config, length, is_frozen=config.adapter.use_peft)
    per_token = flops.body + (0 if config.recipe == "reward" else flops.head)
    read = [model_config] if has_live_reference(config) or config.forgetting.kl_to_base else []
    if has_live_teacher(config):
        read.append(find_shape(choose_teacher(config)))
    for other in read:
        whole = compute_flops_per_token(other, length)
        per_token += (whole.body + whole.head) / FORWARD_AND_BACKWARD
    return Step(num_rows, length, per_token * num_rows * length)


def has_live_reference(config: RecipeConfig) -> bool:
    """Return whether each DPO step runs the reference model."""
    return config.recipe == "dpo" and not config.read("precompute_ref_log_probs")


def has_own_reference(config: RecipeConfig) -> bool:
    """Return whether DPO holds a reference beside the policy, because this has no new adapter that can be disabled."""
    adapter, reference = config.adapter, config.preference.ref_model_name_or_path
    changes_base = adapter.adapter_name_or_path or adapter.init_lora_weights in INITS_CHANGING_BASE
    return has_live_reference(config) and bool(not adapter.use_peft or changes_base or reference)


def has_policy_reference(config: RecipeConfig) -> bool:
    """Return whether a run of reinforcement learning has a reference model: its KL coefficient is not 0."""
    return bool(config.ppo.kl_coef if config.recipe == "ppo" else config.read("beta"))


def has_live_teacher(config: RecipeConfig) -> bool:
    """Return whether each step of distillation runs the teacher, instead of reading its stored log-probabilities."""
    return config.recipe == "distill" and config.distillation.teacher_top_k is None


def reads_teacher(config: RecipeConfig) -> bool:
    """Return whether the loss reads logits of a second model: of a teacher, or of the base by ``kl_to_base``."""
    return has_live_teacher(config) or config.forgetting.kl_to_base > 0


def has_half_products(config: RecipeConfig) -> bool:
    """Return whether a run computes in 16 bits: by default, unless ``bf16`` is false and ``fp16`` is not true."""
    return config.training.get("bf16") is not False or bool(config.training.get("fp16"))


def find_dtype(model_config: PreTrainedConfig, dtype: str) -> torch.dtype:
    """Return the dtype of weights by the key ``dtype``; for ``auto`` that of the checkpoint."""
    return (getattr(model_config, "dtype", None) or torch.float32) if dtype == "auto" else getattr(torch, dtype)


def build_on_meta(
    config: PreTrainedConfig, dtype: str = "auto", kernel: str = "eager", auto_class: Any = AutoModelForCausalLM
) -> Any:
    """Build a model on the meta device, with the parameters frozen that loading freezes.

    Args:
        config: Configuration of the model, which stays unchanged.
        dtype: As for ``find_dtype``.
        kernel: Attention kernel.
        auto_class: Auto class of transformers; for another than that of causal models, the head has one output.

    Raises:
        ConfigError: No causal language model can be built from this configuration.
    """
    settings = copy.deepcopy(config)
    if auto_class is not AutoModelForCausalLM:
        settings.num_labels = 1
    remedy = "choose another architecture, or check the sizes against each other"
    with torch.device("meta"), explaining_model(config, "cannot be built", remedy):
        model: Any = auto_class.from_config(settings, dtype=find_dtype(config, dtype), attn_implementation=kernel)
        freeze_outside_text(model)
    return model


def _list_inner(model: Any) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the text layers and the final norm, with their names in their modules."""
    head = model.get_output_embeddings()
    inner = (module for module in model.modules() if module is not head and not isinstance(module, nn.Embedding))
    return [named for module in inner for named in module.named_parameters(recurse=False) if named[1].requires_grad]


def _count_active_weights(parameters: Sequence[tuple[str, nn.Parameter]], config: Any) -> float:
    """Return the number of weights that multiply a token: matrices, of routed experts those of the selected ones.

    Raises:
        ConfigError: The model has experts, and its configuration does not say how many a token selects.
    """
    settings = getattr(config, "ffn_config", config)  # Of DBRX.
    num_experts, chosen = (
        next((value for name in names if (value := getattr(settings, name, None))), 0) for names in _EXPERTS
    )
    if num_experts and not chosen:
        found = f"a {config.model_type} model has {num_experts} experts, and none is selected"
        raise ConfigError(Problem("model_config", found, f"write `{_EXPERTS[1][0]}`"))
    # Zero experts, which return their input, have a part of the selections, in some architectures also of the tensors.
    with_zeros = num_experts + (getattr(config, "zero_expert_num", 0) or 0)
    # HunYuan lists a number for each layer.
    per_token = chosen if isinstance(chosen, int) else sum(chosen) / len(chosen)
    number = 0.0
    # Biases of experts (GPT-OSS) are matrices too, with a row for each expert.
    for name, matrix in ((name, one) for name, one in parameters if one.ndim > 1 and not name.endswith("bias")):
        # The experts of DBRX are rows of one matrix.
        is_joined = settings is not config and name in ("w1", "v1", "w2")
        experts = matrix.view(num_experts, -1, matrix.shape[1]) if is_joined else matrix
        is_routed = experts.ndim == 3 and len(experts) in (num_experts, with_zeros)
        number += experts[0].numel() * per_token * num_experts / with_zeros if is_routed else experts.numel()
    return number


_EXPERTS: Final = (
    ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts"),
)
"""Names that configurations have for the number of routed experts, and for the number that a token selects."""


def count_attended(config: Any, sequence_length: float, *, of_keys: bool = False) -> float:
    """Return the features of the keys and values that a query attends to, over all layers and heads.

    Twice their number are the forward FLOPs of attention scores and weighted sums. With ``of_keys``, each key-value
    head counts once: what a KV cache of this length holds. At length 1, they are the features of queries and outputs
    of a token, or of its keys and values. 0 for models without attention, such as Mamba. Not counted: the compressed
    attention of DeepSeek V4.
    """
    layers = [*list_layer_configs(config)]
    # Mamba and RWKV have no attention heads.
    if not getattr(layers[0], "num_attention_heads", None):
        return 0.0
    # Without `layer_types`, as in Mistral, a sliding window applies to all layers.
    kind = "sliding_attention" if getattr(config, "use_sliding_window", True) else "full_attention"
    layer_types = getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers
    number = 0.0
    for layer, layer_type in zip(layers if len(layers) > 1 else layers * len(layer_types), layer_types, strict=True):
        if layer_type in _ATTENTION:
            window = getattr(layer, _ATTENTION[layer_type], None) or sequence_length
            heads = (of_keys and getattr(layer, "num_key_value_heads", None)) or layer.num_attention_heads
            score_dim, value_dim = find_head_dims(layer)
            # DiffLlama weighs the values of two heads by each distribution, but caches them once.
            value_dim *= 2 if config.model_type == "diffllama" and not of_keys else 1
            number += min(sequence_length, window) * heads * (score_dim + value_dim)
    return number


def _count_indexed(config: Any) -> int:
    """Return the features by which the indexers of sparse attention (DeepSeek V3.2) score each token, over all layers.

    GLM-5 has layers that share the selection of an earlier one.
    """
    kinds = getattr(config, "indexer_types", None) or getattr(config, "layer_types", None) or []
    number = sum(kind in ("full", "indexed_attention") for kind in kinds)
    num_heads, head_dim = getattr(config, "index_n_heads", 0), getattr(config, "index_head_dim", 0)
    # A product for each feature, and one for the weight of the head.
    return int(number * num_heads * (head_dim + 1))


def count_latents(config: Any) -> int:
    """Return the features of latents that vLLM caches for a token in multi-head latent attention (MLA), or 0.

    transformers caches their projections to keys and values instead.
    """
    rank = getattr(config, "kv_lora_rank", None)
    return int(config.num_hidden_layers * (rank + config.qk_rope_head_dim)) if rank else 0


_ATTENTION: Final = {
    **dict.fromkeys(("full_attention", "hybrid"), ""),
    **dict.fromkeys(("sliding_attention", "hybrid_sliding"), "sliding_window"),
    "chunked_attention": "attention_chunk_size",
    "indexed_attention": "index_topk",
}
"""Layer types with attention -> key with the largest number of keys of a query. Others have a recurrence, a convolution
or an MLP alone, whose FLOPs beside those of weights are few."""


TOKENS_PER_PARAMETER: Final = 20.0
"""Compute-optimal number of training tokens per parameter: Hoffmann et al. 2022 (Chinchilla), table 3."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Number of parameters of a model, shared ones counted once.

    Attributes:
        total: All parameters.
        non_embedding: Parameters of the text model without token and position embeddings and output projection.
        active: Parameters used per token: of routed experts only the selected ones. In a dense text model, all.
    """

    total: int
    non_embedding: int
    active: int


def compute_model_size(config: PreTrainedConfig) -> ModelSize:
    """Count the parameters of the model that training would build from ``config``, without downloads.

    Raises:
        ConfigError: No model can be built from these sizes.

    Source: published counts of models in ``tests/planning/test_model_size.py``.
    """
    model = build_on_meta(config)
    inner = _list_inner(model)
    text, alone = sum(one.numel() for one in model.parameters() if one.requires_grad), {one for _, one in inner}
    matrices = sum(parameter.numel() for parameter in alone if parameter.ndim > 1)
    met = round(_count_active_weights(inner, config.get_text_config(decoder=True)))
    return ModelSize(model.num_parameters(), sum(parameter.numel() for parameter in alone), text - (matrices - met))


def compute_training_flops(num_parameters: float, num_tokens: float) -> float:
    """Return ``6 N D``, the usual estimate of a run's FLOPs, without attention.

    Args:
        num_parameters: Active parameters ``N``.
        num_tokens: Training tokens ``D``.

    Source: Kaplan et al. 2020, section 2.1; compared with published values of GPT-3 and Llama 3 405B in
    ``tests/planning/test_known_answers.py``.
    """
    return FLOPS_PER_TOKEN * num_parameters * num_tokens


def compute_hours(num_flops: float, num_gpus: int, peak: float, mfu: float) -> float:
    """Return the hours of a run: ``FLOPs / (GPUs * peak * MFU * 3600)``.

    Args:
        num_flops: FLOPs of the run, without recomputation.
        num_gpus: Number of GPUs.
        peak: Peak FLOP/s of one GPU.
        mfu: Model FLOPs utilisation, above 0 and at most 1.

    Source: Narayanan et al. 2021 (Megatron), equation 4; its training days in ``tests/planning/test_known_answers.py``.
    """
    return num_flops / (num_gpus * peak * mfu * 3600)


SHIPPED_SHAPES: Final[Mapping[str, Mapping[str, Any]]] = read_lists(Path(__file__).with_name("shapes.yaml"))
"""Shipped configurations of models by Hub id, with the keys of ``config.json``."""


def find_shape(model: ModelConfig) -> PreTrainedConfig:
    """Return the configuration of the planned model: a shipped one, or the model's own.

    Raises:
        ConfigError: The model has no shipped configuration, and its own cannot be loaded.
    """
    if (sizes := SHIPPED_SHAPES.get(str(model.model_name_or_path))) is None:
        return load_model_config(model)[0]
    config: PreTrainedConfig = AutoConfig.for_model(**{"dtype": "bfloat16", **sizes})
    return config


def find_planned_model(config: RecipeConfig) -> PreTrainedConfig:
    """Return the model configuration of a run; a tokenizer is loaded only if ``model_config`` has no ``vocab_size``.

    Raises:
        ConfigError: ``model_config`` is invalid, or its vocabulary size is unknown; or the checkpoint is quantised to
            other bits than the run.
    """
    if (architecture := config.model.model_config) is None:
        model_config = find_shape(config.model)
        name = str(config.model.model_name_or_path)
        if problems := [*check_quantization(name, model_config, config.quantization)]:
            raise ConfigError(*problems)
        return model_config
    for key in ("num_hidden_layers", "vocab_size", "hidden_size"):
        # transformers builds such models, which have nothing to train.
        if isinstance(size := architecture.get(key, 1), int) and size < 1:
            raise ConfigError(Problem("model_config", f"`{key}` is {size}", "write 1 or more"))
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))  # type: ignore[no-untyped-call]
    if "vocab_size" not in architecture:
        try:
            tokenizer = load_tokenizer(config.model, config.tokens)
        except ConfigError as error:
            remedy = "write `vocab_size` in `model_config`: planning needs nothing else from the tokenizer"
            raise ConfigError(*(Problem(one.where, one.found, remedy) for one in error.problems)) from error
    return find_model_config(config.model, tokenizer, config.tokens.max_length)[0]
