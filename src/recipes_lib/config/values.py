"""Strict YAML parsing: entries with line numbers, values typed by the schema of their key, secrets rejected."""

from __future__ import annotations

import ast
import importlib
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from recipes_lib.config.recipes import read_renames
from recipes_lib.config.table import KeyTable, Schema, describe, read_lists
from recipes_lib.errors import ConfigError, MissingPath, Problem, escape_controls, suggest

_MAX_DEPTH = 12
_MAX_BYTES = 1 << 20
_BEGINS_THERE = ("could not find expected ':'", "end of stream")
"""Errors that PyYAML detects on a later line or at the end of the file; they are reported where the token begins."""

_NULL = {"", "~", "null", "Null", "NULL"}
BOOLEANS: Final[Mapping[str, bool]] = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# Numbers as in YAML 1.2, not PyYAML's 1.1: `1e-5` is a number, `010` (octal) and `1:30` (sexagesimal) are not.
# 18 digits fit into 64 bits.
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,3})?")
_NAMES = re.compile(r"[\w.-]+(?:\s*,\s*[\w.-]+)+")
"""Names or numbers separated by commas, which other programs accept as a list."""
_SCALE = re.compile(r"(?<=\d) ?([kmbt])$", re.IGNORECASE)
_EXPONENTS = {"k": "e3", "m": "e6", "b": "e9", "t": "e12"}
_BOUNDS: Final[Mapping[str, tuple[str, Callable[[float, float], bool]]]] = {
    "minimum": ("at least", lambda value, bound: value >= bound),
    "exclusiveMinimum": ("above", lambda value, bound: value > bound),
    "maximum": ("at most", lambda value, bound: value <= bound),
    "exclusiveMaximum": ("below", lambda value, bound: value < bound),
}
INVALID: Final = object()
"""Sentinel for an invalid value, whose reason is in the problems."""
_REFUSED: Final = "!refused"
"""Tag of the node that replaces an alias."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key with its value, from the file or from a flag.

    Attributes:
        key: Name of the key, as written.
        node: YAML node of the value.
        where: Location of the key: ``file:line``, or the flag.
        flag: Whether the entry is from the command line.
        is_repeated: Whether it is a flag with the value of the file.
        key_node: YAML node of the key; ``None`` for a flag.
    """

    key: str
    node: yaml.Node
    where: str
    flag: bool = False
    is_repeated: bool = False
    key_node: yaml.ScalarNode | None = None

    def locate(self, node: yaml.Node) -> str:
        """Return the location of a node inside the value: its line of the file, or the flag."""
        # `rpartition`: a path may contain colons.
        return self.where if self.flag else f"{self.where.rpartition(':')[0]}:{node.start_mark.line + 1}"


def read_text(path: Path, problems: list[Problem]) -> str | None:
    """Return the text of a file, or append the reason to ``problems`` and return ``None``."""
    try:
        # Not `read_bytes`: a data file or `/dev/zero` given by mistake must not be read whole.
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) <= _MAX_BYTES:
            # "utf-8-sig" skips a byte-order mark.
            return content.decode("utf-8-sig")
        found = f"is larger than {_MAX_BYTES >> 20} MiB, so it is not a configuration"
        problems.append(Problem(str(path), found, "give the path of a YAML file"))
    except FileNotFoundError:
        beside = [sibling.name for sibling in path.parent.glob("*.y*ml")]
        remedy = suggest(path.name, beside, "give the path of a YAML file", f"{path.parent / '{}'}")
        problems.append(MissingPath(str(path), "there is no such file", remedy))
    except IsADirectoryError:
        problems.append(Problem(str(path), "is a folder", "give the path of a YAML file"))
    except UnicodeDecodeError as error:
        # ``error.start`` counts from the beginning of ``error.object``, which has no byte-order mark.
        line = error.object.count(b"\n", 0, error.start) + 1
        problems.append(Problem(f"{path}:{line}", "is not UTF-8 text", "save the file as UTF-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        problems.append(Problem(str(path), f"cannot be read: {reason}", "check the path and its permissions"))
    return None


def read_yaml(path: Path) -> Any:
    """Return the value in a YAML file that ``compose`` accepts.

    Raises:
        ConfigError: The file cannot be read or has problems of syntax.
    """
    problems: list[Problem] = []
    text = read_text(path, problems) or ""
    compose(text, str(path), problems)
    if problems:
        raise ConfigError(*problems)
    try:
        return yaml.load(text, _PlainLoader)
    except ValueError as error:  # A date that does not exist.
        raise ConfigError(Problem(str(path), f"is not plain YAML: {error}", "quote the value")) from error


def read_entries(text: str, name: str, problems: list[Problem]) -> list[Entry]:
    """Return the top-level entries of a YAML text in order, the first of each repeated key."""
    before = len(problems)
    root = compose(text, name, problems)
    # A file with only `---` has one value, an empty text.
    if (root is None or root.value == "") and len(problems) == before:
        problems.append(Problem(f"{name}:1", "the file is empty", "write one `key: value` a line"))
        return []
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        found, where = "a list" if isinstance(root, yaml.SequenceNode) else "a single value", root.start_mark.line + 1
        problems.append(Problem(f"{name}:{where}", f"the file is {found}", "write one `key: value` a line"))
        return []
    return [Entry(key.value, node, f"{name}:{key.start_mark.line + 1}", key_node=key) for key, node in root.value]


def compose(text: str, name: str, problems: list[Problem], syntax_remedy: str = "") -> yaml.Node | None:
    """Return the root node of a YAML text, or ``None`` (an empty text included) with any reason in ``problems``.

    Keys of mappings are scalars and distinct; others are left out, with a problem each.

    Args:
        text: YAML text of a file or a flag.
        name: File name or flag, for locations.
        problems: List that the reason is appended to.
        syntax_remedy: Remedy for every syntax error; by default it depends on the error.
    """
    try:
        loader = _Loader(text, name)
        node: yaml.Node | None = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line, found = text.count("\n", 0, error.position), f"the character #x{error.character:04x}"
        # UTF-16 text in ASCII, without a byte-order mark, decodes as UTF-8 with null characters.
        remedy = "delete it" if error.character else "delete it, or save the file as UTF-8 if it is UTF-16"
    except yaml.MarkedYAMLError as error:
        found = ", ".join(part for part in (error.context, error.problem) if part)
        marks = [mark for mark in (error.context_mark, error.problem_mark) if mark]
        line = marks[0 if found.endswith(_BEGINS_THERE) else -1].line
        known = read_lists(Path(__file__).with_name("syntax.yaml"))
        remedy = next((remedy for sign, remedy in known.items() if sign in found), "correct the YAML syntax here")
        remedy = syntax_remedy or remedy.format(opened=marks[0].line + 1)
    except ConfigError as error:
        problems += error.problems
        return None
    except (ValueError, OverflowError):
        # PyYAML passes escapes such as "\\U99999999" to `chr` unchecked.
        line, found, remedy = loader.get_mark().line, "an escape that is not a character", "correct or quote the value"
    else:
        problems += loader.refused
        return node
    problems.append(Problem(f"{name}:{line + 1}", found, remedy))
    return None


class _Loader(yaml.SafeLoader):
    """YAML loader that joins surrogate pairs; rejects aliases, merge keys, tags, deep nesting, unpaired surrogates.

    Attributes:
        name: File name or flag, for locations.
        refused: Problems: refused keys, which are left out; tags, which are ignored; and aliases, tagged ``_REFUSED``.
    """

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name, self.depth, self.refused = name, 0, list[Problem]()

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping with distinct scalar keys; others are left out and added to ``refused``."""
        node, kept = super().compose_mapping_node(anchor), dict[str, tuple[yaml.Node, yaml.Node]]()
        for key, value in node.value:
            where = f"{self.name}:{key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                self.refused.append(Problem(where, "a key is a list or a mapping", "write a plain name"))
            elif key.tag == "tag:yaml.org,2002:merge":
                # One problem with the alias that it merges.
                self.refused = [problem for problem in self.refused if problem.where != where]
                self.refused.append(Problem(where, "a merge key (<<)", "write its keys themselves"))
            # PyYAML would silently keep the last one.
            elif key.value in kept:
                first = kept[key.value][0].start_mark
                found = f"`{escape_controls(key.value[:60])}` is repeated; it is already set in line {first.line + 1}"
                self.refused.append(Problem(where, found, "keep one of the two"))
            else:
                kept[key.value] = (key, value)
        node.value = list(kept.values())
        return node

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node; raise for nesting and surrogates, of which nothing can be kept."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        where = f"{self.name}:{event.start_mark.line + 1}"
        # Nested aliases expand exponentially ("billion laughs"), and deep nesting raises RecursionError.
        if self.check_event(yaml.AliasEvent):
            self.get_event()  # type: ignore[no-untyped-call]
            self.refused.append(Problem(where, "the value is an alias (*name)", "write the value itself"))
            return yaml.ScalarNode(_REFUSED, "", event.start_mark, event.end_mark)
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            found = f"the value has the YAML tag {tag[:40]}"
            self.refused.append(Problem(where, found, "delete the tag; quote a text"))
        if self.depth > _MAX_DEPTH:
            raise ConfigError(Problem(where, f"more than {_MAX_DEPTH} levels deep", "nest it less"))
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(node, yaml.ScalarNode):
            try:
                # JSON escapes characters beyond U+FFFF as surrogate pairs; YAML decodes each half separately.
                node.value = node.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
            except UnicodeDecodeError as error:
                found, remedy = "an escape is an unpaired surrogate", "write the character itself"
                raise ConfigError(Problem(where, found, remedy)) from error
            if "\0" in node.value:  # No path, word of a command or text for a model may have one.
                self.refused.append(Problem(where, "an escape is a NUL character", "delete it"))
        return node


class _PlainLoader(yaml.SafeLoader):
    """Loader with the integers of YAML 1.2: ``010``, ``12:30:00`` and ``2024_01_31`` are texts. Keys are texts too."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping with the keys as written: ``yes``, ``on`` and ``1`` would be one key in YAML 1.1."""
        for key, _ in node.value:
            key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


_PlainLoader.add_constructor(
    "tag:yaml.org,2002:int",
    lambda _, node: int(node.value) if _INTEGER.fullmatch(node.value) else node.value,
)


@dataclass(frozen=True, slots=True)
class Reader:
    """Converts YAML nodes to values by their schema, and collects problems.

    Attributes:
        locate: Function that returns the location of a node.
        problems: List that problems are appended to.
    """

    locate: Callable[[yaml.Node], str]
    problems: list[Problem]

    def read(self, name: str, node: yaml.Node, schema: Schema) -> Any:
        """Return the value of ``node`` converted to the type of ``schema``, or ``INVALID``."""
        if node.tag == _REFUSED:
            return INVALID
        # Lists first: a scalar value of a list key is a list of one item.
        if "array" in schema["type"] and (children := _list_items(name, node, schema)) is not None:
            items = [self.read(label, item, schema["items"]) for label, item in children]
            return INVALID if INVALID in items else items
        if isinstance(node, yaml.MappingNode) and "object" in schema["type"]:
            return self._read_mapping(name, node, schema)
        if isinstance(node, yaml.ScalarNode):
            value = self._read_scalar(name, node, schema)
            # An entry of a mixture may be a name instead of a mapping.
            return {"name": value} if "properties" in schema and isinstance(value, str) else value
        found, remedy = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping", f"write {describe(schema)}"
        # An entry that is not in a list, or as in alignment-handbook's dataset_mixer: {a/b: 0.5}.
        remedy += ": [{name: a/b}, ...]" if "name" in schema.get("items", {}).get("properties", {}) else ""
        remedy += "; quote a text in brackets" if "string" in schema["type"] and len(node.value) == 1 else ""
        return self._refuse(node, f"`{name}` is {found}", remedy)

    def _read_mapping(self, name: str, node: yaml.MappingNode, schema: Schema) -> Any:
        if "properties" in schema:
            return self._read_properties(name, node, schema)
        if "additionalProperties" not in schema:
            return plain_value(node)
        entries = {
            key.value: self.read(f"{name}.{key.value}", value, schema["additionalProperties"])
            for key, value in node.value
        }
        return INVALID if INVALID in entries.values() else entries

    def _read_scalar(self, name: str, node: yaml.ScalarNode, schema: Schema) -> Any:
        kinds, text, plain = schema["type"], node.value, node.style is None
        if plain and text in _NULL:
            remedy = f"write {describe(schema)}, or delete the line"
            return None if "null" in kinds else self._refuse(node, f"`{name}` has no value", remedy)
        if plain and text == "None" and "null" in kinds:
            return self._refuse(node, f"`{name}` is the text 'None'", "write null")
        # Also in quotes.
        if "boolean" in kinds and text.lower() in BOOLEANS:
            return BOOLEANS[text.lower()]
        if "string" in kinds:
            return self._read_choice(name, node, schema)
        value = _read_number(text, kinds)
        if value is None:
            return self._refuse_scalar(name, node, _explain(text, schema))
        return self._check_bounds(name, node, value, schema)

    def _read_choice(self, name: str, node: yaml.ScalarNode, schema: Schema) -> Any:
        choices = schema.get("enum")
        if choices is None:
            return node.value
        # Upper case is accepted, as in `log_level: INFO`: no two choices differ in case only. So is the boolean that
        # other parsers read for `no`.
        if (value := "no" if node.value == "false" else node.value.lower()) in choices:
            return value
        known = [choice for choice in choices if choice and isinstance(choice, str)] if len(choices) > 8 else []
        remedy = suggest(node.value.lower(), known, f"write {describe(schema)}", "{}")
        return self._refuse_scalar(name, node, remedy)

    def _refuse_scalar(self, name: str, node: yaml.ScalarNode, remedy: str) -> Any:
        if successor := read_renames().values.get((name, node.value)):
            return self._refuse(node, f"`{name}: {node.value}` is another program's value", f"write {successor}")
        shown = node.value if len(node.value) <= 60 else node.value[:57] + "..."
        return self._refuse(node, f"`{name}` is {shown!r}", remedy)

    def _check_bounds(self, name: str, node: yaml.Node, value: float, schema: Schema) -> Any:
        for bound, (words, holds) in _BOUNDS.items():
            if bound in schema and not holds(value, schema[bound]):
                return self._refuse(node, f"`{name}` is {value}", f"write a number {words} {schema[bound]}")
        return value

    def _read_properties(self, name: str, node: yaml.MappingNode, schema: Schema) -> Any:
        properties = schema["properties"]
        entry, unknown = {}, []
        for key, value in node.value:
            if key.value in properties:
                entry[key.value] = self.read(f"{name}.{key.value}", value, properties[key.value])
            else:
                unknown.append(key)
        for key in unknown:
            better = read_renames().mixture.get(key.value)
            known = suggest(key.value, properties, f"write one of {', '.join(properties)}")
            remedy = f"write `{better}`" if better else known
            self._refuse(key, f"`{key.value[:60]}` is not a key of an entry of `{name}`", remedy)
        # An unknown key may be a misspelt required one: report it alone.
        missing = [key for key in schema["required"] if key not in entry]
        if missing and not unknown:
            return self._refuse(node, f"`{name}` has no `{missing[0]}`", f"write its `{missing[0]}`")
        return INVALID if unknown or INVALID in entry.values() else entry

    def _refuse(self, node: yaml.Node, found: str, remedy: str) -> Any:
        self.problems.append(Problem(self.locate(node), found, remedy))
        return INVALID


def _list_items(name: str, node: yaml.Node, schema: Schema) -> list[tuple[str, yaml.Node]] | None:
    """Return the named items of a list, or of a scalar (``a, b`` has two items); ``None`` if it is not a list."""
    if isinstance(node, yaml.SequenceNode):
        return [(f"{name}[{index}]", item) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.ScalarNode):
        return None
    # An entry of `sources` may be a name; a text that is empty or in brackets, a quoted list or mapping, is none.
    kinds = schema["items"]["type"]
    if "object" in kinds and ("string" not in kinds or node.value[:1] in ("", "[", "{")):
        return None
    # Split plain names only: a comma in a file name, a call, a pattern or a prompt belongs to it.
    has_names = name != "sample_prompts" and _NAMES.fullmatch(node.value) is not None
    # A key that takes a text or a list: a text is not split, unless it is several of its choices.
    takes_text = "string" in schema["type"] and not ("enum" in schema and has_names)
    if takes_text or (node.style is None and node.value in (*_NULL, "None")):
        return None
    parts = re.split(r"\s*,\s*", node.value) if has_names else [node.value]
    return [(name, yaml.ScalarNode(node.tag, part, node.start_mark, node.end_mark, node.style)) for part in parts]


def plain_value(node: yaml.Node) -> Any:
    """Return the plain value of a node without a schema: scalars are resolved as in YAML 1.2."""
    if isinstance(node, yaml.SequenceNode):
        return [plain_value(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key.value: plain_value(value) for key, value in node.value}
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
    # YAML and Python allow underscores between digits.
    digits = text.replace("_", "")
    if _INTEGER.fullmatch(digits) and ("integer" in kinds or "number" in kinds):
        return int(digits)
    if _NUMBER.fullmatch(digits) and "number" in kinds:
        # Not finite: an exponent such as 1e999 overflows.
        value = float(digits)
        return value if math.isfinite(value) else None
    return None


def _explain(text: str, schema: Schema) -> str:
    # `1,000`, `1 000` and `1k` are meant as 1000.
    digits = re.sub(r"(?<=\d)[ ,](?=\d{3}(?!\d))", "", text)
    number = _read_number(_SCALE.sub(lambda found: _EXPONENTS[found[1].lower()], digits), ("number",))
    # Above 2**53 a float is rounded, and the suggestion would be a different number.
    is_number = {"integer", "number"} & {*schema["type"]}
    if number is not None and is_number and number == int(number) and abs(number) < 2**53:
        return f"write {int(number)}"
    share = _read_number(text[:-1], ("number",)) if text.endswith("%") and "number" in schema["type"] else None
    if share is not None:
        return f"write {share / 100:g}"
    if "array" in schema["type"]:
        return "delete the quotes" if text.startswith("[") else f"write {describe(schema)}, such as [{text[:40]}]"
    if "object" in schema["type"] and text.startswith("{"):
        return "delete the quotes around the mapping"
    return f"write {describe(schema)}"


@dataclass(frozen=True, slots=True)
class Settings:
    """User values and defaults of a run, before ``rules.DECISIONS`` are applied.

    Attributes:
        table: Keys of the recipe.
        name: File name, or ``command line``; the location of missing keys.
        given: Key -> user entry, valid or not; a flag replaces the line that it overrides.
        values: Key -> valid user value.
    """

    table: KeyTable
    name: str
    given: Mapping[str, Entry]
    values: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        """Return the user value or the default of a key; ``None`` for a key that the recipe does not have."""
        if key in self.values:
            return self.values[key]
        return self.table.keys[key].default if key in self.table.keys else None

    def gives(self, key: str) -> bool:
        """Return whether the user set ``key`` to a valid value other than null."""
        return self.values.get(key) is not None

    def changes(self, key: str) -> bool:
        """Return whether the user set ``key`` to a valid value other than null and the default."""
        return self.gives(key) and self.values[key] != self.table.keys[key].default

    def broken(self, key: str) -> bool:
        """Return whether the user set ``key`` to an invalid value."""
        return key in self.given and key not in self.values

    def where(self, key: str) -> str:
        """Return the location of ``key`` in the file or flags; the file name if it is missing."""
        return self.given[key].where if key in self.given else self.name

    def problem(self, key: str, found: str, remedy: str) -> Problem:
        """Return a problem at the location of ``key``."""
        return Problem(self.where(key), found, remedy)


_KEY = re.compile(r"(^|_)(token|api_?key|apikey|password|passwd|secret|credentials?|access_key)$", re.IGNORECASE)
_TOKEN_OF_TEXT = re.compile(
    r"(^|_)(bos|eos|pad|unk|sep|cls|mask|stop|start|end|begin|image|audio|video|think|special|separator|role)_token$",
    re.IGNORECASE,
)
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bapi_org_[A-Za-z0-9]{20,}|\bhf_oauth_[\w.-]{20,}"  # Hugging Face
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}"  # GitHub, GitLab
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{30,}|\bya29\.[\w-]{20,}"  # AWS, Google
    # OpenAI, Anthropic, but not `sk-toggleable__label-arrow`, a class of scikit-learn's pages; Stripe.
    r"|\bsk-(?=[a-z_-]{0,60}[A-Z0-9]|[a-z]{20})[A-Za-z0-9_-]{20,}|\b[sr]k_(?:live|test)_[A-Za-z0-9]{16,}"
    r"|\bwandb_v1_\w{20,}|\bnvapi-[\w-]{20,}|\bgsk_[A-Za-z0-9]{20,}|\br8_[A-Za-z0-9]{30,}|\bpypi-[\w-]{30,}"
    r"|\bxox[abeoprs]-[\w-]{10,}|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{5,}"  # Slack; a signed JSON web token
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|(?<=://)[^/\s:@\x7f-\U0010ffff]+:[^/\s:@\x7f-\U0010ffff]+@"  # user:password@host
    r"|[?&](?i:[\w-]*(?:token|key|secret|password|signature)|sig)=[\w%.~+/=:-]{3,}[\w%~+/=-]",  # signed URLs
    re.ASCII,  # A token ends where Chinese, Japanese or Korean text begins.
)
"""Pattern of access tokens and private keys."""
SECRET_HINTS = (
    *("hf_", "api_org_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "AKIA", "ASIA", "AIza"),
    *("ya29.", "sk-", "sk_live", "sk_test", "rk_live", "rk_test", "wandb_v1_", "nvapi-", "gsk_", "r8_", "pypi-", "xox"),
    *("eyJ", "PRIVATE KEY", "://", "token=", "key=", "secret=", "password=", "signature=", "sig="),
)
"""Substrings for a fast pre-check: text without any matches no ``SECRET``, except URL parameters in capitals."""
# Older W&B keys look like a Git commit, and AWS secret keys like a digest: only the name before them identifies them.
# In two steps, each in linear time: one pattern would search every pair of words in a long name.
_ASSIGNED = re.compile(r"(?<![\w&])([\w&]+)['\"]?\s*[:=]\s*['\"]?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])")
_SERVICE = re.compile("wandb|w&b|api|aws|access|secret", re.IGNORECASE)
_KEY_OR_TOKEN = re.compile("key|token", re.IGNORECASE)
_HEX_KEY = re.compile(r"[0-9a-f]{40}")
_HOLDS_REVISIONS = frozenset({"dataset_mixture", "sources", "benchmarks"})
SECRET_REMEDY = "delete it and revoke it if it was shared; secrets come from the environment (HF_TOKEN, WANDB_API_KEY)"


def is_secret_key(key: str) -> bool:
    """Return whether a key names a secret, such as ``hub_token``; vocabulary tokens, such as ``stop_token``, do not."""
    return _KEY.search(key) is not None and _TOKEN_OF_TEXT.search(key) is None


def has_secret_shape(text: str) -> bool:
    """Return whether a text contains something that looks like an access token."""
    return SECRET.search(text) is not None or any(_names_secret(found[1]) for found in _ASSIGNED.finditer(text))


def _names_secret(name: str) -> bool:
    """Return whether the name of an assigned value contains a service, and after it ``key`` or ``token``."""
    service = _SERVICE.search(name)
    return service is not None and _KEY_OR_TOKEN.search(name, service.end()) is not None


def refuse_secret_value(where: str, key: str, node: yaml.Node) -> Problem | None:
    """Return a problem if a text in ``node`` looks like an access token; the text is not repeated."""
    # 40 hex digits are a commit in a revision, and an older W&B key elsewhere.
    is_revision = key.endswith("revision") or key in _HOLDS_REVISIONS
    if any(has_secret_shape(text) or (_HEX_KEY.fullmatch(text) and not is_revision) for text in _texts(node)):
        return Problem(where, f"the value of `{key}` looks like an access token", SECRET_REMEDY)
    return None


def _texts(node: yaml.Node) -> list[str]:
    if isinstance(node, yaml.ScalarNode):
        return [node.value]
    children = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    return [text for child in children for text in _texts(child)]


def split_import_path(path: str) -> tuple[str, str, dict[str, Any] | None]:
    """Return module, name and arguments of ``package.module:name(argument=1)``; ``None`` without parentheses.

    Raises:
        ValueError: The arguments are not literals by name.
        SyntaxError: They are no Python.
    """
    target, opened, arguments = path.partition("(")
    module, _, name = target.partition(":")
    if not opened:
        return module, name, None
    match ast.parse(f"f({arguments}", mode="eval").body:
        case ast.Call(func=ast.Name(), args=[], keywords=given) if all(keyword.arg for keyword in given):
            return module, name, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in given}
    raise ValueError("write name=value between the parentheses")


def import_object(module_name: str, name: str) -> Any:
    """Import an object of a module, also of a file ``rewards.py`` or a module in the working directory.

    Importing runs the user's code, which may raise any exception.

    Raises:
        AttributeError: The module has no such object.
    """
    # Python searches the script's folder, not the working directory; appended last, it shadows no installed package.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    module = importlib.import_module(module_name.removesuffix(".py"))
    if not hasattr(module, name):
        # With the file, because a module of the same name may be installed.
        file = getattr(module, "__file__", "built-in")
        raise AttributeError(f"module {module.__name__!r} ({file}) has no attribute {name!r}")
    return getattr(module, name)
