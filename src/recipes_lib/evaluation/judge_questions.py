"""Questions for judges and their answers, in the file formats of MT-Bench, Arena-Hard, AlpacaEval and chat datasets."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from recipes_lib.errors import DataError, Problem, collect_problems, list_first, raise_problems
from recipes_lib.evaluation.endpoint import Answerer, Message, split_reasoning
from recipes_lib.files import read_json, read_lines

_IDS: Final = ("question_id", "uid", "id")
_TEXTS: Final = ("prompt", "question", "instruction")
_ANSWERS: Final = ("answers", "answer", "output", "completion", "response")
MAX_TURNS: Final = 64
"""Numbers reserved for the answers to a question, from which their seeds are computed."""
_SHAPES: Final = "write `turns`, `prompt`, `question`, `instruction` or `messages`"
_ANSWER_SHAPES: Final = "write `choices`, `messages`, `answers`, `output`, `answer`, `completion` or `response`"

_NumberedRow = tuple[int, str, dict[str, Any]]


class Question(NamedTuple):
    """A question of one or several turns.

    Attributes:
        id: Id of the row; its number if it has none.
        category: Category of the question; ``None`` without one.
        context: Messages before the first turn, such as a system prompt.
        turns: Messages of the user, each sent after the answer to the previous one.
        references: Right answers to the turns, empty for one without; there may be fewer.
    """

    id: str
    category: str | None
    context: Sequence[Message]
    turns: Sequence[str]
    references: Sequence[str] = ()

    def build_chat(self, answers: Sequence[str] = ()) -> list[Message]:
        """Return the chat with ``answers`` to the first turns, without reasoning, up to the next unanswered turn."""
        chat = list(self.context)
        for at, turn in enumerate(self.turns[: len(answers) + 1]):
            chat.append({"role": "user", "content": turn})
            if at < len(answers):
                chat.append({"role": "assistant", "content": split_reasoning(answers[at])[1]})
        return chat


def read_question(columns: Mapping[str, Any], number: int, where: str) -> Question:
    """Return the question in a row.

    Args:
        columns: ``turns`` (MT-Bench, Arena-Hard), ``prompt`` (a text, texts of turns, or messages), ``question``,
            ``instruction`` with or without ``input``, or ``messages``; a final answer in messages is the reference.
        number: Number of the row.
        where: Place of the row, for errors.

    Raises:
        DataError: The row has no question.
    """
    context: list[Message] = []
    # An empty text holds the place of a turn without a reference.
    references = found if any(found := _to_texts(columns.get("reference"))) else []
    texts = next(([columns[name]] for name in _TEXTS if isinstance(columns.get(name), str)), [])
    messages: Any = columns.get("messages") or columns.get("prompt")
    if columns.get("turns"):
        texts = _to_texts(columns["turns"])
    elif texts and columns.get("input"):
        texts = [f"{texts[0]}\n\n{columns['input']}"]
    elif not texts and _is_chat(messages):
        chat = list(messages)
        if chat[-1]["role"] == "assistant":
            answer = "".join(_to_texts(chat.pop()["content"]))
            references = references or [answer]
        # A content is a text, or a list of parts with a text each.
        context, texts = chat[:-1], ["".join(_to_texts(chat[-1]["content"]))] if chat else []
    elif not texts and isinstance(messages, list) and all(isinstance(turn, str) for turn in messages):
        texts = messages
    if not texts or not all(text.strip() for text in texts):
        raise DataError(Problem(where, "has no question", _SHAPES))
    category = columns.get("category")
    return Question(_read_id(columns, number), None if category is None else str(category), context, texts, references)


def read_answers(columns: Mapping[str, Any], where: str) -> list[str]:
    """Return the answers in a row, one for each turn.

    Args:
        columns: ``choices`` with ``turns`` (MT-Bench, Arena-Hard), ``messages``, ``answers``, or a text.
        where: Place of the row, for errors.

    Raises:
        DataError: The row has no answer.
    """
    choices, messages = columns.get("choices"), columns.get("messages") or ()
    answers = next((_to_texts(columns[name]) for name in _ANSWERS if columns.get(name) is not None), [])
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        answers = _to_texts(choices[0].get("turns"))
    elif _is_chat(messages):
        answers = ["".join(_to_texts(turn["content"])) for turn in messages if turn["role"] == "assistant"]
    if not answers:
        raise DataError(Problem(where, "has no answer", _ANSWER_SHAPES))
    return answers


def _is_chat(value: Any) -> bool:
    turns = value if isinstance(value, list) else []
    return bool(turns) and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in turns)


def _to_texts(value: Any) -> list[str]:
    """Return the texts of a string or number, of an object with ``content``, ``answer`` or ``text``, or of a list."""
    if isinstance(value, str | int | float):
        return [str(value)]
    if isinstance(value, dict):
        return _to_texts(value.get("content", value.get("answer", value.get("text"))))
    return [text for item in value for text in _to_texts(item)] if isinstance(value, list) else []


def _read_id(columns: Mapping[str, Any], number: int) -> str:
    return str(next((columns[name] for name in _IDS if columns.get(name) is not None), number))


def load_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Read a JSON Lines file of questions.

    Args:
        path: Path of the file.
        limit: Number of rows to read; ``None`` for all.

    Raises:
        DataError: The file cannot be read, rows have no question, or several rows have the same id. All problems are
            reported together.
    """
    found, problems = list[Question](), list[Problem]()
    for number, where, columns in _read_rows(path):
        if limit is not None and len(found) == limit:
            break
        with collect_problems(problems):
            found.append(read_question(columns, number, where))
    raise_problems([*problems, *_find_repeated([question.id for question in found], path)], str(path))
    return found


def load_answers(path: Path, questions: Sequence[Question]) -> list[list[str]]:
    """Read the answers to ``questions``, matched by id or, if rows have none, by row, from a JSON Lines file.

    Raises:
        DataError: The file cannot be read, answers are missing or repeated, their number is not that of the turns, or
            a row without an id is about another question.
    """
    rows = list(_read_rows(path))
    ids = [_read_id(columns, number) for number, _, columns in rows]
    num_turns = {question.id: len(question.turns) for question in questions}
    answers, problems = dict[str, list[str]](), [*_find_repeated(ids, path), *_find_misplaced(rows, questions)]
    for name, (_, where, columns) in zip(ids, rows, strict=True):
        if name not in num_turns:
            continue
        with collect_problems(problems):
            answers[name] = read_answers(columns, where)
            if len(answers[name]) != num_turns[name]:
                found = f"{len(answers[name])} answers to a question of {num_turns[name]} turns"
                problems.append(Problem(where, found, "write an answer for each turn"))
    answered = set(ids)
    if missing := [question.id for question in questions if question.id not in answered]:
        found = f"{len(missing):,} of {len(questions):,} questions have no answer: {list_first(missing)}"
        problems.append(Problem(str(path), found, "write answers with the `question_id` of each question"))
    raise_problems(problems, str(path))
    return [answers[question.id] for question in questions]


def _find_misplaced(rows: Sequence[_NumberedRow], questions: Sequence[Question]) -> Iterator[Problem]:
    """Yield a problem for the first row without an id that is about another question than that of the same row."""
    for question, (number, where, columns) in zip(questions, rows, strict=False):
        asked = question.turns
        with suppress(DataError):  # Most files of answers do not repeat the questions.
            asked = read_question(columns, number, where).turns
        is_same = question.id == str(number) and asked[-1] == question.turns[-1]
        if not is_same and all(columns.get(name) is None for name in _IDS):
            found = f"has no id, and is not about question {question.id} of the same row"
            yield Problem(where, found, "write answers with the `question_id` of each question")
            return


def ask_questions(
    engine: Answerer, questions: Sequence[Question], numbers: Sequence[int]
) -> tuple[list[list[str]], list[int]]:
    """Return a model's answers to all turns of questions, without reasoning, and how many of each were truncated.

    Args:
        engine: The model.
        questions: Questions, each turn of which is asked in one batch.
        numbers: Numbers of the questions, which determine the seeds of the answers.

    Raises:
        DataError: A question cannot be answered.
    """
    answers, num_cut = [list[str]() for _ in questions], [0] * len(questions)
    for turn in range(max(len(question.turns) for question in questions)):
        active = [at for at, question in enumerate(questions) if turn < len(question.turns)]
        chats = [questions[at].build_chat(answers[at]) for at in active]
        replies = engine.answer(chats, [numbers[at] * MAX_TURNS + turn for at in active])
        problems = []
        for at, reply in zip(active, replies, strict=True):
            # Reasoning is not judged, and templates do not show it to the model in the next turn.
            answers[at].append(split_reasoning(reply.text)[1])
            num_cut[at] += not reply.is_finished
            if reply.error is not None:
                found = f"cannot be answered: {reply.error}"
                problems.append(Problem(f"question {questions[at].id}", found, "remove it, or change lengths"))
        # All problems of a turn together, before the next turn costs anything.
        raise_problems(problems, "questions")
    return answers, num_cut


def _read_rows(path: Path) -> Iterator[_NumberedRow]:
    """Yield the number, the place for errors, and the columns of each row.

    Raises:
        DataError: The file is missing or empty, or a line is not a JSON object or holds half a surrogate pair.
    """
    number, rows = -1, None
    if path.suffix == ".json":  # AlpacaEval's are lists.
        with suppress(DataError):
            rows = read_json(path)
    for number, row in enumerate(rows if isinstance(rows, list) else read_lines(path)):
        where = f"{path}:{number + 1}"
        if not isinstance(row, dict):
            raise DataError(Problem(where, "is not a JSON object", "write one object on each line"))
        # Escaped in JSON, it is valid there, and no tokenizer encodes it.
        if re.search("[\ud800-\udfff]", json.dumps(row, ensure_ascii=False)):
            raise DataError(Problem(where, "holds half a surrogate pair", "remove it, or write the whole character"))
        yield number, where, row
    if number < 0:
        raise DataError(Problem(str(path), "is missing or empty", "name a file of JSON Lines, or a JSON list"))


def _find_repeated(ids: Sequence[str], path: Path) -> Iterator[Problem]:
    if repeated := [name for name, count in Counter(ids).items() if count > 1]:
        yield Problem(str(path), f"several rows have the same id: {list_first(repeated)}", "give each row its own id")
