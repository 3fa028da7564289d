"""Preference rows to token ids: one prompt with a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.sources.rows import EncodedRow, Remark, Row
from recipes_lib.errors import DataError, Problem, collect_problems

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


class PairEncoder:
    """Converts preference rows to token ids; thread-safe.

    Args:
        encoder: Encoder that renders, tokenises and masks each answer as in fine-tuning, with ``loss_on`` unset.
        tokenizer: Tokenizer of the encoder, for error messages.
    """

    def __init__(self, encoder: RowEncoder, tokenizer: PreTrainedTokenizerBase) -> None:
        self._encoder = encoder
        self._tokenizer = tokenizer

    def encode(self, rows: Sequence[Row]) -> list[EncodedPair]:
        """Return the token ids of each pair, in order.

        An answer has the target tokens of fine-tuning: those from the end of the generation prompt to the end token.
        Text that the template writes after it is dropped. The separately tokenised prompt is verified to be a prefix of
        both texts, token by token.

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
            answers = self._encoder.encode([row for pair in valid for row in (pair, take_rejected(pair))])
        except DataError as error:
            problems += dict.fromkeys(error.problems)  # A problem of the prompt occurs with both answers.
        pairs = []
        # After an error `answers` is empty, and no pair is joined.
        for row, chosen, rejected in zip(valid, answers[::2], answers[1::2], strict=False):
            with collect_problems(problems):
                pairs.append(self._join(row, chosen, rejected))
        if problems:
            raise DataError(*problems)
        return pairs

    def _join(self, row: Row, chosen: EncodedRow, rejected: EncodedRow) -> EncodedPair:
        prompt = self._encoder.encode_prompt(row)
        if not len(prompt):
            found = "the prompt has no token that could predict the first token of an answer"
            raise DataError(Problem(row.where, found, "write a prompt, or remove the row"))
        answers = {"chosen": chosen, "rejected": rejected}
        cuts = [self._cut(row, name, prompt, answer) for name, answer in answers.items()]
        remarks = tuple(dict.fromkeys([*chosen.remarks, *rejected.remarks]))
        return EncodedPair(prompt, cuts[0], cuts[1], remarks)

    def _cut(self, row: Row, name: str, prompt: TokenIds, answer: EncodedRow) -> TokenIds:
        """Return the tokens of an answer, from the first one after the prompt to the last target."""
        ids, targets = answer.input_ids, np.flatnonzero(answer.loss_mask)
        if not np.array_equal(ids[: len(prompt)], prompt):
            raise self._not_a_prefix(row, name, prompt, ids)
        if not len(targets) or (targets != len(prompt) + np.arange(len(targets))).any():
            found = f"the targets of `{name}` are not contiguous from the end of the generation prompt"
            remedy = "let {% generation %} enclose what the chat template writes after its generation prompt"
            raise DataError(Problem(row.where, found, remedy))
        return ids[len(prompt) : len(prompt) + len(targets)]

    def _not_a_prefix(self, row: Row, name: str, prompt: TokenIds, ids: TokenIds) -> DataError:
        shared = min(len(prompt), len(ids))
        at = int(np.argmax(np.append(prompt[:shared] != ids[:shared], True)))
        expected, written = (self._tokenizer.decode(tokens[at : at + 8].tolist()) for tokens in (prompt, ids))
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
