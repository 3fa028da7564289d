"""The teacher model: loaded frozen, mapped to the student's vocabulary, verified on the student's batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from recipes_lib.config.schema import RecipeConfig, TokensConfig
from recipes_lib.errors import ConfigError
from recipes_lib.losses.distillation import (
    DistillationSums,
    DistillationTargets,
    Objective,
    TeacherHead,
    TopLogps,
    compute_distillation,
    compute_top_logps,
)
from recipes_lib.models.attention.kernels import AttentionChoice, choose_attention, prove_isolation
from recipes_lib.models.heads.loss_head import HeadOutput, add_loss_head, verify_loss_head
from recipes_lib.models.loading import choose_teacher, load_causal_lm, load_model_config, load_tokenizer
from recipes_lib.models.parallel.zero3 import zero3_init_disabled
from recipes_lib.models.vocabulary import VocabularyMap, adopt_vocabulary, map_vocabulary
from recipes_lib.training.trainers.trained_model import TEACHER


def map_teacher_vocabulary(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase) -> VocabularyMap:
    """Compare the teacher's tokenizer with the student's, before any weight is loaded.

    Raises:
        ConfigError: As ``map_vocabulary``; or the teacher's tokenizer cannot be loaded.
    """
    where = config.provenance.get(TEACHER, TEACHER)
    try:
        other = load_tokenizer(choose_teacher(config), TokensConfig(eos_token=tokenizer.eos_token))
    except ConfigError as error:
        raise ConfigError(*(replace(problem, where=where) for problem in error.problems)) from error
    return map_vocabulary(tokenizer, other, where)


def load_teacher(
    config: RecipeConfig, attention: AttentionChoice, args: TrainingArguments, vocabulary: VocabularyMap
) -> PreTrainedModel:
    """Load the teacher: frozen, in evaluation mode, reading and predicting the student's tokens.

    Args:
        config: The run.
        attention: Of the student, whose batches the teacher reads.
        args: Precision of the products.
        vocabulary: From ``map_teacher_vocabulary``.

    Raises:
        ConfigError: It cannot be loaded, cannot read batches so laid out, has another vocabulary than its tokenizer, or
            an output projection that is unknown here.
    """
    chosen, where = choose_teacher(config), config.provenance.get(TEACHER, TEACHER)
    try:
        model_config, _ = load_model_config(chosen)
        requested = replace(chosen, attn_implementation=attention.implementation)
        choose_attention(requested, model_config, args, packing=config.tokens.packing, flattens=True)
        # Its rows are put into the student's order, which nobody could who has a share of them.
        with zero3_init_disabled():
            teacher = load_causal_lm(chosen, attention.implementation)
        teacher.requires_grad_(False)
        teacher.train(False)
        adopt_vocabulary(teacher, vocabulary, where)
        add_loss_head(teacher)
        verify_loss_head(teacher)
        if config.tokens.packing or attention.layout == "flat":
            prove_isolation(teacher, attention.layout)
    except ConfigError as error:
        raise ConfigError(*(replace(problem, where=where) for problem in error.problems)) from error
    return teacher


def is_own_teacher(config: RecipeConfig) -> bool:
    """Return whether a student begins as a copy of its teacher."""
    teacher, student = choose_teacher(config), config.model
    return (teacher.model_name_or_path, teacher.model_revision) == (student.model_name_or_path, student.model_revision)


def score_beside_teacher(
    student: Any, teacher: Any, inputs: Mapping[str, Any], labels: Tensor, objective: Objective
) -> HeadOutput:
    """Run both models on a batch and sum the objective over its targets.

    The student is run inside the call of the teacher's output projection, so that the weights of both are gathered
    there by whatever shards them, while the logits of a chunk are made; nothing of the teacher's is kept for backward.

    Args:
        student: A model with a loss head, as it is trained.
        teacher: A frozen one, with at most the student's vocabulary.
        inputs: ``input_ids`` and what else both models take.
        labels: ``int64 (B, L)``, unshifted, negative where there is no target.
        objective: The loss.

    Returns:
        ``result`` is a ``DistillationSums``.

    Source: ``tests/distillation/test_distillation.py``.
    """
    is_target = labels[:, 1:] >= 0
    outputs: list[HeadOutput] = []

    def lend(hidden: Tensor, weight: Tensor, **options: Any) -> None:
        head = TeacherHead(hidden[:, :-1][is_target], weight, **options)
        # Not returned through the teacher, whose hooks would wait for a backward pass of its own.
        outputs.append(score_beside_record(student, head, inputs, labels, objective))

    teacher(**inputs, head=lend)
    return outputs[0]


def score_beside_record(
    student: Any, teacher: TeacherHead | TopLogps, inputs: Mapping[str, Any], labels: Tensor, objective: Objective
) -> HeadOutput:
    """As ``score_beside_teacher``, where it is known what the teacher says of the targets, row by row."""
    is_target = labels[:, 1:] >= 0
    supervision = DistillationTargets(labels[:, 1:][is_target], teacher, objective)

    def score(hidden: Tensor, weight: Tensor, **options: Any) -> DistillationSums:
        sums: DistillationSums = compute_distillation(hidden[:, :-1][is_target], weight, supervision, **options)
        return sums

    output: HeadOutput = student(**inputs, head=score)
    return output


@torch.no_grad()
def ask_teacher(teacher: Any, inputs: Mapping[str, Any], labels: Tensor, *, k: int, temperature: float) -> TopLogps:
    """Return what a teacher says of the targets of a batch, row by row: its ``k`` likeliest tokens.

    Args:
        teacher: As for ``score_beside_teacher``.
        inputs: As for ``score_beside_teacher``.
        labels: As for ``score_beside_teacher``.
        k: At most the teacher's vocabulary.
        temperature: Divides the logits.
    """
    is_target = labels[:, 1:] >= 0

    def read(hidden: Tensor, weight: Tensor, **options: Any) -> TopLogps:
        targets = labels[:, 1:][is_target]
        return compute_top_logps(hidden[:, :-1][is_target], weight, targets, k=k, temperature=temperature, **options)

    top: TopLogps = teacher(**inputs, head=read).result
    return top
