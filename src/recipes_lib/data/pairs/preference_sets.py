"""Prepared sets of preference pairs: tokenisation, verification, audit, and storage once per content."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.table import Table

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.config.tokenization import count_before_end, find_end_tokens
from recipes_lib.data.packed import prepared_set
from recipes_lib.data.packed.encoding import EncodedMixture, TokenFile, TokenizerLoader, build_encoder
from recipes_lib.data.packed.packing import Examples, IntArray, build_examples, split_blocks
from recipes_lib.data.packed.supervision_audit import (
    Finding,
    check_duplicates,
    check_lengths,
    check_remarks,
    summarize_lengths,
)
from recipes_lib.data.sources.rows import EncodedRow, Remark, Row
from recipes_lib.data.sources.splits import compute_digests, count_duplicates, find_distinct
from recipes_lib.data.store import PreparedSet, Rows
from recipes_lib.errors import ConfigError, DataError, Problem, collect_problems, raise_problems

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from recipes_lib.data.chat.encoder import RowEncoder

TokenIds = npt.NDArray[np.uint32]


class EncodedPair(NamedTuple):
    """A tokenised pair; the model reads ``prompt_ids`` followed by either answer.

    Attributes:
        prompt_ids: Token ids of the prompt, including the generation prompt; at least one, ``uint32``.
        chosen_ids: Token ids of the chosen answer, up to and including its end token; at least one, ``uint32``.
        rejected_ids: Token ids of the rejected answer, in the same form.
        remarks: Remarks on the row with either answer, for the audit.
    """

    prompt_ids: TokenIds
    chosen_ids: TokenIds
    rejected_ids: TokenIds
    remarks: Collection[Remark] = ()


def encode_pairs(encoder: RowEncoder, rows: Sequence[Row]) -> list[EncodedPair]:
    """Return the token ids of each pair, in order.

    An answer has the target tokens of fine-tuning: those from the end of the generation prompt to the end token.
    Text that the template writes after it is dropped. The separately tokenised prompt is verified to be a prefix of
    both texts, token by token.

    Args:
        encoder: Encoder that renders, tokenises and masks each answer as in fine-tuning, with ``loss_on`` unset.
        rows: Rows of the layout ``preference``.

    Raises:
        DataError: Rows cannot be rendered, tokenised or masked exactly; have no prompt, an answer that is not one
            assistant turn, or one that does not continue the prompt. Has the problems of all rows.

    Source: ``RowEncoder``; ``tests/data/pairs/test_pair_encoding.py`` compares with rendering and tokenisation by
    transformers.
    """
    problems = [problem for row in rows if (problem := _check_turns(row))]
    valid = [row for row in rows if not _check_turns(row)] if problems else rows
    answers: list[EncodedRow] = []
    try:
        # Chosen and rejected answers alternate, in a single call, in which the tokenizer is parallel.
        answers = encoder.encode([row for pair in valid for row in (pair, take_rejected(pair))])
    except DataError as error:
        problems += dict.fromkeys(error.problems)  # A problem of the prompt occurs with both answers.
    pairs = []
    # After an error `answers` is empty, and no pair is joined.
    for row, chosen, rejected in zip(valid, answers[::2], answers[1::2], strict=False):
        with collect_problems(problems):
            pairs.append(_join_pair(encoder, row, chosen, rejected))
    if problems:
        raise DataError(*problems)
    return pairs


def _join_pair(encoder: RowEncoder, row: Row, chosen: EncodedRow, rejected: EncodedRow) -> EncodedPair:
    prompt = encoder.encode_prompt(row)
    if not len(prompt):
        found = "the prompt has no token that could predict the first token of an answer"
        raise DataError(Problem(row.where, found, "write a prompt, or remove the row"))
    answers = {"chosen": chosen, "rejected": rejected}
    cuts = [_cut_answer(encoder, row, name, prompt, answer) for name, answer in answers.items()]
    remarks = tuple(dict.fromkeys([*chosen.remarks, *rejected.remarks]))
    return EncodedPair(prompt, cuts[0], cuts[1], remarks)


def _cut_answer(encoder: RowEncoder, row: Row, name: str, prompt: TokenIds, answer: EncodedRow) -> TokenIds:
    """Return the tokens of an answer, from the first one after the prompt to the last target."""
    ids, targets = answer.input_ids, np.flatnonzero(answer.loss_mask)
    if not np.array_equal(ids[: len(prompt)], prompt):
        raise _refuse_prefix(encoder, row, name, prompt, ids)
    if not len(targets) or (targets != len(prompt) + np.arange(len(targets))).any():
        found = f"the targets of `{name}` are not contiguous from the end of the generation prompt"
        remedy = "let {% generation %} enclose what the chat template writes after its generation prompt"
        raise DataError(Problem(row.where, found, remedy))
    return ids[len(prompt) : len(prompt) + len(targets)]


def _refuse_prefix(encoder: RowEncoder, row: Row, name: str, prompt: TokenIds, ids: TokenIds) -> DataError:
    shared = min(len(prompt), len(ids))
    at = int(np.argmax(np.append(prompt[:shared] != ids[:shared], True)))
    expected, written = (encoder.tokenizer.decode(tokens[at : at + 8].tolist()) for tokens in (prompt, ids))
    found = f"`{name}` does not begin with the prompt: token {at} starts {written!r} instead of {expected!r}"
    if row.messages is None:
        remedy = "move the white space at the end of the prompt to the start of both answers"
    else:
        template = "let the chat template write its generation prompt before every answer (chat_template_path)"
        remedy = f"{Remark.OTHER_OPENING.remedy}; otherwise {template}"
    return DataError(Problem(row.where, found, remedy))


def _check_turns(row: Row) -> Problem | None:
    assert row.rejected is not None, "not a row of the `preference` layout"
    if row.messages is None:
        return None
    for name, turns in (("chosen", row.messages[row.num_prompt_messages :]), ("rejected", row.rejected)):
        if len(turns) != 1:
            found = f"`{name}` has {len(turns)} messages after the prompt, and an answer is one assistant turn"
            return Problem(row.where, found, "end both chats with the first turn in which they differ")
    return None


def take_rejected(row: Row) -> Row:
    """Return the row with its rejected answer in place of the chosen one."""
    if isinstance(row.rejected, str):
        return replace(row, completion=row.rejected)
    assert row.messages is not None
    assert row.rejected is not None
    return replace(row, messages=[*row.messages[: row.num_prompt_messages], *row.rejected])


def prepare_pairs(config: RecipeConfig, load_tokenizer: TokenizerLoader, *, local_rank: int = 0) -> PreparedSet:
    """Find the prepared pairs of a run, or build them; an existing set is found without loading a tokenizer.

    Rows have ``prompt_ids``, ``chosen_ids``, ``rejected_ids`` and ``row_id``, the position in the dataset; and
    ``margin``, if any row of the dataset has one: 0 for rows without.

    Args:
        config: Configuration of the run.
        load_tokenizer: Function that loads the tokenizer; called only to build the set.
        local_rank: Local rank of this process; all ranks but 0 wait for the set.

    Raises:
        ConfigError: Options are incompatible, or the tokenizer does not exist.
        DataError: Rows are broken or too long; rows or their prompts are both trained on and held out; no pair is left;
            the set cannot be written; on other ranks, local rank 0 has not built the set.
    """
    return prepared_set.prepare_set(config, load_tokenizer, identify_pairs(config), _build, local_rank)


def identify_pairs(config: RecipeConfig) -> prepared_set.SetIdentity:
    """Return the identity of a run's prepared pairs, without tokenising anything.

    Raises:
        ConfigError: Options are incompatible, a layout has no rejected answers, or the tokenizer does not exist.
        DataError: The data do not exist or cannot be read.
    """
    identity = prepared_set.identify_set(read_as_pairs(config), rows="pairs")
    parts = [*identity.train.parts, *(identity.test.parts if identity.test else ())]
    wrong = dict.fromkeys((part.source.name, part.format) for part in parts if part.format != "preference")
    if wrong:
        where = config.locate("dataset_format")
        found = "{} is read in the layout `{}`, which has no rejected answers"
        remedy = "write `preference`, or leave the layout out"
        raise ConfigError(*(Problem(where, found.format(*names), remedy) for names in wrong))
    return identity


def read_as_pairs(config: RecipeConfig) -> RecipeConfig:
    """Return the configuration with the layout ``preference`` in place of ``auto``, also in parts of a mixture.

    Datasets of pairs often have columns of other layouts too, such as ``messages``, which would be ambiguous.
    """
    data = config.data
    if data.dataset_format == "auto":
        data = replace(data, dataset_format="preference")
    if data.dataset_mixture is not None:
        of_pairs = {"format": "preference"}
        parts = [part | of_pairs if part.get("format") == "auto" else part for part in data.dataset_mixture]
        data = replace(data, dataset_mixture=parts)
    return replace(config, data=data)


def _encode_examples(
    encoder: RowEncoder, rows: Sequence[Row], row_ids: Sequence[int]
) -> tuple[Examples, dict[str, npt.NDArray[Any]]]:
    """Encode each pair as one example: prompt, chosen and rejected answer, concatenated, with the answers as targets.

    Raises:
        DataError: Rows cannot be tokenised or masked.
    """
    pairs, examples = encode_pairs(encoder, rows), []
    for pair in pairs:
        ids = np.concatenate(pair[:3])
        examples.append(EncodedRow(ids, np.arange(len(ids)) >= len(pair.prompt_ids), pair.remarks))
    return build_examples(examples, row_ids), {
        "prompt_digests": compute_digests(map(_take_prompt, rows)),
        "lengths": np.array([len(pair[0]) + max(map(len, pair[1:3])) for pair in pairs], np.int32),
        "num_chosen": np.array([len(pair.chosen_ids) for pair in pairs], np.int32),
        "is_identical": np.array([np.array_equal(*pair[1:3]) for pair in pairs], np.bool_),
        "margins": np.array([row.margin for row in rows], np.float32),
    }


def _take_prompt(row: Row) -> Row:
    messages = None if row.messages is None else row.messages[: row.num_prompt_messages]
    return replace(row, messages=messages, completion=None, rejected=None)


def _build(
    config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, identity: prepared_set.SetIdentity, file: TokenFile
) -> prepared_set.BuiltSet:
    """Return the rows of each split, and the entries of the manifest other than ``key`` and ``inputs``."""
    # Of a cut text, the answer could be lost, so that only an error can be found early.
    limit = config.tokens.max_length if config.tokens.overlong == "error" else None
    encoder = build_encoder(config, tokenizer, limit)
    read, broken = prepared_set.encode_sides(config, identity, partial(_encode_examples, encoder), file)
    sides, dropped = {}, {}
    for name, side in read.items():
        sides[name], dropped[name] = drop_pairs(side, config.tokens.max_length)
    _refuse_empty(sides, dropped)
    sides = prepared_set.separate_sides(config, sides)
    audits = {name: compute_pair_audit(side) for name, side in sides.items()}
    findings = [
        finding
        for name, audit in audits.items()
        for finding in (
            *check_pairs(name, audit, dropped.get(name, DropCounts()), config.tokens.max_truncated_fraction),
            *check_remarks(name, sides[name].examples.remarks, sides[name].find_places),
        )
    ]
    max_length = config.tokens.max_length or prepared_set.derive_max_length(
        max(audit.length_max for audit in audits.values())
    )
    has_margins = any(audit.num_margins for audit in audits.values())
    return {name: _read_pairs(side, has_margins=has_margins) for name, side in sides.items()}, {
        **prepared_set.describe_set(config, identity, max_length, findings, broken),
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
    """Return the pairs with the columns of ``prepare_pairs``; their tokens are read in batches."""
    import pyarrow as pa  # Slow to import, and needed only to build a set.

    lengths = count_tokens(side).T

    def read(rows: slice) -> pa.RecordBatch:
        ids, _ = side.examples.read(rows)
        # Part of each token: prompt, chosen answer, rejected answer, prompt of the next pair, ...
        part = np.repeat(np.arange(lengths[rows].size) % 3, lengths[rows].ravel())
        columns = {
            name: prepared_set.build_lists(np.append(0, np.cumsum(lengths[rows, number])), ids[part == number])
            for number, name in enumerate(("prompt_ids", "chosen_ids", "rejected_ids"))
        }
        columns["row_id"] = pa.array(side.examples.row_ids[rows])
        if has_margins:
            # NaN stands for no margin.
            columns["margin"] = pa.array(np.nan_to_num(side.columns["margins"][rows]))
        return pa.record_batch(columns)

    return prepared_set.read_batches(side.examples.lengths, read)


@dataclass(frozen=True, kw_only=True)
class PairData(prepared_set.PreparedRows):
    """Pairs in the order of the dataset, with statistics; lengths are those of a prompt with one answer.

    Attributes:
        audit: Figures of the training pairs.
    """

    audit: PairAudit

    def iterate_examples(self) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]]:
        """Yield the token ids of each held-out prompt with its chosen answer, and the mask of the answer, ``(T,)``.

        A prompt with several pairs occurs once, with the answer of the first pair.
        """
        seen: set[bytes] = set()
        for pair in self.eval or ():
            prompt, chosen = pair["prompt_ids"], pair["chosen_ids"]
            if prompt.tobytes() not in seen:
                seen.add(prompt.tobytes())
                ids = np.concatenate([prompt, chosen]).astype(np.uint32)
                yield ids, np.arange(len(ids)) >= len(prompt)


def load_pair_data(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, *, local_rank: int = 0) -> PairData:
    """Find or build the prepared pairs of a run.

    Call it before the process group is created: local rank 0 can take longer than the timeout of a collective.

    Args:
        config: Configuration of the run.
        tokenizer: Tokenizer of the run.
        local_rank: Local rank of this process; rank 0 builds the set, the others wait for it.

    Raises:
        ConfigError: Options are incompatible.
        DataError: Rows are broken or too long; rows or their prompts are both trained on and held out; no pair is left;
            on other ranks, local rank 0 has not built the set.
    """
    # Also for `eval_datasets`, and to look up the locations of rows that are trained on and held out.
    config = read_as_pairs(config)

    def prepare_run(run: RecipeConfig) -> PreparedSet:
        return prepare_pairs(run, lambda: tokenizer, local_rank=local_rank)

    fields, trained = prepared_set.open_set(config, prepare_run, lambda pairs: np.ones(len(pairs), np.int64))
    data = PairData(**fields, audit=PairAudit(**fields["record"]["train"]))
    return prepared_set.add_eval_sets(config, data, prepare_run, trained if local_rank == 0 else [])


def render_summary(prepared: PreparedSet) -> Table:
    """Return a table of the figures of a prepared set of pairs, with a column for each split."""
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
    prepared_set.add_findings(table, manifest["findings"])
    return table


class UnfinishedAnswers:
    """Prepared pairs, some of which have a truncated copy of the chosen answer as the rejected one.

    All answers of a dataset are complete, so that a reward model is trained at end tokens only; its scores of a
    policy's truncated answers would be arbitrary. In a share of pairs, the rejected answer is replaced by the chosen
    one, in half of them without its end token, in the others truncated at a random token. Choice and truncation are
    functions of the seed and the index of the pair, equal in every epoch.
    """

    def __init__(self, pairs: Rows, tokenizer: PreTrainedTokenizerBase, share: float, seed: int) -> None:
        """Wrap pairs, which are read on demand.

        Args:
            pairs: Pairs with ``chosen_ids`` and ``rejected_ids``; the ``margin`` of a chosen pair becomes 0.
            tokenizer: Tokenizer of the model.
            share: Share of pairs whose rejected answer is replaced, in ``[0, 1]``; a chosen answer that is only an end
                token is not used.
            seed: Seed of the run.
        """
        self._pairs, self._share, self._seed = pairs, share, seed
        self._end_tokens = find_end_tokens(tokenizer)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        pair: Mapping[str, Any] = self._pairs[index]
        # Seeded by the index, so that neither the order nor the number of processes matters.
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
    """Figures of one split, as JSON values. The length of a pair is that of its prompt and the longer answer.

    Attributes:
        num_pairs: Number of pairs.
        num_prompts: Number of distinct prompts.
        num_duplicates: Pairs with the same content as an earlier pair.
        num_margins: Pairs with a margin.
        num_prompt_tokens: Tokens of the prompts, counted once per pair.
        num_chosen_tokens: Tokens of the chosen answers.
        num_rejected_tokens: Tokens of the rejected answers.
        length_p5: 5th percentile of the lengths of pairs, in tokens.
        length_p50: Median length, in tokens.
        length_p95: 95th percentile of the lengths, in tokens.
        length_max: Length of the longest pair, in tokens.
        terminators: Ids of the last tokens of answers, ascending.
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
        """Number of tokens, with one copy of the prompt per pair."""
        return self.num_prompt_tokens + self.num_chosen_tokens + self.num_rejected_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCounts:
    """Counts of dropped rows and lost tokens, as JSON values.

    Attributes:
        num_rows: Rows read.
        num_identical: Dropped rows, whose answers have the same tokens.
        num_overlong: Dropped rows longer than ``max_length``.
        num_answer_tokens: Answer tokens of all rows whose answers differ.
        num_lost_tokens: Answer tokens of the overlong rows.
    """

    num_rows: int = 0
    num_identical: int = 0
    num_overlong: int = 0
    num_answer_tokens: int = 0
    num_lost_tokens: int = 0

    @property
    def lost_fraction(self) -> float:
        """Share of lost answer tokens, from 0 to 1."""
        return self.num_lost_tokens / max(1, self.num_answer_tokens)


def count_tokens(pairs: EncodedMixture) -> IntArray:
    """Return the number of tokens of each prompt, chosen answer and rejected answer, ``int64 (3, P)``.

    Args:
        pairs: Pairs as encoded by ``_encode_examples``, with the column ``num_chosen``, tokens of each chosen answer.
    """
    answers, chosen = pairs.examples.num_targets, pairs.columns["num_chosen"]
    return np.stack([pairs.examples.lengths - answers, chosen, answers - chosen])


def drop_pairs(pairs: EncodedMixture, max_length: int | None) -> tuple[EncodedMixture, DropCounts]:
    """Drop pairs that cannot be trained on, and count them.

    Args:
        pairs: As for ``count_tokens``, with the column ``is_identical``, True if both answers have the same tokens.
        max_length: Maximum number of tokens of a prompt with either answer; ``None`` for no limit.
    """
    is_identical = pairs.columns["is_identical"]
    is_overlong = ~is_identical & (pairs.lengths > (np.inf if max_length is None else max_length))
    counts = DropCounts(
        num_rows=len(is_identical),
        num_identical=int(is_identical.sum()),
        num_overlong=int(is_overlong.sum()),
        num_answer_tokens=int(pairs.examples.num_targets[~is_identical].sum()),
        num_lost_tokens=int(pairs.examples.num_targets[is_overlong].sum()),
    )
    return pairs.take(np.flatnonzero(~is_identical & ~is_overlong)), counts


def compute_pair_audit(pairs: EncodedMixture) -> PairAudit:
    """Compute the figures of one split.

    Args:
        pairs: At least one pair, as for ``count_tokens``; with the columns ``prompt_digests`` and ``margins``,
            ``float32``, NaN for pairs without a margin.
    """
    prompt, chosen, rejected = count_tokens(pairs)
    terminators: set[int] = set()
    for block in split_blocks(pairs.examples.lengths):
        ends = np.cumsum(pairs.examples.lengths[block]) - 1
        ids, _ = pairs.examples.read(block)
        # An example ends with the rejected answer; the token before that answer is the end of the chosen one.
        terminators.update(ids[ends].tolist(), ids[ends - rejected[block]].tolist())
    return PairAudit(
        num_pairs=len(prompt),
        num_prompts=len(find_distinct(pairs.columns["prompt_digests"])),
        num_duplicates=count_duplicates(pairs.digests),
        num_margins=int(np.isfinite(pairs.columns["margins"]).sum()),
        num_prompt_tokens=int(prompt.sum()),
        num_chosen_tokens=int(chosen.sum()),
        num_rejected_tokens=int(rejected.sum()),
        **summarize_lengths(pairs.lengths),
        terminators=sorted(terminators),
    )


def check_pairs(split: str, audit: PairAudit, dropped: DropCounts, max_lost_fraction: float | None) -> list[Finding]:
    """Return the findings on the figures of a split.

    Args:
        split: Name of the split in the findings, ``train`` or ``eval``.
        audit: Figures from ``compute_pair_audit``.
        dropped: Counts of dropped pairs.
        max_lost_fraction: Share of lost answer tokens above which they are an error (``max_truncated_fraction``).
    """
    same = f"{split}: rows whose answers are the same tokens, left out: {dropped.num_identical:,}"
    overlong = (
        f"{split}: rows longer than max_length, left out: {dropped.num_overlong:,}; lost with them: "
        f"{dropped.num_lost_tokens:,} tokens of answers ({dropped.lost_fraction:.2%})"
    )
    return [
        check_lengths(split, overlong, dropped.num_overlong, dropped.lost_fraction, max_lost_fraction),
        Finding("warning" if dropped.num_identical else "ok", same),
        check_duplicates(split, audit.num_duplicates),
    ]
