"""The demo's starting point: a byte-level BPE tokenizer trained on the texts, and a small Llama of random weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama of about 2 million random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        initializer_range=0.05,  # wider than for large models: a narrow one costs a tenth of the training
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def save_start(folder: Path, texts: Iterable[str], seed: int) -> int:
    """Write tokenizer and model as one checkpoint that any recipe can start from; return the number of weights."""
    tokenizer = build_tokenizer(texts)
    model = build_model(tokenizer, seed)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return model.num_parameters()
