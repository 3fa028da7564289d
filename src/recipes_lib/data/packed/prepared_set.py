"""Preparation of SFT data: rows rendered, tokenised, masked, truncated, packed and stored once per content."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.config.token_ids import find_end_tokens
from recipes_lib.data.packed.audit import (
    Finding,
    SplitAudit,
    describe_overlong,
    pack_split,
    refuse_errors,
    sort_findings,
)
from recipes_lib.data.packed.encoding import (
    EncodedMixture,
    TokenFile,
    TokenizerLoader,
    build_encoder,
    encode_mixture,
    read_seed,
)
from recipes_lib.data.packed.keys import collect_inputs
from recipes_lib.data.packed.packing import Bins, Examples
from recipes_lib.data.sources.broken_rows import BrokenRows
from recipes_lib.data.sources.mixtures import Mixture, load_test_data, load_train_data
from recipes_lib.data.sources.splits import find_overlap, refuse_overlap, split_rows
from recipes_lib.data.store import PreparedSet, compute_key, find_root, make_set, write_splits
from recipes_lib.errors import ConfigError, Problem, merge_alike, raise_problems

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

LENGTH_MULTIPLE: Final = 64
"""A derived ``max_length`` is a multiple of this many tokens."""

_PACKS_PER_RECORD_BATCH: Final = 1000


class SetIdentity(NamedTuple):
    """A run's set before it is looked for.

    Attributes:
        root: Folder of prepared sets.
        key: From ``compute_key`` and the inputs.
        inputs: Everything that decides the content.
        train: The rows to train on.
        test: The held-out rows, if some are named.
    """

    root: Path
    key: str
    inputs: Mapping[str, Any]
    train: Mixture
    test: Mixture | None


def prepare(config: RecipeConfig, load_tokenizer: TokenizerLoader, *, local_rank: int = 0) -> PreparedSet:
    """Finds the prepared set of a run, or makes it; a second call tokenises nothing and loads no tokenizer.

    Args:
        config: The run.
        load_tokenizer: Called only when the set has to be made.
        local_rank: Rank on this node; all but the first wait for its set.

    Raises:
        ConfigError: The options do not fit together, or the tokenizer is not there.
        DataError: Rows are broken, too long, held out as well as trained on, or hold nothing to learn, each named up to
            twenty; the set cannot be written; or, on the other ranks, that the first one gave up.
    """
    identity = identify_set(config)

    def build(staging: Path) -> dict[str, Any]:
        with TokenFile(identity.root) as file:
            splits, manifest = _build(config, load_tokenizer(config), identity.train, identity.test, file)
            write_splits(staging, {name: _read_packs(examples, bins) for name, (examples, bins) in splits.items()})
        return manifest

    return make_set(identity.root, identity.key, identity.inputs, build, local_rank=local_rank)


def identify_set(config: RecipeConfig, **decisions: str) -> SetIdentity:
    """Says which set a run needs, without tokenising anything.

    Args:
        config: The run.
        decisions: What decides the content besides.

    Raises:
        ConfigError: The options do not fit together, or the tokenizer is not there.
        DataError: The data are not there.
    """
    if config.data.dataset_streaming:
        where = config.provenance.get("dataset_streaming", "dataset_streaming")
        raise ConfigError(Problem(where, "streamed rows are tokenised while training; there is nothing to prepare"))
    seed = read_seed(config)
    train, test = load_train_data(config.data, seed=seed), load_test_data(config.data)
    fingerprints = {"train": train.fingerprint()} | ({} if test is None else {"test": test.fingerprint()})
    draws = test is None and config.data.test_split_size is not None
    inputs = {**collect_inputs(config, fingerprints), "split_seed": seed if draws else None, **decisions}
    return SetIdentity(find_root(config), compute_key(inputs), inputs, train, test)


def _build(
    config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, train: Mixture, test: Mixture | None, file: TokenFile
) -> tuple[dict[str, tuple[Examples, Bins]], dict[str, Any]]:
    """The packs of each split, and the manifest without key and inputs."""
    sides, broken = _encode(config, tokenizer, train, test, file)
    capacity = config.tokens.max_length or derive_max_length(
        max(int(side.examples.lengths.max()) for side in sides.values())
    )
    if config.tokens.overlong == "error":
        _refuse_overlong(sides.values(), capacity)
    end_tokens = find_end_tokens(tokenizer)
    packed = {
        name: pack_split(
            name, side.examples, config.tokens, capacity, end_tokens, side.find_places, side.num_duplicates
        )
        for name, side in sides.items()
    }
    findings = [finding for split in packed.values() for finding in split.findings]
    findings += [Finding("warning", told) for split, rows in broken.items() for told in rows.tell(split)]
    refuse_errors(train.name, findings)
    figures = {
        name: {**dataclasses.asdict(split.audit), "cut": dataclasses.asdict(split.cut)}
        for name, split in packed.items()
    }
    return {name: (split.examples, split.bins) for name, split in packed.items()}, {
        "max_length": capacity,
        "max_length_is_derived": config.tokens.max_length is None,
        "findings": [dataclasses.asdict(finding) for finding in sort_findings(findings)],
        "broken_rows": {split: rows.count() for split, rows in broken.items()},
        **figures,
    }


def _encode(
    config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, train: Mixture, test: Mixture | None, file: TokenFile
) -> tuple[dict[str, EncodedMixture], dict[str, BrokenRows]]:
    """``train`` and, if rows are held out, ``eval``; and what of the data that each was read from is broken.

    Both are read to the end before anything is refused.
    """
    encoder = build_encoder(config, tokenizer)
    mixtures = {"train": train} | ({} if test is None else {"eval": test})
    broken = {name: BrokenRows(config.tokens) for name in mixtures}
    with show_progress() as watch:
        sides = {
            name: encode_mixture(encoder, mixture, broken[name], watch(mixture), file)
            for name, mixture in mixtures.items()
        }
    problems = [problem for name, mixture in mixtures.items() for problem in broken[name].judge(mixture.name)]
    raise_problems(problems, train.name)
    encoded, held_out = sides["train"], sides.get("eval")
    if held_out is None:
        if config.data.test_split_size is not None:
            split = split_rows(encoded.digests, config.data.test_split_size, read_seed(config))
            sides = {"train": encoded.take(split.train), "eval": encoded.take(split.test)}
        return sides, broken
    if not config.data.allow_eval_overlap:
        overlap = find_overlap(encoded.digests, held_out.digests)
        train_places = encoded.find_places([position for position, _ in overlap.pairs])
        eval_places = held_out.find_places([position for _, position in overlap.pairs])
        refuse_overlap(overlap, train_places.__getitem__, eval_places.__getitem__)
    return sides, broken


def _read_packs(examples: Examples, bins: Bins) -> pa.RecordBatchReader:
    """The packs with the columns of ``PreparedSet.train``, read from the examples' tokens a batch at a time."""
    import pyarrow as pa  # only who prepares pays for it

    schema = pa.schema(
        {
            "input_ids": pa.list_(pa.uint32()),
            "loss_mask": pa.list_(pa.bool_()),
            "seq_lengths": pa.list_(pa.int32()),
            "row_ids": pa.list_(pa.int64()),
        }
    )

    def read(start: int) -> pa.RecordBatch:
        offsets = bins.offsets[start : start + _PACKS_PER_RECORD_BATCH + 1]
        members = bins.order[offsets[0] : offsets[-1]]
        lengths, documents = examples.lengths[members], offsets - offsets[0]
        tokens = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])[documents]
        input_ids, loss_mask = examples.read(members)
        columns = (
            (tokens, input_ids),
            (tokens, loss_mask),
            (documents, lengths.astype(np.int32)),
            (documents, examples.row_ids[members]),
        )
        arrays = [
            pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), pa.array(values)) for ends, values in columns
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    return pa.RecordBatchReader.from_batches(schema, map(read, range(0, len(bins), _PACKS_PER_RECORD_BATCH)))


@contextmanager
def show_progress() -> Iterator[Callable[[Mixture], Callable[[int], None]]]:
    """Shows on a terminal how many rows are tokenised.

    Yields:
        Opens the line of a mixture; what it returns is told how many more rows are done.
    """
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}: {task.completed:,.0f} rows")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def watch(mixture: Mixture) -> Callable[[int], None]:
            task = progress.add_task(f"tokenising {mixture.name}", total=None)
            return lambda rows: progress.advance(task, rows)

        yield watch


def derive_max_length(longest: int) -> int:
    """The length limit of a run that has none: the longest row, rounded up to ``LENGTH_MULTIPLE`` tokens."""
    return -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def _refuse_overlong(sides: Iterable[EncodedMixture], capacity: int) -> None:
    """Names the first row of each side that is too long, the longest, and their number.

    Raises:
        DataError: There are such rows.
    """
    problems: list[Problem] = []
    for side in sides:
        lengths = side.examples.lengths
        too_long = np.flatnonzero(lengths > capacity).tolist()
        places = side.find_places(too_long) if too_long else {}
        overlong = [describe_overlong(places[at], int(lengths[at]), capacity) for at in too_long]
        problems += merge_alike(overlong, len(lengths))
    raise_problems(problems, "max_length")


def render_summary(prepared: PreparedSet) -> Table:
    """What is in a prepared set, one column for each split."""
    manifest = prepared.manifest
    capacity = int(manifest["max_length"])
    table = Table(title=f"max_length {capacity:,}" + (" (derived)" if manifest["max_length_is_derived"] else ""))
    table.add_column()
    splits = [name for name in ("train", "eval") if name in manifest]
    audits = [
        SplitAudit(**{name: value for name, value in manifest[split].items() if name != "cut"}) for split in splits
    ]
    for split in splits:
        table.add_column(split, justify="right")
    figures: Sequence[tuple[str, Callable[[SplitAudit], str]]] = (
        ("rows", lambda audit: f"{audit.num_rows:,}"),
        ("tokens", lambda audit: f"{audit.num_packed_tokens:,}"),
        ("trained on", lambda audit: f"{audit.target_fraction:.1%}"),
        ("row length, median / longest", lambda audit: f"{audit.length_p50:,} / {audit.length_max:,}"),
        ("packs", lambda audit: f"{audit.num_packs:,}"),
        ("packing efficiency", lambda audit: f"{audit.packing_efficiency(capacity):.1%}"),
    )
    for label, value in figures:
        table.add_row(label, *(value(audit) for audit in audits))
    for finding in manifest["findings"]:
        if finding["severity"] != "ok":
            table.add_section()
            table.add_row(finding["severity"], "; ".join(filter(None, (finding["found"], finding["remedy"]))))
    return table
