"""Long texts in windows: the tokens, and the places of the loss mask, are those of one call, for every tokenizer."""

from __future__ import annotations

import random
from functools import cache
from itertools import chain
from typing import Any

import pytest
from tests import tiny
from tests.data.chat_cases import answer, chat, plain, refusal, shrink_windows, source, text_row, user
from tests.data.templates.tokenizers import build_byte_level, build_lossy, build_metaspace
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.windows import encode_in_windows
from recipes_lib.models.vocabulary import train_tokenizer

TRAINING = [
    *tiny.CORPUS,
    "你好，世界。这是一个测试，没有空格的文字。",
    "العالم שלום мир",
    "1 22 333 4444 12345",
    "x\r\ny\n\n  z",
]


def _train_unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<unk>", "<mask>"], show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def _train_word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "<mask>"], show_progress=False)
    tokenizer.train_from_iterator(TRAINING, trainer)
    return tokenizer


def _train_without_words() -> Tokenizer:
    """Train a BPE as that of Llama 2 and Gemma: the whole text is one word, with a prefix."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        TRAINING, trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    return tokenizer


def _train_byte_level() -> Tokenizer:
    tokenizer: Tokenizer = train_tokenizer(TRAINING, vocab_size=500, special_tokens=["<mask>"]).backend_tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), pre_tokenizers.ByteLevel()]
    )
    return tokenizer


BUILDERS = {
    "byte_level": lambda: build_byte_level("", extra=("<mask>",)).backend_tokenizer,
    "gpt4": lambda: train_tokenizer(TRAINING, vocab_size=500, special_tokens=["<mask>"]).backend_tokenizer,
    "prefix_space": _train_byte_level,
    "lossy": lambda: build_lossy("").backend_tokenizer,
    "metaspace": lambda: build_metaspace("").backend_tokenizer,
    "without_words": _train_without_words,
    "unigram": _train_unigram,
    # `rr r` and `r rr` have equal scores.
    "ties": lambda: Tokenizer(models.Unigram([("?", -9.0), ("s", -4.5678), ("r", -5.1234), ("rr", -7.3456)], 0)),
    "word_piece": _train_word_piece,
}
PARTS = {
    "english": [" the", " Rivers", " carry", " a", " seven", ", and", "\n", " France", " it's"],
    "crlf": ["value\r\n", "\r\n\r\n", "Return it", "\t", "  ", "\n \n", "end.\r\n"],
    "letters": list("abcdehrst"),
    "ties": ["rrr", "s"],
    "digits": list("0123456789"),
    "ones": ["1"],
    "cjk": list("你好世界这是一个测试没有空格的文字，。"),
    "emoji": ["😀", "👨\u200d👩\u200d👧", "e\u0301", "\u0301", "🏽", "é", " "],
    "special": ["<mask>", " <mask>", " the", "   ", "<mas", "k>", "x"],
    "spaces": [" " * 300, "\n" * 100, "x", " " * 700],
    "mixed": [" the", "12", "345", "你", "😀", "\r\n", "<mask>", "'s", "AB", "   ", "é", "\u0301", "'", "_"],
}


@cache
def _build(name: str) -> Tokenizer:
    return BUILDERS[name]()


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("name", BUILDERS)
def test_tokens_in_windows_are_those_of_the_whole_text(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_windows(monkeypatch, 512)
    tokenizer, rng = _build(name), random.Random(kind)
    text = ""
    while len(text) < 3000:
        text += rng.choice(PARTS[kind])
    whole = tokenizer.encode(text, add_special_tokens=False)
    pieces = list(encode_in_windows(tokenizer, text))

    ids = [piece.encoding.ids[piece.first : piece.last] for piece in pieces]
    offsets = [
        (start + piece.start, end + piece.start)
        for piece in pieces
        for start, end in piece.encoding.offsets[piece.first : piece.last]
    ]
    assert list(chain(*ids)) == whole.ids
    assert offsets == whole.offsets
    # Unigram models and WordPiece need whole words, which are as long as the text where it has no spaces.
    if name not in ("unigram", "ties", "word_piece"):
        assert max(len(piece.text) for piece in pieces) <= 1024


ROWS = [
    text_row("The baker weighs flour. " * 90),
    plain("Who weighs it? " * 50, " The baker, " * 70),
    chat(user("hello \U0001f600 " * 60), answer("12345 " * 80), user("again?"), answer("é" * 600), answer("end")),
    chat(user("short"), answer("short")),
]


@pytest.mark.parametrize("build", [build_byte_level, build_metaspace, build_lossy])
def test_long_rows_have_the_loss_mask_of_the_whole_text(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row_encoder = RowEncoder(build(source("chatml")))
    whole = row_encoder.encode(ROWS)
    shrink_windows(monkeypatch, 128)
    for row, expected in zip(row_encoder.encode(ROWS), whole, strict=True):
        assert row.input_ids.tolist() == expected.input_ids.tolist()
        assert row.loss_mask.tolist() == expected.loss_mask.tolist()
    # A token on both sides of a boundary is an error of its row, in whatever window.
    assert "only one of them is trained on" in refusal(row_encoder, plain("user " * 90, "assistant " * 90))
