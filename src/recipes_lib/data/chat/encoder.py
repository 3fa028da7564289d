"""Canonical rows to token ids and loss mask: the only module that derives a loss mask, and its verification.

Each row is tokenised once, as one text. The loss mask is derived from character offsets and then verified: the target
tokens are decoded and compared with the characters of their spans.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate, pairwise, repeat
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerBase

from recipes_lib.config.schema import LossOn
from recipes_lib.config.tokenization import TEMPLATE_DATE, count_ids, find_prefix
from recipes_lib.data.chat.spans import SpanFinder, refuse_inner_ends
from recipes_lib.data.chat.templates import ChatTemplate, TemplateError
from recipes_lib.data.sources.rows import EncodedRow, Remark, Row, add_system_prompt
from recipes_lib.data.windows import WINDOW, encode_in_windows
from recipes_lib.errors import ConfigError, DataError, Problem, collect_problems

_BREAKS: Final = re.compile(r"\s[^\S ]")
_EXCERPT: Final = 20
_REMEDY: Final = "change the text, or use a tokenizer that can write it"


class MergedTokenError(ValueError):
    """A token has characters on both sides of a boundary; names both parts.

    Attributes:
        is_space: True if both parts are white space.
    """

    def __init__(self, before: str, after: str) -> None:
        super().__init__(f"one token holds {before!r} and {after!r}")
        self.is_space = before.isspace() and after.isspace()


class Claim(NamedTuple):
    """Tokens ``first:last`` of a row that must decode to ``text``."""

    where: str
    ids: npt.NDArray[np.uint32]
    first: int
    last: int
    text: str


class Proof:
    """Verifies claims by decoding their tokens.

    A byte-level decoder only concatenates tokens. If all of them are complete characters, their cached texts are joined
    here, at a tenth of the cost of ``decode_batch``.

    Args:
        tokenizer: A fast tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._surface = cache(self._decode_one) if isinstance(self._backend.decoder, ByteLevel) else None
        special = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._absorbing = [
            (re.compile((r"\s*" if t.lstrip else "") + re.escape(str(t)) + (r"\s*" if t.rstrip else "")), str(t))
            for t in special
            if t.lstrip or t.rstrip
        ]

    def problems(self, claims: Sequence[Claim]) -> list[Problem]:
        """Return a problem for each claim that does not hold."""
        claims = [claim for claim in claims if not self._holds_by_cache(claim)]
        decoded = self._backend.decode_batch(
            [c.ids[c.first : c.last].tolist() for c in claims], skip_special_tokens=False
        )
        return [
            Problem(claim.where, f"trained tokens decode to a different text: {_describe(text, claim.text)}", _REMEDY)
            for claim, text in zip(claims, decoded, strict=True)
            if text != claim.text and not self._holds_in_context(claim)
        ]

    def _holds_by_cache(self, claim: Claim) -> bool:
        ids = claim.ids[claim.first : claim.last].tolist()
        return self._surface is not None and "".join(map(self._surface, ids)) == claim.text

    def _decode_one(self, token: int) -> str:
        """Return the text of a token; a lone surrogate, which equals no text, for one of partial characters."""
        text = str(self._backend.decode([token], skip_special_tokens=False))
        return "\ud800" if "\ufffd" in text else text

    def _holds_in_context(self, claim: Claim) -> bool:
        """Return whether the tokens decode to their text after the preceding tokens, up to normalisation.

        Some decoders remove a leading space at the start of a text, so the tokens are decoded in context. Normalisers
        change characters, and special tokens absorb adjacent white space, in every use of the tokenizer: texts that
        differ only in this are equal to the model.
        """
        before, text = (
            self._backend.decode(claim.ids[:end].tolist(), skip_special_tokens=False)
            for end in (claim.first, claim.last)
        )
        return self._fold(text) == self._fold(before + claim.text)

    def _fold(self, text: str) -> str:
        for pattern, token in self._absorbing:
            text = pattern.sub(token.replace("\\", r"\\"), text)
        normalizer = self._backend.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))


def _describe(decoded: str, text: str) -> str:
    """Return excerpts of both texts around their first difference."""
    at = next((i for i, (a, b) in enumerate(zip(decoded, text, strict=False)) if a != b), min(len(decoded), len(text)))
    start = max(0, at - _EXCERPT)
    return f"decoded {decoded[start : at + _EXCERPT]!r}, expected {text[start : at + _EXCERPT]!r}"


class _Draft(NamedTuple):
    """A row before tokenisation: its text, its target spans in characters (``None`` for all), and its remarks."""

    row: Row
    text: str
    spans: list[tuple[int, int]] | None
    remarks: Sequence[Remark] = ()

    @property
    def places(self) -> list[int]:
        """Characters at which spans start and end: start, end, start, end, ..."""
        return [at for span in self.spans or () for at in span]


class RowEncoder:
    """Converts canonical rows to token ids and loss masks; thread-safe.

    Args:
        tokenizer: A fast tokenizer that has the ``eos_token``, as ``load_tokenizer`` verifies.
        loss_on: Part of each row that is trained on. Default: by layout, ``assistant`` for chats, ``completion`` for
            rows with a separate prompt, ``all`` for texts.
        system_prompt: System message of chats without one.
        chat_template: Jinja template that replaces the tokenizer's.
        eos_token: Token appended to texts, completions, and chat turns that the template leaves open. Default: the
            tokenizer's, for texts and completions; an open turn is an error.
        max_length: Number of tokens above which the caller does not use a row. A text that certainly has more is cut to
            a beginning that still has, because to tokenise 100 MB takes minutes. Only for tokenizers that preserve the
            text; ``None`` for no limit.
        cuts: False: such a text is an error.

    Attributes:
        tokenizer: The tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        loss_on: LossOn | None = None,
        system_prompt: str | None = None,
        chat_template: str | None = None,
        eos_token: str | None = None,
        max_length: int | None = None,
        cuts: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._loss_on = loss_on
        self._system_prompt = system_prompt
        self._chat_template = chat_template
        self._eos_token = eos_token
        added = tokenizer.added_tokens_decoder
        self._special = {id_: str(token) for id_, token in added.items() if token.special}
        self._bos_id: int | None = tokenizer.bos_token_id
        self._reset_backend()
        bare, whole = (self._backend.encode("a", add_special_tokens=adds).ids for adds in (False, True))
        self._prefix = np.array(find_prefix(bare, whole), dtype=np.uint32)
        # GPT-2's pattern splits two line breaks before a text, which are one token at the end of a prompt.
        breaks, text = (self._backend.encode(text, add_special_tokens=False).ids for text in ("\n\n", "\n\na"))
        self._splits_breaks = isinstance(self._backend.decoder, ByteLevel) and text[: len(breaks)] != breaks
        self._eos: str | None = eos_token or tokenizer.eos_token
        self._eos_id = self._backend.token_to_id(self._eos or "")
        self._byte_ends = ByteEnds(tokenizer) if ByteEnds.suits(tokenizer) else None
        self._max_characters: float = math.inf
        if self._byte_ends is not None and max_length is not None:
            # Twice as many as can be needed, so that the end of the text does not change the tokens that are used.
            self._max_characters = 2 * max_length * self._byte_ends.longest
        self._cuts = cuts
        self._proof = Proof(tokenizer)
        # By whether the row has tools, for which a tokenizer can have a separate template.
        self._finders: dict[bool, SpanFinder] = {}

    def encode(self, rows: Sequence[Row]) -> list[EncodedRow]:
        """Return token ids and loss mask of each row, in order.

        The mask of a row without targets is False everywhere.

        Raises:
            DataError: Rows cannot be rendered, tokenised or masked exactly; has the problems of all of them.
        """
        problems: list[Problem] = []
        drafts: list[_Draft] = []
        for row in rows:
            with collect_problems(problems):
                drafts.append(self._draft(row))
        claims: list[Claim] = []
        encoded: list[EncodedRow] = []
        for draft, tokens in zip(drafts, self._tokenize(drafts), strict=True):
            with collect_problems(problems):
                encoded.append(self._mask(draft, *self._locate(draft, *tokens), claims))
        problems += self._proof.problems(claims)
        if problems:
            raise DataError(*problems)
        return encoded

    def encode_prompt(self, row: Row) -> npt.NDArray[np.uint32]:
        """Return the token ids of the prompt of a row, ``uint32 (T,)``: a prefix of the ids of the encoded row.

        Args:
            row: A chat, of which ``num_prompt_messages``, by default all, are rendered with ``add_generation_prompt``;
                or a row with a plain prompt.

        Raises:
            DataError: The chat template raises, or omits a message; or as ``add_system_prompt``.
        """
        row = add_system_prompt(row, self._system_prompt)
        text = row.prompt if row.messages is None else self._finder(row).render_prompt(row)
        ids = np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
        # Chat templates write BOS themselves; the tokenizer would add a second one.
        return ids if row.messages is not None else self._with_prefix(ids)

    @property
    def cautions(self) -> list[str]:
        """Warnings about the chat template, one clause each."""
        template = self._template(with_tools=False)
        cautions = []
        if template.reads_clock:
            cautions.append(
                f"the chat template writes today's date; training writes {TEMPLATE_DATE:%Y-%m-%d} in every row"
            )
        if not template.has_generation_prompt:
            cautions.append("the chat template ignores add_generation_prompt; a server must open the answer by itself")
        return cautions

    def _template(self, with_tools: bool) -> ChatTemplate:
        try:
            source = self.tokenizer.get_chat_template(self._chat_template, tools=[{}] if with_tools else None)
        except ValueError as error:
            remedy = "set chat_template_path; recipes/configs/chat_templates/zephyr.jinja needs no new tokens"
            raise ConfigError(Problem("chat_template_path", "the tokenizer has no chat template", remedy)) from error
        variables = dict(self.tokenizer.special_tokens_map)
        if self._eos_token is not None:
            variables["eos_token"] = self._eos_token
        try:
            return ChatTemplate(source, variables)
        except TemplateError as error:
            found = f"the chat template does not compile: {error}"
            raise ConfigError(Problem("chat_template_path", found, "correct it, or name another one")) from error

    def _finder(self, row: Row) -> SpanFinder:
        with_tools = bool(row.tools)
        if with_tools not in self._finders:
            template = self._template(with_tools)
            ends = {token for token in (self._eos, self.tokenizer.eos_token) if token is not None}
            self._finders[with_tools] = SpanFinder(template, self._special.values(), self._eos_token, ends)
        return self._finders[with_tools]

    def _draft(self, row: Row) -> _Draft:
        row = add_system_prompt(row, self._system_prompt)
        loss_on = _resolve(self._loss_on, row)
        if row.messages is not None:
            text, spans, remarks = self._finder(row).find(row, _trained_messages(row, loss_on))
            places = None if loss_on == "all" else [(span.start, span.end) for span in spans]
            draft = _Draft(row, text, places, remarks)
        elif row.prompt is not None:
            completion = row.completion or ""
            assert self._eos is not None
            turn = completion if completion.endswith(self._eos) else completion + self._eos
            refuse_inner_ends(row.where, "the answer", [completion], turn, [self._eos])
            text = row.prompt + completion
            remarks = [Remark.PLAIN_TEXT] if self._chat_template or self.tokenizer.chat_template else []
            draft = _Draft(row, text, None if loss_on == "all" else [(len(row.prompt), len(text))], remarks)
        else:
            draft = _Draft(row, row.text or "", None)
        if len(draft.text) > self._max_characters:
            draft = self._shorten(draft, int(self._max_characters))
        try:
            draft.text.encode()
        except UnicodeEncodeError as error:
            found = f"U+{ord(draft.text[error.start]):04X} is half of a surrogate pair, not a character"
            raise DataError(Problem(row.where, found, "repair the encoding of the text")) from error
        return draft

    def _shorten(self, draft: _Draft, end: int) -> _Draft:
        if not self._cuts:
            found = f"a text of {len(draft.text):,} characters, which is more than max_length tokens"
            raise DataError(Problem(draft.row.where, found, "remove it, or set overlong to truncate, drop or split"))
        spans = None if draft.spans is None else [(start, min(stop, end)) for start, stop in draft.spans if start < end]
        return draft._replace(text=draft.text[:end], spans=spans, remarks=(*draft.remarks, Remark.CUT))

    def _reset_backend(self) -> None:
        """Disable truncation and padding, which an earlier call of the tokenizer leaves set, even in its saved file."""
        if self._backend.truncation or self._backend.padding:
            self._backend.no_truncation()
            self._backend.no_padding()

    def _tokenize(
        self, drafts: Sequence[_Draft]
    ) -> Iterable[tuple[npt.NDArray[np.uint32], list[int] | None, Encoding | None]]:
        """Return the token ids of each draft, and where its places are: as ``ByteEnds.cut``, or in its encoding.

        Those of long drafts, which ``_tokenize_in_parts`` tokenises, are empty.
        """
        self._reset_backend()
        texts = [draft.text if len(draft.text) <= WINDOW else "" for draft in drafts]
        # The fast form computes no character offsets.
        encode = self._backend.encode_batch_fast if self._byte_ends else self._backend.encode_batch
        encodings = encode(texts, add_special_tokens=False)
        ids = [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
        if self._byte_ends is None:
            return zip(ids, repeat(None), encodings, strict=False)
        return zip(ids, self._byte_ends.cut(ids, texts, [draft.places for draft in drafts]), repeat(None), strict=False)

    def _locate(
        self, draft: _Draft, ids: npt.NDArray[np.uint32], cuts: list[int] | None, encoding: Encoding | None
    ) -> tuple[npt.NDArray[np.uint32], list[int]]:
        """Return the token ids of a draft, and the number of tokens before each of its places."""
        may_split = self._splits_breaks and draft.row.messages is None
        apart = [at for at in draft.places[:1] if may_split and _BREAKS.fullmatch(draft.text, at - 2, at)]
        if not apart and len(draft.text) <= WINDOW:
            if cuts is not None or not draft.places:
                return ids, cuts or []
            # A token crosses a boundary, or the tokens are not the literal text: character offsets decide.
            if encoding is not None:
                with suppress(MergedTokenError):
                    return ids, [count_tokens_before(encoding, draft.text, at, self._special) for at in draft.places]
        return self._tokenize_in_parts(draft, apart)

    def _tokenize_in_parts(self, draft: _Draft, boundaries: Sequence[int]) -> tuple[npt.NDArray[np.uint32], list[int]]:
        """Return the token ids of a draft, and the number of tokens before each of its places.

        White space at the start of a chat's answer, which would be one token with the line break of the prompt, is
        tokenised apart from the prompt, as the model generates it.

        Args:
            draft: The row.
            boundaries: Characters between which the text is tokenised separately, ascending.
        """
        ids, cuts, num_tokens, merged = [np.zeros(0, np.uint32)], list[int](), 0, list[int]()
        for begin, end in pairwise([0, *boundaries, len(draft.text)]):
            for piece in encode_in_windows(self._backend, draft.text[begin:end]):
                start = begin + piece.start
                for at in [at for at in draft.places[len(cuts) :] if at <= begin + piece.stop]:
                    inside = piece.first
                    try:
                        inside = count_tokens_before(piece.encoding, piece.text, at - start, self._special)
                    except MergedTokenError as error:
                        is_start = draft.row.messages is not None and not len(cuts) % 2
                        # Others write a space before a text.
                        if not (is_start and error.is_space and isinstance(self._backend.decoder, ByteLevel)):
                            raise _refuse(draft.row, error) from error
                        merged.append(at)
                    cuts.append(num_tokens - piece.first + inside)
                ids.append(np.array(piece.encoding.ids[piece.first : piece.last], dtype=np.uint32))
                num_tokens += len(ids[-1])
        # All at once, because a chat may have thousands of such answers.
        return self._tokenize_in_parts(draft, sorted([*boundaries, *merged])) if merged else (np.concatenate(ids), cuts)

    def _with_prefix(self, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        has_prefix = np.array_equal(ids[: len(self._prefix)], self._prefix)
        return ids if has_prefix else np.concatenate([self._prefix, ids])

    def _mask(
        self, draft: _Draft, text_ids: npt.NDArray[np.uint32], cuts: list[int], claims: list[Claim]
    ) -> EncodedRow:
        """Return the ids and loss mask of a row, and append a claim for each of its spans to ``claims``."""
        is_plain = draft.row.messages is None
        ids = self._with_prefix(text_ids) if is_plain else text_ids
        num_before = len(ids) - len(text_ids)
        if is_plain:
            if not len(ids) or ids[-1] != self._eos_id:
                ids = np.append(ids, np.uint32(self._eos_id))
        elif self._bos_id is not None and len(ids) > 1 and ids[0] == ids[1] == self._bos_id:
            found, remedy = "the chat begins with two BOS tokens", "remove one from the chat, or from the template"
            raise DataError(Problem(draft.row.where, found, remedy))
        if draft.spans is None:
            loss_mask = np.ones(len(ids), dtype=np.bool_)
            loss_mask[:1] = ids[:1] != self._bos_id
            loss_mask[: len(self._prefix) * is_plain] = False
            return EncodedRow(ids, loss_mask, draft.remarks)
        loss_mask = np.zeros(len(ids), dtype=np.bool_)
        # `cuts` count tokens of the text, without the prefix; the appended EOS of a plain row is a target.
        for (start, end), first, last in zip(draft.spans, cuts[::2], cuts[1::2], strict=True):
            loss_mask[first + num_before : len(ids) if is_plain else last] = True
            claims.append(Claim(draft.row.where, ids, first + num_before, last + num_before, draft.text[start:end]))
        return EncodedRow(ids, loss_mask, draft.remarks)


def count_tokens_before(encoding: Encoding, text: str, character: int, special_ids: Collection[int]) -> int:
    """Return the number of tokens before a character boundary.

    Special tokens can absorb adjacent white space (``lstrip``, ``rstrip``); absorbed white space belongs to them.

    Args:
        encoding: Tokenisation of ``text``.
        text: The full text.
        character: Boundary, as an index into ``text``.
        special_ids: Ids of special tokens.

    Raises:
        MergedTokenError: A token has characters on both sides of the boundary.
    """
    token = None
    for at in range(character, len(text)):
        token = encoding.char_to_token(at)
        if token is not None:  # Normalisers and pre-tokenisers can drop characters, which have no token.
            break
    if token is None:
        return len(encoding)
    start, end = encoding.token_to_chars(token) or (character, character)
    if start >= character:
        return token
    if encoding.ids[token] in special_ids:
        if text[character:end].isspace():
            return token + 1
        if text[start:character].isspace():
            return token
    raise MergedTokenError(text[start:character], text[character:end])


def _refuse(row: Row, error: MergedTokenError) -> DataError:
    found = f"{error}, and only one of them is trained on"
    remedy = "strip the answer, or let the template end its prompt and turns in a special token or a line break"
    if row.messages is None:  # Without the characters, so that the problems of all rows are merged.
        found = "one token holds the end of the prompt and the start of the answer, and only one of them is trained on"
        remedy = "let the answer begin with the space or line break between them, instead of ending the prompt with it"
    return DataError(Problem(row.where, found, remedy))


def _resolve(loss_on: LossOn | None, row: Row) -> LossOn:
    """Return the part of a row that is trained on.

    Raises:
        DataError: The layout of the row does not support ``loss_on``.
    """
    if row.messages is not None:
        has_prompt = row.num_prompt_messages is not None
        default: LossOn = "completion" if has_prompt else "assistant"
        possible = {"assistant", "last_assistant", "all"} | ({"completion"} if has_prompt else set())
        layout = "a chat without a separate prompt"
    elif row.prompt is not None:
        default, possible, layout = "completion", {"completion", "all"}, "a plain prompt and completion"
    else:
        default, possible, layout = "all", {"all"}, "plain text"
    if loss_on is not None and loss_on not in possible:
        found = f"loss_on: {loss_on} does not fit {layout}"
        raise DataError(Problem(row.where, found, f"leave loss_on out, or set it to {default}"))
    if loss_on == "all" and row.untrained:
        found = f"loss_on: all trains on every message, and message {min(row.untrained)} is marked not to be trained on"
        raise DataError(Problem(row.where, found, "remove the mark from the row, or leave loss_on out"))
    return loss_on or default


def _trained_messages(row: Row, loss_on: LossOn) -> Collection[int]:
    """Return the indices of the messages with target spans; none for ``all``, where the whole text is a target."""
    assert row.messages is not None
    answers = [index for index, message in enumerate(row.messages) if message["role"] == "assistant"]
    after_prompt = [index for index in answers if index >= (row.num_prompt_messages or 0)]
    chosen = {"assistant": answers, "last_assistant": answers[-1:], "completion": after_prompt}.get(loss_on, [])
    return {*chosen} - {*row.untrained}


_RAW_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_METASPACE = "\u2581"


def compute_token_byte_lengths(tokenizer: PreTrainedTokenizerBase) -> npt.NDArray[np.int64] | None:
    """Return the number of UTF-8 bytes that each id decodes to, ``int64 (V,)``; for a special token, those of its text.

    The lengths of a text's tokens add up to the length of the text, even if tokens split characters. In
    SentencePiece-style vocabularies, the space before the first word counts, although decoding removes it. Unused ids
    have length 0.

    Returns:
        ``None`` for tokenizers that do not preserve the text (WordPiece), and those without a fast implementation.

    Source: the decoders of the ``tokenizers`` library; ``tests/data/chat/test_token_bytes.py``.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    decoders = set(_iterate_types(json.loads(backend.to_str())["decoder"]))
    if "ByteLevel" not in decoders and not decoders & {"ByteFallback", "Metaspace"}:
        return None
    # Vocabularies can have holes, whose ids keep length 0.
    lengths = np.zeros(count_ids(tokenizer), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = len(token) if "ByteLevel" in decoders else _count_bytes(token)
    for index, added in tokenizer.added_tokens_decoder.items():
        lengths[index] = len(added.content.encode())  # Added tokens bypass the decoder.
    return lengths


class ByteEnds:
    """Token boundaries from cumulative byte lengths of tokens, without the tokenizer's character offsets.

    Offsets would take a third of the tokenisation time. Only for tokenizers that preserve the text: those with a
    byte-level decoder and no normaliser.

    Args:
        tokenizer: A fast tokenizer for which ``ByteEnds.suits`` is True.

    Attributes:
        longest: Number of bytes of the longest token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        lengths = compute_token_byte_lengths(tokenizer)
        assert lengths is not None
        self._lengths = lengths
        self.longest = int(lengths.max())

    @staticmethod
    def suits(tokenizer: PreTrainedTokenizerBase) -> bool:
        """Return whether the concatenated tokens of a tokenizer always equal its input text."""
        backend = tokenizer.backend_tokenizer
        added = tokenizer.added_tokens_decoder.values()
        return (
            isinstance(backend.decoder, ByteLevel)
            and backend.normalizer is None
            and not any(token.lstrip or token.rstrip for token in added)
        )

    def cut(
        self, ids: Sequence[npt.NDArray[np.uint32]], texts: Sequence[str], places: Sequence[Sequence[int]]
    ) -> list[list[int] | None]:
        """Return the number of tokens before given characters of each text.

        Args:
            ids: Token ids of each text, ``uint32 (T,)``.
            texts: The texts.
            places: Character indices for each text, ascending.

        Returns:
            For each text, one number per place; ``None`` if a token has characters on both sides of a place, or if the
            tokens do not have the length of the text.
        """
        # All texts of a batch are concatenated, so that one search is enough.
        last = np.cumsum([0, *map(len, ids)])
        # Entry n is the byte position, counted over all texts, at which the first n tokens end.
        ends = np.concatenate([[0], self._lengths[np.concatenate([*ids, np.empty(0, np.uint32)])]]).cumsum()
        starts = ends[last].tolist()
        wanted = [
            start + num_bytes
            for text, start, text_places in zip(texts, starts, places, strict=False)
            for num_bytes in _count_bytes_before(text, [*text_places, len(text)])
        ]
        # A boundary is exact if a token ends at the same byte.
        found = ends.searchsorted(wanted)
        exact = (ends.take(found, mode="clip") == wanted).tolist()
        counts, cuts, done = found.tolist(), list[list[int] | None](), 0
        for first, next_first, text_places in zip(last.tolist(), last[1:].tolist(), places, strict=False):
            span = slice(done, done + len(text_places) + 1)
            is_whole = all(exact[span]) and counts[span][-1] == next_first
            cuts.append([count - first for count in counts[span][:-1]] if is_whole else None)
            done = span.stop
        return cuts


def _count_bytes_before(text: str, places: Sequence[int]) -> Iterable[int]:
    """Return the number of UTF-8 bytes before each of the character indices ``places``, which are ascending."""
    if text.isascii():
        return places
    return accumulate(len(text[start:stop].encode()) for start, stop in pairwise([0, *places]))


def _count_bytes(token: str) -> int:
    return 1 if _RAW_BYTE.fullmatch(token) else len(token.replace(_METASPACE, " ").encode())


def _iterate_types(decoder: Any) -> Iterator[str]:
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _iterate_types(part)
