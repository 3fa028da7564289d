"""Templates, tokenizers and rows whose loss mask cannot be derived: errors that name row and remedy."""

from __future__ import annotations

import pytest
from tests.data.chat_cases import CHATML_ENDS, answer, chat, plain, refusal, source, spans, text_row, user
from tests.data.templates.tokenizers import build_byte_level, build_lossy, build_metaspace, wrap
from tokenizers import AddedToken, Tokenizer, decoders, models

from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.sources.rows import Row
from recipes_lib.errors import ConfigError, DataError


def test_token_across_prompt_and_completion_is_error() -> None:
    pairs = ("The capital of France is ", "Paris"), ("The capital of ", "France is Paris")
    messages = {refusal(RowEncoder(build_byte_level("")), plain(*pair)) for pair in pairs}
    (message,) = messages  # One for all rows, whose problems are then one line.
    assert "one token holds the end of the prompt and the start of the answer" in message
    assert "let the answer begin with the space or line break between them" in message


CHATML = source("chatml")
HI = chat(user("hi"), answer("Paris"))


@pytest.mark.parametrize(
    ("template", "row", "found"),
    [
        (source("spaced_prompt"), HI, ["one token holds ' '", "let the template end its prompt"]),
        (source("leaking"), chat(user("why"), answer("so")), ["writes message 0 into the text of an assistant turn"]),
        (
            CHATML.replace("message['content']", "(message['content'] if message.role == 'user' else '')"),
            HI,
            ["the answer of message 1 ('Paris') is not in the text that would be trained on"],
        ),
        (
            CHATML,
            chat(user("hi"), answer("", tool_calls=[{"function": {"name": "im", "arguments": {}}}])),
            ["message 1 calls 'im', but the chat template does not write that"],
        ),
        (
            "{% set all %}" + CHATML + "{% endset %}{{ all }}",
            HI,
            ["does not loop over the messages", "{% generation %}"],
        ),
        (
            source("marked").replace("{{ message.content + '<|im_end|>' }}", "{{ message.content }}"),
            HI,
            ["does not end in a special token"],
        ),
    ],
    ids=["shared token", "leaking", "no answer", "no call", "no authors", "no end"],
)
def test_unmaskable_template_is_error(template: str, row: Row, found: list[str]) -> None:
    message = refusal(RowEncoder(build_byte_level(template, extra=CHATML_ENDS)), row)
    assert all(words in message for words in found)


def test_turn_without_terminator_is_error_fixed_by_eos_token() -> None:
    tokenizer = build_byte_level(source("unterminated"), extra=("<|user|>", "<|assistant|>"))
    row = chat(user("a"), answer("b"), user("c"), answer("d"))
    assert "message 1 ends in no special token, so the model would never learn to stop" in refusal(
        RowEncoder(tokenizer), row
    )
    (encoded,) = RowEncoder(tokenizer, eos_token="<|user|>").encode([row])
    assert spans(tokenizer, encoded) == ["b\n<|user|>", "d\n<|user|>"]


def test_lone_surrogate_is_row_error() -> None:
    encoder = RowEncoder(build_byte_level(source("chatml")))
    assert "U+D83D is half of a surrogate pair" in refusal(encoder, chat(user("hi"), answer("\ud83d")))
    assert "U+D83D is half of a surrogate pair" in refusal(encoder, text_row("\ud83d"))


def test_encoder_reports_every_bad_row() -> None:
    encoder = RowEncoder(build_byte_level(source("spaced_prompt")))
    rows = [
        Row(where="s row 0", messages=[user("hi"), answer("Paris")]),
        Row(where="s row 1", text="fine"),
        Row(where="s row 2", text="\ud83d"),
        Row(where="s row 3", messages=[user("hi"), {"role": "assistant"}]),
    ]
    with pytest.raises(DataError) as refused:
        encoder.encode(rows)
    assert {problem.where for problem in refused.value.problems} == {"s row 0", "s row 2", "s row 3"}


def test_text_that_tokenizer_cannot_decode_is_error() -> None:
    vocabulary = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3, "<pad>": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    fast = wrap(tokenizer, None, bos=None)
    (row,) = RowEncoder(fast).encode([plain("?", "ab")])
    assert row.input_ids.tolist() == [0, 2, 3, 1]
    assert "decoded 'a<unk>', expected 'a?'" in refusal(RowEncoder(fast), plain("b", "a?"))


def test_lossy_normalizer_is_accepted_but_not_other_text() -> None:
    tokenizer = build_lossy(source("chatml"))
    (row,) = RowEncoder(tokenizer).encode([chat(user("HI"), answer("Caf\u00e9 CAFE\u0301"))])
    assert spans(tokenizer, row) == ["caf\u00e9 caf\u00e9<|im_end|>"]


@pytest.mark.parametrize("name", ["chatml", "marked", "index_loop"])
def test_sentencepiece_like_tokenizer_trains_answer(name: str) -> None:
    tokenizer = build_metaspace(source(name))
    for content in ("Paris is", " Paris", "\u4f60\u597d", "\U0001f600", "a\nb"):
        (row,) = RowEncoder(tokenizer).encode([chat(user("The capital?"), answer(content))])
        assert spans(tokenizer, row)[0].strip() == (content + "<|im_end|>").strip()


def test_whitespace_stripped_by_special_token_is_no_merge() -> None:
    """Phi-3 declares its turn tokens with ``rstrip``, so that they include the line break after them."""
    template = source("chatml")
    base = build_byte_level.__wrapped__(template, extra=CHATML_ENDS).backend_tokenizer
    swallowing = [AddedToken(token, rstrip=True, special=True) for token in CHATML_ENDS]
    base.add_special_tokens(swallowing)
    tokenizer = wrap(base, template.replace("assistant\\n", "assistant<|im_end|>\\n"), swallowing)
    template = source("chatml").replace("message['role'] + '\\n'", "message['role'] + '<|im_start|>\\n'")
    tokenizer.chat_template = template.replace("assistant\\n", "assistant<|im_start|>\\n")
    (row,) = RowEncoder(tokenizer).encode([chat(user("hi"), answer("  Paris"), user("x"), answer("b"))])
    assert spans(tokenizer, row) == ["Paris<|im_end|>", "b<|im_end|>"]


def test_tokenizer_without_template_is_config_error() -> None:
    with pytest.raises(ConfigError, match="chat_template_path: the tokenizer has no chat template"):
        RowEncoder(build_metaspace(None)).encode([chat(user("a"), answer("b"))])


def test_template_syntax_error_is_config_error() -> None:
    encoder = RowEncoder(build_byte_level(""), chat_template="{% for %}")
    with pytest.raises(ConfigError, match="chat_template_path: the chat template does not compile: line 1"):
        encoder.encode([chat(user("a"), answer("b"))])
