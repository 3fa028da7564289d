"""``recipes prepare`` and ``recipes preview``: where the data room, which loads no models, meets the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recipes_lib.config.schema import RecipeConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prepare(argv: Sequence[str]) -> None:
    """Prepare the data of a run, or find them prepared, in which case no tokenizer is imported."""
    from recipes_lib.data.prepare import main

    main(argv, _load_tokenizer)


def preview(argv: Sequence[str]) -> None:
    """Show what the model will be trained on, token by token."""
    from recipes_lib.data.preview import main

    main(argv, _load_tokenizer)


def _load_tokenizer(config: RecipeConfig) -> PreTrainedTokenizerBase:
    from recipes_lib.models.loading import load_tokenizer

    return load_tokenizer(config.model, config.tokens)
