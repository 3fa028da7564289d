"""Documents between the blocks of a pipeline: chats as one text, steps with counts and samples, Parquet shards."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from recipes_lib.config.corpus_keys import Mode
from recipes_lib.config.tokenization import REASONING_KEYS
from recipes_lib.data.sources.messages import CALLS_AS_TEXT
from recipes_lib.errors import DataError, Problem
from recipes_lib.files import atomic_file, count_bytes

MAX_SAMPLE_CHARACTERS: Final = 1500
"""Longest text of a sample in the report."""
_BATCH_ROWS: Final = 500
"""Rows of a Parquet row group at most."""
_BATCH_CHARACTERS: Final = 1 << 25
"""Characters of the texts from which a row group is complete, so that memory does not grow with their length."""
PART_END: Final = "\ue000"
"""Separator of the texts of a chat while steps process them as one text, and their placeholder in its columns: a
character of Unicode's private use area."""
CHAT: Final = f"{PART_END}chat"
"""Metadata key of the columns of a chat; with the prefix it cannot collide with a column of a dataset."""
HTML: Final = f"{PART_END}html"
"""Metadata key that marks a text as HTML from which no text was extracted yet."""
SOURCE: Final = f"{PART_END}source"
"""Metadata key of the label of a document's source."""
_SHARD_COLUMNS: Final = ("text", "id", "source", "metadata")
_TEXT_COLUMNS: Final = ("messages", "prompt", "completion", "chosen", "rejected")
_TEXT_KEYS: Final = ("content", *REASONING_KEYS)


def split_chat(columns: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the texts of a chat, joined by ``PART_END``, and its columns with placeholders."""
    texts: list[str] = []

    def take(text: str) -> str:
        texts.append(text)
        return PART_END

    emptied = _replace_texts(columns, take, _TEXT_COLUMNS)
    return PART_END.join(texts), emptied


def join_chat(columns: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return the columns of ``split_chat`` with their placeholders replaced by the parts of ``text``."""
    # In the order of `split_chat`: both traverse the columns in the same way.
    parts = iter(text.split(PART_END))
    joined: dict[str, Any] = _replace_texts(columns, lambda _: next(parts), _TEXT_COLUMNS)
    return joined


def _replace_texts(value: Any, replace: Callable[[str], str], names: Sequence[str] = _TEXT_KEYS) -> Any:
    """Replace the texts of a prompt, a completion, messages, or an object: those of its entries ``names``."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, list):
        return [_replace_texts(item, replace) for item in value]
    return {name: _replace_texts(item, replace) if name in names else item for name, item in value.items()}


def spell_calls(columns: Mapping[str, Any]) -> str:
    """Return the tool schemas and calls of a chat, in which chats of equal texts can differ; empty if it has none.

    The identifiers of calls are left out, which many APIs draw at random.
    """
    turns = [turn for name in _TEXT_COLUMNS for turn in columns.get(name, ()) if isinstance(turn, Mapping)]
    calls = [columns["tools"]] if "tools" in columns else []
    calls += [[call["function"] for call in turn["tool_calls"]] for turn in turns if "tool_calls" in turn]
    calls += [turn[CALLS_AS_TEXT] for turn in turns if CALLS_AS_TEXT in turn]
    return json.dumps(calls, sort_keys=True) if calls else ""


class Step(Protocol):
    """One cleaning step.

    Attributes:
        name: Name in counts and reports, and the prefix of the step's configuration keys.
    """

    name: str

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Change a document in place; return the reason for its removal, or ``None`` to keep it.

        A step may add entries to ``document.metadata``. To change existing entries it must assign a new mapping:
        ``Apply`` recognises changes, which ``annotate`` reverts, by identity.

        Args:
            document: A document whose text is not blank.
            found: Counts of findings by kind, to be increased by those in this document.
        """


@dataclass
class StepTally:
    """Counts of a step: documents and UTF-8 bytes before and after it, removals by reason, findings by kind."""

    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    removed_bytes: Counter[str] = field(default_factory=Counter)
    changed: int = 0
    found: Counter[str] = field(default_factory=Counter)

    def count_in(self, num_bytes: int) -> None:
        """Count a document before the step."""
        self.documents_in += 1
        self.bytes_in += num_bytes

    def count_out(self, num_bytes: int) -> None:
        """Count a document after the step."""
        self.documents_out += 1
        self.bytes_out += num_bytes

    def add(self, other: Mapping[str, Any]) -> None:
        """Add the ``to_record`` of another task."""
        for name, value in other.items():
            if isinstance(value, Mapping):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def to_record(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}


def hash_name(name: str) -> int:
    """Return a 56-bit hash of a document's id, for reproducible sampling."""
    return int.from_bytes(hashlib.blake2b(name.encode(errors="replace"), digest_size=7).digest())


Hide = Callable[[str], str]
"""Returns a text with its personal data masked."""


def quote(text: str, hide: Hide | None) -> str:
    """Return the beginning of a text for a report, with personal data masked by ``hide``."""
    # Mask twice the length and truncate afterwards: a number truncated before masking would not be recognised.
    beginning = text[: 2 * MAX_SAMPLE_CHARACTERS]
    return (beginning if hide is None else hide(beginning))[:MAX_SAMPLE_CHARACTERS]


class Samples:
    """Sample of documents for each step and reason: those with the smallest hashes of their ids, in any order."""

    def __init__(self, limit: int, hide: Hide | None = None) -> None:
        """Keep up to ``limit`` documents for each name, masked by ``hide``."""
        self.limit, self._hide = limit, hide
        self._kept: dict[str, dict[int, dict[str, Any]]] = {}

    def add(self, name: str, document: Document, before: str = "") -> None:
        """Add a candidate to the sample ``name``; ``before``: its text before the step."""
        digest, kept = hash_name(document.id), self._kept.get(name, {})
        if len(kept) < self.limit or digest < max(kept, default=0):
            text, after = (quote(one, self._hide) for one in (before or document.text, document.text))
            sample = {"id": quote(document.id, self._hide), "text": text, "hash": digest}
            if "repeats" in document.metadata:
                sample["repeats"] = document.metadata["repeats"]
            if after != text:
                sample["after"] = after
            self.merge(name, sample)

    def merge(self, name: str, sample: dict[str, Any]) -> None:
        """Add an entry, also one from another task's ``list``."""
        kept = self._kept.setdefault(name, {})
        kept.setdefault(sample["hash"], sample)
        if len(kept) > self.limit:
            del kept[max(kept)]

    def list(self) -> dict[str, list[dict[str, Any]]]:
        """Return the samples by name, in the order of their hashes."""
        return {name: [kept[digest] for digest in sorted(kept)] for name, kept in sorted(self._kept.items())}


class Ledger:
    """Counts and samples of a task.

    Attributes:
        tallies: Step -> its counts, in the order of the steps.
        samples: Removed documents by ``step: reason``, changed ones by ``step``, and kept ones by ``kept``.
        notes: The first ``max_notes`` records that could not be read, each with the reason.
    """

    max_notes = 20

    def __init__(self, steps: Sequence[str], num_samples: int, hide: Hide | None = None) -> None:
        """Start with zero counts of ``steps``, and up to ``num_samples`` samples of a name, masked by ``hide``."""
        self._steps, self._num_samples, self._hide = steps, num_samples, hide
        self.clear()

    def clear(self) -> None:
        """Reset for a new task."""
        self.tallies = {step: StepTally() for step in self._steps}
        self.samples = Samples(self._num_samples, self._hide)
        self.notes: list[str] = []

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the ``to_record`` of another task."""
        for step, tally in record["tallies"].items():
            self.tallies.setdefault(step, StepTally()).add(tally)
        for name, samples in record["samples"].items():
            for sample in samples:
                self.samples.merge(name, sample)
        self.notes = (self.notes + record["notes"])[: self.max_notes]

    def to_record(self) -> dict[str, Any]:
        """Return counts, samples and notes as JSON values."""
        tallies = {step: tally.to_record() for step, tally in self.tallies.items()}
        return {"tallies": tallies, "samples": self.samples.list(), "notes": self.notes}

    def remove(self, step: str, reason: str, document: Document, before: str = "") -> None:
        """Count a removed document."""
        tally = self.tallies[step]
        tally.removed[reason] += 1
        tally.removed_bytes[reason] += count_bytes(before or document.text)
        self.samples.add(f"{step}: {reason}", document, before)


def add_flag(document: Document, flag: str) -> None:
    """Append to the list ``flags`` of the metadata; another value of a column of that name becomes its first item."""
    flags = document.metadata.get("flags", [])
    document.metadata["flags"] = [*(flags if isinstance(flags, list) else [flags]), flag]


class Apply(PipelineStep):  # type: ignore[misc]
    """Datatrove pipeline block that applies a step and counts its effects."""

    type = "CLEAN"

    def __init__(self, step: Step, mode: Mode, ledger: Ledger) -> None:
        """Apply ``step``; in mode ``annotate`` only record in the metadata what it would do."""
        super().__init__()
        self.name, self.step, self.mode, self.ledger = step.name, step, mode, ledger

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the remaining documents."""
        tally, name = self.ledger.tallies[self.step.name], self.step.name
        for document in data:
            before, identity, metadata = document.text, document.id, document.metadata
            with self.track_time():
                reason = self.step.apply(document, tally.found)
            if reason is None and not document.text.strip():
                reason = "nothing left"
            tally.count_in(count_bytes(before))
            # By identity: a step that changes metadata assigns a new mapping, one that only adds entries does not.
            is_changed = document.text != before or document.metadata is not metadata
            if is_changed:
                tally.changed += 1
                if reason is None:
                    self.ledger.samples.add(name, document, before)
            if self.mode == "annotate":
                document.id, document.metadata = identity, metadata
                if reason is not None or is_changed:
                    add_flag(document, f"{name}: {reason or 'changed'}")
                if reason is not None:
                    tally.found[reason] += 1
                document.text, reason = before, None
            if reason is not None:
                self.ledger.remove(name, reason, document, before)
                continue
            tally.count_out(count_bytes(document.text))
            yield document


def write_shard(path: Path, documents: Iterator[Document]) -> None:
    """Atomically write documents as a Parquet file, metadata as JSON.

    Raises:
        OSError: The file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    # `large_string` has 64-bit offsets: the texts of a batch can exceed the 2 GiB that `string` can address.
    schema = pa.schema([(name, pa.large_string()) for name in _SHARD_COLUMNS])
    path = path.absolute()  # pyarrow takes what precedes a colon in a relative path for the scheme of an address.
    with atomic_file(path, is_shared=True) as partial, pq.ParquetWriter(partial, schema, compression="zstd") as writer:
        for rows in _batch_rows(documents):
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))


def _batch_rows(documents: Iterator[Document]) -> Iterator[list[dict[str, Any]]]:
    while (document := next(documents, None)) is not None:
        rows, size = [_to_row(document)], len(document.text)
        while len(rows) < _BATCH_ROWS and size < _BATCH_CHARACTERS and (document := next(documents, None)) is not None:
            rows.append(_to_row(document))
            size += len(document.text)
        yield rows


def read_shard(path: Path) -> Iterator[Document]:
    """Yield the documents of a file of ``write_shard``.

    Raises:
        DataError: The file is missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path.absolute()) as file:
            for group in map(file.read_row_group, range(file.num_row_groups)):
                for row in group.to_pylist():
                    metadata = json.loads(row["metadata"]) | {SOURCE: row["source"]}
                    yield Document(text=row["text"], id=row["id"], metadata=metadata)
    except (OSError, pa.ArrowException) as error:
        found = f"cannot be read: {error}"
        raise DataError(Problem(str(path), found, "delete the folder `.work` of the corpus, and run again")) from error


def _to_row(document: Document) -> dict[str, Any]:
    metadata = {name: value for name, value in document.metadata.items() if name != SOURCE}
    return {
        "text": document.text,
        "id": document.id,
        "source": document.metadata[SOURCE],
        "metadata": json.dumps(spell_encodable(metadata), ensure_ascii=False, allow_nan=False, default=str),
    }


def spell_encodable(value: Any) -> Any:
    """Return metadata without what JSON and UTF-8 do not have: NaN and infinities become ``None``, surrogates escapes.

    In metadata from Parquet and CSV files, NaN denotes a missing value.
    """
    if isinstance(value, str):
        return escape_surrogates(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {escape_surrogates(str(name)): spell_encodable(item) for name, item in value.items()}
    return [spell_encodable(item) for item in value] if isinstance(value, list | tuple) else value


def escape_surrogates(text: str) -> str:
    r"""Return a text with surrogates as ``\udcXX``: half a pair, or a byte of a file name that is not UTF-8."""
    return text.encode(errors="backslashreplace").decode()
