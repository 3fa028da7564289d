"""The canonical row: target of every dataset layout, input of rendering, and remarks on it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from recipes_lib.errors import Problem

Message = Mapping[str, Any]
"""A chat turn: ``role`` and ``content``, and whatever else the template reads (``tool_calls``, ``thinking``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One example in canonical form: exactly one of a chat, a plain prompt and completion, or a plain text.

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
        """Name of the row in errors: ``train.jsonl:17`` or ``folder row 17``."""
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
    """A row of the dataset, unchanged, and its place.

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
        """Name of the row in errors: ``train.jsonl:17`` or ``folder row 17``."""
        return Row(source=self.source, index=self.index, index_name=self.index_name).where


Entry = RawRow | Problem
"""A row, or the problem that stands in its place; so one pass over a file finds every broken line."""


class Source(Protocol):
    """Rows that can be read repeatedly, in the same order, in memory that does not grow with their number."""

    @property
    def name(self) -> str:
        """Name given by the user."""

    @property
    def streaming(self) -> bool:
        """Whether a full pass only to list every problem is too expensive."""

    def rows(self) -> Iterator[Entry]:
        """Read from the start.

        Raises:
            DataError: At the end: a file that cannot be read further, with an unknown number of lost rows.
        """

    def fingerprint(self) -> str:
        """SHA-256 of the content of the rows, without parsing them."""


_OTHER_TEMPLATE: Final = "use a template that writes it (chat_template_path), or take it out of the rows"


class Remark(Enum):
    """A remark on a row: a problem of such rows, and a possible remedy."""

    LOST_BESIDE_CALL = "say something beside a tool call that the chat template does not write", _OTHER_TEMPLATE
    PYTHON_ARGUMENTS = (
        "call tools with arguments that the chat template writes as Python does, not as JSON",
        "let the template write `arguments | tojson`, unless the server of the model reads Python",
    )
    SPECIAL_TEXT = (
        "spell a special token inside a message: to the model it is that token",
        "take it out, if nobody is meant to write turns or images by hand",
    )
    LOST_REASONING = "give reasoning in their last turn that the chat template does not write", _OTHER_TEMPLATE
    LOST_TOOLS = "give tool schemas that the chat template does not write", _OTHER_TEMPLATE

    def __init__(self, found: str, remedy: str) -> None:
        self.found = found
        self.remedy = remedy


RemarkBits = npt.NDArray[np.uint8]
"""What there is to tell of each row, one byte a row: bit ``i`` stands for the ``i``-th ``Remark``."""


def build_bits(remarks: Iterable[Collection[Remark]]) -> RemarkBits:
    """The remarks on each row, ``uint8 (R,)``."""
    bit_of = {remark: 1 << number for number, remark in enumerate(Remark)}
    return np.array([sum(bit_of[remark] for remark in set(some)) for some in remarks], np.uint8)


def find_remarked(bits: RemarkBits) -> dict[Remark, npt.NDArray[np.int64]]:
    """Positions of the rows with each remark, ordered by the first of them; unused remarks are omitted."""
    rows = {remark: np.flatnonzero(bits >> number & 1) for number, remark in enumerate(Remark)}
    return {remark: at for remark, at in sorted(rows.items(), key=lambda item: item[1][:1].tolist()) if len(at)}
