"""Fixtures for data preparation: rows, tokenizer loader and configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests import rows as rows_module

from recipes_lib.config.schema import SECTIONS, RecipeConfig
from recipes_lib.data import workers
from recipes_lib.data.chat.encoder import RowEncoder

WriteRows = Callable[..., Path]
BuildConfig = Callable[..., RecipeConfig]

WORDS = ["the", "baker", "opens", "a", "shop", "near", "rivers", "and", "weighs", "flour", "while", "snow", "covers"]


def _make_chats(num_rows: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"Question {number}: {' '.join(WORDS[: number % 7])}?"},
                {"role": "assistant", "content": f"Answer {number}. {' '.join(WORDS[: 3 * number % 13])}"},
            ]
        }
        for number in range(start, start + num_rows)
    ]


@pytest.fixture
def make_chats() -> Callable[..., list[dict[str, Any]]]:
    """Return ``make_chats(num_rows, start=0)``, which makes distinct chats of different lengths."""
    return _make_chats


@pytest.fixture
def load_tokenizer(tiny_tokenizer: Any) -> Any:
    """Loader of the tiny tokenizer that counts its calls."""

    def load() -> Any:
        load.calls += 1  # type: ignore[attr-defined]
        return tiny_tokenizer

    load.calls = 0  # type: ignore[attr-defined]
    return load


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode in this process unless a test names a number of workers: forking this process takes longer."""
    monkeypatch.setattr(workers, "MAX_DEFAULT", 1)


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of rows that each call of an encoder tokenises."""
    counts: list[int] = []
    tokenize = RowEncoder._tokenize

    def count(self: RowEncoder, drafts: Sequence[Any]) -> Any:
        counts.append(len(drafts))
        return tokenize(self, drafts)

    monkeypatch.setattr(RowEncoder, "_tokenize", count)
    return counts


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """Write rows, by default 40 chats, as JSON Lines, and return the file."""

    def write(name: str = "train.jsonl", rows: Sequence[Mapping[str, Any]] | None = None) -> Path:
        return rows_module.write_rows(tmp_path / name, _make_chats(40) if rows is None else rows, ensure_ascii=True)

    return write


@pytest.fixture
def build_config(tmp_path: Path, tiny_tokenizer_dir: Path, write_rows: WriteRows) -> BuildConfig:
    """Build a configuration, by default over ``train.jsonl``, with the given options and seed."""

    def build(*, seed: int = 0, recipe: str = "sft", **options: Any) -> RecipeConfig:
        if "dataset_name" not in options and "dataset_mixture" not in options:
            options["dataset_name"] = str(write_rows())
        defaults = {"prepared_dir": str(tmp_path / "prepared"), "model_name_or_path": str(tiny_tokenizer_dir)}
        values = defaults | options
        sections = {
            name: section(**{f.name: values.pop(f.name) for f in fields(section) if f.name in values})
            for name, section in SECTIONS.items()
        }
        assert not values, f"no such options: {values}"
        return RecipeConfig(recipe=recipe, path=None, training={"seed": seed}, **sections)

    return build
