"""Which tokens end a generation: set once on the model, used by the samples and by the exported model alike."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def set_stop_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, terminators: Iterable[int]
) -> list[int]:
    """Make ``model.generate`` stop at every token that training ends an answer with, and return those ids, sorted.

    Args:
        model: Its generation config keeps the stop tokens it had and gains the others; padding is the tokenizer's.
        tokenizer: Its EOS is a stop token.
        terminators: Ids of the last target of the training rows (the end-of-turn token of the chat template).

    Source: transformers ``GenerationConfig.eos_token_id``; see ``tests/models/test_generation.py``.
    """
    configured = model.generation_config.eos_token_id
    had = configured if isinstance(configured, list) else [configured]
    stops = {*had, tokenizer.eos_token_id, *terminators} - {None}
    model.generation_config.eos_token_id = sorted(stops)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return sorted(stops)
