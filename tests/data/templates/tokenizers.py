"""Byte-level, SentencePiece-like and lossy tokenizers for the tests of the loss mask, trained on a tiny corpus."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from recipes_lib.models.vocabulary import PIECES

CORPUS = [
    "User: What is the capital of France? Assistant: The capital of France is Paris.",
    "system user assistant model tool function hello there, again and again: final answer, good morning.",
    "The weather in Paris is sunny; I think that it will rain tomorrow. <think> </think> {'city': 'Paris'}",
    # Vocabularies of models have a token for two line breaks.
    "user\n\nassistant\n\n",
]
SPECIAL = re.compile(
    r"<\|[\w▁ ]+\|>|<\|\w+>|<\w+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_\w+>|\[gMASK\]|<sop>|\[/?INST\]|</?s>|<bos>|<eos>"
)


@cache
def build_byte_level(
    template: str, *, bos: str | None = "<s>", eos: str = "</s>", pad: str = "<pad>", extra: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE whose special tokens are the control literals of ``template``; treat it as read-only."""
    special = sorted({*SPECIAL.findall(template), *extra, eos, pad, *([bos] if bos else [])})
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400 + len(special), special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(tokenizer, template, special, bos=bos, eos=eos, pad=pad)


def wrap(
    tokenizer: Tokenizer,
    template: str | None,
    special: Sequence[str | AddedToken] = (),
    *,
    bos: str | None = "<s>",
    eos: str = "</s>",
    pad: str = "<pad>",
) -> PreTrainedTokenizerFast:
    """Return the tokenizer as a ``PreTrainedTokenizerFast``."""
    extra = [token for token in special if str(token) not in (bos, eos, pad)]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, extra_special_tokens=extra
    )
    fast.chat_template = template
    return fast


@cache
def build_metaspace(template: str | None, *, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """Return a SentencePiece-like BPE: spaces are parts of words, unknown characters become bytes."""
    special = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=[chr(code) for code in range(33, 127)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return wrap(tokenizer, template, special[4:])


def build_lossy(template: str) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE after NFC and lower-casing, whose decoded text differs from the input."""
    fast = build_byte_level.__wrapped__(template)
    fast.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    return fast
