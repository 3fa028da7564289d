"""Tiny models on disk and a few SGD steps, for tests of adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests import tiny
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.models.adapters.lora import add_adapter

SHAPE = tiny.sizes(16, 2, 2, vocab_size=64, num_key_value_heads=1, bos_token_id=1, eos_token_id=2)
INPUT_IDS = torch.arange(3, 35)[None]


def build_model(kind: str) -> PreTrainedModel:
    """A random ``llama``, ``tied`` (embeddings) Llama or ``gpt2``, whose logits are far from uniform."""
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=kind == "tied"))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def save_model(kind: str, folder: Path) -> Path:
    """Save the model of ``build_model`` and return its folder."""
    build_model(kind).save_pretrained(folder / kind)
    return folder / kind


def load_model(folder: Path, **options: Any) -> Any:
    """Load a saved model with plain transformers, in evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def adapt(model: PreTrainedModel) -> Any:
    """Add low-rank matrices that change the model's outputs."""
    adapted = add_adapter(model, AdapterConfig(use_peft=True, lora_r=4), seed=0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    return adapted.eval()


def compute_logits(model: Any) -> torch.Tensor:
    """Logits of a few tokens, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return model(input_ids=INPUT_IDS).logits.float()


def train(model: Any, num_steps: int = 3) -> None:
    """Take large steps of SGD."""
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for _ in range(num_steps):
        model(input_ids=INPUT_IDS, labels=INPUT_IDS).loss.backward()
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 0.3 * parameter.grad
                parameter.grad = None


def build_deep_model(dtype: torch.dtype, *, num_layers: int = 32, vocab_size: int = 64) -> PreTrainedModel:
    """Return a Llama in 16 bits whose rounding errors are as large as those of a width of 4,096."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": num_layers}
    torch.manual_seed(0)
    # 0.02 * sqrt(4096 / 64), so that products have the same standard deviation.
    config = LlamaConfig(vocab_size=vocab_size, initializer_range=0.16, **sizes)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()
