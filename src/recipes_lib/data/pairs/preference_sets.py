"""Preference pairs: tokenised, verified, audited and stored once per content, and their derived statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from rich.table import Table

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.config.token_ids import count_before_end, find_end_tokens
from recipes_lib.data.packed.encoding import EncodedMixture, TokenFile, TokenizerLoader, build_encoder
from recipes_lib.data.packed.packing import Examples, IntArray, build_examples
from recipes_lib.data.packed.prepared_set import (
    PreparedRows,
    SetIdentity,
    add_eval_sets,
    add_findings,
    build_lists,
    derive_max_length,
    describe_set,
    encode_sides,
    identify_set,
    open_set,
    prepare_set,
    read_batches,
    separate_sides,
)
from recipes_lib.data.packed.supervision_audit import (
    Finding,
    judge_duplicates,
    judge_lengths,
    judge_remarks,
    summarize_lengths,
)
from recipes_lib.data.sources.rows import EncodedRow, Row
from recipes_lib.data.sources.splits import compute_digests
from recipes_lib.data.store import PreparedSet
from recipes_lib.errors import ConfigError, Problem, raise_problems

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from recipes_lib.data.pairs.pair_encoding import PairEncoder

_SHARES_PROMPT: Final = "have the prompt of a held-out row"
"""What is refused of training pairs: a prompt tells much of its answers."""


def prepare_pairs(config: RecipeConfig, load_tokenizer: TokenizerLoader, *, local_rank: int = 0) -> PreparedSet:
    """Find the prepared pairs of a run, or build them; a second call tokenises nothing and loads no tokenizer.

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
    return prepare_set(
        identity, lambda file: _build(config, load_tokenizer(config), identity, file), local_rank=local_rank
    )


def identify_pairs(config: RecipeConfig) -> SetIdentity:
    """Return the identity of a run's set, without tokenising anything.

    Raises:
        ConfigError: The options do not fit together, rows are read in a layout without rejected answers, or the
            tokenizer is not there.
        DataError: The data are not there.
    """
    # Pair datasets often have additional columns; the required ones are known here.
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


def _encode_pairs(
    encoder: PairEncoder, rows: Sequence[Row], row_ids: Sequence[int]
) -> tuple[Examples, dict[str, npt.NDArray[Any]]]:
    """Each pair as one example: prompt, chosen and rejected answer, concatenated, with the answers as targets.

    Raises:
        DataError: Rows that cannot be tokenised or masked.
    """
    pairs, examples = encoder.encode(rows), []
    for pair in pairs:
        ids = np.concatenate(pair[:3])
        examples.append(EncodedRow(ids, np.arange(len(ids)) >= len(pair.prompt_ids), pair.remarks))
    return build_examples(examples, row_ids), {
        "prompt_digests": compute_digests(map(_take_prompt, rows)),
        "num_chosen": np.array([len(pair.chosen_ids) for pair in pairs], np.int32),
        "is_identical": np.array([np.array_equal(*pair[1:3]) for pair in pairs], np.bool_),
        "margins": np.array([row.margin for row in rows], np.float32),
    }


def _take_prompt(row: Row) -> Row:
    messages = None if row.messages is None else row.messages[: row.num_prompt_messages]
    return replace(row, messages=messages, completion=None, rejected=None)


def _describe_overlong(where: str, length: int, max_length: int) -> Problem:
    found = f"prompt and longer answer have {length:,} tokens, max_length is {max_length:,}"
    return Problem(where, found, "raise max_length, or set overlong to drop", size=length)


def _build(
    config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, identity: SetIdentity, file: TokenFile
) -> tuple[dict[str, pa.RecordBatchReader], dict[str, Any]]:
    """Return the rows of each split, and the manifest without key and inputs."""
    from recipes_lib.data.pairs.pair_encoding import (
        PairEncoder,  # Imports transformers, which finding an existing set does not need.
    )

    assert config.tokens.overlong in ("error", "drop"), "half an answer cannot be preferred to another"
    encoder = PairEncoder(build_encoder(config, tokenizer), tokenizer)
    read, broken = encode_sides(
        config,
        identity,
        lambda rows, row_ids: _encode_pairs(encoder, rows, row_ids),
        file,
        _describe_overlong,
        lambda side: count_tokens(side).lengths,
    )
    sides, dropped = {}, {}
    for name, side in read.items():
        sides[name], dropped[name] = drop_pairs(side, config.tokens.max_length)
    _refuse_empty(sides, dropped)
    sides = separate_sides(
        config,
        sides,
        lambda side: side.columns["prompt_digests"],
        inseparable="rows with the same prompt",
        relation=_SHARES_PROMPT,
    )
    audits = {name: compute_pair_audit(side) for name, side in sides.items()}
    findings = [
        finding
        for name, audit in audits.items()
        for finding in (
            *judge_pairs(name, audit, dropped.get(name, DropCounts()), config.tokens.max_truncated_fraction),
            *judge_remarks(name, sides[name].examples.remarks, sides[name].find_places),
        )
    ]
    max_length = config.tokens.max_length or derive_max_length(max(audit.length_max for audit in audits.values()))
    has_margins = any(audit.num_margins for audit in audits.values())
    return {name: _read_pairs(side, has_margins=has_margins) for name, side in sides.items()}, {
        **describe_set(config, identity, max_length, findings, broken),
        "dropped": {name: dataclasses.asdict(counts) for name, counts in dropped.items()},
        **{name: dataclasses.asdict(audit) for name, audit in audits.items()},
    }


def _refuse_empty(sides: Mapping[str, EncodedMixture], dropped: Mapping[str, DropCounts]) -> None:
    problems = [
        Problem(
            side.mixture.name,
            f"no pair is left: of {dropped[name].num_rows:,} rows {dropped[name].num_identical:,} have the same answer "
            f"twice, and {dropped[name].num_overlong:,} are longer than max_length",
            "raise max_length, or fix the data",
        )
        for name, side in sides.items()
        if not len(side.examples)
    ]
    raise_problems(problems, "dataset_name")


def _read_pairs(side: EncodedMixture, *, has_margins: bool) -> pa.RecordBatchReader:
    """The pairs with the columns of ``prepare_pairs``, read from the examples' tokens in batches."""
    import pyarrow as pa  # Imported only if a set is built.

    lengths = np.stack(count_tokens(side), axis=1)

    def read(rows: slice) -> pa.RecordBatch:
        ids, _ = side.examples.read(rows)
        # Prompt, chosen and rejected answer alternate.
        part = np.repeat(np.arange(lengths[rows].size) % 3, lengths[rows].ravel())
        columns = {
            name: build_lists(np.append(0, np.cumsum(lengths[rows, number])), ids[part == number])
            for number, name in enumerate(("prompt_ids", "chosen_ids", "rejected_ids"))
        }
        columns["row_id"] = pa.array(side.examples.row_ids[rows])
        if has_margins:
            # Rows without a margin have NaN there.
            columns["margin"] = pa.array(np.nan_to_num(side.columns["margins"][rows]))
        return pa.record_batch(columns)

    return read_batches(len(side.examples), read)


class PairRows(Protocol):
    """Pairs by number: a ``datasets.Dataset`` with the columns of ``prepare_pairs``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class PairData(PreparedRows):
    """Pairs in the order of the data, with statistics; a length is that of a prompt with one answer."""

    audit: PairAudit

    def iterate_examples(self) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]]:
        """Yield ids of the held-out prompts with their chosen answers, and a mask of the answer; each ``(T,)``.

        A prompt with several pairs is used once, with the answer of the first.
        """
        seen: set[bytes] = set()
        for number in range(0 if self.eval is None else len(self.eval)):
            pair = self.eval[number]
            prompt, chosen = pair["prompt_ids"], pair["chosen_ids"]
            if prompt.tobytes() not in seen:
                seen.add(prompt.tobytes())
                ids = np.concatenate([prompt, chosen]).astype(np.uint32)
                yield ids, np.arange(len(ids)) >= len(prompt)


def load_pair_data(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, *, local_rank: int = 0) -> PairData:
    """Find or build the prepared pairs of a run; call it before any process group exists.

    Args:
        config: The run.
        tokenizer: Of the run.
        local_rank: Number of this process on its node; the first one prepares, the others wait for it.

    Raises:
        ConfigError: The options do not fit together.
        DataError: Rows are broken, too long, or held out as well as trained on; no pair is left; or, on the other
            processes, that the first one gave up.
    """

    def prepare_run(run: RecipeConfig) -> PreparedSet:
        return prepare_pairs(run, lambda _: tokenizer, local_rank=local_rank)

    fields, trained = open_set(config, prepare_run, lambda pairs: np.ones(len(pairs), np.int64))
    data = PairData(**fields, audit=PairAudit(**fields["record"]["train"]))
    return add_eval_sets(config, data, prepare_run, trained if local_rank == 0 else [], _SHARES_PROMPT)


def render_summary(prepared: PreparedSet) -> Table:
    """Table of a set of pairs, one column for each split."""
    manifest = prepared.manifest
    splits = [name for name in ("train", "eval") if name in manifest]
    audits = [PairAudit(**manifest[split]) for split in splits]
    table = Table("", *splits, title=f"pairs of up to {manifest['max_length']:,} tokens")
    for label, values in (
        ("pairs", [audit.num_pairs for audit in audits]),
        ("prompts", [audit.num_prompts for audit in audits]),
        ("tokens of the prompts", [audit.num_prompt_tokens for audit in audits]),
        ("tokens of the answers", [audit.num_chosen_tokens + audit.num_rejected_tokens for audit in audits]),
        ("longest pair", [audit.length_max for audit in audits]),
        ("left out, too long", [manifest["dropped"].get(split, {}).get("num_overlong", 0) for split in splits]),
    ):
        table.add_row(label, *(f"{value:,}" for value in values))
    add_findings(table, manifest["findings"])
    return table


class UnfinishedAnswers:
    """Prepared pairs, some of which train a lower score for an answer without its end token.

    All answers of a dataset are complete, so a reward model is only trained at end tokens; scores of a policy's
    truncated answers would be random. In a drawn pair the rejected answer is the chosen one without its end token (half
    of them), or truncated at a random token. Draw and truncation are functions of ``seed`` and the number of the pair,
    equal in every epoch.
    """

    def __init__(self, pairs: PairRows, tokenizer: PreTrainedTokenizerBase, share: float, seed: int) -> None:
        """Wrap pairs, which are read on demand.

        Args:
            pairs: With ``chosen_ids`` and ``rejected_ids``; a ``margin`` of a pair that is drawn becomes 0.
            tokenizer: Of the model.
            share: Of the pairs, in ``[0, 1]``; answers of a single token stay as they are.
            seed: Of the run.
        """
        self._pairs, self._share, self._seed = pairs, share, seed
        self._end_tokens = find_end_tokens(tokenizer)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        pair: Mapping[str, Any] = self._pairs[index]
        # By pair, so that neither order nor number of processes matters.
        random = np.random.default_rng([self._seed, index])
        unfinished = pair["chosen_ids"][: count_before_end(pair["chosen_ids"], self._end_tokens)]
        if random.random() >= self._share or not len(unfinished):
            return pair
        if random.random() < 0.5:
            unfinished = unfinished[: random.integers(1, len(unfinished), endpoint=True)]
        margin = {"margin": 0.0} if "margin" in pair else {}
        return {**pair, "rejected_ids": unfinished, **margin}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairAudit:
    """Figures of one split; JSON values. The length of a pair is that of the prompt and the longer answer.

    Attributes:
        num_pairs: Pairs to train on.
        num_prompts: Prompts that differ.
        num_duplicates: Pairs that say what an earlier one says.
        num_margins: Pairs of which the data say by how much the chosen answer is better.
        num_prompt_tokens: Tokens of the prompts, each counted once a pair.
        num_chosen_tokens: Tokens of the chosen answers.
        num_rejected_tokens: Tokens of the rejected answers.
        length_p5: 5th percentile of the pairs' lengths in tokens.
        length_p50: Median length.
        length_p95: 95th percentile.
        length_max: Longest pair.
        terminators: Last tokens of the answers, in order.
    """

    num_pairs: int
    num_prompts: int
    num_duplicates: int
    num_margins: int
    num_prompt_tokens: int
    num_chosen_tokens: int
    num_rejected_tokens: int
    length_p5: int
    length_p50: int
    length_p95: int
    length_max: int
    terminators: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens with one copy of each prompt."""
        return self.num_prompt_tokens + self.num_chosen_tokens + self.num_rejected_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCounts:
    """Counts of dropped rows and lost tokens; JSON values.

    Attributes:
        num_rows: Rows read.
        num_identical: Rows whose answers are the same tokens, left out.
        num_overlong: Rows longer than ``max_length``, left out.
        num_answer_tokens: Tokens of all answers that differ.
        num_lost_tokens: Those of them that were too long.
    """

    num_rows: int = 0
    num_identical: int = 0
    num_overlong: int = 0
    num_answer_tokens: int = 0
    num_lost_tokens: int = 0

    @property
    def lost_fraction(self) -> float:
        """Share of lost answer tokens, 0 to 1."""
        return self.num_lost_tokens / max(1, self.num_answer_tokens)


class PairTokens(NamedTuple):
    """Tokens of each prompt, chosen and rejected answer, ``int64 (P,)``."""

    prompt: IntArray
    chosen: IntArray
    rejected: IntArray

    @property
    def lengths(self) -> IntArray:
        """Tokens of the prompt and the longer answer, ``int64 (P,)``."""
        lengths: IntArray = self.prompt + np.maximum(self.chosen, self.rejected)
        return lengths


def count_tokens(pairs: EncodedMixture) -> PairTokens:
    """Lengths of the parts of each pair.

    Args:
        pairs: Each an example of prompt, chosen and rejected answer, end to end, of which the answers are the targets;
            with the column ``num_chosen``, tokens of the chosen one.
    """
    answers, chosen = pairs.examples.num_targets, pairs.columns["num_chosen"].astype(np.int64)
    return PairTokens(pairs.examples.lengths - answers, chosen, answers - chosen)


def drop_pairs(pairs: EncodedMixture, max_length: int | None) -> tuple[EncodedMixture, DropCounts]:
    """Drop pairs that cannot be trained on, and count them.

    Args:
        pairs: As for ``count_tokens``; with the column ``is_identical``, True where both answers are the same tokens.
        max_length: Tokens that a prompt and either answer have room for; ``None``: any number.
    """
    tokens, is_identical = count_tokens(pairs), pairs.columns["is_identical"]
    is_overlong = ~is_identical & (tokens.lengths > (np.inf if max_length is None else max_length))
    counts = DropCounts(
        num_rows=len(is_identical),
        num_identical=int(is_identical.sum()),
        num_overlong=int(is_overlong.sum()),
        num_answer_tokens=int(pairs.examples.num_targets[~is_identical].sum()),
        num_lost_tokens=int(pairs.examples.num_targets[is_overlong].sum()),
    )
    return pairs.take(np.flatnonzero(~is_identical & ~is_overlong)), counts


def compute_pair_audit(pairs: EncodedMixture) -> PairAudit:
    """Compute the audit of one split.

    Args:
        pairs: At least one, as for ``count_tokens``; with the columns ``prompt_digests``, what each prompt says, and
            ``margins``, ``float32``, NaN where there is none.
    """
    tokens = count_tokens(pairs)
    terminators: set[int] = set()
    for block in pairs.examples.iterate_blocks():
        ends = np.cumsum(pairs.examples.lengths[block]) - 1
        ids, _ = pairs.examples.read(block)
        # The last token of the rejected answer, and that of the chosen one, which stands before it.
        terminators.update(ids[ends].tolist(), ids[ends - tokens.rejected[block]].tolist())
    return PairAudit(
        num_pairs=len(tokens.prompt),
        num_prompts=len(np.unique(pairs.columns["prompt_digests"])),
        num_duplicates=pairs.num_duplicates,
        num_margins=int(np.isfinite(pairs.columns["margins"]).sum()),
        num_prompt_tokens=int(tokens.prompt.sum()),
        num_chosen_tokens=int(tokens.chosen.sum()),
        num_rejected_tokens=int(tokens.rejected.sum()),
        **summarize_lengths(tokens.lengths),
        terminators=sorted(terminators),
    )


def judge_pairs(split: str, audit: PairAudit, dropped: DropCounts, max_lost_fraction: float | None) -> list[Finding]:
    """Return the findings on the figures of a split.

    Args:
        split: ``train`` or ``eval``, as the messages name it.
        audit: From ``compute_pair_audit``.
        dropped: What was left out.
        max_lost_fraction: ``max_truncated_fraction``.
    """
    same = f"{split}: rows whose answers are the same tokens, left out: {dropped.num_identical:,}"
    overlong = (
        f"{split}: rows longer than max_length, left out: {dropped.num_overlong:,}; lost with them: "
        f"{dropped.num_lost_tokens:,} tokens of answers ({dropped.lost_fraction:.2%})"
    )
    return [
        judge_lengths(split, overlong, dropped.num_overlong, dropped.lost_fraction, max_lost_fraction),
        Finding("warning" if dropped.num_identical else "ok", same),
        judge_duplicates(split, audit.num_duplicates),
    ]
