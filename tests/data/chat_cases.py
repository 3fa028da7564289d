"""Rows, templates and helpers shared by the tests of the loss mask."""

from __future__ import annotations

import datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.data.templates.tokenizers import build_byte_level
from transformers import PreTrainedTokenizerFast

from recipes_lib.config.schema import LossOn
from recipes_lib.config.tokenization import TEMPLATE_DATE
from recipes_lib.data import windows
from recipes_lib.data.chat import encoder
from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.sources.rows import EncodedRow, Row
from recipes_lib.errors import DataError

FOLDER = Path(__file__).parent / "templates"
CHATML_ENDS = ("<|im_start|>", "<|im_end|>")
MARKED = ["chatml", "index_loop", "macros", "marked", "no_prompt", "thinking"]


class FixedClock(datetime.datetime):
    """``datetime`` whose ``now`` is ``TEMPLATE_DATE``, the date that our templates write."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> FixedClock:
        return cls(TEMPLATE_DATE.year, TEMPLATE_DATE.month, TEMPLATE_DATE.day, tzinfo=tz)


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def chat(*messages: dict[str, Any], **options: Any) -> Row:
    return Row(where="train.jsonl:17", messages=messages, **options)


def plain(prompt: str, completion: str) -> Row:
    return Row(where="train.jsonl:17", prompt=prompt, completion=completion)


def text_row(text: str) -> Row:
    return Row(where="train.jsonl:17", text=text)


def runs(mask: npt.ArrayLike) -> list[tuple[int, int]]:
    """Return start and end of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask, dtype=int), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def spans(tokenizer: PreTrainedTokenizerFast, row: EncodedRow) -> list[str]:
    """Return the decoded text of each run of trained tokens."""
    return [tokenizer.decode(row.input_ids[start:end]) for start, end in runs(row.loss_mask)]


def shrink_windows(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Tokenise texts longer than ``size`` characters in windows."""
    for module in (encoder, windows):
        monkeypatch.setattr(module, "WINDOW", size)
    monkeypatch.setattr(windows, "_OVERLAP", size // 4)


@cache
def build_encoder(name: str, loss_on: LossOn | None = None) -> tuple[RowEncoder, PreTrainedTokenizerFast]:
    """Return the encoder and the byte-level tokenizer of a template; treat them as read-only."""
    tokenizer = build_byte_level(source(name), extra=CHATML_ENDS)
    return RowEncoder(tokenizer, loss_on=loss_on), tokenizer


def trained(name: str, *messages: dict[str, Any], loss_on: LossOn | None = None, **options: Any) -> list[str]:
    encoder, tokenizer = build_encoder(name, loss_on)
    (row,) = encoder.encode([chat(*messages, **options)])
    return spans(tokenizer, row)


def refusal(encoder: RowEncoder, row: Row) -> str:
    with pytest.raises(DataError) as refused:
        encoder.encode([row])
    assert all(problem.where == "train.jsonl:17" for problem in refused.value.problems)
    return str(refused.value)
