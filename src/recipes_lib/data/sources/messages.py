"""Chat messages of any dataset spelling, converted to the form that templates read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Final, TypeVar

from recipes_lib.data.sources.rows import Message

FUNCTION_CALL: Final = "function_call"
ROLES: Final = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    FUNCTION_CALL: "assistant",
}
"""Roles of OpenAI's messages, ShareGPT's conversations and their relatives, and the template role of each."""

_TEMPLATE_ROLES: Final = tuple(dict.fromkeys(ROLES.values()))
_KEYS: Final = {"from": "role", "value": "content"}
"""Keys of a turn in ShareGPT's layout, and what templates call them."""


TRAIN: Final = "train"
"""Key, False, of a cleaned turn that is marked not to be trained on; ``split_marks`` takes it out again."""

_MARKS: Final = ("weight", "train", "training")
"""Keys by which turns are left out of training: OpenAI's, 0 or 1, and axolotl's, booleans."""

_PARTIAL_MARKS: Final = ("train_detail", "training_detail")

_TYPES: Final[Mapping[str, type | UnionType]] = {
    "null": NoneType,
    "a boolean": bool,  # Before numbers, which booleans are to Python.
    "a string": str,
    "a number": int | float,
    "an object": Mapping,
    "a list": list | tuple,
}

Json = TypeVar("Json")


class RowError(Exception):
    """One row is broken: what was found and what to do; the caller names the row."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(found)
        self.found = found
        self.remedy = remedy


def describe(value: object) -> str:
    """Return the JSON name of a value's type."""
    return next((name for name, kind in _TYPES.items() if isinstance(value, kind)), f"of type {type(value).__name__}")


def check_text(value: object, place: str) -> str:
    """Return ``value``, a string that every tokenizer can encode.

    Raises:
        RowError: It is not a string, or it holds a NUL character or half a surrogate pair.
    """
    if not isinstance(value, str):
        raise RowError(f"{place} is {describe(value)}, not a string", "write it as a string")
    if "\0" in value:
        raise RowError(
            f"{place} holds a NUL character at position {value.index(chr(0))}",
            "remove it; NULs everywhere mean UTF-16 text that was read as UTF-8",
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RowError(
                f"{place} holds half a surrogate pair, \\u{ord(value[error.start]):04x}, at position {error.start}",
                "write the whole character; text cut in the middle of an emoji leaves such halves",
            ) from None
    return value


def check_answer(value: object, place: str) -> str:
    """Return ``value``, a string that a model can be trained to answer.

    Raises:
        RowError: As ``check_text``; or it is blank, which trains the model to stop at once.
    """
    text = check_text(value, place)
    if not text or text.isspace():
        raise RowError(f"{place} is empty", "write the answer, or remove the row")
    return text


def is_answer(text: str) -> bool:
    """Return whether a row may hold ``text`` as an answer: what commands that generate rows write."""
    try:
        check_answer(text, "the answer")
    except RowError:
        return False
    return True


def clean_messages(value: object, column: str) -> list[Message]:
    """Check a list of turns, or its JSON string, and convert each to ``role``, ``content`` and other template keys.

    Null keys of a turn are dropped: they occur where another row of the file has ``tool_calls`` or ``name``. Text parts
    are joined. A mark that excludes a turn from the loss becomes ``TRAIN``, False; other marks are removed. A last turn
    of the user is accepted: real conversations often end so, and it is no target.

    Args:
        value: The column.
        column: Its name, for errors.

    Raises:
        RowError: The first thing that is wrong, named as ``column[turn].key``.
    """
    if isinstance(value, str):  # A cell of a table.
        value = _parse_json(value, f"`{column}`")
    if not isinstance(value, (list, tuple)):
        raise RowError(f"`{column}` is {describe(value)}, not a list of messages", f"write `{column}` as a list")
    if not value:
        raise RowError(f"`{column}` is an empty list", "write at least one message, or remove the row")
    return [_clean_message(message, f"{column}[{turn}]") for turn, message in enumerate(value)]


def split_marks(messages: Sequence[Message]) -> tuple[Sequence[Message], frozenset[int]]:
    """Return cleaned turns as templates read them, and the numbers of those marked as excluded from the loss."""
    untrained = [turn for turn, message in enumerate(messages) if TRAIN in message]
    if untrained:
        messages = [{key: value for key, value in message.items() if key != TRAIN} for message in messages]
    return messages, frozenset(untrained)


def check_answered(messages: Iterable[Message], column: str) -> None:
    """Raise for a chat without an assistant turn, which has no targets.

    Raises:
        RowError: No turn is the assistant's.
    """
    if all(message["role"] != "assistant" for message in messages):
        raise RowError(f"`{column}` has no assistant turn: nothing to train on", "add the answer, or remove the row")


def _clean_message(written: object, place: str) -> Message:
    if not isinstance(written, Mapping):
        raise RowError(f"{place} is {describe(written)}, not an object", "write it as {role: ..., content: ...}")
    message: Mapping[str, Any] = written
    content, written_role = message.get("content"), message.get("role")
    # Most turns of most datasets: nothing to convert, and no copy.
    if len(message) == 2 and isinstance(content, str) and written_role in _TEMPLATE_ROLES:
        _check_content(message, place)
        return message
    # Null keys are those of other rows in the same table.
    cleaned: dict[str, Any] = {key: value for key, value in message.items() if value is not None}
    for key, name in _KEYS.items():
        if key in cleaned and name not in cleaned:
            cleaned[name] = cleaned.pop(key)
    role = cleaned["role"] = _read_role(cleaned, place)
    is_trained = _take_marks(cleaned, role, place)
    if str(message.get("role", message.get("from"))).lower() == FUNCTION_CALL:
        calls = _parse_function_calls(cleaned.get("content"), f"{place}.value")
        cleaned = {"role": role, "content": "", "tool_calls": calls}
    else:
        _clean_extras(cleaned, place)
        if role == "assistant" and "tool_calls" in cleaned:
            # Many templates fail without a content, and none distinguishes it from "".
            cleaned.setdefault("content", "")
        _check_content(cleaned, place)
    return cleaned if is_trained else {**cleaned, TRAIN: False}


def _take_marks(message: dict[str, Any], role: str, place: str) -> bool:
    """Remove the marks of a turn's training, and return the result."""
    if partial := next((key for key in _PARTIAL_MARKS if key in message), None):
        raise RowError(f"{place}.{partial} marks parts of a turn", "take it out: a turn is trained on whole, or not")
    marks = {key: message.pop(key) for key in _MARKS if key in message}
    for key, value in marks.items():
        is_weight = key == "weight"
        if isinstance(value, bool) == is_weight or value not in (0, 1):
            raise RowError(f"{place}.{key} is {value!r}", f"write {'0 or 1' if is_weight else 'true or false'}")
    if len(set(map(bool, marks.values()))) > 1:
        raise RowError(f"{place} has {' and '.join(marks)}, which contradict each other", "keep one of them")
    is_trained = all(marks.values())
    if marks and is_trained and role != "assistant":
        found = f"{place}.{next(iter(marks))} asks to train on a turn of the role {role!r}"
        raise RowError(found, "take it out: only assistant turns are trained on")
    return is_trained


def _check_content(message: Message, place: str) -> None:
    content, speaks = message.get("content"), message["role"] == "assistant"
    if speaks and "tool_calls" in message:
        check_text(content, f"{place}.content")
    elif content is None:
        raise RowError(f"{place}.content is missing", "write the text of the turn")
    elif speaks:
        check_answer(content, f"{place}.content")
    else:
        check_text(content, f"{place}.content")


def _clean_extras(message: dict[str, Any], place: str) -> None:
    """Convert keys that are not plain text to the form that templates read, in place."""
    if isinstance(message.get("content"), (list, tuple)):
        message["content"] = _join_parts(message["content"], f"{place}.content")
    if FUNCTION_CALL in message and "tool_calls" not in message:  # OpenAI's key of a single call, before tools.
        calls = _parse_function_calls(message.pop(FUNCTION_CALL), f"{place}.{FUNCTION_CALL}")
        message["tool_calls"] = calls
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, (list, tuple)):
            raise RowError(f"{place}.tool_calls is {describe(calls)}, not a list", "write a list of tool calls")
        if calls:
            message["tool_calls"] = [_clean_call(call, f"{place}.tool_calls[{n}]") for n, call in enumerate(calls)]
        else:
            del message["tool_calls"]
    for key, value in message.items():
        if isinstance(value, str):
            check_text(value, f"{place}.{key}")


def _join_parts(parts: Sequence[object], place: str) -> str:
    texts = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            texts.append(check_text(part, f"{place}[{number}]"))
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind != "text":
            found = f"has type `{kind}`" if kind is not None else f"is {describe(part)}"
            raise RowError(f"{place}[{number}] {found}", "only text parts can be trained on: remove it, or the row")
        texts.append(check_text(part.get("text"), f"{place}[{number}].text"))
    return "".join(texts)


def _clean_call(call: object, place: str) -> Mapping[str, Any]:
    """Check a tool call; arguments in a JSON string, as in OpenAI's format, become the object that templates read."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not function.get("name"):
        raise RowError(f"{place} names no function", "write {type: function, function: {name: ..., arguments: {...}}}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # Of a call without any, OpenAI's is empty.
        arguments = _parse_json(arguments, f"{place}.function.arguments") if arguments.strip() else {}
    if not isinstance(arguments, Mapping):
        raise RowError(f"{place}.function.arguments is {describe(arguments)}, not an object", "write {name: value}")
    return check_json({**call, "function": {**function, "arguments": arguments}}, place)


def _parse_function_calls(value: object, place: str) -> list[Mapping[str, Any]]:
    parsed = _parse_json(value, place) if isinstance(value, str) else value
    calls = parsed if isinstance(parsed, (list, tuple)) else [parsed]
    if not calls:
        raise RowError(f"{place} is an empty list", "write at least one function call")
    return [_clean_call({"type": "function", "function": call}, f"{place}[{n}]") for n, call in enumerate(calls)]


def parse_tools(value: object) -> list[Any] | None:
    """Parse the ``tools`` column, a list of schemas or its JSON string; ``None`` without any.

    Raises:
        RowError: It is something else.
    """
    if not value:
        return None
    tools = _parse_json(value, "`tools`") if isinstance(value, str) else value
    if not isinstance(tools, (list, tuple)):
        raise RowError(f"`tools` is {describe(tools)}, not a list", "write a list of tool schemas")
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RowError(f"tools[{number}] is {describe(tool)}, not an object", "write each tool as a JSON schema")
    return check_json(list(tools), "`tools`") or None


def check_json(value: Json, place: str) -> Json:
    """Return ``value``, which templates can write as JSON.

    Raises:
        RowError: It holds something JSON has no word for, or half a surrogate pair.
    """
    try:
        check_text(json.dumps(value, ensure_ascii=False, allow_nan=False), place)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"{place} cannot be written as JSON: {error}", "use strings, numbers, lists, objects") from None
    return value


def _parse_json(text: str, place: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{place} is not valid JSON: {error}", "write it as JSON") from None


def _read_role(message: Mapping[str, Any], place: str) -> str:
    role, remedy = message.get("role"), f"use one of {', '.join(_TEMPLATE_ROLES)}"
    if role is None:
        raise RowError(f"{place} has no role", remedy)
    if not isinstance(role, str):
        raise RowError(f"{place}.role is {describe(role)}, not a string", remedy)
    known = ROLES.get(role.strip().lower())
    if known is None:
        raise RowError(f"{place} has the unknown role {role!r}", remedy)
    return known
