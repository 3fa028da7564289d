"""Pretraining rows: tokens on disk in the order of the schedule, and held-out sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.packed.encoding import read_seed
from recipes_lib.data.sources.mixtures import MAX_EPOCHS, REPEATED
from recipes_lib.data.tokens.dataset import EvalWindows, RowOrder, TokenDataset
from recipes_lib.data.tokens.shards import TokenSource
from recipes_lib.data.tokens.token_data import TokenData
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.planning.schedule import PretrainingPlan, plan_pretraining
from recipes_lib.training.guards.expected_curve import verify_expected_curve

_EXAMPLE_TOKENS: Final = 1 << 16
"""Tokens of a held-out source that are searched for example documents."""


@dataclass(frozen=True, slots=True)
class PretrainingRows:
    """Training and held-out rows of a pretraining run.

    Attributes:
        plan: Rows and learning rate of each step.
        train: All rows of the run, in training order.
        held_out: Held-out rows by source name.
        typical_length: Mean attention span in tokens: the mean document length, at most the row length.
        epochs: Passes over each source, by name.
        record: JSON values for ``run.json``.
    """

    plan: PretrainingPlan
    train: TokenDataset
    held_out: Mapping[str, EvalWindows]
    typical_length: int
    epochs: Mapping[str, float]
    record: Mapping[str, Any]
    _eval_sources: Sequence[TokenSource]

    def iterate_examples(self) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]]:
        """Yield the first held-out documents, truncated to a row: token ids ``uint32 (T,)`` and loss mask, all True."""
        for source in self._eval_sources:
            start = 0
            for length in source.read_document_lengths(0, min(source.num_tokens, _EXAMPLE_TOKENS)).tolist():
                ids = source.read(start, start + min(length, self.plan.max_length))
                yield ids, np.ones(len(ids), np.bool_)
                start += length

    @property
    def warnings(self) -> list[str]:
        """Warnings about the mixture, one sentence each."""
        read = ((name, epochs) for name, epochs in self.epochs.items() if epochs > MAX_EPOCHS)
        return [f"{name} is read {epochs:.1f} times; {REPEATED}" for name, epochs in read]


def build_rows(config: RecipeConfig, tokens: TokenData, world_size: int) -> PretrainingRows:
    """Build the ordered rows of a run.

    Args:
        config: The run.
        tokens: From ``prepare_tokens``.
        world_size: Number of data-parallel ranks.

    Raises:
        ConfigError: The schedule does not fit into the run, or two held-out sets have the same name; or as
            ``verify_expected_curve``.
        DataError: As ``verify_expected_curve``.
    """
    assert config.tokens.max_length is not None
    num_windows = [source.num_tokens // config.tokens.max_length for source in tokens.train]
    num_own = len(num_windows) - tokens.num_replayed
    # An epoch is one pass over the new data, plus the rows replayed meanwhile.
    rows_per_epoch = round(sum(num_windows[:num_own]) / sum(tokens.weights[:num_own]))
    plan = plan_pretraining(config, world_size, num_windows=rows_per_epoch, weights=tokens.weights)
    order = RowOrder(num_windows, plan.phases, seed=read_seed(config))
    verify_expected_curve(config, plan.num_tokens, has_eval=bool(tokens.eval or tokens.eval_sets))
    isolated = not config.pretraining.cross_document_attention
    num_documents = sum(source.num_documents for source in tokens.train)
    num_tokens = sum(source.num_tokens for source in tokens.train)
    names = _shorten([source.name for source in tokens.train])
    epochs = dict(zip(names, order.count_epochs(plan.num_rows).tolist(), strict=True))
    eval_names = _shorten(list(tokens.eval))
    if taken := [name for name in eval_names if name in tokens.eval_sets]:
        found = f"`eval_datasets` has a set {taken[0]!r}, which is also the name of rows held out of a source"
        raise ConfigError(Problem(config.locate("eval_datasets"), found, "rename the set"))
    return PretrainingRows(
        plan=plan,
        train=TokenDataset(
            tokens.train,
            order,
            max_length=plan.max_length,
            row_starts=plan.row_starts,
            rows_per_step=plan.rows_per_step,
            rows_per_micro_step=plan.rows_per_micro_step,
            isolated=isolated,
        ),
        held_out={
            name: EvalWindows(source, max_length=plan.max_length, isolated=isolated)
            for name, source in (*zip(eval_names, tokens.eval.values(), strict=True), *tokens.eval_sets.items())
        },
        typical_length=min(plan.max_length, -(-num_tokens // num_documents)) if isolated else plan.max_length,
        epochs=epochs,
        record={**tokens.record, "epochs": epochs, "num_rows": plan.num_rows, "num_tokens": plan.num_tokens},
        _eval_sources=[*tokens.eval.values(), *tokens.eval_sets.values()],
    )


def _shorten(names: Sequence[str]) -> list[str]:
    """Return the last part of each path or Hub id, the whole name where that is not unique."""
    short = [PurePath(name).stem or name for name in names]
    counts = Counter(short)
    return [part if counts[part] == 1 else name for part, name in zip(short, names, strict=True)]
