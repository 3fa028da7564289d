"""How many bytes of text each token stands for: what turns nats per token into bits per byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

_RAW_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_METASPACE = "\u2581"


def compute_token_byte_lengths(tokenizer: PreTrainedTokenizerBase) -> Tensor | None:
    """Bytes of UTF-8 that each id decodes to, ``int64 (V,)``; special tokens are 0.

    The lengths of a text's tokens add up to the length of the text, whatever the tokens cut through. In
    SentencePiece-style vocabularies the space in front of the first word counts, although decoding drops it.

    Returns:
        ``None`` for a tokenizer that does not keep its text (WordPiece), or that has no fast implementation.

    Source: the decoders of the ``tokenizers`` library; ``tests/training/hooks/test_token_bytes.py``.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    decoders = set(_iterate_types(json.loads(backend.to_str())["decoder"]))
    if "ByteLevel" not in decoders and not decoders & {"ByteFallback", "Metaspace"}:
        return None
    lengths = torch.zeros(len(tokenizer), dtype=torch.int64)
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = len(token) if "ByteLevel" in decoders else _count_bytes(token)
    special = set(tokenizer.all_special_ids)
    for index, added in tokenizer.added_tokens_decoder.items():
        # Added tokens bypass the decoder: they stand for their own text.
        lengths[index] = 0 if added.special or index in special else len(added.content.encode())
    lengths[list(special)] = 0
    return lengths


def _count_bytes(token: str) -> int:
    return 1 if _RAW_BYTE.fullmatch(token) else len(token.replace(_METASPACE, " ").encode())


def _iterate_types(decoder: Any) -> Iterator[str]:
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _iterate_types(part)
