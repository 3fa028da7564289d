"""What must hold between the keys of distillation."""

from __future__ import annotations

from collections.abc import Iterator

from recipes_lib.config.settings import Settings
from recipes_lib.errors import Problem


def check_distillation(settings: Settings) -> Iterator[Problem]:
    """What is stored is found by its rows, and a stream has none that could be numbered."""
    if settings.gives("teacher_top_k") and settings["dataset_streaming"]:
        found = f"`teacher_top_k` needs prepared rows, and a stream ({settings.where('dataset_streaming')}) has none"
        yield Problem(settings.where("teacher_top_k"), found, "delete one of the two lines")
