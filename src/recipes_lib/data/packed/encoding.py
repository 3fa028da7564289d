"""Tokenisation of a mixture in chunks, with all broken rows reported together, and the inputs of its cache key."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import math
import os
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from recipes_lib.config.paths import expand_home
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.packed.packing import Examples, build_examples, concatenate_examples
from recipes_lib.data.sources.broken_rows import BrokenRows, encode_sound
from recipes_lib.data.sources.mixtures import Mixture
from recipes_lib.data.sources.rows import Row
from recipes_lib.data.sources.splits import compute_digests
from recipes_lib.data.store import explain_disk_errors
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.files import hash_file
from recipes_lib.shipped import find_shipped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from recipes_lib.data.chat.encoder import RowEncoder

TokenizerLoader = Callable[[RecipeConfig], "PreTrainedTokenizerBase"]
"""Loads the run's tokenizer; handed in, since loading models and tokenizers is not this room's work."""

ROWS_PER_CHUNK: Final = 500
"""Rows tokenised together; also the window in which a stream is shuffled and packed."""

CHARACTERS_PER_CHUNK: Final = 1 << 21
"""A chunk is closed when it has so many characters, so that memory does not grow with the length of rows."""

_THREADS: Final = 2

Chunk = TypeVar("Chunk")
Encode = Callable[[Sequence[Row], Sequence[int]], tuple[Examples, Mapping[str, npt.NDArray[Any]]]]
"""Takes rows and their positions in a mixture; gives their tokens, and the other columns of ``EncodedMixture``."""


class TokenFile:
    """Tokens of examples on disk, as ``Tokens``; memory does not grow with their number.

    A temporary file without a name, so that a killed process leaves nothing. It is read, not memory-mapped: mapped
    pages count as memory of the process, and packs read from everywhere. Use it as a context manager.

    Raises:
        DataError: ``root`` cannot be made or written.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._num_tokens = 0
        with explain_disk_errors(root):
            self._file = tempfile.TemporaryFile(dir=root)  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> TokenFile:
        return self

    def __exit__(self, *_: object) -> None:
        # After a full disk, the buffer still has data, and closing would try to write it again.
        with suppress(OSError):
            self._file.close()

    def __getitem__(self, span: slice, /) -> npt.NDArray[np.uint32]:
        tokens = np.empty(span.stop - span.start, np.uint32)
        with explain_disk_errors(self._root):
            self._file.seek(tokens.itemsize * span.start)
            # Bytes that are not read would be uninitialised memory.
            if self._file.readinto(tokens.data) != tokens.nbytes:
                raise OSError(errno.EIO, "the temporary file of its tokens is shorter than what was written")
        return tokens

    def keep(self, examples: Examples) -> Examples:
        """Append the tokens of examples, and return the examples with their tokens in this file.

        Args:
            examples: Laid end to end in an array.

        Raises:
            DataError: The disk is full.
        """
        tokens = examples.tokens[0 : int(examples.lengths.sum())]
        with explain_disk_errors(self._root):
            # Reads have moved the position.
            self._file.seek(0, os.SEEK_END)
            self._file.write(tokens.data)
        starts = examples.starts + self._num_tokens
        self._num_tokens += len(tokens)
        return replace(examples, tokens=self, starts=starts)


@dataclass(frozen=True, slots=True)
class EncodedMixture:
    """Rows of a mixture: their places, digests and tokens.

    Attributes:
        mixture: What they were read from; ``examples.row_ids`` are positions in it.
        examples: The tokens.
        digests: From ``compute_digests``, one for each example.
        columns: What else is known of each example: arrays by name, each with one entry for each.
    """

    mixture: Mixture
    examples: Examples
    digests: npt.NDArray[np.bytes_]
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    @property
    def num_duplicates(self) -> int:
        """Number of rows with the same content as an earlier one."""
        return len(self.digests) - len(np.unique(self.digests))

    def take(self, positions: npt.NDArray[np.int64]) -> EncodedMixture:
        """Return the rows at these positions, in that order."""
        columns = {name: column[positions] for name, column in self.columns.items()}
        return EncodedMixture(self.mixture, self.examples.take(positions), self.digests[positions], columns)

    def find_places(self, positions: Collection[int]) -> dict[int, str]:
        """Return the places of these rows for error messages; reads the mixture again, up to the last of them."""
        numbers = {position: int(self.examples.row_ids[position]) for position in positions}
        places = self.mixture.find_places(numbers.values())
        return {position: places[number] for position, number in numbers.items()}


def read_seed(config: RecipeConfig) -> int:
    """Return the run's seed for held-out rows, draws and shuffling."""
    # The default is 0, not upstream's 42: otherwise existing prepared sets would change.
    return int(config.training.get("seed") or 0)


def build_encoder(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase) -> RowEncoder:
    """Build the encoder of a run.

    Raises:
        ConfigError: The tokenizer is not a fast one or has no such ``eos_token``, or the chat template cannot be read.
    """
    from recipes_lib.data.chat.encoder import RowEncoder  # imports transformers, which finding a set does not need

    tokens, template = config.tokens, read_chat_template(config)
    return RowEncoder(tokenizer, loss_on=tokens.loss_on, chat_template=template, eos_token=tokens.eos_token)


def split_chunks(
    entries: Iterable[Row | Problem], broken: BrokenRows, max_characters: float = math.inf
) -> Iterator[list[Row | Problem]]:
    """Yield entries in chunks of ``ROWS_PER_CHUNK``; the last one is shorter.

    Args:
        entries: The rows.
        broken: Told what is wrong with what they are read from; those that were read before are yielded all the same.
        max_characters: A chunk is closed, too, when its rows have so many.
    """
    chunk: list[Row | Problem] = []
    num_characters = 0
    try:
        for entry in entries:
            chunk.append(entry)
            num_characters += _count_characters(entry) if isinstance(entry, Row) else 0
            if len(chunk) == ROWS_PER_CHUNK or num_characters >= max_characters:
                yield chunk
                chunk, num_characters = [], 0
    except DataError as error:
        broken.refused += error.problems
    if chunk:
        yield chunk


def _count_characters(row: Row) -> int:
    """Number of characters of a row's texts, without markup."""
    if row.messages is not None:
        return sum(len(str(message.get("content", ""))) for message in row.messages)
    return len(row.text or "") + len(row.prompt or "") + len(row.completion or "")


def encode_chunk(encoder: RowEncoder, rows: Sequence[Row], row_ids: Sequence[int]) -> Examples:
    """Tokenise some rows.

    Args:
        encoder: From ``build_encoder``.
        rows: The rows.
        row_ids: Their positions in their mixture.

    Raises:
        DataError: Rows that cannot be tokenised or masked, or give no token.
    """
    encoded = encoder.encode(rows)
    empty = [row for row, tokens in zip(rows, encoded, strict=True) if not len(tokens.input_ids)]
    if empty:
        raise DataError(*(Problem(row.where, "the row gives no token", "remove it") for row in empty))
    return build_examples(encoded, row_ids)


def encode_mixture(
    encode: Encode, mixture: Mixture, broken: BrokenRows, on_rows: Callable[[int], None], file: TokenFile
) -> EncodedMixture:
    """Tokenise all valid rows.

    Args:
        encode: Gives the tokens of some rows, and what else there is to know of each; called by several threads.
        mixture: The rows.
        broken: Counts the others, for the caller to judge.
        on_rows: Told the number of rows of each chunk that is done.
        file: Takes the tokens, of any number of mixtures; in memory are some numbers for each row.

    Raises:
        DataError: The disk is full.
    """

    def encode_all(rows: Sequence[Row], row_ids: Sequence[int]) -> tuple[Examples, Mapping[str, npt.NDArray[Any]]]:
        examples, columns = encode(rows, row_ids)
        return examples, {"digests": compute_digests(rows), **columns}

    parts, columns = [], defaultdict(list)
    # An empty chunk first, so that columns have their types where there is no row.
    for examples, chunk in chain([encode_all([], [])], map_chunks(mixture.entries(), encode_all, broken)):
        parts.append(file.keep(examples))
        for name, column in chunk.items():
            columns[name].append(column)
        on_rows(len(examples))
    whole = {name: np.concatenate(chunks) for name, chunks in columns.items()}
    return EncodedMixture(mixture, concatenate_examples(parts), whole.pop("digests"), whole)


def map_chunks(
    entries: Iterable[Row | Problem], encode: Callable[[Sequence[Row], Sequence[int]], Chunk], broken: BrokenRows
) -> Iterator[Chunk]:
    """Yield the result of each chunk of rows, in order, without the broken ones.

    While some chunks are in the tokenizer, which releases the GIL, others are read and masked.

    Args:
        entries: The rows.
        encode: Takes the rows of a chunk and their numbers; called by several threads.
        broken: Told of every row of the chunks up to the one that is yielded, and of what is wrong.
    """
    pending: deque[tuple[int, Future[tuple[Chunk | None, list[Problem]]]]] = deque()
    num_read = 0
    with ThreadPoolExecutor(_THREADS) as pool:
        chunks = split_chunks(broken.skim(entries), broken, CHARACTERS_PER_CHUNK)
        while not broken.are_hopeless:
            # One more than there are threads, so that none waits while this one masks and yields.
            for chunk in islice(chunks, _THREADS + 1 - len(pending)):
                pending.append(
                    (len(chunk), pool.submit(encode_sound, encode, chunk, num_read, drop=broken.are_dropped))
                )
                num_read += len(chunk)
            if not pending:
                return
            num_rows, future = pending.popleft()
            encoded, problems = future.result()
            broken.add(num_rows, problems)
            if encoded is not None:
                yield encoded


TOKENIZER_FILES: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
)
"""Files of a model folder that make a tokenizer."""

_TOKENIZER_CLASS_FILES: Final = ("config.json", "*.py")
"""Files that may name its class, or be it."""

_PACKAGES: Final = ("jinja2", "tokenizers", "transformers")
_TOLD_BY_CONTENT: Final = {"dataset_name", "dataset_revision", "chat_template_path", "eval_datasets", "prepared_dir"}
"""Options that only say where something lies: what lies there is in the key instead, so moving it changes nothing."""


def collect_inputs(config: RecipeConfig, sources: Mapping[str, str]) -> dict[str, Any]:
    """Return everything that determines the content of a prepared set, as JSON values; the key is their hash.

    Args:
        config: The run.
        sources: Fingerprint of the rows of each split.

    Raises:
        ConfigError: The tokenizer or the chat template cannot be found.
    """
    options = dataclasses.asdict(config.data) | dataclasses.asdict(config.tokens)
    template = read_chat_template(config)
    return {
        "sources": dict(sources),
        "options": {name: value for name, value in options.items() if name not in _TOLD_BY_CONTENT},
        "trust_remote_code": config.model.trust_remote_code,
        "chat_template": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
        "tokenizer": _hash_files(find_tokenizer_folder(config), (*TOKENIZER_FILES, *_TOKENIZER_CLASS_FILES)),
        "code": _hash_files(Path(__file__).parents[1], ("**/*.py",)),
        "versions": {package: version(package) for package in _PACKAGES},
    }


def find_tokenizer_folder(config: RecipeConfig) -> Path:
    """Return the folder with the tokenizer files of the run; those of a Hub model are downloaded to its cache.

    Raises:
        ConfigError: There is no such folder or Hub model, or it has no tokenizer.
    """
    own = config.model.tokenizer_name_or_path
    name = own or str(config.model.model_name_or_path)
    option = "tokenizer_name_or_path" if own else "model_name_or_path"
    folder = Path(name) if Path(name).is_dir() else _fetch(config, option, name)
    if not _list_files(folder, TOKENIZER_FILES):
        raise _missing(
            config, option, f"{name} has no tokenizer files", "name the tokenizer with tokenizer_name_or_path"
        )
    return folder


def read_chat_template(config: RecipeConfig) -> str | None:
    """Return the text of ``chat_template_path``; ``None`` if the tokenizer's own template is used.

    Raises:
        ConfigError: The file cannot be read as text.
    """
    path = config.tokens.chat_template_path
    try:
        return None if path is None else find_shipped(Path(expand_home(path))).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        found = f"the chat template {path} cannot be read: {reason}"
        raise _missing(config, "chat_template_path", found, "name a Jinja file") from error


def _fetch(config: RecipeConfig, option: str, name: str) -> Path:
    from huggingface_hub import snapshot_download  # Not needed for a tokenizer on disk.

    is_models = option == "model_name_or_path"
    revision = config.model.tokenizer_revision or (config.model.model_revision if is_models else None)
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=[*TOKENIZER_FILES, *_TOKENIZER_CLASS_FILES])
        )
    except (OSError, ValueError) as error:  # No repository id, no such repository, or no network and not in the cache.
        reason = str(error).splitlines()[0]
        raise _missing(config, option, f"no folder and no Hub model {name!r}: {reason}", "check the name") from error


def _list_files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _hash_files(folder: Path, patterns: tuple[str, ...]) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): hash_file(path) for path in _list_files(folder, patterns)}


def _missing(config: RecipeConfig, option: str, found: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(config.provenance.get(option, option), found, remedy))
