"""Preparation of SFT data: rows rendered, tokenised, masked, truncated, packed and stored once per content."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from rich.table import Column, Table

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.config.tokenization import find_end_tokens
from recipes_lib.data.packed.encoding import (
    ROWS_PER_CHUNK,
    Encode,
    EncodedMixture,
    TokenFile,
    TokenizerLoader,
    build_encoder,
    collect_inputs,
    encode_chunk,
    encode_mixture,
    read_seed,
    verify_unchanged,
)
from recipes_lib.data.packed.packing import Bins, Examples, IntArray, split_blocks
from recipes_lib.data.packed.supervision_audit import (
    Finding,
    describe_overlong,
    pack_split,
    read_audit,
    refuse_errors,
    sort_findings,
)
from recipes_lib.data.sources.mixtures import Mixture, derive_eval_configs, load_test_data, load_train_data
from recipes_lib.data.sources.replay_dataset import (
    ReplayOrder,
    find_replay_warning,
    find_replayed,
    read_order_seed,
)
from recipes_lib.data.sources.rows import BrokenRows
from recipes_lib.data.sources.splits import SHARES_ROW, refuse_overlap, split_rows
from recipes_lib.data.store import PreparedSet, compute_key, find_root, join_rows, make_set, write_splits
from recipes_lib.errors import ConfigError, Problem, collect_problems, merge_alike, raise_problems

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

LENGTH_MULTIPLE: Final = 64
"""A derived ``max_length`` is a multiple of this many tokens."""

SHARES_PROMPT: Final = "have the prompt of a held-out row"
"""Training pairs that are an error besides equal ones: other answers to a held-out prompt would leak information."""


class SetIdentity(NamedTuple):
    """Identity of a prepared set, and the rows from which it is built.

    Attributes:
        root: Folder of prepared sets.
        key: Key from ``compute_key(inputs)``.
        inputs: Everything that determines the content, as JSON values.
        train: Training rows.
        test: Held-out rows of ``dataset_test_split``; ``None`` if it is not set.
    """

    root: Path
    key: str
    inputs: Mapping[str, Any]
    train: Mixture
    test: Mixture | None


BuiltSet = tuple[Mapping[str, "pa.RecordBatchReader"], dict[str, Any]]
Build = Callable[[RecipeConfig, "PreTrainedTokenizerBase", SetIdentity, TokenFile], BuiltSet]


def prepare(config: RecipeConfig, load_tokenizer: TokenizerLoader, *, local_rank: int = 0) -> PreparedSet:
    """Find the prepared set of a run, or build it; an existing set is found without loading a tokenizer.

    Args:
        config: Configuration of the run.
        load_tokenizer: Function that loads the tokenizer; called only to build the set.
        local_rank: Local rank of this process; all ranks but 0 wait for the set.

    Raises:
        ConfigError: Options are incompatible, or the tokenizer does not exist.
        DataError: Rows are broken, too long, without targets, or both trained on and held out; the set cannot be
            written; on other ranks, local rank 0 has not built the set.
    """
    return prepare_set(config, load_tokenizer, identify_set(config), _build, local_rank)


def prepare_set(
    config: RecipeConfig, load_tokenizer: TokenizerLoader, identity: SetIdentity, build: Build, local_rank: int
) -> PreparedSet:
    """Find a prepared set, or build it, with memory that does not grow with the number of its tokens.

    Args:
        config: Configuration of the run.
        load_tokenizer: Function that loads the tokenizer; called only to build the set.
        identity: Identity of the set.
        build: Function of the configuration, the tokenizer, the identity, and a file for tokens, which stays open until
            the rows are written. Returns the rows of each split, which are consumed once, and the entries of the
            manifest other than ``key`` and ``inputs``.
        local_rank: Local rank of this process; all ranks but 0 wait for the set.

    Raises:
        DataError: As ``build``; the set cannot be written; on other ranks, local rank 0 has not built the set.
    """

    def write(staging: Path) -> dict[str, Any]:
        with TokenFile(identity.root) as file:
            splits, manifest = build(config, load_tokenizer(), identity, file)
            write_splits(staging, splits)
        return manifest

    return make_set(identity.root, identity.key, identity.inputs, write, local_rank=local_rank)


def identify_set(config: RecipeConfig, **decisions: str) -> SetIdentity:
    """Return the identity of a run's prepared set, without tokenising anything.

    Args:
        config: Configuration of the run.
        decisions: Additional inputs of the key.

    Raises:
        ConfigError: The data are streamed, options are incompatible, or the tokenizer does not exist.
        DataError: The data do not exist or cannot be read.
    """
    if config.data.dataset_streaming:
        where = config.locate("dataset_streaming")
        found = "streamed rows are tokenised while training"
        raise ConfigError(Problem(where, found, "remove the key to prepare the rows"))
    seed = read_seed(config)
    train, test = load_train_data(config.data, seed=seed), load_test_data(config.data)
    fingerprints = {"train": train.fingerprint()} | ({} if test is None else {"test": test.fingerprint()})
    # The seed is part of the key only if it determines the held-out rows; the mixtures' fingerprints have it if rows
    # are drawn. Otherwise, another seed of a run does not build the set again.
    split_seed = None if config.data.test_split_size is None else seed
    inputs = {**collect_inputs(config, fingerprints), "split_seed": split_seed, **decisions}
    return SetIdentity(find_root(config), compute_key(inputs), inputs, train, test)


def _build(
    config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, identity: SetIdentity, file: TokenFile
) -> BuiltSet:
    """Return the packs of each split, and the entries of the manifest other than ``key`` and ``inputs``."""
    encoder = build_encoder(config, tokenizer, config.tokens.max_length)
    sides, broken = encode_sides(
        config, identity, lambda rows, row_ids: (encode_chunk(encoder, rows, row_ids), {}), file
    )
    sides = separate_sides(config, sides)
    capacity = config.tokens.max_length or derive_max_length(max(int(side.lengths.max()) for side in sides.values()))
    end_tokens = find_end_tokens(tokenizer)
    packed = {
        name: pack_split(name, side.examples, config.tokens, capacity, end_tokens, side.find_places, side.digests)
        for name, side in sides.items()
    }
    findings = [finding for split in packed.values() for finding in split.findings]
    figures = {
        name: {**dataclasses.asdict(split.audit), "cut": dataclasses.asdict(split.cut)}
        for name, split in packed.items()
    }
    manifest = describe_set(config, identity, capacity, findings, broken) | figures
    return {name: _read_packs(split.examples, split.bins) for name, split in packed.items()}, manifest


def encode_sides(
    config: RecipeConfig, identity: SetIdentity, encode: Encode, file: TokenFile
) -> tuple[dict[str, EncodedMixture], dict[str, BrokenRows]]:
    """Encode the rows of ``train``, and those of ``eval`` if there is a ``dataset_test_split``.

    Both are read to the end before problems are raised.

    Args:
        config: Configuration of the run.
        identity: Identity of the set.
        encode: Function that encodes the rows of a chunk, as for ``encode_mixture``.
        file: File for the tokens.

    Returns:
        The encoded rows, and the counts of broken rows, by split.

    Raises:
        DataError: Too many rows are broken; the data changed while they were read; or rows are too long and
            ``overlong`` is ``error``.
    """
    mixtures = {"train": identity.train} | ({} if identity.test is None else {"eval": identity.test})
    broken = {name: BrokenRows(config.tokens) for name in mixtures}
    num_workers = config.tokens.dataset_num_proc
    sides = {name: encode_mixture(encode, mixtures[name], broken[name], file, num_workers) for name in mixtures}
    for mixture, fingerprint in zip(mixtures.values(), identity.inputs["sources"].values(), strict=True):
        verify_unchanged(mixture, fingerprint)
    limit = config.tokens.max_length
    if config.tokens.overlong == "error" and limit is not None:
        for name, side in sides.items():
            places = side.find_places(np.flatnonzero(side.lengths > limit).tolist())
            overlong = [describe_overlong(places[at], int(side.lengths[at]), limit) for at in sorted(places)]
            broken[name].fatal += merge_alike(overlong, broken[name].num_rows)
    problems = [problem for name, mixture in mixtures.items() for problem in broken[name].list_problems(mixture.name)]
    raise_problems(problems, identity.train.name)
    return sides, broken


def separate_sides(config: RecipeConfig, sides: dict[str, EncodedMixture]) -> dict[str, EncodedMixture]:
    """Return ``train`` and, if rows are held out, ``eval``, after verifying that no row is in both.

    Args:
        config: Configuration of the run.
        sides: Rows by split from ``encode_sides``; without ``eval``, ``test_split_size`` of ``train`` are held out. Of
            pairs, those with the same prompt are on the same side.

    Raises:
        DataError: As ``split_rows``; or rows, or prompts of pairs, are both trained on and held out.
    """
    train, held_out = sides["train"], sides.get("eval")
    if held_out is None:
        if config.data.test_split_size is None:
            return sides
        groups = train.columns.get("prompt_digests", train.digests)
        kept, drawn = split_rows(groups, config.data.test_split_size, read_seed(config))
        return {"train": train.take(kept), "eval": train.take(drawn)}
    problems: list[Problem] = []
    kinds = [(train.digests, held_out.digests, SHARES_ROW)]
    if "prompt_digests" in train.columns:
        kinds.append((train.columns["prompt_digests"], held_out.columns["prompt_digests"], SHARES_PROMPT))
    for train_digests, eval_digests, relation in () if config.data.allow_eval_overlap else kinds:
        with collect_problems(problems):
            refuse_overlap(train_digests, eval_digests, train.find_places, held_out.find_places, relation)
    raise_problems(problems, "dataset_test_split")
    return sides


def _digest_rows(rows: datasets.Dataset) -> tuple[npt.NDArray[np.bytes_], npt.NDArray[np.int64]]:
    """Return a digest of each document's tokens, or of each pair's prompt, ``S16 (R,)``, and its row id, ``(R,)``."""
    digests, numbers = [], [np.zeros(0, np.int64)]
    for batch in rows.with_format("arrow").iter(batch_size=ROWS_PER_CHUNK):
        if "prompt_ids" in batch.column_names:
            ids = batch["prompt_ids"].combine_chunks()
            lengths, row_ids = ids.value_lengths(), batch["row_id"].combine_chunks()
        else:
            ids = batch["input_ids"].combine_chunks()
            # A pack has several documents, each with a length and a row id.
            lengths, row_ids = (batch[name].combine_chunks().flatten() for name in ("seq_lengths", "row_ids"))
        tokens = ids.flatten().to_numpy(zero_copy_only=False)
        for row in np.split(tokens, np.cumsum(lengths.to_numpy())[:-1]):
            digests.append(hashlib.blake2b(row.tobytes(), digest_size=16).digest())
        numbers.append(row_ids.to_numpy().astype(np.int64))
    return np.frombuffer(b"".join(digests), "S16"), np.concatenate(numbers)


def describe_set(
    config: RecipeConfig,
    identity: SetIdentity,
    max_length: int,
    findings: Sequence[Finding],
    broken: Mapping[str, BrokenRows],
) -> dict[str, Any]:
    """Return the entries that the manifests of all kinds of sets have.

    Args:
        config: Configuration of the run.
        identity: Identity of the set.
        max_length: Maximum length of a row in tokens, configured or derived.
        findings: Audit findings of all splits.
        broken: Counts of broken rows by split; a warning is added if rows were dropped.

    Raises:
        DataError: A finding has the severity ``error``.
    """
    dropped = [Finding("warning", text) for split, rows in broken.items() for text in rows.list_warnings(split)]
    findings = [*findings, *dropped]
    refuse_errors(identity.train.name, findings)
    return {
        "max_length": max_length,
        "max_length_is_derived": config.tokens.max_length is None,
        "findings": [dataclasses.asdict(finding) for finding in sort_findings(findings)],
        "broken_rows": {split: rows.count() for split, rows in broken.items()},
    }


def _read_packs(examples: Examples, bins: Bins) -> pa.RecordBatchReader:
    """Return the packs with the columns of ``PreparedSet.train``; their tokens are read in batches."""
    import pyarrow as pa  # Slow to import, and needed only to build a set.

    def read(packs: slice) -> pa.RecordBatch:
        offsets = bins.offsets[packs.start : packs.stop + 1]
        members = bins.order[offsets[0] : offsets[-1]]
        lengths, documents = examples.lengths[members], offsets - offsets[0]
        # Boundaries of the packs, in documents and in tokens.
        tokens = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])[documents]
        input_ids, loss_mask = examples.read(members)
        columns = {
            "input_ids": (tokens, input_ids),
            "loss_mask": (tokens, loss_mask),
            "seq_lengths": (documents, lengths.astype(np.int32)),
            "row_ids": (documents, examples.row_ids[members]),
        }
        return pa.record_batch({name: build_lists(*column) for name, column in columns.items()})

    # Tokens before each document, in the order of the packs.
    starts = np.append(0, np.cumsum(examples.lengths[bins.order]))
    return read_batches(np.diff(starts[bins.offsets]), read)


def build_lists(offsets: IntArray, values: npt.NDArray[Any]) -> pa.ListArray:
    """Return an Arrow array of lists; list ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""
    import pyarrow as pa

    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


def read_batches(lengths: IntArray, read: Callable[[slice], pa.RecordBatch]) -> pa.RecordBatchReader:
    """Return a reader of the rows of a split, in batches of ``split_blocks``.

    Args:
        lengths: Number of tokens of each row, ``int64 (R,)``.
        read: Function that returns the rows of a slice, which may be empty.
    """
    import pyarrow as pa

    # An empty batch has the schema of all batches.
    return pa.RecordBatchReader.from_batches(read(slice(0, 0)).schema, map(read, split_blocks(lengths)))


def derive_max_length(longest: int) -> int:
    """Return the default ``max_length``: the longest row, rounded up to a multiple of ``LENGTH_MULTIPLE`` tokens."""
    return -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def render_summary(prepared: PreparedSet) -> Table:
    """Return a table of the figures of a prepared set, with a column for each split."""
    manifest = prepared.manifest
    capacity = int(manifest["max_length"])
    splits = [name for name in ("train", "eval") if name in manifest]
    audits = [read_audit(manifest[split]) for split in splits]
    title = f"max_length {capacity:,}" + (" (derived)" if manifest["max_length_is_derived"] else "")
    table = Table("", *(Column(split, justify="right") for split in splits), title=title)
    for label, values in (
        ("rows", [f"{audit.num_rows:,}" for audit in audits]),
        ("tokens", [f"{audit.num_packed_tokens:,}" for audit in audits]),
        ("trained on", [f"{audit.target_fraction:.1%}" for audit in audits]),
        ("row length, median / longest", [f"{audit.length_p50:,} / {audit.length_max:,}" for audit in audits]),
        ("packs", [f"{audit.num_packs:,}" for audit in audits]),
        ("packing efficiency", [f"{audit.packing_efficiency(capacity):.1%}" for audit in audits]),
    ):
        table.add_row(label, *values)
    add_findings(table, manifest["findings"])
    return table


def add_findings(table: Table, findings: Sequence[Mapping[str, Any]]) -> None:
    """Add the warnings of a set's audit to its table, one section each."""
    for finding in (Finding(**finding) for finding in findings):
        if finding.severity != "ok":
            table.add_section()
            table.add_row(finding.severity, str(finding))


@dataclass(frozen=True, kw_only=True)
class PreparedRows:
    """Rows of a run with their statistics.

    Attributes:
        train: Training rows; with replay, new rows followed by replayed rows.
        eval: Held-out rows, or ``None``.
        max_length: Maximum length of a row, in tokens.
        audit: Audit figures of the training rows.
        findings: Audit findings of all rows.
        record: JSON values for ``run.json``: the origin of the rows, their counts, and those of dropped rows.
        eval_sets: Rows of each of ``eval_datasets``, by name.
        order: Order of new and replayed rows; ``None`` without replay.
    """

    train: Any
    eval: Any
    max_length: int
    audit: Any
    findings: Sequence[Finding]
    record: dict[str, Any]
    eval_sets: Mapping[str, Any] = field(default_factory=dict)
    order: ReplayOrder | None = None

    @property
    def rows_per_epoch(self) -> int | None:
        """Number of training rows per epoch, replayed ones included; ``None`` for a stream."""
        if self.order is not None:
            return self.order.rows_per_epoch
        return None if self.record.get("streamed") else len(self.train)

    @property
    def held_out(self) -> Mapping[str, Any]:
        """All held-out rows by name."""
        return {**({} if self.eval is None else {"held-out set": self.eval}), **self.eval_sets}

    @property
    def longest(self) -> int:
        """Length in tokens of the longest row after truncation, held-out rows included; for a stream ``max_length``."""
        if self.rows_per_epoch is None:
            return self.max_length
        parts = (self.record, self.record.get("replay", {}))
        audits = [part[side] for part in parts for side in ("train", "eval") if part.get(side)]
        audits += self.record.get("eval_datasets", {}).values()
        return min(self.max_length, max(int(audit["length_max"]) for audit in audits))

    @property
    def warnings(self) -> list[str]:
        """Warnings of the audit and about replay."""
        audited = [str(finding) for finding in self.findings if finding.severity == "warning"]
        return [*audited, *find_replay_warning(self.record)]

    @property
    def typical_length(self) -> int:
        """Median length of a row in tokens, for estimates of the cost of attention."""
        return int(self.audit.length_p50)


TrainedSet = tuple[RecipeConfig, PreparedSet]
AnyRows = TypeVar("AnyRows", bound=PreparedRows)


def open_set(
    config: RecipeConfig,
    prepare: Callable[[RecipeConfig], PreparedSet],
    count_terms: Callable[[datasets.Dataset], IntArray],
) -> tuple[dict[str, Any], list[TrainedSet]]:
    """Prepare the training rows of a run, with replayed rows.

    Args:
        config: Configuration of the run.
        prepare: Function that finds or builds the prepared set of a configuration.
        count_terms: Function that returns the number of terms of the loss's mean for each row, ``int64 (R,)``.

    Returns:
        The fields of ``PreparedRows`` other than ``audit`` and ``eval_sets``, and the sets that are trained on.

    Raises:
        ConfigError: As ``prepare``.
        DataError: As ``prepare``.
    """
    prepared = prepare(config)
    manifest, trained = prepared.manifest, [(config, prepared)]
    train, order, record = prepared.train, None, {"prepared_set": str(prepared.path), **manifest}
    if (replayed := find_replayed(config, manifest["max_length"])) is not None:
        other = prepare(replayed)
        trained.append((replayed, other))
        share, seed = config.forgetting.replay_share, read_order_seed(config)
        order = ReplayOrder(count_terms(train), count_terms(other.train), share, seed=seed)
        train = join_rows(train, other.train)
        # Stored values of each row, such as log-probabilities of the reference model, cover both sets in this order.
        record |= {
            "key": compute_key({"sets": [prepared.key, other.key]}),
            "replay": {
                "share": share,
                "rows_per_epoch": order.rows_per_epoch,
                "passes_per_epoch": order.replayed_per_epoch,
                "prepared_set": str(other.path),
                "train": other.manifest["train"],
            },
        }
    return {
        "train": train,
        "eval": prepared.eval,
        "max_length": manifest["max_length"],
        "findings": [Finding(**finding) for finding in manifest["findings"]],
        "record": record,
        "order": order,
    }, trained


def add_eval_sets(
    config: RecipeConfig, data: AnyRows, prepare: Callable[[RecipeConfig], PreparedSet], trained: Sequence[TrainedSet]
) -> AnyRows:
    """Return the data of a run, completed by the rows of its ``eval_datasets``.

    Args:
        config: Configuration of the run.
        data: Data of the run without ``eval_sets``.
        prepare: Function that finds or builds the prepared set of a configuration.
        trained: Sets that are trained on, with which the held-out sets are compared; empty on ranks other than 0.

    Raises:
        ConfigError: As ``prepare``.
        DataError: As ``prepare``; or rows are both trained on and held out.
    """
    derived = derive_eval_configs(config, data.max_length)
    sets = {name: (run, prepare(run)) for name, run in derived.items()}
    if trained and not config.data.allow_eval_overlap:
        named = [(load_train_data(run.data), prepared.train) for run, prepared in sets.values()]
        _refuse_overlap(trained, named)
        if (own := trained[0][1].eval) is not None:
            # New rows were compared when they were prepared; replayed ones were not.
            mixture = load_test_data(config.data) or load_train_data(config.data, seed=read_seed(config))
            _refuse_overlap(trained[1:], [(mixture, own)])
    if not sets:
        return data
    record = {
        name: {"prepared_set": str(prepared.path), "key": prepared.key, **prepared.manifest["train"]}
        for name, (_, prepared) in sets.items()
    }
    packs = {name: prepared.train for name, (_, prepared) in sets.items()}
    return dataclasses.replace(data, eval_sets=packs, record={**data.record, "eval_datasets": record})


def _refuse_overlap(trained: Sequence[TrainedSet], held_out: Sequence[tuple[Mixture, datasets.Dataset]]) -> None:
    """Raise if held-out rows are also trained on, compared by token ids; pairs by those of their prompts.

    Raises:
        DataError: There are such rows; names the first few of each pair of sets.
    """
    problems: list[Problem] = []
    digested = [_digest_rows(rows) for _, rows in held_out if trained]
    for config, prepared in trained if held_out else ():  # To digest all rows takes minutes.
        train_digests, train_ids = _digest_rows(prepared.train)
        relation = SHARES_PROMPT if "prompt_ids" in prepared.train.column_names else SHARES_ROW
        find_train_places = partial(load_train_data(config.data, seed=read_seed(config)).find_places, train_ids)
        for (mixture, _), (eval_digests, eval_ids) in zip(held_out, digested, strict=True):
            find_eval_places = partial(mixture.find_places, eval_ids)
            with collect_problems(problems):
                refuse_overlap(train_digests, eval_digests, find_train_places, find_eval_places, relation)
    raise_problems(problems, "allow_eval_overlap")
