"""Trained byte-level BPE tokenizers: lossless, special tokens whole, reproducible."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from recipes_lib.data.chat.encoder import ByteEnds
from recipes_lib.files import count_bytes
from recipes_lib.models.vocabulary import (
    CHATML_TEMPLATE,
    CHATML_TOKENS,
    EOS_TOKEN,
    NUM_BYTES,
    PAD_TOKEN,
    measure_usage,
    train_tokenizer,
)

SPECIALS = (EOS_TOKEN, PAD_TOKEN, *CHATML_TOKENS)
TEXTS = [
    f"def function_{n}(argument):\n    return argument + {n * 7919}  # it's the {n}th; {n} of 2,048\n\n\n" * 2
    for n in range(200)
]
OPTIONS = {"vocab_size": 700, "special_tokens": CHATML_TOKENS, "chat_template": CHATML_TEMPLATE}
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(iter(TEXTS), **OPTIONS)


@pytest.fixture(scope="module")
def reloaded(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trained.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def list_merged_texts(tokenizer) -> list[str]:
    """The text of every token that is neither special nor a single byte."""
    ids = range(len(SPECIALS) + NUM_BYTES, len(tokenizer))
    return [tokenizer.decode([index]) for index in ids]


@given(text=st.one_of(ANY_TEXT, st.lists(st.one_of(st.sampled_from(SPECIALS), ANY_TEXT)).map("".join)))
def test_encoding_is_lossless(reloaded, text):
    assert reloaded.decode(reloaded.encode(text)) == text
    assert reloaded.decode(reloaded.encode(text, split_special_tokens=True)) == text


@given(text=ANY_TEXT)
def test_measured_usage_counts_bytes_and_tokens(reloaded, text):
    usage = measure_usage(reloaded, [text, text])
    assert usage.num_bytes == 2 * len(text.encode()) == 2 * count_bytes(text)
    assert usage.counts.sum() == 2 * len(reloaded.encode(text))


def test_unseen_text_has_at_most_one_token_per_byte(reloaded):
    text = "".join(map(chr, (*range(1, 0xD800, 97), *range(0xE000, 0x110000, 9973))))
    assert len(reloaded.encode(text, split_special_tokens=True)) <= len(text.encode())


def test_saved_tokenizer_is_fast_with_special_tokens(reloaded):
    assert reloaded.is_fast
    assert reloaded.convert_tokens_to_ids(list(SPECIALS)) == [0, 1, 2, 3]
    assert (reloaded.eos_token, reloaded.pad_token) == (EOS_TOKEN, PAD_TOKEN)
    assert set(reloaded.all_special_tokens) == set(SPECIALS)
    assert len(reloaded) == reloaded.vocab_size == OPTIONS["vocab_size"]
    # Encoding of chats then uses byte lengths, which is faster than character offsets.
    assert ByteEnds.suits(reloaded)


def test_chat_template_marks_assistant_tokens(reloaded):
    chat = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "Seven."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
    encoded = reloaded.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    assert reloaded.decode([index for index, mask in pairs if mask]) == "Seven.<|im_end|>Yes.<|im_end|>"
    prompt = reloaded.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert reloaded.apply_chat_template(chat[:2], tokenize=False) == prompt + "Seven.<|im_end|>\n"


def test_no_merge_contains_part_of_special_token():
    texts = [f"stop{EOS_TOKEN}go<|im_start|>user{PAD_TOKEN}{PAD_TOKEN}"] * 50
    tokenizer = train_tokenizer(texts, vocab_size=400, special_tokens=CHATML_TOKENS)
    found = list_merged_texts(tokenizer)
    assert {"stop", "go", "user"} <= set(found)
    assert [text for text in found if re.search(r"[<|>_]|end|pad|im", text)] == []
    ids = tokenizer.encode(texts[0])
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "stop",
        EOS_TOKEN,
        "go",
        "<|im_start|>",
        "user",
        PAD_TOKEN,
        PAD_TOKEN,
    ]


def test_special_token_with_shared_prefix_is_kept_whole():
    tokenizer = train_tokenizer(["ab<x>cd<x>yes"] * 9, vocab_size=300, special_tokens=["<x>", "<x>yes"])
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab<x>cd<x>yes")) == ["ab", "<x>", "cd", "<x>yes"]
    assert not any("y" in text for text in list_merged_texts(tokenizer))


def test_training_is_independent_of_text_order(trained, tmp_path):
    shuffled = random.Random(1).sample(TEXTS, len(TEXTS))
    for name, tokenizer in (("one", trained), ("two", train_tokenizer(shuffled, **OPTIONS))):
        tokenizer.save_pretrained(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("1234567", ["123", "456", "7"]),
        ("it's IT'S", ["it", "'s", " IT", "'S"]),
        ("a  b", ["a", " ", " b"]),
        ('f("x");\n    y', ["f", '("', "x", '");\n', "   ", " y"]),
        ("a\n\n\tb", ["a", "\n\n", "\tb"]),
    ],
)
def test_merges_do_not_cross_pretokenizer_boundaries(text, pieces):
    # 99 repetitions: every piece becomes one token, and so would longer ones across a boundary.
    tokenizer = train_tokenizer([text] * 99, vocab_size=2000)
    assert [tokenizer.decode([index]) for index in tokenizer.encode(text)] == pieces


def test_pair_that_occurs_once_is_not_merged():
    assert len(train_tokenizer(["xyz"], vocab_size=1000)) == NUM_BYTES + 2
    assert "xyz" in list_merged_texts(train_tokenizer(["xyz", "xyz"], vocab_size=1000, special_tokens=CHATML_TOKENS))


def test_tokenizer_without_texts_has_byte_tokens():
    tokenizer = train_tokenizer([], vocab_size=0)
    assert len(tokenizer) == NUM_BYTES + 2
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界")) == "Grüße, 世界"


def test_texts_are_streamed():
    class Counter:
        alive = most = 0

    class Text(str):
        __slots__ = ()

        def __del__(self):
            Counter.alive -= 1

    def read():
        for text in TEXTS * 10:
            Counter.alive += 1
            Counter.most = max(Counter.most, Counter.alive)
            yield Text(text)

    train_tokenizer(read(), vocab_size=400)
    assert Counter.most < len(TEXTS)


def test_usage_in_bytes_and_error_of_text_iterator(trained):
    usage = measure_usage(trained, ["return argument", "é"])
    assert usage.num_bytes == len("return argument") + 2
    assert usage.bytes_per_token == usage.num_bytes / usage.counts.sum() > 1
    assert measure_usage(trained, []).bytes_per_token == 0

    def broken():
        yield "text"
        raise KeyError("row 2")

    with pytest.raises(KeyError, match="row 2"):
        train_tokenizer(broken(), vocab_size=300)


def test_piece_longer_than_a_word_is_split_in_training_only() -> None:
    """Training time is quadratic in the length of a piece, which base64 or a sequence of DNA makes a megabyte."""
    tokenizer = train_tokenizer([f"{'a' * 999}xy{'a' * 999} "] * 2, vocab_size=300)
    assert not [token for token in tokenizer.get_vocab() if "xy" in token]
    pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
    assert pre_tokenizer is not None
    assert len(pre_tokenizer.pre_tokenize_str("a" * 3000)) == 1
