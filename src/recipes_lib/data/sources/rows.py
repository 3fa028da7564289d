"""The canonical row, to which every dataset layout is converted and from which text is rendered; its remarks.

Broken rows are collected and raised together, or dropped and counted (``broken_rows``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from recipes_lib.config.schema import TokensConfig
from recipes_lib.errors import DataError, Problem, collect_problems, merge_alike, raise_problems

_MIN_ROWS: Final = 500
"""Rows of a stream from which on its share of broken rows is compared with ``max_broken_fraction``."""

Item = TypeVar("Item")
Chunk = TypeVar("Chunk")

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


def add_system_prompt(row: Row, text: str | None) -> Row:
    """Return a chat with ``text`` as its system message, unless it has one; any row unchanged if ``text`` is ``None``.

    Raises:
        DataError: The row is plain text.
    """
    if text is None:
        return row
    if row.messages is None:
        remedy = "make turns of it: `dataset_columns: {question: prompt, answer: completion}`; or remove the key"
        raise DataError(Problem(row.where, "`system_prompt` is a message of a chat, and the row is plain text", remedy))
    if any(message["role"] in ("system", "developer") for message in row.messages):
        return row
    return replace(
        row,
        messages=[{"role": "system", "content": text}, *row.messages],
        untrained={index + 1 for index in row.untrained},
        num_prompt_messages=None if row.num_prompt_messages is None else row.num_prompt_messages + 1,
    )


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
        "have a string as prompt, to which the model's chat template is not applied",
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


class BrokenRows:
    """Row counts and collected problems of a source or mixture, handled according to ``broken_rows``.

    Attributes:
        are_dropped: True if broken rows are dropped, up to ``max_broken_fraction``; False if any of them is an error.
        num_rows: Number of rows read, including broken ones.
        num_broken: Number of rows that cannot be read, rendered or tokenised.
        fatal: Problems that are errors for every value of ``broken_rows``: truncated files, overlong rows.
    """

    def __init__(
        self, tokens: TokensConfig | None = None, *, is_stream: bool = False, num_rows: int = 0, num_broken: int = 0
    ) -> None:
        """Initialise the counts, from 0 or with those of an interrupted process.

        Args:
            tokens: Options that determine the handling. Default: broken rows are errors.
            is_stream: Whether the rows are streamed; reading stops once too many of them are broken.
            num_rows: Initial number of rows.
            num_broken: Initial number of broken rows.
        """
        options = tokens or TokensConfig()
        self._is_stream = is_stream
        self.are_dropped = options.broken_rows == "drop"
        self._droppable_fraction = options.max_broken_fraction
        self._max_fraction = options.max_broken_fraction if self.are_dropped else 0.0
        self.num_rows, self.num_broken = num_rows, num_broken
        self.fatal: list[Problem] = []
        self._problems: list[Problem] = []

    def add(self, num_rows: int, problems: Sequence[Problem]) -> None:
        """Add ``num_rows`` rows to the count, and the problems of those that are broken."""
        self.num_rows += num_rows
        # One row can have several problems, and counts once.
        self.num_broken += len({problem.where for problem in problems})
        self._problems += problems

    def filter_valid(self, entries: Iterable[Item | Problem]) -> Iterator[Item]:
        """Yield the valid entries; if broken rows are errors, only those before the first broken one.

        Problems are collected, not raised.
        """
        with collect_problems(self.fatal):
            for entry in entries:
                self.add(1, [entry] if isinstance(entry, Problem) else [])
                if not isinstance(entry, Problem) and (self.are_dropped or not self._problems):
                    yield entry
                if self.exceeds_limit:
                    break

    def skip_after_error(self, entries: Iterable[Row | Problem]) -> Iterator[Row | Problem]:
        """Yield the entries; if broken rows are errors, count rows after the first broken one without yielding them.

        Problems are always yielded: the error lists all of them, but encoding the other rows would be wasted.
        """
        has_failed = False
        for entry in entries:
            has_failed = has_failed or (isinstance(entry, Problem) and not self.are_dropped)
            if has_failed and isinstance(entry, Row):
                self.num_rows += 1
            else:
                yield entry

    @property
    def exceeds_limit(self) -> bool:
        """Whether more rows of a stream are broken than ``max_broken_fraction`` allows, so that reading can stop.

        Always False for data that are not streamed: these are read to the end, so that the error lists every problem.
        """
        return self._is_stream and self.num_broken > self._max_fraction * max(self.num_rows, _MIN_ROWS)

    def list_problems(self, name: str) -> list[Problem]:
        """Return the problems to raise once all rows are read; empty if none is an error.

        Args:
            name: Name of the dataset in the error.
        """
        # At least one row must be left, also of a dataset all of which may be broken.
        if not self.num_broken or self.num_broken <= min(self._max_fraction * self.num_rows, self.num_rows - 1):
            return [*self.fatal]
        # Without the problems of an interrupted process, which are not known any more.
        problems = merge_alike(self._problems, self.num_rows)
        if self.are_dropped:
            found = f"{self.describe()} are broken, and max_broken_fraction is {self._max_fraction:g}"
            remedy = "fix them" + (", or raise max_broken_fraction" if self.num_broken < self.num_rows else "")
            problems.insert(0, Problem(name, found, remedy))
        elif self.num_broken <= self._droppable_fraction * self.num_rows:
            remedy = "correct them, or set `broken_rows: drop`, which leaves them out and counts them"
            problems.append(Problem(name, f"{self.describe()} are broken", remedy))
        return [*self.fatal, *problems]

    def read(self, entries: Iterable[Item | Problem], name: str) -> Iterator[Item]:
        """Yield the valid entries as ``filter_valid`` does, then raise the collected problems.

        Raises:
            DataError: Too many rows are broken, or the source cannot be read to its end.
        """
        yield from self.filter_valid(entries)
        raise_problems(self.list_problems(name), name)

    def describe(self) -> str:
        """Return the number of broken rows, of all rows, and their share, as text."""
        share = self.num_broken / max(1, self.num_rows)
        return f"{self.num_broken:,} of {self.num_rows:,} rows ({share:.2%})"

    def list_warnings(self, split: str) -> list[str]:
        """Return a warning with the number of dropped rows and the first problem; empty if no row is broken.

        Args:
            split: Name of the rows in the warning: ``train``, ``eval`` or the dataset.
        """
        if not self.num_broken:
            return []
        # A resumed process has the counts, but not the problems, of the interrupted one.
        first = f"; the first is {self._problems[0].where}: {self._problems[0].found}" if self._problems else ""
        return [f"{split}: {self.describe()} are broken and left out{first}"]

    def count(self) -> dict[str, int]:
        """Return the counts as JSON values, the arguments of a new instance."""
        return {"num_rows": self.num_rows, "num_broken": self.num_broken}


def encode_valid(
    encode: Callable[[Sequence[Row], Sequence[int]], Chunk], entries: Sequence[Row | Problem], first: int, *, drop: bool
) -> tuple[Chunk | None, list[Problem]]:
    """Encode the valid rows of a chunk, and collect the problems of the others.

    Args:
        encode: Function of rows and their positions; raises ``DataError`` if it cannot encode one of them.
        entries: Rows, with a ``Problem`` in place of each unreadable one.
        first: Position of the first entry in the dataset.
        drop: Whether to encode the remaining rows if ``encode`` raises for some; if False, the result is ``None`` then.

    Returns:
        The result of ``encode`` and the problems in row order.
    """
    problems = {number: entry for number, entry in enumerate(entries, first) if isinstance(entry, Problem)}
    rows = {number: entry for number, entry in enumerate(entries, first) if isinstance(entry, Row)}
    named: set[str] = set()
    while True:
        # Separately, because two rows can have one name: those of two splits of a dataset of the Hub.
        for number in [number for number, row in rows.items() if row.where in named]:
            try:
                encode([rows[number]], [number])
            except DataError as error:
                problems[number] = error.problems[0]
                del rows[number]
        try:
            return encode(list(rows.values()), list(rows)), [problems[number] for number in sorted(problems)]
        except DataError as error:
            if not drop:
                return None, [*problems.values(), *error.problems]
            # Rows of these names have just been encoded alone: they fail only beside others.
            if named == (named := {problem.where for problem in error.problems}):
                raise
