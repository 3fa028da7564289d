"""Bytes and character offsets of tokens, against the text and the offsets of ``tokenizers``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from recipes_lib.data.chat.encoder import ByteEnds, MergedTokenError, compute_token_byte_lengths, count_tokens_before

# Without "▁", which SentencePiece decodes as a space.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=60)
WORDS = ["the quick brown fox", "naïve café", "rivers and 山 and 🦊", "def f(x): return x"] * 4


def build_metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Return a SentencePiece-style BPE with byte fallback, as in Llama 2 and Gemma."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(WORDS, trainer)
    vocabulary = {token: index for index, token in enumerate([*tokenizer.get_vocab(), *raw_bytes])}
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    tokenizer.model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@settings(max_examples=60)
@given(text=TEXTS)
def test_byte_level_token_bytes_sum_to_text(tiny_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    lengths = compute_token_byte_lengths(tiny_tokenizer)
    ids = tiny_tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    assert lengths is not None
    assert int(lengths[ids].sum()) == len(tiny_tokenizer.decode(ids).encode()) == len(text.encode())


def test_token_bytes_sum_to_text_with_sparse_ids(sparse_tokenizer: PreTrainedTokenizerFast) -> None:
    last = sparse_tokenizer.convert_ids_to_tokens(max(sparse_tokenizer.get_vocab().values()))
    text = sparse_tokenizer.convert_tokens_to_string([last, "a"])
    ids = sparse_tokenizer.encode(text, add_special_tokens=False)
    lengths = compute_token_byte_lengths(sparse_tokenizer)

    assert lengths is not None
    assert max(ids) >= len(sparse_tokenizer)
    assert int(lengths[ids].sum()) == len(text.encode())
    assert np.count_nonzero(lengths) == len(sparse_tokenizer)


METASPACE = build_metaspace_tokenizer()


@settings(max_examples=60)
@given(text=TEXTS)
def test_metaspace_token_bytes_sum_to_text_and_prefix_space(text: str) -> None:
    lengths = compute_token_byte_lengths(METASPACE)
    ids = METASPACE.encode("x" + text, add_special_tokens=False)

    assert lengths is not None
    assert int(lengths[ids].sum()) == 1 + len(METASPACE.decode(ids).encode()) == 2 + len(text.encode())


def test_added_tokens_have_bytes_of_their_text() -> None:
    tokenizer = build_metaspace_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("<turn>", special=True)])
    lengths = compute_token_byte_lengths(tokenizer)

    assert lengths is not None
    assert lengths[tokenizer.convert_tokens_to_ids(["<s>", "</s>", "<turn>", "<tool>"])].tolist() == [3, 4, 6, 6]
    assert lengths.shape == (len(tokenizer),)


@settings(max_examples=50)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
def test_offsets_from_lengths_equal_tokenizer_offsets(tiny_tokenizer, texts) -> None:
    texts = [f"<|im_start|>{text}<|im_end|>" for text in texts]
    encodings = tiny_tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    ids = [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
    byte_ends = ByteEnds(tiny_tokenizer)

    offsets: list[list[int]] = []
    known: list[list[int]] = []
    for text, encoding in zip(texts, encodings, strict=True):
        offsets.append([])
        known.append([])
        for at in range(len(text) + 1):
            try:
                count = count_tokens_before(encoding, text, at, set())
            except MergedTokenError:
                places = [[at] if other is text else [] for other in texts]
                assert None in byte_ends.cut(ids, texts, places)
            else:
                offsets[-1].append(at)
                known[-1].append(count)
    assert byte_ends.cut(ids, texts, offsets) == known


def test_tokens_of_partial_text_have_no_offsets(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = np.array(tiny_tokenizer.encode("some text", add_special_tokens=False), dtype=np.uint32)
    byte_ends = ByteEnds(tiny_tokenizer)

    texts = ["some text", "some text", "", "some text!"]
    cuts = byte_ends.cut([ids, ids[:-1], ids[:0], ids], texts, [[0, 9], [0], [0], [0]])
    assert cuts == [[0, len(ids)], None, [0], None]
    assert byte_ends.cut([], [], []) == []


def test_only_lossless_tokenizers_have_token_bytes(tiny_tokenizer_dir: Path) -> None:
    plain, lossy, swallowing = (PreTrainedTokenizerFast.from_pretrained(tiny_tokenizer_dir) for _ in range(3))
    plain.add_tokens(["\u8bf7"])
    lossy.backend_tokenizer.normalizer = normalizers.Lowercase()
    swallowing.add_tokens([AddedToken("<turn>", special=True, rstrip=True)])

    assert ByteEnds.suits(plain)
    assert compute_token_byte_lengths(plain)[plain.convert_tokens_to_ids("\u8bf7")] == 3
    assert not ByteEnds.suits(lossy)
    assert not ByteEnds.suits(swallowing)
    assert not ByteEnds.suits(METASPACE)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), None])
def test_lossy_tokenizer_has_no_lengths(decoder: object) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        tokenizer.decoder = decoder

    assert compute_token_byte_lengths(PreTrainedTokenizerFast(tokenizer_object=tokenizer)) is None
