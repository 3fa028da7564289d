"""What of a row its chat template writes: a message that vanishes is refused, what else vanishes is remarked on.

A text that stands where it is looked for is written. Of one that does not, as after trimming or escaping, a second
render decides: had the row said something else there, would the chat be the same?
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from recipes_lib.data.remarks import Remark
from recipes_lib.data.rows import Message, Row
from recipes_lib.data.templates import REASONING_KEYS, Rendered, TemplateError
from recipes_lib.errors import DataError, Problem

PLACEHOLDER: Final = "placeholder"
THINK_END: Final = "</think>"

_THOUGHT: Final = re.compile(r"(?:.*?<think>)?(.*?)</think>", re.DOTALL)


class WrittenCheck:
    """Compares rows with what their template made of them.

    Args:
        render: Renders a row, with a generation prompt or without.
        special_tokens: Text of the tokenizer's special tokens.
    """

    def __init__(self, render: Callable[[Row, bool], Rendered], special_tokens: Collection[str]) -> None:
        self._render = render
        self._special = tuple(special_tokens)
        self._openers = tuple({token[0] for token in special_tokens})

    def refuse_unwritten(self, row: Row, rendered: Rendered, trained: Collection[int] = ()) -> None:
        """Refuse a row of which the template leaves a message out.

        Args:
            row: A chat.
            rendered: The same, rendered.
            trained: Messages that are known to be written.

        Raises:
            DataError: It does.
        """
        written = _find_written(_messages(row), rendered, trained)
        if len(written) < len(_messages(row)):
            for number in range(len(_messages(row))):
                if number not in written:
                    self._check_message(row, rendered, number)

    def list_remarks(self, row: Row, rendered: Rendered, trained: Collection[int]) -> list[Remark]:
        """What is to be told of a row.

        Args:
            row: A chat.
            rendered: The same, rendered.
            trained: The messages that are trained on.

        Raises:
            DataError: The template does not write the arguments of a tool call that is trained on.
        """
        messages, remarks = _messages(row), []
        for number, message in enumerate(messages):
            if number in trained:
                if message.get("tool_calls"):
                    remarks += self._check_calls(row, rendered, number)
            elif self._spells_special(message):
                remarks.append(Remark.SPECIAL_TEXT)
        if len(messages) - 1 in trained and self._loses_reasoning(row, rendered):
            remarks.append(Remark.LOST_REASONING)
        if row.tools and self._loses_tools(row, rendered):
            remarks.append(Remark.LOST_TOOLS)
        return list(dict.fromkeys(remarks))

    def _spells_special(self, message: Message) -> bool:
        content = message.get("content")
        said = content if isinstance(content, str) else "".join(find_texts(message))
        for opener in self._openers:
            if opener in said:
                return any(token in said for token in self._special)
        return False

    def _check_message(self, row: Row, rendered: Rendered, number: int) -> None:
        turn = rendered.turn(number)
        message = _messages(row)[number]
        if calls := message.get("tool_calls"):  # What is said beside them may be left out.
            renamed = [_change_function(call, name=_say_else(_read_name(call))) for call in calls]
            if self._ignores(row, rendered, number, {**message, "tool_calls": renamed}):
                found = f"message {number} calls {_read_name(calls[0])!r}, but the chat template does not write that"
                raise DataError(Problem(row.where, found, "use a template that writes tool_calls"))
            return
        # Many templates write a system message before the loop, or into the first turn.
        head = rendered.text[: rendered.turns[0].end] if rendered.turns else rendered.text
        if all(said in turn or said in head for said in find_texts(message)):
            return
        if self._ignores(row, rendered, number, reword(message)):
            found = f"the chat template does not write message {number}, of the role {message['role']!r}"
            remedy = "use a template that writes such messages (chat_template_path), or take them out of the rows"
            raise DataError(Problem(row.where, found, remedy))

    def _check_calls(self, row: Row, rendered: Rendered, number: int) -> list[Remark]:
        message, turn = _messages(row)[number], rendered.turn(number)
        remarks = []
        answers = [said.rpartition(THINK_END)[2].strip() for said in find_texts(message)]
        if any(said not in turn for said in answers) and self._ignores(row, rendered, number, reword(message)):
            remarks.append(Remark.LOST_BESIDE_CALL)
        for at, call in enumerate(message["tool_calls"]):
            function = call.get("function") or call
            arguments = function.get("arguments")
            if not isinstance(arguments, Mapping) or not arguments:
                continue
            if str(dict(arguments)) in turn:
                remarks.append(Remark.PYTHON_ARGUMENTS)
            elif not _writes_arguments(turn, arguments):
                calls = list(message["tool_calls"])
                calls[at] = _change_function(call, arguments={**arguments, PLACEHOLDER: PLACEHOLDER})
                if self._ignores(row, rendered, number, {**message, "tool_calls": calls}):
                    found = f"message {number} calls {function['name']!r}, but the chat template writes no arguments"
                    raise DataError(Problem(row.where, found, "use a template that writes tool_calls"))
        return remarks

    def _loses_reasoning(self, row: Row, rendered: Rendered) -> bool:
        """Whether the template drops the reasoning of the last turn, on which a model would learn to reason."""
        last = len(_messages(row)) - 1
        message = _messages(row)[last]
        if len(message) == 2 and THINK_END not in (message.get("content") or ""):
            return False
        key = next((key for key in REASONING_KEYS if message.get(key)), "content")
        said = message.get(key)
        if not isinstance(said, str) or (key == "content" and THINK_END not in said):
            return False
        thought = _THOUGHT.match(said) if key == "content" else None
        start, end = thought.span(1) if thought else (0, len(said))
        reasoning = said[start:end].strip()
        other = said[:start] + _say_else(reasoning) + said[end:]
        return reasoning not in rendered.turn(last) and self._ignores(row, rendered, last, {**message, key: other})

    def _loses_tools(self, row: Row, rendered: Rendered) -> bool:
        assert row.tools
        function = row.tools[0].get("function")
        description = (function if isinstance(function, Mapping) else row.tools[0]).get("description")
        if isinstance(description, str) and description.strip() and description.strip() in rendered.text:
            return False
        return self._is_same(replace(row, tools=None), rendered)

    def _ignores(self, row: Row, rendered: Rendered, number: int, other: Message) -> bool:
        messages = list(_messages(row))
        messages[number] = other
        return self._is_same(replace(row, messages=messages), rendered)

    def _is_same(self, row: Row, rendered: Rendered) -> bool:
        try:
            return self._render(row, rendered.asks).text == rendered.text
        except TemplateError:
            return False  # It reads what it refuses.


def _find_written(messages: Sequence[Message], rendered: Rendered, trained: Collection[int]) -> set[int]:
    """The trained messages, and those whose text stands in what they wrote."""
    written = set(trained)
    for number, start, end in rendered.turns:
        if number not in written:
            content, calls = messages[number].get("content"), messages[number].get("tool_calls") or ()
            if any(rendered.text.find(_read_name(call), start, end) < 0 for call in calls):
                continue
            if isinstance(content, str) and rendered.text.find(content.strip(), start, end) >= 0:
                written.add(number)
    return written


def find_texts(message: Message) -> list[str]:
    """What a message says, trimmed, as templates do; one text per content part."""
    content = message.get("content")
    if isinstance(content, str):
        said = content.strip()
        return [said] if said else []
    parts = [part.get("text") for part in content or []]
    return [part.strip() for part in parts if isinstance(part, str) and part.strip()]


def reword(message: Message) -> Message:
    """The message with other words in the place of each that it says."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": _say_else(content)}
    return {
        **message,
        "content": [{**part, "text": _say_else(part["text"])} if part.get("text") else part for part in content],
    }


def _read_name(call: Mapping[str, Any]) -> str:
    return str((call.get("function") or call)["name"])


def _change_function(call: Mapping[str, Any], **changes: Any) -> Mapping[str, Any]:
    """The tool call with another name, or other arguments."""
    return {**call, "function": {**call["function"], **changes}} if call.get("function") else {**call, **changes}


def _say_else(text: str) -> str:
    return PLACEHOLDER if PLACEHOLDER not in text else "something else"


def _writes_arguments(turn: str, arguments: Mapping[str, Any]) -> bool:
    as_json = json.dumps(arguments, ensure_ascii=False)
    return as_json in turn or all(str(value) in turn for value in arguments.values())


def _messages(row: Row) -> Sequence[Message]:
    assert row.messages is not None
    return row.messages
