"""Prompts for sampling from the policy: their token ids, and the other columns of the dataset for reward functions."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from recipes_lib.config.schema import DataConfig, RecipeConfig
from recipes_lib.config.token_ids import count_before_end, find_end_tokens
from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.packed.encoding import build_encoder, read_seed
from recipes_lib.data.sources.broken_rows import BrokenRows
from recipes_lib.data.sources.formats import canonicalize, detect_format, read_question
from recipes_lib.data.sources.messages import RowError, parse_chat, refuse_media
from recipes_lib.data.sources.mixtures import Mixture, load_test_data, load_train_data
from recipes_lib.data.sources.rows import Message, RawRow, Row
from recipes_lib.data.sources.splits import compute_row_digest, find_overlap, refuse_overlap, split_rows
from recipes_lib.errors import DataError, Problem, merge_alike, raise_problems

logger = logging.getLogger(__name__)

_CHATS: Final = ("messages", "conversations", "chosen")
"""Columns of layouts with a prompt; in such rows, a ``question`` is an additional column."""

_TURNS: Final = ("messages", "conversations", "chosen", "completion")
"""Columns whose lists of messages make the row a chat; its string ``prompt`` is then an additional column."""


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


def load_prompt_data(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase) -> PromptData:
    """Read and tokenise the prompts of a run.

    The prompt of a row is its column ``prompt``, a string or messages; or a chat in any known layout without its last
    answer; or a question in a column such as ``question`` (GSM8K) or ``problem``. Strings in ``prompt`` are used
    unchanged; chats and questions are rendered by the chat template. A string ``prompt`` beside a chat is ignored.

    Args:
        config: Configuration of the run. With ``max_length``, a prompt longer than ``max_length - response_length`` is
            handled according to ``overlong``.
        tokenizer: Tokenizer of the policy.

    Raises:
        ConfigError: As ``build_encoder``.
        DataError: Rows are broken, too long, or without a prompt; some prompts are texts and others chats; or training
            prompts are also held out.
    """
    encoder, data = build_encoder(config, tokenizer), config.data
    mixture, held_out_mixture = load_train_data(data), load_test_data(data)
    broken, name = BrokenRows(config.tokens), str(data.dataset_name)
    rows = list(broken.filter_valid(_read(mixture, data)))
    held_out = [] if held_out_mixture is None else list(broken.filter_valid(_read(held_out_mixture, data)))
    raise_problems(broken.list_problems(name), name)
    _refuse_mixed_forms([read.row for read in (*rows, *held_out)], name)
    _unify_columns([read.columns for read in (*rows, *held_out)])
    if data.test_split_size is not None:
        digests = [read.digest for read in rows]
        split = split_rows(digests, data.test_split_size, read_seed(config), inseparable="equal prompts")
        rows, held_out = [rows[at] for at in split.train], [rows[at] for at in split.test]
    elif not data.allow_eval_overlap:
        overlap = find_overlap([read.digest for read in rows], [read.digest for read in held_out])
        train_places, eval_places = ([read.row.where for read in side] for side in (rows, held_out))
        relation = "ask what held-out rows ask"
        refuse_overlap(overlap, train_places.__getitem__, eval_places.__getitem__, relation=relation)
    overlong: list[Problem] = []
    train, eval_ = (list(_encode(side, encoder, config, broken, overlong)) for side in (rows, held_out))
    if config.tokens.overlong == "error":
        broken.fatal += merge_alike(overlong, broken.num_rows)
    raise_problems(broken.list_problems(name), name)
    if not train:
        found = f"every prompt is too long for max_length: {config.tokens.max_length} with its answer"
        raise DataError(Problem(name, found, "raise max_length"))
    for warning in broken.list_warnings(name):
        logger.warning(warning)
    lengths = np.array([len(prompt.input_ids) for prompt in train])
    return PromptData(
        train=train,
        eval=eval_,
        terminators=_find_terminators([read.row for read in (*rows, *held_out)], encoder, find_end_tokens(tokenizer)),
        max_length=max(len(prompt.input_ids) for prompt in (*train, *eval_)) + config.rewards.response_length,
        record={
            "num_prompts": len(train),
            "num_eval_prompts": len(eval_),
            "num_overlong": len(overlong),
            "broken_rows": broken.count(),
            "prompt_tokens_mean": float(lengths.mean()),
            "prompt_tokens_max": int(lengths.max()),
            "fingerprint": mixture.fingerprint(),
        },
    )


class _Read(NamedTuple):
    """A prompt as a canonical row without an answer, the other columns of its row, and the digest of the prompt."""

    row: Row
    columns: dict[str, Any]
    digest: bytes


def _read(mixture: Mixture, data: DataConfig) -> Iterator[_Read | Problem]:
    """Yield each prompt, or a ``Problem`` in place of a broken one.

    Raises:
        DataError: The source has no rows, or cannot be read further; raised after the last row.
    """
    (part,) = mixture.parts
    is_empty = True
    for entry in part.source.rows():
        is_empty = False
        if isinstance(entry, Problem):
            yield entry
            continue
        try:
            row, columns = _take_prompt(entry, data)
            yield _Read(row, columns, compute_row_digest(row))
        except DataError as error:
            yield error.problems[0]
    if is_empty:
        raise DataError(Problem(part.source.name, "no rows: it is empty", "check how it was written"))


def _take_prompt(raw: RawRow, data: DataConfig) -> tuple[Row, dict[str, Any]]:
    others = {name: value for name, value in raw.columns.items() if name != "prompt"}
    try:
        columns = {name: parse_chat(value, name) for name, value in raw.columns.items() if value is not None}
        prompt = columns.get("prompt")
        if isinstance(prompt, str):
            is_beside_chat = any(isinstance(columns.get(name), list | tuple) for name in _TURNS)
        else:
            is_beside_chat = prompt is None and any(map(columns.get, _CHATS))
        fields = None if is_beside_chat else read_question(columns)
        refuse_media(columns, fields or {})
    except RowError as error:
        raise DataError(Problem(raw.where, error.found, error.remedy)) from None
    if fields is not None:
        return Row(where=raw.where, **fields), others
    # Pairs often have columns of other layouts too, with the same prompt.
    is_pair = {"chosen", "rejected"} <= columns.keys()
    declared = "preference" if is_pair and data.dataset_format == "auto" else data.dataset_format
    row_format = detect_format(raw, declared)
    row = canonicalize(raw, row_format, needs_answer=False)
    if row.prompt is not None:
        return dataclasses.replace(row, completion=None, rejected=None), others
    if row.messages is None:
        found = f"the `{row_format.name}` layout has no prompt"
        raise DataError(Problem(raw.where, found, "if the text is one, write `dataset_columns: {question: text}`"))
    # Of a chat without a separate prompt, all messages before its final answer; a chat can also end with a question.
    is_answered = row.messages[-1]["role"] == "assistant"
    messages = list(row.messages[: row.num_prompt_messages or len(row.messages) - is_answered])
    if not messages:
        raise DataError(Problem(raw.where, "the chat has no message before its answer", "add the prompt"))
    return dataclasses.replace(row, messages=messages, num_prompt_messages=len(messages), rejected=None), others


def _refuse_mixed_forms(rows: Sequence[Row], name: str) -> None:
    """Raise for plain texts among chats: a reward function gets all answers of a run in one form.

    Raises:
        DataError: There are both.
    """
    texts, chats = ([row for row in rows if (row.messages is None) is is_text] for is_text in (True, False))
    if texts and chats:
        found = (
            f"{len(texts):,} prompts are plain text, first {texts[0].where}, and {len(chats):,} are chats, first "
            f"{chats[0].where}"
        )
        raise DataError(Problem(name, found, "write all of them as texts, or all as messages"))


def _unify_columns(rows: Sequence[dict[str, Any]]) -> None:
    """Add the columns of all rows to every row in place, with the value ``None``."""
    names = dict.fromkeys(name for columns in rows for name in columns)
    for columns in rows:
        for name in names:
            columns.setdefault(name)


def _encode(
    rows: Sequence[_Read], encoder: RowEncoder, config: RecipeConfig, broken: BrokenRows, overlong: list[Problem]
) -> Iterator[PromptRow]:
    """Yield the prompts that can be used; add the problems of the others to ``broken`` and ``overlong``."""
    max_length, response_length = config.tokens.max_length, config.rewards.response_length
    for row, columns, _ in rows:
        try:
            ids = encoder.encode_prompt(row).tolist()
        except DataError as error:
            broken.add(0, error.problems)  # The row was counted when it was read.
            continue
        if not ids:
            broken.add(0, [Problem(row.where, "the prompt is empty", "write one, or remove the row")])
        elif max_length is not None and len(ids) + response_length > max_length:
            found = f"{len(ids):,} tokens and an answer of {response_length:,} are more than max_length {max_length:,}"
            overlong.append(Problem(row.where, found, "raise max_length, or write `overlong: drop`", size=len(ids)))
        else:
            content = row.prompt if row.messages is None else list(row.messages)
            assert content is not None
            yield PromptRow(row.where, ids, content, columns)


def _find_terminators(rows: Sequence[Row], encoder: RowEncoder, end_tokens: Collection[int]) -> list[int]:
    """Return the ids of tokens that end answers in fine-tuning data with such prompts; none for plain texts.

    One answered row is encoded with and one without tools, because a tokenizer can have a separate template for tools.
    """
    answered: dict[bool, Row] = {}
    for row in rows:
        if row.messages is not None and bool(row.tools) not in answered:
            messages = [*row.messages, {"role": "assistant", "content": "a"}]
            answered[bool(row.tools)] = dataclasses.replace(row, messages=messages)
    encoded = encoder.encode(list(answered.values()))
    answers = [row.input_ids[row.loss_mask] for row in encoded]
    return sorted({int(ids[count_before_end(ids, end_tokens)]) for ids in answers})
