"""How the sources of a pretraining run share its tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from recipes_lib.config.schema import DataConfig, RecipeConfig
from recipes_lib.errors import ConfigError, Problem


def list_entries(data: DataConfig) -> Sequence[Mapping[str, Any]]:
    """The entries of ``dataset_mixture``, or the one dataset as such an entry."""
    if data.dataset_mixture is not None:
        return data.dataset_mixture
    entry = {
        "name": data.dataset_name,
        "config": data.dataset_config,
        "revision": data.dataset_revision,
        "split": data.dataset_train_split,
        "columns": data.dataset_columns,
    }
    return [entry]


def compute_weights(config: RecipeConfig, num_tokens: Sequence[int]) -> list[float]:
    """The share of the training tokens that comes from each source; they sum to 1.

    A ``weight`` of a mixture's entry is its share relative to the sum of all, entries without one counting 1. When no
    entry has one, every source has its share of the tokens there are, times its ``repeat``: without those, all are read
    equally often.

    Args:
        config: The run.
        num_tokens: Training tokens of each source.
    """
    repeats = [entry.get("repeat", 1.0) for entry in list_entries(config.data)]
    weights = _read_weights(config) or [repeat * num for repeat, num in zip(repeats, num_tokens, strict=True)]
    return [weight / sum(weights) for weight in weights]


def compute_budgets(config: RecipeConfig, num_tokens: int | None) -> list[int]:
    """Tokens to read of each streamed source, so many that none comes twice before the run's end.

    Args:
        config: The run.
        num_tokens: Tokens that the run trains on.

    Raises:
        ConfigError: The run's length or the sources' shares are not known, or a number of documents is to be held out.
    """
    weights = _read_weights(config)
    _refuse_unknowable(config, weights, num_tokens)
    assert num_tokens is not None
    phases = config.pretraining.dataset_curriculum or [{"start_tokens": 0, "weights": weights}]
    borders = [*(min(phase["start_tokens"], num_tokens) for phase in phases), num_tokens]
    shares = [0.0] * len(list_entries(config.data))
    for phase, (start, stop) in zip(phases, itertools.pairwise(borders), strict=True):
        for at, weight in enumerate(phase["weights"]):
            shares[at] += (stop - start) * weight / sum(phase["weights"])
    # A source may be ahead of its weight by a window in each phase, and each later phase begins at a whole row.
    slack = (2 * len(phases) - 1) * (config.tokens.max_length or 0)
    return [math.ceil(share) + slack for share in shares]


def _read_weights(config: RecipeConfig) -> list[float] | None:
    """The weights of the entries, or ``None`` when none has one."""
    entries = list_entries(config.data)
    if len(entries) > 1 and all("weight" not in entry for entry in entries):
        return None
    return [entry.get("weight", 1.0) for entry in entries]


def _refuse_unknowable(config: RecipeConfig, weights: Sequence[float] | None, num_tokens: int | None) -> None:
    problems = []
    size = config.data.test_split_size
    if size is not None and size >= 1:
        remedy = "write a share below 1, or name held-out data: dataset_test_split"
        found = "a number of documents is drawn among all of them, and a stream is not read to its end"
        problems.append(("test_split_size", found, remedy))
    if num_tokens is None:
        problems.append(("dataset_streaming", "it is not known how far to read", "write `max_tokens: ...`"))
    if weights is None and config.pretraining.dataset_curriculum is None:
        found = "it is not known how far to read each source of the mixture"
        problems.append(("dataset_streaming", found, "give each a `weight`"))
    if problems:
        raise ConfigError(*(Problem(config.provenance.get(key, key), *words) for key, *words in problems))
