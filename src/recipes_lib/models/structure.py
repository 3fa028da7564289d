"""Structure of a model: layers and hidden states, layer mapping and pruning, the text model of multimodal models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.inference import (
    compute_probe_logits,
    evaluating,
    find_device,
    find_logit_shift,
    kernel_precision,
)

Read = Callable[[Tensor], Tensor]
_UNTRAINED: Final = ("e_score_correction_bias", "expert_bias", "z_L_init")
"""Ends of the names of parameters that are frozen by their architecture, such as biases for the choice of experts,
which no gradient reaches; transformers 5.23 makes them trainable on loading."""


_ATTENTION_DROPOUT: Final = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Names of the probability with which attention is dropped in training."""


_TYPES: Final[Sequence[tuple[str, Any, str]]] = (
    ("architectures", list | None, "write a list of class names, or delete it"),
    ("output_hidden_states", bool | None, "write false, or delete it"),
    ("sliding_window", int | None, "write a number of tokens, or null"),
)
"""Keys whose types transformers 5.23 does not validate in every class, and the remedy."""


class LayerFeatures(NamedTuple):
    """Outputs of the layers in the last forward pass, by layer number, from 1.

    Attributes:
        states: Output of a layer, ``(B, L, D)``; for the last layer that of the final norm, as in transformers.
        attentions: Attention probabilities of the heads of a layer, ``(B, H, L, L)``.
    """

    states: dict[int, Tensor]
    attentions: dict[int, Tensor]


def map_layers(num_student: int, num_teacher: int) -> tuple[int, ...]:
    """Return the layer of the teacher for each layer ``k`` of the student; both are counted from 1.

    It is ``k * num_teacher / num_student``, rounded half up: the last layer maps to the last, others evenly spaced.

    Source: Sun et al. 2019 (PKD-Skip, arXiv 1908.09355) and Jiao et al. 2020 (arXiv 1909.10351), where one number of
        layers divides the other; ``tests/models/test_structure.py``.
    """
    # floor(k T / S + 1 / 2) in integers.
    return tuple((2 * number * num_teacher + num_student) // (2 * num_student) for number in range(1, num_student + 1))


def list_layer_configs(text_config: PreTrainedConfig) -> Sequence[Any]:
    """Return the configurations of the layers: one for all if they are alike, as in most models, otherwise one each.

    Of a model with different layers, such as Gemma 4 with wider heads in global layers, transformers raises for
    attributes of layers that are read from the configuration of the model.
    """
    layers: Sequence[Any] = text_config.per_layer_config if text_config.is_heterogeneous else [text_config]
    return layers


def find_head_dim(layer_config: Any) -> int:
    """Return the dimension of the attention heads of a layer; without the key, the hidden size divided by the heads."""
    return int(getattr(layer_config, "head_dim", None) or layer_config.hidden_size // layer_config.num_attention_heads)


def find_head_dims(layer_config: Any) -> tuple[int, int]:
    """Return the dimensions of queries and keys, and of values, which differ in multi-head latent attention."""
    head_dim = find_head_dim(layer_config)
    score_dim, value_dim = (getattr(layer_config, name, None) or head_dim for name in ("qk_head_dim", "v_head_dim"))
    return score_dim, value_dim


def find_sliding_window(text_config: PreTrainedConfig) -> int | None:
    """Return the smallest sliding window of all layers in tokens; ``None`` without one, or for 0, as in Qwen2 MoE."""
    windows = (getattr(layer, "sliding_window", None) for layer in list_layer_configs(text_config))
    return min(filter(None, windows), default=None)


def find_softcap(text_config: PreTrainedConfig) -> float | None:
    """Return the soft cap of the logits, by the key of most models, RecurrentGemma or xLSTM; ``None`` without one."""
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return next((cap for name in names if (cap := getattr(text_config, name, None)) is not None), None)


def find_logit_scale(text_config: PreTrainedConfig) -> float:
    """Return the factor of the logits, by the key of Cohere, Falcon-H1, Granite or Inkling; 1 without one."""

    def read(name: str) -> float:
        return 1.0 if (value := getattr(text_config, name, None)) is None else float(value)

    scale = read("logit_scale") * read("lm_head_multiplier") / read("logits_mup_width_multiplier")
    # HyperCLOVA X multiplies by the key by which Granite and MiniCPM3 divide.
    is_factor = text_config.model_type == "hyperclovax"
    return scale * read("logits_scaling") if is_factor else scale / read("logits_scaling")


def find_shared_rope(text_config: PreTrainedConfig, max_length: int | None) -> str | None:
    """Return a caution if a long document changes the rotary frequencies of all documents in its batch.

    transformers 5.24 chooses those of LongRoPE (Phi-3.5 and Phi-4-mini) and of dynamic NTK scaling by the longest one.

    Args:
        text_config: Configuration of the text model.
        max_length: Limit of the tokens of a document; ``None`` without one.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # One mapping, or one for each type of layers.
        if isinstance(part, dict) and part.get("rope_type") in ("longrope", "dynamic"):
            limit = part.get("original_max_position_embeddings") or text_config.max_position_embeddings
            if max_length is None or max_length > limit:
                return (
                    f"a document of more than {limit:,} tokens changes the positions of all others in its batch, by "
                    f"{part['rope_type']} scaling: set max_length to {limit} unless they are needed"
                )
    return None


def has_attention_dropout(text_config: PreTrainedConfig) -> bool:
    """Return whether attention probabilities are dropped in training, by any of the names of the key."""
    return any(getattr(text_config, name, 0.0) for name in _ATTENTION_DROPOUT)


def verify_settings(key: str, model_config: PreTrainedConfig) -> None:
    """Raise a ``ConfigError`` for values that transformers loads, and for which it or torch raises later.

    These are values of another type, a decoder-only model that is said to have an encoder, query heads that cannot
    share the key heads, and dropout that is no probability.

    Args:
        key: Configuration key that named the model.
        model_config: Configuration of the model.
    """
    text_config = model_config.get_text_config()
    for name, kind, remedy in _TYPES:
        for layer in (*list_layer_configs(model_config), *list_layer_configs(text_config)):
            if not isinstance(value := getattr(layer, name, None), kind):
                raise ConfigError(Problem(key, f"`{name}` is {value!r}", remedy))
    if model_config.is_encoder_decoder is not (expected := type(model_config).is_encoder_decoder):
        found = f"`is_encoder_decoder` is {model_config.is_encoder_decoder!r}"
        raise ConfigError(Problem(key, found, f"write {str(expected).lower()}, or delete it"))
    for layer in list_layer_configs(text_config):
        num_heads = getattr(layer, "num_attention_heads", None) or 1
        num_keys = getattr(layer, "num_key_value_heads", None) or num_heads
        # Multi-head latent attention computes a key for every head, and repeats them by the quotient.
        is_latent = getattr(layer, "kv_lora_rank", None)
        if num_heads // num_keys > 1 if is_latent else num_heads % num_keys:
            found = f"`num_attention_heads` ({num_heads}) and `num_key_value_heads` ({num_keys}) contradict each other"
            remedy = f"write num_key_value_heads: {num_heads}" + ("" if is_latent else ", or a divisor of it")
            raise ConfigError(Problem(key, found, remedy))
    for name in _ATTENTION_DROPOUT:
        dropout = getattr(text_config, name, 0.0)
        if not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
            raise ConfigError(Problem(key, f"`{name}` is {dropout!r}", "write a probability, such as 0.0"))


def reads_mask(text_config: PreTrainedConfig) -> bool:
    """Return whether layers compute with the attention mask, which must then not be empty.

    Doge, sparse attention, and PhiMoE, which does not pass its window to kernels (transformers 5.23).
    """
    return text_config.model_type in ("doge", "phimoe") or "indexed_attention" in (
        getattr(text_config, "layer_types", None) or ()
    )


def is_replaceable_sdpa(config: PreTrainedConfig) -> bool:
    """Return whether attention equals sdpa by transformers' interface: no caps, no sinks, no code of its own."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or reads_mask(config.get_text_config()):
        return False
    return bool(model_class._supports_sdpa and model_class._supports_attention_backend)


def reads_padding(text_config: PreTrainedConfig) -> bool:
    """Return whether generation in left-padded batches changes answers, despite the attention mask.

    RWKV's recurrence and the convolution of RecurrentGemma take no mask, and DeepSeek V4 compresses blocks of tokens
    that are counted from the start of the row. RWKV (transformers 5.23) also mixes the rows of a batch.
    """
    return text_config.model_type in ("deepseek_v4", "recurrent_gemma", "rwkv")


def find_layers(model: Any) -> nn.ModuleList:
    """Return the layers of a causal language model, in their order; of a multimodal one those of its text model.

    Raises:
        ConfigError: The model has no ``nn.ModuleList`` of ``num_hidden_layers`` modules.
    """
    count = model.config.get_text_config().num_hidden_layers
    # Of the decoder: a vision tower, which comes first, may have as many layers.
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count > 0:
            return module
    found = f"{type(model).__name__} has no list of its {count} layers"
    raise ConfigError(Problem("model_name_or_path", found, "choose another architecture"))


@contextmanager
def collect_features(
    model: Any,
    *,
    states: Collection[int] = (),
    attentions: Collection[int] = (),
    read_states: Read = lambda states: states,
    read_attentions: Read = lambda attentions: attentions,
) -> Iterator[LayerFeatures]:
    """Collect the outputs of some layers by forward hooks; each forward pass replaces the previous outputs.

    Unlike ``output_hidden_states``, it stores no other layers. Activation checkpointing recomputes layers in the
    backward pass, outside of the context and so without hooks: for a trained model, ``read_...`` must not save tensors
    for backward.

    Args:
        model: Causal language model without wrapper.
        states: Numbers of the layers whose hidden states are collected, from 1.
        attentions: Numbers of the layers whose attention is collected, which needs ``eager`` attention.
        read_states: Function of the hidden states whose result is stored. Default: the identity.
        read_attentions: Function of the attention whose result is stored. Default: the identity.

    Raises:
        ConfigError: As ``find_layers``; or a layer has no attention module.
    """
    layers, features = find_layers(model), LayerFeatures({}, {})

    def collect(collected: dict[int, Tensor], number: int, read: Read, at: int, *call: Any) -> None:
        output = call[-1]  # After the module and its inputs.
        collected[number] = read(output if isinstance(output, Tensor) else output[at])

    with ExitStack() as hooks:
        for number in states:
            # The last hidden state of transformers is the output of the final norm, which is that of the base model.
            module = layers[number - 1] if number < len(layers) else model.base_model
            hook = partial(collect, features.states, number, read_states, 0)
            hooks.enter_context(module.register_forward_hook(hook))
        for number in attentions:
            # Attention modules return output and attention probabilities.
            hook = partial(collect, features.attentions, number, read_attentions, 1)
            hooks.enter_context(_find_attention(layers[number - 1]).register_forward_hook(hook))
        yield features


def verify_layers(model: Any, *, attentions: bool) -> None:
    """Verify on eight tokens that the collected features of all layers equal the hidden states that the model returns.

    Args:
        model: Causal language model, whose mode is restored.
        attentions: Whether to compare attention maps too, which needs ``attn_implementation: eager``.

    Raises:
        ConfigError: As ``collect_features``; or the features differ.
    """
    config = model.config.get_text_config()
    input_ids = torch.arange(1, 9, device=find_device(model))[None] % config.vocab_size
    numbers = range(1, config.num_hidden_layers + 1)
    collecting = collect_features(model, states=numbers, attentions=numbers if attentions else ())
    with evaluating(model), kernel_precision(model), collecting as features:
        own: Any = model.base_model(
            input_ids=input_ids, use_cache=False, output_hidden_states=True, output_attentions=attentions
        )
    # hidden_states[0] is the output of the embedding.
    pairs = [(features.states, own.hidden_states[1:]), (features.attentions, own.attentions if attentions else ())]
    for collected, expected in pairs:
        outputs = [collected[number] for number in sorted(collected)]
        if len(outputs) != len(expected) or not all(map(torch.equal, outputs, expected)):
            found = f"the outputs of the layers of {type(model).__name__} are not the hidden states that it returns"
            remedy = "choose another architecture, or distil from the teacher's logits alone"
            raise ConfigError(Problem("model_name_or_path", found, remedy))


def _find_attention(layer: nn.Module) -> nn.Module:
    for module in layer.children():
        if type(module).__name__.endswith("Attention"):
            return module
    found = f"{type(layer).__name__} has no attention module whose output could be collected"
    raise ConfigError(Problem("attention_weight", found, "remove this key"))


def prune_layers(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Reduce a causal language model and its configuration to some of its layers, in the given order.

    Embeddings, final norm, output projection and all widths are unchanged. Per-layer lists of the configuration, such
    as ``layer_types``, are reduced to the remaining layers.

    Args:
        model: Model whose weights and configuration are changed in place.
        layers: Numbers of the remaining layers, from 1.

    Raises:
        ConfigError: The model has no such layer, or ``layers`` is empty or names one twice.

    Source: Sanh et al. 2019 (DistilBERT, arXiv 1910.01108, section 3), which takes every second layer;
        ``tests/models/test_layer_copy.py``.
    """
    all_layers = find_layers(model)
    count = len(all_layers)
    if not layers or min(layers) < 1 or max(layers) > count or len({*layers}) < len(layers):
        found = f"{type(model).__name__} has layers 1 to {count}, not {list(layers)}"
        raise ConfigError(Problem("--layers", found, "name layers that it has, each once"))
    remaining = nn.ModuleList(all_layers[number - 1] for number in layers)
    # Architectures name the list differently (`layers`, `h`), so it is found by identity.
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is all_layers:
                setattr(parent, name, remaining)
    config: Any = model.config.get_text_config()
    for name, value in vars(config).copy().items():
        # A list of end tokens may have as many elements as there are layers.
        if isinstance(value, list) and len(value) == count and name != "eos_token_id":
            setattr(config, name, [value[number - 1] for number in layers])
    config.num_hidden_layers = len(layers)


def verify_copy(student: PreTrainedModel, pruned: PreTrainedModel, folder: Path) -> None:
    """Verify that a reloaded student equals the pruned model in memory: tensors bit by bit, logits within rounding.

    Args:
        student: Student loaded from ``folder``.
        pruned: Result of ``prune_layers`` on the same device and in the same precision.
        folder: Folder of the student, for error messages.

    Raises:
        ConfigError: A tensor differs; or the logits do, because the architecture treats layers by their index in the
            original model.
    """
    own, expected = student.state_dict(), pruned.state_dict()
    differing = [name for name in expected if name not in own or not torch.equal(own[name], expected[name])]
    # Experts round differently with another memory layout of the same weights.
    if differing or find_logit_shift(student, compute_probe_logits(pruned)) is not None:
        what = f"the tensor {differing[0]}" if differing else "the logits"
        found = f"{type(pruned).__name__} cannot be pruned: {what} changed when {folder} was loaded again"
        raise ConfigError(Problem("--teacher", found, "name layers whose index in the model does not matter, or all"))


def find_outside_text(model: Any) -> list[str]:
    """Return the paths of modules and parameters of the base model outside its text model, the outermost only.

    Examples are a vision tower and its projector. Text-only models have none, and heads do not belong to the base.

    Args:
        model: Model with its head, without a PEFT wrapper.

    Source: ``get_decoder`` of transformers; ``tests/models/test_text_part.py``.
    """
    config, parts = model.config, model.base_model
    if not config.sub_configs:
        return []
    paths = {id(module): path for path, module in model.named_modules()}
    if config.get_text_config() is config:
        # Phi-4-multimodal has no text model of its own, but a module with encoders.
        return [paths[id(child)] for child in parts.children() if _has_encoder(child)]
    # The decoder is the text model.
    text = paths[id(model.get_decoder())]
    names = [*dict(parts.named_children()), *dict(parts.named_parameters(recurse=False))]
    found = [f"{paths[id(parts)]}.{name}".removeprefix(".") for name in names]
    return [path for path in found if not is_outside(text, [path])]


def _has_encoder(module: nn.Module) -> bool:
    configs = (getattr(part, "config", None) for part in module.modules())
    return any(getattr(config, "base_config_key", None) in ("vision_config", "audio_config") for config in configs)


def is_outside(path: str, parts: list[str]) -> bool:
    """Return whether a path is one of ``parts``, or inside one of them."""
    return any(f"{path}.".startswith(f"{part}.") for part in parts)


def find_dropped_modules(model: Any, config: PreTrainedConfig) -> str | None:
    """Return a caution if a model is only the text model of a multimodal checkpoint, as of Qwen3.5 and Llama 4.

    Args:
        model: Model that an auto class of transformers built.
        config: Configuration of the checkpoint.
    """
    if model.config.model_type == config.model_type:
        return None
    return (
        f"of a {config.model_type} model, transformers loads and saves the text model alone, {type(model).__name__}: "
        "the result, or the base of an adapter, has no vision or audio modules"
    )


def freeze_outside_text(model: Any) -> None:
    """Freeze modules outside the text model and what the architecture does not train; they are saved with the model."""
    parts = find_outside_text(model)
    for name, parameter in model.named_parameters():
        if is_outside(name, parts) or name.endswith(_UNTRAINED):
            parameter.requires_grad_(False)


def verify_causal(key: str, model_config: PreTrainedConfig) -> None:
    """Raise a ``ConfigError`` for the configuration of a model that is no causal language model, such as of T5 or BERT.

    Args:
        key: Configuration key that named the model.
        model_config: Configuration of the model.
    """
    kind = type(model_config)
    # As a causal class, transformers also loads encoders such as BERT, and leaves their attention bidirectional.
    is_encoder = kind in MODEL_FOR_MASKED_LM_MAPPING and not getattr(model_config, "is_decoder", True)
    # Code from the Hub has classes of its own.
    if (kind not in MODEL_FOR_CAUSAL_LM_MAPPING or is_encoder) and not hasattr(model_config, "auto_map"):
        found = f"{model_config.model_type} models are not causal language models"
        raise ConfigError(Problem(key, found, "choose a decoder-only model, such as of Llama or Qwen"))
