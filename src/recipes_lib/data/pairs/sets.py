"""Preparation of preference pairs: rendered, tokenised, verified and stored once per content."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from recipes_lib.config.schema import RecipeConfig, TokensConfig
from recipes_lib.data.chat.remarks import RemarkBits, build_bits
from recipes_lib.data.packed.audit import Finding, judge_remarks, refuse_errors, sort_findings
from recipes_lib.data.packed.encoding import (
    TokenizerLoader,
    build_encoder,
    find_places,
    map_chunks,
    read_seed,
)
from recipes_lib.data.packed.prepared_set import SetIdentity, derive_max_length, identify_set, show_progress
from recipes_lib.data.pairs.audit import ANSWERS, DropCounts, PairAudit, compute_pair_audit, judge_pairs
from recipes_lib.data.sources.broken_rows import BrokenRows
from recipes_lib.data.sources.mixtures import Mixture
from recipes_lib.data.sources.rows import Row
from recipes_lib.data.sources.splits import compute_digests, find_overlap, refuse_overlap, split_rows
from recipes_lib.data.store import PreparedSet, make_set, write_splits
from recipes_lib.errors import ConfigError, DataError, Problem, merge_alike, raise_problems

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from recipes_lib.data.pairs.pair_encoding import EncodedPair, PairEncoder


_PAIRS_PER_RECORD_BATCH: Final = 1000


@dataclass(frozen=True, slots=True)
class EncodedPairs:
    """The pairs of a mixture: where they stand, what they say, and as tokens.

    Attributes:
        mixture: What they were read from.
        table: ``prompt_ids``, ``chosen_ids``, ``rejected_ids``: lists of ``uint32``; ``row_id``, ``int64``: position in
            the mixture; ``margin``, ``float32``, null where there is none.
        digests: From ``compute_digests``, one for each pair.
        prompt_digests: The same of the prompts alone.
        remarks: ``uint8 (P,)``; what an audit should tell of each pair.
    """

    mixture: Mixture
    table: pa.Table
    digests: npt.NDArray[np.bytes_]
    prompt_digests: npt.NDArray[np.bytes_]
    remarks: RemarkBits

    def take(self, positions: npt.NDArray[np.int64]) -> EncodedPairs:
        """The pairs at these positions, which ascend."""
        chosen = np.isin(np.arange(len(self.table)), positions)
        table = self.table.filter(chosen)
        columns = self.digests[positions], self.prompt_digests[positions], self.remarks[positions]
        return EncodedPairs(self.mixture, table, *columns)

    def find_places(self, positions: Collection[int]) -> dict[int, str]:
        """The places of these pairs as errors name them; reads the mixture again."""
        row_ids = {at: self.table["row_id"][at].as_py() for at in positions}
        places = find_places(self.mixture, set(row_ids.values()))
        return {at: places[row_id] for at, row_id in row_ids.items()}


class _Chunk(NamedTuple):
    table: pa.Table
    digests: npt.NDArray[np.bytes_]
    prompt_digests: npt.NDArray[np.bytes_]
    remarks: RemarkBits
    dropped: DropCounts
    overlong: list[Problem]


def prepare_pairs(config: RecipeConfig, load_tokenizer: TokenizerLoader, *, local_rank: int = 0) -> PreparedSet:
    """Finds the prepared pairs of a run, or makes them; a second call tokenises nothing and loads no tokenizer.

    Rows have ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``; ``row_id``, the position in the data; and, where any
    row of the data has one, ``margin``, 0 for those without.

    Args:
        config: The run.
        load_tokenizer: Called only when the set has to be made.
        local_rank: Rank on this node; all but the first wait for its set.

    Raises:
        ConfigError: The options do not fit together, or the tokenizer is not there.
        DataError: Rows are broken, too long, or held out as well as trained on, by their prompt too, each named up to
            twenty; no pair is left; the set cannot be written; or, on the other ranks, that the first one gave up.
    """
    identity = identify_pairs(config)

    def build(staging: Path) -> dict[str, Any]:
        tables, manifest = _build(config, load_tokenizer(config), identity)
        batches = {name: table.to_reader(max_chunksize=_PAIRS_PER_RECORD_BATCH) for name, table in tables.items()}
        write_splits(staging, batches)
        return manifest

    return make_set(identity.root, identity.key, identity.inputs, build, local_rank=local_rank)


def identify_pairs(config: RecipeConfig) -> SetIdentity:
    """Says which set a run needs, without tokenising anything.

    Raises:
        ConfigError: The options do not fit together, rows are read in a layout without rejected answers, or the
            tokenizer is not there.
        DataError: The data are not there.
    """
    if config.data.dataset_streaming:
        where = config.provenance.get("dataset_streaming", "dataset_streaming")
        raise ConfigError(Problem(where, "pairs are prepared, all of them, before training", "set it to false"))
    # Data sets with pairs often have other columns too; what is wanted of them here is known.
    layout = "preference" if config.data.dataset_format == "auto" else config.data.dataset_format
    identity = identify_set(replace(config, data=replace(config.data, dataset_format=layout)), rows="pairs")
    parts = [*identity.train.parts, *(identity.test.parts if identity.test else ())]
    wrong = dict.fromkeys((part.source.name, part.format) for part in parts if part.format != "preference")
    if wrong:
        where = config.provenance.get("dataset_format", "dataset_format")
        found = "{} is read in the layout `{}`, which has no rejected answers"
        remedy = "write `preference`, or leave the layout out"
        raise ConfigError(*(Problem(where, found.format(*names), remedy) for names in wrong))
    return identity


def encode_pairs(
    encoder: PairEncoder,
    mixture: Mixture,
    tokens: TokensConfig,
    broken: BrokenRows,
    on_rows: Callable[[int], None],
) -> tuple[EncodedPairs, DropCounts]:
    """Tokens of all pairs that can be trained on, and the count of the others.

    Args:
        encoder: Tokenises.
        mixture: The rows.
        tokens: ``max_length``, and what happens to longer pairs.
        broken: Counts the rows that are broken; whoever calls judges them. Pairs that are too long are refused there.
        on_rows: Told the number of rows of each chunk that is done.
    """
    import pyarrow as pa  # only who prepares pays for it

    assert tokens.overlong in ("error", "drop"), "half an answer cannot be preferred to another"
    tables, dropped = [_build_table([], [], [])], DropCounts()
    digests, prompt_digests = [compute_digests([])], [compute_digests([])]
    remarks = [build_bits([])]
    overlong: list[Problem] = []
    entries = mixture.entries()
    for chunk in map_chunks(entries, lambda rows, numbers: _encode_chunk(encoder, rows, numbers, tokens), broken):
        tables.append(chunk.table)
        digests.append(chunk.digests)
        prompt_digests.append(chunk.prompt_digests)
        remarks.append(chunk.remarks)
        dropped += chunk.dropped
        overlong += chunk.overlong
        on_rows(chunk.dropped.num_rows)
    if tokens.overlong == "error":
        broken.refused += merge_alike(overlong, broken.num_rows)
    columns = np.concatenate(digests), np.concatenate(prompt_digests), np.concatenate(remarks)
    return EncodedPairs(mixture, pa.concat_tables(tables), *columns), dropped


def _encode_chunk(encoder: PairEncoder, rows: Sequence[Row], numbers: Sequence[int], tokens: TokensConfig) -> _Chunk:
    """The pairs of some rows, of which these are the numbers in their mixture.

    Raises:
        DataError: Rows that cannot be tokenised or masked.
    """
    pairs = encoder.encode(rows)
    kept: list[int] = []
    overlong: list[Problem] = []
    num_identical = num_answer_tokens = num_lost_tokens = 0
    for at, (row, pair) in enumerate(zip(rows, pairs, strict=True)):
        if np.array_equal(pair.chosen_ids, pair.rejected_ids):
            num_identical += 1
            continue
        answers = len(pair.chosen_ids), len(pair.rejected_ids)
        length = len(pair.prompt_ids) + max(answers)
        num_answer_tokens += sum(answers)
        if tokens.max_length is None or length <= tokens.max_length:
            kept.append(at)
            continue
        num_lost_tokens += sum(answers)
        found = f"prompt and longer answer have {length:,} tokens, max_length is {tokens.max_length:,}"
        overlong.append(Problem(row.where, found, "raise max_length, or set overlong to drop", size=length))
    return _Chunk(
        _build_table([pairs[at] for at in kept], [numbers[at] for at in kept], [rows[at].margin for at in kept]),
        compute_digests(rows[at] for at in kept),
        compute_digests(_take_prompt(rows[at]) for at in kept),
        build_bits(pairs[at].remarks for at in kept),
        DropCounts(
            num_rows=len(rows),
            num_identical=num_identical,
            num_overlong=len(overlong),
            num_answer_tokens=num_answer_tokens,
            num_lost_tokens=num_lost_tokens,
        ),
        overlong,
    )


def _build_table(pairs: Sequence[EncodedPair], row_ids: Sequence[int], margins: Sequence[float | None]) -> pa.Table:
    import pyarrow as pa

    ids = {
        name: pa.array([getattr(pair, name) for pair in pairs], pa.list_(pa.uint32()))
        for name in ("prompt_ids", *ANSWERS)
    }
    return pa.table({**ids, "row_id": pa.array(row_ids, pa.int64()), "margin": pa.array(margins, pa.float32())})


def _take_prompt(row: Row) -> Row:
    messages = None if row.messages is None else row.messages[: row.num_prompt_messages]
    return replace(row, messages=messages, completion=None, rejected=None)


def _build(
    config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, identity: SetIdentity
) -> tuple[dict[str, pa.Table], dict[str, Any]]:
    """The rows of each split, and the manifest without key and inputs."""
    sides, dropped, broken = _encode(config, tokenizer, identity)
    audits = {name: compute_pair_audit(side.table, side.digests, side.prompt_digests) for name, side in sides.items()}
    findings = [
        finding
        for name, audit in audits.items()
        for finding in sort_findings(
            [
                *judge_pairs(name, audit, dropped.get(name, DropCounts()), config.tokens.max_truncated_fraction),
                *judge_remarks(name, sides[name].remarks, sides[name].find_places),
            ]
        )
    ]
    findings += [Finding("warning", told) for split, rows in broken.items() for told in rows.tell(split)]
    refuse_errors(identity.train.name, findings)
    max_length = config.tokens.max_length or derive_max_length(max(audit.length_max for audit in audits.values()))
    return _settle_margins(sides, audits), {
        "max_length": max_length,
        "max_length_is_derived": config.tokens.max_length is None,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "broken_rows": {name: rows.count() for name, rows in broken.items()},
        "dropped": {name: dataclasses.asdict(counts) for name, counts in dropped.items()},
        **{name: dataclasses.asdict(audit) for name, audit in audits.items()},
    }


def _settle_margins(sides: Mapping[str, EncodedPairs], audits: Mapping[str, PairAudit]) -> dict[str, pa.Table]:
    """The tables with 0 for each margin that is missing, or without the column when all are."""
    has_margins = any(audit.num_margins for audit in audits.values())
    tables = {}
    for name, side in sides.items():
        column = side.table.column_names.index("margin")
        settled = side.table.remove_column(column)
        tables[name] = settled.append_column("margin", side.table[column].fill_null(0)) if has_margins else settled
    return tables


def _encode(
    config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, identity: SetIdentity
) -> tuple[dict[str, EncodedPairs], dict[str, DropCounts], dict[str, BrokenRows]]:
    """``train`` and, if pairs are held out, ``eval``; and what was left out of the data that each was read from."""
    from recipes_lib.data.pairs.pair_encoding import (
        PairEncoder,  # brings transformers, which finding a set does not need
    )

    encoder = PairEncoder(build_encoder(config, tokenizer), tokenizer)
    mixtures = {"train": identity.train} | ({"eval": identity.test} if identity.test else {})
    broken = {name: BrokenRows(config.tokens) for name in mixtures}
    with show_progress() as watch:
        read = {
            name: encode_pairs(encoder, mixture, config.tokens, broken[name], watch(mixture))
            for name, mixture in mixtures.items()
        }
    problems = [problem for name, mixture in mixtures.items() for problem in broken[name].judge(mixture.name)]
    raise_problems(problems, identity.train.name)
    sides, dropped = (
        {name: pairs for name, (pairs, _) in read.items()},
        {name: counts for name, (_, counts) in read.items()},
    )
    _refuse_empty(sides, dropped)
    if "eval" in sides:
        if not config.data.allow_eval_overlap:
            _refuse_overlap(sides["train"], sides["eval"])
    elif config.data.test_split_size is not None:
        split = split_rows(
            sides["train"].prompt_digests,
            config.data.test_split_size,
            read_seed(config),
            inseparable="rows with the same prompt",
        )
        sides = {"train": sides["train"].take(split.train), "eval": sides["train"].take(split.test)}
    return sides, dropped, broken


def _refuse_empty(sides: Mapping[str, EncodedPairs], dropped: Mapping[str, DropCounts]) -> None:
    problems = [
        Problem(
            side.mixture.name,
            f"no pair is left: of {dropped[name].num_rows:,} rows {dropped[name].num_identical:,} have the same answer "
            f"twice, and {dropped[name].num_overlong:,} are longer than max_length",
            "raise max_length, or mend the data",
        )
        for name, side in sides.items()
        if not len(side.table)
    ]
    raise_problems(problems, "dataset_name")


def _refuse_overlap(train: EncodedPairs, held_out: EncodedPairs) -> None:
    """Raise when pairs, or their prompts, are held out as well as trained on: a prompt tells much of its answers.

    Raises:
        DataError: There are such pairs.
    """
    problems: list[Problem] = []
    for ours, theirs, relation in (
        (train.digests, held_out.digests, "are held-out rows too"),
        (train.prompt_digests, held_out.prompt_digests, "have the prompt of a held-out row"),
    ):
        overlap = find_overlap(ours, theirs)
        train_places = train.find_places([position for position, _ in overlap.pairs])
        eval_places = held_out.find_places([position for _, position in overlap.pairs])
        try:
            refuse_overlap(overlap, train_places.__getitem__, eval_places.__getitem__, relation=relation)
        except DataError as error:
            problems += error.problems
    raise_problems(problems, "dataset_test_split")
