"""The canonical row, to which every dataset layout is converted and from which text is rendered; its remarks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from recipes_lib.errors import Problem

Message = Mapping[str, Any]
"""A chat turn: ``role``, ``content`` and further keys that chat templates read (``tool_calls``, ``thinking``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One example in canonical form: either a chat, or a plain prompt and completion, or a plain text.

    Attributes:
        where: Name of the row in errors: ``train.jsonl:17`` or ``folder row 17``.
        messages: The chat. For ``prompt``/``completion`` and preference rows in chat form: prompt then (chosen) answer.
        untrained: Indices of messages that the dataset excludes from the loss, for every ``loss_on``.
        num_prompt_messages: Number of leading messages that are the prompt; ``None`` if the layout has no separate one.
        tools: Tool schemas for the chat template.
        prompt: Plain prompt.
        completion: Plain completion.
        text: Plain text.
        rejected: Rejected answer of a preference row: the messages after the prompt, or a plain text.
        margin: Difference in quality between the chosen and the rejected answer; ``None`` if the dataset has none.
        template_kwargs: Additional variables of the chat template (``chat_template_kwargs`` column).
        others: The other columns of a prompt, for reward functions.
    """

    where: str
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
    others: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """A tokenised row.

    Attributes:
        input_ids: Token ids, ``uint32 (T,)``.
        loss_mask: True at tokens that are trained on, ``bool (T,)``. Consumers ignore position 0: no token predicts it.
        remarks: Remarks for the audit.
    """

    input_ids: npt.NDArray[np.uint32]
    loss_mask: npt.NDArray[np.bool_]
    remarks: Collection[Remark] = ()


@dataclass(slots=True)
class RawRow:
    """A row as the dataset has it, with its location.

    Attributes:
        where: Name of the row in errors: ``train.jsonl:17`` or ``folder row 17``.
        index: 1-based line number in line-based files, otherwise 0-based row number.
        columns: Values by column name.
    """

    where: str
    index: int
    columns: dict[str, Any]


Entry = RawRow | Problem
"""A row, or the problem in place of an unreadable one, so that a single pass finds every broken line."""


class Source(Protocol):
    """Rows that can be read repeatedly, in a fixed order, with memory that does not depend on their number."""

    @property
    def name(self) -> str:
        """Path or Hub id, as configured."""

    @property
    def streaming(self) -> bool:
        """Whether rows are read over the network, so that a full pass only to list every problem is too expensive."""

    def rows(self) -> Iterator[Entry]:
        """Yield the rows from the start.

        Raises:
            DataError: A file cannot be read further, so that an unknown number of rows is lost; raised after the rows
                that can be read.
        """

    def fingerprint(self) -> str:
        """Return a SHA-256 that identifies the content, without parsing the rows."""


_OTHER_TEMPLATE: Final = "use a template that writes it (chat_template_path), or take it out of the rows"
_THINKING: Final = "set `thinking` or `enable_thinking` in the column `chat_template_kwargs` if the template reads it"


class Remark(Enum):
    """A remark on a row, for a warning of the audit: ``N rows {found}``, and a possible remedy."""

    CUT = "have so many characters beyond max_length that only their beginning was tokenised and counted", ""
    LOST_BESIDE_CALL = (
        "say something beside a tool call that the chat template does not write, or only after the answer of the tool",
        _OTHER_TEMPLATE,
    )
    PYTHON_ARGUMENTS = (
        "call tools with arguments that the chat template writes as Python does, not as JSON",
        "let the template write `arguments | tojson`, unless the server of the model reads Python",
    )
    SPECIAL_TEXT = (
        "spell a special token inside a message: to the model it is that token",
        "remove it, unless such text is meant to be a turn or an image",
    )
    LOST_REASONING = (
        "give reasoning in their last turn that the chat template does not write",
        f"{_THINKING}, or {_OTHER_TEMPLATE}",
    )
    LOST_TOOLS = "give tool schemas that the chat template does not write", _OTHER_TEMPLATE
    LOST_VARIABLES = "give `chat_template_kwargs` that the chat template does not read", _OTHER_TEMPLATE
    NO_TOOLS = "call tools without tool schemas", "name their column: `dataset_columns: {tools: metadata.tools}`"
    PLAIN_TEXT = (
        "have strings as prompt and answer, to which the model's chat template is not applied",
        "if they are chats, write `dataset_columns: {question: prompt}`, for SFT with `answer: completion` beside it",
    )
    TAGGED_REASONING = (
        "spell reasoning as `<think>`, beside which the chat template writes a form of its own, such as an empty block",
        "write it as `reasoning_content` of the message, and only the answer as `content`",
    )
    TAGGED_RESULT = "spell `<tool_response>` around a result, as the chat template does too", "write the result only"
    OTHER_OPENING = (
        "open their last turn in another way than the generation prompt, after which the model answers",
        f"write reasoning as `reasoning_content`, or {_THINKING}",
    )

    def __init__(self, found: str, remedy: str) -> None:
        self.found = found
        self.remedy = remedy


RemarkBits = npt.NDArray[np.uint16]
"""Remarks on R rows as bit sets, ``uint16 (R,)``: bit ``i`` is set for the ``i``-th member of ``Remark``."""


def build_bits(remarks: Iterable[Collection[Remark]]) -> RemarkBits:
    """Return the remarks on each row as bit sets, ``uint16 (R,)``."""
    bit_of = {remark: 1 << number for number, remark in enumerate(Remark)}
    return np.array([sum(bit_of[remark] for remark in set(some)) for some in remarks], np.uint16)


def find_remarked(bits: RemarkBits) -> dict[Remark, npt.NDArray[np.int64]]:
    """Return the positions of the rows with each remark that occurs, ordered by the first row."""
    rows = {remark: np.flatnonzero(bits >> number & 1) for number, remark in enumerate(Remark)}
    return {remark: at for remark, at in sorted(rows.items(), key=lambda item: item[1][:1].tolist()) if len(at)}
