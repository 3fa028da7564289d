"""Chat messages in the spellings of public datasets, converted to the form that chat templates read."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import cycle, takewhile
from types import NoneType, UnionType
from typing import Any, Final, TypeGuard, TypeVar

from recipes_lib.config.tokenization import REASONING_KEYS
from recipes_lib.data.sources.rows import Message

FUNCTION_CALL: Final = "function_call"
CALLS_AS_TEXT: Final = "function_calls"
"""Key of a turn with calls as the text that OLMo 3's chat template writes, as in Dolci."""
_CALLERS: Final = (FUNCTION_CALL, "tool_call")
"""Roles of turns whose content is function calls."""
ROLES: Final = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "ai", *_CALLERS), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response"), "tool"),
    **dict.fromkeys(("tool_response", "environment", "ipython"), "tool"),
}
"""Role in a dataset (OpenAI, ShareGPT, ms-swift, OLMo, Llama 3 and variants) -> role in chat templates."""

_TEMPLATE_ROLES: Final = tuple(dict.fromkeys(ROLES.values()))
_KEYS: Final = {"from": "role", "value": "content", "parts": "content"}
"""Key of a turn in ShareGPT's layout, or in Gemini's -> key in chat templates."""


_CHATS: Final = ("messages", "conversations")
"""Columns whose turns may be strings without roles, of user and assistant alternately, as in LIMA and UltraChat."""

TRAIN: Final = "train"
"""Key of cleaned turns that are excluded from the loss, with the value False; ``split_marks`` removes it."""

_PAIR: Final = {
    "system": "system",
    **dict.fromkeys(("input", "human", "user"), "user"),
    **dict.fromkeys(("output", "assistant"), "assistant"),
}
"""Key of a question with its answer, as in Capybara, XTuner's data and MOSS -> role of the turn."""

_WEIGHTS: Final = ("weight", "loss_weight")
_MARKS: Final = (*_WEIGHTS, "train", "training", "loss")
"""Keys that include a turn in the loss or exclude it: 0 or 1 of OpenAI and LLaMA-Factory; booleans of axolotl and
ms-swift."""

_CHOICES: Final = ("choices", "options")
MEDIA: Final = ("image", "images", "video", "videos", "audio", "audios")
_MEDIA_MARKS: Final = ("<image>", "<video>", "<audio>")
"""Placeholders of media in texts, as in LLaVA and LLaMA-Factory."""

_TOOL_PARTS: Final = {
    **dict.fromkeys(("tool_use", "tool_call"), "write calls as `tool_calls: [{function: {name: ..., arguments: {}}}]`"),
    "tool_result": "write each result as a turn of its own: {role: tool, content: ...}",
}
"""Remedy for each type of part that Anthropic's API and LLaMA-Factory have for tools."""

_TEXT_PARTS: Final = ("text", "input_text", "output_text")
"""Types of parts that are texts; the last two are those of OpenAI's Responses API. Gemini's have no type."""

_INVISIBLE: Final = re.compile(r"[\s\u00ad\u200b-\u200f\u2060\ufeff]*")
"""White space and characters of no width, as a web page copied without its text leaves them."""

OBJECTS: Final = re.compile(r"""\s*\[\s*\{\s*(["'])""")
"""Beginning of a list of objects, in JSON or in Python's notation."""

TEXTS: Final = re.compile(r'\[(?:"(?:[^"\\]++|\\.)*+"(?:, ?|\]))+')
"""A list of texts in JSON, as the prompts of Chatbot Arena's 55k battles."""

REASONING: Final = re.compile(r"(model_)?(thinking|thoughts?|reasoning)(_trace)?|(complex_)?cot|chain_of_thought", re.I)
"""Columns that may have the reasoning of the answer beside them."""

_PARTIAL_MARKS: Final = ("train_detail", "training_detail")
_NO_TOKEN_IDS: Final = "name columns of texts, such as `dataset_columns: {inputs: inputs_pretokenized, targets: ...}`"
"""Remedy for token ids, as in P3 and FLAN."""

_NULLABLE: Final = ("default", "const")
"""Keywords of a JSON schema whose value may be null."""

_TYPES: Final[Mapping[str, type | UnionType]] = {
    "null": NoneType,
    "a boolean": bool,  # Before numbers: in Python, bool is a subclass of int.
    "a string": str,
    "a number": int | float,
    "an object": Mapping,
    "a list": list | tuple,
}

Json = TypeVar("Json")


class RowError(Exception):
    """Problem of a row without its location, which the caller adds.

    Attributes:
        found: What is wrong, in one clause.
        remedy: What to do, in one clause.
    """

    def __init__(self, found: str, remedy: str) -> None:
        self.found = found
        self.remedy = remedy


class Arguments(dict[str, Any]):
    """Arguments of a tool call: an object; where a chat template joins it to text, as DeepSeek's do, its JSON."""

    def __radd__(self, text: str) -> str:
        return text + json.dumps(self, ensure_ascii=False)


def describe(value: object) -> str:
    """Return the JSON name of a value's type."""
    return next((name for name, kind in _TYPES.items() if isinstance(value, kind)), f"of type {type(value).__name__}")


def check_text(value: object, place: str) -> str:
    """Return ``value`` if it is a string that every tokenizer can encode.

    Raises:
        RowError: ``value`` is not a string, or contains a NUL character or an unpaired surrogate.
    """
    if not isinstance(value, str):
        raise RowError(f"{place} is {describe(value)}, not a string", "write it as a string")
    if "\0" in value:
        found = f"{place} holds a NUL character at position {value.index(chr(0))}"
        raise RowError(found, "remove it; NULs everywhere mean UTF-16 text that was read as UTF-8")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            found = f"{place} holds half a surrogate pair, \\u{ord(value[error.start]):04x}, at position {error.start}"
            remedy = "write the whole character; text cut in the middle of an emoji leaves such halves"
            raise RowError(found, remedy) from None
    return value


def check_answer(value: object, place: str) -> str:
    """Return ``value`` if it is a string that a model can be trained to generate.

    Raises:
        RowError: As ``check_text``; or ``value`` shows nothing, which would train the model to end its turn at once.
    """
    text = check_text(value, place)
    if _INVISIBLE.fullmatch(text):
        raise RowError(f"{place} is empty", "write the answer, or remove the row")
    return text


def is_answer(text: str) -> bool:
    """Return whether ``check_answer`` accepts ``text``; used by commands that write generated rows."""
    with suppress(RowError):
        return bool(check_answer(text, "the answer"))
    return False


def clean_messages(value: object, column: str) -> list[Message]:
    """Check a list of turns, or its JSON string, and convert each to ``role``, ``content`` and other template keys.

    An object of lists is read as a list of objects. Turns that are all strings are those of the user and the assistant
    alternately, as in LIMA; objects with ``input`` and ``output`` are both turns, as in Capybara. Null keys of a turn
    are removed: Arrow writes them if a turn of another row has the key. Text parts are joined. A mark that excludes a
    turn from the loss becomes ``TRAIN: False``; other marks are removed. The last turn may be the user's, as often in
    logged conversations; it is not a target.

    Args:
        value: Value of the column.
        column: Name of the column in errors.

    Raises:
        RowError: A turn is invalid; describes the first one, as ``column[turn].key``.
    """
    if isinstance(value, str):  # A cell of a table.
        value = parse_json(value, f"`{column}`")
    if are_columns(value):
        value = _transpose(value, column)
    if not isinstance(value, (list, tuple)):
        raise RowError(f"`{column}` is {describe(value)}, not a list of messages", f"write `{column}` as a list")
    if not value:
        raise RowError(f"`{column}` is an empty list", "write at least one message, or remove the row")
    # A single string, or strings of JSON, are no such turns.
    if column in _CHATS and value[1:] and all(isinstance(turn, str) and not turn.startswith("{") for turn in value):
        roles = cycle(("user", "assistant"))
        value = [{"role": role, "content": turn} for role, turn in zip(roles, value, strict=False)]
    elif are_pairs(value):
        written = [(turn[key], role) for turn in value for key, role in _PAIR.items() if key in turn]
        value = [{"role": role, "content": content} for content, role in written if content or role != "system"]
    return [_clean_message(message, f"{column}[{turn}]") for turn, message in enumerate(value)]


def zip_turns(questions: str, answers: str, column: str) -> list[Message]:
    """Return the chat of questions with their answers, each a list of texts in JSON.

    Args:
        questions: Questions, which match ``TEXTS``.
        answers: Value of the column of answers.
        column: Its name in errors.

    Raises:
        RowError: There is not one answer to each question, or one is empty.
    """
    asked: Any = parse_json(questions, "the prompt")
    given = parse_json(answers, f"`{column}`")
    if not isinstance(given, list) or len(given) != len(asked):
        raise RowError(f"`{column}` has not one answer to each prompt", "write as many as prompts, or remove the row")
    pairs = zip(asked, given, strict=True)
    return clean_messages([{"input": question, "output": answer} for question, answer in pairs], column)


def find_roles(turns: object) -> list[str]:
    """Return the role of each object in a list, an empty one if it has none."""
    items = [turn for turn in turns if isinstance(turn, Mapping)] if isinstance(turns, (list, tuple)) else []
    return [ROLES.get(str(turn.get("from") or turn.get("role")).strip().lower(), "") for turn in items]


def are_pairs(value: object) -> bool:
    """Return whether a value is a list of questions with their answers, as in Capybara."""
    turns = value if isinstance(value, (list, tuple)) else ()
    is_pair = (isinstance(turn, Mapping) and {"user", "assistant"} <= set(map(_PAIR.get, turn)) for turn in turns)
    return bool(turns) and all(is_pair)


def are_columns(value: object) -> TypeGuard[Mapping[str, Sequence[Any]]]:
    """Return whether a value is an object of lists, as which ``datasets.Sequence`` stores a list of objects."""
    return (
        isinstance(value, Mapping) and bool(value) and all(isinstance(item, (list, tuple)) for item in value.values())
    )


def _transpose(columns: Mapping[str, Sequence[Any]], column: str) -> list[dict[str, Any]]:
    """Return the objects of an object of lists.

    Raises:
        RowError: The lists have different lengths.
    """
    lengths = {key: len(values) for key, values in columns.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{length} of `{key}`" for key, length in lengths.items())
        raise RowError(f"`{column}` is an object of lists of different lengths: {found}", "write a list of messages")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def read_history(history: object) -> list[Message]:
    """Return the chat of a list of pairs, each a question with its answer, as in LLaMA-Factory's ``history``.

    Raises:
        RowError: It is no such list, or an answer is empty.
    """
    if not isinstance(history, (list, tuple)):
        raise RowError(f"`history` is {describe(history)}, not a list", "write [[question, answer], ...]")
    turns: list[Message] = []
    for number, pair in enumerate(history):
        place = f"history[{number}]"
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise RowError(f"{place} is not a [question, answer] pair", "write [[question, answer], ...]")
        question, answer = check_text(pair[0], f"{place}[0]"), check_answer(pair[1], f"{place}[1]")
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return turns


def split_marks(messages: Sequence[Message]) -> tuple[Sequence[Message], frozenset[int]]:
    """Return cleaned turns without marks, as templates read them, and the indices of turns excluded from the loss."""
    untrained = [turn for turn, message in enumerate(messages) if TRAIN in message]
    if untrained:
        messages = [{key: value for key, value in message.items() if key != TRAIN} for message in messages]
    return messages, frozenset(untrained)


def check_answered(messages: Iterable[Message], column: str) -> None:
    """Raise for a chat without targets.

    Raises:
        RowError: The chat has no assistant turn.
    """
    if all(message["role"] != "assistant" for message in messages):
        raise RowError(f"`{column}` has no assistant turn: nothing to train on", "add the answer, or remove the row")


def check_asked(messages: Iterable[Message]) -> None:
    """Raise for a chat without a question, which would train on answers to nothing.

    Public datasets whose questions belong to another dataset have an empty text or ``-`` in their place, such as
    OpenCodeReasoning 2 and parts of Nemotron's post-training data.

    Raises:
        RowError: Before the first answer, the turns of the user are empty or ``-``.
    """
    head = takewhile(lambda message: message["role"] != "assistant", messages)
    if {message["content"].strip() for message in head if message["role"] == "user"} in ({""}, {"-"}):
        remedy = "write it, as it is in the dataset that has the questions of this one, or remove the row"
        raise RowError("the question is empty, or `-` in place of one", remedy)


def read_reasoning(raw: Mapping[str, Any], answer: object) -> dict[str, str]:
    """Return the ``reasoning_content`` of an answer from its column, if the row has one.

    Raises:
        RowError: It is not a string; or a column of another name may be the reasoning, without which the model would
            learn to answer at once.
    """
    if thought := raw.get("reasoning_content"):
        return {"reasoning_content": check_text(thought, "`reasoning_content`")}
    for column in filter(REASONING.fullmatch, () if "</think>" in str(answer) else raw):
        if len(thought := str(raw[column])) > 30 or len(thought.split()) > 3:  # Not a switch, such as `on`.
            remedy = f"write `dataset_columns: {{reasoning_content: {column}}}` to train on it, or `{{{column}: null}}`"
            raise RowError(f"`{column}` may be the reasoning of the answer", remedy)
    return {}


def refuse_guesses(raw: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Raise for a row about images, sound or choices in columns that are not read: its answers would be guesses.

    Args:
        raw: The row.
        fields: Its canonical fields.

    Raises:
        RowError: The row has a column of media, and one of ``fields`` has a placeholder; or the row is neither a chat
            nor a text, so that its question may be about the media even without one. Or the answer is the letter or
            index of a choice, and ``fields`` lack a choice, as in RACE and MMLU-Pro.
    """
    answer = str(raw.get("answer", raw.get("solution", raw.get("answerKey", raw.get("correct"))))).strip(" ().")
    choices: Any = next(filter(None, map(raw.get, (*_CHOICES, answer))), ())  # A column for each letter in C-Eval.
    if isinstance(choices, Mapping):  # `{text: [...], label: [...]}` in ARC, `{A: ..., B: ...}` in MedQA.
        choices = choices.get("text") or list(choices.values())
    texts = [str(choice) for choice in choices] if isinstance(choices, (list, tuple)) else [str(choices)]
    # All of them: a context may have some of their words. Both as JSON, whose escapes are the same in any text.
    shown = json.dumps(fields, default=str) if choices and len(answer) == 1 and answer not in texts else ""
    if fields and shown and not all(json.dumps(text.strip())[1:-1] in shown for text in texts):
        remedy = "write them into the question, or hide the column by `dataset_columns`, if it has another meaning"
        raise RowError(f"the answer is {answer!r}, one of the choices, which the question does not have", remedy)
    column = next((column for column in raw if column in MEDIA and raw[column]), None)
    if column is None:  # Most rows, whose text is not written out.
        return
    is_marked = any(mark in str(fields) for mark in _MEDIA_MARKS)
    if is_marked or not raw.keys() & {*_CHATS, "text"}:
        found = f"the text {'refers to' if is_marked else 'may be about'} `{column}`, and only text is trained on"
        raise RowError(found, f"remove such rows; or write `dataset_columns: {{{column}: null}}` to train on the text")


def _clean_message(written: object, place: str) -> Message:
    if not isinstance(written, Mapping):
        remedy = _NO_TOKEN_IDS if isinstance(written, int) else "write it as {role: ..., content: ...}"
        raise RowError(f"{place} is {describe(written)}, not an object", remedy)
    message: Mapping[str, Any] = written
    content, written_role = message.get("content"), message.get("role")
    # Fast path for most turns: nothing to convert, and no copy.
    if len(message) == 2 and isinstance(content, str) and written_role in _TEMPLATE_ROLES:
        _check_content(message, place)
        return message
    cleaned: dict[str, Any] = {key: value for key, value in message.items() if value is not None}
    for key, name in _KEYS.items():
        if key in cleaned and name not in cleaned:
            cleaned[name] = cleaned.pop(key)
    written_role, role = cleaned.get("role"), _read_role(cleaned, place)
    cleaned["role"] = role
    is_trained = _take_marks(cleaned, role, place)
    if str(written_role).strip().lower() in _CALLERS:
        calls = _parse_function_calls(cleaned.get("content"), f"{place}.content")
        cleaned = {"role": role, "content": "", "tool_calls": calls}
    else:
        _clean_extras(cleaned, place)
        if role == "assistant" and _has_calls(cleaned):
            # Many templates fail for a missing content, and none distinguishes it from an empty one.
            cleaned.setdefault("content", "")
        _check_content(cleaned, place)
    return cleaned if is_trained else {**cleaned, TRAIN: False}


def _take_marks(message: dict[str, Any], role: str, place: str) -> bool:
    """Remove the marks of a turn in place, and return whether it is included in the loss."""
    if partial := next((key for key in _PARTIAL_MARKS if key in message), None):
        raise RowError(f"{place}.{partial} marks parts of a turn", "remove it: only whole turns can be excluded")
    marks = {key: message.pop(key) for key in _MARKS if key in message}
    for key, value in marks.items():
        is_weight = key in _WEIGHTS
        if isinstance(value, bool) == is_weight or value not in (0, 1):
            raise RowError(f"{place}.{key} is {value!r}", f"write {'0 or 1' if is_weight else 'true or false'}")
    if len(set(map(bool, marks.values()))) > 1:
        raise RowError(f"{place} has {' and '.join(marks)}, which contradict each other", "keep one of them")
    is_trained = all(marks.values())
    if marks and is_trained and role != "assistant":
        found = f"{place}.{next(iter(marks))} asks to train on a turn of the role {role!r}"
        raise RowError(found, "remove it: only assistant turns are trained on")
    return is_trained


def _check_content(message: Message, place: str) -> None:
    content = message.get("content")
    if content is None:
        raise RowError(f"{place}.content is missing", "write the text of the turn")
    # An answer may be empty beside tool calls.
    check = check_answer if message["role"] == "assistant" and not _has_calls(message) else check_text
    check(content, f"{place}.content")


def _has_calls(message: Message) -> bool:
    text = message.get(CALLS_AS_TEXT)
    return "tool_calls" in message or (isinstance(text, str) and bool(text.strip()))


def _clean_extras(message: dict[str, Any], place: str) -> None:
    """Convert text parts and tool calls to the form that templates read, in place."""
    if isinstance(message.get("content"), (list, tuple)):
        parts = list(message["content"])
        if message["role"] == "assistant" and (thought := _read_thought(parts, f"{place}.content[0]")) is not None:
            message.setdefault("reasoning_content", thought)
            del parts[0]
        message["content"] = _join_parts(parts, f"{place}.content")
    _join_details(message, f"{place}.reasoning_details")
    # OpenAI's deprecated key of a single call; empty in tables, in turns without one.
    if FUNCTION_CALL in message and "tool_calls" not in message and (call := message.pop(FUNCTION_CALL)):
        message["tool_calls"] = _parse_function_calls(call, f"{place}.{FUNCTION_CALL}")
    written = message.pop("tool_calls", None)
    if not isinstance(written, str):
        written = _drop_nulls(written)
    elif written.strip():  # Like schemas of tools, calls often have no common Arrow type.
        written = parse_json(written, f"{place}.tool_calls")
    if written:
        if not isinstance(written, (list, tuple)):
            raise RowError(f"{place}.tool_calls is {describe(written)}, not a list", "write a list of tool calls")
        message["tool_calls"] = [_clean_call(call, f"{place}.tool_calls[{n}]") for n, call in enumerate(written)]
    for key, value in message.items():
        if isinstance(value, str) or key in REASONING_KEYS:  # Many templates omit it otherwise.
            check_text(value, f"{place}.{key}")
        else:
            check_json(value, f"{place}.{key}", allow_nan=True)


def _read_thought(parts: Sequence[object], place: str) -> str | None:
    """Return the reasoning in the first part of an answer, as in Anthropic's API; ``None`` if it is of another type."""
    first = parts[0] if parts else None
    if not isinstance(first, Mapping) or first.get("type") not in ("thinking", "reasoning"):
        return None
    place, thought = f"{place}.{first['type']}", first.get("thinking", first.get("text", first.get("value")))
    # A list of parts in Mistral's API.
    return _join_parts(thought, place) if isinstance(thought, (list, tuple)) else check_text(thought, place)


def _join_details(message: dict[str, Any], place: str) -> None:
    """Replace the list of reasoning of OpenRouter's API by its text, in place."""
    if isinstance(details := message.get("reasoning_details"), (list, tuple)):
        del message["reasoning_details"]
        thoughts = [part.get("text") or part.get("summary") or "" for part in details if isinstance(part, Mapping)]
        if thought := _join_parts(thoughts, place):  # Encrypted details have no text.
            message.setdefault("reasoning", thought)


def _join_parts(parts: Sequence[object], place: str) -> str:
    texts = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            texts.append(check_text(part, f"{place}[{number}]"))
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or not (kind in _TEXT_PARTS or _drop_nulls(part).keys() == {"text"}):
            found = f"has type `{kind}`" if kind is not None else f"is {describe(part)}"
            remedy = _TOOL_PARTS.get(str(kind), "only text parts can be trained on: remove it, or the row")
            raise RowError(f"{place}[{number}] {found}", remedy)
        texts.append(check_text(part.get("text", part.get("value")), f"{place}[{number}].text"))
    return "".join(texts)


def _clean_call(call: object, place: str) -> Mapping[str, Any]:
    """Check a tool call; arguments as a JSON string, as in OpenAI's API, become the object that templates read."""
    if isinstance(call, Mapping) and "function" not in call:  # `{name, arguments}` alone, as in Hermes' notation.
        inner = {key: call[key] for key in ("name", "arguments") if key in call}
        call = {"type": "function", **{key: call[key] for key in call if key not in inner}, "function": inner}
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not function.get("name"):
        raise RowError(f"{place} names no function", "write {type: function, function: {name: ..., arguments: {...}}}")
    arguments = function.get("arguments") or {}  # OpenAI's API writes an empty string for a call without arguments.
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{place}.function.arguments")
    if not isinstance(arguments, Mapping):
        raise RowError(f"{place}.function.arguments is {describe(arguments)}, not an object", "write {name: value}")
    return check_json({**call, "function": {**function, "arguments": Arguments(arguments)}}, place)


def _parse_function_calls(value: object, place: str) -> list[Mapping[str, Any]]:
    parsed = parse_json(value, place) if isinstance(value, str) else _drop_nulls(value)
    calls = parsed if isinstance(parsed, (list, tuple)) else [parsed]
    if not calls:
        raise RowError(f"{place} is an empty list", "write at least one function call")
    return [_clean_call(call, f"{place}[{n}]") for n, call in enumerate(calls)]


def _drop_nulls(value: Any, kept: Collection[str] = ()) -> Any:
    """Return a value without the null fields of its objects, apart from those ``kept``.

    In JSON exported from Arrow, as in Arrow itself, every tool and call has the parameters of all. Nulls in a text
    of JSON are the author's.
    """
    if isinstance(value, Mapping):
        return {key: _drop_nulls(item, kept) for key, item in value.items() if item is not None or key in kept}
    return [_drop_nulls(item, kept) for item in value] if isinstance(value, (list, tuple)) else value


def _parse_tools(value: object) -> list[Any] | None:
    """Return the tool schemas of the ``tools`` column, a list of objects or JSON strings, or the JSON string of one.

    ``None`` if there are none.

    Raises:
        RowError: The value is not a list of objects that can be written as JSON.
    """
    tools = parse_json(value, "`tools`") if isinstance(value, str) else _drop_nulls(value, _NULLABLE)
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise RowError(f"`tools` is {describe(tools)}, not a list", "write a list of tool schemas")
    # Schemas of different fields have no common Arrow type, and are often written as texts.
    tools = [parse_json(tool, f"tools[{at}]") if isinstance(tool, str) else tool for at, tool in enumerate(tools)]
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RowError(f"tools[{number}] is {describe(tool)}, not an object", "write each tool as a JSON schema")
    return check_json(tools, "`tools`") or None


def read_chat_extras(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row for the columns ``tools`` and ``chat_template_kwargs``, without those it lacks.

    Raises:
        RowError: One of them is invalid.
    """
    extras: dict[str, Any] = {}
    if raw.get("tools"):
        extras["tools"] = _parse_tools(raw["tools"])
    kwargs = raw.get("chat_template_kwargs")
    if kwargs and isinstance(kwargs, str):
        kwargs = parse_json(kwargs, "`chat_template_kwargs`")
    if kwargs:
        if not isinstance(kwargs, Mapping):
            raise RowError(f"`chat_template_kwargs` is {describe(kwargs)}, not an object", "write {name: value}")
        if given := [f"`{name}`" for name in ("messages", "tools", "add_generation_prompt") if name in kwargs]:
            found = f"`chat_template_kwargs` has {', '.join(given)}, which the template gets from elsewhere"
            raise RowError(found, "remove it; messages and tools are columns of their own")
        extras["template_kwargs"] = check_json(dict(kwargs), "`chat_template_kwargs`")
    return extras


def check_json(value: Json, place: str, *, allow_nan: bool = False) -> Json:
    """Return ``value`` if templates can write it as JSON, or, with ``allow_nan``, need not write it.

    Raises:
        RowError: ``value`` contains something that JSON cannot represent, or an unpaired surrogate.
    """
    try:
        check_text(json.dumps(value, ensure_ascii=False, allow_nan=allow_nan), place)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"{place} cannot be written as JSON: {error}", "use strings, numbers, lists, objects") from None
    return value


def parse_chat(value: object, column: str) -> object:
    """Return the turns that a string has as JSON, as in a cell of a table; other values are returned unchanged.

    Raises:
        RowError: The string has turns in Python's notation, as written by ``to_csv`` of pandas and ``datasets``.
    """
    start = OBJECTS.match(value) if isinstance(value, str) else None
    if start is None:
        return value
    value, quote = start.string, start[1]
    spellings = ("role", "content"), ("from", "value")
    if not any(all(f"{quote}{key}{quote}:" in value for key in keys) for keys in spellings):
        return value
    if quote == "'":
        raise RowError(f"`{column}` has messages in Python's notation, not in JSON", "export to JSON Lines or Parquet")
    return parse_json(value, f"`{column}`")


def parse_json(text: str, place: str) -> object:
    """Return the value of a JSON text.

    Raises:
        RowError: The text is not valid JSON.
    """
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
