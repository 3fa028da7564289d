"""The canonical row: target of every dataset layout, and input of rendering."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from recipes_lib.data.chat.remarks import Remark
from recipes_lib.errors import Problem

Message = Mapping[str, Any]
"""A chat turn: ``role`` and ``content``, and whatever else the template reads (``tool_calls``, ``thinking``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One example in canonical form: a chat, a plain prompt and completion, or a plain text; exactly one of the three.

    Attributes:
        source: File, folder or Hub id as the user wrote it.
        index: 1-based line for line-based files, 0-based row otherwise.
        index_name: ``line`` or ``row``.
        messages: The chat. For ``prompt``/``completion`` and preference rows in chat form: prompt then (chosen) answer.
        untrained: Numbers of the messages that are marked not to be trained on, whatever ``loss_on`` says.
        num_prompt_messages: How many leading messages are the prompt, when the layout says so.
        tools: Tool schemas that the chat template reads.
        prompt: Plain prompt.
        completion: Plain completion.
        text: Plain text.
        rejected: The rejected answer of a preference row: messages after the prompt, or plain text.
        margin: By how much the chosen answer of a preference row is better, where the data say so.
        template_kwargs: Extra variables of the chat template (``chat_template_kwargs`` column).
    """

    source: str
    index: int
    index_name: str = "row"
    messages: Sequence[Message] | None = None
    untrained: Collection[int] = frozenset()
    num_prompt_messages: int | None = None
    tools: Sequence[Any] | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None
    rejected: Sequence[Message] | str | None = None
    margin: float | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The row as an error names it: ``train.jsonl:17`` or ``folder row 17``."""
        return f"{self.source}:{self.index}" if self.index_name == "line" else f"{self.source} row {self.index}"


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """A row as tokens.

    Attributes:
        input_ids: ``uint32 (T,)``.
        loss_mask: ``bool (T,)``; True where the token is trained on. Position 0 is never a target, whatever it says.
        remarks: What an audit should tell of it.
    """

    input_ids: npt.NDArray[np.uint32]
    loss_mask: npt.NDArray[np.bool_]
    remarks: Collection[Remark] = ()


@dataclass(slots=True)
class RawRow:
    """A row as the dataset has it, and its place.

    Attributes:
        source: File or Hub id, as the user would write it.
        index: 1-based line for line-based files, 0-based row otherwise.
        index_name: ``line`` or ``row``.
        columns: The values by column.
    """

    source: str
    index: int
    index_name: str
    columns: dict[str, Any]

    @property
    def where(self) -> str:
        """The row as an error names it."""
        return Row(source=self.source, index=self.index, index_name=self.index_name).where


Entry = RawRow | Problem
"""A row, or the problem that stands in its place; so one pass over a file finds every broken line."""


class Source(Protocol):
    """Rows that can be read again and again, in the same order, in memory that does not grow with their number."""

    @property
    def name(self) -> str:
        """What the user called it."""

    @property
    def streaming(self) -> bool:
        """Whether reading it through just to list every problem is too much to ask."""

    def rows(self) -> Iterator[Entry]:
        """Read from the start.

        Raises:
            DataError: At the end: what cannot be read further, so that nobody knows how many rows are lost.
        """

    def fingerprint(self) -> str:
        """SHA-256 of what the rows are made of, without parsing them."""
