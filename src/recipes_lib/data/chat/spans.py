"""Target character spans of a rendered chat: derived from the template, then verified against the messages.

The span of a turn starts after the generation prompt, so that it includes reasoning and tool calls. It ends with the
terminator, the special token on which a server stops.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from recipes_lib.config.tokenization import REASONING_KEYS
from recipes_lib.data.chat.templates import NOBODY, ChatTemplate, Rendered, Span, TemplateError
from recipes_lib.data.sources.messages import CALLS_AS_TEXT
from recipes_lib.data.sources.rows import Message, Remark, Row
from recipes_lib.errors import DataError, Problem

PLACEHOLDER: Final = "placeholder"
THINK_END: Final = "</think>"

_CLOSING: Final = re.compile(rf"\s+{THINK_END}")
_THOUGHT: Final = re.compile(r"(?:.*?<think>)?(.*?)</think>", re.DOTALL)


class WrittenCheck:
    """Verifies that a template writes the messages of a chat, and finds what it omits.

    A text that does not occur in the rendering may still be written, in another form (escaped, trimmed). Therefore the
    test is by intervention: the part is changed and the chat rendered again; an equal rendering shows that the template
    ignores the part. The search for the literal text only avoids most of these renderings.

    Args:
        render: Function of a row and a flag, whether to add the generation prompt, that renders the row.
        special: Pattern of the texts of the tokenizer's special tokens.
    """

    def __init__(self, render: Callable[[Row, bool], Rendered], special: re.Pattern[str]) -> None:
        self._render = render
        self._special = special

    def refuse_unwritten(self, row: Row, rendered: Rendered, trained: Collection[int] = ()) -> None:
        """Raise for a row of which the template omits a message.

        Args:
            row: A chat.
            rendered: Rendering of ``row``.
            trained: Indices of messages that are known to be written.

        Raises:
            DataError: The template omits a message.
        """
        for number in range(len(_list_messages(row))):
            if number not in trained:
                self._check_message(row, rendered, number)

    def list_remarks(self, row: Row, rendered: Rendered, trained: Collection[int]) -> list[Remark]:
        """Return the remarks on a row.

        Args:
            row: A chat.
            rendered: Rendering of ``row``.
            trained: Indices of the messages that are trained on.

        Raises:
            DataError: The template omits the arguments of a tool call that is trained on.
        """
        messages, remarks = _list_messages(row), []
        for number, message in enumerate(messages):
            if number in trained:
                if self._rewrites_reasoning and THINK_END in str(message.get("content")):
                    remarks.append(Remark.TAGGED_REASONING)
                if message.get("tool_calls"):
                    remarks += self._check_calls(row, rendered, number)
            elif message["role"] == "tool" and re.search(r"(<tool_response>\s*){2}", rendered.turn(number)):
                remarks.append(Remark.TAGGED_RESULT)
            elif any(map(self._special.search, find_texts(message))):
                remarks.append(Remark.SPECIAL_TEXT)
        if len(messages) - 1 in trained and self._loses_reasoning(row, rendered):
            remarks.append(Remark.LOST_REASONING)
        if row.tools and self._loses_tools(row, rendered):
            remarks.append(Remark.LOST_TOOLS)
        return list(dict.fromkeys(remarks))

    def _check_message(self, row: Row, rendered: Rendered, number: int) -> None:
        turn = rendered.turn(number)
        message = _list_messages(row)[number]
        if calls := message.get("tool_calls"):  # The text beside them can be omitted.
            renamed = [_change_function(call, name=_replace_text(_read_name(call))) for call in calls]
            is_found = all(_read_name(call) in turn for call in calls)
            if not is_found and self._ignores(row, rendered, number, {**message, "tool_calls": renamed}):
                found = f"message {number} calls {_read_name(calls[0])!r}, but the chat template does not write that"
                raise DataError(Problem(row.where, found, "use a template that writes tool_calls"))
            return
        # Many templates render a system message before the loop, or inside the first turn.
        head = rendered.text[: rendered.turns[0].end] if rendered.turns else rendered.text
        if all(text in turn or text in head for text in find_texts(message)):
            return
        if self._ignores(row, rendered, number, reword(message)):
            found = f"the chat template does not write message {number}, of the role {message['role']!r}"
            remedy = "write chat_template_path: FILE with such messages, or remove them (rows, `system_prompt`)"
            raise DataError(Problem(row.where, found, remedy))

    def _check_calls(self, row: Row, rendered: Rendered, number: int) -> list[Remark]:
        message, turn = _list_messages(row)[number], rendered.turn(number)
        remarks = [] if row.tools else [Remark.NO_TOOLS]
        beside = [text.rpartition(THINK_END)[2].strip() for text in find_texts(message)]
        lost = [text for text in beside if text not in rendered.parts(number)[0]]
        if any(text in turn for text in lost) or (lost and self._ignores(row, rendered, number, reword(message))):
            remarks.append(Remark.LOST_BESIDE_CALL)
        for at, call in enumerate(message["tool_calls"]):
            function = call["function"]
            if not (arguments := function.get("arguments")):
                continue
            if str(dict(arguments)) in turn:  # `{{ arguments }}` in Jinja writes Python's `str` of the object.
                remarks.append(Remark.PYTHON_ARGUMENTS)
            elif not _writes_arguments(turn, arguments):
                calls = list(message["tool_calls"])
                calls[at] = _change_function(call, arguments={**arguments, PLACEHOLDER: PLACEHOLDER})
                if self._ignores(row, rendered, number, {**message, "tool_calls": calls}):
                    found = f"message {number} calls {function['name']!r}, but the chat template writes no arguments"
                    raise DataError(Problem(row.where, found, "use a template that writes tool_calls"))
        return remarks

    def _loses_reasoning(self, row: Row, rendered: Rendered) -> bool:
        """Return whether the template omits the reasoning of the last turn, on which a reasoning model would train."""
        last = len(_list_messages(row)) - 1
        message = _list_messages(row)[last]
        key = next((key for key in REASONING_KEYS if message.get(key)), "content")
        text = message.get(key)
        if not isinstance(text, str) or (key == "content" and THINK_END not in text):
            return False
        thought = _THOUGHT.match(text) if key == "content" else None
        start, end = thought.span(1) if thought else (0, len(text))
        reasoning = text[start:end].strip()
        other = text[:start] + _replace_text(reasoning) + text[end:]
        return reasoning not in rendered.turn(last) and self._ignores(row, rendered, last, {**message, key: other})

    @cached_property
    def _rewrites_reasoning(self) -> bool:
        """Whether the template writes ``<think>`` tags of an answer beside a block of its own, or in another form."""
        tagged = {"role": "assistant", "content": f"<think>\n{PLACEHOLDER}\n{THINK_END}\n\nanswer"}
        keyed = {"role": "assistant", "content": "answer", "reasoning_content": PLACEHOLDER}
        rows = (Row(where="", messages=[{"role": "user", "content": "question"}, turn]) for turn in (tagged, keyed))
        try:
            # Without the system prompt, which can describe the tags.
            own, other = ("".join(self._render(row, False).text.rpartition("question")[2].split()) for row in rows)
        except TemplateError:  # The template refuses this chat.
            return False
        return own.count(THINK_END) > 1 or (PLACEHOLDER in other and own != other)

    def _loses_tools(self, row: Row, rendered: Rendered) -> bool:
        assert row.tools
        function = row.tools[0].get("function")
        description = (function if isinstance(function, Mapping) else row.tools[0]).get("description")
        if isinstance(description, str) and description.strip() and description.strip() in rendered.text:
            return False
        return self._is_same(replace(row, tools=None), rendered)

    def _ignores(self, row: Row, rendered: Rendered, number: int, other: Message) -> bool:
        messages = list(_list_messages(row))
        messages[number] = other
        return self._is_same(replace(row, messages=messages), rendered)

    def _is_same(self, row: Row, rendered: Rendered) -> bool:
        try:
            return self._render(row, rendered.asks).text == rendered.text
        except TemplateError:
            return False  # A template that refuses the change has read it.


def find_texts(message: Message) -> list[str]:
    """Return the non-empty texts of a message, its content and its calls as text, stripped as many templates do."""
    texts = (message.get("content"), message.get(CALLS_AS_TEXT))
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def reword(message: Message) -> Message:
    """Return a copy of the message with another text as content."""
    return {**message, "content": _replace_text(message["content"])}


def _read_name(call: Mapping[str, Any]) -> str:
    return str(call["function"]["name"])


def _change_function(call: Mapping[str, Any], **changes: Any) -> Mapping[str, Any]:
    """Return a copy of the tool call with another name or other arguments."""
    return {**call, "function": {**call["function"], **changes}}


def _replace_text(text: str) -> str:
    return PLACEHOLDER if PLACEHOLDER not in text else "something else"


def _writes_arguments(turn: str, arguments: Mapping[str, Any]) -> bool:
    as_json = json.dumps(arguments, ensure_ascii=False)
    return as_json in turn or all(str(value) in turn for value in arguments.values())


def _list_messages(row: Row) -> Sequence[Message]:
    assert row.messages is not None
    return row.messages


_EXCERPT: Final = 20


def refuse_inner_ends(where: str, answer: str, texts: Iterable[str], turn: str, ends: Collection[str]) -> None:
    """Raise for an answer with an end token inside, which would teach the model to continue after it.

    The text of an answer may contain the end token of its turn if the template does not add one.

    Args:
        where: Location of the row.
        answer: Name of the answer in errors.
        texts: Texts of the answer in the dataset.
        turn: Text of the answer that is trained on, including its end token.
        ends: Texts of the tokens that end answers.

    Raises:
        DataError: One of ``texts`` contains an end token that is not the only one, at the end of the turn; or the turn
            ends with two end tokens.
    """
    for text in texts:
        for end in ends:
            if end in text and not (turn.count(end) == 1 and turn.rstrip().endswith(end)):
                at = text.index(end)
                excerpt = text[max(0, at - _EXCERPT) : at + len(end) + _EXCERPT]
                found = (
                    f"{answer} is trained on and spells the end token {end!r}, where the model would stop: {excerpt!r}"
                )
                raise DataError(Problem(where, found, "remove it from the text; the end of an answer is added to it"))
    for end in ends:
        if turn.rstrip().endswith(end + end):
            found = f"{answer} ends twice, with {end + end!r}"
            raise DataError(Problem(where, found, "let the template write it once"))


_BESIDE: Final = (*REASONING_KEYS, "tool_calls")
_MARK_IT: Final = "put {% generation %} ... {% endgeneration %} around the assistant's text (chat_template_path)"


class Targets(NamedTuple):
    """A rendered chat, with target character spans in order and remarks.

    Attributes:
        text: The rendered text, with an ``eos_token`` where the template leaves a trained turn open.
        spans: Target characters; a message can have several spans.
        remarks: Remarks for the audit.
    """

    text: str
    spans: list[Span]
    remarks: Sequence[Remark] = ()


class SpanFinder:
    """Finds and verifies the target spans of chats under one template.

    Args:
        template: The chat template.
        special_tokens: Texts of the tokenizer's special tokens, one of which must end every trained turn.
        eos_token: Token appended to turns that the template leaves open; ``None`` makes such turns an error.
        end_tokens: Tokens that end answers, in addition to those that the template writes.
    """

    def __init__(
        self,
        template: ChatTemplate,
        special_tokens: Collection[str],
        eos_token: str | None,
        end_tokens: Collection[str] = (),
    ) -> None:
        self._template = template
        self._eos_token = eos_token
        # Longest first, because a token can be a prefix of another one. `(?!)` never matches.
        any_special = "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))) or "(?!)"
        self._special = re.compile(any_special)
        self._at_end = re.compile(rf"(?:{any_special})\Z")
        # Tags such as `<tool_call>` are often single tokens, though not special ones.
        self._undivided = re.compile(rf"{any_special}|<[^<>\s]+>")
        self._longest = max(map(len, special_tokens), default=0)
        self._end_tokens = end_tokens
        self._written = WrittenCheck(self._render, self._special)

    def find(self, row: Row, trained: Collection[int]) -> Targets:
        """Render the chat of a row, and find the spans of the trained messages.

        Args:
            row: A chat.
            trained: Indices of the messages that are trained on.

        Raises:
            DataError: The template raises; omits a message; writes the text of a trained message outside its span, or
                another message into it; or does not end it. Or an answer contains an end token.
        """
        try:
            rendered = self._render(row)
            targets = self._targets(row, rendered, trained)
            self._refuse_foreign_text(row, targets, trained)
        except TemplateError as error:
            raise _refusal(row, error) from error
        self._check_answers(row, targets, trained)
        self._written.refuse_unwritten(row, rendered, trained)
        unread = any(value and name not in self._template.names for name, value in row.template_kwargs.items())
        written = self._written.list_remarks(row, rendered, trained)
        remarks = [*targets.remarks, *written, *([Remark.LOST_VARIABLES] if unread else [])]
        return Targets(targets.text, targets.spans, remarks)

    def render_prompt(self, row: Row) -> str:
        """Render the prompt of the turn after the first ``num_prompt_messages``, by default all, as a server does.

        Raises:
            DataError: The template raises, or omits one of the messages.
        """
        prompt = replace(row, messages=_list_messages(row)[: row.num_prompt_messages])
        try:
            rendered = self._render(prompt, add_generation_prompt=True)
            text = rendered.text
            if not self._template.has_generation_prompt:
                before, header = self._open_answer(row, len(_list_messages(prompt)))
                # After the answer of a tool, DeepSeek R1's template has written it, whatever the flag.
                text += header if (before + header).split() != text.split() else ""
        except TemplateError as error:
            raise _refusal(row, error) from error
        self._written.refuse_unwritten(prompt, rendered)
        return text

    def _render(self, row: Row, add_generation_prompt: bool = False) -> Rendered:
        return self._template.render(
            _list_messages(row),
            tools=row.tools,
            variables=row.template_kwargs,
            add_generation_prompt=add_generation_prompt,
        )

    @cached_property
    def _ends(self) -> Collection[str]:
        """End tokens of answers: ``end_tokens``, and those that the template adds to the last and to earlier turns."""
        # Two answers, because templates can end the last turn in another way than earlier ones.
        roles = ("user", "assistant", "user", "assistant")
        row = Row(where="", messages=[{"role": role, "content": PLACEHOLDER} for role in roles])
        try:
            text, spans, _ = self._targets(row, self._render(row), (1, 3))
        except (TemplateError, DataError):  # The template does not accept this chat, but may accept others.
            return self._end_tokens
        ends = [text[span.start : span.end].rpartition(PLACEHOLDER)[2] for span in spans]
        return {*self._end_tokens, *(token for end in ends for token in self._special.findall(end))}

    @cached_property
    def _call_ends(self) -> tuple[str, str]:
        """The token that the template adds to a last turn with calls, and that which opens the answer of the tool.

        Gemma 4 and GLM stop on the token that opens the answer. Gemma 4's template adds it to a chat that ends with a
        call; GLM's leaves that turn open.
        """
        call = {"type": "function", "function": {"name": PLACEHOLDER, "arguments": {}}}
        question, result = ({"role": role, "content": ""} for role in ("user", "tool"))
        messages: list[Message] = [question, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
        try:
            asked, answered = (self._render(Row(where="", messages=messages[:count])) for count in (2, 3))
        except TemplateError:  # As in `_ends`.
            return "", ""
        end = next((turn.end for turn in answered.turns if turn.message == 1), len(answered.text))
        token = asked.text.removeprefix(answered.text[:end])
        opening = self._special.match(answered.text, end)
        return token if self._special.fullmatch(token) else "", opening[0] if opening else ""

    def _targets(self, row: Row, rendered: Rendered, trained: Collection[int]) -> Targets:
        if not trained:
            return Targets(rendered.text, [])
        if not rendered.turns:
            found = "the chat template does not loop over the messages, so the text of a turn cannot be located"
            raise _fault(row, found, _MARK_IT)
        if self._template.marks_generation:
            return self._find_marked(row, rendered, trained)
        return self._derive(row, rendered, trained)

    def _find_marked(self, row: Row, rendered: Rendered, trained: Collection[int]) -> Targets:
        """Return the ``{% generation %}`` blocks as spans; a block after the loop belongs to the turn before it.

        The generation prompt is no target, even if a block encloses it, as in SmolLM3's template.
        """
        spans: list[Span] = []
        remarks: list[Remark] = []
        starts = {turn.message: turn.start for turn in reversed(rendered.turns)}
        for block in rendered.generated:
            owner = block.message
            if owner == NOBODY:
                owner = max((t.message for t in rendered.turns if t.start < block.start), default=NOBODY)
            if owner in trained:
                header = self._header(row, owner)
                has_header = rendered.text.startswith(header, starts[owner])
                start = max(block.start, starts[owner] + len(header) * has_header)
                if not spans or spans[-1].message != owner:
                    start, remarks = _find_opening(row, owner, rendered.text, header, start)
                spans += [Span(owner, start, block.end)] if start < block.end else []
        last = {span.message: span for span in spans}
        for message in sorted(trained):
            if message not in last:
                raise _fault(row, f"message {message} has no {{% generation %}} block", "change the template")
            if not self._terminated(rendered.text, last[message].start, last[message].end):
                found = f"the {{% generation %}} block of message {message} does not end in a special token"
                raise _fault(row, found, "move the end-of-turn token into the block")
        return Targets(rendered.text, spans, remarks)

    def _derive(self, row: Row, rendered: Rendered, trained: Collection[int]) -> Targets:
        """Return the spans of a template without ``{% generation %}``: from the generation prompt to the terminator."""
        text = rendered.text
        spans: list[Span] = []
        remarks: list[Remark] = []
        first = {turn.message: turn for turn in reversed(rendered.turns) if text[turn.start : turn.end].strip()}
        for message in sorted(trained):
            header = self._header(row, message)
            turn = first.get(message) or self._find_outside_loop(row, text, message, header)
            if turn is None:
                found = f"the chat template writes nothing for message {message}"
                raise _fault(row, found, "remove the message, or change the template")
            _, start, end = turn
            # A header can begin in the turn before, as with the line breaks between the turns of Alpaca's format.
            at = text.rfind(header, max(0, start - len(header)), start + len(header))
            start = start + self._common_length(row, message, header, text[start:end]) if at < 0 else at + len(header)
            start, remarks = _find_opening(row, message, text, header, start)
            # The template writes the EOS after the loop; some write the generation prompt there, whatever the flag, or
            # the beginning of it (Command A).
            is_eos = rendered.turns[-1].end == end and not header.startswith(text[end:].rstrip())
            if is_eos and self._terminated(text, end, len(text)):
                end = len(text)
            text, end = self._terminate(row, text, Span(message, start, end))
            if _list_messages(row)[message].get("tool_calls") and text.startswith(self._call_ends[0], end):
                end += len(self._call_ends[0])
            spans.append(Span(message, start, end))
        return Targets(text, spans, remarks)

    def _find_outside_loop(self, row: Row, text: str, message: int, header: str) -> Span | None:
        """Return a last turn that the template writes after its loop, as that of Nemotron Nano 2 does."""
        prompt = replace(row, messages=_list_messages(row)[:message])
        opened = self._render(prompt, add_generation_prompt=True).text
        is_last = message == len(_list_messages(row)) - 1 and opened.endswith(header) and text.startswith(opened)
        return Span(message, len(opened) - len(header), len(text)) if is_last else None

    def _terminated(self, text: str, start: int, end: int) -> int | None:
        """Return the position after the special token that ends ``text[start:end]``, trailing white space ignored."""
        end = start + len(text[start:end].rstrip())
        return end if self._at_end.search(text, max(start, end - self._longest), end) else None

    def _terminate(self, row: Row, text: str, turn: Span) -> tuple[str, int]:
        """Return the text and the end of a turn's terminator; an open turn gets ``eos_token``, if that is set."""
        message, start, end = turn
        if (terminated := self._terminated(text, start, end)) is not None:
            return text, terminated
        if self._eos_token is not None:
            if end == len(text):
                token = (_list_messages(row)[message].get("tool_calls") and self._call_ends[1]) or self._eos_token
                return text + token, end + len(token)
            # Some models stop on the token that opens the next turn.
            if opening := self._special.match(text, end):
                return text, opening.end()
        found = f"message {message} ends in no special token, so the model would never learn to stop"
        remedy = "set eos_token to the token that generation stops on, or let the template end the turn with one"
        raise _fault(row, found, remedy)

    def _common_length(self, row: Row, message: int, header: str, turn: str) -> int:
        """Return the number of characters that a turn which opens in another way shares with the generation prompt."""
        # Content is not searched in the end token, whose name could contain a short answer.
        body_end = max((found.start() for found in self._special.finditer(turn)), default=len(turn))
        content = [turn.rfind(text, 0, body_end) for text in find_texts(_list_messages(row)[message])]
        start = min((at for at in content if at >= 0), default=len(turn))
        # Some templates write a default system prompt into a first turn that is an answer.
        if start < len(turn) and (at := turn.rfind(header, 0, start)) >= 0:
            return at + len(header)
        # The turn differs from the generation prompt, for example where reasoning of earlier turns is dropped. The
        # header is then their common prefix, at most up to the content, and without a partial special token or tag.
        shared = next((at for at, (a, b) in enumerate(zip(header, turn, strict=False)) if a != b), len(turn))
        common = min(shared, start)
        for token in self._undivided.finditer(turn):
            if token.start() < common < token.end():
                common = token.start()
        if not turn[:common].strip():
            found = f"message {message} opens with {turn[:40]!r}, but the generation prompt is {header[:40]!r}"
            raise _fault(row, found, _MARK_IT)
        return common

    def _header(self, row: Row, num_messages: int) -> str:
        """Return the text that a server renders before the answer to the first ``num_messages`` messages."""
        if self._template.has_generation_prompt and (header := self._generation_prompt(row, num_messages)) is not None:
            return header
        # No generation prompt, or an unknown one.
        return self._open_answer(row, num_messages)[1]

    def _open_answer(self, row: Row, num_messages: int) -> tuple[str, str]:
        """Return the text before a probe answer to the first ``num_messages`` messages, and that before its content."""
        answer = {"role": "assistant", "content": PLACEHOLDER}
        probe = replace(row, messages=[*_list_messages(row)[:num_messages], answer])
        rendered = self._render(probe)
        turn = next((turn for turn in rendered.turns if turn.message == num_messages), None)
        header, written, _ = rendered.text[turn.start : turn.end].partition(PLACEHOLDER) if turn else ("", "", "")
        if turn is None or not written:
            found = "the chat template writes no generation prompt, and no answer where one was expected"
            raise _fault(row, found, "add {% if add_generation_prompt %} with the opening of an assistant turn")
        return rendered.text[: turn.start], header if header.strip() else ""

    def _generation_prompt(self, row: Row, num_messages: int) -> str | None:
        """Return the generation prompt after the first ``num_messages`` messages.

        For messages without a user turn, that of a chat with an empty question is used instead if necessary: many
        templates raise without a user turn, or add no generation prompt, although they accept the full chat.
        """
        prompt = _list_messages(row)[:num_messages]
        try:
            header = self._template.generation_prompt(prompt, tools=row.tools, variables=row.template_kwargs)
            if header or any(message["role"] == "user" for message in prompt):
                return header
        except TemplateError:
            pass
        question = [{"role": "user", "content": ""}]
        return self._template.generation_prompt(question, tools=row.tools, variables=row.template_kwargs)

    def _refuse_foreign_text(self, row: Row, targets: Targets, trained: Collection[int]) -> None:
        """Verify that target spans contain no text of other messages: changing that text must not change the spans."""
        written = [targets.text[span.start : span.end] for span in targets.spans]
        # Joined, so that one search per message is enough. Answers may quote a question: a hit is no proof yet.
        answers = "\n".join(written)
        suspects = {
            index
            for index, message in enumerate(_list_messages(row))
            if message["role"] != "assistant" and [text for text in find_texts(message) if text in answers]
        }
        if not suspects:
            return
        messages = [
            reword(message) if index in suspects else message for index, message in enumerate(_list_messages(row))
        ]
        reworded = replace(row, messages=messages)
        text, spans, _ = self._targets(reworded, self._render(reworded), trained)
        if [text[span.start : span.end] for span in spans] != written:
            found = f"the chat template writes message {min(suspects)} into the text of an assistant turn"
            raise _fault(row, found, _MARK_IT)

    def _check_answers(self, row: Row, targets: Targets, trained: Collection[int]) -> None:
        """Verify that the spans of every trained message contain its content and its tool calls, and one end."""
        turns: defaultdict[int, str] = defaultdict(str)
        for owner, start, end in targets.spans:
            turns[owner] += targets.text[start:end]
        for index in sorted(trained):
            message, turn = _list_messages(row)[index], turns[index]
            texts = find_texts(message)
            if any(end in turn[:-1] for end in self._ends):  # Without the last character, as every turn ends with one.
                written = [*texts, *(str(message[key]) for key in _BESIDE if key in message)]
                refuse_inner_ends(row.where, f"message {index}", written, turn, self._ends)
            calls = [_read_name(call) for call in message.get("tool_calls") or []]
            for name in calls:
                if not self._contains(turn, name):
                    found = f"message {index} calls {name!r}, but the chat template does not write that"
                    raise _fault(row, found, "use a template that writes tool_calls")
            # Templates may omit reasoning, and any content beside a tool call (`Remark`).
            for answer in [] if calls else texts:
                visible = answer.rpartition(THINK_END)[2].strip()
                if not self._contains(turn, answer) and not self._contains(turn, visible):
                    found = (
                        f"the answer of message {index} ({answer[:40]!r}) is not in the text that would be trained on"
                    )
                    raise _fault(row, found, _MARK_IT)

    def _contains(self, turn: str, text: str) -> bool:
        if len(text) < self._longest:  # A short text could match inside the name of a special token.
            turn, text = self._special.sub("", turn), self._special.sub("", text).strip()
        return text in turn


def _find_opening(row: Row, message: int, text: str, header: str, start: int) -> tuple[int, list[Remark]]:
    """Return the start of a turn's target, and the remark on a last turn that does not follow the generation prompt."""
    # Qwen3.5's prompt ends in `<think>` and a line break; its template closes an empty block after two, one token.
    before = text[:start].rstrip() if _CLOSING.match(text, start) else ""
    start = len(before) if before.endswith("<think>") else start
    is_remarked = message == len(_list_messages(row)) - 1 and not text.endswith(header, 0, start)
    return start, [Remark.OTHER_OPENING] if is_remarked else []


def _fault(row: Row, found: str, remedy: str) -> DataError:
    return DataError(Problem(row.where, found, remedy))


def _refusal(row: Row, error: TemplateError) -> DataError:
    return _fault(row, f"the chat template refuses this chat: {error}", "change the chat, or the template")
