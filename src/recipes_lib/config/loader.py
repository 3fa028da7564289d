"""Loads the configuration of a run or command from a YAML file and flags; formats ``--help`` and ``--print-config``."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NoReturn, Self

import yaml

from recipes_lib.config.paths import PATH_KEYS, expand_home, find_shipped
from recipes_lib.config.recipes import read_known, read_renames
from recipes_lib.config.rules import COMMAND_RULES, DECISIONS, RULES, check_given, is_overruled
from recipes_lib.config.schema import SECTIONS, RecipeConfig, list_sections
from recipes_lib.config.table import RECIPE_NAMES, Key, KeyTable, describe, load_table, read_lists
from recipes_lib.config.values import (
    INVALID,
    SECRET_REMEDY,
    Entry,
    Reader,
    Settings,
    compose,
    has_secret_shape,
    is_secret_key,
    read_entries,
    read_text,
    refuse_secret_value,
)
from recipes_lib.errors import EXIT_DONE, ConfigError, Problem, merge_alike, suggest

_ARGUMENTS: Final = "--config FILE [--key value ...]"
_HELP_WIDTH: Final = 100
"""Maximum columns of ``--help``, also in a wider terminal."""
_YAML: Final = (".yaml", ".yml")
_EXPANDED: Final = {
    *PATH_KEYS,
    *("eval_tasks_include_path", "include_path", "dataset_mixture", "sources", "benchmarks", "benchmarks_of"),
    *("toxic_words", "duplicates_of", "judge", "method"),
}
"""Keys of recipes and commands whose value is or contains paths, in which ``~/`` is expanded."""
_MANY: Final = 3
"""Number of keys of other programs from which a file is taken for one to migrate."""
_MAX_EXPLAINED: Final = 50
"""Unknown keys that are explained; others are counted, because the search for similar keys is slow."""


def load_config(recipe: str, argv: Sequence[str]) -> RecipeConfig:
    """Load and validate the configuration of a run.

    Args:
        recipe: Name of the recipe, such as ``sft``.
        argv: Arguments after the script's name: ``--config F`` and ``--key value`` overrides.

    Raises:
        ConfigError: The file, a flag or a combination of keys is invalid; lists every problem. With ``--help`` they are
            not read.
        SystemExit: ``--help`` or ``--print-config`` was given, and its text printed, as in argparse.
    """
    table, problems = load_table(recipe), list[Problem]()
    command = _read_command(argv, table, f"recipes/{recipe}.py {_ARGUMENTS}", problems)
    config = _build(command.config, command.entries, table, problems)
    if command.wants == "print":
        _print_and_exit(_format_values(table, list_sections(config) | dict(config.training), config.provenance))
    return config


def _print_and_exit(text: str) -> NoReturn:
    sys.stdout.write(f"{text}\n")
    raise SystemExit(EXIT_DONE)


def format_help(table: KeyTable, usage: str) -> str:
    """Return the text of ``--help``: usage, then every key by group, with type, default and description."""
    lines = [
        f"usage: {usage}",
        "",
        "  --config FILE    a flat YAML file of the keys below; flags override it",
        "  --print-config   print every effective value and where it comes from, and exit",
        "  --help           print this, and exit",
    ]
    for group, about in table.groups.items():
        lines += ["", *_wrap(f"{group}: {about}" if about else group, "")]
        for key in table.keys.values():
            if key.group == group:
                default = f"default {json.dumps(key.default, ensure_ascii=False)}"
                state = "required" if key.name in table.required else default
                lines += [f"  --{key.name}", *_wrap(f"{key.help} ({describe(key.schema)}; {state})", " " * 6)]
    return "\n".join(lines)


def _format_values(table: KeyTable, values: Mapping[str, object], provenance: Mapping[str, str]) -> str:
    """Return all effective values as valid YAML, each with its provenance as a comment.

    A key without effect (because of the value of another one) is commented out.
    """
    lines = []
    for group in table.groups:
        lines += ["", f"# {group}"]
        for key in table.keys.values():
            if key.group == group:
                lines.append(_format_value(key, values, provenance[key.name]))
    return "\n".join(lines).strip()


def choose_recipe(recipe: str | None, config: str | None, recipes: Sequence[str] = RECIPE_NAMES) -> str:
    """Return the recipe of a command.

    The recipe is that of ``--recipe``, else the first word of the configuration's file name (``pretrain_long.yaml``),
    else ``corpus`` if the file has the key ``sources`` and the command supports it, else ``sft``.

    Args:
        recipe: Value of ``--recipe``.
        config: Value of ``--config``.
        recipes: Recipes that the command supports; ``check`` and ``plan`` also support ``corpus``.

    Raises:
        ConfigError: ``--recipe`` is not one of ``recipes``.
    """
    named = Path(config or "").stem.split("_")[0]
    # A file that cannot be read is reported when it is loaded.
    text = read_text(Path(config), []) if config and "corpus" in recipes else None
    guessed = "corpus" if text is not None and re.search("^sources:", text, re.MULTILINE) else "sft"
    chosen = recipe or (named if named in recipes else guessed)
    if chosen not in recipes:
        remedy = suggest(chosen, recipes, f"write one of {', '.join(recipes)}")
        raise ConfigError(Problem("--recipe", f"there is no recipe {chosen!r}", remedy))
    return chosen


def load_for_command(recipe: str, overrides: Sequence[str], config: str | None = None) -> RecipeConfig:
    """Load the configuration of a command's run, as ``load_config``.

    Args:
        recipe: Name of the recipe, such as that of ``choose_recipe``.
        overrides: The remaining ``--key value`` flags.
        config: Path of the YAML file, if the command has parsed ``--config`` itself.

    Raises:
        ConfigError: The configuration is invalid; lists every problem.
        SystemExit: ``--help`` or ``--print-config`` was given.
    """
    return load_config(recipe, [*(["--config", config] if config else []), *overrides])


def check_text(recipe: str, text: str, path: Path) -> RecipeConfig:
    """Validate YAML text as the configuration of a recipe.

    Args:
        recipe: Name of the recipe.
        text: The YAML text.
        path: File name in locations of problems; the file is not read.

    Raises:
        ConfigError: The configuration is invalid; lists every problem.
    """
    table, problems = load_table(recipe), list[Problem]()
    return _build(path, read_entries(text, str(path), problems), table, problems)


@dataclass(slots=True)
class CommandLine:
    """Parsed command line.

    Attributes:
        config: Path of the YAML file; ``None`` without ``--config``.
        wants: ``help`` or ``print`` for ``--help`` or ``--print-config``; empty for a run.
        entries: ``--key value`` overrides, in order.
    """

    config: Path | None = None
    wants: Literal["", "help", "print"] = ""
    entries: list[Entry] = field(default_factory=list)


def parse_command_line(argv: Sequence[str], table: KeyTable, problems: list[Problem]) -> CommandLine:
    """Parse the arguments after the script's name; append errors to ``problems``."""
    command, seen, arguments = CommandLine(), set[str](), list(argv)
    # A leading file, as transformers' example scripts take it.
    if arguments and arguments[0].endswith(_YAML) and not arguments[0].startswith("-"):
        arguments[0] = f"--config={arguments[0]}"
    while arguments:
        argument = arguments.pop(0)
        if argument in ("-h", "--help"):
            command.wants = "help"
            continue
        if not argument.startswith("--") or argument == "--":
            remedy = "write `--config FILE`" if argument.endswith(_YAML) else "write `--key value`"
            shown = "an argument" if has_secret_shape(argument) else argument[:60] or "''"
            problems.append(Problem(shown, "is not a flag", f"{remedy}; lists are JSON: --key '[1, 2]'"))
            continue
        name, text = _take_value(argument, arguments)
        flag = f"--{name}"
        if name in seen:
            problems.append(Problem(flag, "is repeated", "keep one of the two"))
        elif name == "print_config":
            command.wants = command.wants or "print"
        elif name == "config" and text:
            command.config = find_shipped(Path(expand_home(text)))
        elif name == "config":
            problems.append(Problem(flag, "has no value", "write `--config FILE`"))
        elif (node := _read_node(flag, text, table.keys.get(name), problems)) is not None:
            command.entries.append(Entry(name, node, flag, flag=True))
        seen.add(name)
    return command


def _take_value(argument: str, arguments: list[str]) -> tuple[str, str | None]:
    name, equals, text = argument.removeprefix("--").partition("=")
    # transformers' HfArgumentParser accepts dashes too.
    name = name.replace("-", "_")
    if equals:
        return name, text
    # A value may begin with one dash, as a negative number does. --print-config takes no value.
    follows = arguments and not arguments[0].startswith("--") and name != "print_config"
    return name, arguments.pop(0) if follows else None


def drop_flags(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """Return a command line without the flags of ``names`` and their values, so that they can be given again."""
    arguments, kept = list(argv), list[str]()
    while arguments:
        before = list(arguments)
        name, _ = _take_value(arguments.pop(0), arguments)
        if name not in names:
            kept += before[: len(before) - len(arguments)]
    return kept


def _read_node(flag: str, text: str | None, key: Key | None, problems: list[Problem]) -> yaml.Node | None:
    """Return a flag's value as a YAML node: parsed if the key accepts a list or a mapping, else plain text."""
    if text is None:
        if key is not None and not key.accepts("boolean"):
            problems.append(Problem(flag, "has no value", f"write `{flag} value`"))
            return None
        text = "true"
    # Only for keys that accept them: elsewhere a text may begin with a bracket, as a prompt does.
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
    # JSON is valid YAML and quotes strings, so that `no` or `1e-5` is not read back as another type.
    line = f"{key.name}: {json.dumps(values.get(key.name, key.default), ensure_ascii=False)}"
    return f"{line:<60}  # {provenance}{ours}"


def _wrap(text: str, indent: str) -> list[str]:
    """Return the lines of a text of ``--help``, as wide as the terminal, without the Markdown of the pages."""
    width = min(_HELP_WIDTH, shutil.get_terminal_size().columns)
    return textwrap.wrap(text.replace("``", "`"), width, initial_indent=indent, subsequent_indent=indent)


def _build(path: Path | None, entries: Sequence[Entry], table: KeyTable, problems: list[Problem]) -> RecipeConfig:
    settings = _read_settings(path, entries, table, problems)
    for rule in RULES[table.recipe]:
        problems.extend(rule(settings))
    if problems:
        raise ConfigError(*_in_order(problems, path))
    values, provenance = _resolve(settings)
    sections = {
        name: section(
            **{field.name: values.pop(field.name) for field in dataclasses.fields(section) if field.name in values}
        )
        for name, section in SECTIONS.items()
    }
    return RecipeConfig(recipe=table.recipe, path=path, training=values, provenance=provenance, **sections)


def _read_command(argv: Sequence[str], table: KeyTable, usage: str, problems: list[Problem]) -> CommandLine:
    """Parse a command line, with the entries of its file before those of the flags; or print ``--help`` and exit."""
    command = parse_command_line(argv, table, problems)
    if command.wants == "help":
        _print_and_exit(format_help(table, usage))
    if command.config is not None:
        text = read_text(command.config, problems)
        entries = [] if text is None else read_entries(text, str(command.config), problems)
        if problems and not entries:
            # The flags cannot be validated without the file: it would report keys as missing that the file has.
            raise ConfigError(*problems)
        command.entries = [*entries, *command.entries]
    return command


def _read_settings(path: Path | None, entries: Sequence[Entry], table: KeyTable, problems: list[Problem]) -> Settings:
    """Parse the values of the entries; append errors to ``problems``.

    Args:
        path: The YAML file, for the location of missing keys.
        entries: Entries of the file and the flags; a later one overrides an earlier one.
        table: Keys of the recipe or command.
        problems: List that errors are appended to.
    """
    # Flags come last and override the file.
    given = dict[str, Entry]()
    for entry in entries:
        is_repeated = entry.key in given and given[entry.key].node.value == entry.node.value
        given[entry.key] = dataclasses.replace(entry, is_repeated=is_repeated)
    # An unknown key counts as the key that it was meant as, so that this one is not reported as missing too.
    meant, values, unknown = dict[str, Entry](), dict[str, Any](), list[Entry]()
    for key, entry in given.items():
        if key not in table.keys:
            is_known = key in read_known(table.recipe)
            if is_known or len(unknown) < _MAX_EXPLAINED:
                problems.append(explain_unknown(entry, table, set(given)))
            unknown += [] if is_known else [entry]
            meant |= dict.fromkeys(_find_meant(entry, table), entry)
        # Before parsing: a message about the value would repeat the secret.
        elif secret := refuse_secret_value(entry.where, key, entry.node):
            problems.append(secret)
        else:
            value = Reader(entry.locate, problems).read(key, entry.node, table.keys[key].schema)
            if value is not INVALID:
                values[key] = _adapt(key, value)
    if more := unknown[_MAX_EXPLAINED:]:
        remedy = f"is it a file for recipe {table.recipe}? see docs/configs/{table.recipe}.md"
        problems.append(Problem(more[0].where, f"more unknown keys: {len(more):,}", remedy))
    foreign = (read_renames().retired.keys() | read_synonyms().keys()) - table.keys.keys()
    written = sum(entry.key in foreign and not entry.flag for entry in given.values())
    if path is not None and written >= _MANY and table.recipe in RECIPE_NAMES:
        remedy = f"`recipes check --migrate {path}` converts files of TRL, axolotl, LLaMA-Factory and others"
        problems.append(Problem(str(path), f"has {written} keys of other programs or versions", remedy))
    return Settings(table, str(path or "command line, without --config"), meant | given, values)


def _adapt(key: str, value: Any) -> Any:
    if key == "lora_target_modules" and value == ["all-linear"]:
        # The spelling of TRL and PEFT for all linear layers, which is the default here.
        return None
    if key == "eval_datasets" and value is not None:
        return {name: expand_paths(entry) for name, entry in value.items()}
    return expand_paths(value) if key in _EXPANDED else value


def _resolve(settings: Settings) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of the keys, and where each comes from; keys without effect are reset.

    Otherwise run.json and --print-config would show values that were not used.
    """
    keys = settings.table.keys
    # Other defaults are left to the sections and to TrainingArguments.
    values = {key: settings[key] for key in keys if key in settings.values or keys[key].reason}
    provenance = {key: settings.given[key].where if key in settings.given else "default" for key in keys}
    for row in DECISIONS:
        if settings[row["key"]] is not None and is_overruled(row, settings):
            provenance[row["key"]] = f"derived: {row['why']}"
            values.pop(row["key"], None)
            values |= {row["key"]: row["becomes"]} if "becomes" in row else {}
    return values, provenance


def _in_order(problems: Sequence[Problem], path: Path | None) -> list[Problem]:
    """Merge similar problems, and sort those of the file by line; those of flags and missing keys follow in order."""

    def line(problem: Problem) -> tuple[int, int]:
        # `rpartition`: a path may contain colons.
        name, _, number = problem.where.rpartition(":")
        return (0, int(number)) if name == str(path) and number.isdigit() else (1, 0)

    return merge_alike(sorted(problems, key=line))


@functools.cache
def read_synonyms() -> Mapping[str, str]:
    """Return a mapping of key names in other programs to our key of at least one recipe."""
    names = read_lists(Path(__file__).with_name("synonyms.yaml"))
    return {name: key for key, synonyms in names.items() for name in synonyms.split()}


def explain_unknown(entry: Entry, table: KeyTable, taken: set[str]) -> Problem:
    """Explain an unknown key.

    Args:
        entry: The unknown key with its value.
        table: Keys of the recipe.
        taken: All keys that the user wrote: a successor among them is not suggested again.
    """
    key = entry.key
    if is_secret_key(key):
        # Without the value.
        return Problem(entry.where, f"`{key[:60]}` would store a secret in a file", SECRET_REMEDY)
    known = read_known(table.recipe)
    if key in known:
        retired = known[key]
        remedy = f"delete the line: `{retired.new}` is set as well" if retired.new in taken else retired.remedy
        return Problem(entry.where, f"`{key}` {retired.found}", remedy)
    if nested := _nested_keys(entry.node, table):
        names = ", ".join(nested[:3] + ["..."] * (len(nested) > 3))
        return Problem(entry.where, f"`{key}` is not a key; keys are flat", f"move {names} to the left margin")
    # Letters of other alphabets are escaped: a look-alike could not be told from the suggested key.
    return Problem(entry.where, f"unknown key `{ascii(key[:60])[1:-1]}`", _suggest(key, table, entry.flag))


def _fold(key: str) -> str:
    """Return the usual spelling of a key: lower case, underscores."""
    return key.lower().replace("-", "_")


def _find_meant(entry: Entry, table: KeyTable) -> list[str]:
    """Return the keys that an unknown one was meant as: another spelling, its successor, keys nested in its value."""
    retired, folded = read_known(table.recipe).get(entry.key), _fold(entry.key)
    successor = retired.new if retired else folded if folded in table.keys else read_synonyms().get(entry.key)
    nested = [read_synonyms().get(name, name) for name in _nested_keys(entry.node, table)]
    return [*filter(None, [successor]), *nested]


def _nested_keys(node: yaml.Node, table: KeyTable) -> list[str]:
    if not isinstance(node, yaml.MappingNode):
        return []
    names = [key.value for key, _ in node.value]
    known = table.keys.keys() | read_known(table.recipe).keys()
    return [name for name in names if name in known or read_synonyms().get(name) in known]


def _suggest(key: str, table: KeyTable, flag: bool) -> str:
    positive = key.removeprefix("no_")
    # HfArgumentParser's form of switching a boolean off.
    if positive in table.keys and table.keys[positive].accepts("boolean"):
        return f"write `--{positive} false`" if flag else f"write `{positive}: false`"
    plain = _fold(key)
    known = read_known(table.recipe)
    synonym = read_synonyms().get(plain, "")
    # Here under another name, and rejected by this recipe: give the reason of that name.
    if synonym in known:
        return f"it is `{synonym}` elsewhere, which {known[synonym].found}; {known[synonym].remedy}"
    # Candidates are the keys, and retired spellings that have a successor.
    names = {name: name for name in table.keys} | {
        name: retired.new for name, retired in known.items() if retired.new in table.keys
    }
    near = [synonym] if synonym in table.keys else difflib.get_close_matches(plain, names, n=1, cutoff=0.7)
    return f"did you mean `{names[near[0]]}`?" if near else f"see `--help` or docs/configs/{table.recipe}.md"


def expand_paths(value: Any) -> Any:
    """Return a path, the ``name`` of a mapping, or a list of either, with ``~/`` replaced by the home folder."""
    if isinstance(value, list):
        return [expand_paths(item) for item in value]
    if isinstance(value, dict) and "name" in value:
        return value | {"name": expand_paths(value["name"])}
    return expand_home(value) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class CommandConfig:
    """Configuration of a command that has keys of its own; their sections are further base classes.

    Attributes:
        TABLE: Name of the key table, one of ``table.TABLES``.
        USAGE: Command lines for ``--help``; empty: the name of the table and a file.
        path: The YAML file; ``None`` when everything came from flags.
    """

    TABLE: ClassVar[str]
    USAGE: ClassVar[str] = ""
    path: Path | None = None

    @classmethod
    def parse(cls, argv: Sequence[str], required: Sequence[str] = ()) -> Self:
        """Parse the arguments of the command.

        Args:
            argv: Command-line arguments.
            required: Keys that must be set instead of those of the key table; then ``find_problems`` is not called.

        Raises:
            ConfigError: The file, a flag or a combination of keys is invalid; lists every problem.
            SystemExit: ``--help`` or ``--print-config`` was given, and its text printed.
        """
        table, problems = load_table(cls.TABLE), list[Problem]()
        command = _read_command(argv, table, cls.USAGE or f"recipes {cls.TABLE} {_ARGUMENTS}", problems)
        settings = _read_settings(command.config, command.entries, table, problems)
        for key in required or table.required:
            problems += check_given(settings, key)
        values, provenance = _resolve(settings)
        config = cls(path=command.config, **values)
        if not required:
            for rule in COMMAND_RULES:
                problems += rule(settings)
            problems += config.find_problems(settings)
        if problems:
            raise ConfigError(*_in_order(problems, command.config))
        if command.wants == "print":
            _print_and_exit(_format_values(table, values, provenance))
        return config

    def find_problems(self, settings: Settings) -> Iterator[Problem]:
        """Return problems of the configuration as a whole; a command without any has none."""
        return iter(())

    def list_values(self) -> dict[str, Any]:
        """Return every key with its value as JSON types, without ``path``."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "path"}
