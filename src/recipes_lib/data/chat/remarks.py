"""Warnings about rows that are trained on unchanged although that may not be intended."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt

_OTHER_TEMPLATE: Final = "use a template that writes it (chat_template_path), or take it out of the rows"


class Remark(Enum):
    """Something worth knowing of a row: what such rows do, and what may be done about it."""

    LOST_BESIDE_CALL = "say something beside a tool call that the chat template does not write", _OTHER_TEMPLATE
    PYTHON_ARGUMENTS = (
        "call tools with arguments that the chat template writes as Python does, not as JSON",
        "let the template write `arguments | tojson`, unless the server of the model reads Python",
    )
    SPECIAL_TEXT = (
        "spell a special token inside a message: to the model it is that token",
        "take it out, if nobody is meant to write turns or images by hand",
    )
    LOST_REASONING = "give reasoning in their last turn that the chat template does not write", _OTHER_TEMPLATE
    LOST_TOOLS = "give tool schemas that the chat template does not write", _OTHER_TEMPLATE

    def __init__(self, found: str, remedy: str) -> None:
        self.found = found
        self.remedy = remedy


RemarkBits = npt.NDArray[np.uint8]
"""What there is to tell of each row, one byte a row: bit ``i`` stands for the ``i``-th ``Remark``."""


def build_bits(remarks: Iterable[Collection[Remark]]) -> RemarkBits:
    """The remarks on each row, ``uint8 (R,)``."""
    bit_of = {remark: 1 << number for number, remark in enumerate(Remark)}
    return np.array([sum(bit_of[remark] for remark in set(some)) for some in remarks], np.uint8)


def find_remarked(bits: RemarkBits) -> dict[Remark, npt.NDArray[np.int64]]:
    """Positions of the rows on which each remark was made, by the first of them; a remark on no row is left out."""
    rows = {remark: np.flatnonzero(bits >> number & 1) for number, remark in enumerate(Remark)}
    return {remark: at for remark, at in sorted(rows.items(), key=lambda item: item[1][:1].tolist()) if len(at)}
