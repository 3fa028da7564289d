"""On-policy distillation: in some steps the student samples answers and trains on the teacher's distribution."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedConfig, TrainerCallback, TrainingArguments

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.masking import IGNORE_INDEX
from recipes_lib.losses.distillation import DistillationSums
from recipes_lib.models.generation import GenerateBackend, Sampling, mask_answers, read_stop_ids
from recipes_lib.models.inference import evaluating
from recipes_lib.models.loading import load_model_config
from recipes_lib.models.vocabulary import VocabularyMap
from recipes_lib.training.guards.preemption import LeftError, leave_if_asked
from recipes_lib.training.guards.step_facts import ROW_IDS
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.monitoring.callbacks import TermMetrics
from recipes_lib.training.trainers.arguments import build_autocast

ANSWERED: Final = "answers"
"""Under which a batch of the student's own answers carries how many there are, and how many ended by themselves."""

Batch = dict[str, Any]
Ids = npt.NDArray[np.int64]
Collate = Callable[[Sequence[Mapping[str, Any]]], Batch]


@dataclass(frozen=True, slots=True)
class Question:
    """A document of a batch as a prompt.

    Attributes:
        row: Its row in the batch.
        prompt: Its tokens before its last answer, never none.
        number: Told by all of its tokens: the same text has the same, wherever it is.
    """

    row: int
    prompt: Ids
    number: int


def read_questions(batch: Mapping[str, Any]) -> Iterator[Question]:
    """Yield the documents of a collated batch that have an answer: the last target tokens of a document.

    Args:
        batch: ``input_ids``, ``labels`` and ``position_ids``, ``(B, L)`` on the host; positions start anew at each
            document.
    """
    ids, labels, positions = (batch[name].numpy() for name in ("input_ids", "labels", "position_ids"))
    for row in range(len(ids)):
        bounds = [*np.flatnonzero(positions[row] == 0).tolist(), ids.shape[1]]
        for start, stop in itertools.pairwise(bounds):
            targets = np.flatnonzero(labels[row, start:stop] != IGNORE_INDEX)
            if len(targets):
                # An answer is a run of targets; of several turns the last one is answered.
                gaps = np.flatnonzero(np.diff(targets) > 1)
                first = int(targets[gaps[-1] + 1 if len(gaps) else 0])
                document = np.ascontiguousarray(ids[row, start:stop])
                # Padding is a separate document, so that the rest of the batch does not include it.
                digest = hashlib.blake2b(document.tobytes(), digest_size=8).digest()
                yield Question(row, document[:first], int.from_bytes(digest, "big"))


@dataclass(frozen=True, slots=True)
class OnPolicyAnswers:
    """Replaces the answers in batches of texts by the student's own.

    Attributes:
        lmbda: Share of steps.
        seed: With the step and a document it decides the answer: neither the batch around it nor the number of
            processes does, nor whether the run was stopped.
        response_length: Longest answer, in tokens.
        temperature: Divides the logits.
        num_tokens: Tokens that student and teacher have, the first of the vocabulary; no other is sampled.
        max_length: Tokens of a prompt with its answer that both models can read; ``None``: any number.
        batch_size: Prompts that are answered at once.
        precision: Gives the context in which products are computed.
        collate: Rows to a batch.
    """

    lmbda: float
    seed: int
    response_length: int
    temperature: float
    num_tokens: int
    max_length: int | None
    batch_size: int
    precision: Callable[[], Any]
    collate: Collate

    def is_due(self, step: int) -> bool:
        """Return whether step ``step``, from 0, is on-policy.

        On-policy steps are evenly spaced, so that in any window their share is as close to ``lmbda`` as possible; the
        seed sets the offset.
        """
        phase = float(np.random.default_rng(self.seed).random())
        # As Bresenham's lines: a step is due when the sum of the shares passes a whole number.
        return math.floor((step + 1) * self.lmbda + phase) > math.floor(step * self.lmbda + phase)

    def replace(self, student: Any, batch: Batch, step: int) -> Batch:
        """Return a batch in which the last answer of each document is the student's, and the only target.

        Documents without room for an answer are dropped. If none is left, the batch is unchanged and without targets;
        the same holds on a stop request, after which the step is not made.

        Args:
            student: Every process has all of its weights.
            batch: Collated rows.
            step: Number of the step in the run, from 0.

        Returns:
            The batch, with ``ANSWERED``: ``int64 (2,)``, answers and those that ended with a stop token.

        Source: ``tests/distillation/test_on_policy.py``.
        """
        WATCHDOG.enter("sampling answers")
        # The loader's device; the new batch is built on the host.
        batch = {name: part.cpu() if isinstance(part, torch.Tensor) else part for name, part in batch.items()}
        room = math.inf if self.max_length is None else self.max_length - self.response_length
        questions = [question for question in read_questions(batch) if len(question.prompt) <= room]
        try:
            answers, num_finished = self._answer(student, questions, step)
        except LeftError:
            answers, num_finished = [], 0
        counts = torch.tensor([len(answers), num_finished])
        if not answers:
            return {**batch, "labels": torch.full_like(batch["labels"], IGNORE_INDEX), ANSWERED: counts}
        rows = [
            _lay_out([pair for pair in zip(questions, answers, strict=True) if pair[0].row == row])
            for row in range(len(batch["input_ids"]))
        ]
        kept = {ROW_IDS: batch[ROW_IDS]} if ROW_IDS in batch else {}
        return {**self.collate(rows), **kept, ANSWERED: counts}

    def _answer(self, student: Any, questions: Sequence[Question], step: int) -> tuple[list[Ids], int]:
        """Return the answer to each prompt, with its stop token, and the number of finished answers."""
        stop_ids = read_stop_ids(student)
        sampling = Sampling(stop_ids, 0, self.response_length, self.temperature, leave_if_asked, self.num_tokens)
        backend = GenerateBackend(sampling, batch_size=self.batch_size, precision=self.precision)
        # Batches have prompts of similar length, which reduces padding; answers do not depend on the order.
        order = sorted(range(len(questions)), key=lambda at: len(questions[at].prompt))
        answers: dict[int, Ids] = {}
        num_finished = 0
        with evaluating(student):
            for start in range(0, len(order), self.batch_size):
                chunk = order[start : start + self.batch_size]
                asked = [questions[at] for at in chunk]
                uniforms = torch.from_numpy(np.stack([self._draw(step, question) for question in asked]))
                given = backend.generate(student, [question.prompt.tolist() for question in asked], uniforms)
                masks, finished = mask_answers(given.response_ids, stop_ids)
                num_finished += int(finished.sum())
                parts = (ids[mask].numpy() for ids, mask in zip(given.response_ids, masks, strict=True))
                answers.update(zip(chunk, parts, strict=True))
        return [answers[at] for at in range(len(questions))], num_finished

    def _draw(self, step: int, question: Question) -> npt.NDArray[np.float64]:
        return np.random.default_rng([self.seed, step, question.number]).random(self.response_length)


def _lay_out(pairs: Sequence[tuple[Question, Ids]]) -> dict[str, Any]:
    """Lay out the documents of a row with new answers, as a prepared row."""
    nothing = np.zeros(0, np.int64)
    documents = [np.concatenate([question.prompt, answer]) for question, answer in pairs]
    masks = [np.arange(len(question.prompt) + len(answer)) >= len(question.prompt) for question, answer in pairs]
    return {
        "input_ids": np.concatenate([nothing, *documents]),
        "loss_mask": np.concatenate([nothing.astype(np.bool_), *masks]),
        "seq_lengths": np.array([len(document) for document in documents], np.int64),
    }


def name_figures(kind: str, sums: DistillationSums, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the sums of a batch by the names under which their means are logged: ``KIND/nll``."""
    figures = {
        **parts,
        "nll": sums.nll_sum,
        "divergence": sums.divergence_sum,
        "teacher_nll": sums.teacher_nll_sum,
        "agreement": sums.num_agreed.float(),
    }
    return {f"{kind}/{name}": figure.detach() for name, figure in figures.items()}


class AnswerFigures:
    """Figures of on-policy steps, separate from those of texts."""

    def __init__(self) -> None:
        """Start without answers."""
        self._of_tokens, self._of_answers = TermMetrics(), TermMetrics()

    @property
    def callbacks(self) -> list[TrainerCallback]:
        """Callbacks that add the figures to a logged step."""
        return [self._of_tokens, self._of_answers]

    def add(self, sums: DistillationSums, answered: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        """Add a batch of this process; ``answered`` is its ``ANSWERED``, ``parts`` its layer losses."""
        self._of_tokens.add(name_figures("on_policy", sums, parts), sums.num_targets)
        # Means over tokens, and means over answers: they have other divisors.
        num_answers, num_finished = answered
        lengths = {"on_policy/length": sums.num_targets.float(), "on_policy/finished": num_finished.float()}
        self._of_answers.add(lengths, num_answers)


def prepare_answers(
    config: RecipeConfig,
    args: TrainingArguments,
    teacher_config: PreTrainedConfig,
    vocabulary: VocabularyMap,
    collate: Collate,
) -> OnPolicyAnswers | None:
    """Return the batch transform of on-policy steps; ``None`` if ``lmbda`` is 0.

    Args:
        config: The run.
        args: How many prompts are answered at once, the seed, the device and the precision.
        teacher_config: Configuration of the teacher.
        vocabulary: From ``map_teacher_vocabulary``.
        collate: Rows to a batch.
    """
    keys = config.distillation
    if not keys.lmbda:
        return None
    configs = load_model_config(config.model)[0], teacher_config
    limits = [getattr(each.get_text_config(), "max_position_embeddings", None) for each in configs]
    return OnPolicyAnswers(
        lmbda=keys.lmbda,
        seed=args.seed,
        response_length=config.rewards.response_length,
        temperature=keys.sampling_temperature,
        num_tokens=len(vocabulary.teacher_ids),
        max_length=min((limit for limit in limits if limit is not None), default=None),
        batch_size=args.per_device_eval_batch_size,
        precision=build_autocast(args),
        collate=collate,
    )
