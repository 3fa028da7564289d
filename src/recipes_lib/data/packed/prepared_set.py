"""Preparation of SFT data: rows rendered, tokenised, masked, truncated, packed and stored once per content."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from recipes_lib.config.loader import parse_command
from recipes_lib.config.paths import expand_home
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
    TokenizerLoader,
    build_encoder,
    encode_mixture,
    read_seed,
)
from recipes_lib.data.packed.keys import collect_inputs
from recipes_lib.data.packed.packing import Bins, Examples
from recipes_lib.data.packed.store import PreparedSet, compute_key, find_set, hold_lock, is_locked, read_beat, write_set
from recipes_lib.data.sources.broken_rows import BrokenRows
from recipes_lib.data.sources.mixtures import Mixture, load_test_data, load_train_data
from recipes_lib.data.sources.splits import find_overlap, refuse_overlap, split_rows
from recipes_lib.errors import ConfigError, DataError, Problem, merge_alike, raise_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LENGTH_MULTIPLE: Final = 64
"""A derived ``max_length`` is a multiple of this many tokens."""

_DEFAULT_ROOT: Final = "~/.cache/recipes_lib/prepared"
_POLL_SECONDS: Final = 0.5
_SECONDS_TO_START: Final = 120.0


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


def prepare(config: RecipeConfig, load_tokenizer: TokenizerLoader) -> PreparedSet:
    """Finds the prepared set of a run, or makes it; a second call tokenises nothing and loads no tokenizer.

    Args:
        config: The run.
        load_tokenizer: Called only when the set has to be made.

    Raises:
        ConfigError: The options do not fit together, or the tokenizer is not there.
        DataError: Rows are broken, too long, held out as well as trained on, or hold nothing to learn, each named up to
            twenty; or the set cannot be written.
    """
    identity = identify_set(config)
    root, key = identity.root, identity.key
    if found := find_set(root, key):
        return found
    with hold_lock(root, key):
        if found := find_set(root, key):  # made by the process that held the lock before
            return found
        splits, manifest = _build(config, load_tokenizer(config), identity.train, identity.test)
        return write_set(root, key, splits, {"key": key, "inputs": identity.inputs, **manifest})


def prepare_once(config: RecipeConfig, load_tokenizer: TokenizerLoader, *, local_rank: int) -> PreparedSet:
    """``prepare`` on the first process of each node while the others wait for its set; needs no process group.

    Args:
        config: The run, the same on all processes.
        load_tokenizer: As for ``prepare``.
        local_rank: Number of this process on its node.

    Raises:
        ConfigError: As ``prepare``.
        DataError: As ``prepare``; on the other processes, that the first one gave up.
    """
    if local_rank == 0:
        return prepare(config, load_tokenizer)
    root, key, *_ = identify_set(config)
    return wait_for_set(root, key)


def wait_for_set(root: Path, key: str) -> PreparedSet:
    """The set of that key, once the first process of the node has published it.

    Args:
        root: Folder of prepared sets.
        key: From ``compute_key``.

    Raises:
        DataError: That process gave up, or never began.
    """
    deadline, beat = time.monotonic() + _SECONDS_TO_START, 0
    while (found := find_set(root, key)) is None:
        held, last, beat = is_locked(root, key), beat, read_beat(root, key)
        if held or beat != last:
            deadline = time.monotonic() + _SECONDS_TO_START
        elif time.monotonic() > deadline:
            found_problem = "the first process of this node has not prepared the data"
            if held is None:  # Only its sign of life tells that it is at work.
                found_problem += (
                    f", nor shown for {_SECONDS_TO_START:.0f} s that it is at work (files cannot be locked there)"
                )
            raise DataError(Problem(str(root), found_problem, "read its message, or run `recipes prepare` first"))
        time.sleep(_POLL_SECONDS)
    return found


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


def find_root(config: RecipeConfig) -> Path:
    """The folder of prepared sets."""
    return Path(expand_home(config.tokens.prepared_dir or _DEFAULT_ROOT))


def _build(
    config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, train: Mixture, test: Mixture | None
) -> tuple[dict[str, tuple[Examples, Bins]], dict[str, Any]]:
    """The packs of each split, and the manifest without key and inputs."""
    sides, broken = _encode(config, tokenizer, train, test)
    capacity = config.tokens.max_length or derive_max_length(
        max(int(side.examples.lengths.max()) for side in sides.values())
    )
    if config.tokens.overlong == "error":
        _refuse_overlong(sides.values(), capacity)
    end_tokens = find_end_tokens(tokenizer)
    packed = {
        name: pack_split(name, side.examples, config.tokens, capacity, end_tokens, side.num_duplicates)
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
    config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, train: Mixture, test: Mixture | None
) -> tuple[dict[str, EncodedMixture], dict[str, BrokenRows]]:
    """``train`` and, if rows are held out, ``eval``; and what of the data that each was read from is broken.

    Both are read to the end before anything is refused.
    """
    encoder = build_encoder(config, tokenizer)
    mixtures = {"train": train} | ({} if test is None else {"eval": test})
    broken = {name: BrokenRows(config.tokens) for name in mixtures}
    with show_progress() as watch:
        sides = {
            name: encode_mixture(encoder, mixture, broken[name], watch(mixture)) for name, mixture in mixtures.items()
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
        train_places = encoded.find_target_positions([position for position, _ in overlap.pairs])
        eval_places = held_out.find_target_positions([position for _, position in overlap.pairs])
        refuse_overlap(overlap, train_places.__getitem__, eval_places.__getitem__)
    return sides, broken


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
        places = side.find_target_positions(too_long) if too_long else {}
        overlong = [describe_overlong(places[at], int(lengths[at]), capacity) for at in too_long]
        problems += merge_alike(overlong, len(lengths))
    raise_problems(problems, "max_length")


def main(stage: str, argv: Sequence[str], load_tokenizer: TokenizerLoader) -> None:
    """``recipes prepare``: prepares the set of a run and says what is in it.

    Args:
        stage: Name of the recipe.
        argv: Arguments after the command, as the run's script takes them.
        load_tokenizer: As for ``prepare``.
    """
    parsed = parse_command(stage, argv)
    if isinstance(parsed, str):
        sys.stdout.write(parsed)
        return
    started = time.monotonic()
    prepared = prepare(parsed, load_tokenizer)
    console = Console()
    console.print(render_summary(prepared))
    state = f"prepared in {time.monotonic() - started:.1f} s" if prepared.is_new else "nothing to do: already prepared"
    console.print(f"{state}\nkey  {prepared.key}\npath {prepared.path}", soft_wrap=True, markup=False, highlight=False)


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
