"""Small models of several architectures, and a short training loop."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
EXPERTS: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama-biased": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=2)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(**SHAPE, **EXPERTS)),
    "mamba": lambda: MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4)),
}


def build(name: str) -> Any:
    """Build one of ``MODELS``, with the same weights in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name]()


def compute_loss(model: Any) -> torch.Tensor:
    """Return the loss of a fixed batch."""
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def take_steps(model: Any, optimizer: Any, num_steps: int = 4) -> tuple[float, float]:
    """Train on the fixed batch; return the first and the last loss."""
    losses = []
    for _ in range(num_steps):
        loss = compute_loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1]
