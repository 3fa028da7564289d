"""Tokenisation of a mixture in chunks, with all broken rows reported together, and the inputs of the cache key."""

from __future__ import annotations

import dataclasses
import errno
import gc
import hashlib
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from recipes_lib.config.paths import find_shipped
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.packed.packing import Examples, IntArray, build_examples, concatenate_examples
from recipes_lib.data.sources.mixtures import Mixture
from recipes_lib.data.sources.rows import BrokenRows, Row, Source, encode_valid
from recipes_lib.data.sources.splits import compute_digests
from recipes_lib.data.store import explain_disk_errors
from recipes_lib.data.workers import map_in_order
from recipes_lib.environment import explain_refusal_of_hub
from recipes_lib.errors import ConfigError, DataError, Problem, collect_problems
from recipes_lib.files import hash_file, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from recipes_lib.data.chat.encoder import RowEncoder

TokenizerLoader = Callable[[], "PreTrainedTokenizerBase"]
"""Function that loads the tokenizer of a run; a parameter, because ``data`` does not import ``models``."""

ROWS_PER_CHUNK: Final = 500
"""Rows that are tokenised together; also the window in which a stream is shuffled and packed."""

CHARACTERS_PER_CHUNK: Final = 1 << 21
"""Characters at which a chunk is closed, so that memory does not grow with the length of rows."""

Chunk = TypeVar("Chunk")
Encode = Callable[[Sequence[Row], Sequence[int]], tuple[Examples, Mapping[str, npt.NDArray[Any]]]]
"""Function of rows and their positions in a mixture, to their tokens and the ``columns`` of ``EncodedMixture``."""


class TokenFile:
    """Tokens of examples in a temporary file, as ``Tokens``; a context manager, which closes the file.

    The file has no name, so that a killed process leaves nothing behind. It is read instead of memory-mapped: packs
    access it at random, and mapped pages would count as memory of the process.

    Args:
        root: Folder of the file.

    Raises:
        DataError: ``root`` cannot be written.
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
            # After a short read, the rest of the array would be uninitialised memory.
            if self._file.readinto(tokens.data) != tokens.nbytes:
                raise OSError(errno.EIO, "the temporary file of its tokens has lost data")
        return tokens

    def keep(self, examples: Examples) -> Examples:
        """Append the tokens of examples to the file, and return the examples with this file as their ``tokens``.

        Args:
            examples: Examples whose tokens are contiguous from the start of an array.

        Raises:
            DataError: The disk is full.
        """
        tokens = examples.tokens[0 : int(examples.lengths.sum())]
        with explain_disk_errors(self._root):
            self._file.seek(0, os.SEEK_END)
            self._file.write(tokens.data)
        starts = examples.starts + self._num_tokens
        self._num_tokens += len(tokens)
        return replace(examples, tokens=self, starts=starts)


@dataclass(frozen=True, slots=True)
class EncodedMixture:
    """Tokenised rows of a mixture.

    Attributes:
        mixture: The mixture; ``examples.row_ids`` are positions in it.
        examples: The tokenised rows, R examples.
        digests: Digests from ``compute_digests``, ``S16 (R,)``.
        columns: Further arrays by name, each with R entries; of pairs among them ``prompt_digests`` and ``lengths``.
    """

    mixture: Mixture
    examples: Examples
    digests: npt.NDArray[np.bytes_]
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    @property
    def lengths(self) -> IntArray:
        """Lengths that ``max_length`` limits, in tokens, ``int64 (R,)``: of pairs the prompt and the longer answer."""
        return self.columns.get("lengths", self.examples.lengths)

    def take(self, positions: npt.NDArray[np.int64]) -> EncodedMixture:
        """Return the rows at ``positions``, ``int64 (K,)``, in that order."""
        columns = {name: column[positions] for name, column in self.columns.items()}
        return EncodedMixture(self.mixture, self.examples.take(positions), self.digests[positions], columns)

    def find_places(self, positions: Collection[int]) -> dict[int, str]:
        """Return the locations of rows by position, for errors; reads the mixture again up to the last of them."""
        return self.mixture.find_places(self.examples.row_ids, positions)


def read_seed(config: RecipeConfig) -> int:
    """Return the seed of held-out rows, of rows drawn from mixtures, and of shuffling."""
    # The default is 0 instead of upstream's 42, because another one would change the key of existing prepared sets.
    return int(config.training.get("seed") or 0)


def build_encoder(
    config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> RowEncoder:
    """Build the encoder of a run.

    Args:
        config: Configuration of the run.
        tokenizer: Tokenizer of the run: a fast one that has the ``eos_token``.
        max_length: Number of tokens above which rows are handled by ``overlong``; texts that certainly have more are
            not tokenised whole. ``None`` if all tokens are needed.

    Raises:
        ConfigError: The chat template cannot be read.
    """
    # Imports transformers, which is slow and not needed to find an existing set.
    from recipes_lib.data.chat.encoder import RowEncoder

    tokens, template = config.tokens, read_chat_template(config)
    # The share of lost targets is that of whole rows.
    if tokens.overlong == "split" or (tokens.overlong != "error" and tokens.max_truncated_fraction is not None):
        max_length = None
    return RowEncoder(
        tokenizer,
        loss_on=tokens.loss_on,
        system_prompt=config.chat.system_prompt,
        chat_template=template,
        eos_token=tokens.eos_token,
        max_length=max_length,
        cuts=tokens.overlong != "error",
    )


def split_chunks(
    entries: Iterable[Row | Problem], broken: BrokenRows, max_characters: float = math.inf
) -> Iterator[list[Row | Problem]]:
    """Yield entries in chunks of ``ROWS_PER_CHUNK``; the last one may be shorter.

    Args:
        entries: Rows and problems.
        broken: Receives the problems if the source cannot be read further; entries before that are yielded.
        max_characters: Number of characters at which a chunk is closed before it has ``ROWS_PER_CHUNK`` entries.
    """
    chunk: list[Row | Problem] = []
    num_characters = 0
    with collect_problems(broken.fatal):  # The caller raises them, together with the problems of single rows.
        for entry in entries:
            chunk.append(entry)
            num_characters += _count_characters(entry) if isinstance(entry, Row) else 0
            if len(chunk) == ROWS_PER_CHUNK or num_characters >= max_characters:
                yield chunk
                chunk, num_characters = [], 0
    if chunk:
        yield chunk


def _count_characters(row: Row) -> int:
    """Return the number of characters of a row's texts and text columns, without those that the chat template adds."""
    contents = (message.get("content") for message in row.messages or ())
    texts = (row.text, row.prompt, row.completion, *contents, *row.others.values())
    return sum(len(text) for text in texts if isinstance(text, str))


def encode_chunk(encoder: RowEncoder, rows: Sequence[Row], row_ids: Sequence[int]) -> Examples:
    """Tokenise rows.

    Args:
        encoder: Encoder from ``build_encoder``.
        rows: The rows.
        row_ids: Positions of the rows in their mixture.

    Raises:
        DataError: Rows cannot be tokenised or masked, or have no token.
    """
    encoded = encoder.encode(rows)
    empty = [row for row, tokens in zip(rows, encoded, strict=True) if not len(tokens.input_ids)]
    if empty:
        raise DataError(*(Problem(row.where, "the row has no token", "remove it") for row in empty))
    return build_examples(encoded, row_ids)


def encode_mixture(
    encode: Encode, mixture: Mixture, broken: BrokenRows, file: TokenFile, num_workers: int | None
) -> EncodedMixture:
    """Tokenise all valid rows of a mixture, and show the progress.

    Args:
        encode: Function that encodes the rows of a chunk, as for ``map_in_order``.
        mixture: The rows.
        broken: Receives the counts and problems of broken rows, which the caller raises.
        file: File for the tokens, which several mixtures can share; memory has only a few numbers per row.
        num_workers: Number of worker processes, as for ``map_in_order``.

    Raises:
        DataError: The disk is full.
    """

    def encode_all(rows: Sequence[Row], row_ids: Sequence[int]) -> tuple[Examples, Mapping[str, npt.NDArray[Any]]]:
        examples, columns = encode(rows, row_ids)
        return examples, {"digests": compute_digests(rows), **columns}

    parts, columns, num_rows, num_tokens = [], defaultdict(list), 0, 0
    # The empty first chunk determines the dtypes, in case no row is valid.
    chunks = chain([encode_all([], [])], map_chunks(mixture.entries(), encode_all, broken, num_workers))
    with show_progress(mixture.name) as on_rows:
        for examples, chunk in chunks:
            parts.append(file.keep(examples))
            for name, column in chunk.items():
                columns[name].append(column)
            num_rows, num_tokens = num_rows + len(examples), num_tokens + int(examples.lengths.sum())
            on_rows(num_rows, num_tokens)
    whole = {name: np.concatenate(chunks) for name, chunks in columns.items()}
    return EncodedMixture(mixture, concatenate_examples(parts), whole.pop("digests"), whole)


@contextmanager
def show_progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show the number of tokenised rows and tokens, if stderr is a terminal; yields the function that updates them."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("tokenising {task.description}:"), _Figures()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=None, rows=0)
        yield lambda rows, tokens: progress.update(task, completed=tokens, rows=rows)


class _Figures(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Return rows, tokens, and tokens per second."""
        return Text(f"{task.fields['rows']:,} rows, {task.completed:,.0f} tokens, {task.speed or 0:,.0f} tokens/s")


def map_chunks(
    entries: Iterable[Row | Problem],
    encode: Callable[[Sequence[Row], Sequence[int]], Chunk],
    broken: BrokenRows,
    num_workers: int | None,
) -> Iterator[Chunk]:
    """Encode the valid rows in chunks, and yield the results in order.

    Args:
        entries: Rows and problems.
        encode: Function of the rows of a chunk and their positions, as for ``map_in_order``.
        broken: Receives the counts and problems of all chunks up to the yielded one.
        num_workers: Number of worker processes, as for ``map_in_order``.
    """

    def number_chunks() -> Iterator[tuple[int, list[Row | Problem]]]:
        num_read = 0
        for chunk in split_chunks(broken.skip_after_error(entries), broken, CHARACTERS_PER_CHUNK):
            yield num_read, chunk
            num_read += len(chunk)

    def encode_entries(numbered: tuple[int, list[Row | Problem]]) -> tuple[int, Chunk | None, list[Problem]]:
        first, chunk = numbered
        return len(chunk), *encode_valid(encode, chunk, first, drop=broken.are_dropped)

    with ExitStack() as stack:
        # Objects that exist, such as modules, are not traversed: 9 % of the time for rows of 25 tokens.
        gc.freeze()
        stack.callback(gc.unfreeze)
        # Closed before the collection of objects is enabled again.
        results = stack.enter_context(closing(map_in_order(encode_entries, number_chunks(), num_workers)))
        for num_rows, encoded, problems in results:
            broken.add(num_rows, problems)
            if encoded is not None:
                yield encoded
            if broken.exceeds_limit:
                return


TOKENIZER_FILES: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*",
)
"""Patterns of the files of a tokenizer in a model folder."""

_TOKENIZER_CLASS_FILES: Final = ("config.json", "*.py")
"""Patterns of files that can determine the class of a tokenizer."""

_TOKENIZATION: Final = ("tokenization.py",)
"""Module of ``config`` that determines the messages which templates get, and token ids."""
_PACKAGES: Final = ("jinja2", "tokenizers", "transformers")
"""Packages whose version can change token ids."""
_NOT_IN_KEY: Final = {
    # Locations; the key has the content instead, so that moved data keep their prepared set.
    *("dataset_name", "dataset_revision", "chat_template_path", "eval_datasets", "prepared_dir"),
    "dataset_num_proc",
}


def collect_inputs(config: RecipeConfig, sources: Mapping[str, str]) -> dict[str, Any]:
    """Return everything that determines the content of a prepared set, as JSON values; the key is their hash.

    Args:
        config: Configuration of the run.
        sources: Fingerprint of the rows by split.

    Raises:
        ConfigError: The tokenizer or the chat template cannot be found.
    """
    options = dataclasses.asdict(config.data) | dataclasses.asdict(config.tokens) | dataclasses.asdict(config.chat)
    template, room = read_chat_template(config), Path(__file__).parents[1]
    return {
        "sources": dict(sources),
        "options": {name: value for name, value in options.items() if name not in _NOT_IN_KEY},
        "trust_remote_code": config.model.trust_remote_code,
        "chat_template": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
        "tokenizer": hash_files(find_tokenizer_folder(config), (*TOKENIZER_FILES, *_TOKENIZER_CLASS_FILES)),
        "code": hash_files(room, ("**/*.py",)) | hash_files(room.with_name("config"), _TOKENIZATION),
        "versions": {package: version(package) for package in _PACKAGES},
    }


def verify_unchanged(data: Mixture | Source, fingerprint: str) -> None:
    """Raise if data changed while they were read, so that the key of their prepared set has another content.

    Args:
        data: The data, read to their end.
        fingerprint: Fingerprint of the data, before they were read.

    Raises:
        DataError: The fingerprint is another one now, or a file cannot be read.
    """
    if data.fingerprint() != fingerprint:
        found = "the data changed while they were prepared"
        raise DataError(Problem(data.name, found, "run the same command again once nothing writes to them"))


def find_tokenizer_folder(config: RecipeConfig) -> Path:
    """Return the folder with the tokenizer files of a run; those of a Hub model are downloaded to the Hub cache.

    Raises:
        ConfigError: The folder or Hub model does not exist, or has no tokenizer.
    """
    own = config.model.tokenizer_name_or_path
    name = own or str(config.model.model_name_or_path)
    option = "tokenizer_name_or_path" if own else "model_name_or_path"
    folder = Path(name) if Path(name).is_dir() else _fetch(config, option, name)
    if not _list_files(folder, TOKENIZER_FILES):
        found = f"{name} has no tokenizer files"
        raise ConfigError(Problem(config.locate(option), found, "set tokenizer_name_or_path"))
    return folder


def read_chat_template(config: RecipeConfig) -> str | None:
    """Return the template in ``chat_template_path``; ``None`` if the tokenizer's own template is used.

    Raises:
        ConfigError: The file cannot be read as UTF-8 text.
    """
    if (path := config.tokens.chat_template_path) is None:
        return None
    where = config.locate("chat_template_path")
    return read_text(find_shipped(Path(path)), where, "name a Jinja file")


def _fetch(config: RecipeConfig, option: str, name: str) -> Path:
    from huggingface_hub import snapshot_download  # Slow to import, and not needed for a local tokenizer.

    is_models = option == "model_name_or_path"
    revision = config.model.tokenizer_revision or (config.model.model_revision if is_models else None)
    try:
        patterns = [*TOKENIZER_FILES, *_TOKENIZER_CLASS_FILES]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:
        refusal = explain_refusal_of_hub(error)
        # Otherwise an invalid repository id, no such repository, or offline and not cached.
        if refusal is None and not isinstance(error, OSError | ValueError):
            raise
        found, remedy = refusal or (f"no folder or Hub model {name!r}: {str(error).splitlines()[0]}", "check the name")
        raise ConfigError(Problem(config.locate(option), found, remedy)) from error


def _list_files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def hash_files(folder: Path, patterns: tuple[str, ...]) -> dict[str, str]:
    """Return the SHA-256 of the files of a folder that match, by relative path."""
    return {path.relative_to(folder).as_posix(): hash_file(path) for path in _list_files(folder, patterns)}
