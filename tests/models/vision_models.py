"""Tiny vision-language model for tests of text-only training."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3Config

OUTSIDE = ("model.vision_tower.", "model.multi_modal_projector.")


def build_gemma3(
    auto_class: Any = AutoModelForCausalLM, vocab_size: int = 512, vision_layers: int = 1, **changes: Any
) -> Any:
    """A random Gemma 3 of two layers, with a vision tower whose layers have the names of those of the text."""
    text = {"vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 64}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": vision_layers, "num_attention_heads": 2}
    ids = {"image_token_index": 509, "boi_token_index": 510, "eoi_token_index": 511}
    config = Gemma3Config(
        text_config={**text, **heads, "query_pre_attn_scalar": 16},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        **ids,
        **changes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return auto_class.from_config(config)
