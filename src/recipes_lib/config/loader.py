"""Configuration of a run or a command: a YAML file and flags, every problem at once; ``--help``, ``--print-config``."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import yaml

from recipes_lib.config.paths import PATH_KEYS, expand_home
from recipes_lib.config.recipes import read_known
from recipes_lib.config.rules import RULES
from recipes_lib.config.schema import SECTIONS, RecipeConfig, list_sections
from recipes_lib.config.settings import ABSENT, DECISIONS, Settings
from recipes_lib.config.table import RECIPE_NAMES, Key, KeyTable, describe, load_table
from recipes_lib.config.values import (
    INVALID,
    Entry,
    Reader,
    compose,
    has_secret_shape,
    is_secret_key,
    read_entries,
    read_text,
    refuse_secret_key,
    refuse_secret_value,
)
from recipes_lib.errors import EXIT_DONE, ConfigError, Problem
from recipes_lib.shipped import find_recipe, find_shipped

_HELP_WIDTH: Final = 100

_SECTION_WORDS = {
    *("data", "dataset", "model", "training", "train", "tokens"),
    *("evaluation", "eval", "lora", "peft", "sft", "pretrain"),
}


def load_config(recipe: str, argv: Sequence[str]) -> RecipeConfig:
    """Read and check the configuration of a run.

    Args:
        recipe: Name of the recipe, such as ``sft``.
        argv: Arguments after the script's name: ``--config F`` and ``--key value`` overrides.

    Raises:
        ConfigError: The file, a flag or a combination of them is wrong; every problem at once.
    """
    table = load_table(recipe)
    problems: list[Problem] = []
    command = parse_command_line(argv, table, problems)
    return _build(command.config, _gather_entries(command, problems), table, problems)


def parse_command(recipe: str, argv: Sequence[str]) -> RecipeConfig | str:
    """Parse a script's arguments into its configuration, or return the text of ``--help`` or ``--print-config``.

    Raises:
        ConfigError: As ``load_config``; ``--help`` never.
    """
    table = load_table(recipe)
    problems: list[Problem] = []
    command = parse_command_line(argv, table, problems)
    if command.wants == "help":
        return format_help(table)
    config = _build(command.config, _gather_entries(command, problems), table, problems)
    return format_config(config, table) if command.wants == "print" else config


def format_help(table: KeyTable) -> str:
    """Return the help of a recipe: usage, then every key by group, with its value, default and meaning."""
    name = f"/{table.recipe}.py" if find_recipe(table.recipe).exists() else f" {table.recipe}"
    lines = [
        f"usage: recipes{name} --config FILE [--key value ...]",
        "",
        "  --config FILE    a flat YAML file of the keys below; flags override it",
        "  --print-config   print every effective value and where it comes from, and exit",
        "  --help           print this, and exit",
    ]
    for group, about in table.groups.items():
        lines += ["", f"{group}: {about}" if about else group]
        for key in table.keys.values():
            if key.group == group:
                lines += _format_help_entry(key, key.name in table.required)
    return "\n".join(lines)


def format_config(config: RecipeConfig, table: KeyTable) -> str:
    """Return all effective values as valid YAML, each with its provenance as a comment.

    A key that another one leaves without effect is a comment.
    """
    return _format_values(table, list_sections(config) | dict(config.training), config.provenance)


def _format_values(table: KeyTable, values: Mapping[str, object], provenance: Mapping[str, str]) -> str:
    lines = []
    for group in table.groups:
        lines += ["", f"# {group}"]
        for key in table.keys.values():
            if key.group == group:
                lines.append(_format_value(key, values, provenance[key.name]))
    return "\n".join(lines).strip()


def add_recipe_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--recipe`` and ``--config`` to a command."""
    parser.add_argument("--recipe", "--stage", help="recipe (default: what the file's name begins with, or sft)")
    about = "the recipe; further --key value flags override it (`python recipes/RECIPE.py --help` lists the keys)"
    parser.add_argument("--config", metavar="F", help=about)


def split_recipe(argv: Sequence[str], recipes: Sequence[str] = RECIPE_NAMES) -> tuple[str, list[str]]:
    """Return the recipe of a command, and the remaining arguments.

    ``--recipe`` names it; otherwise the first word of the configuration's file name does, as in
    ``pretrain_long.yaml``; a file with ``sources`` is of a corpus; the default is ``sft``.

    Args:
        argv: The arguments.
        recipes: Recipes that the command supports; ``check`` and ``plan`` also support a corpus.

    Raises:
        ConfigError: There is no such recipe.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", "--stage")
    options, rest = parser.parse_known_args(argv)
    parser.add_argument("--config", type=Path)
    config = parser.parse_known_args(rest)[0].config
    named = config.stem.split("_")[0] if config else ""
    recipe = options.recipe or (named if named in recipes else _guess_recipe(config) if "corpus" in recipes else "sft")
    if recipe not in recipes:
        raise ConfigError(Problem("--recipe", f"there is no recipe {recipe!r}", f"write one of {', '.join(recipes)}"))
    return recipe, rest


def _guess_recipe(config: Path | None) -> str:
    """Return ``corpus`` for a file whose keys are a corpus's, which no recipe that trains shares."""
    # What cannot be read is told when it is loaded.
    text = None if config is None else read_text(config, [])
    return "corpus" if text is not None and re.search("^sources:", text, re.MULTILINE) else "sft"


def load_for_command(recipe: str, overrides: Sequence[str], config: str | None = None) -> RecipeConfig:
    """Load the configuration of a command's run.

    ``--help`` and ``--print-config`` print their text and end the command, as argparse does.

    Args:
        recipe: From ``split_recipe``, or that of the command.
        overrides: The remaining ``--key value`` flags.
        config: Value of its own ``--config``.

    Raises:
        ConfigError: As ``load_config``.
    """
    return end_after_help(parse_command(recipe, [*(["--config", config] if config else []), *overrides]))


def end_after_help(parsed: Parsed | str) -> Parsed:
    """Return a configuration; print the text of ``--help`` or ``--print-config``, and end the command.

    Args:
        parsed: What the parser of a command has returned.
    """
    if isinstance(parsed, str):
        sys.stdout.write(f"{parsed}\n")
        raise SystemExit(EXIT_DONE)
    return parsed


def check_text(recipe: str, text: str, path: Path) -> RecipeConfig:
    """Check a recipe's YAML text as if it were the file ``path``.

    Raises:
        ConfigError: As ``load_config``.
    """
    table, problems = load_table(recipe), list[Problem]()
    return _build(path, read_entries(text, str(path), problems), table, problems)


@dataclass(slots=True)
class CommandLine:
    """Parsed command line.

    Attributes:
        config: The YAML file.
        wants: ``help`` or ``print`` if a text is requested instead of a run.
        entries: The overrides, in order.
    """

    config: Path | None = None
    wants: Literal["", "help", "print"] = ""
    entries: list[Entry] = field(default_factory=list)


def parse_command_line(argv: Sequence[str], table: KeyTable, problems: list[Problem]) -> CommandLine:
    """Parse the arguments after the script's name; errors are added to ``problems``."""
    command = CommandLine()
    seen: set[str] = set()
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        if argument in ("-h", "--help"):
            command.wants = "help"
        elif not argument.startswith("--") or argument == "--":
            remedy = "write `--config FILE`" if argument.endswith((".yaml", ".yml")) else "write `--key value`"
            shown = "an argument" if has_secret_shape(argument) else argument[:60] or "''"
            problems.append(Problem(shown, "is not a flag", f"{remedy}; lists are JSON: --key '[1, 2]'"))
        else:
            name, text = _take_value(argument, arguments)
            _add(name, text, command, table, seen, problems)
    return command


def _take_value(argument: str, arguments: list[str]) -> tuple[str, str | None]:
    name, equals, text = argument.removeprefix("--").partition("=")
    # Upstream's parser takes dashes as well.
    name = name.replace("-", "_")
    if equals:
        return name, text
    # Two dashes, because a value may be a negative number; and --print-config is the only switch that takes none.
    follows = arguments and not arguments[0].startswith("--") and name != "print_config"
    return name, arguments.pop(0) if follows else None


def drop_flags(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """Return a command line without the flags of these keys, which may not be repeated."""
    arguments, kept = list(argv), list[str]()
    while arguments:
        before = list(arguments)
        name, _ = _take_value(arguments.pop(0), arguments)
        if name not in names:
            kept += before[: len(before) - len(arguments)]
    return kept


def _add(
    name: str, text: str | None, command: CommandLine, table: KeyTable, seen: set[str], problems: list[Problem]
) -> None:
    flag = f"--{name}"
    if name in seen:
        problems.append(Problem(flag, "is repeated", "keep one of the two"))
    elif name == "print_config":
        command.wants = command.wants or "print"
    elif name == "config":
        if text:
            command.config = find_shipped(Path(expand_home(text)))
        else:
            problems.append(Problem(flag, "has no value", "write `--config FILE`"))
    else:
        node = _read_node(flag, text, table.keys.get(name), problems)
        if node is not None:
            command.entries.append(Entry(name, node, flag, lambda _: flag, flag=True))
    seen.add(name)


def _read_node(flag: str, text: str | None, key: Key | None, problems: list[Problem]) -> yaml.Node | None:
    """Return a flag's text as a YAML node: parsed if the key allows a list or a mapping, else plain text."""
    if text is None:
        if key is not None and not key.accepts("boolean"):
            problems.append(Problem(flag, "has no value", f"write `{flag} value`"))
            return None
        text = "true"
    structured = key is not None and (key.accepts("array") or key.accepts("object"))
    if structured and text.lstrip().startswith(("[", "{")):
        found: list[Problem] = []
        node = compose(text, flag, found, "quote the JSON for the shell")
        problems.extend(Problem(flag, problem.found, problem.remedy) for problem in found)
        return node
    return yaml.ScalarNode("tag:yaml.org,2002:str", text)


def _format_value(key: Key, values: Mapping[str, object], provenance: str) -> str:
    if provenance.startswith("derived: ") and key.name not in values:
        return f"# {key.name}: {provenance}"
    ours = " (ours)" if provenance == "default" and key.reason else ""
    # JSON is YAML, and unlike YAML it never reads a text as something else.
    line = f"{key.name}: {json.dumps(values.get(key.name, key.default), ensure_ascii=False)}"
    return f"{line:<60}  # {provenance}{ours}"


def _format_help_entry(key: Key, required: bool) -> list[str]:
    default = "required" if required else f"default {json.dumps(key.default, ensure_ascii=False)}"
    text = f"{key.help} ({describe(key.schema)}; {default})"
    return [f"  --{key.name}", *textwrap.wrap(text, _HELP_WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)]


def _build(path: Path | None, entries: Sequence[Entry], table: KeyTable, problems: list[Problem]) -> RecipeConfig:
    given = {entry.key: entry for entry in entries}
    values = _read_values(given, table, problems, _adapt)
    # A wrong spelling stands for the right one, so that this is not reported as missing too.
    meant = {key: entry for entry in given.values() if entry.key not in table.keys for key in _find_meant(entry, table)}
    settings = Settings(table, str(path or "command line"), meant | given, values)
    for rule in RULES[table.recipe]:
        problems.extend(rule(settings))
    if problems:
        raise ConfigError(*_in_order(problems, path))
    return _assemble(path, settings)


def _gather_entries(command: CommandLine, problems: list[Problem]) -> list[Entry]:
    """Return the entries of the file and then of the flags; raise ``ConfigError`` if the file has none to read."""
    if command.config is None:
        return command.entries
    text = read_text(command.config, problems)
    entries = [] if text is None else read_entries(text, str(command.config), problems)
    if problems and not entries:
        # Whatever the flags say, nothing can be checked against a file that was not read.
        raise ConfigError(*problems)
    return [*entries, *command.entries]


def _read_values(given: Mapping[str, Entry], table: KeyTable, problems: list[Problem], adapt: Adapt) -> dict[str, Any]:
    """Return the valid values by key; errors of the others are added to ``problems``."""
    values = {}
    for key, entry in given.items():
        if key not in table.keys:
            problems.append(explain_unknown(entry, table, set(given)))
        elif secret := refuse_secret_value(entry.where, key, entry.node):
            problems.append(secret)
        else:
            value = Reader(entry.locate, problems).read(key, entry.node, table.keys[key].schema)
            if value is not INVALID:
                values[key] = adapt(key, value)
    return values


def _adapt(key: str, value: Any) -> Any:
    if key == "lora_target_modules" and value == ["all-linear"]:
        # What TRL and PEFT call it; here it is the key left out.
        return None
    if key == "eval_datasets" and isinstance(value, dict):
        # Of a wrong one the rules tell.
        return {name: expand_paths({"name": one} if isinstance(one, str) else one) for name, one in value.items()}
    return expand_paths(value) if key in (*PATH_KEYS, "eval_tasks_include_path", "dataset_mixture") else value


def _assemble(path: Path | None, settings: Settings) -> RecipeConfig:
    keys = settings.table.keys
    values = {key: settings[key] for key in keys if key in settings.values or keys[key].reason}
    provenance = {key: settings.given[key].where if key in settings.given else "default" for key in keys}
    for decision in DECISIONS:
        if decision.applies(settings) and settings[decision.key] is not None:
            provenance[decision.key] = f"derived: {decision.why}"
            values[decision.key] = decision.becomes
    values = {key: value for key, value in values.items() if value is not ABSENT}
    sections = {
        name: section(
            **{field.name: values.pop(field.name) for field in dataclasses.fields(section) if field.name in values}
        )
        for name, section in SECTIONS.items()
    }
    return RecipeConfig(recipe=settings.table.recipe, path=path, training=values, provenance=provenance, **sections)


def _in_order(problems: Sequence[Problem], path: Path | None) -> list[Problem]:
    """Sort the problems of the file by line; flags and missing keys follow in the order found."""

    def line(problem: Problem) -> tuple[int, int]:
        name, _, number = problem.where.rpartition(":")
        return (0, int(number)) if name == str(path) and number.isdigit() else (1, 0)

    return sorted(problems, key=line)


@functools.cache
def read_synonyms() -> Mapping[str, str]:
    """Return names in other libraries -> key here, for one recipe or several."""
    names = yaml.safe_load(Path(__file__).with_name("synonyms.yaml").read_text(encoding="utf-8"))
    return {name: key for key, synonyms in names.items() for name in synonyms.split()}


def explain_unknown(entry: Entry, table: KeyTable, taken: set[str]) -> Problem:
    """Explain an unknown key.

    Args:
        entry: The key with its value.
        table: The keys of the recipe.
        taken: Every key that the user wrote, so that a successor is not offered twice.
    """
    key = entry.key
    if is_secret_key(key):
        return refuse_secret_key(entry.where, key[:60])
    known = read_known(table.recipe)
    if key in known:
        retired = known[key]
        remedy = f"delete the line: `{retired.new}` is set as well" if retired.new in taken else retired.remedy
        return Problem(entry.where, f"`{key}` {retired.found}", remedy)
    nested = _nested_keys(entry.node, table)
    if nested or (isinstance(entry.node, yaml.MappingNode) and key in _SECTION_WORDS):
        names = ", ".join(nested[:3] + ["..."] * (len(nested) > 3)) or "its keys"
        return Problem(entry.where, f"`{key}` is not a key; keys are flat", f"move {names} to the left margin")
    return Problem(entry.where, f"unknown key `{key[:60]}`", _suggest(key, table, entry.flag))


def _find_meant(entry: Entry, table: KeyTable) -> list[str]:
    """Return the keys that an unknown one stands for: its successor, or those nested in it."""
    retired = read_known(table.recipe).get(entry.key)
    successor = retired.new if retired else read_synonyms().get(entry.key)
    return [*filter(None, [successor]), *_nested_keys(entry.node, table)]


def _nested_keys(node: yaml.Node, table: KeyTable) -> list[str]:
    if not isinstance(node, yaml.MappingNode):
        return []
    names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
    return [name for name in names if name in table.keys or name in read_known(table.recipe)]


def _suggest(key: str, table: KeyTable, flag: bool) -> str:
    positive = key.removeprefix("no_")
    if positive in table.keys and table.keys[positive].accepts("boolean"):
        return f"write `--{positive} false`" if flag else f"write `{positive}: false`"
    plain = key.lower().replace("-", "_")
    known = read_known(table.recipe)
    synonym = read_synonyms().get(plain, "")
    if synonym in known:
        return f"it is `{synonym}` elsewhere, which {known[synonym].found}; {known[synonym].remedy}"
    # A retired spelling leads to its successor; one without is no suggestion.
    names = {name: name for name in table.keys} | {
        name: retired.new for name, retired in known.items() if retired.new in table.keys
    }
    near = [synonym] if synonym in table.keys else difflib.get_close_matches(plain, names, n=1, cutoff=0.7)
    return f"did you mean `{names[near[0]]}`?" if near else f"see `--help` or docs/configs/{table.recipe}.md"


Parsed = TypeVar("Parsed")
Adapt = Callable[[str, Any], Any]
"""Transforms a value after reading, such as ``~/`` to the home folder."""


@dataclass(frozen=True, slots=True)
class Given:
    """Keys given by the user.

    Attributes:
        path: The YAML file; ``None`` when everything came from flags.
        wants_print: Whether ``--print-config`` is given.
        entries: By key, flags over the file.
        values: Valid values.
        problems: Errors of the others; the command adds its own.
    """

    path: Path | None
    wants_print: bool
    entries: Mapping[str, Entry]
    values: Mapping[str, Any]
    problems: list[Problem]

    def where(self, key: str) -> str:
        """Return the location of a key, or the file if it is missing."""
        return self.entries[key].where if key in self.entries else str(self.path or "command line")

    def require(self, **remedies: str) -> None:
        """Add a problem for each missing key; the values are the remedies."""
        for key, remedy in remedies.items():
            if key not in self.entries:
                self.problems.append(Problem(str(self.path or "command line"), f"`{key}` is missing", remedy))


def read_given(name: str, argv: Sequence[str], adapt: Adapt) -> Given | str:
    """Parse ``--config F`` and ``--key value`` of a command, or return the text of ``--help``.

    Args:
        name: Of the key table.
        argv: The arguments.
        adapt: Of every valid value.

    Raises:
        ConfigError: The file cannot be read.
    """
    table, problems = load_table(name), list[Problem]()
    command = parse_command_line(argv, table, problems)
    if command.wants == "help":
        return format_help(table)
    given = {entry.key: entry for entry in _gather_entries(command, problems)}
    values = _read_values(given, table, problems, adapt)
    return Given(command.config, command.wants == "print", given, values, problems)


def expand_paths(value: Any) -> Any:
    """Return a path, the ``name`` of a mapping, or a list of either, with ``~/`` replaced by the home folder."""
    if isinstance(value, list):
        return [expand_paths(item) for item in value]
    if isinstance(value, dict) and "name" in value:
        return value | {"name": expand_paths(value["name"])}
    return expand_home(value) if isinstance(value, str) else value


def parse_keys(
    name: str,
    argv: Sequence[str],
    kind: Callable[..., Parsed],
    paths: Collection[str],
    find_problems: Callable[[Parsed, Given], Iterable[Problem]],
    **required: str,
) -> Parsed | str:
    """Parse the arguments of a command into its configuration, or return the text of ``--help`` or ``--print-config``.

    Args:
        name: Of the key table.
        argv: The arguments.
        kind: Takes the given keys, and ``path``, the YAML file.
        paths: Keys whose value may be a path, or hold one.
        find_problems: Of the configuration as a whole.
        required: Remedy of each key that has no default.

    Raises:
        ConfigError: The file, a flag or a combination of them is wrong; every problem at once.
    """
    given = read_given(name, argv, lambda key, value: expand_paths(value) if key in paths else value)
    if isinstance(given, str):
        return given
    given.require(**required)
    config = kind(path=given.path, **given.values)
    if problems := [*given.problems, *find_problems(config, given)]:
        raise ConfigError(*problems)
    if not given.wants_print:
        return config
    table = load_table(name)
    origins = {key: given.where(key) if key in given.entries else "default" for key in table.keys}
    return _format_values(table, given.values, origins)
