"""The keys of distillation, and what must hold between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from recipes_lib.config.settings import Settings
from recipes_lib.errors import Problem


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """What a student learns from a teacher; the spelling of TRL's ``DistillationConfig`` where it has the key."""

    teacher_model_name_or_path: str | None = None
    """Hub id or folder of the teacher, which has the student's tokenizer; it is frozen, and saved nowhere."""
    teacher_model_revision: str | None = None
    """Commit, tag or branch of a Hub teacher."""
    teacher_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the teacher's weights; ``auto`` is that of its checkpoint."""
    teacher_top_k: int | None = None
    """Likeliest tokens kept by ``recipes distill-store``, to learn from. Unset: the teacher runs beside the student."""
    distillation_alpha: float = 0.5
    """Share of the text's own tokens in the loss; the rest is the teacher's. At 0 the text only says what is asked."""
    distillation_beta: float = 0.0
    """Divergence to the teacher: 0 is forward KL, 1 reverse KL, between them generalised Jensen-Shannon."""
    distillation_temperature: float = 1.0
    """Divides the logits of both models before the divergence, which is multiplied by its square."""
    assistant_model_names_or_paths: list[str] | None = None
    """Models between teacher and student, the largest first; ``recipes distill-chain`` makes each the next teacher."""
    lmbda: float = 0.0
    """Share of the optimizer steps whose answers the student writes itself and the teacher judges; GKD's spelling."""
    sampling_temperature: float = 1.0
    """Divides the student's logits where it writes answers itself."""


def check_distillation(settings: Settings) -> Iterator[Problem]:
    """What is stored is found by its rows: a stream has none that could be numbered, and new answers are in no row."""
    if settings.gives("teacher_top_k") and settings["dataset_streaming"]:
        found = f"`teacher_top_k` needs prepared rows, and a stream ({settings.where('dataset_streaming')}) has none"
        yield Problem(settings.where("teacher_top_k"), found, "delete one of the two lines")
    if settings.gives("teacher_top_k") and settings["lmbda"]:
        found = f"`teacher_top_k` is of the texts, and the answers of `lmbda` ({settings.where('lmbda')}) are new ones"
        yield Problem(settings.where("teacher_top_k"), found, "delete one of the two lines")
