"""The demo's starting points: a byte-level BPE tokenizer trained on the texts, and a small student's random weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes_lib.models.tokenizer_training import CHATML_TEMPLATE, CHATML_TOKENS, train_tokenizer

VOCAB_SIZE = 2048
MAX_POSITIONS = 512


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 2048 tokens that can spell every text, with ChatML as its chat template."""
    tokenizer = train_tokenizer(
        texts, vocab_size=VOCAB_SIZE, special_tokens=CHATML_TOKENS, chat_template=CHATML_TEMPLATE
    )
    tokenizer.model_max_length = MAX_POSITIONS
    return tokenizer


def save_tokenizer(folder: Path, texts: Iterable[str]) -> int:
    """Write the tokenizer; return the size of its vocabulary."""
    tokenizer = build_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def save_student(folder: Path, tokenizer_dir: Path, seed: int) -> int:
    """Write a random Llama with a quarter of the pretrained model's weights, and the tokenizer; return how many."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())
