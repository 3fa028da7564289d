"""``recipes score``: loss, number of target tokens and bits per byte of every row of a dataset under a model."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from recipes_lib.commands.sampling import Counts, RowFile
from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.loader import load_for_command
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.training.layouts.launch_environment import read_launch

if TYPE_CHECKING:
    from recipes_lib.data.sources.rows import Entry, Row, Source
    from recipes_lib.training.evaluation.row_scores import RowScorer

FIGURES: Final = ("loss", "num_target_tokens", "bits_per_byte")
ROWS_PER_CHUNK: Final = 256
"""Rows that are tokenised, sorted by length into batches, scored and written together."""


@dataclass(slots=True, kw_only=True)
class ScoreCounts(Counts):
    """Progress of a file of scored rows.

    Attributes:
        num_rows: Rows that were scored.
        num_kept: Rows that were written, whose loss is within the limits.
        num_target_tokens: Target tokens of all scored rows.
        nll: Negative log-likelihood of these target tokens, in nats.
    """

    num_rows: int = 0
    num_kept: int = 0
    num_target_tokens: int = 0
    nll: float = 0.0

    def describe(self) -> str:
        """Return the counts in a line."""
        loss = self.nll / max(1, self.num_target_tokens)
        # `exp` overflows above 709.
        return (
            f"{self.num_kept:,} of {self.num_rows:,} rows written; loss {loss:.4f} nats per token, perplexity "
            f"{math.exp(min(loss, 700)):.4g}, over {self.num_target_tokens:,} target tokens"
        )


class Columns(NamedTuple):
    """Names of the added columns, and limits on the rows that are written.

    Attributes:
        prefix: Prefix of the column names in ``FIGURES``; for rejected answers of preference pairs, ``rejected_``
            follows it.
        min_loss: Rows with a lower loss are dropped; the loss of a pair is that of its chosen answer.
        max_loss: Rows with a higher loss are dropped.
    """

    prefix: str
    min_loss: float
    max_loss: float


def main(argv: Sequence[str]) -> None:
    """Run the command: score a dataset, or resume, and write a report with the rows of extreme loss.

    Raises:
        ConfigError: A flag or the configuration is invalid, or the file holds other scores.
        DataError: The rows cannot be read.
    """
    options, overrides = CommandParser("score").parse_known_args(argv)
    if not options.min_loss <= options.max_loss:  # Also true for NaN.
        found = f"no loss is between {options.min_loss} and {options.max_loss}"
        raise ConfigError(Problem("--min_loss", found, "swap or correct them"))
    given = [f"--model_name_or_path={options.model}", f"--output_dir={options.output.parent}", *overrides]
    config = load_for_command("sft", given, options.config)
    if config.data.dataset_mixture or config.data.dataset_streaming:
        where = config.locate("dataset_mixture" if config.data.dataset_mixture else "dataset_streaming")
        raise ConfigError(Problem(where, "is not supported by recipes score", "write `dataset_name` alone"))
    columns = Columns(options.prefix, options.min_loss, options.max_loss)
    sys.stdout.write(f"{options.output}: {score_dataset(config, options.output, columns)}\n")

    from recipes_lib.report.html_pages import write_score_report

    sys.stdout.write(f"quantiles and extremes: {write_score_report(options.output, f'{options.prefix}loss')}\n")


def score_dataset(config: RecipeConfig, output: Path, columns: Columns) -> str:
    """Write or complete a file of scored rows; return a summary line.

    Args:
        config: Model, dataset, tokenisation and batch size.
        output: File to write.
        columns: Names of the added columns, and limits on the rows that are written.

    Raises:
        ConfigError: The model cannot be loaded; the rows already have columns of these names; as ``RowFile``.
        DataError: The rows cannot be read.
    """
    from recipes_lib.data.packed.encoding import collect_inputs
    from recipes_lib.data.sources.canonical import load_source
    from recipes_lib.data.sources.mixtures import list_entries
    from recipes_lib.training.evaluation.row_scores import load_row_scorer
    from recipes_lib.training.monitoring.progress import build_progress
    from recipes_lib.training.trainers.arguments import resolve_precision
    from recipes_lib.training.trainers.reference import hash_weights

    source = load_source(**list_entries(config.data)[0])
    first = next((entry for entry in source.rows() if not isinstance(entry, Problem)), None)
    # Before the model is loaded, which takes longer.
    names = {f"{columns.prefix}{answer}{name}" for answer in ("", "rejected_") for name in FIGURES}
    if first is not None and (taken := names & first.columns.keys()):
        raise ConfigError(Problem(first.where, f"already has a column `{min(taken)}`", "write a --prefix"))
    scorer = load_row_scorer(config, read_launch())
    inputs = collect_inputs(config, {"train": source.fingerprint()})
    settings = [hash_weights(scorer.model), resolve_precision(config), scorer.length, *map(str, columns)]
    what = "scores by another model, of other rows, or with other settings"
    file = RowFile(output, {**inputs, "settings": settings}, ScoreCounts(), what=what)
    progress = build_progress(is_main=True)
    try:
        # Reads the source twice: not every layout knows its number of rows.
        rows = progress.track(_read_both(source, config), "score", sum(1 for _ in source.rows()))
        # Scored rows are read again and skipped: not every layout can seek.
        file.write(_score(scorer, itertools.islice(rows, file.counts.num_rows, None), columns, file.counts))
    finally:
        progress.stop()
    return file.counts.describe()


def _read_both(source: Source, config: RecipeConfig) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Yield each row in canonical form, which lacks the other columns, together with its original columns.

    Raises:
        DataError: As ``read_entries`` and ``BrokenRows.read``.
    """
    from recipes_lib.data.sources.canonical import read_entries
    from recipes_lib.data.sources.rows import BrokenRows

    columns: dict[str, Any] = {}

    def remember() -> Iterator[Entry]:
        nonlocal columns
        for entry in source.rows():
            columns = {} if isinstance(entry, Problem) else entry.columns
            yield entry

    entries = read_entries(remember(), source.name, config.data.dataset_format)
    for row in BrokenRows(config.tokens, is_stream=source.streaming).read(entries, source.name):
        yield row, columns


def _score(
    scorer: RowScorer, rows: Iterator[tuple[Row, dict[str, Any]]], columns: Columns, counts: ScoreCounts
) -> Iterator[list[dict[str, Any]]]:
    """Yield chunks of rows with their new columns, and update the counts before each.

    Raises:
        DataError: A row cannot be tokenised.
    """
    from recipes_lib.data.pairs.preference_sets import take_rejected

    while chunk := list(itertools.islice(rows, ROWS_PER_CHUNK)):
        answers = {columns.prefix: scorer.score([row for row, _ in chunk])}
        if chunk[0][0].rejected is not None:
            answers[f"{columns.prefix}rejected_"] = scorer.score([take_rejected(row) for row, _ in chunk])
        written = []
        for number, (_, given) in enumerate(chunk):
            added: dict[str, Any] = {}
            for prefix, scores in answers.items():
                score = scores[number]
                figures = (score.loss, score.num_targets, score.bits_per_byte)
                added |= {prefix + name: figure for name, figure in zip(FIGURES, figures, strict=True)}
                counts.nll += score.nll
                counts.num_target_tokens += score.num_targets
            # `None` for a row without target tokens, to which the limits do not apply.
            loss = added[f"{columns.prefix}loss"]
            if loss is None or columns.min_loss <= loss <= columns.max_loss:
                written.append(given | added)
        # Before the yield: `RowFile` records the counts together with the rows.
        counts.num_rows += len(chunk)
        counts.num_kept += len(written)
        yield written


def load_text_scorer(path: str) -> Callable[[str], float | None]:
    """Load a causal language model; return a function from a text to its bits per byte, ``None`` without targets.

    Raises:
        ConfigError: The model cannot be loaded.
    """
    from recipes_lib.data.sources.rows import Row
    from recipes_lib.training.evaluation.row_scores import load_row_scorer

    # The keys that an SFT configuration requires; no dataset is read, and nothing is written.
    given = {"model_name_or_path": path, "dataset_name": path, "output_dir": path}
    config = load_for_command("sft", [f"--{key}={value}" for key, value in given.items()])
    scorer = load_row_scorer(config, read_launch())
    return lambda text: scorer.score([Row(where=path, text=text)])[0].bits_per_byte
