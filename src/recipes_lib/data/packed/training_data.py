"""Training data of fine-tuning: a prepared set, or rows that are streamed and tokenised during training."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, Final, Literal

import datasets
import numpy as np
import numpy.typing as npt
from datasets.iterable_dataset import ExamplesIterable
from transformers import PreTrainedTokenizerBase

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.config.tokenization import find_end_tokens
from recipes_lib.data.packed.encoding import ROWS_PER_CHUNK, build_encoder, encode_chunk, read_seed, split_chunks
from recipes_lib.data.packed.packing import Examples, LengthCounts
from recipes_lib.data.packed.prepared_set import PreparedRows, add_eval_sets, open_set, prepare
from recipes_lib.data.packed.supervision_audit import (
    Finding,
    PackedSplit,
    SplitAudit,
    check_audit,
    describe_overlong,
    pack_split,
    read_audit,
    refuse_errors,
    sort_findings,
)
from recipes_lib.data.sources.mixtures import Mixture, derive_eval_configs, load_test_data, load_train_data
from recipes_lib.data.sources.rows import BrokenRows, Row, encode_valid
from recipes_lib.data.sources.splits import Digests, FindPlaces, compute_digests, compute_row_digest, refuse_overlap
from recipes_lib.data.store import PreparedSet
from recipes_lib.errors import DataError, merge_alike, raise_problems

_COUNTS: Final = ("num_rows", "num_rows_without_target", "num_packs")
"""Figures of an audit that are compared with limits."""
Pack = dict[str, np.ndarray[Any, np.dtype[Any]]]


def build_train_stream(
    config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, epochs: Iterable[int] = range(sys.maxsize)
) -> datasets.IterableDataset:
    """Build the stream of training packs: in each epoch, windows of rows are packed as by ``prepare``, and shuffled.

    By default it has no end: upstream ends a loader's epoch without an update of the gradients accumulated so far, and
    resumes in its first epoch only; accelerate repeats rows until every process has a batch. The order is a function of
    seed, epoch and window, so that resuming by skipping packs is exact. All processes read the whole stream; each
    trains on its share of the packs.

    Args:
        config: Configuration of the run.
        tokenizer: Tokenizer of the run.
        epochs: Numbers of the epochs, from 0.
    """
    windows = _Windows(config, tokenizer, load_train_data(config.data, seed=read_seed(config)), "train")
    return datasets.IterableDataset(ExamplesIterable(windows.repeat, {"epochs": epochs}))


@dataclass(frozen=True, slots=True)
class _Windows:
    """Windows of ``ROWS_PER_CHUNK`` rows of a stream, each encoded, truncated, packed and, for training, shuffled."""

    config: RecipeConfig
    tokenizer: PreTrainedTokenizerBase
    mixture: Mixture
    split: Literal["train", "eval"]

    def repeat(self, epochs: Iterable[int]) -> Iterator[tuple[int, Pack]]:
        """Yield the packs of several epochs."""
        for epoch in epochs:
            yield from self.generate(epoch)

    def generate(self, epoch: int = 0) -> Iterator[tuple[int, Pack]]:
        """Yield the packs of an epoch with their numbers; the windows read so far are audited like a prepared set.

        Raises:
            DataError: Too many rows are broken, too long or without targets.
        """
        number, totals = 0, Counter[str]()
        for window, packed in enumerate(self.pack()):
            audit = packed.audit
            totals.update(asdict(packed.cut) | {name: getattr(audit, name) for name in _COUNTS})
            totals["num_stopped"] += round(audit.stop_fraction * (audit.num_rows - audit.num_rows_without_target))
            # Of all rows so far: in a single window, few rows can by chance exceed a limit.
            counts: dict[str, Any] = {name: totals[name] for name in _COUNTS}
            if num_with_target := totals["num_rows"] - totals["num_rows_without_target"]:
                counts["stop_fraction"] = totals["num_stopped"] / num_with_target
            cut = LengthCounts(**{name: totals[name] for name in asdict(packed.cut)})
            limit = self.config.tokens.max_truncated_fraction
            refuse_errors(self.mixture.name, check_audit(self.split, replace(audit, **counts), cut, limit))
            order = np.arange(len(packed.bins))
            if self.split == "train":
                # A separate generator for each window, so that the order does not depend on earlier windows.
                np.random.default_rng([read_seed(self.config), epoch, window]).shuffle(order)
            for at in order.tolist():
                yield number, _build_pack(packed, at)
                number += 1

    def pack(self) -> Iterator[PackedSplit]:
        """Yield the packed windows in order.

        The share of broken rows is that of all rows read so far. It is checked after each window and at the end.

        Raises:
            DataError: Too many rows are broken, or rows are too long.
        """
        tokens, capacity = self.config.tokens, self.config.tokens.max_length
        assert capacity is not None
        encoder = build_encoder(self.config, self.tokenizer, capacity)
        end_tokens = find_end_tokens(self.tokenizer)
        (held_out, held_out_places), name = self._read_held_out(), self.mixture.name
        broken = BrokenRows(tokens, is_stream=True)

        def encode(rows: Sequence[Row], row_ids: Sequence[int]) -> tuple[Examples, Sequence[Row], Digests]:
            return encode_chunk(encoder, rows, row_ids), rows, compute_digests(rows)

        for window, entries in enumerate(split_chunks(self.mixture.entries(), broken)):
            encoded, problems = encode_valid(encode, entries, window * ROWS_PER_CHUNK, drop=broken.are_dropped)
            broken.add(len(entries), problems)
            if encoded is None or broken.exceeds_limit:
                break
            examples, rows, digests = encoded
            places = _name_places([row.where for row in rows])
            refuse_overlap(digests, held_out, places, _name_places(held_out_places))
            too_long = np.flatnonzero(examples.lengths > capacity).tolist()
            if too_long and tokens.overlong == "error":
                lengths = examples.lengths.tolist()
                overlong = [describe_overlong(rows[at].where, lengths[at], capacity) for at in too_long]
                raise_problems(merge_alike(overlong, len(rows)), name)
            if len(examples):
                packed = pack_split(self.split, examples, tokens, capacity, end_tokens, places, digests)
                dropped = [Finding("warning", text) for text in (broken.list_warnings(self.split) if problems else ())]
                yield replace(packed, findings=sort_findings([*packed.findings, *dropped]))
        raise_problems(broken.list_problems(name), name)

    def _read_held_out(self) -> tuple[Digests, list[str]]:
        """Return the digest and location of each held-out row; training rows must not repeat one."""
        digests, places = list[bytes](), list[str]()
        if self.split != "train" or self.config.data.allow_eval_overlap:
            return np.array(digests, "S16"), places
        capacity = self.config.tokens.max_length or 0
        mixtures = [load_train_data(run.data) for run in derive_eval_configs(self.config, capacity).values()]
        mixtures += filter(None, [load_test_data(self.config.data)])
        for row in chain.from_iterable(mixture.rows(self.config.tokens) for mixture in mixtures):
            with suppress(DataError):  # A broken row, which is counted when the held-out rows are packed.
                digests.append(compute_row_digest(row))
                places.append(row.where)
        return np.array(digests, "S16"), places


def _name_places(places: Sequence[str]) -> FindPlaces:
    return lambda positions: {at: places[at] for at in positions}


def _build_pack(packed: PackedSplit, at: int) -> Pack:
    bins = packed.bins
    members = bins.order[bins.offsets[at] : bins.offsets[at + 1]]
    input_ids, loss_mask = packed.examples.read(members)
    return {
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "seq_lengths": packed.examples.lengths[members],
        "row_ids": packed.examples.row_ids[members],
    }


@dataclass(frozen=True, kw_only=True)
class TrainingData(PreparedRows):
    """Packs with their statistics; columns ``input_ids``, ``loss_mask``, ``seq_lengths`` and ``row_ids``.

    Attributes:
        audit: Figures of the training rows; for a stream, of its first window.
    """

    audit: SplitAudit

    def iterate_examples(self) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]]:
        """Yield token ids and loss mask of the held-out rows, each ``(T,)``, in the order of the dataset."""
        if self.eval is None:
            return
        places = sorted(
            (int(row_id), pack, place)
            for pack, row_ids in enumerate(self.eval["row_ids"])
            for place, row_id in enumerate(row_ids)
        )
        for _, pack, place in places:
            row = self.eval[pack]
            end = int(np.sum(row["seq_lengths"][: place + 1]))
            span = slice(end - int(row["seq_lengths"][place]), end)
            yield row["input_ids"][span], row["loss_mask"][span]


def load_training_data(
    config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, *, local_rank: int = 0
) -> TrainingData:
    """Find or build the prepared set of a run, or open its stream.

    Call it before the process group is created: local rank 0 can take longer than the timeout of a collective.

    Args:
        config: Configuration of the run.
        tokenizer: Tokenizer of the run.
        local_rank: Local rank of this process; rank 0 builds the set, the others wait for it.

    Raises:
        ConfigError: Options are incompatible.
        DataError: Rows are broken, too long, without targets, or both trained on and held out.
    """

    def prepare_run(run: RecipeConfig) -> PreparedSet:
        return prepare(run, lambda: tokenizer, local_rank=local_rank)

    if config.data.dataset_streaming:
        return add_eval_sets(config, _open_stream(config, tokenizer), prepare_run, [])
    fields, trained = open_set(config, prepare_run, count_trained_tokens)
    data = TrainingData(**fields, audit=read_audit(fields["record"]["train"]))
    return add_eval_sets(config, data, prepare_run, trained if local_rank == 0 else [])


def count_trained_tokens(packs: datasets.Dataset) -> npt.NDArray[np.int64]:
    """Return the number of target tokens of each pack, ``int64 (P,)``."""
    counts = [np.zeros(0, np.int64)]
    for batch in packs.with_format("arrow").iter(batch_size=ROWS_PER_CHUNK):
        masks = batch["loss_mask"].combine_chunks()
        lengths = masks.value_lengths().to_numpy()
        is_target = masks.flatten().to_numpy(zero_copy_only=False)
        # `reduceat` is wrong for empty segments, which do not occur: every pack has a token.
        counts.append(np.add.reduceat(is_target, np.cumsum(lengths) - lengths, dtype=np.int64))
    return np.concatenate(counts)


def _open_stream(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase) -> TrainingData:
    train, test = load_train_data(config.data, seed=read_seed(config)), load_test_data(config.data)
    first, held_out = next(_Windows(config, tokenizer, train, "train").pack()), None
    if test is not None:
        # In memory: repeated evaluation on several processes needs random access.
        packs = [pack for _, pack in _Windows(config, tokenizer, test, "eval").generate()]
        held_out = datasets.Dataset.from_list(packs).with_format("numpy")
    assert config.tokens.max_length is not None
    return TrainingData(
        train=build_train_stream(config, tokenizer),
        eval=held_out,
        max_length=config.tokens.max_length,
        audit=first.audit,
        findings=first.findings,
        # A resumed run skips packs, which must be those of the same rows.
        record={"streamed": True, "fingerprint": train.fingerprint(), "first_window": asdict(first.audit)},
    )
