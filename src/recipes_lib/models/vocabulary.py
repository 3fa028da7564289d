"""Vocabulary mapping between two tokenizers, and models rewritten from one to the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from recipes_lib.errors import ConfigError, Problem

NUM_PROVED: int = 64
"""Tokens on which a rewritten model is held against what it was."""


@dataclass(frozen=True, slots=True)
class VocabularyMap:
    """Where the teacher has the tokens of the student.

    Attributes:
        teacher_ids: For each id of the student's tokenizer that of the same token in the teacher's; for an id without a
            token, itself.
    """

    teacher_ids: Sequence[int]

    @property
    def is_identity(self) -> bool:
        """Whether every token has one id in both."""
        return all(own == other for own, other in enumerate(self.teacher_ids))


def map_vocabulary(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, where: str) -> VocabularyMap:
    """Find the student's tokens in the teacher's vocabulary, which may hold others besides.

    Args:
        student: A fast tokenizer.
        teacher: A fast tokenizer.
        where: The key that named the teacher.

    Raises:
        ConfigError: The teacher lacks some of them, or cuts text into them by other rules: it would be asked about text
            that it never saw so.

    Source: ``tests/models/test_vocabulary.py``.
    """
    own, other = student.get_vocab(), teacher.get_vocab()
    remedy = (
        "name a teacher of the student's own family, or distil by sequences: let the teacher write the answers "
        "(`recipes distill-write`) and train on them with the `sft` recipe; TRL's GOLDTrainer aligns other tokenizers"
    )
    missing = sorted(own.keys() - other.keys())
    if missing:
        found = f"the teacher has no token {', '.join(map(repr, missing[:3]))}"
        found += f" and lacks {len(missing):,} of the student's {len(own):,} in all" if len(missing) > 1 else ""
        raise ConfigError(Problem(where, found, remedy))
    differing = [name for name, rule in _read_rules(student).items() if _read_rules(teacher).get(name) != rule]
    if differing:
        found = f"the tokenizers of student and teacher share their tokens and differ in {', '.join(differing)}"
        raise ConfigError(Problem(where, found, remedy))
    teacher_ids = list(range(max(own.values()) + 1))
    for token, token_id in own.items():
        teacher_ids[token_id] = other[token]
    return VocabularyMap(teacher_ids)


def adopt_vocabulary(model: PreTrainedModel, vocabulary: VocabularyMap, where: str) -> None:
    """Rewrite a model to read and predict the student's tokens, and no others; proved on some of them.

    Rows of padding, and tokens that only the teacher has, are cut off.

    Args:
        model: The teacher.
        vocabulary: From ``map_vocabulary``.
        where: The key that named the teacher.

    Raises:
        ConfigError: The model has fewer embeddings than its tokenizer has tokens, or says something else afterwards.
    """
    ids = torch.tensor(vocabulary.teacher_ids)
    embedding: Any = model.get_input_embeddings()
    projection: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    num_rows, highest = len(projection.weight), int(ids.max())
    if num_rows <= highest:
        found = f"the teacher has {num_rows:,} embeddings, and its tokenizer gives ids up to {highest:,}"
        raise ConfigError(Problem(where, found, "name a teacher whose tokenizer is its own"))
    if vocabulary.is_identity and num_rows == len(ids):
        return
    probe = torch.linspace(0, len(ids) - 1, min(NUM_PROVED, len(ids))).long()
    expected = _compute_logits(model, ids[probe])[:, ids]
    is_tied = embedding.weight is projection.weight
    _take_rows(projection, ids)
    if is_tied:
        embedding.weight = projection.weight
    else:
        _take_rows(embedding, ids)
    projection.out_features = embedding.num_embeddings = len(ids)
    embedding.padding_idx = None  # By an id that means something else now.
    model.config.get_text_config().vocab_size = len(ids)
    difference, scale = (_compute_logits(model, probe) - expected).abs().max(), expected.abs().max()
    if not difference <= scale * max(1e-4, 4 * torch.finfo(model.dtype).eps):
        found = f"with the student's vocabulary the teacher says something else: a logit moves by {difference:.2g}"
        raise ConfigError(Problem(where, found, "name a teacher of the student's own family"))


def _read_rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """How text is cut into tokens, without the ids."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = dict(state["model"])
    vocabulary = model.pop("vocab", None)
    scores = dict(vocabulary) if isinstance(vocabulary, list) else None
    rules = {name: state[name] for name in ("normalizer", "pre_tokenizer")}
    return {**rules, "merges": model, "scores of tokens": scores}


def _take_rows(module: Any, ids: torch.Tensor) -> None:
    """Leave of an embedding, or of an output projection, the rows of ``ids``."""
    for name in ("weight", "bias"):
        values = getattr(module, name, None)
        if values is not None:
            rows = values.detach()[ids.to(values.device)]
            setattr(module, name, nn.Parameter(rows, requires_grad=values.requires_grad))


@torch.no_grad()
def _compute_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0]
    return logits.float().cpu()
