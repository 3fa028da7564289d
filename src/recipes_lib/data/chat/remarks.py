"""Warnings about rows that are trained on unchanged although that may not be intended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

_OTHER_TEMPLATE: Final = "use a template that writes it (chat_template_path), or take it out of the rows"


class Remark(Enum):
    """Something worth knowing of a row: what such rows do, and what may be done about it."""

    LOST_REASONING = "give reasoning in their last turn that the chat template does not write", _OTHER_TEMPLATE
    LOST_TOOLS = "give tool schemas that the chat template does not write", _OTHER_TEMPLATE
    LOST_BESIDE_CALL = "say something beside a tool call that the chat template does not write", _OTHER_TEMPLATE
    PYTHON_ARGUMENTS = (
        "call tools with arguments that the chat template writes as Python does, not as JSON",
        "let the template write `arguments | tojson`, unless the server of the model reads Python",
    )
    SPECIAL_TEXT = (
        "spell a special token inside a message: to the model it is that token",
        "take it out, if nobody is meant to write turns or images by hand",
    )

    def __init__(self, found: str, remedy: str) -> None:
        self.found = found
        self.remedy = remedy


class Remarked(NamedTuple):
    """A row of which there is something to tell: its position in its source, its place as errors name it, and what."""

    row_id: int
    where: str
    remarks: Collection[Remark]


def take_remarked(remarked: Sequence[Remarked], row_ids: npt.NDArray[np.integer]) -> Sequence[Remarked]:
    """Those of the remarked rows that are among ``row_ids``."""
    if not remarked:
        return remarked
    taken = set(row_ids.tolist())
    return [row for row in remarked if row.row_id in taken]
