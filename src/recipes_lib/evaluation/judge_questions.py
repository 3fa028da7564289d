"""Questions for judges and their answers, in the file formats of MT-Bench, Arena-Hard, AlpacaEval and chat datasets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from recipes_lib.errors import DataError, Problem, collecting, list_first, raise_problems
from recipes_lib.evaluation.endpoint import Answerer, Message, split_reasoning
from recipes_lib.files import read_lines

_IDS: Final = ("question_id", "uid", "id")
_TEXTS: Final = ("prompt", "question", "instruction")
_ANSWERS: Final = ("answers", "answer", "output", "completion", "response")
MAX_TURNS: Final = 64
"""Turns of a question; the seed of an answer counts them."""
_SHAPES: Final = "write `turns`, `prompt`, `question`, `instruction` or `messages`"
_ANSWER_SHAPES: Final = "write `choices`, `messages`, `answers`, `output`, `answer`, `completion` or `response`"


class Question(NamedTuple):
    """What is asked.

    Attributes:
        id: Its id; without one, the number of its row.
        category: ``None`` without one.
        context: Messages before the first turn, a system prompt among them.
        turns: The user's turns, each answered before the next one is asked.
        references: Right answers to the turns; may be empty.
    """

    id: str
    category: str | None
    context: Sequence[Message]
    turns: Sequence[str]
    references: Sequence[str] = ()

    def build_chat(self, answers: Sequence[str] = ()) -> list[Message]:
        """Return the chat up to the turn after these answers; with all answers, the whole of it."""
        chat = list(self.context)
        for at, turn in enumerate(self.turns[: len(answers) + 1]):
            chat.append({"role": "user", "content": turn})
            if at < len(answers):
                chat.append({"role": "assistant", "content": answers[at]})
        return chat


def read_question(columns: Mapping[str, Any], number: int, where: str) -> Question:
    """Return the question in a row.

    Args:
        columns: ``turns`` (MT-Bench, Arena-Hard), ``prompt`` (a text or messages), ``question``, ``instruction`` with
            or without ``input``, or ``messages``, whose last answer is the reference.
        number: Of the row.
        where: Its place, for errors.

    Raises:
        DataError: There is no question in it.
    """
    context: list[Message] = []
    references = [text for text in _to_texts(columns.get("reference")) if text]
    texts = next(([columns[name]] for name in _TEXTS if isinstance(columns.get(name), str)), [])
    messages: Any = columns.get("messages") or columns.get("prompt")
    if columns.get("turns"):
        texts = _to_texts(columns["turns"])
    elif texts and columns.get("input"):
        texts = [f"{texts[0]}\n\n{columns['input']}"]
    elif not texts and _is_chat(messages):
        given = list(messages)
        if given[-1]["role"] == "assistant":
            references = references or [str(given.pop()["content"])]
        context, texts = given[:-1], [str(given[-1]["content"])] if given else []
    if not texts or not all(text.strip() for text in texts):
        raise DataError(Problem(where, "has no question", _SHAPES))
    category = columns.get("category")
    return Question(_read_id(columns, number), None if category is None else str(category), context, texts, references)


def read_answers(columns: Mapping[str, Any], where: str) -> list[str]:
    """Return the answers in a row, one for each turn.

    Args:
        columns: ``choices`` with ``turns`` (MT-Bench, Arena-Hard), ``messages``, ``answers``, or a text.
        where: Its place, for errors.

    Raises:
        DataError: There is none.
    """
    choices, messages = columns.get("choices"), columns.get("messages") or ()
    answers = next((_to_texts(columns[name]) for name in _ANSWERS if columns.get(name) is not None), [])
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        answers = _to_texts(choices[0].get("turns"))
    elif _is_chat(messages):
        answers = [text for turn in messages if turn["role"] == "assistant" for text in _to_texts(turn["content"])]
    if not answers:
        raise DataError(Problem(where, "has no answer", _ANSWER_SHAPES))
    return answers


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and "role" in turn and "content" in turn for turn in value)
    )


def _to_texts(value: Any) -> list[str]:
    """Texts of a text, of objects with ``content`` or ``answer``, or of a list of these."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return _to_texts(value.get("content", value.get("answer")))
    return [text for one in value for text in _to_texts(one)] if isinstance(value, list) else []


def _read_id(columns: Mapping[str, Any], number: int) -> str:
    return str(next((columns[name] for name in _IDS if columns.get(name) is not None), number))


def load_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Read a file of questions, JSON Lines.

    Args:
        path: The file.
        limit: The first ones; ``None``: all.

    Raises:
        DataError: It cannot be read, rows have no question, or two have one id; all of them.
    """
    found, problems = list[Question](), list[Problem]()
    for number, where, columns in _read_rows(path):
        if limit is not None and len(found) == limit:
            break
        with collecting(problems):
            found.append(read_question(columns, number, where))
    raise_problems([*problems, *_find_repeated([question.id for question in found], path)], str(path))
    return found


def load_answers(path: Path, questions: Sequence[Question]) -> list[list[str]]:
    """Read the answers to questions from a file, JSON Lines, by their ids.

    Raises:
        DataError: It cannot be read, answers are missing or repeated, or have fewer turns than their question.
    """
    rows = list(_read_rows(path))
    ids = [_read_id(columns, number) for number, _, columns in rows]
    asked = {question.id: len(question.turns) for question in questions}
    found, problems = dict[str, list[str]](), list(_find_repeated(ids, path))
    for name, (_, where, columns) in zip(ids, rows, strict=True):
        if name not in asked:
            continue
        with collecting(problems):
            found[name] = read_answers(columns, where)
            if len(found[name]) != asked[name]:
                told = f"{len(found[name])} answers to a question of {asked[name]} turns"
                problems.append(Problem(where, told, "write an answer for each turn"))
    if missing := [question.id for question in questions if question.id not in ids]:
        told = f"{len(missing):,} of {len(questions):,} questions have no answer: {list_first(missing)}"
        problems.append(Problem(str(path), told, "write answers with the `question_id` of each question"))
    raise_problems(problems, str(path))
    return [found[question.id] for question in questions]


def ask_questions(engine: Answerer, questions: Sequence[Question], numbers: Iterable[int]) -> list[list[str]]:
    """Return a model's answers to each turn of questions.

    Args:
        engine: The model.
        questions: Several, whose turns are asked together.
        numbers: Of the questions.

    Raises:
        DataError: A question cannot be answered.
    """
    answers: list[list[str]] = [[] for _ in questions]
    places = list(numbers)
    for turn in range(max(len(question.turns) for question in questions)):
        open_ = [at for at, question in enumerate(questions) if turn < len(question.turns)]
        chats = [questions[at].build_chat(answers[at]) for at in open_]
        # All open questions of a turn together; each turn of each question has a number of its own.
        replies = engine.answer(chats, [places[at] * MAX_TURNS + turn for at in open_])
        failed = []
        for at, reply in zip(open_, replies, strict=True):
            answers[at].append(split_reasoning(reply.text)[1])  # It is neither judged nor read in the next turn.
            if reply.error is not None:
                found = f"cannot be answered: {reply.error}"
                failed.append(Problem(f"question {questions[at].id}", found, "remove it, or change lengths"))
        # All of the turn at once, and before the next turn costs anything.
        raise_problems(failed, "questions")
    return answers


def _read_rows(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield number, place and columns of each row.

    Raises:
        DataError: The file is missing or empty, or a line is not a JSON object.
    """
    number = -1
    for number, row in enumerate(read_lines(path)):
        where = f"{path}:{number + 1}"
        if row is None:
            raise DataError(Problem(where, "is not a JSON object", "write one object on each line"))
        yield number, where, row
    if number < 0:
        raise DataError(Problem(str(path), "is missing or empty", "name a file of JSON Lines"))


def _find_repeated(ids: Sequence[str], path: Path) -> Iterator[Problem]:
    if repeated := [name for name, count in Counter(ids).items() if count > 1]:
        yield Problem(str(path), f"ids stand in several rows: {list_first(repeated)}", "give each row its own id")
