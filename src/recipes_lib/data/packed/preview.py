"""Token-level preview of rows with their loss mask, for the terminal and for ``preview.html.jinja``."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING

from rich.text import Text

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.packed.encoding import build_encoder, encode_chunk, read_seed
from recipes_lib.data.sources.mixtures import load_train_data
from recipes_lib.data.sources.rows import BrokenRows, Row
from recipes_lib.data.tokens.token_sets import load_corpora, select_options
from recipes_lib.errors import DataError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT_TOKENS = 4
_LONGEST_CHARACTER = 4
"""UTF-8 bytes, so that a character has at most as many tokens."""
_WHITESPACE = {" ": "·", "\n": "↵\n", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
_TARGET_STYLE, _CONTEXT_STYLE = "black on green", "dim"


@dataclass(frozen=True, slots=True)
class Piece:
    """A token for display.

    Attributes:
        text: Text of the token, with visible white space and escaped control characters.
        token_id: Id of the token.
        is_target: Whether the token is trained on.
        is_special: Whether it is a special token of the tokenizer.
    """

    text: str
    token_id: int
    is_target: bool
    is_special: bool


@dataclass(frozen=True, slots=True)
class PreviewRow:
    """A row for display.

    Attributes:
        where: Location of the row.
        pieces: Tokens of the row.
    """

    where: str
    pieces: Sequence[Piece]

    @property
    def title(self) -> str:
        """Location, length and number of targets of the row, in one line."""
        num_targets = sum(piece.is_target for piece in self.pieces)
        return f"{self.where}: {len(self.pieces)} tokens, {num_targets} trained on"


Shown = list[PreviewRow]
"""What is shown of a row of the dataset: one row, or one for each answer of a pair."""
Show = Callable[[Row], Shown]


def compute_pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int], loss_mask: list[bool]) -> list[Piece]:
    """Return the tokens of a row; a character of several tokens is the text of the last of them."""
    # Not `all_special_ids`, which lacks those that the tokenizer's configuration does not list.
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return [
        Piece("".join(map(_show, text)), token_id, is_target, token_id in special)
        for text, token_id, is_target in zip(_decode_each(tokenizer, ids), ids, loss_mask, strict=True)
    ]


def render_text(row: PreviewRow, *, has_colors: bool = True) -> Text:
    """Return a row for the terminal: targets on green, without colours in brackets; special tokens bold, others dim."""
    text = Text(row.title + ("\n" if has_colors else ", in ⟦ ⟧\n"), style="bold")
    for is_target, pieces in groupby(row.pieces, attrgetter("is_target")):
        style, marks = (_TARGET_STYLE, "⟦⟧") if is_target else (_CONTEXT_STYLE, "")
        text.append("" if has_colors else marks[:1])
        for piece in pieces:
            text.append(piece.text, style=f"not bold {style}" if not piece.is_special else f"bold {style}")
        text.append("" if has_colors else marks[1:])
    return text


def _decode_each(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> Iterator[str]:
    """Yield the text that each token adds to the tokens before it, without which many would lose a leading space."""
    start = 0
    for at, token_id in enumerate(ids):
        before = ids[max(0, start - _CONTEXT_TOKENS) : start]
        prefix = str(tokenizer.decode(before, clean_up_tokenization_spaces=False))
        text = str(tokenizer.decode([*before, *ids[start : at + 1]], clean_up_tokenization_spaces=False))
        if text.endswith("\ufffd") and at + 1 < len(ids) and at + 1 < start + _LONGEST_CHARACTER:
            yield ""
            continue
        added, start = text.removeprefix(prefix), at + 1
        yield str(tokenizer.convert_ids_to_tokens(token_id)) if prefix and added == text else added


def _show(character: str) -> str:
    """Escape control, format and separator characters, so that data cannot hide text or control the terminal."""
    escaped = f"\\u{{{ord(character):x}}}" if unicodedata.category(character)[0] in "CZ" else character
    return _WHITESPACE.get(character, escaped)


def build_preview(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, num_rows: int) -> list[PreviewRow]:
    """Return the first training rows, tokenised and masked by the functions of prepared sets, before truncation.

    Raises:
        ConfigError: Options are incompatible.
        DataError: The rows cannot be read, tokenised or masked.
    """
    if config.recipe in ("ppo", "rloo", "grpo"):
        from recipes_lib.data.prompts import load_prompt_data  # Imports transformers.

        prompts = load_prompt_data(config, tokenizer).train[:num_rows]
        return [_preview_answer(tokenizer, prompt.where, prompt.input_ids, []) for prompt in prompts]
    open_rows = _open_pairs if config.recipe in ("reward", "dpo") else _open_texts
    # As of a stream if a broken row is an error: the rows after it are not encoded.
    broken = BrokenRows(config.tokens, is_stream=config.tokens.broken_rows == "error")
    entries = _show_rows(*open_rows(config, tokenizer))
    shown = broken.read(entries, config.data.dataset_name or "dataset_mixture")
    return list(chain.from_iterable(islice(shown, num_rows)))


def _show_rows(rows: Iterable[Row], show: Show) -> Iterator[Shown | Problem]:
    """Yield what is shown of each row, or a ``Problem`` in place of one that cannot be encoded."""
    for row in rows:
        try:
            yield show(row)
        except DataError as error:
            yield error.problems[0]


def _open_texts(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Iterable[Row], Show]:
    """Return texts or chats, and the function that shows one row of each."""
    if config.recipe == "pretrain":
        rows: Iterable[Row] = chain.from_iterable(corpus.rows() for corpus in load_corpora(config))
        encoder = build_encoder(select_options(config), tokenizer)
    else:
        rows = load_train_data(config.data, seed=read_seed(config)).rows(config.tokens)
        encoder = build_encoder(config, tokenizer)

    def show(row: Row) -> Shown:
        ids, loss_mask = encode_chunk(encoder, [row], [0]).read()
        return [PreviewRow(row.where, compute_pieces(tokenizer, ids.tolist(), loss_mask.tolist()))]

    return rows, show


def _open_pairs(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Iterable[Row], Show]:
    """Return pairs, and the function that shows two rows of each: the prompt with either answer."""
    from recipes_lib.data.pairs.preference_sets import encode_pairs, read_as_pairs

    data = read_as_pairs(config).data
    rows = load_train_data(data, seed=read_seed(config)).rows(config.tokens)
    encoder = build_encoder(config, tokenizer)

    def show(row: Row) -> Shown:
        prompt, *answers = (ids.tolist() for ids in encode_pairs(encoder, [row])[0][:3])
        named = zip(("chosen", "rejected"), answers, strict=True)
        return [_preview_answer(tokenizer, f"{row.where}, {name}", prompt, answer) for name, answer in named]

    return rows, show


def _preview_answer(tokenizer: PreTrainedTokenizerBase, where: str, prompt: list[int], answer: list[int]) -> PreviewRow:
    """Return a row of a prompt and an answer, which may be empty and whose tokens are the targets."""
    loss_mask = [False] * len(prompt) + [True] * len(answer)
    return PreviewRow(where, compute_pieces(tokenizer, prompt + answer, loss_mask))
