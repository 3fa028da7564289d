"""Typed values of YAML nodes, by the schema of their key; the same rules for the file and for flags."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from recipes_lib.config.document import unique_pairs
from recipes_lib.config.migration.renames import MIXTURE_RENAMED, RETIRED_VALUES
from recipes_lib.config.table import Schema, describe
from recipes_lib.errors import Problem

_NULL = {"", "~", "null", "Null", "NULL"}
BOOLEANS: Final[Mapping[str, bool]] = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,3})?")
_CORE_TAG = re.compile(r"tag:yaml\.org,2002:(str|int|float|bool|null|seq|map|timestamp|merge|value)")
_BOUNDS: Final[Mapping[str, tuple[str, Callable[[float, float], bool]]]] = {
    "minimum": ("at least", lambda value, bound: value >= bound),
    "exclusiveMinimum": ("above", lambda value, bound: value > bound),
    "maximum": ("at most", lambda value, bound: value <= bound),
    "exclusiveMaximum": ("below", lambda value, bound: value < bound),
}

_ReadPairs = Callable[[yaml.MappingNode], Sequence[tuple[yaml.Node, yaml.Node]]]

INVALID: Final = object()
"""What a value that was refused becomes; the reason is in the problems."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads values and collects what is wrong with them.

    Attributes:
        locate: Where a node stands, for messages.
        problems: Filled while reading.
    """

    locate: Callable[[yaml.Node], str]
    problems: list[Problem]

    def read(self, name: str, node: yaml.Node, schema: Schema) -> Any:
        """Return the value of ``node`` as ``schema`` declares it, or ``INVALID``."""
        if not _CORE_TAG.fullmatch(node.tag):
            return self._refuse(node, f"`{name}` has the YAML tag {node.tag[:40]}", "delete the tag")
        if "array" in schema["type"] and (children := _list_items(name, node, schema)) is not None:
            items = [self.read(label, item, schema["items"]) for label, item in children]
            return INVALID if any(item is INVALID for item in items) else items
        if isinstance(node, yaml.MappingNode) and "object" in schema["type"]:
            if "properties" in schema:
                return self._read_properties(name, node, schema)
            return plain_value(node, lambda mapping: unique_pairs(mapping, self.locate, self.problems))
        if isinstance(node, yaml.ScalarNode):
            return self._read_scalar(name, node, schema)
        found = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
        return self._refuse(node, f"`{name}` is {found}", f"write {describe(schema)}")

    def _read_scalar(self, name: str, node: yaml.ScalarNode, schema: Schema) -> Any:
        kinds, text, plain = schema["type"], node.value, node.style is None
        if plain and text in _NULL:
            return (
                None if "null" in kinds else self._refuse(node, f"`{name}` has no value", f"write {describe(schema)}")
            )
        if plain and text == "None" and "null" in kinds:
            return self._refuse(node, f"`{name}` is the text 'None'", "write null")
        if "boolean" in kinds and text.lower() in BOOLEANS and (plain or "string" not in kinds):
            return BOOLEANS[text.lower()]
        if "string" in kinds:
            return self._read_choice(name, node, schema)
        value = _read_number(text, kinds)
        if value is None:
            return self._refuse(node, f"`{name}` is {_show(text)}", _explain(text, schema))
        return self._check_bounds(name, node, value, schema)

    def _read_choice(self, name: str, node: yaml.ScalarNode, schema: Schema) -> Any:
        choices = schema.get("enum")
        if choices is None or node.value in choices:
            return node.value
        successor = RETIRED_VALUES.get((name, node.value))
        if successor:
            return self._refuse(node, f"`{name}: {node.value}` was removed upstream", f"write {successor}")
        near = difflib.get_close_matches(node.value, [choice for choice in choices if choice], n=1)
        remedy = f"did you mean {near[0]}?" if near and len(choices) > 8 else f"write {describe(schema)}"
        return self._refuse(node, f"`{name}` is {_show(node.value)}", remedy)

    def _check_bounds(self, name: str, node: yaml.Node, value: float, schema: Schema) -> Any:
        for bound, (words, holds) in _BOUNDS.items():
            if bound in schema and not holds(value, schema[bound]):
                return self._refuse(node, f"`{name}` is {value}", f"write a number {words} {schema[bound]}")
        return value

    def _read_properties(self, name: str, node: yaml.MappingNode, schema: Schema) -> Any:
        properties = schema["properties"]
        entry, unknown = {}, []
        for key, value in unique_pairs(node, self.locate, self.problems):
            if key.value in properties:
                entry[key.value] = self.read(f"{name}.{key.value}", value, properties[key.value])
            else:
                unknown.append(key)
        for key in unknown:
            near = difflib.get_close_matches(key.value, properties, n=1)
            better = MIXTURE_RENAMED.get(key.value) or (near[0] if near else None)
            remedy = f"write `{better}`" if better else f"write one of {', '.join(properties)}"
            self._refuse(key, f"`{key.value[:60]}` is not a key of an entry of `{name}`", remedy)
        missing = [key for key in schema["required"] if key not in entry]
        if missing and not unknown:
            return self._refuse(node, f"`{name}` has no `{missing[0]}`", f"write its `{missing[0]}`")
        return INVALID if unknown or missing or any(value is INVALID for value in entry.values()) else entry

    def _refuse(self, node: yaml.Node, found: str, remedy: str) -> Any:
        self.problems.append(Problem(self.locate(node), found, remedy))
        return INVALID


def _list_items(name: str, node: yaml.Node, schema: Schema) -> list[tuple[str, yaml.Node]] | None:
    """Return the items of a list, each with its name, a single one where it stands alone; ``None`` for all else."""
    if isinstance(node, yaml.SequenceNode):
        return [(f"{name}[{index}]", item) for index, item in enumerate(node.value)]
    takes_text = "string" in schema["type"] or "object" in schema["items"]["type"]
    is_item = isinstance(node, yaml.ScalarNode) and not (node.style is None and node.value in (*_NULL, "None"))
    return [(name, node)] if is_item and not takes_text else None


def plain_value(node: yaml.Node, read_pairs: _ReadPairs = lambda mapping: mapping.value) -> Any:
    """Return a node without a declared type as the plain value that it looks like.

    Args:
        node: Of any kind.
        read_pairs: Keys and values of a mapping at any level; unless told otherwise all, of which the last wins.
    """
    if isinstance(node, yaml.SequenceNode):
        return [plain_value(item, read_pairs) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): plain_value(value, read_pairs) for key, value in read_pairs(node)}
    assert isinstance(node, yaml.ScalarNode)
    text: str = node.value
    if node.style is not None:
        return text
    if text in _NULL:
        return None
    if text.lower() in BOOLEANS:
        return BOOLEANS[text.lower()]
    number = _read_number(text, ("number",))
    return text if number is None else number


def _read_number(text: str, kinds: Collection[str]) -> float | None:
    digits = text.replace("_", "")
    if _INTEGER.fullmatch(digits) and ("integer" in kinds or "number" in kinds):
        return int(digits)
    if _NUMBER.fullmatch(digits) and "number" in kinds:
        value = float(digits)
        return value if math.isfinite(value) else None
    return None


def _explain(text: str, schema: Schema) -> str:
    number = _read_number(text, ("number",))
    if number is not None and "integer" in schema["type"] and number == int(number):
        return f"write {int(number)}"
    if "array" in schema["type"]:
        return f"write {describe(schema)}, such as [{text[:40]}]"
    return f"write {describe(schema)}"


def _show(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
