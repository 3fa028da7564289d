"""Dataset layouts: detection, and conversion of each to the canonical row."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np

from recipes_lib.config.schema import DatasetFormat
from recipes_lib.data.sources.messages import (
    FUNCTION_CALL,
    MEDIA,
    OBJECTS,
    TEXTS,
    RowError,
    are_columns,
    check_answer,
    check_answered,
    check_asked,
    check_text,
    clean_messages,
    describe,
    find_roles,
    parse_chat,
    read_chat_extras,
    read_history,
    read_reasoning,
    refuse_guesses,
    split_marks,
    zip_turns,
)
from recipes_lib.data.sources.rows import Message, RawRow, Row
from recipes_lib.errors import DataError, Problem

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The layout of a dataset's rows.

    Attributes:
        name: Name of the layout, a value of ``dataset_format``.
        columns: Columns that are read.
        ignored: Columns with a value that are not read.
        renamed: Column of the dataset -> column of the layout, where the names differ.
    """

    name: DatasetFormat
    columns: tuple[str, ...]
    ignored: tuple[str, ...]
    renamed: Mapping[str, str]

    def __str__(self) -> str:
        read = [f"{column} as {self.renamed[column]}" if column in self.renamed else column for column in self.columns]
        ignored = f"; ignored: {', '.join(self.ignored)}" if self.ignored else ""
        return f"`{self.name}` layout, from {', '.join(read)}{ignored}"


@dataclass(frozen=True, slots=True)
class _Layout:
    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Raw], dict[str, Any]]


def detect_format(entry: RawRow, declared: DatasetFormat = "auto") -> RowFormat:
    """Return the layout of a row, determined by its columns; columns with null values do not count.

    Args:
        entry: The row.
        declared: Value of ``dataset_format``; a layout other than ``auto`` is only verified.

    Raises:
        DataError: The columns match no layout, several layouts, or not the declared one; or it is ambiguous which
            column is the answer.
    """
    raw, where = _judge(entry), entry.where
    present = [column for column, value in raw.items() if value is not None]
    cased = _find_cased(present)
    plain = list(cased.values())
    matches, renamed = _match(plain), {}
    if not matches or declared not in ("auto", *matches):
        renamed = _find_renamed(plain, _list_spellings(plain, declared))
        if {"role", "question", "answer"} & {_SPELLINGS.get(name, name) for name in plain} or len(renamed) > 1:
            renamed.pop("content", None)  # That of a message, or beside a question or answer.
        matches = _match(renamed.get(name, name) for name in plain)
        if not matches and isinstance(raw.get("data"), (list, tuple)):
            renamed, matches = {"data": "conversations"}, ["sharegpt"]
    renamed |= _find_renamed(plain, _EXTRA_SPELLINGS)
    named = {column: renamed.get(name, name) for column, name in cased.items()}
    if declared == "auto":
        matches = _drop_lesser({name: raw[column] for column, name in named.items()}, matches)
        if matches in (["question_answer"], []):
            _refuse_several_answers(list(named.values()), where)
    else:
        if declared not in matches:
            missing = [column for column in _LAYOUTS[declared].required if column not in plain]
            found = f"the `{declared}` layout needs {_quote(missing)}; found {_quote(present)}"
            raise DataError(Problem(where, found, _suggest(raw, present, _RENAMING)))
        matches = [declared]
    if len(matches) > 1:
        found = " and ".join(f"`{name}` ({', '.join(_LAYOUTS[name].required)})" for name in matches)
        remedy = "set " + " or ".join(f"`dataset_format: {name}`" for name in matches)
        raise DataError(Problem(where, f"the columns match several layouts: {found}", remedy))
    if not matches:
        known = "; ".join([*(" + ".join(layout.required) for layout in _LAYOUTS.values()), "in RL also prompt"])
        remedy = _suggest(raw, present, f"name them with `dataset_columns`, or convert the rows, to one of: {known}")
        raise DataError(Problem(where, f"the columns match no layout: {_quote(present)}", remedy))
    layout, written = _LAYOUTS[matches[0]], {_name_optional(column, matches[0]): column for column in raw}
    written |= {name: column for column, name in named.items()}
    meant = dict.fromkeys(written.get(name, name) for name in (*layout.required, *layout.optional))
    read = tuple(column for column in meant if column in raw)
    renamed = {column: name for column, name in named.items() if column != name}
    spelled = dict(zip(raw, entry.columns, strict=True))  # `_judge` has renamed columns, in the same order.
    ignored = tuple(spelled[column] for column in present if column not in read)
    return RowFormat(matches[0], tuple(spelled[column] for column in read), ignored, renamed)


def _suggest(raw: Raw, present: list[str], usual: str) -> str:
    """Return the first remedy that is for exactly one unknown column or field, otherwise ``usual``."""
    if media := next((column for column in MEDIA if raw.get(column)), None):
        return f"only text is trained on: write `dataset_columns: {{{media}: null}}` if it needs no `{media}`"
    values = {column: raw[column] for column in present if column not in COLUMNS}
    objects = {column: value for column, value in values.items() if isinstance(value, Mapping)}
    values |= {f"{column}.{name}": field for column, value in objects.items() for name, field in value.items()}
    for remedy, is_meant in _REMEDIES.items():
        if len(meant := [column for column, value in values.items() if is_meant(value)]) == 1:
            return remedy.format(meant[0])
    return usual


def _judge(entry: RawRow) -> Raw:
    """Return the columns of a row; those of two answers and a verdict as a question with a pair, unless it has one.

    Raises:
        DataError: The verdict is for neither answer.
    """
    raw, undecided = entry.columns, []
    for verdict, question, answers in () if raw.keys() & {"question", "chosen", "rejected"} else _VERDICTS:
        if verdict in raw and {question, *answers} <= raw.keys():
            given = raw[verdict]
            if isinstance(given, str) and re.fullmatch(r"\s*[+-]?\d{1,9}\s*", given):  # A cell of a CSV file.
                given = int(given)
            names = {question: "question"}
            names |= {name: "chosen" if given in wins else "rejected" for name, wins in answers.items()}
            if "chosen" in names.values():
                return {names.get(column, column): value for column, value in raw.items()}
            undecided.append(f"`{verdict}` is {raw[verdict]!r}")
    if undecided:
        raise DataError(Problem(entry.where, f"{', '.join(undecided)}: no answer is better", _REMOVING))
    return raw


def _match(columns: Iterable[str]) -> list[DatasetFormat]:
    present = set(columns)
    return [name for name, layout in _LAYOUTS.items() if present.issuperset(layout.required)]


def _find_cased(present: Sequence[str]) -> dict[str, str]:
    """Return each column with its name, in lower case and without blanks around if that is a layout's column."""
    plain = {column: column.strip().lower() for column in present}
    counts = Counter(plain.values())
    return {column: name if name in COLUMNS and counts[name] == 1 else column for column, name in plain.items()}


def _find_renamed(present: Sequence[str], spellings: Mapping[str, str]) -> dict[str, str]:
    """Return the columns that have another spelling of a layout's column, if no other column has the same meaning."""
    meanings = Counter(spellings.get(column, column) for column in present)
    return {column: spellings[column] for column in present if column in spellings and meanings[spellings[column]] == 1}


def _list_spellings(present: Sequence[str], declared: DatasetFormat) -> dict[str, str]:
    """Return the other spellings of columns, with those that depend on the columns beside them or on the layout."""
    # In ms-swift's pairs; and function calls, as in xlam.
    is_pair = declared == "preference" and "chosen" not in map(_SPELLINGS.get, present)
    chosen = dict.fromkeys(("messages", "response"), "chosen") if is_pair else {}
    return {**_SPELLINGS, **chosen, **({"answers": "answer"} if "tools" in present else {})}


@lru_cache(maxsize=1024)  # Bounded: rows may have names of their own.
def _name_optional(column: str, layout: DatasetFormat) -> str:
    """Return the name of an optional column of a layout that is written in another way; otherwise the column."""
    name = _EXTRA_SPELLINGS.get(column.strip().lower(), column.strip().lower())
    return name if name in _LAYOUTS[layout].optional else column


def _drop_lesser(raw: Raw, matches: list[DatasetFormat]) -> list[DatasetFormat]:
    """Drop matching layouts whose columns only repeat, or belong to, another matching layout."""
    lesser = set(_FALLBACKS) if set(matches) - set(_FALLBACKS) else set()
    if "preference" in matches:  # The chat before the answers, as in LLaMA-Factory's pairs.
        chats = {"sharegpt": "conversations", "messages": "messages"}
        lesser |= {name for name in matches if name in chats and find_roles(raw[chats[name]])[-1:] != ["assistant"]}
    if {"alpaca", "text"} <= {*matches} and all(str(raw[at]) in str(raw["text"]) for at in ("instruction", "output")):
        lesser.add("text")  # Alpaca's fourth column: the other three, rendered.
    return [name for name in matches if name not in lesser]


def _refuse_several_answers(present: Sequence[str], where: str) -> None:
    """Raise for several columns that may be the answer: with a short ``answer`` beside a ``solution``, either is meant.

    Raises:
        DataError: There are several.
    """
    answers = [column for column in present if _SPELLINGS.get(column, column) == "answer"]
    if answers[1:]:
        remedy = "set `dataset_format: question_answer`, and name the meant one: `dataset_columns: {answer: ...}`"
        raise DataError(Problem(where, f"each of {_quote(answers)} may be the answer to train on", remedy))


def canonicalize(entry: RawRow, row_format: RowFormat, *, needs_answer: bool = True) -> Row:
    """Convert a row to canonical form, and validate it.

    Args:
        entry: The row.
        row_format: Layout of the dataset, from ``detect_format``.
        needs_answer: Whether a chat without an assistant turn is an error; it can still be a prompt.

    Raises:
        DataError: The row is invalid; describes the first thing that is wrong.

    Source: agrees with TRL's ``maybe_convert_to_chatml`` and ``extract_prompt``; Alpaca rows as in LLaMA-Factory;
    ``tests/data/sources/test_formats.py``.
    """
    try:
        # The `read` functions of the layouts know only the layouts' own column names.
        layout, renamed, columns, raw = row_format.name, row_format.renamed, _judge(entry), dict[str, Any]()
        for column, value in columns.items():
            # The row that determined the layout may have no value in an optional column, or a second question.
            name = renamed.get(column, column if (other := _name_optional(column, layout)) in columns else other)
            if layout == "question_answer" and column not in row_format.ignored:
                name = _SPELLINGS.get(name, name)
            if value is not None and raw.get(name) is not None:
                raise RowError(f"`{column}` and another column may each be `{name}`", "hide one by `dataset_columns`")
            if value is not None or name not in raw:
                raw[name] = parse_chat(value, column) if name in _CHATS else value
        if needs_answer and layout not in ("preference", "text"):
            _refuse_labelled(raw)
        fields = _LAYOUTS[layout].read(raw)
        refuse_guesses(raw, fields)
        if "messages" in fields:
            check_asked(fields["messages"])
            if needs_answer:
                check_answered(fields["messages"], _LAYOUTS[layout].required[0])
            fields["messages"], fields["untrained"] = split_marks(fields["messages"])
        return Row(where=entry.where, **fields)
    except RowError as error:
        raise DataError(Problem(entry.where, error.found, error.remedy)) from None


def _refuse_labelled(raw: Raw) -> None:
    """Raise for a row with a label of its answer, as in KTO datasets: it may be an undesirable answer."""
    # As text, since in a table every cell is one.
    if label := next((name for name in raw if name in _LABELS and str(raw[name]).lower() in _LABELS[name]), None):
        found = f"`{label}` says which answers are good, and all of them would be trained on"
        hidden = f"`dataset_columns: {{{label}: null}}`"
        raise RowError(found, f"keep the rows with good answers; or write {hidden} if it has another meaning")


def _read_messages(raw: Raw, *, column: str) -> dict[str, Any]:
    messages = clean_messages(_take(raw, column), column)
    return {"messages": _put_system_first(raw, messages), **read_chat_extras(raw)}


def read_question(raw: Raw) -> dict[str, Any] | None:
    """Return the fields of a prompt: a ``prompt``, plain text or messages, or a question under any of its names.

    The question may be an ``instruction`` with its ``input``. ``None`` if there is no such column.

    Raises:
        RowError: The prompt, or a column that belongs to it, is invalid.
    """
    cased, prompt = _find_cased([column for column, value in raw.items() if value is not None]), raw.get("prompt")
    names, spellings = list(cased.values()), {**_SPELLINGS, **_EXTRA_SPELLINGS}
    if "instruction" in names:  # Beside it, `input` is a context, not a question.
        del spellings["input"]
    renamed = _find_renamed(names, spellings)
    named = {renamed.get(name, name): raw[column] for column, name in cased.items()}
    if isinstance(prompt, str):
        _refuse_chat_columns(named)
        if TEXTS.fullmatch(prompt):  # As in Chatbot Arena's 55k battles.
            raise RowError("`prompt` is a list of texts in JSON", "write one of them, or all turns as messages")
        return {"prompt": check_text(prompt, "`prompt`")}
    if prompt is not None:
        turns = _put_system_first(named, clean_messages(prompt, "prompt"))
    elif isinstance(named.get("question"), (str, list, tuple)):
        contexts = ("input", "context") if "instruction" in renamed else ("context",)
        turns = _read_question(named, "question", *contexts)
    else:
        return None
    check_asked(turns)
    return {"messages": turns, "num_prompt_messages": len(turns), **read_chat_extras(named)}


def _read_answer(raw: Raw, *, question: tuple[str, ...], answer: str) -> dict[str, Any]:
    prompt, value = _read_question(raw, *question), _take(raw, answer)
    is_list = isinstance(value, (list, tuple)) or OBJECTS.match(str(value)) or str(value).strip() == "[]"
    if raw.get("tools") and is_list:
        answers = clean_messages([{"role": FUNCTION_CALL, "content": value}], answer)
    else:
        answers = [{"role": "assistant", "content": check_answer(value, f"`{answer}`"), **read_reasoning(raw, value)}]
    return {"messages": [*prompt, *answers], **read_chat_extras(raw)}


def _read_question(raw: Raw, column: str, *contexts: str) -> list[Message]:
    """The chat up to a question in a column, followed by the text of optional further columns; or that of messages."""
    if isinstance(_take(raw, column), (list, tuple, Mapping)):
        return _put_system_first(raw, clean_messages(raw[column], column))
    columns = [column, *(context for context in contexts if raw.get(context) is not None)]
    for name in columns[1:]:
        if not isinstance(raw[name], str):
            remedy = f"write it as a string, or ignore it: `dataset_columns: {{{name}: null}}`"
            raise RowError(f"`{name}` is {describe(raw[name])}, not a string", remedy)
    question = "\n".join(filter(None, (check_text(_take(raw, name), f"`{name}`") for name in columns)))
    return [*_read_system(raw), *read_history(raw.get("history") or []), {"role": "user", "content": question}]


def _read_prompt_completion(raw: Raw) -> dict[str, Any]:
    prompt, completion = _take(raw, "prompt"), _take(raw, "completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        _refuse_chat_columns(raw)
        return {"prompt": check_text(prompt, "`prompt`"), "completion": check_answer(completion, "`completion`")}
    turns, answer = _read_question(raw, "prompt"), _read_turns(completion, "completion")
    check_answered(answer, "completion")
    return {"messages": [*turns, *answer], "num_prompt_messages": len(turns), **read_chat_extras(raw)}


def _read_turns(value: object, column: str) -> list[Message]:
    """The turns of an answer: a text, a single turn, or a list of turns."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": check_answer(value, f"`{column}`")}]
    return clean_messages([value] if isinstance(value, Mapping) and not are_columns(value) else value, column)


def _refuse_chat_columns(raw: Raw) -> None:
    """Raise for a system prompt or history beside a prompt that is plain text, which would be ignored."""
    if column := next((name for name in ("system", "history") if str(raw.get(name) or "").strip()), None):
        found = f"`{column}` is part of a chat, and a string `prompt` is plain text"
        remedy = "make turns of it: `dataset_columns: {question: prompt}`, and `answer: completion` without `chosen`"
        raise RowError(found, f"{remedy}; or ignore the column: `dataset_columns: {{{column}: null}}`")


def _read_preference(raw: Raw) -> dict[str, Any]:
    values = {column: _take(raw, column) for column in ("chosen", "rejected")}
    if values["chosen"] == values["rejected"]:
        raise RowError("`chosen` and `rejected` are the same", "remove the row: it has no preference")
    asked = raw.get("question")  # In Chatbot Arena's 55k battles, a list of texts in JSON, as both answers.
    if isinstance(asked, str) and TEXTS.fullmatch(asked) and all(str(value)[:1] == "[" for value in values.values()):
        values = {column: zip_turns(asked, str(value), column) for column, value in values.items()}
    if isinstance(values["rejected"], str) and isinstance(values["chosen"], (list, tuple)):
        # In ms-swift's pairs, another last answer of the chat.
        values["rejected"] = [*values["chosen"][:-1], {"role": "assistant", "content": values["rejected"]}]
    if isinstance(asked, Mapping) and "messages" in asked:  # As in OpenAI's pairs.
        raw = {**raw, "question": asked["messages"], "tools": asked.get("tools")}
    prompt, are_texts = raw.get("prompt"), isinstance(values["chosen"], str)
    if are_texts != isinstance(values["rejected"], str):
        found = ", ".join(f"`{name}` is {describe(value)}" for name, value in values.items())
        raise RowError(found, "write both as strings or both as lists of messages")
    chosen, rejected = (_read_turns(value, column) for column, value in values.items())
    # A string `prompt` with string answers is plain text. Answers of several turns are complete chats; they include the
    # prompt, which a text column may repeat.
    is_whole = not isinstance(prompt, (list, tuple)) and max(len(chosen), len(rejected)) > 1
    shared = None if is_whole or (are_texts and isinstance(prompt, str)) else _read_shared_prompt(raw)
    if shared is None and are_texts:
        _refuse_chat_columns(raw)
        return {**_read_text_pair(raw, prompt, **values), **_read_margin(raw)}
    if shared is None:
        count = _count_shared(chosen, rejected)
        if not count:
            remedy = "begin both with the same messages, or add `prompt` as messages"
            raise RowError("`chosen` and `rejected` share no prompt", remedy)
        shared, chosen, rejected = _put_system_first(raw, chosen[:count]), chosen[count:], rejected[count:]
    elif chosen[: len(shared)] == shared == rejected[: len(shared)]:
        chosen, rejected = chosen[len(shared) :], rejected[len(shared) :]
    _check_pair(chosen=chosen, rejected=rejected)
    extras = {**read_chat_extras(raw), **_read_margin(raw)}
    return {"messages": [*shared, *chosen], "num_prompt_messages": len(shared), "rejected": rejected, **extras}


def _read_shared_prompt(raw: Raw) -> list[Message] | None:
    """The chat that both answers continue, from separate columns; ``None`` if the row has no such column."""
    # `input` is the context of an instruction (Alpaca), or without one the question itself (distilabel's Orca pairs).
    for column in _ASKED:
        if raw.get(column) is not None:
            contexts = {"prompt": (), "instruction": ("input", "context")}.get(column, ("context",))
            turns = _read_question(raw, column, *contexts)
            if turns[-1]["role"] == "assistant":
                found = f"`{column}` ends with an answer of its own beside `chosen` and `rejected`"
                raise RowError(found, f"end it with the question, or hide it: `dataset_columns: {{{column}: null}}`")
            return turns
    return None


def _read_text_pair(raw: Raw, prompt: object, chosen: str, rejected: str) -> dict[str, Any]:
    if prompt is None:
        _refuse_unread_chat(raw, chosen)
        prompt = _find_prompt(chosen, rejected)
        chosen, rejected = chosen.removeprefix(prompt), rejected.removeprefix(prompt)
    elif len(str(prompt)) > 15 and chosen.startswith(str(prompt)) and rejected.startswith(str(prompt)):
        raise RowError("`chosen` and `rejected` repeat the prompt", "hide it: `dataset_columns: {prompt: null}`")
    return {
        "prompt": check_text(prompt, "`prompt`"),
        "completion": check_answer(chosen, "`chosen`"),
        "rejected": check_answer(rejected, "`rejected`"),
    }


def _refuse_unread_chat(raw: Raw, chosen: str) -> None:
    """Raise for a list of turns under an unknown name: both answers continue it, and do not repeat it as texts."""
    for column, value in {} if _ASSISTANT in chosen else raw.items():
        if any(find_roles(value)):
            found = f"`{column}` may be the chat that `chosen` and `rejected` continue"
            raise RowError(found, f"write `dataset_columns: {{conversations: {column}}}`, or remove the column")


def _find_prompt(chosen: str, rejected: str) -> str:
    """Return the common prompt of two texts.

    In dialogues in the format of hh-rlhf, it ends with the last common ``Assistant:``. In other texts, it ends before
    the space in front of the first word that differs: if a prompt ended inside a word or with a space, its tokens would
    not be a prefix of those of the text.

    Source: TRL's ``extract_prompt``, which gives the same prompt for texts that first differ at the start of a word.
    """
    prompt = chosen[: _count_shared(chosen, rejected)]
    if _ASSISTANT in chosen:
        prompt = "".join(prompt.rpartition(_ASSISTANT)[:2])
    else:
        last_word = "" if prompt[-1:].isspace() else "".join(prompt.rsplit(maxsplit=1)[-1:])
        prompt = prompt.removesuffix(last_word).rstrip(" ")
    if not prompt.strip():
        remedy = "begin both with the same text, or add a `prompt` column (`dataset_columns`, if it has another name)"
        raise RowError("`chosen` and `rejected` share no prompt", remedy)
    for column, text in (("chosen", chosen), ("rejected", rejected)):
        if _ASSISTANT in chosen and _SPEAKER.search(text, len(prompt)):
            found = f"`{column}` has further turns after the first answer that differs"
            raise RowError(found, "end both dialogues with the first answer in which they differ")
    return prompt


def _check_pair(**answers: list[Message]) -> None:
    for column, answer in answers.items():
        if not answer or answer[0]["role"] != "assistant":
            found = f"after the prompt, `{column}` does not continue with an assistant turn"
            raise RowError(found, "let chosen and rejected differ in the answer alone")
        if split_marks(answer)[1]:
            found = f"a turn of `{column}` is marked not to be trained on, and a pair compares its answers whole"
            raise RowError(found, "remove the mark, or the row")


def _read_margin(raw: Raw) -> dict[str, Any]:
    if (margin := raw.get("margin")) is None or not str(margin).strip():  # An empty cell of a table.
        return {}
    try:
        number = math.nan if isinstance(margin, bool) else float(margin)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise RowError("`margin` is not a finite number of 32 bits", "write by how much `chosen` is better")
    return {"margin": number}


def _count_shared(chosen: Sequence[object], rejected: Sequence[object]) -> int:
    """Number of common leading characters, or turns."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(chosen), len(rejected)))


def _read_text(raw: Raw) -> dict[str, Any]:
    if "message_id" in raw and "role" in raw:  # As in OpenAssistant's message trees.
        found = "the row is one message of a conversation (`message_id`, `role`), not a text"
        remedy = "join the messages of each conversation into `messages`; or write `dataset_columns: {role: null}`"
        raise RowError(found, remedy)
    if not (text := check_text(_take(raw, "text"), "`text`")) or text.isspace():
        raise RowError("`text` is empty", _REMOVING)  # In wikitext, a third of the rows are blank lines.
    return {"text": text}


def _read_system(raw: Raw) -> list[Message]:
    system = "" if raw.get("system") is None else raw["system"]
    # An object in Gemini's chats, a list of parts in those of Anthropic and Bedrock.
    turn = {**(system if isinstance(system, Mapping) else {"content": system}), "role": "system"}
    text = clean_messages([turn], "system")[0]["content"]
    return [{"role": "system", "content": text}] if text.strip() else []


def _put_system_first(raw: Raw, turns: list[Message]) -> list[Message]:
    system = _read_system(raw)
    if system and turns[0] == system[0]:
        return turns
    if system and turns[0]["role"] == "system":
        remedy = "keep one of the two, as by `dataset_columns: {system: null, system_prompt: null}`"
        raise RowError("the row has a `system` column and a system turn", remedy)
    return [*system, *turns]


def _take(raw: Raw, column: str) -> Any:
    value = raw.get(column)
    if value is None:
        state = "null" if column in raw else f"missing; the row has {_quote(list(raw))}"
        remedy = "fill it or remove the row; datasets of different layouts are parts of a `dataset_mixture`"
        raise RowError(f"column `{column}` is {state}", remedy)
    return value


def _quote(columns: list[str]) -> str:
    return ", ".join(f"`{column}`" for column in columns) or "none with a value"


_ASSISTANT: Final = "\n\nAssistant:"
_SPEAKER: Final = re.compile(r"\n\n(Human|Assistant):")
_CHATS: Final = ("messages", "conversations", "prompt", "completion", "question", "chosen", "rejected")
"""Columns that can be chats, also as texts of JSON; in another column, such a text is a document or an answer."""
_ASKED: Final = ("prompt", "conversations", "messages", "question", "instruction", "input")
"""Columns that can be what both answers of a pair continue; the first one that a row has is."""
_CHAT_EXTRAS = ("tools", "chat_template_kwargs")
_QUESTION_EXTRAS = ("system", "history", *_CHAT_EXTRAS)


def _build_layout(question: str, answer: str, *contexts: str) -> _Layout:
    """Return a layout of a question, optional texts that belong to it, and its answer."""
    read = partial(_read_answer, question=(question, *contexts), answer=answer)
    return _Layout((question, answer), (*contexts, "reasoning_content", *_QUESTION_EXTRAS), read)


_LAYOUTS: Final[Mapping[DatasetFormat, _Layout]] = {
    "messages": _Layout(("messages",), ("system", *_CHAT_EXTRAS), partial(_read_messages, column="messages")),
    "prompt_completion": _Layout(("prompt", "completion"), _QUESTION_EXTRAS, _read_prompt_completion),
    "text": _Layout(("text",), (), _read_text),
    "sharegpt": _Layout(("conversations",), ("system", *_CHAT_EXTRAS), partial(_read_messages, column="conversations")),
    "alpaca": _build_layout("instruction", "output", "input"),
    "dolly": _build_layout("instruction", "response", "input", "context"),
    "question_answer": _build_layout("question", "answer", "context"),
    "preference": _Layout(("chosen", "rejected"), (*_ASKED, "context", "margin", *_QUESTION_EXTRAS), _read_preference),
}
_SPELLINGS: Final = {
    **dict.fromkeys(("conversation", "contents"), "conversations"),
    **dict.fromkeys(("content", "raw_content"), "text"),
    # The definition of a task beside its inputs (Super-NaturalInstructions) is part of the question: two are refused.
    **dict.fromkeys(("query", "problem", "prompt", "input", "inputs", "instruction", "definition"), "question"),
    **dict.fromkeys(("response", "solution", "generated_solution", "output"), "answer"),
    **dict.fromkeys(("target", "targets", "completion", "attempt", "deepseek_attempt", "r1_generation"), "answer"),
    **{f"{side}_{what}": side for side in ("chosen", "rejected") for what in ("response", "messages", "conversations")},
    **dict.fromkeys(("preferred_output", "accepted", "response_j"), "chosen"),
    **dict.fromkeys(("non_preferred_output", "response_k"), "rejected"),
}
"""Other spelling of a column -> the layout's column; applied only if the columns match no layout as they are."""
_EXTRA_SPELLINGS: Final = {
    **dict.fromkeys(("system_prompt", "system_message", "systeminstruction"), "system"),
    **dict.fromkeys(("available_tools", "functions"), "tools"),
    **dict.fromkeys(("passage", "article", "paragraph"), "context"),
}
"""The same in every layout."""
_VERDICTS: Final[Sequence[tuple[str, str, Mapping[str, Sequence[object]]]]] = (
    ("labels", "history", {"human_ref_A": (1,), "human_ref_B": (0,)}),  # SHP
    ("better_response_id", "prompt", {"response_0": (0,), "response_1": (1,)}),  # PKU-SafeRLHF
    ("preference_strength", "prompt", {"response_1": range(-3, 0), "response_2": range(1, 4)}),  # HelpSteer2
    ("overall_preference", "context", {"response1": range(-3, 0), "response2": range(1, 4)}),  # HelpSteer3
    ("winner", "conversation_a", {"conversation_a": ("model_a",), "conversation_b": ("model_b",)}),  # Chatbot Arena
    ("winner", "messages_a", {"messages_a": ("model_a",), "messages_b": ("model_b",)}),  # Search Arena
    ("winner_model_a", "prompt", {"response_a": (1,), "response_b": ()}),  # Chatbot Arena's 55k battles, where
    ("winner_model_b", "prompt", {"response_a": (), "response_b": (1,)}),  # a tie is 0 in both columns.
)
"""Column with a verdict, column of the question, which may be in an answer, and verdicts for which each is better."""
_LABELS: Final[Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(("kto_tag", "label"), ("true", "false")),
    # Subsets of good answers keep these columns.
    **dict.fromkeys(("is_safe", "is_correct", "resolved", "reward"), ("false", "0", "0.0")),
}
"""Column that says whether the answer is good (KTO, BeaverTails, trajectories of SWE-smith) -> values refused."""
_REMOVING: Final = "remove such rows, or set `broken_rows: drop` and `max_broken_fraction`"
_RENAMING: Final = "name them with `dataset_columns`; convert judged answers to pairs; or change `dataset_format`"
_REMEDIES: Final[Mapping[str, Callable[[object], bool]]] = {
    # Not pairs of `input` and `output`, which may be those of a program.
    "write `dataset_columns: {{conversations: {}}}`": lambda chat: any(find_roles(chat)) or "'assistant':" in str(chat),
    "convert the rows: write the masked text of `{}` as `prompt`, the trained one as `completion`": (
        lambda value: set(find_roles(value)) == {""} and re.search("'label': (True|False)", str(value)) is not None
    ),
    "convert the rows: write an object of `{}` as `answer`, or two as `chosen` and `rejected`": (
        lambda value: set(find_roles(value)) == {""} and re.search("'(answer|response|text)':", str(value)) is not None
    ),
    "convert the dialogue in `{0}` to `messages`, or train on its text: `dataset_columns: {{text: {0}}}`": (
        lambda value: "assistant:" in str(value).lower()
    ),
}
"""Remedy -> whether a column of an unknown name has what it is for: a chat, scored answers, a dialogue."""
_FALLBACKS: Final[tuple[DatasetFormat, ...]] = ("dolly", "question_answer")
"""Layouts whose columns also occur as additional columns of other layouts; considered only if no other one matches."""

COLUMNS: Final = frozenset(
    {column for layout in _LAYOUTS.values() for column in (*layout.required, *layout.optional)}
    | {*_LABELS, "role", "tests", "choices", "options", *MEDIA, *_SPELLINGS, *_EXTRA_SPELLINGS}
)
"""All columns that have a meaning: the valid keys of ``dataset_columns``."""
