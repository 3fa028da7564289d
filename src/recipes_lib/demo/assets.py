"""The demo's starting point: a byte-level BPE tokenizer trained on the texts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerFast

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
