"""Stop tokens of a model, and left-padded prompt batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from recipes_lib.errors import ConfigError, Problem


def set_stop_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, terminators: Iterable[int]
) -> list[int]:
    """Make ``model.generate`` stop at every token that training ends an answer with, and return those ids, sorted.

    Args:
        model: Its generation config keeps the stop tokens it had and gains the others; padding is the tokenizer's.
        tokenizer: Its EOS is a stop token.
        terminators: Ids of the last target of the training rows (the end-of-turn token of the chat template).

    Raises:
        ConfigError: transformers would not save the generation config that the model comes with, once it is changed.

    Source: transformers ``GenerationConfig.eos_token_id``; see ``tests/models/generation/test_stop_tokens.py``.
    """
    stops = {*read_stop_ids(model), tokenizer.eos_token_id, *terminators} - {None}
    model.generation_config.eos_token_id = sorted(stops)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    _make_valid(model.generation_config)
    return sorted(stops)


def _make_valid(generation: GenerationConfig) -> None:
    """Sample where settings such as ``temperature`` ask for it and ``do_sample`` was left out.

    transformers saves a generation config with contradictions only as long as nothing was changed since it was loaded.
    """
    validate: Callable[..., None] = generation.validate
    try:
        validate(strict=True)
    except ValueError:
        generation.do_sample = True
        try:
            validate(strict=True)
        except ValueError as error:
            reasons = " ".join(str(error).partition("\nIf")[0].split())
            found = f"how the model generates could not be saved: {reasons}"
            remedy = "correct generation_config.json in a copy of the model, and name that"
            raise ConfigError(Problem("model_name_or_path", found, remedy)) from error


def read_stop_ids(model: PreTrainedModel) -> list[int]:
    """Return the tokens that ``model.generate`` stops at, as ``set_stop_tokens`` has set them."""
    configured = model.generation_config.eos_token_id
    had = configured if isinstance(configured, list) else [configured]
    return sorted({*had} - {None})


def build_plain_generation(stop_ids: Sequence[int], pad_id: int, max_new_tokens: int) -> GenerationConfig:
    """What takes the likeliest token each time, whatever sampling settings and penalties the model comes with.

    Args:
        stop_ids: Tokens that end an answer; none ends it by length alone.
        pad_id: Stands behind answers that ended before others of the batch.
        max_new_tokens: Longest answer.
    """
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=pad_id,
        use_cache=True,
    )


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Prompts as ``input_ids`` and ``attention_mask``, both ``int64 (B, P)``, each ending at the right edge."""
    longest = max(map(len, rows))
    input_ids = torch.tensor([[pad_id] * (longest - len(row)) + list(row) for row in rows])
    attention_mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return input_ids, attention_mask
