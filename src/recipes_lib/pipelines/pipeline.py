"""A pipeline as its YAML file says it: stages with commands, what they need, rounds and sweeps, references resolved."""

from __future__ import annotations

import difflib
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from recipes_lib.config.table import TABLES
from recipes_lib.config.values import compose, read_text
from recipes_lib.errors import ConfigError, Problem

_KINDS: Final = ("recipe", "command", "run")
_STAGE_KEYS: Final = (*_KINDS, "about", "config", "launch", "set", "output", "needs", "require", "matrix")
_ROUND_KEYS: Final = ("rounds", "start", "stages")
_KEYS: Final = ("output_dir", "environment", "stages")
_REFERENCE: Final = re.compile(r"\$\{([^}]*)\}")
_REQUIREMENT: Final = re.compile(r"\s*(<=|>=|==|<|>)\s*(-?\d+(?:\.\d+)?(?:[eE]-?\d+)?)\s*")
_RECIPES: Final = Path(__file__).parents[3] / "recipes"


@dataclass(frozen=True, slots=True)
class Stage:
    """One command of a pipeline.

    Attributes:
        name: As in the file; of a round or a sweep with its number.
        words: The command.
        argv: The end of it: what a recipe is given.
        output: File or folder that it writes.
        needs: Names of the stages whose outputs it reads, or that must be done before.
        require: What a figure of its output must be, by the figure's name: ``> 0.65``.
        files: Files of the user that decide what it does.
        recipe: Whose keys the words set; empty of other commands.
        about: What it does, for a reader.
    """

    name: str
    words: Sequence[str]
    argv: Sequence[str]
    output: Path
    needs: Sequence[str] = ()
    require: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[Path] = ()
    recipe: str = ""
    about: str = ""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in an order in which each comes after those that it needs.

    Attributes:
        output_dir: Folder of the outputs, of ``pipeline.json`` and of ``index.html``.
        environment: Variables of every stage.
        stages: In order.
    """

    output_dir: Path
    environment: Mapping[str, str]
    stages: Sequence[Stage]


def load_pipeline(path: Path, output_dir: str | None = None) -> Pipeline:
    """Read a pipeline.

    Args:
        path: The YAML file.
        output_dir: Instead of the file's.

    Raises:
        ConfigError: The file cannot be read, or anything in it is wrong; every problem at once.
    """
    problems: list[Problem] = []
    text = read_text(path, problems)
    node = None if text is None else compose(text, str(path), problems)
    problems += [] if node is None else _find_repeated(path, node)
    if text is not None and node is not None and not problems:
        document = yaml.safe_load(text)
        reader = _Reader(path, problems)
        if isinstance(document, Mapping) and isinstance(document.get("stages"), Mapping):
            reader.refuse_unknown(str(path), document, _KEYS)
            folder = Path(output_dir or document.get("output_dir") or "runs")
            stages = reader.read(document["stages"], folder)
            environment = {str(name): str(value) for name, value in (document.get("environment") or {}).items()}
            if not problems:
                return Pipeline(folder, environment, stages)
        elif not problems:
            problems.append(Problem(str(path), "has no `stages`", "write stages: {name: {recipe: sft, config: F}}"))
    raise ConfigError(*(problems or [Problem(str(path), "is empty", "write stages: {...}")]))


def _find_repeated(path: Path, node: yaml.Node) -> Iterator[Problem]:
    """Yield a problem for each key that stands twice in a mapping, of which YAML takes the last in silence."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                where = f"{path}:{key.start_mark.line + 1}"
                yield Problem(where, f"`{key.value}` is repeated", "keep one of the two")
            seen.add(key.value)
            yield from _find_repeated(path, value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _find_repeated(path, item)


class _Reader:
    """Reads stages, and keeps what references may name."""

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        self.path, self.problems = path, problems
        self.known: dict[str, str] = {}
        """Reference -> its value: ``sft.output``, ``policy.previous``, ``round``, ``output_dir``."""
        self.by_output: dict[str, list[str]] = {}
        """Reference -> the stages that have to be done for it."""

    def read(self, entries: Mapping[str, Any], folder: Path) -> list[Stage]:
        self.known |= {"output_dir": str(folder), "here": str(self.path.resolve().parent)}
        stages: list[Stage] = []
        for name, entry in entries.items():
            where = f"{self.path}: {name}"
            if not isinstance(entry, Mapping):
                self.problems.append(Problem(where, "is not a stage", "write {recipe: ..., config: ...}"))
            elif "rounds" in entry:
                stages += self._read_rounds(where, entry, folder)
            else:
                stages += self._read_stage(str(name), where, entry, folder)
        return stages

    def _read_rounds(self, where: str, entry: Mapping[str, Any], folder: Path) -> Iterator[Stage]:
        self.refuse_unknown(where, entry, _ROUND_KEYS)
        count, inner = entry["rounds"], entry.get("stages")
        if not (isinstance(count, int) and count > 0 and isinstance(inner, Mapping)):
            remedy = "write rounds: 3, start: {policy: MODEL} and stages: {...}"
            self.problems.append(Problem(where, "is not a number of rounds with stages", remedy))
            return
        for name, start in (entry.get("start") or {}).items():
            needs: list[str] = []
            self.known[f"{name}.previous"] = self._resolve(where, str(start), needs)
            self.by_output[f"{name}.previous"] = needs
        for number in range(1, count + 1):
            self.known["round"] = str(number)
            for name, stage in inner.items():
                place = f"{where}.{name}"
                for one in self._read_stage(str(name), place, stage, folder, suffix=f"-{number}"):
                    self._remember(str(name), [one])
                    yield one
            for name in inner:
                self.known[f"{name}.previous"] = self.known[f"{name}.output"]
                self.by_output[f"{name}.previous"] = self.by_output[f"{name}.output"]
        del self.known["round"]

    def _read_stage(
        self, name: str, where: str, entry: Mapping[str, Any], folder: Path, *, suffix: str = ""
    ) -> list[Stage]:
        self.refuse_unknown(where, entry, _STAGE_KEYS)
        kinds = [kind for kind in _KINDS if kind in entry]
        if len(kinds) != 1:
            self.problems.append(Problem(where, f"has {len(kinds)} of {', '.join(_KINDS)}", "write one of them"))
            return []
        matrix = entry.get("matrix") or {}
        combinations = [
            dict(zip(matrix, values, strict=True))
            for values in itertools.product(
                *(value if isinstance(value, list) else [value] for value in matrix.values())
            )
        ]
        stages = []
        for number, keys in enumerate(combinations, 1):
            full = f"{name}{suffix}" + (f"-{number}" if matrix else "")
            stages.append(self._build(full, where, entry, kinds[0], keys, folder))
        self._remember(name, stages)
        return stages

    def _remember(self, name: str, stages: Sequence[Stage]) -> None:
        for stage in stages:
            self.known[f"{stage.name}.output"] = str(stage.output)
            self.by_output[f"{stage.name}.output"] = [stage.name]
        if len(stages) == 1:
            self.known[f"{name}.output"] = str(stages[0].output)
            self.by_output[f"{name}.output"] = [stages[0].name]

    def _build(
        self, name: str, where: str, entry: Mapping[str, Any], kind: str, keys: Mapping[str, Any], folder: Path
    ) -> Stage:
        needs: list[str] = []

        def resolve(value: Any) -> str:
            return self._resolve(where, value if isinstance(value, str) else _write(value), needs)

        output = Path(resolve(entry["output"])) if "output" in entry else folder / name
        config = Path(resolve(entry["config"])) if "config" in entry else None
        flags = {**(entry.get("set") or {}), **keys}
        if kind == "recipe":
            flags.setdefault("output_dir", str(output))
        words = self._find_program(where, kind, entry, needs)
        if kind == "recipe" and "launch" in entry:
            words = [*_recipes("launch"), "--stage", str(entry["recipe"]), "--hardware", resolve(entry["launch"])]
        argv = [] if config is None else ["--config", str(config)]
        argv += [word for key, value in flags.items() for word in (f"--{key}", resolve(value))]
        for need in entry.get("needs") or []:
            if f"{need}.output" not in self.known:
                self._refuse_reference(where, str(need), [name.partition(".")[0] for name in self.known])
            needs += self.by_output.get(f"{need}.output", [])
        require = {str(key): str(value) for key, value in (entry.get("require") or {}).items()}
        for figure, wanted in require.items():
            if not _REQUIREMENT.fullmatch(wanted):
                self.problems.append(
                    Problem(f"{where}.require.{figure}", f"is {wanted!r}", "write one such as '> 0.65'")
                )
        return Stage(
            name=name,
            words=[*words, *argv],
            argv=argv,
            output=output,
            needs=tuple(dict.fromkeys(needs)),
            require=require,
            files=tuple(path for path in (config, Path(str(entry["launch"])) if "launch" in entry else None) if path),
            recipe=str(entry.get("recipe", "")),
            about=str(entry.get("about", "")),
        )

    def _find_program(self, where: str, kind: str, entry: Mapping[str, Any], needs: list[str]) -> list[str]:
        if kind == "run":
            words = entry["run"] if isinstance(entry["run"], list) else str(entry["run"]).split()
            return [self._resolve(where, str(word), needs) for word in words]
        if kind == "command":
            return [*_recipes(str(entry["command"]).split()[0]), *str(entry["command"]).split()[1:]]
        recipe = str(entry["recipe"])
        if recipe not in TABLES:
            self._refuse_reference(f"{where}.recipe", recipe, TABLES)
        recipes = Path("recipes") if Path("recipes").is_dir() else _RECIPES
        return [sys.executable, str(recipes.resolve() / f"{recipe}.py")]

    def _resolve(self, where: str, text: str, needs: list[str]) -> str:
        def replace(match: re.Match[str]) -> str:
            name = match[1].strip()
            if name not in self.known:
                self._refuse_reference(where, name, self.known)
                return ""
            needs.extend(self.by_output.get(name, ()))
            return self.known[name]

        return _REFERENCE.sub(replace, text)

    def _refuse_reference(self, where: str, name: str, known: Any) -> None:
        near = difflib.get_close_matches(name, list(known), n=1)
        remedy = f"did you mean {near[0]}?" if near else "name a stage above it, as in ${sft.output}"
        self.problems.append(Problem(where, f"there is no {name!r} here", remedy))

    def refuse_unknown(self, where: str, entry: Mapping[str, Any], known: Sequence[str]) -> None:
        """Add a problem for each key that means nothing."""
        for key in entry.keys() - set(known):
            near = difflib.get_close_matches(str(key), known, n=1)
            remedy = f"did you mean `{near[0]}`?" if near else f"the keys are {', '.join(known)}"
            self.problems.append(Problem(where, f"there is no key `{key}`", remedy))


def _recipes(command: str) -> list[str]:
    return [sys.executable, "-m", "recipes_lib.cli", command]


def _write(value: Any) -> str:
    return json.dumps(value)


def holds(wanted: str, value: float) -> bool:
    """Return whether a value is what ``require`` wants of it, such as ``> 0.65``."""
    match = _REQUIREMENT.fullmatch(wanted)
    assert match is not None
    bound = float(match[2])
    return {
        "<": value < bound,
        "<=": value <= bound,
        ">": value > bound,
        ">=": value >= bound,
        "==": value == bound,
    }[match[1]]
