"""Row layouts: which one a dataset has, and each to the canonical row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from recipes_lib.config.schema import DatasetFormat
from recipes_lib.data.format_messages import (
    ROLES,
    SHAREGPT_ROLES,
    RowError,
    check_answer,
    check_answered,
    check_json,
    check_text,
    clean_messages,
    describe,
    parse_tools,
    split_marks,
)
from recipes_lib.data.rows import Message, Row
from recipes_lib.errors import DataError, Problem

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The layout of a dataset's rows.

    Attributes:
        name: Layout, as ``dataset_format`` spells it.
        columns: Columns that are read.
        ignored: Columns that are not.
    """

    name: DatasetFormat
    columns: tuple[str, ...]
    ignored: tuple[str, ...]

    def __str__(self) -> str:
        ignored = f"; ignored: {', '.join(self.ignored)}" if self.ignored else ""
        return f"`{self.name}` layout, from {', '.join(self.columns)}{ignored}"


@dataclass(frozen=True, slots=True)
class _Layout:
    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Raw], dict[str, Any]]


def detect_format(raw: Raw, declared: DatasetFormat = "auto", *, where: str) -> RowFormat:
    """Name the layout of a row from its columns; those that are null, as in unified Arrow rows, do not count.

    Args:
        raw: The first row.
        declared: ``dataset_format``; unless ``auto``, only checked.
        where: The row's place, for errors.

    Raises:
        DataError: The columns match no layout, several, or not the declared one.
    """
    present = [column for column, value in raw.items() if value is not None]
    matches: list[DatasetFormat] = [name for name, layout in _LAYOUTS.items() if set(layout.required) <= set(present)]
    if declared != "auto":
        if declared not in matches:
            missing = [column for column in _LAYOUTS[declared].required if column not in present]
            raise DataError(
                Problem(
                    where,
                    f"the `{declared}` layout needs {_quote(missing)}; found {_quote(present)}",
                    f"rename the columns, or change `dataset_format: {declared}`",
                )
            )
        matches = [declared]
    if len(matches) > 1:
        found = " and ".join(f"`{name}` ({', '.join(_LAYOUTS[name].required)})" for name in matches)
        fix = " or ".join(f"`dataset_format: {name}`" for name in matches)
        raise DataError(Problem(where, f"the columns match several layouts: {found}", f"set {fix}"))
    if not matches:
        known = "; ".join(" + ".join(layout.required) for layout in _LAYOUTS.values())
        raise DataError(
            Problem(where, f"the columns match no layout: {_quote(present)}", f"rename them to one of: {known}")
        )
    layout = _LAYOUTS[matches[0]]
    read = tuple(column for column in (*layout.required, *layout.optional) if column in raw)
    return RowFormat(matches[0], read, tuple(column for column in raw if column not in read))


def canonicalize(raw: Raw, row_format: RowFormat, source: str, index: int, index_name: str = "row") -> Row:
    """Bring a row to canonical form, checked.

    Source: agrees with TRL's ``maybe_convert_to_chatml`` and ``extract_prompt``; Alpaca as LLaMA-Factory reads it.
    Proved in ``tests/data/test_formats.py``.

    Raises:
        DataError: The row is broken; names its place and the first thing that is wrong.
    """
    try:
        fields = _LAYOUTS[row_format.name].read(raw)
        if "messages" in fields:
            fields["messages"], fields["untrained"] = split_marks(fields["messages"])
        return Row(source=source, index=index, index_name=index_name, **fields)
    except RowError as error:
        where = Row(source=source, index=index, index_name=index_name).where
        raise DataError(Problem(where, error.found, error.remedy)) from None


def _read_messages(raw: Raw) -> dict[str, Any]:
    messages = clean_messages(_take(raw, "messages"), "messages")
    check_answered(messages, "messages")
    return {"messages": messages, **_read_chat_extras(raw)}


def _read_sharegpt(raw: Raw) -> dict[str, Any]:
    messages = clean_messages(_take(raw, "conversations"), "conversations", SHAREGPT_ROLES)
    check_answered(messages, "conversations")
    system = _read_system(raw)
    if system and messages[0]["role"] == "system":
        raise RowError("the row has a `system` column and a system turn", "keep one of the two")
    return {"messages": [*system, *messages], **_read_chat_extras(raw)}


def _read_alpaca(raw: Raw) -> dict[str, Any]:
    query = [check_text(_take(raw, "instruction"), "`instruction`")]
    if raw.get("input") is not None:
        query.append(check_text(raw["input"], "`input`"))
    question = "\n".join(part for part in query if part)
    if not question:
        raise RowError("`instruction` and `input` are empty", "write the question, or remove the row")
    answer = check_answer(_take(raw, "output"), "`output`")
    messages = [*_read_system(raw), *_read_history(raw), *_turns(question, answer)]
    return {"messages": messages, **_read_chat_extras(raw)}


def _read_prompt_completion(raw: Raw) -> dict[str, Any]:
    prompt, completion = _take(raw, "prompt"), _take(raw, "completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return {"prompt": check_text(prompt, "`prompt`"), "completion": check_answer(completion, "`completion`")}
    _check_same_kind(prompt=prompt, completion=completion)
    prompt, completion = clean_messages(prompt, "prompt"), clean_messages(completion, "completion")
    check_answered(completion, "completion")
    return {"messages": [*prompt, *completion], "num_prompt_messages": len(prompt), **_read_chat_extras(raw)}


def _read_preference(raw: Raw) -> dict[str, Any]:
    chosen, rejected, prompt = _take(raw, "chosen"), _take(raw, "rejected"), raw.get("prompt")
    if chosen == rejected:
        raise RowError("`chosen` and `rejected` are the same", "remove the row: it prefers nothing")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            raise RowError("`prompt` is missing", "add a `prompt` column: text answers cannot be told from the prompt")
        _check_same_kind(prompt=prompt, chosen=chosen)
        return {
            "prompt": check_text(prompt, "`prompt`"),
            "completion": check_answer(chosen, "`chosen`"),
            "rejected": check_answer(rejected, "`rejected`"),
            **_read_margin(raw),
        }
    _check_same_kind(chosen=chosen, rejected=rejected)
    chosen_turns, rejected_turns = clean_messages(chosen, "chosen"), clean_messages(rejected, "rejected")
    if isinstance(prompt, (list, tuple)):
        turns = clean_messages(prompt, "prompt")
        if chosen_turns[: len(turns)] == turns:
            raise RowError("`chosen` repeats `prompt`", "leave the prompt out of the answers, or drop the column")
    else:
        turns, chosen_turns, rejected_turns = _split_prompt(chosen_turns, rejected_turns)
    for column, answer in (("chosen", chosen_turns), ("rejected", rejected_turns)):
        if not answer or answer[0]["role"] != "assistant":
            raise RowError(
                f"after the prompt, `{column}` does not go on with an assistant turn",
                "let chosen and rejected differ in the answer alone",
            )
        if split_marks(answer)[1]:
            found = f"a turn of `{column}` is marked not to be trained on, and a pair compares its answers whole"
            raise RowError(found, "take the mark out, or remove the row")
    extras = {**_read_chat_extras(raw), **_read_margin(raw)}
    messages = [*turns, *chosen_turns]
    return {"messages": messages, "num_prompt_messages": len(turns), "rejected": rejected_turns, **extras}


def _read_margin(raw: Raw) -> dict[str, Any]:
    margin = raw.get("margin")
    if margin is None:
        return {}
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        found = margin if isinstance(margin, float) else describe(margin)
        raise RowError(f"`margin` is {found}, not a finite number", "write by how much `chosen` is better")
    return {"margin": float(margin)}


def _split_prompt(chosen: list[Message], rejected: list[Message]) -> tuple[list[Message], list[Message], list[Message]]:
    """Split off the turns that both chats begin with."""
    pairs = zip(chosen, rejected, strict=False)
    shared = next(
        (turn for turn, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(chosen), len(rejected))
    )
    if not shared:
        raise RowError(
            "`chosen` and `rejected` share no prompt",
            "begin both with the same messages, or add `prompt` as messages",
        )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _read_text(raw: Raw) -> dict[str, Any]:
    text = check_text(_take(raw, "text"), "`text`")
    if not text or text.isspace():
        raise RowError("`text` is empty", "remove the row: there is nothing to train on")
    return {"text": text}


def _read_chat_extras(raw: Raw) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if raw.get("tools"):
        extras["tools"] = parse_tools(raw["tools"])
    kwargs = raw.get("chat_template_kwargs")
    if kwargs:
        if not isinstance(kwargs, Mapping):
            raise RowError(f"`chat_template_kwargs` is {describe(kwargs)}, not an object", "write {name: value}")
        extras["template_kwargs"] = check_json(dict(kwargs), "`chat_template_kwargs`")
    return extras


def _read_system(raw: Raw) -> list[Message]:
    system = raw.get("system")
    if system is None:
        return []
    return [{"role": ROLES["system"], "content": system}] if check_text(system, "`system`").strip() else []


def _read_history(raw: Raw) -> list[Message]:
    history = raw.get("history") or []
    if not isinstance(history, (list, tuple)):
        raise RowError(f"`history` is {describe(history)}, not a list", "write [[question, answer], ...]")
    turns: list[Message] = []
    for number, pair in enumerate(history):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise RowError(f"history[{number}] is not a [question, answer] pair", "write [[question, answer], ...]")
        question = check_text(pair[0], f"history[{number}][0]")
        turns += _turns(question, check_answer(pair[1], f"history[{number}][1]"))
    return turns


def _turns(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _take(raw: Raw, column: str) -> Any:
    value = raw.get(column)
    if value is None:
        state = "null" if column in raw else f"missing; the row has {_quote(list(raw))}"
        raise RowError(
            f"column `{column}` is {state}",
            "fill it or remove the row; datasets of different layouts are parts of a `dataset_mixture`",
        )
    return value


def _check_same_kind(**columns: object) -> None:
    if len({isinstance(value, str) for value in columns.values()}) > 1:
        found = ", ".join(f"`{name}` is {describe(value)}" for name, value in columns.items())
        raise RowError(found, "write both as strings or both as lists of messages")


def _quote(columns: list[str]) -> str:
    return ", ".join(f"`{column}`" for column in columns) or "none with a value"


_CHAT_EXTRAS = ("tools", "chat_template_kwargs")
_LAYOUTS: Final[Mapping[DatasetFormat, _Layout]] = {
    "messages": _Layout(("messages",), _CHAT_EXTRAS, _read_messages),
    "prompt_completion": _Layout(("prompt", "completion"), _CHAT_EXTRAS, _read_prompt_completion),
    "text": _Layout(("text",), (), _read_text),
    "sharegpt": _Layout(("conversations",), ("system", *_CHAT_EXTRAS), _read_sharegpt),
    "alpaca": _Layout(("instruction", "output"), ("input", "system", "history", *_CHAT_EXTRAS), _read_alpaca),
    "preference": _Layout(("chosen", "rejected"), ("prompt", "margin", *_CHAT_EXTRAS), _read_preference),
}
