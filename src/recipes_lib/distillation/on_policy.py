"""On-policy distillation: in some steps the student samples the answers that the teacher scores."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import send_to_device
from transformers import PreTrainedConfig, TrainingArguments

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.packed.collators import IGNORE_INDEX
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.generation import GenerateBackend, Sampling, mask_answers, read_stop_ids, sample_answers
from recipes_lib.models.heads.scoring import read_positions
from recipes_lib.models.inference import evaluating
from recipes_lib.models.loading import load_model_config
from recipes_lib.models.vocabulary import VocabularyMap
from recipes_lib.stopping import StopPendingError
from recipes_lib.training.guards.preemption import raise_if_stop_pending
from recipes_lib.training.guards.step_facts import ROW_IDS
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.trainers.arguments import build_autocast

ANSWERED: Final = "answers"
"""Key of an on-policy batch for ``int64 (2,)``: its number of answers, and of those that end with a stop token."""

Batch = dict[str, Any]
Ids = npt.NDArray[np.int64]
Collate = Callable[[Sequence[Mapping[str, Any]]], Batch]


@dataclass(frozen=True, slots=True)
class Question:
    """A document of a batch as a prompt.

    Attributes:
        row: Row of the batch that contains the document.
        prompt: Token ids before the last answer, at least one.
        number: Hash of the document's tokens, which seeds the answer independently of its place in the batch.
    """

    row: int
    prompt: Ids
    number: int


def read_questions(batch: Mapping[str, Any]) -> Iterator[Question]:
    """Yield the documents of a collated batch that have an answer, which is the last run of targets.

    Args:
        batch: ``input_ids``, ``labels`` and ``position_ids``, ``int64 (B, L)`` on the host; positions restart at each
            document.
    """
    ids, labels, positions = (batch[name].numpy() for name in ("input_ids", "labels", "position_ids"))
    for row in range(len(ids)):
        bounds = [*np.flatnonzero(positions[row] == 0).tolist(), ids.shape[1]]
        for start, stop in itertools.pairwise(bounds):
            targets = np.flatnonzero(labels[row, start:stop] != IGNORE_INDEX)
            if len(targets):
                # Targets of different turns are separated by a gap; the answer starts after the last gap.
                gaps = np.flatnonzero(np.diff(targets) > 1)
                first = int(targets[gaps[-1] + 1 if len(gaps) else 0])
                document = np.ascontiguousarray(ids[row, start:stop])
                # Positions restart at padding too, so that the document does not include it.
                digest = hashlib.blake2b(document.tobytes(), digest_size=8).digest()
                yield Question(row, document[:first], int.from_bytes(digest, "big"))


@dataclass(frozen=True, slots=True)
class OnPolicyAnswers:
    """Batch transform that replaces the last answer of each document by a sample of the student.

    Attributes:
        lmbda: Fraction of on-policy steps, in ``[0, 1]``.
        seed: Seed of the answers. An answer depends on the seed, the step and its document only, not on the batch, the
            number of processes or interruptions of the run.
        sampling: Length, temperature and vocabulary of the answers; stop tokens are those of the student.
        max_length: Maximum length of prompt and answer together for both models; infinite without a limit.
        batch_size: Prompts per generation batch.
        precision: Factory of the autocast context of generation.
        collate: Collator from rows to a batch.
    """

    lmbda: float
    seed: int
    sampling: Sampling
    max_length: float
    batch_size: int
    precision: Callable[[], Any]
    collate: Collate

    def is_due(self, step: int) -> bool:
        """Return whether step ``step``, counted from 0, is on-policy.

        On-policy steps are evenly spaced, so that in any window their share is as close to ``lmbda`` as possible; the
        seed sets the offset.
        """
        # The same for all steps of a run, resumed ones included.
        phase = float(np.random.default_rng(self.seed).random())
        # As in Bresenham's line algorithm: a step is due when the sum of lmbda over steps passes a whole number.
        return math.floor((step + 1) * self.lmbda + phase) > math.floor(step * self.lmbda + phase)

    def replace(self, student: Any, batch: Batch, step: int) -> Batch:
        """Return a batch in which the student's answer replaces the last answer of each document, as its only target.

        Documents too long for an answer are dropped. If none is left, or on a stop request, after which the step is not
        made, the batch keeps its tokens and has no targets.

        Args:
            student: Student with all of its weights on every process.
            batch: Collated rows.
            step: Number of the step in the run, from 0.

        Returns:
            The batch, with ``ANSWERED``: ``int64 (2,)``, the number of answers and of those that end with a stop token.

        Source: ``tests/distillation/test_on_policy.py``.
        """
        # Tokens are read and rows are built on the host; the trainer moves the result to the device again.
        batch = send_to_device(batch, "cpu")
        room = self.max_length - self.sampling.response_length
        questions = [question for question in read_questions(batch) if len(question.prompt) <= room]
        try:
            with WATCHDOG.during("sampling answers"):
                answers, num_finished = self._answer(student, questions, step)
        # Sampling needs no collective, so that a rank can stop it alone; the step is then not made.
        except StopPendingError:
            answers, num_finished = [], 0
        counts = torch.tensor([len(answers), num_finished])
        if not answers:
            return {**batch, "labels": torch.full_like(batch["labels"], IGNORE_INDEX), ANSWERED: counts}
        rows = [
            _lay_out([pair for pair in zip(questions, answers, strict=True) if pair[0].row == row])
            for row in range(len(batch["input_ids"]))
        ]
        row_ids = {ROW_IDS: batch[ROW_IDS]} if ROW_IDS in batch else {}
        return {**self.collate(rows), **row_ids, ANSWERED: counts}

    def _answer(self, student: Any, questions: Sequence[Question], step: int) -> tuple[list[Ids], int]:
        """Return the answer to each prompt with its stop token, and the number of answers that end with one.

        Raises:
            StopPendingError: A stop request is pending.
        """
        stop_ids = read_stop_ids(student.generation_config)
        sampling = dataclasses.replace(self.sampling, stop_ids=stop_ids)
        backend = GenerateBackend(sampling, batch_size=self.batch_size, precision=self.precision)
        prompts = [question.prompt.tolist() for question in questions]
        seeds = [(self.seed, step, question.number) for question in questions]
        with evaluating(student):
            generated = sample_answers(backend, student, prompts, seeds, sampling)
        masks, finished = mask_answers(generated.response_ids, stop_ids)
        answers = [ids[mask].numpy() for ids, mask in zip(generated.response_ids, masks, strict=True)]
        return answers, int(finished.sum())


def _lay_out(pairs: Sequence[tuple[Question, Ids]]) -> dict[str, Any]:
    """Return the documents of a row with their new answers, in the format of a prepared row."""
    # Concatenated first, because a row may have no documents.
    empty = np.zeros(0, np.int64)
    documents = [np.concatenate([question.prompt, answer]) for question, answer in pairs]
    masks = [np.arange(len(question.prompt) + len(answer)) >= len(question.prompt) for question, answer in pairs]
    return {
        "input_ids": np.concatenate([empty, *documents]),
        "loss_mask": np.concatenate([empty.astype(np.bool_), *masks]),
        "seq_lengths": np.array([len(document) for document in documents], np.int64),
    }


def find_positions(config: RecipeConfig, teacher_config: PreTrainedConfig) -> float:
    """Return the positions that student and teacher both have for prompt and answer; infinite without a limit.

    Raises:
        ConfigError: They have none for a prompt before an answer of ``response_length`` tokens.
    """
    length = config.rewards.response_length
    positions = min(map(read_positions, (load_model_config(config.model)[0], teacher_config)))
    # Otherwise every document would be dropped, and on-policy steps would train on nothing.
    if positions <= length:
        found = f"{length} tokens leave no room for a prompt in the {positions} positions of student and teacher"
        raise ConfigError(Problem("response_length", found, f"write less than {positions}"))
    return positions


def prepare_answers(
    config: RecipeConfig,
    args: TrainingArguments,
    teacher_config: PreTrainedConfig,
    vocabulary: VocabularyMap,
    collate: Collate,
) -> OnPolicyAnswers | None:
    """Return the batch transform of on-policy steps; ``None`` if ``lmbda`` is 0.

    Args:
        config: Configuration of the run.
        args: Training arguments: ``per_device_eval_batch_size`` prompts per batch, seed, device and precision.
        teacher_config: Configuration of the teacher.
        vocabulary: Result of ``map_teacher_vocabulary``.
        collate: Collator from rows to a batch.

    Raises:
        ConfigError: As ``find_positions``.
    """
    keys, length = config.distillation, config.rewards.response_length
    if not keys.lmbda:
        return None
    return OnPolicyAnswers(
        lmbda=keys.lmbda,
        seed=args.seed,
        # Larger ids than those of the student's tokens are not sampled.
        sampling=Sampling((), 0, length, keys.sampling_temperature, raise_if_stop_pending, len(vocabulary)),
        max_length=find_positions(config, teacher_config),
        batch_size=args.per_device_eval_batch_size,
        precision=build_autocast(args),
        collate=collate,
    )
