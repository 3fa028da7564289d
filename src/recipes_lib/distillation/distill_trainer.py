"""Distillation trainer: the SFT trainer with cross-entropy plus divergence from a teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments

from recipes_lib.config.schema import DistillationConfig, LayersConfig, RecipeConfig
from recipes_lib.data.packed.training_data import TrainingData
from recipes_lib.distillation.layer_features import LayerDistillation
from recipes_lib.distillation.on_policy import ANSWERED, Collate, OnPolicyAnswers, prepare_answers
from recipes_lib.distillation.teacher_store import (
    TEACHER_FIELD,
    TeacherCollator,
    identify_store,
    load_teacher,
    read_store,
)
from recipes_lib.errors import DivergedError
from recipes_lib.losses.distillation import DistillationSums, Objective, TopLogps
from recipes_lib.models.attention.kernels import AttentionChoice
from recipes_lib.models.heads.loss_head import score_beside_record, score_beside_teacher
from recipes_lib.models.vocabulary import VocabularyMap
from recipes_lib.training.checkpoints.saver import Staged
from recipes_lib.training.layouts.fsdp import gathered, prepare_frozen
from recipes_lib.training.trainers.arguments import get_rounding_dtype
from recipes_lib.training.trainers.next_token_trainer import POSITIONS, SFTTrainer
from recipes_lib.training.trainers.recipe_trainer import Batch, BatchLoss

ROUNDING_UNITS: Final = 4
"""Multiple of the machine epsilon, in nats per target, that the divergence of a model from itself may reach by
rounding, as between weights of the student in float32 and of the teacher in bfloat16."""


@dataclass(frozen=True, slots=True)
class TeacherSource:
    """Source of the teacher's outputs: a model, or stored log-probabilities in the rows.

    Attributes:
        teacher: Teacher model; ``None`` if ``rows`` contain its stored log-probabilities.
        rows: Training rows.
        collate: Collator from rows to a batch.
        layers: Weights and layers of hidden-state and attention distillation.
        answers: Batch transform of on-policy steps; ``None`` for off-policy training only.
    """

    teacher: PreTrainedModel | None
    rows: Any
    collate: Collate
    layers: LayersConfig = field(default_factory=LayersConfig)
    answers: OnPolicyAnswers | None = None


class DistillationTrainer(SFTTrainer):
    """``SFTTrainer`` with the loss of ``compute_distillation``, averaged over the targets of the whole step.

    Source: ``tests/distillation/test_distill_trainer.py``, ``tests/distributed/test_distill.py``.
    """

    def __init__(
        self, *, teaching: TeacherSource, distillation: DistillationConfig, is_own_teacher: bool, **kwargs: Any
    ) -> None:
        """Initialise the trainer.

        Args:
            teaching: Result of ``prepare_teacher``; the teacher is neither optimised nor saved in checkpoints.
            distillation: Weights and temperature of the objective.
            is_own_teacher: Whether the student starts as a copy of its teacher, so that the first divergence must be 0.
            **kwargs: Arguments of ``SFTTrainer``.
        """
        super().__init__(data_collator=teaching.collate, train_dataset=teaching.rows, **kwargs)
        teacher = teaching.teacher
        self.objective: Objective = Objective(
            alpha=distillation.distillation_alpha,
            beta=distillation.distillation_beta,
            temperature=distillation.distillation_temperature,
        )
        self.answers = teaching.answers
        self.teacher: nn.Module | None = None
        # Stored log-probabilities are float16 (``RecordFormat``).
        self._teacher_dtype = torch.float16 if teacher is None else teacher.dtype
        # Before the teacher is sharded, which happens in place: ``verify_layers`` runs parts of the model.
        self.layers = LayerDistillation(teaching.layers, self.model, teacher, seed=self.args.seed)
        if teacher is not None:
            # Sharded like the student, and with its precision of matrix products.
            is_alike = teacher.config.model_type == self.model.config.model_type
            self.teacher = prepare_frozen(self.accelerator, teacher, is_compiled=is_alike)
        self._is_first_step = True
        self._is_own_teacher = is_own_teacher

    def list_frozen(self) -> list[Any]:
        """Return the teacher, unless its log-probabilities are read from files."""
        return [] if self.teacher is None else [self.teacher]

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor | None]:
        """Return the micro-batches of a step, of texts or of the student's own answers."""
        batches = super().get_batch_samples(epoch_iterator, num_batches, device)
        # Spike detection compares losses of one kind only: answers and texts have different levels.
        if self.answers is not None and self.answers.is_due(self.state.global_step):
            self.guard.inputs.kind = ANSWERED
        return batches

    def take_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """As ``RecipeTrainer``; in on-policy steps the student samples the answers."""
        answers, step = self.answers, self.state.global_step
        texts = super().take_batches(batches)
        if answers is None or not answers.is_due(step):
            yield from texts
            return
        student = extract_model_from_parallel(self.model_wrapped, keep_torch_compile=False)
        # Gathered once for all micro-batches: ranks generate different numbers of tokens, so that collectives during
        # generation would not match.
        with gathered(student):
            for batch in texts:
                yield answers.replace(student, batch, step)

    def score_batch(self, model: nn.Module, inputs: Batch) -> BatchLoss:
        """Return the weighted losses of the targets, all of which are sums over them."""
        labels, positions = inputs.pop("labels"), inputs.pop(POSITIONS, None)
        record, answered = inputs.pop(TEACHER_FIELD, None), inputs.pop(ANSWERED, None)
        with self.layers.capture_features(labels, inputs["position_ids"]) as compute_parts:
            if record is None:
                # On its own answers the student trains only on the teacher's distribution.
                objective = self.objective if answered is None else replace(self.objective, alpha=0.0)
                # The loader's target positions are those of the replaced texts.
                found = positions if answered is None else None
                output = score_beside_teacher(model, self.teacher, inputs, labels, objective, found)
            else:
                output = score_beside_record(model, TopLogps(**record), inputs, labels, self.objective, positions)
        parts = compute_parts()
        sums: DistillationSums = output.result
        if self._is_first_step:
            self._is_first_step = False
            # Not in a resumed run, whose student has been trained.
            if self.state.global_step == 0:
                dtypes = (get_rounding_dtype(self.model, self.args), self._teacher_dtype)
                dtype = min(dtypes, key=lambda dtype: dtype.itemsize)
                targets = "labels" if answered is None else "its answers"
                self.observer.progress.say(verify_first_sums(sums, dtype, targets, is_own_teacher=self._is_own_teacher))
        if answered is not None:
            num_answers, num_finished = answered
            lengths = {"on_policy/length": sums.num_targets.float(), "on_policy/finished": num_finished.float()}
            self.figures.add(lengths, num_answers)
        # Under other names, because the means of texts and of answers have different divisors.
        kind = "distillation" if answered is None else "on_policy"
        means = {"nll": sums.nll_sum, "divergence": sums.divergence_sum, "teacher_nll": sums.teacher_nll_sum}
        means |= {"agreement": sums.num_agreed.float(), **parts}
        figures = {f"{kind}/{name}": figure.detach() for name, figure in means.items()}
        loss_sum = sums.loss_sum + self.layers.weigh(parts)
        return BatchLoss(loss_sum, sums.num_targets, sums.num_targets, sums.num_correct, output.aux_loss, figures)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train with the layer projections attached to the student."""
        with self.layers.attached():
            return super().train(*args, **kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimizer, with the layer projections in a separate parameter group."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new:
            self.layers.split_group(optimizer)
        return optimizer

    def name_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the student's parameters by name, and the layer projections even while they are detached."""
        return {**super().name_parameters(), **self.layers.name_parameters()}

    def _stage(self, model: nn.Module, folder: str) -> Staged:
        """Write a checkpoint of the student with the projections beside it."""
        with self.layers.detached():
            staged = super()._stage(model, folder)
        return self.layers.add_to(staged, self._saver)

    def load_weights(self, checkpoint: Path, by_upstream: Callable[[], object]) -> None:
        """Load the student, whose files do not contain the projections, then the projections from a separate file."""
        with self.layers.detached():
            super().load_weights(checkpoint, by_upstream)
        self.layers.load(checkpoint)

    def build_stand_ins(self) -> dict[str, Any]:
        """As ``RecipeTrainer``; an uncounted pass is not the first step, and does not sample answers."""
        return super().build_stand_ins() | {"_is_first_step": False, "answers": None}


def prepare_teacher(
    config: RecipeConfig,
    data: TrainingData,
    attention: AttentionChoice,
    args: TrainingArguments,
    vocabulary: VocabularyMap,
    collate: Collate,
) -> TeacherSource:
    """Load the teacher, or open its stored log-probabilities.

    Args:
        config: Configuration of the run.
        data: Training rows and their manifest.
        attention: Attention kernel of the student, whose batch layout the teacher must support.
        args: Training arguments, for the precision of matrix products.
        vocabulary: Result of ``map_teacher_vocabulary``.
        collate: Collator from rows to the student's batch.

    Raises:
        ConfigError: As ``load_teacher`` or ``read_store``.
    """
    if config.distillation.teacher_top_k is None:
        teacher = load_teacher(config, attention, args, vocabulary)
        answers = prepare_answers(config, args, teacher.config, vocabulary, collate)
        return TeacherSource(teacher, data.train, collate, config.layers, answers)
    identity = identify_store(config, vocabulary, data.record)
    return TeacherSource(None, read_store(identity, data.train), TeacherCollator(collate, identity.format))


def verify_first_sums(sums: DistillationSums, dtype: torch.dtype, kind: str = "labels", *, is_own_teacher: bool) -> str:
    """Verify the sums of the first batch of a run, before any update.

    Args:
        sums: Sums of this process.
        dtype: Dtype to which the results are rounded.
        kind: ``labels`` for targets of texts; ``its answers`` for answers of the student, to which it assigns a higher
            likelihood than any teacher.
        is_own_teacher: Whether the divergence must be 0.

    Returns:
        One line for the log.

    Raises:
        DivergedError: The student is its own teacher, and their divergence exceeds rounding.
    """
    num_targets = max(1, int(sums.num_targets))
    divergence, nll, teacher_nll = (
        float(figure) / num_targets for figure in (sums.divergence_sum, sums.nll_sum, sums.teacher_nll_sum)
    )
    allowed = ROUNDING_UNITS * torch.finfo(dtype).eps
    # Negated, so that NaN fails too.
    if is_own_teacher and not abs(divergence) <= allowed:
        raise DivergedError(
            f"the student is its own teacher, but before the first update their divergence is {divergence:.3g} nats, "
            f"more than rounding ({allowed:.1g}). Dropout is on, or the two read different tokens"
        )
    line = f"step 0: loss on {kind} in nats: student {nll:.3f}, teacher {teacher_nll:.3f}, divergence {divergence:.3g}"
    if kind == "labels" and teacher_nll > nll:
        line += "; the teacher predicts these texts worse than the student: check that it is the right one"
    return line
