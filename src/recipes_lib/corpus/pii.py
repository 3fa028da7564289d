"""Personal data and secrets: patterns, check digits, and placeholders."""

from __future__ import annotations

import functools
import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from datatrove.data import Document

from recipes_lib.config.corpus_keys import PII_KINDS, CorpusConfig
from recipes_lib.config.table import read_lists
from recipes_lib.config.values import SECRET, SECRET_HINTS
from recipes_lib.corpus.documents import PART_END, SOURCE, Hide

Validate = Callable[[str], int]
"""Returns the number of leading characters of a match that are personal data; 0 for a false match."""


class Pattern(NamedTuple):
    """A kind of personal data.

    Attributes:
        kind: One of ``PII_KINDS``.
        regex: Pattern of candidates. It begins with a character class, and its lookbehind follows, because ``re``
            skips to possible first characters fast.
        validate: Function that verifies a candidate, by check digits for example.
        hints: Substrings of which every candidate contains at least one, to skip most texts.
    """

    kind: str
    regex: re.Pattern[str]
    validate: Validate
    hints: Sequence[str] = ("",)


_IBAN_LENGTHS: Final[Mapping[str, int]] = {
    country: int(length)
    for length, countries in read_lists(Path(__file__).with_name("iban_lengths.yaml")).items()
    for country in countries.split()
}
"""Country code -> number of characters of an IBAN (ISO 13616)."""


def is_luhn(digits: str) -> bool:
    """Return whether the last digit is the Luhn check digit of the others (ISO/IEC 7812-1)."""
    # Every second digit from the right is doubled. Of a two-digit product the digits are added: it is reduced by 9.
    values = [int(digit) for digit in reversed(digits)]
    doubled = [value * 2 - 9 * (value > 4) for value in values[1::2]]
    return (sum(values[::2]) + sum(doubled)) % 10 == 0


def is_card(text: str) -> bool:
    """Return whether digits, in groups or not, are a card number: prefix and length of a network, and Luhn."""
    digits = re.sub("[ -]", "", text)
    return bool(_CARD_NETWORKS.fullmatch(digits)) and is_luhn(digits)


_CARD_NETWORKS: Final = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})"  # Visa
    r"|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}"  # Mastercard
    r"|3[47]\d{13}|3(?:0[0-5]|[68]\d)\d{11}"  # American Express, Diners
    r"|(?:6011|65\d\d|64[4-9]\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}|62\d{14,17}"  # Discover, JCB, UnionPay
)


def is_iban(text: str) -> bool:
    """Return whether a text, in groups or not, is an IBAN: length of its country, and 1 modulo 97 (ISO 13616)."""
    text = text.replace(" ", "")
    if len(text) != _IBAN_LENGTHS.get(text[:2]):
        return False
    # ISO 13616: country and check digits are moved to the end, and letters are numbers from A = 10, as in base 36.
    return int("".join(str(int(char, 36)) for char in text[4:] + text[:4])) % 97 == 1


def _whole(is_valid: Callable[[str], bool]) -> Validate:
    return lambda text: len(text) if is_valid(text) else 0


def _measure(text: str, is_valid: Callable[[str], bool]) -> int:
    """Return the length of the longest prefix, ending at a space or hyphen, that is valid."""
    # The candidate can include digits after the number, such as those of the next one.
    ends = (found.start() for found in re.finditer("[ -]|$", text))
    return max((end for end in ends if is_valid(text[:end])), default=0)


def _is_public_ip(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


def _is_phone(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    if text.startswith("+"):
        return 8 <= len(digits) <= 15 and not re.fullmatch(r"\+\d{4,}\.\d+", text)  # ITU-T E.164; a decimal number
    return digits[0] in "23456789" and digits[3] in "23456789"  # North America: area and exchange


def _is_ssn(text: str) -> bool:
    # Numbers that the Social Security Administration never assigns.
    area, group, serial = text.split("-")
    return area not in ("000", "666") and area[0] != "9" and group != "00" and serial != "0000"


# Addresses can have letters of any script (RFC 6531). Latin, Greek and Cyrillic ones are matched; in scripts without
# spaces, it is not known where an address begins.
_LETTERS: Final = "A-Za-z\u00c0-\u024f\u0370-\u052f"
# Not the other characters of RFC 5322: in code, Markdown and URLs, they stand before an address or a decorator. An
# apostrophe only as in o'brien.
_LOCAL: Final = rf"{_LETTERS}0-9.%+_-"
# Only ASCII letters and digits around a finding make it part of a longer word: in Chinese, Japanese and Korean, words
# follow an address or number without a space.
PATTERNS: Final = (
    Pattern(
        "private_key",
        re.compile(
            r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:(?:[^-]|-(?!----)){0,20000}-----END [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
            r"|[A-Za-z0-9+/=\s\\]{0,20000})"
        ),
        len,
        ("PRIVATE KEY",),
    ),
    Pattern("api_token", SECRET, len, SECRET_HINTS),
    Pattern(
        "email",
        # The local part is bounded and starts at the first character of a run: a megabyte without @ takes linear time.
        re.compile(
            rf"[{_LOCAL}](?<![{_LOCAL}]{{2}})[{_LOCAL}]{{0,63}}(?:(?<=[oO])'[{_LETTERS}][{_LOCAL}]{{0,63}})?@"
            r"(?![\d.]{1,3}x\.(?:png|jpe?g|gif|webp|avif)(?a:\b))"  # Images for dense screens: logo@2x.png.
            rf"(?:[{_LETTERS}0-9](?:[{_LETTERS}0-9-]{{0,61}}[{_LETTERS}0-9])?\.){{1,8}}"
            rf"(?:[{_LETTERS}]{{2,24}}|xn--[a-z0-9-]{{1,59}})(?!(?a:[\w-]))"
        ),
        len,
        ("@",),
    ),
    Pattern(
        "iban",
        re.compile(r"[A-Z](?<!(?a:\w)[A-Z])[A-Z]\d{2}(?: ?[A-Z0-9]){11,32}(?!(?a:\w))"),
        functools.partial(_measure, is_valid=is_iban),
    ),
    Pattern(
        "phone",  # Before cards: +4915... with 13 digits can be a card number too.
        re.compile(r"\+(?<!(?a:\w)\+)[1-9]\d{0,2}(?:[ .-]?(?:\(\d{1,4}\)|\d{1,8})){1,5}(?!(?a:\w))"),
        functools.partial(_measure, is_valid=_is_phone),
        ("+",),
    ),
    Pattern(
        "card",
        # In the groups of printed cards: in a table of single digits, every tenth run would pass Luhn's check.
        re.compile(
            r"[2-6](?<!(?a:[\w.-])[2-6])(?:\d{12,18}|\d{3}(?:[ -]?\d{4}){2}[ -]?\d{1,4}(?:[ -]?\d{1,3})?"
            r"|\d{3}[ -]\d{6}[ -]\d{4,5})(?!(?a:[\w-]))"
        ),
        functools.partial(_measure, is_valid=is_card),
    ),
    Pattern("ssn", re.compile(r"\d(?<!(?a:[\w-])\d)\d\d-\d{2}-\d{4}(?!(?a:[\w-]))"), _whole(_is_ssn), ("-",)),
    Pattern(
        "phone",
        # Also after the country code, 1-415-555-2671; not DFARS 252.227-7013, a clause of licences.
        re.compile(
            r"[(\d](?:(?<!(?a:[\w.-])[(\d])|(?<=(?<!(?a:[\w.-]))1[.-][(\d]))"
            r"(?:(?<=\()\d{3}\) ?\d{3}[-.]|(?<=\d)\d{2}(?:[- ]\d{3}-|\.\d{3}\.))\d{4}(?!(?a:[\w-]))"
        ),
        _whole(_is_phone),
    ),
    Pattern(
        "ip",  # Not `Version 8.2.4.44`, `Version="4.0.0.0"`, `Section 3.4.1.2` or its link, nor `2.5.29.17` of X.509.
        re.compile(
            r"\d(?<!(?a:[\w.])\d)(?<!(?:ersion|elease)[ =-]\d)(?<!ersion(?:[=(][\"']|: )\d)(?<!\b[Ss]ection[ -]\d)"
            r"(?!(?<=2)\.5\.(?:4|29)\.)\d{0,2}(?:\.\d{1,3}){3}(?!(?a:\w|\.\d))"
        ),
        _whole(_is_public_ip),
        (".",),
    ),
    Pattern(
        "ip",
        re.compile(r"[23](?<!(?a:[\w:])[23])[0-9a-fA-F]{3}:(?:[0-9a-fA-F]{0,4}:){1,6}[0-9a-fA-F]{0,4}(?!(?a:[\w:]))"),
        _whole(_is_public_ip),
        (":",),
    ),
)
"""Patterns in the order of application: a later one searches the text with earlier findings already masked."""


class PII:
    """Masks personal data and secrets, or removes documents that contain any."""

    name = "pii"

    def __init__(self, kinds: Sequence[str] | None, *, drops: bool) -> None:
        """Search for ``kinds``, by default all; ``drops``: remove the document instead of masking."""
        self._kinds = kinds or PII_KINDS
        self._drops = drops

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Mask all findings in the text, the id and every string of the metadata except the label of the source."""
        counts: Counter[str] = Counter()
        # Message by message, so that no pattern matches across the messages of a chat.
        text = PART_END.join(mask(part, self._kinds, counts) for part in document.text.split(PART_END))
        name = mask(document.id, self._kinds, counts)
        num_outside_metadata = counts.total()
        columns = {name: value for name, value in document.metadata.items() if name != SOURCE}
        metadata = document.metadata | self._mask_values(columns, counts)
        found.update(counts)
        if self._drops and counts:
            return " and ".join(sorted(counts))
        document.text, document.id = text, name
        # A new mapping means changed metadata (`Step.apply`), so it is assigned only then.
        if counts.total() > num_outside_metadata:
            document.metadata = metadata
        return None

    def _mask_values(self, value: Any, found: Counter[str]) -> Any:
        if isinstance(value, str):
            return mask(value, self._kinds, found)
        if isinstance(value, list):
            return [self._mask_values(item, found) for item in value]
        if isinstance(value, Mapping):
            return {name: self._mask_values(item, found) for name, item in value.items()}
        return value


def build_masker(config: CorpusConfig) -> Hide | None:
    """Return the function that masks samples of the report; ``None`` if the step ``pii`` is off."""
    # Not a closure, because worker processes unpickle it; its counts are not read.
    kinds = config.pii_kinds or PII_KINDS
    return None if config.pii == "off" else functools.partial(mask, kinds=kinds, found=Counter())


def mask(text: str, kinds: Sequence[str], found: Counter[str]) -> str:
    """Return a text with all findings of ``kinds`` replaced by placeholders such as ``<EMAIL>``; count in ``found``."""
    for pattern in PATTERNS:
        if pattern.kind in kinds and any(hint in text for hint in pattern.hints):
            text = _mask_kind(text, pattern, found)
    return text


def _mask_kind(text: str, pattern: Pattern, found: Counter[str]) -> str:
    pieces, last, position = [], 0, 0
    while match := pattern.regex.search(text, position):
        length = pattern.validate(match.group())
        # A false match can overlap a true one, so the search continues one character after its start.
        position = match.start() + (length or 1)
        if length:
            found[pattern.kind] += 1
            pieces += [text[last : match.start()], f"<{pattern.kind.upper()}>"]
            last = position
    return "".join([*pieces, text[last:]])
