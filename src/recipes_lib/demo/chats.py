"""The demo's questions and answers, derived from documentation strings; the wording is fixed, every fact is the library's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from recipes_lib.demo.corpus import Definition

_MAX_ANSWER = 120
_MAX_SIGNATURE = 90
_SENTENCE = re.compile(r"(.+?[.!?])(?=\s|$)")

Chat = dict[str, list[dict[str, str]]]
