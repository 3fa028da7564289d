"""``recipes tokenizer``: train a byte-level BPE tokenizer on data in any layout, and measure its compression."""

from __future__ import annotations

import argparse
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from rich.console import Console

from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.schema import DatasetFormat, TokensConfig
from recipes_lib.errors import ConfigError, DataError, Problem, UserError, raise_problems
from recipes_lib.files import atomic_folder, count_bytes, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from recipes_lib.data.chat.templates import ChatTemplate
    from recipes_lib.data.sources.mixtures import Mixture
    from recipes_lib.data.sources.rows import Row
    from recipes_lib.models.vocabulary import TokenUsage

MAX_TAIL_BYTES: Final = 1 << 20
"""Largest size of the held-out text: 1 MiB gives three digits of bytes per token."""
MAX_TAIL_SHARE: Final = 0.05
"""Largest share of the text that is held out."""

# Bounds the length of a text, so that the held-out tail can be a part of a single large file.
_SECTION_CHARACTERS: Final = 1 << 12
_LINE_START: Final = re.compile(r"\n(?=\S)")
_TRIAL: Final = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: A flag is wrong, the chat template is unusable, or the output folder is not empty.
        DataError: The data cannot be read, or there is too little text for the vocabulary.
    """
    options = _parse(argv)
    settings = _read_settings(options)
    with atomic_folder(options.output_dir) as folder:
        mixture = _open_data(options)
        from recipes_lib.data.sources.rows import BrokenRows
        from recipes_lib.models.vocabulary import measure_usage, train_tokenizer

        template = _verify_template(settings, options.chat_template)
        tokens = TokensConfig(broken_rows=options.broken_rows, max_broken_fraction=options.max_broken_fraction)
        tail, broken = HeldOutTail(), BrokenRows(tokens)
        texts = tail.split(read_texts(broken.read(mixture.entries(), mixture.name), template))
        tokenizer = train_tokenizer(texts, vocab_size=options.vocab_size, show_progress=sys.stderr.isatty(), **settings)
        if len(tokenizer) < options.vocab_size:
            found = f"the text yields {len(tokenizer):,} tokens, and --vocab_size is {options.vocab_size:,}"
            remedy = f"give more text, or write --vocab_size {len(tokenizer)}: no further pair of tokens occurs twice"
            raise DataError(Problem(", ".join(options.data), found, remedy))
        tokenizer.save_pretrained(folder)
        # Before the folder exists: after a kill, the same command would refuse it, and the figures would be lost.
        with Console(stderr=True).status("counting tokens"):
            # Read again instead of kept in memory.
            usage = measure_usage(tokenizer, HeldOutTail().split(read_texts(mixture.rows(tokens), template)))
            held_out = measure_usage(tokenizer, tail.texts)
    sys.stderr.writelines(f"warning: {line}\n" for line in broken.list_warnings("rows"))
    sys.stdout.writelines(f"{line}\n" for line in describe(tokenizer, usage, held_out))
    sys.stdout.write(f"written to {options.output_dir}\n")


class HeldOutTail:
    """Iterator filter that holds out the last texts: 5 % of the bytes, at most 1 MiB.

    Attributes:
        texts: Held-out texts, complete when ``split`` is exhausted.
    """

    def __init__(self) -> None:
        self.texts: deque[str] = deque()

    def split(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield all texts except the held-out ones, in order, in constant memory."""
        total = num_yielded = 0
        for text in texts:
            total += count_bytes(text)
            self.texts.append(text)
            while total - num_yielded > MAX_TAIL_BYTES:
                num_yielded += count_bytes(self.texts[0])
                yield self.texts.popleft()
        # The total, of which the tail is a share, is only known at the end.
        while total - num_yielded > total * MAX_TAIL_SHARE:
            num_yielded += count_bytes(self.texts[0])
            yield self.texts.popleft()


def read_texts(rows: Iterable[Row], template: ChatTemplate | None) -> Iterator[str]:
    """Yield the text of every row as a model reads it, with long texts split at line starts.

    The split does not change the training: the pre-tokenizer forms no word across the start of an unindented line.

    Args:
        rows: The rows.
        template: Template that renders chats; ``None``: the contents of the messages, one per line.

    Raises:
        DataError: A row cannot be rendered.
    """
    from recipes_lib.data.chat.templates import TemplateError

    for row in rows:
        if row.messages is None:
            text = f"{row.prompt}{row.completion}" if row.text is None else row.text
        elif template is None:
            text = "\n".join(message.get("content") or "" for message in row.messages)
        else:
            try:
                text = template.render(row.messages, tools=row.tools, variables=row.template_kwargs).text
            except TemplateError as error:
                found = f"the chat template refused the chat: {error}"
                raise DataError(Problem(row.where, found, "fix the row or the template")) from error
        start = 0
        while end := _LINE_START.search(text, start + _SECTION_CHARACTERS):
            yield text[start : end.end()]
            start = end.end()
        yield text[start:]


def describe(tokenizer: PreTrainedTokenizerFast, usage: TokenUsage, held_out: TokenUsage) -> Iterator[str]:
    """Yield a summary of a trained tokenizer, line by line.

    Args:
        tokenizer: The tokenizer.
        usage: Token counts on the training text.
        held_out: Token counts on the held-out text.
    """
    yield f"vocabulary      {len(tokenizer):,} tokens, {len(set(tokenizer.all_special_ids))} of them special"
    yield f"training text   {_format_usage(usage)}"
    yield f"held-out tail   {_format_usage(held_out) if held_out.num_bytes else 'none: the text is too short'}"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("tokenizer")
    if any(word.partition("=")[0] == "--dataset_name" for word in argv):  # As recipes name it.
        parser.add_argument("--dataset_name", dest="data", nargs="+")
    else:
        parser.add_argument("data", nargs="+", metavar="DATA", help="files, folders or Hub ids, of any layout")
    parser.add_argument("--dataset_format", default="auto", choices=get_args(DatasetFormat), help="layout of the rows")
    return parser.parse_args(argv)


def _read_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of ``train_tokenizer``.

    Raises:
        ConfigError: The chat template cannot be read, a special token is too short, or the vocabulary is too small.
    """
    from recipes_lib.models.vocabulary import CHATML_TEMPLATE, CHATML_TOKENS, EOS_TOKEN, NUM_BYTES, PAD_TOKEN

    problems: list[Problem] = []
    eos_token = EOS_TOKEN if options.eos_token is None else options.eos_token
    is_chatml = options.chat_template == "chatml"
    special_tokens = [*(CHATML_TOKENS if is_chatml else ()), *options.special_token]
    template = CHATML_TEMPLATE if is_chatml else None
    if options.chat_template and not is_chatml:
        try:
            remedy = "write `chatml`, or the path of a Jinja file"
            template = read_text(Path(options.chat_template), "--chat_template", remedy)
        except ConfigError as error:
            problems += error.problems
    for token in (eos_token, *special_tokens):
        if len(token) < 2:
            found = f"{token!r} cannot be a special token: it equals the spelling of a byte"
            problems.append(Problem("--special_token, --eos_token", found, "write at least two characters"))
    smallest = NUM_BYTES + len({eos_token, PAD_TOKEN, *special_tokens})
    if options.vocab_size < smallest:
        found = f"{options.vocab_size} is too small for {NUM_BYTES} bytes and {smallest - NUM_BYTES} special tokens"
        problems.append(Problem("--vocab_size", found, f"write {smallest} or more"))
    raise_problems(problems, "recipes tokenizer", ConfigError)
    return {"eos_token": eos_token, "special_tokens": special_tokens, "chat_template": template}


def _open_data(options: argparse.Namespace) -> Mixture:
    """Return the rows of all sources, one after the other.

    Raises:
        DataError: Some of the sources cannot be opened.
    """
    from recipes_lib.data.sources.mixtures import build_mixture

    shared = {
        "config": options.dataset_config,
        "revision": options.dataset_revision,
        "split": options.dataset_train_split,
        "format": options.dataset_format,
        "text_documents": "file",  # Line ends are part of the text.
    }
    return build_mixture([{"name": name, **shared} for name in options.data])


def _verify_template(settings: dict[str, Any], name: str | None) -> ChatTemplate | None:
    """Return the chat template, after encoding a short chat with it and a byte-level tokenizer.

    Raises:
        ConfigError: The template does not compile, rejects the chat, or does not end the answer with a stop token.
    """
    if name is None:
        return None
    from recipes_lib.data.chat.encoder import RowEncoder
    from recipes_lib.data.chat.templates import ChatTemplate
    from recipes_lib.data.sources.rows import Row
    from recipes_lib.models.vocabulary import train_tokenizer

    tokenizer = train_tokenizer([], vocab_size=0, **settings)
    try:
        RowEncoder(tokenizer).encode([Row(where=name, messages=_TRIAL)])
    except UserError as error:
        problems = (Problem(f"--chat_template {name}", one.found, one.remedy) for one in error.problems)
        raise ConfigError(*problems) from error
    return ChatTemplate(settings["chat_template"], tokenizer.special_tokens_map)


def _format_usage(usage: TokenUsage) -> str:
    return f"{usage.num_bytes:,} bytes, {int(usage.counts.sum()):,} tokens, {usage.bytes_per_token:.3f} bytes a token"
