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
from recipes_lib.config.recipes import read_lists
from recipes_lib.config.values import SECRET, SECRET_HINTS
from recipes_lib.corpus.documents import PART_END, Hide

Validate = Callable[[str], int]
"""Returns how many characters of a match are the thing itself; 0: none."""


class Pattern(NamedTuple):
    """A kind of personal data.

    Attributes:
        kind: One of ``PII_KINDS``.
        regex: Finds candidates. It begins with a character or class, and looks behind after it: so ``re`` skips fast.
        validate: Decides on each.
        hints: A text without any of these has no candidate, which is quicker to see.
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
"""Characters of an IBAN by country (ISO 13616)."""


def is_luhn(digits: str) -> bool:
    """Return whether the last digit is the Luhn check digit of the others (ISO/IEC 7812-1)."""
    # Every second digit from the right is doubled; the digits of a number above 9 are added, which is to subtract 9.
    values = [int(digit) for digit in reversed(digits)]
    doubled = [value * 2 - 9 * (value > 4) for value in values[1::2]]
    return (sum(values[::2]) + sum(doubled)) % 10 == 0


def is_card(digits: str) -> bool:
    """Return whether digits are a card number: prefix and length of a network, Luhn, and not all digits equal."""
    return bool(_CARD_NETWORKS.fullmatch(digits)) and is_luhn(digits) and len(set(digits)) > 1


_CARD_NETWORKS: Final = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})"  # Visa
    r"|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}"  # Mastercard
    r"|3[47]\d{13}|3(?:0[0-5]|[68]\d)\d{11}"  # American Express, Diners
    r"|(?:6011|65\d\d|64[4-9]\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}|62\d{14,17}"  # Discover, JCB, UnionPay
)


def is_iban(text: str) -> bool:
    """Return whether a text without spaces is an IBAN: length of its country, and 1 modulo 97 (ISO 13616)."""
    if len(text) != _IBAN_LENGTHS.get(text[:2]):
        return False
    # ISO 13616: country and check digits go to the end, and letters count from A = 10, as in base 36.
    return int("".join(str(int(char, 36)) for char in text[4:] + text[:4])) % 97 == 1


def _whole(is_valid: Callable[[str], bool]) -> Validate:
    return lambda text: len(text) if is_valid(text) else 0


def _measure_grouped(text: str, is_valid: Callable[[str], bool]) -> int:
    """Return the length of the longest prefix, ending at a space or hyphen, that is valid without separators."""
    # From the longest: the groups after a number can be numbers of their own.
    for end in range(len(text), 0, -1):
        if (end == len(text) or text[end] in " -") and is_valid(re.sub("[ -]", "", text[:end])):
            return end
    return 0


def _is_public_ip(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


def _is_phone(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    if text.startswith("+"):
        return 8 <= len(digits) <= 15  # ITU-T E.164
    return digits[0] in "23456789" and digits[3] in "23456789"  # North America: area and exchange


def _is_ssn(text: str) -> bool:
    # Numbers that the Social Security Administration never gives out.
    area, group, serial = text.split("-")
    return area not in ("000", "666") and area[0] != "9" and group != "00" and serial != "0000"


_LOCAL: Final = r"A-Za-z0-9.!#$%&'*+/=?^_`{|}~-"
PATTERNS: Final = (
    Pattern(
        "private_key",
        re.compile(
            r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:[^-]{0,20000}-----END [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----|[A-Za-z0-9+/=\s\\]{0,20000})"
        ),
        len,
        ("PRIVATE KEY",),
    ),
    Pattern("api_token", SECRET, len, SECRET_HINTS),
    Pattern(
        "email",
        # The run of characters before the @ is bounded and starts at its first character, so that a megabyte without an
        # @ is fast.
        re.compile(
            rf"[{_LOCAL}](?<![{_LOCAL}]{{2}})[{_LOCAL}]{{0,63}}@"
            r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![\w-])"
        ),
        len,
        ("@",),
    ),
    Pattern(
        "iban",
        re.compile(r"[A-Z](?<!\w[A-Z])[A-Z]\d{2}(?: ?[A-Z0-9]){11,32}(?!\w)"),
        functools.partial(_measure_grouped, is_valid=is_iban),
    ),
    Pattern(
        "card",
        re.compile(r"\d(?<![\w.-]\d)(?:[ -]?\d){12,18}(?![\w-])"),
        functools.partial(_measure_grouped, is_valid=is_card),
    ),
    Pattern("ssn", re.compile(r"\d(?<![\w-]\d)\d\d-\d{2}-\d{4}(?![\w-])"), _whole(_is_ssn), ("-",)),
    Pattern(
        "phone",
        re.compile(r"\+(?<!\w\+)\d{1,3}(?:[ .-]?(?:\(\d{1,4}\)|\d{1,8})){1,5}(?!\w)"),
        _whole(_is_phone),
        ("+",),
    ),
    Pattern(
        "phone",
        re.compile(r"[(\d](?<![\w.-][(\d])(?:(?<=\()\d{3}\) ?|(?<=\d)\d{2}[-. ])\d{3}[-.]\d{4}(?![\w-])"),
        _whole(_is_phone),
    ),
    Pattern("ip", re.compile(r"\d(?<![\w.]\d)\d{0,2}(?:\.\d{1,3}){3}(?!\w|\.\d)"), _whole(_is_public_ip), (".",)),
    Pattern(
        "ip",
        re.compile(r"[23](?<![\w:][23])[0-9a-fA-F]{3}:(?:[0-9a-fA-F]{0,4}:){1,6}[0-9a-fA-F]{0,4}(?![\w:])"),
        _whole(_is_public_ip),
        (":",),
    ),
)
"""In the order in which they are looked for: what one has masked is not there for the next."""


class PII:
    """Masks personal data and secrets, or removes documents with any."""

    name = "pii"

    def __init__(self, kinds: Sequence[str] | None, *, drops: bool) -> None:
        """Search for ``kinds``, by default all; ``drops``: remove the document."""
        self._kinds = kinds or PII_KINDS
        self._drops = drops

    def apply(self, document: Document, found: Counter[str]) -> str | None:
        """Mask all findings, in the text and in every string of the metadata."""
        here: Counter[str] = Counter()
        # One at a time, so that nothing matches across messages of a chat.
        text = PART_END.join(mask(part, self._kinds, here) for part in document.text.split(PART_END))
        name = mask(document.id, self._kinds, here)
        num_found = here.total()
        source = document.metadata.get("source")
        metadata = {**self._mask_values(document.metadata, here), "source": source}
        found.update(here)
        if self._drops and here:
            return " and ".join(sorted(here))
        document.text, document.id = text, name
        if here.total() > num_found:
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


def choose_hiding(config: CorpusConfig) -> Hide | None:
    """Return what masks the samples of a report; ``None`` where personal data are not looked for."""
    return None if config.pii == "off" else functools.partial(_hide, config.pii_kinds or PII_KINDS)


def _hide(kinds: Sequence[str], text: str) -> str:
    return mask(text, kinds, Counter())


def mask(text: str, kinds: Sequence[str], found: Counter[str]) -> str:
    """Replace all findings of these kinds by placeholders such as ``<EMAIL>``."""
    for pattern in PATTERNS:
        if pattern.kind in kinds and any(hint in text for hint in pattern.hints):
            text = _mask_kind(text, pattern, found)
    return text


def _mask_kind(text: str, pattern: Pattern, found: Counter[str]) -> str:
    pieces, last, position = [], 0, 0
    while match := pattern.regex.search(text, position):
        length = pattern.validate(match.group())
        # An invalid candidate can overlap a valid one, so the search continues inside it.
        position = match.start() + (length or 1)
        if length:
            found[pattern.kind] += 1
            pieces += [text[last : match.start()], f"<{pattern.kind.upper()}>"]
            last = position
    return "".join([*pieces, text[last:]])
