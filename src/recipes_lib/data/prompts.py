"""Prompts for sampling from the policy, prepared once per content: token ids, and columns for reward functions."""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.table import Table

from recipes_lib.config.schema import DataConfig, RecipeConfig
from recipes_lib.config.tokenization import count_before_end, find_end_tokens
from recipes_lib.data.packed.encoding import TokenizerLoader, build_encoder, map_chunks, read_seed, verify_unchanged
from recipes_lib.data.packed.packing import IntArray
from recipes_lib.data.packed.prepared_set import SetIdentity, add_findings, build_lists, identify_set
from recipes_lib.data.packed.supervision_audit import Finding
from recipes_lib.data.sources.formats import COLUMNS, canonicalize, detect_format, read_question
from recipes_lib.data.sources.messages import RowError, parse_chat, refuse_guesses
from recipes_lib.data.sources.mixtures import Mixture
from recipes_lib.data.sources.rows import BrokenRows, Message, RawRow, Remark, Row, add_system_prompt
from recipes_lib.data.sources.splits import compute_digests, refuse_overlap, split_rows
from recipes_lib.data.store import PreparedSet, explain_disk_errors, make_set, open_rows, write_splits
from recipes_lib.errors import DataError, Problem, collect_problems, merge_alike, raise_problems

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from recipes_lib.data.chat.encoder import RowEncoder

logger = logging.getLogger(__name__)

_CHATS: Final = ("messages", "conversations", "chosen")
"""Columns of layouts with a prompt; in such rows, a ``question`` is an additional column."""

_TURNS: Final = ("messages", "conversations", "chosen", "completion")
"""Columns whose lists of messages make the row a chat; its string ``prompt`` is then an additional column."""

_BYTES: Final = "\0base64"
"""Key of the object that stands for binary data in stored rows, which are JSON."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt for the policy.

    Attributes:
        where: Location of its row, for errors.
        input_ids: Token ids, including the generation prompt; at least one.
        content: The messages or the plain text; of the same type for all prompts of a run.
        columns: The other columns of the row; all prompts of a run have the same columns, ``None`` where a row lacks
            one.
    """

    where: str
    input_ids: list[int]
    content: list[Message] | str
    columns: dict[str, Any]


class _StoredPrompts(Sequence[PromptRow]):
    """Prompts of one split, read from the disk when they are accessed."""

    def __init__(self, rows: Any, positions: IntArray, columns: Sequence[str]) -> None:
        self._rows, self._positions, self._columns = rows, positions, columns

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: Any) -> Any:  # An index or a slice, as in the overloads of `Sequence`.
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        row = self._rows[int(self._positions[index])]
        where, content, columns = json.loads(row["row"], object_hook=_restore_bytes)
        return PromptRow(where, row["input_ids"], content, {name: columns.get(name) for name in self._columns})


@dataclass(frozen=True, slots=True)
class PromptData:
    """The prompts of a run.

    Attributes:
        train: Training prompts in the order of the dataset; at least one.
        eval: Held-out prompts; may be empty.
        terminators: Ids of tokens that end answers, in addition to the tokenizer's EOS.
        max_length: Length of the longest prompt plus ``response_length``, in tokens.
        record: JSON values for ``run.json``.
    """

    train: Sequence[PromptRow]
    eval: Sequence[PromptRow]
    terminators: Sequence[int]
    max_length: int
    record: dict[str, Any]


def load_prompt_data(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, *, local_rank: int = 0) -> PromptData:
    """Find or build the prepared prompts of a run.

    Call it before the process group is created: local rank 0 can take longer than the timeout of a collective.

    Args:
        config: Configuration of the run.
        tokenizer: Tokenizer of the policy.
        local_rank: Local rank of this process; rank 0 builds the set, the others wait for it.

    Raises:
        ConfigError: As ``prepare_prompts``.
        DataError: As ``prepare_prompts``.
    """
    prepared = prepare_prompts(config, lambda: tokenizer, local_rank=local_rank)
    manifest, rows = prepared.manifest, open_rows(prepared.path, "rows").with_format(None)
    for finding in manifest["findings"]:
        logger.warning(Finding(**finding))
    train, eval_ = (
        _StoredPrompts(rows, np.load(prepared.path / f"{split}.npy"), manifest["columns"])
        for split in ("train", "eval")
    )
    return PromptData(train, eval_, manifest["terminators"], manifest["max_length"], dict(manifest["record"]))


def prepare_prompts(config: RecipeConfig, load_tokenizer: TokenizerLoader, *, local_rank: int = 0) -> PreparedSet:
    """Find the prepared prompts of a run, or build them with memory of a few numbers per row.

    The prompt of a row is its column ``prompt``, a string or messages; or a chat in any known layout without its last
    answer; or a question in a column such as ``question`` (GSM8K) or ``problem``. Strings in ``prompt`` are used
    unchanged; chats and questions are rendered by the chat template. A string ``prompt`` beside a chat is ignored.

    Args:
        config: Configuration of the run. With ``max_length``, a prompt longer than ``max_length - response_length`` is
            handled according to ``overlong``.
        load_tokenizer: Function that loads the tokenizer of the policy; called only to build the set.
        local_rank: Local rank of this process; all ranks but 0 wait for the set.

    Raises:
        ConfigError: The tokenizer does not exist; as ``build_encoder``.
        DataError: Rows are broken, too long, or without a prompt; some prompts are texts and others chats; training
            prompts are also held out; the set cannot be written; on other ranks, local rank 0 has not built the set.
    """
    data = dataclasses.replace(config.data, dataset_streaming=False)  # Sampling shuffles all prompts.
    read = dataclasses.replace(config, data=data)
    identity = identify_set(read, rows="prompts", response_length=str(config.rewards.response_length))

    def build(staging: Path) -> dict[str, Any]:
        return _build(read, load_tokenizer(), identity, staging)

    return make_set(identity.root, identity.key, identity.inputs, build, local_rank=local_rank)


def render_summary(prepared: PreparedSet) -> Table:
    """Return a table of the figures of prepared prompts."""
    record = prepared.manifest["record"]
    table = Table("", "train", "eval", title=f"up to {prepared.manifest['max_length']:,} tokens with the answer")
    table.add_row("prompts", f"{record['num_prompts']:,}", f"{record['num_eval_prompts']:,}")
    table.add_row("tokens, mean / longest", f"{record['prompt_tokens_mean']:,.0f} / {record['prompt_tokens_max']:,}")
    table.add_row("left out, too long", f"{record['num_overlong']:,}")
    add_findings(table, prepared.manifest["findings"])
    return table


class _Chunk(NamedTuple):
    """Figures of encoded prompts, R rows.

    Attributes:
        digests: Digests of the prompts, ``S16 (R,)``.
        lengths: Their lengths in tokens, ``int64 (R,)``.
        is_text: True at plain texts, ``bool (R,)``.
        columns: Names of their other columns.
        chats: The first chat with and the first without tools.
    """

    digests: npt.NDArray[np.bytes_]
    lengths: IntArray
    is_text: npt.NDArray[np.bool_]
    columns: Mapping[str, None]
    chats: Mapping[bool, Row]


def _build(
    config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, identity: SetIdentity, staging: Path
) -> dict[str, Any]:
    """Write the prompts, and the positions of each split's; return the entries of the manifest."""
    import pyarrow as pa

    encoder, broken, name = build_encoder(config, tokenizer), BrokenRows(config.tokens), identity.train.name
    mixtures = [identity.train, *([] if identity.test is None else [identity.test])]
    empty, none = _encode(encoder, [], [])  # Determines the dtypes, in case no row is valid.
    chunks, sizes = [none], []

    def encode_all() -> Iterator[pa.RecordBatch]:
        for mixture in mixtures:
            rows = _read(mixture, config)
            for batch, chunk in map_chunks(rows, partial(_encode, encoder), broken, config.tokens.dataset_num_proc):
                chunks.append(chunk)
                yield batch
            sizes.append(sum(len(chunk.digests) for chunk in chunks))

    write_splits(staging, {"rows": pa.RecordBatchReader.from_batches(empty.schema, encode_all())})
    for mixture, fingerprint in zip(mixtures, identity.inputs["sources"].values(), strict=True):
        verify_unchanged(mixture, fingerprint)
    rows = open_rows(staging, "rows").with_format(None)
    digests, lengths, is_text = (np.concatenate(arrays) for arrays in list(zip(*chunks, strict=True))[:3])
    response_length = config.rewards.response_length
    fits = lengths <= (config.tokens.max_length or np.inf) - response_length
    if config.tokens.overlong == "error":
        places = _find_places(rows, 0, np.flatnonzero(~fits).tolist())
        overlong = [_describe_overlong(config, place, int(lengths[at])) for at, place in places.items()]
        broken.fatal += merge_alike(overlong, broken.num_rows)
    raise_problems(broken.list_problems(name), name)
    _refuse_mixed_forms(is_text, rows, name)
    train, held_out = _separate(config, digests, sizes[0], rows)
    train, held_out = train[fits[train]], held_out[fits[held_out]]
    if not len(train):
        found = f"every prompt is too long for max_length: {config.tokens.max_length} with its answer"
        raise DataError(Problem(name, found, "raise max_length"))
    with explain_disk_errors(staging.parent):
        for split, positions in (("train", train), ("eval", held_out)):
            np.save(staging / f"{split}.npy", positions)
    chats = {with_tools: row for chunk in reversed(chunks) for with_tools, row in chunk.chats.items()}
    findings = [Finding("warning", text) for text in broken.list_warnings(name)]
    if is_text.any() and (config.tokens.chat_template_path or tokenizer.chat_template):
        found = f"{name}: {is_text.sum():,} of {len(is_text):,} rows {Remark.PLAIN_TEXT.found}"
        findings.append(Finding("warning", found, Remark.PLAIN_TEXT.remedy))
    return {
        "columns": list(dict.fromkeys(column for chunk in chunks for column in chunk.columns)),
        "terminators": _find_terminators(list(chats.values()), encoder, find_end_tokens(tokenizer)),
        "max_length": int(lengths[np.concatenate([train, held_out])].max()) + response_length,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "record": {
            "num_prompts": len(train),
            "num_eval_prompts": len(held_out),
            "num_overlong": int((~fits).sum()),
            "broken_rows": broken.count(),
            "prompt_tokens_mean": float(lengths[train].mean()),
            "prompt_tokens_max": int(lengths[train].max()),
            "fingerprint": identity.inputs["sources"]["train"],
        },
    }


def _separate(
    config: RecipeConfig, digests: npt.NDArray[np.bytes_], num_train: int, rows: Any
) -> tuple[IntArray, IntArray]:
    """Return the positions of training and of held-out prompts, after verifying that none is both.

    Raises:
        DataError: As ``split_rows``; or training prompts are also held out.
    """
    if config.data.test_split_size is not None:
        return split_rows(digests, config.data.test_split_size, read_seed(config))
    if not config.data.allow_eval_overlap:
        find_train, find_held_out = (partial(_find_places, rows, first) for first in (0, num_train))
        relation = "ask what held-out rows ask"
        refuse_overlap(digests[:num_train], digests[num_train:], find_train, find_held_out, relation)
    return np.arange(num_train), np.arange(num_train, len(digests))


def _find_places(rows: Any, first: int, positions: Collection[int]) -> dict[int, str]:
    """Return the locations of prompts by position, counted from the row ``first``."""
    return {at: json.loads(rows[first + at]["row"])[0] for at in positions}


def _describe_overlong(config: RecipeConfig, where: str, length: int) -> Problem:
    maximum, answer = config.tokens.max_length, config.rewards.response_length
    found = f"{length:,} tokens and an answer of {answer:,} are more than max_length {maximum:,}"
    return Problem(where, found, "raise max_length, or write `overlong: drop`", size=length)


def _encode(encoder: RowEncoder, rows: Sequence[Row], _: Sequence[int]) -> tuple[pa.RecordBatch, _Chunk]:
    """Return the token ids of the prompts of a chunk with the rows as JSON, and their figures.

    Raises:
        DataError: Prompts cannot be rendered, or are empty.
    """
    import pyarrow as pa

    problems: list[Problem] = []
    ids = [np.zeros(0, np.uint32)]
    for row in rows:
        with collect_problems(problems):
            ids.append(encoder.encode_prompt(row))
            if not len(ids[-1]):
                raise DataError(Problem(row.where, "the prompt is empty", "write one, or remove the row"))
    if problems:
        raise DataError(*problems)
    stored = [json.dumps([row.where, row.messages or row.prompt, row.others], default=_spell_for_json) for row in rows]
    columns = {
        "input_ids": build_lists(np.cumsum([len(tokens) for tokens in ids]), np.concatenate(ids)),
        # Tests of programs can have megabytes a row, and a chunk more than the 2 GiB of `string`.
        "row": pa.array(stored, pa.large_string()),
    }
    return pa.record_batch(columns), _Chunk(
        digests=compute_digests(rows),
        lengths=np.array([len(tokens) for tokens in ids[1:]], np.int64),
        is_text=np.array([row.messages is None for row in rows], np.bool_),
        columns=dict.fromkeys(name for row in rows for name in row.others),
        chats={bool(row.tools): row for row in reversed(rows) if row.messages is not None},
    )


def _spell_for_json(value: Any) -> Any:
    """Return binary data as an object with the key ``_BYTES``, and other values that JSON lacks (durations) as text."""
    return {_BYTES: base64.b64encode(value).decode("ascii")} if isinstance(value, bytes) else str(value)


def _restore_bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[_BYTES]) if _BYTES in value else value


def _read(mixture: Mixture, config: RecipeConfig) -> Iterator[Row | Problem]:
    """Yield each prompt as a row without an answer, or a ``Problem`` in place of a broken one.

    Raises:
        DataError: The source has no rows, or cannot be read further; raised after the last row.
    """
    (part,) = mixture.parts
    is_empty = True
    for entry in part.source.rows():
        is_empty = False
        try:
            if isinstance(entry, Problem):
                yield entry
            else:
                # Here, because reward functions and models read the messages too.
                yield add_system_prompt(_take_prompt(entry, config.data), config.chat.system_prompt)
        except DataError as error:
            yield error.problems[0]
    if is_empty:
        raise DataError(Problem(part.source.name, "no rows: it is empty", "check how it was written"))


def _take_prompt(raw: RawRow, data: DataConfig) -> Row:
    others = {name: value for name, value in raw.columns.items() if name != "prompt"}
    try:
        columns = {name: value for name, value in raw.columns.items() if value is not None}
        columns |= {name: parse_chat(value, name) for name, value in columns.items() if name.strip().lower() in COLUMNS}
        prompt = columns.get("prompt")
        if isinstance(prompt, str):
            is_beside_chat = any(isinstance(columns.get(name), list | tuple) for name in _TURNS)
        else:
            is_beside_chat = prompt is None and any(map(columns.get, _CHATS))
        fields = None if is_beside_chat else read_question(columns)
        refuse_guesses(columns, fields or {})
    except RowError as error:
        raise DataError(Problem(raw.where, error.found, error.remedy)) from None
    if fields is not None:
        return Row(where=raw.where, **fields, others=others)
    # Pairs often have columns of other layouts too, with the same prompt.
    is_pair = {"chosen", "rejected"} <= columns.keys()
    declared = "preference" if is_pair and data.dataset_format == "auto" else data.dataset_format
    row_format = detect_format(raw, declared)
    row = canonicalize(raw, row_format, needs_answer=False)
    if row.prompt is not None:
        return dataclasses.replace(row, completion=None, rejected=None, others=others)
    if row.messages is None:
        found = f"the `{row_format.name}` layout has no prompt"
        raise DataError(Problem(raw.where, found, "if the text is one, write `dataset_columns: {question: text}`"))
    # Of a chat without a separate prompt, all messages before its final answer; a chat can also end with a question.
    is_answered = row.messages[-1]["role"] == "assistant"
    messages = list(row.messages[: row.num_prompt_messages or len(row.messages) - is_answered])
    if not messages:
        raise DataError(Problem(raw.where, "the chat has no message before its answer", "add the prompt"))
    return dataclasses.replace(row, messages=messages, num_prompt_messages=len(messages), rejected=None, others=others)


def _refuse_mixed_forms(is_text: npt.NDArray[np.bool_], rows: Any, name: str) -> None:
    """Raise for plain texts among chats: a reward function gets all answers of a run in one form.

    Raises:
        DataError: There are both.
    """
    num_texts = int(is_text.sum())
    if 0 < num_texts < len(is_text):
        text, chat = _find_places(rows, 0, [int(is_text.argmax()), int(is_text.argmin())]).values()
        found = (
            f"{num_texts:,} prompts are plain text, first {text}, and {len(is_text) - num_texts:,} are chats, first "
            f"{chat}"
        )
        raise DataError(Problem(name, found, "write all of them as texts, or all as messages"))


def _find_terminators(chats: Sequence[Row], encoder: RowEncoder, end_tokens: Collection[int]) -> list[int]:
    """Return the ids of tokens that end answers in fine-tuning data with such prompts; none for plain texts.

    Args:
        chats: A chat with and one without tools, because a tokenizer can have a separate template for tools.
        encoder: Encoder of the run.
        end_tokens: Ids of the tokens that end a text.
    """
    answer = {"role": "assistant", "content": "a"}
    encoded = encoder.encode([dataclasses.replace(row, messages=[*(row.messages or ()), answer]) for row in chats])
    answers = [row.input_ids[row.loss_mask] for row in encoded]
    return sorted({int(ids[count_before_end(ids, end_tokens)]) for ids in answers})
