"""Chat templates: rendering that records which message and ``{% generation %}`` block wrote each character.

A template is parsed in the Jinja environment of ``apply_chat_template``, and hooks are inserted into its loops and
generation blocks. The hooks output nothing, so the text is that of the template by construction; they only record how
many pieces of output existed when a loop advanced to a message. The output of a macro or a ``{% set %}`` block is a
single piece where it is written: it belongs to the turn that writes it, not to loops inside of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

from jinja2 import Environment, Template, TemplateSyntaxError, nodes
from jinja2.visitor import NodeTransformer
from transformers.utils.chat_template_utils import _compile_jinja_template

from recipes_lib.config.tokenization import TEMPLATE_DATE, normalise_message
from recipes_lib.data.sources.rows import Message

NOBODY: Final = -1
"""Message index of text outside of messages: preambles, tool schemas, text after the loop."""

_TRACE: Final = "recipes_lib_trace"


class TemplateError(ValueError):
    """The template does not compile, or raised while rendering; has the template's message."""


class Span(NamedTuple):
    """Characters ``start:end`` of a rendered chat, written by the message with index ``message``, or ``NOBODY``."""

    message: int
    start: int
    end: int


@dataclass(frozen=True)
class Rendered:
    """A rendered chat.

    Attributes:
        text: The text, equal to that of ``apply_chat_template(tokenize=False)``.
        turns: Non-empty spans that messages wrote, in order; a message may have several.
        generated: The ``{% generation %}`` blocks, in order.
        asks: Whether the chat was rendered with ``add_generation_prompt``.
    """

    text: str
    turns: list[Span]
    generated: list[Span]
    asks: bool

    @property
    def body(self) -> str:
        """The text up to the end of the last turn; the whole text if there are no turns."""
        return self.text[: self.turns[-1].end] if self.turns else self.text

    @property
    def tail(self) -> str:
        """The text after ``body``: a final EOS, or the generation prompt."""
        return self.text[len(self.body) :]

    def parts(self, message: int) -> list[str]:
        """Return the texts that a message wrote, in order.

        The model generates the first one. Later ones are in the prompts of later turns: Gemma 4's template writes text
        beside a tool call after the answer of the tool.
        """
        return self._parts.get(message, [])

    @cached_property
    def _parts(self) -> Mapping[int, list[str]]:
        # All at once: to search the turns for each message would be quadratic.
        parts: dict[int, list[str]] = {}
        for message, start, end in self.turns:
            parts.setdefault(message, []).append(self.text[start:end])
        return parts

    def turn(self, message: int) -> str:
        """Return all text that a message wrote."""
        return "".join(self.parts(message))


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: The Jinja template.
        variables: Special tokens by name, as in the tokenizer's ``special_tokens_map``.

    Attributes:
        names: Names that occur in the template, among them those of the variables that it reads.
        marks_generation: Whether the template has ``{% generation %}`` blocks.
        reads_clock: Whether the template may write the current date; here it writes ``TEMPLATE_DATE``.

    Raises:
        TemplateError: The template does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self._variables = dict(variables)
        try:
            environment = _compile_jinja_template(source).environment
        except TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {error.message}") from error
        tree = environment.parse(source)
        self.names = {name.name for name in tree.find_all(nodes.Name)}
        self.reads_clock = "strftime_now" in self.names
        self.marks_generation = any(_is_generation(block) for block in tree.find_all(nodes.CallBlock))
        self._prompt = _separate_prompt(tree, environment)  # Before `_instrument`, which changes the tree.
        self._template = _instrument(tree, environment)

    @cached_property
    def has_generation_prompt(self) -> bool:
        """Whether the template writes a generation prompt after a question."""
        try:
            return self.generation_prompt([{"role": "user", "content": ""}]) != ""
        except TemplateError:
            return True  # Refused for this chat; for others, the template may write one.

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Render a chat, and record the characters that each message wrote.

        Args:
            messages: The chat.
            tools: Tool schemas.
            variables: Additional variables of the template; may replace special tokens.
            add_generation_prompt: Whether to append the generation prompt.

        Raises:
            TemplateError: The template raises for these messages.

        Source: ``transformers.utils.chat_template_utils.render_jinja_template``; equality over every shipped template
        in ``tests/data/chat/test_chat_golden.py``.
        """
        chat = [normalise_message(message) for message in messages]
        trace = _Trace(chat)
        # `_TRACE` comes last, so that the variables of an untrusted row cannot replace it.
        context = {"documents": None, **self._variables, **(variables or {}), _TRACE: trace}
        try:
            for piece in self._template.generate(
                messages=chat, tools=tools, add_generation_prompt=add_generation_prompt, **context
            ):
                trace.pieces.append(piece)
        except Exception as error:  # Template code runs on user data, so any error is a problem of this row.
            raise TemplateError(str(error) or type(error).__name__) from error
        return trace.rendered(add_generation_prompt)

    def generation_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Return the generation prompt after ``messages``; empty if the template adds none, ``None`` if it is unknown.

        Most templates add it after the last turn. Some add it inside of that turn: it is then the difference between
        the renderings with and without it, and unknown if one is not a prefix of the other.

        Raises:
            TemplateError: As ``render``.
        """
        if self._prompt is not None:
            return self._render_prompt(variables) if variables else self._usual_prompt
        asking = self.render(messages, tools=tools, variables=variables, add_generation_prompt=True)
        if asking.tail.strip() not in ("", self._variables.get("eos_token")):
            return asking.tail
        silent = self.render(messages, tools=tools, variables=variables)
        if asking.text == silent.text:
            return ""
        with_prompt, without = asking.body, silent.body
        return with_prompt.removeprefix(without) + asking.tail if with_prompt.startswith(without) else None

    @cached_property
    def _usual_prompt(self) -> str:
        return self._render_prompt({})

    def _render_prompt(self, variables: Mapping[str, Any]) -> str:
        assert self._prompt is not None
        try:
            return str(self._prompt.render({**self._variables, **variables}))
        except Exception as error:  # As in `render`.
            raise TemplateError(str(error) or type(error).__name__) from error


class _Trace:
    """Records which message writes the output; called by the hooks during rendering."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.pieces: list[str] = []
        self._messages = messages
        # By identity, since turns can be equal; `normalise_message` has made a new object of each.
        self._index = {id(message): index for index, message in enumerate(messages)}
        # (number of pieces, message that writes from there on)
        self._changes = [(0, NOBODY)]
        # For each open loop: the message that writes outside of it, and the message after that of the last item, 0 if
        # the loop is not over messages.
        self._loops: list[tuple[int, int]] = []
        self._open_block = 0
        # (message, first piece, piece after the last)
        self._blocks: list[tuple[int, int, int]] = []

    def enter_loop(self) -> None:
        self._loops.append((self._changes[-1][1], 0))

    def item(self, *candidates: Any) -> None:
        """Record that a loop advanced: from here on, the message among the ``candidates`` writes, if there is one."""
        # In a loop over indices, a candidate is the pair `(list, index)`.
        items = [_indexed(*candidate) if type(candidate) is tuple else candidate for candidate in candidates]
        outer, following = self._loops[-1]
        message = next((self._index[id(item)] for item in items if id(item) in self._index), NOBODY)
        if message == NOBODY:
            message = self._find_copied(items, following)
        if message != NOBODY:
            self._loops[-1] = (outer, message + 1)
        elif not following:
            return  # A loop over tools or content parts: the enclosing message continues.
        self._switch(message)

    def _find_copied(self, items: Sequence[Any], first: int) -> int:
        """Return the first message from ``first`` on that an item copies: Mistral's templates merge adjacent turns."""
        copies = [_key(item) for item in items if isinstance(item, dict) and "role" in item]
        rest = enumerate(self._messages[first:], first) if copies else ()
        return next((number for number, message in rest if _key(message) in copies), NOBODY)

    def leave_loop(self) -> None:
        self._switch(self._loops.pop()[0])

    def begin_generation(self) -> None:
        self._open_block = len(self.pieces)

    def end_generation(self) -> None:
        self._blocks.append((self._changes[-1][1], self._open_block, len(self.pieces)))

    def rendered(self, asks: bool) -> Rendered:
        at = list(accumulate(map(len, self.pieces), initial=0))
        turns: list[Span] = []
        for (first, message), (last, _) in pairwise([*self._changes, (len(self.pieces), NOBODY)]):
            start, end = at[first], at[last]
            if message == NOBODY or start == end:
                continue
            if turns and turns[-1].message == message and turns[-1].end == start:
                start = turns.pop().start  # An inner loop over messages without output does not end a turn.
            turns.append(Span(message, start, end))
        generated = [Span(message, at[start], at[end]) for message, start, end in self._blocks]
        return Rendered("".join(self.pieces), turns, generated, asks)

    def _switch(self, message: int) -> None:
        if message != self._changes[-1][1]:
            self._changes.append((len(self.pieces), message))


def _key(message: Message) -> tuple[Any, str]:
    """Return the role and the text of a message, whose content can be a list of parts."""
    content = message.get("content") or ""
    return message["role"], content if isinstance(content, str) else "".join([part.get("text", "") for part in content])


def _indexed(items: Any, index: Any) -> Any:
    in_range = isinstance(items, list) and isinstance(index, int) and 0 <= index < len(items)
    return items[index] if in_range else None


def _instrument(tree: nodes.Template, environment: Environment) -> Template:
    """Compile a template with hooks, as filters, since the sandbox adds 2 us to every other kind of call."""
    overlay = environment.overlay()
    overlay.filters = {**environment.filters, **_HOOKS}
    tree = _Instrumentation().visit(tree)
    tree.set_environment(overlay)
    return _compile(tree, overlay)


def _compile(tree: nodes.Template, environment: Environment) -> Template:
    variables = {**environment.globals, "strftime_now": TEMPLATE_DATE.strftime}
    return Template.from_code(environment, environment.compile(tree), variables)


_HOOKS: Final[dict[str, Callable[..., None]]] = {
    f"{_TRACE}_{hook.__name__}": hook
    for hook in (_Trace.enter_loop, _Trace.item, _Trace.leave_loop, _Trace.begin_generation, _Trace.end_generation)
}


class _Instrumentation(NodeTransformer):
    """Inserts calls of ``_Trace`` into the loops and generation blocks of a template."""

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        item = _call("item", _item_expressions(node), node.lineno)
        self.generic_visit(node)
        node.body.insert(0, item)
        return [_call("enter_loop", [], node.lineno), node, _call("leave_loop", [], node.lineno)]

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        if not _is_generation(node):
            return node
        begin, end = (_call(name, [], node.lineno) for name in ("begin_generation", "end_generation"))
        return nodes.Scope([begin, *node.body, end], lineno=node.lineno)


def _item_expressions(loop: nodes.For) -> list[nodes.Expr]:
    """Return expressions that may be a loop's message: its variables, and each ``(list, index)`` used in its body."""
    targets = [loop.target, *loop.target.find_all(nodes.Name)]
    variables = {target.name for target in targets if isinstance(target, nodes.Name)}
    indexed = {
        (item.node.name, item.arg.name)
        for statement in loop.body
        for item in statement.find_all(nodes.Getitem)
        if isinstance(item.node, nodes.Name) and isinstance(item.arg, nodes.Name) and item.arg.name in variables
    }
    loads = [_load(variable) for variable in sorted(variables)]
    return [*loads, *(nodes.Tuple([_load(name), _load(index)], "load") for name, index in sorted(indexed))]


def _load(name: str) -> nodes.Name:
    return nodes.Name(name, "load")


def _call(method: str, arguments: list[nodes.Expr], lineno: int) -> nodes.ExprStmt:
    hook = nodes.Filter(_load(_TRACE), f"{_TRACE}_{method}", arguments, [], None, None)
    return nodes.ExprStmt(hook, lineno=lineno)


def _is_generation(block: nodes.CallBlock) -> bool:
    return isinstance(block.call.node, nodes.ExtensionAttribute) and block.call.node.name == "_generation_support"


def _separate_prompt(tree: nodes.Template, environment: Environment) -> Template | None:
    """Return the generation prompt of a template that ends in a loop and an ``if add_generation_prompt``.

    ``None`` for other templates, and if the prompt depends on messages or tools. Almost all templates have this form,
    in which the prompt after every message is the same, and is found without rendering the messages.
    """
    *_, loop, branch = [None, None, *tree.body]
    if not (isinstance(loop, nodes.For) and isinstance(branch, nodes.If) and isinstance(branch.test, nodes.Name)):
        return None
    names = list(tree.find_all(nodes.Name))
    mentions = [name for name in names if name.name == "add_generation_prompt"]
    own = Counter(name.name for name in names if name.ctx == "store")
    own.update(macro.name for macro in tree.find_all(nodes.Macro))
    # Variables with a default, as `enable_thinking` of Nemotron 3: no namespace, the only kind that a loop can change.
    options = {
        node.target.name: node
        for node in tree.body
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name) and own[node.target.name] == 1
        if {name.name for name in node.find_all(nodes.Name)} == {node.target.name}
    }
    read = {name.name for node in branch.body for name in node.find_all(nodes.Name)}
    if mentions != [branch.test] or read & ({"messages", "tools", *own} - options.keys()):
        return None
    return _compile(nodes.Template([*options.values(), *branch.body], lineno=branch.lineno), environment)
