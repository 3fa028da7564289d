"""Rows tokenised and packed while they are trained on, for data larger than the disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from datasets.iterable_dataset import ExamplesIterable
from transformers import PreTrainedTokenizerBase

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.audit import Finding, SplitAudit, compute_split_audit, judge, refuse_errors
from recipes_lib.data.encoding import (
    ROWS_PER_CHUNK,
    build_encoder,
    encode_chunk,
    find_end_tokens,
    read_seed,
    split_chunks,
)
from recipes_lib.data.packing import Bins, Examples, choose_bins, fit_to_length
from recipes_lib.data.rows import Row
from recipes_lib.data.source_mixtures import Mixture, load_test_data, load_train_data
from recipes_lib.errors import ConfigError, DataError, Problem

Pack = dict[str, np.ndarray[Any, np.dtype[Any]]]


def build_train_stream(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase) -> datasets.IterableDataset:
    """The training packs, as ``prepare`` would make them of each window of rows, shuffled inside the window.

    The order depends on the seed, the epoch (``set_epoch``) and the window alone, so skipping what was trained on before
    resumes exactly. Every process reads the whole stream and trains on its share.

    Raises:
        ConfigError: ``max_length`` is not set, or rows are to be held out of the stream.
    """
    _refuse_unknowable(config)
    windows = _Windows(config, tokenizer, load_train_data(config.data, seed=read_seed(config)), shuffle=True)
    return datasets.IterableDataset(_EpochIterable(windows.generate, {"epoch_seed": 0}))


def build_eval_stream(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase) -> datasets.IterableDataset | None:
    """The held-out packs in the order of their rows, or ``None`` when ``dataset_test_split`` is not set.

    Raises:
        ConfigError: As ``build_train_stream``.
    """
    _refuse_unknowable(config)
    test = load_test_data(config.data)
    if test is None:
        return None
    return datasets.IterableDataset(ExamplesIterable(_Windows(config, tokenizer, test, shuffle=False).generate, {}))


def audit_first_window(
    config: RecipeConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[SplitAudit, list[Finding]]:
    """The supervision audit of the first rows of the stream.

    Raises:
        ConfigError: As ``build_train_stream``.
        DataError: The rows cannot be read or tokenised.
    """
    _refuse_unknowable(config)
    windows = _Windows(config, tokenizer, load_train_data(config.data, seed=read_seed(config)), shuffle=False)
    return next(windows.audits())


class _EpochIterable(ExamplesIterable):  # type: ignore[misc]
    """Examples whose order follows the epoch: ``datasets`` calls ``shuffle_data_sources`` from the second epoch on."""

    def shuffle_data_sources(self, generator: np.random.Generator) -> _EpochIterable:
        return _EpochIterable(self.generate_examples_fn, {"epoch_seed": int(generator.integers(1, 2**32))})
