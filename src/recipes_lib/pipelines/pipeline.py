"""Parser of pipeline files: stages, their commands and dependencies, rounds, sweeps and ``${...}`` references."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from recipes_lib.config.command_flags import COMPARISONS, REQUIREMENT
from recipes_lib.config.paths import NO_VARIABLES, VARIABLE, expand_home, find_launch_file, find_recipe, find_shipped
from recipes_lib.config.table import RECIPE_NAMES, TABLES, read_lists
from recipes_lib.config.values import SECRET_REMEDY, has_secret_shape, read_yaml
from recipes_lib.errors import ConfigError, Problem, suggest

_KINDS: Final = ("recipe", "command", "run")
_KEYS: Final[Mapping[str, Mapping[str, Mapping[str, str]]]] = read_lists(Path(__file__).with_name("keys.yaml"))
"""Keys of a ``pipeline``, a ``loop`` and a ``stage`` -> type of the value, and an example."""
_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "text": str,
    "text or list": (str, list),
    "list": list,
    "mapping": dict,
    "number": int,
}
_NAME: Final = re.compile(r"\w[\w.-]*")
_REFERENCE: Final = re.compile(r"\$\{([^}]*)\}")
_RESERVED: Final = ("pipeline.json", "index.html", "jobs")
"""Names in the output folder that `recipes run` writes itself."""
_SHELL_OPERATORS: Final = {"&&", "||", "|", ";", "&", ">", ">>", "<"}
_EXPONENTIAL: Final = re.compile(r'"([-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+)"')
"""A number in a JSON text that PyYAML reads as a string, unlike configurations: ``1e-5``."""
_VARIABLE_NAME: Final = re.compile(r"[^\W\d]\w*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Stage:
    """One command of a pipeline.

    Attributes:
        name: Name in the file; stages of rounds and sweeps have a number appended, ``sft-2``.
        words: The full command line.
        argv: The last part of ``words``: the arguments of a recipe.
        output: File or folder that the stage writes.
        identity: The command with symbolic references in place of paths, hashed for caching.
        needs: Names of the stages that must be done first, including those whose outputs it reads.
        require: Gates: metric name -> condition on its value, ``> 0.65``.
        files: Configuration and launch files, whose contents are hashed for caching.
        recipe: Name of the recipe; empty for commands and programs.
        command: Name of the ``recipes`` command; empty for recipes and programs.
        launch: Launch file of the recipe; empty for a single process.
        swept: Sweep keys of this stage -> their values; empty outside sweeps.
        about: Description for the overview.
    """

    name: str
    words: Sequence[str]
    argv: Sequence[str]
    output: Path
    identity: Sequence[str]
    needs: Sequence[str] = ()
    require: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[Path] = ()
    recipe: str = ""
    command: str = ""
    launch: str = ""
    swept: Mapping[str, str] = field(default_factory=dict)
    about: str = ""

    @property
    def has_given_config(self) -> bool:
        """Whether no earlier stage writes the configuration."""
        return self.argv[:1] != ["--config"] or find_shipped(Path(self.argv[1])) in self.files


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in topological order, which is their order in the file.

    Attributes:
        output_dir: Folder of the outputs, of ``pipeline.json`` and of ``index.html``.
        environment: Environment variables set for every stage.
        stages: Stages, each after those that it needs.
        entries: Name in the file, of a stage, a sweep or a loop -> the names of its stages.
    """

    output_dir: Path
    environment: Mapping[str, str]
    stages: Sequence[Stage]
    entries: Mapping[str, Sequence[str]]


def load_pipeline(path: Path, output_dir: str | None = None) -> Pipeline:
    """Load a pipeline file.

    Args:
        path: YAML file; a path below ``recipes/`` that does not exist is looked up in the package.
        output_dir: Overrides the ``output_dir`` of the file; ``None`` keeps it.

    Raises:
        ConfigError: The file cannot be read or is invalid; all problems at once.
    """
    path = find_shipped(path)
    document = read_yaml(path)
    if not isinstance(document, Mapping) or not isinstance(document.get("stages"), Mapping) or not document["stages"]:
        remedy = f"write {_KEYS['pipeline']['stages']['example']}; `recipes launch {path}` starts a recipe"
        raise ConfigError(Problem(str(path), "has no mapping `stages`", remedy))
    text = output_dir or str(document.get("output_dir") or f"runs/{path.stem}")
    folder = Path(expand_home(text))
    reader = _Reader(path, folder)
    reader.has_shape(str(path), document, "pipeline")
    if VARIABLE.search(text):
        reader.problems.append(Problem(f"{path}: output_dir", f"is {text[:120]!r}", NO_VARIABLES))
    stages = reader.read(document["stages"])
    environment = reader.read_environment(document.get("environment"))
    if not reader.problems:
        return Pipeline(folder, environment, stages, {name: reader.groups[name] for name in reader.entries})
    # Once each: a stage of a loop is parsed once per round.
    raise ConfigError(*dict.fromkeys(reader.problems))


class _Known(NamedTuple):
    """Value of a reference.

    Attributes:
        text: Resolved text, such as a path.
        symbol: Text that does not depend on where the project and its outputs are, for the hash of a stage.
        stages: Stages that it refers to.
    """

    text: str
    symbol: str
    stages: Sequence[str] = ()


class _Reader:
    """Parser of stages; collects what later stages may refer to."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder, self.problems = path, folder, list[Problem]()
        self.known: dict[str, _Known] = {}
        """Reference (``sft.output``, ``policy.previous``, ``round``, ``output_dir``) -> its value."""
        self.groups: dict[str, list[str]] = {}
        """Name in the file, of a stage, a sweep or a loop -> the names of its stages."""
        self.outputs: dict[Path, str] = {}
        """Output, without links and ``..`` -> the stage that writes it."""
        self.entries: set[str] = set()
        """Names of all entries of the file, including those that are not parsed yet."""

    def read_environment(self, entries: Any) -> dict[str, str]:
        """Parse ``environment``, if it is a mapping; problems are added to ``self.problems``."""
        environment = {name: _write(value) for name, value in entries.items()} if isinstance(entries, dict) else {}
        for name, value in environment.items():
            where = f"{self.path}: environment.{name}"
            if not _VARIABLE_NAME.fullmatch(name):
                self._refuse(where, "is not a name of an environment variable", "write letters, digits and _")
            if has_secret_shape(f"{name}={value}"):
                self._refuse(where, "looks like an access token", SECRET_REMEDY)
            elif "${" in value:
                self._refuse(where, f"is {value!r:.60}, and references are for stages only", "write the value itself")
        return environment

    def read(self, entries: Mapping[str, Any]) -> list[Stage]:
        """Parse all entries of ``stages`` in order; problems are added to ``self.problems``."""
        self.entries = set(entries)
        self.known |= {
            "output_dir": _Known(str(self.folder), "${output_dir}"),
            "here": _Known(str(self.path.resolve().parent), "${here}"),
        }
        stages: list[Stage] = []
        for name, entry in entries.items():
            where = f"{self.path}: {name}"
            if isinstance(entry, Mapping) and entry.get("rounds") is not None:
                before = len(stages)
                stages += self._read_rounds(where, entry)
                self.groups[name] = [stage.name for stage in stages[before:]]
            else:
                stages += self._read_stage(name, where, entry)
        return stages

    def _read_rounds(self, where: str, entry: Mapping[str, Any]) -> Iterator[Stage]:
        if not self.has_shape(where, entry, "loop"):
            return
        inner = entry.get("stages")
        if entry["rounds"] < 1 or not inner:
            remedy = "write rounds: 3, start: {policy: MODEL} and stages: {...}"
            self._refuse(where, "is not a number of rounds with stages", remedy)
            for name in inner or ():
                self._remember(name, [])
            return
        for name, start in (entry.get("start") or {}).items():
            if name not in inner:  # It would be the same in every round.
                found = f"`start` has {name!r}, which is no stage of the loop"
                self._refuse(where, found, f"name {' or '.join(inner)}")
            self.known[f"{name}.previous"] = self._resolve(where, _write(start))
        for number in range(1, entry["rounds"] + 1):
            self.known["round"] = _Known(str(number), str(number))
            for name, stage in inner.items():
                yield from self._read_stage(name, f"{where}.{name}", stage, f"-{number}")
            for name in inner:
                # A sweep has several outputs, none of which is the previous one.
                self.known.pop(f"{name}.previous", None)
                if f"{name}.output" in self.known:
                    self.known[f"{name}.previous"] = self.known[f"{name}.output"]
        # `${round}` is undefined for stages after the loop.
        del self.known["round"]

    def _read_stage(self, name: str, where: str, entry: Any, suffix: str = "") -> list[Stage]:
        if (kind := self._find_kind(where, entry)) is None:
            self._remember(name, [])
            return []
        entry = {key: value for key, value in entry.items() if value is not None}
        matrix = entry.get("matrix") or {}
        values = [value if isinstance(value, list) else [value] for value in matrix.values()]
        if [] in values:
            self._refuse(f"{where}.matrix", "has a key without values", f"write {_KEYS['stage']['matrix']['example']}")
        for key, texts in zip(matrix, ([_write(one) for one in value] for value in values), strict=True):
            if len(set(texts)) < len(texts):
                self._refuse(f"{where}.matrix.{key}", f"has a value twice: {', '.join(texts)}", "remove one of them")
        stages = []
        for number, combination in enumerate(itertools.product(*values), 1):
            full = f"{name}{suffix}" + (f"-{number}" if matrix else "")
            keys = dict(zip(matrix, combination, strict=True))
            stages.append(self._build(full, where, entry, kind, keys))
        self._remember(name, stages)
        return stages

    def _find_kind(self, where: str, entry: Any) -> str | None:
        """Return the kind of a stage: recipe, command or program; ``None`` for an invalid entry."""
        if not isinstance(entry, Mapping):
            self._refuse(where, "is not a stage", "write {recipe: ..., config: ...}")
        elif self.has_shape(where, entry, "stage"):
            kinds = [kind for kind in _KINDS if entry.get(kind)]
            if len(kinds) == 1:
                return kinds[0]
            self._refuse(where, f"has {len(kinds)} of {', '.join(_KINDS)}", "write one of them")
        return None

    def _remember(self, name: str, stages: Sequence[Stage]) -> None:
        self.groups[name] = [stage.name for stage in stages]
        if not stages:
            # References to an invalid stage are not reported as further problems.
            self.known[f"{name}.output"] = _Known("", "")
        for stage in stages:
            self.known[f"{stage.name}.output"] = output = _Known(
                str(stage.output), f"${{{stage.name}.output}}", (stage.name,)
            )
            if len(stages) == 1:
                self.known[f"{name}.output"] = output

    def _build(self, name: str, where: str, entry: Mapping[str, Any], kind: str, keys: Mapping[str, Any]) -> Stage:
        def resolve(value: Any) -> _Known:
            return self._resolve(where, _write(value))

        words = [resolve(word) for word in self._find_program(where, kind, entry)]
        # `config` comes first, and may be swept too.
        given = {"config": entry.get("config")} | (entry.get("set") or {}) | dict(keys)
        for key in {"help", "print_config", "print-config"} & given.keys():
            self._refuse(f"{where}.{key}", "prints a text in place of the work of the stage", "delete it")
        flags = {key: resolve(value) for key, value in given.items() if (key, value) != ("config", None)}
        argv = [word for key, value in flags.items() for word in (_Known(f"--{key}", f"--{key}"), value)]
        # A recipe writes to its own `output_dir` if `set` has one.
        place = resolve(entry["output"]) if "output" in entry else flags.get("output_dir") if kind == "recipe" else None
        output = place or _Known(str(self.folder / name), "")
        needs = [stage for word in (*words, *argv, output) for stage in word.stages]
        needs += self._find_needs(where, entry)
        identity = [kind, *(word.symbol for word in (*words, *argv, output))]
        arguments = [word.text for word in argv]
        # A configuration that another stage writes is covered by the hash of that stage.
        config = flags.get("config")
        files = [find_shipped(Path(config.text))] if config and not config.stages else []
        if files and not files[0].exists() and (self.path.parent / files[0]).is_file():
            self._refuse(f"{where}.config", f"there is no {files[0]} here", f"write ${{here}}/{files[0]}")
        if kind == "recipe":
            # Not in the identity, so that a moved pipeline is not run again.
            arguments += [] if "output_dir" in flags else ["--output_dir", output.text]
        files += self._find_launch(where, entry)
        self._claim(where, name, Path(output.text))
        return Stage(
            name=name,
            words=[*_find_words(kind, entry, [word.text for word in words]), *arguments],
            argv=arguments,
            output=Path(output.text),
            identity=identity,
            needs=tuple(dict.fromkeys(needs)),
            require=self._read_gates(where, entry),
            files=tuple(files),
            recipe=entry.get("recipe", ""),
            command=words[0].text if kind == "command" and words else "",
            launch=entry.get("launch", ""),
            swept={key: _write(value) for key, value in keys.items()},
            about=entry.get("about", ""),
        )

    def _claim(self, where: str, name: str, output: Path) -> None:
        """Register name and output of a stage; invalid ones and those of another stage are problems."""
        if not _NAME.fullmatch(name):
            self._refuse(where, f"{name!r} is not a folder name", "write letters, digits and -")
        # A changed stage has its output renamed: renaming the folder of `pipeline.json` would lose all stages.
        if not output.name or self.folder.resolve().is_relative_to(output.resolve()):
            found = f"is {str(output)!r}, which holds the outputs of all stages"
            self._refuse(f"{where}.output", found, f"write {_KEYS['stage']['output']['example']}")
        if output.resolve().parent == self.folder.resolve() and output.name in _RESERVED:
            found = f"writes {output}, which belongs to the pipeline"
            self._refuse(where, found, "rename the stage, or give it another `output`")
        if name in self.outputs.values():
            self._refuse(where, f"another stage is called {name!r} too", "rename one of them")
        elif output.resolve() in self.outputs:
            found = f"writes {output}, as {self.outputs[output.resolve()]} does"
            self._refuse(where, found, "give one of them another `output`")
        self.outputs[output.resolve()] = name

    def _find_needs(self, where: str, entry: Mapping[str, Any]) -> Iterator[str]:
        for need in entry.get("needs") or []:
            known = {**{name: [name] for name in self.outputs.values()}, **self.groups}
            if str(need) not in known:
                self._refuse_reference(where, str(need), sorted(known))
            yield from known.get(str(need), [])

    def _read_gates(self, where: str, entry: Mapping[str, Any]) -> dict[str, str]:
        require = {key: str(value) for key, value in (entry.get("require") or {}).items()}
        for figure, wanted in require.items():
            place = f"{where}.require.{figure}"
            stage, _, rest = figure.partition(".")
            if stage in self.groups and rest:
                found = f"is a metric of stage {stage}, and a stage's `require` checks its own output"
                remedy = f"write it at {stage}: require: {{{rest}: {json.dumps(wanted)}}}"
                self._refuse(place, found, remedy)
            elif not REQUIREMENT.fullmatch(wanted):
                self._refuse(place, f"is {wanted!r}", f"write {', '.join(COMPARISONS)} and a number, such as '> 0.65'")
        return require

    def _find_launch(self, where: str, entry: Mapping[str, Any]) -> list[Path]:
        if "launch" in entry and entry.get("recipe") not in RECIPE_NAMES:
            found = f"{entry.get('recipe', 'this stage')} does not train, and runs as one process"
            self._refuse(f"{where}.launch", found, "delete the line")
            return []
        try:
            return [find_launch_file(entry["launch"])] if "launch" in entry else []
        except ConfigError as error:
            self.problems += [Problem(f"{where}.launch", one.found, one.remedy) for one in error.problems]
            return []

    def _find_program(self, where: str, kind: str, entry: Mapping[str, Any]) -> list[str]:
        """Return the name of the recipe, or the words of the command, with unresolved references."""
        if kind == "recipe":
            if entry["recipe"] not in TABLES:
                self._refuse_reference(f"{where}.recipe", entry["recipe"], TABLES)
            return [entry["recipe"]]
        if isinstance(entry[kind], list):
            return [_write(word) for word in entry[kind]]
        try:
            words = shlex.split(entry[kind])
        except ValueError as error:
            self._refuse(f"{where}.{kind}", f"cannot be read: {error}", "write a list of words")
            return []
        if operators := _SHELL_OPERATORS.intersection(words):
            remedy = "write run: [bash, -c, '...']"
            self._refuse(f"{where}.{kind}", f"has {min(operators)}, and is not run by a shell", remedy)
        return words

    def _resolve(self, where: str, text: str) -> _Known:
        # `re.split` with one group: plain text at even places, the names of references at odd ones.
        parts = [
            self._find_known(where, part.strip()) if at % 2 else _Known(part, part)
            for at, part in enumerate(_REFERENCE.split(text))
        ]
        if any("${" in part.text for part in parts[::2]):
            self._refuse(where, f"{text!r:.80} has a `${{` without its `}}`", "write ${sft.output}, without spaces")
        texts, symbols, stages = zip(*parts, strict=True)
        # As recipes do: the files of a stage are hashed, and its output is verified, where it reads and writes them.
        text = expand_home("".join(texts))
        return _Known(text, "".join(symbols), tuple(dict.fromkeys(itertools.chain(*stages))))

    def _find_known(self, where: str, name: str) -> _Known:
        if name not in self.known:
            self._refuse_reference(where, name, self.known)
        return self.known.get(name, _Known("", ""))

    def _refuse(self, where: str, found: str, remedy: str) -> None:
        self.problems.append(Problem(where, found, remedy))

    def _refuse_reference(self, where: str, name: str, known: Any) -> None:
        otherwise = "name a stage above it, as in ${sft.output}; environment variables are not expanded"
        remedy = suggest(name, known, otherwise, "{}")
        stage = name.removesuffix(".output")
        sweep = self.groups.get(stage, [])
        if len(sweep) > 1:
            remedy = f"it is several stages: name one of {', '.join(f'{one}.output' for one in sweep)}"
        elif stage in self.entries - self.groups.keys():
            remedy = "a stage can need only stages above it: move that one up, or remove the cycle"
        self._refuse(where, f"there is no {name!r} here", remedy)

    def has_shape(self, where: str, entry: Mapping[str, Any], part: str) -> bool:
        """Return whether all keys of a part are known and their values have the right types, else report problems."""
        before, known = len(self.problems), _KEYS[part]
        for key, value in entry.items():
            if key not in known:
                remedy = suggest(key, known, f"the keys are {', '.join(known)}")
                self._refuse(where, f"there is no key `{key}`", remedy)
            elif value is not None and (not isinstance(value, _TYPES[known[key]["type"]]) or isinstance(value, bool)):
                self._refuse(f"{where}.{key}", f"is {value!r:.60}", f"write {known[key]['example']}")
        return len(self.problems) == before


def _find_words(kind: str, entry: Mapping[str, Any], named: list[str]) -> list[str]:
    """Return the program of a stage and its first words, which ``Stage.argv`` follows."""
    if kind == "run":
        return named
    recipes = [sys.executable, "-P", "-m", "recipes_lib.cli"]
    if kind == "command":
        return [*recipes, *named]
    if "launch" in entry:
        return [*recipes, "launch", "--recipe", entry["recipe"], "--hardware", entry["launch"]]
    return [sys.executable, str(find_recipe(entry["recipe"]))]


def _write(value: Any) -> str:
    """Return a YAML value as the text of a flag or an environment variable."""
    # Numbers, booleans, lists and mappings as JSON, which is YAML; a date as it was written.
    if not isinstance(value, bool | int | float | list | dict | None):
        return str(value)
    return _EXPONENTIAL.sub(r"\1", json.dumps(value, default=str))
