"""Judges of answers: a reward model, or a language model with an editable prompt (LLM-as-a-judge).

A language model compares two answers in both orders, against position bias: a win in both orders is a verdict, and a
contradiction is a tie (Zheng et al. 2023, arXiv 2306.05685, section 3.4). A text without a verdict counts as
unparsable, never as a tie. Prompts are YAML files that a user can copy and edit, also those of ``recipes synthesize``.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from recipes_lib.config.values import read_yaml
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.evaluation.endpoint import Answerer, Chat, Endpoint, split_reasoning
from recipes_lib.evaluation.intervals import compute_interval
from recipes_lib.evaluation.judge_questions import Question, read_question

if TYPE_CHECKING:
    from recipes_lib.models.heads.scoring import RewardModel

Outcome = Literal["base", "other", "tie"]
Answers = Sequence[Sequence[str]]
"""For each question, the answers to its turns."""
PROMPTS: Final = Path(__file__).with_name("judge_prompts")
"""Shipped prompts: ``pairwise.yaml`` and ``grade.yaml``."""
_GRADE: Final = re.compile(r"\[\[\s*(-?\d+(?:\.\d+)?)\s*\]\]")
_PLACES: Final[tuple[Mapping[str, Outcome], ...]] = (
    {"first": "base", "second": "other", "tie": "tie"},
    # In the second order, the answer of the base is the second one.
    {"first": "other", "second": "base", "tie": "tie"},
)
"""Outcome of each verdict, in both orders."""
_TEMPLATE_FIELDS: Final = {"system": str, "user": str}


class Judgment(NamedTuple):
    """Verdict on two answers to a question.

    Attributes:
        winner: The better answer; ``tie`` also if the orders contradict each other; ``None`` without a verdict in one.
        orders: The winner with the base's answer first, and with the other's first; one entry for a reward model,
            which scores each answer separately.
        details: The judge's texts or the reasons of missing ones, or the two rewards.
        num_prompt_tokens: Tokens of the judge's prompts.
        num_tokens: Tokens of the judge's texts.
    """

    winner: Outcome | None
    orders: Sequence[Outcome | None]
    details: Sequence[Any]
    num_prompt_tokens: int = 0
    num_tokens: int = 0


def combine_orders(orders: Sequence[Outcome | None]) -> Outcome | None:
    """Return the common verdict of all orders; a tie if they contradict each other, ``None`` if one has no verdict."""
    if None in orders:
        return None
    return orders[0] if len(set(orders)) == 1 else "tie"


class Grade(NamedTuple):
    """Grade of an answer.

    Attributes:
        value: The grade, or a reward; ``None`` without one.
        text: The judge's text, or the reason of a missing one; empty for a reward model.
        num_prompt_tokens: Tokens of the judge's prompt.
        num_tokens: Tokens of the judge's text.
    """

    value: float | None
    text: str
    num_prompt_tokens: int = 0
    num_tokens: int = 0


@dataclass(frozen=True)
class RewardJudge:
    """A reward model as judge: the answer with the higher reward is better.

    Chats that exceed the model's positions have no verdict.

    Attributes:
        model: The reward model.
        identity: Name and hashes of the weights, which ``describe`` returns.
    """

    model: RewardModel
    identity: Mapping[str, Any]

    def describe(self) -> dict[str, Any]:
        """Return the model's name and hashes of its weights, as JSON values."""
        return dict(self.identity)

    def compare(
        self, questions: Sequence[Question], base: Answers, other: Answers, numbers: Sequence[int]
    ) -> list[Judgment]:
        """Compare two answers to each question; ``numbers``, the numbers of the questions, have no effect.

        Raises:
            ConfigError: As ``RewardModel.score``.
            DataError: As ``RewardModel.score``.
        """
        grades = (self.grade(questions, answers, numbers) for answers in (base, other))
        found = []
        for first, second in zip(*grades, strict=True):
            winner: Outcome | None = None
            if first.value is not None and second.value is not None:
                winner = "tie" if first.value == second.value else "base" if first.value > second.value else "other"
            found.append(Judgment(winner, [winner], [first.value, second.value]))
        return found

    def grade(self, questions: Sequence[Question], answers: Answers, numbers: Sequence[int]) -> list[Grade]:
        """Return the reward of each chat.

        Raises:
            ConfigError: As ``RewardModel.score``.
            DataError: As ``RewardModel.score``.
        """
        chats: list[Any] = [question.build_chat(turns) for question, turns in zip(questions, answers, strict=True)]
        # Without a chat template, a prompt and its answer are concatenated.
        if self.model.tokenizer.chat_template is None and all(len(chat) == 2 for chat in chats):
            chats = [(chat[0]["content"], chat[1]["content"]) for chat in chats]
        # `nan`: a chat that exceeds the positions must not end the comparison of the others.
        scores = self.model.score(chats, where=[f"question {question.id}" for question in questions], overlong="nan")
        return [Grade(None if math.isnan(score) else score, "") for score in scores]


@dataclass(frozen=True)
class PromptedJudge:
    """A language model as judge.

    Attributes:
        engine: The model.
        pairwise: Prompt file for comparisons, with ``system``, ``user`` and ``verdicts``.
        grading: Prompt file for grades, with ``system``, ``user`` and ``scale``.
    """

    engine: Answerer
    pairwise: Path = PROMPTS / "pairwise.yaml"
    grading: Path = PROMPTS / "grade.yaml"

    def describe(self) -> dict[str, Any]:
        """Return the settings of the model and both prompts, as JSON values.

        Raises:
            ConfigError: A prompt file is invalid.
        """
        pairwise, grading = self._load_pairwise(), self._load_grading()
        return {"judge": self.engine.describe(), "pairwise": pairwise, "grading": grading}

    def _load_pairwise(self) -> dict[str, Any]:
        found = load_prompt_file(self.pairwise, {**_TEMPLATE_FIELDS, "verdicts": dict})
        outcomes, verdicts = ("first", "second", "tie"), found["verdicts"] or {}
        is_valid = all(mark and verdict in outcomes for mark, verdict in verdicts.items())
        if not found["user"] or not verdicts or not is_valid:
            remedy = f"write `user`, and `verdicts` from marks to {', '.join(outcomes)}"
            raise ConfigError(Problem(str(self.pairwise), "has no prompt, or no verdicts", remedy))
        return found

    def _load_grading(self) -> dict[str, Any]:
        found = load_prompt_file(self.grading, {**_TEMPLATE_FIELDS, "scale": list})
        scale = found["scale"] or []
        is_range = len(scale) == 2 and all(isinstance(end, int | float) for end in scale) and scale[0] < scale[1]
        if not found["user"] or not is_range:
            remedy = "write `user`, and `scale: [1, 10]`, the lowest grade first"
            raise ConfigError(Problem(str(self.grading), "has no prompt, or no scale", remedy))
        return found

    def compare(
        self, questions: Sequence[Question], base: Answers, other: Answers, numbers: Sequence[int]
    ) -> list[Judgment]:
        """Compare two answers to each question in both orders.

        Args:
            questions: The questions.
            base: Answers of the base model.
            other: Answers of the other model.
            numbers: Number of each question, which determines the seed of the judge's texts.

        Raises:
            ConfigError: The prompt file is invalid, or the engine fails.
        """
        prompt, chats = self._load_pairwise(), list[Chat]()
        for question, one, two in zip(questions, base, other, strict=True):
            # The two orders of a question are adjacent: replies are processed in pairs below.
            for first, second in ((one, two), (two, one)):
                chats.append(_build_chat(prompt, self.pairwise, question, first=first, second=second))
        # Different seeds for the two orders.
        replies = self.engine.answer(chats, [2 * number + order for number in numbers for order in (0, 1)])
        judgments = []
        for pair in zip(replies[::2], replies[1::2], strict=True):
            verdicts = [parse_verdict(reply.text, prompt["verdicts"]) for reply in pair]
            orders = [outcomes.get(verdict or "") for verdict, outcomes in zip(verdicts, _PLACES, strict=True)]
            tokens = (sum(reply.num_prompt_tokens for reply in pair), sum(reply.num_tokens for reply in pair))
            judgments.append(Judgment(combine_orders(orders), orders, [reply.shown for reply in pair], *tokens))
        return judgments

    def grade(self, questions: Sequence[Question], answers: Answers, numbers: Sequence[int]) -> list[Grade]:
        """Grade an answer to each question; arguments as for ``compare``.

        Raises:
            ConfigError: The prompt file is invalid, or the engine fails.
        """
        prompt = self._load_grading()
        chats = [
            _build_chat(prompt, self.grading, question, answer=answer)
            for question, answer in zip(questions, answers, strict=True)
        ]
        return [
            Grade(parse_grade(reply.text, *prompt["scale"]), reply.shown, reply.num_prompt_tokens, reply.num_tokens)
            for reply in self.engine.answer(chats, numbers)
        ]


Judge = RewardJudge | PromptedJudge


def _build_chat(prompt: Mapping[str, Any], path: Path, question: Question, **answers: Sequence[str]) -> Chat:
    # Answers of files, samples and policies include reasoning, which is not judged.
    said = {name: [split_reasoning(text)[1] for text in turns] for name, turns in answers.items()}
    values = {"context": question.context, "turns": question.turns, "references": question.references, **said}
    user = {"role": "user", "content": render_prompt(prompt["user"], str(path), values)}
    if not prompt["system"]:
        return [user]
    return [{"role": "system", "content": render_prompt(prompt["system"], str(path), values)}, user]


def parse_verdict(text: str, verdicts: Mapping[str, str]) -> str | None:
    """Return the verdict in a judge's text; ``None`` if there is none, or several contradict each other.

    Args:
        text: The judge's text; its reasoning, before ``</think>``, is ignored.
        verdicts: Mark -> ``first``, ``second`` or ``tie``.

    Source: the rule of Arena-Hard, where contradictory marks are invalid.
    """
    # Longest first: a regular expression takes the first alternative that matches, and a mark can be a prefix.
    pattern = "|".join(re.escape(mark) for mark in sorted(verdicts, key=len, reverse=True))
    marks = re.findall(pattern, split_reasoning(text)[1])
    found = {verdicts[mark] for mark in marks}
    return found.pop() if len(found) == 1 else None


def parse_grade(text: str, lowest: float, highest: float) -> float | None:
    """Return the grade ``[[N]]`` in a judge's text; ``None`` without one, if several differ, or outside the scale."""
    found = {float(number) for number in _GRADE.findall(split_reasoning(text)[1])}
    grade = found.pop() if len(found) == 1 else None
    return grade if grade is not None and lowest <= grade <= highest else None


class WinRate(NamedTuple):
    """Win rate of the other model against the base model; a tie is half a win.

    Attributes:
        num_questions: Questions with a verdict.
        num_wins: Wins of the other model.
        num_ties: Ties, including contradictions between the orders.
        num_losses: Losses of the other model.
        num_unparsable: Questions without a verdict, which are excluded.
        win_rate: ``(wins + ties / 2) / questions``; ``None`` without questions.
        low: Lower end of the 95 % confidence interval of ``win_rate``.
        high: Upper end of this interval.
        position_agreement: Share of the questions with a verdict on which both orders agree; ``None`` for a reward
            model.
    """

    num_questions: int
    num_wins: int
    num_ties: int
    num_losses: int
    num_unparsable: int
    win_rate: float | None
    low: float | None
    high: float | None
    position_agreement: float | None


def compute_win_rate(judgments: Sequence[tuple[Outcome | None, Sequence[Outcome | None]]]) -> WinRate:
    """Return the win rate over judgments, given as pairs of ``winner`` and ``orders``.

    It is ``(1 + d) / 2`` for the mean ``d`` of +1 (win), 0 (tie) and -1 (loss), whose interval is that of
    ``compute_interval``.
    """
    counts = Counter(winner for winner, _ in judgments)
    # A reward model has one order only, and no position bias.
    swapped = [orders for winner, orders in judgments if winner is not None and len(orders) > 1]
    agreement = sum(len(set(orders)) == 1 for orders in swapped) / len(swapped) if swapped else None
    number = counts["other"] + counts["tie"] + counts["base"]
    found = (number, counts["other"], counts["tie"], counts["base"], counts[None])
    if not number:
        return WinRate(*found, None, None, None, agreement)
    # In any order, on which the interval does not depend.
    differences = [1.0] * counts["other"] + [0.0] * counts["tie"] + [-1.0] * counts["base"]
    low, high = compute_interval(np.array(differences))
    mean = (counts["other"] - counts["base"]) / number
    return WinRate(*found, (1 + mean) / 2, (1 + max(low, -1.0)) / 2, (1 + min(high, 1.0)) / 2, agreement)


def split_place(place: str) -> tuple[str, str] | None:
    """Split ``URL#NAME`` into the address of an endpoint and the name of a model; ``None`` for a folder or Hub id.

    Raises:
        ConfigError: ``#NAME`` is missing.
    """
    if not place.startswith(("http://", "https://")):
        return None
    url, _, name = place.partition("#")
    if not name:
        raise ConfigError(Problem(url, "does not name a model", f"write {url}#NAME"))
    return url, name


def load_reward_judge(name: str, *, device: str) -> RewardJudge:
    """Load a reward model as judge.

    Raises:
        ConfigError: As ``RewardModel.load``.
    """
    from recipes_lib.evaluation.answering import identify_weights
    from recipes_lib.models.heads.scoring import RewardModel, find_saved

    weights = identify_weights(*find_saved(name, None)[:2])
    return RewardJudge(RewardModel.load(name, device=device), {"model": name, "weights": weights})


def judge_grade(
    *, base_url: str, model: str, reference: str = "reference", prompt: str | None = None, **options: Any
) -> Callable[..., list[float | None]]:
    """Build a reward function: a judge's grade of each answer, from 0 (lowest) to 1 (highest).

    An answer without a grade has no reward (``None``). In a recipe: ``reward_funcs:
    ["recipes_lib.evaluation.judges:judge_grade(base_url='http://localhost:8000/v1', model='JUDGE')"]``.

    Args:
        base_url: Address of the judge's endpoint.
        model: Name of the judge at the endpoint.
        reference: Column with the right answer; may be missing in the dataset.
        prompt: Path of a prompt file; default: the shipped ``grade.yaml``.
        **options: Other attributes of ``Endpoint``.

    Raises:
        ConfigError: An attribute or the prompt file is invalid.
    """
    judge = PromptedJudge(Endpoint(base_url, model, **options), grading=Path(prompt or PROMPTS / "grade.yaml"))
    lowest, highest = judge.describe()["grading"]["scale"]

    def grade(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        questions = _read_prompts(prompts, columns.get(reference))
        grades = judge.grade(questions, [[_read_text(answer)] for answer in completions], range(len(questions)))
        return [None if found.value is None else (found.value - lowest) / (highest - lowest) for found in grades]

    return grade


def judge_preference(
    *, base_url: str, model: str, baseline: str = "reference", prompt: str | None = None, **options: Any
) -> Callable[..., list[float | None]]:
    """Build a reward function: 1 where a judge prefers the answer to that of a column, 0.5 for a tie, 0 otherwise.

    An answer without a verdict, or whose row has no answer to compare with, has no reward (``None``).

    Args:
        base_url: Address of the judge's endpoint.
        model: Name of the judge at the endpoint.
        baseline: Column with the answer to compare with.
        prompt: Path of a prompt file; default: the shipped ``pairwise.yaml``.
        **options: Other attributes of ``Endpoint``.

    Raises:
        ConfigError: An attribute or the prompt file is invalid.
    """
    judge = PromptedJudge(Endpoint(base_url, model, **options), pairwise=Path(prompt or PROMPTS / "pairwise.yaml"))
    judge.describe()  # Verifies the prompt file.

    def prefer(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        if baseline not in columns:
            raise KeyError(f"the dataset has no column {baseline!r}; name the baseline's by baseline='...'")
        # Rows without a baseline have no reward, and cost no request.
        known = [at for at, answer in enumerate(columns[baseline]) if answer]
        rewards: list[float | None] = [None] * len(prompts)
        if known:
            questions = _read_prompts([prompts[at] for at in known], None)
            base, other = ([[_read_text(column[at])] for at in known] for column in (columns[baseline], completions))
            values = {"other": 1.0, "tie": 0.5, "base": 0.0, None: None}
            for at, judgment in zip(known, judge.compare(questions, base, other, known), strict=True):
                rewards[at] = values[judgment.winner]
        return rewards

    return prefer


def _read_prompts(prompts: Sequence[Any], references: Sequence[Any] | None) -> list[Question]:
    references = references or [None] * len(prompts)
    rows = [{"prompt": prompt, "reference": right} for prompt, right in zip(prompts, references, strict=True)]
    return [read_question(row, number, f"prompt {number}") for number, row in enumerate(rows)]


def _read_text(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer[-1]["content"])


def load_prompt_file(path: Path, fields: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """Return the fields of a prompt file; missing ones are ``None``.

    Args:
        path: Path of a YAML file.
        fields: Allowed fields and their types.

    Raises:
        ConfigError: As ``read_yaml``, or it has unknown fields or fields of another type.
    """
    found = read_yaml(path)
    if not isinstance(found, dict):
        raise ConfigError(Problem(str(path), "is not a mapping", f"write {', '.join(fields)}"))
    problems = [
        Problem(str(path), f"unknown field `{name}`", f"the fields are {', '.join(fields)}")
        for name in found
        if name not in fields
    ]
    problems += [
        Problem(str(path), f"`{name}` is a {type(found[name]).__name__}", "see the shipped files for its form")
        for name, kind in fields.items()
        if found.get(name) is not None and not isinstance(found[name], kind)
    ]
    if problems:
        raise ConfigError(*problems)
    return {name: found.get(name) for name in fields}


def render_prompt(template: str, where: str, values: Mapping[str, Any]) -> str:
    """Return a rendered template; braces in values are not interpreted.

    Args:
        template: Jinja template, rendered in a sandbox.
        where: Place of the template, for errors.
        values: Name -> value.

    Raises:
        ConfigError: The template has a syntax error, names an unknown value, or fails with these values.
    """
    try:
        return str(_compile(template).render(**values)).strip()
    except Exception as error:  # A template is a program, which can raise anything.
        names = ", ".join(values)
        raise ConfigError(Problem(where, f"its template fails: {error}", f"the values are {names}")) from error


# Cached, because a judge renders the same few templates for each answer.
@functools.lru_cache(maxsize=256)
def _compile(template: str) -> Any:
    # StrictUndefined: a misspelt value is an error, not an empty text. The block options remove lines of tags.
    environment = SandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template)
