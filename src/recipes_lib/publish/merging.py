"""Merges an adapter into its base in float32, and compares the result with both."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase

from recipes_lib.config.schema import ModelConfig, QuantizationConfig
from recipes_lib.environment import find_versions
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.files import hash_file
from recipes_lib.models.adapters.lora import adapters_off, load_adapter
from recipes_lib.models.adapters.saved import ADAPTER_WEIGHTS
from recipes_lib.models.attention.kernels import choose_kernel
from recipes_lib.models.loading import load_causal_lm, load_model_config
from recipes_lib.models.quantization import build_quantization_config, check_quantization

_PACKAGES: Final = ("torch", "transformers", "peft", "bitsandbytes", "recipes-lib")
Texts = Sequence[Sequence[int]]
"""Token ids of the texts on which models are compared."""


@torch.no_grad()
def compute_next_token_logps(model: Any, texts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Yield the next-token log-probabilities at every position of each text, ``float32 (T, V)``, in nats.

    Args:
        model: Causal language model in evaluation mode.
        texts: Token ids of the texts.
    """
    for text in texts:
        row = torch.tensor([list(text)], device=model.device)
        yield model(input_ids=row, use_cache=False).logits[0].float().log_softmax(dim=-1).cpu()


def compare(first: Sequence[Tensor], second: Iterable[Tensor]) -> tuple[float, float]:
    """Compare two models by their results of ``compute_next_token_logps`` on the same texts.

    Of the second model, they are read one after the other: those of 200 texts can take 8 GB.

    Returns:
        KL(first || second) in nats per token, and the fraction of the positions at which both models have the same most
        likely token; both over all positions of all texts.

    Source: ``torch.nn.functional.kl_div``; ``tests/publish/test_merging.py``.
    """
    num_tokens, kl, same = sum(map(len, first)), 0.0, 0
    for ours, theirs in zip(first, second, strict=True):
        # KL(first || second) = sum over V of p (log p - log q): in float32 over V, in float64 over T.
        kl += (ours.exp() * (ours - theirs)).sum(dim=-1).sum(dtype=torch.float64).item()
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    return kl / num_tokens, same / num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Plan of a merge.

    Attributes:
        base: Base model of the adapter.
        adapter: Folder of the adapter.
        bits: Quantisation of the base during training.
        dtype: Dtype of the merged weights.
        attn_implementation: Attention implementation for the comparison.
    """

    base: ModelConfig
    adapter: Path
    bits: QuantizationConfig
    dtype: torch.dtype
    attn_implementation: str

    @property
    def trained_on(self) -> str:
        """Precision of the base during training."""
        return "4 bits" if self.bits.load_in_4bit else "8 bits" if self.bits.load_in_8bit else "full precision"

    @property
    def compared_on(self) -> str:
        """Precision of the base in the comparison: that of training, or full precision without bitsandbytes."""
        return self.trained_on if importlib.util.find_spec("bitsandbytes") else "full precision"


def plan_merge(base: ModelConfig, adapter: Path, bits: QuantizationConfig, dtype: str | None) -> Merge:
    """Plan a merge, without loading weights.

    Args:
        base: Base model of the adapter.
        adapter: Folder of the adapter.
        bits: Quantisation of the base during training.
        dtype: Dtype of the merged weights; ``None``: that of the base's checkpoint.

    Raises:
        ConfigError: The base cannot be found, or its weights are quantised.
    """
    config, _ = load_model_config(base)
    if any(check_quantization("", config, QuantizationConfig())):
        found = f"{base.model_name_or_path} holds quantised weights, into which nothing can be merged"
        raise ConfigError(Problem("--base", found, "name the model that it was made from"))
    kernel = choose_kernel(config, device=torch.device("cpu"))
    precision: Any = getattr(torch, dtype) if dtype else config.dtype or torch.float32
    return Merge(base=base, adapter=adapter, bits=bits, dtype=precision, attn_implementation=kernel.implementation)


def merge(plan: Merge, tokenizer: PreTrainedTokenizerBase, texts: Texts, folder: Path) -> dict[str, Any]:
    """Write the merged model into ``folder``, reload it, and return the comparison.

    Base and adapter are added in ``float32`` and rounded once. The merged model is compared with the adapter on its
    base as in training: quantised if it was, and if bitsandbytes is installed.

    Args:
        plan: Result of ``plan_merge``.
        tokenizer: Tokenizer to save with the model.
        texts: Texts for the comparison.
        folder: Folder to create.

    Returns:
        Content of ``merge.json``; ``mean_kl`` is KL(adapter on its base || merged model), in nats per token.

    Raises:
        ConfigError: Base or adapter cannot be loaded.

    Source: ``tests/publish/test_merging.py``.
    """
    as_trained = _compute_on_quantised_base(plan, texts) if plan.compared_on != "full precision" else None
    reference, kl_of_base = _merge_in_float32(plan, texts, folder, as_trained)
    tokenizer.save_pretrained(folder)
    merged = AutoModelForCausalLM.from_pretrained(folder)
    mean_kl, same_choice = compare(reference, compute_next_token_logps(merged, texts))
    return {
        "base": plan.base.model_name_or_path,
        "base_revision": plan.base.model_revision,
        "adapter": str(plan.adapter),
        "adapter_sha256": hash_file(plan.adapter / ADAPTER_WEIGHTS),
        "trained_on": plan.trained_on,
        "compared_on": plan.compared_on,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "num_texts": len(texts),
        "num_tokens": sum(map(len, reference)),
        "mean_kl": mean_kl,
        "same_choice": same_choice,
        "mean_kl_of_the_base": kl_of_base,
        "versions": find_versions(_PACKAGES),
    }


def _merge_in_float32(
    plan: Merge, texts: Texts, folder: Path, as_trained: list[Tensor] | None
) -> tuple[list[Tensor], float]:
    """Write the merged model; return the log-probabilities with the adapter, and their KL from the base alone.

    Without those on a quantised base, ``as_trained``, they are computed here.
    """
    # ``on_any_base``: the user's ``--base`` may have another name than the one that the adapter records.
    model = load_adapter(load_causal_lm(plan.base, plan.attn_implementation), str(plan.adapter), on_any_base=True)
    reference = list(compute_next_token_logps(model, texts)) if as_trained is None else as_trained
    # Before merging, which changes the weights of the base in place.
    with adapters_off(model):
        kl_of_base, _ = compare(reference, compute_next_token_logps(model, texts))
    # `safe_merge`: PEFT raises on non-finite sums before it changes the weights.
    merged = model.merge_and_unload(safe_merge=True).to(plan.dtype)
    # As in ``export_model``, for fast generation.
    merged.config.use_cache = True
    if (plan.adapter / "generation_config.json").exists():
        merged.generation_config = GenerationConfig.from_pretrained(plan.adapter)
    merged.save_pretrained(folder)
    return reference, kl_of_base


def _compute_on_quantised_base(plan: Merge, texts: Texts) -> list[Tensor]:
    """Return the log-probabilities of the adapter on its quantised base, as in training."""
    quantization = build_quantization_config(plan.bits, torch.float32, "")
    base = load_causal_lm(plan.base, plan.attn_implementation, quantization)
    return list(compute_next_token_logps(load_adapter(base, str(plan.adapter), on_any_base=True), texts))
