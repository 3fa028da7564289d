"""Methods of ``recipes synthesize``: what is read, which prompts are sent in which order, and what becomes of it.

A method is a YAML file, shipped in ``methods/`` or the user's own:

- ``reads``: ``seeds`` (several rows with a prompt are shown), ``prompts`` or ``documents`` (one row each);
- ``choices``: name -> values, one of which is drawn for each row;
- ``steps``: each with ``name`` and ``prompt``, and perhaps ``system``, ``context: true`` (the messages before the
  prompt are sent too) and ``pattern``, a regular expression whose group is taken of the reply;
- ``compare``: the text by which near duplicates are found; ``compare_with_source: true``: also with what was read;
- ``row``: what is written; ``context`` in place of a message stands for those before the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from recipes_lib.config.synthesis_keys import SynthesisConfig
from recipes_lib.errors import ConfigError, DataError, Problem, collecting, raise_problems
from recipes_lib.evaluation.endpoint import Chat, Message, split_reasoning
from recipes_lib.evaluation.judge_questions import Question, read_question
from recipes_lib.evaluation.prompt_files import load_prompt_file, render_prompt

METHODS: Final = Path(__file__).with_name("methods")
READS: Final = ("seeds", "prompts", "documents")
_FIELDS: Final = {
    **{"reads": str, "choices": dict, "steps": list, "compare": str, "compare_with_source": bool, "row": dict}
}
_STEP_FIELDS: Final = {"name": str, "prompt": str, "system": str, "context": bool, "pattern": str}
_CONTEXT: Final = "context"


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row that is read.

    Attributes:
        where: Its place.
        text: Its prompt or document.
        question: Of seeds and prompts.
    """

    where: str
    text: str
    question: Question | None = None


@dataclass(frozen=True)
class Method:
    """A method, as a configuration uses it.

    Attributes:
        path: Of its file.
        fields: Of its file.
        config: Source, seed and numbers.
    """

    path: Path
    fields: Mapping[str, Any]
    config: SynthesisConfig

    @property
    def steps(self) -> Sequence[Mapping[str, Any]]:
        """Steps in order; the last one gives the answers."""
        steps: Sequence[Mapping[str, Any]] = self.fields["steps"]
        return steps

    def draw(self, rows: Sequence[SourceRow], number: int) -> dict[str, Any]:
        """Return the values of a row: what it reads, and a value of each choice; decided by seed and number.

        Args:
            rows: Of the source.
            number: Of the row that is written.
        """
        # A generator of its own for each row: what it draws depends on no other row, so that a resumed run equals a
        # whole one.
        drawn = np.random.default_rng([self.config.seed, number])
        values: dict[str, Any] = {
            name: given[int(drawn.integers(len(given)))] for name, given in (self.fields["choices"] or {}).items()
        }
        if self.fields["reads"] == "seeds":
            chosen = drawn.choice(len(rows), min(self.config.num_seeds, len(rows)), replace=False)
            seeds = [rows[int(at)] for at in chosen]
            return {
                **values,
                "seeds": [{"prompt": seed.text, "where": seed.where} for seed in seeds],
                "source": [seed.where for seed in seeds],
            }
        row = rows[number % len(rows)]
        values["source"] = [row.where]
        if row.question is None:
            return {**values, "document": row.text}
        context, references = list(row.question.context), list(row.question.references)
        return {**values, "prompt": row.text, _CONTEXT: context, "references": references}

    def build_chat(self, step: Mapping[str, Any], values: Mapping[str, Any]) -> Chat:
        """Return what is sent at a step.

        Raises:
            ConfigError: As ``render_prompt``.
        """
        messages: list[Message] = list(values.get(_CONTEXT, ())) if step.get("context") else []
        if step.get("system"):
            told = render_prompt(step["system"], f"{self.path}: system", values)
            messages = [{"role": "system", "content": told}, *(one for one in messages if one["role"] != "system")]
        asked = render_prompt(step["prompt"], f"{self.path}: {step['name']}", values)
        return [*messages, {"role": "user", "content": asked}]

    def build_row(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row that the values make.

        Raises:
            ConfigError: As ``render_prompt``.
        """
        row: dict[str, Any] = self._fill(self.fields["row"], values)
        return row

    def _fill(self, value: Any, values: Mapping[str, Any]) -> Any:
        if isinstance(value, str):
            return render_prompt(value, f"{self.path}: row", values)
        if isinstance(value, dict):
            return {name: self._fill(one, values) for name, one in value.items()}
        filled: list[Any] = []
        for one in value:
            # One system message: that of the method replaces the one of the row.
            has_system = any(isinstance(before, dict) and before.get("role") == "system" for before in filled)
            if one == _CONTEXT:
                context = values.get(_CONTEXT, ())
                filled += [message for message in context if not has_system or message["role"] != "system"]
            else:
                filled.append(self._fill(one, values))
        return filled

    def build_question(self, row: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[Question, str]:
        """Return the question of a row that was built, for a judge, and its answer; of a text its last prompt."""
        number = str(values.get("number", ""))
        if isinstance(row.get("messages"), list):
            *context, last, answer = row["messages"]
            references = values.get("references", ())
            return Question(number, None, context, [str(last["content"])], references), str(answer["content"])
        texts = [str(text) for text in row.values()]
        asked = str(row["prompt"]) if "prompt" in row else str(self.build_chat(self.steps[-1], values)[-1]["content"])
        return Question(number, None, [], [asked]), texts[-1]

    def read_compared(self, values: Mapping[str, Any]) -> str:
        """Return the text by which near duplicates are found."""
        return render_prompt(self.fields["compare"], f"{self.path}: compare", values)


def take_reply(step: Mapping[str, Any], text: str) -> str | None:
    """Return what a step takes of a reply; ``None`` where its pattern does not match or matches nothing.

    Reasoning in ``<think>`` is left out.
    """
    _, said = split_reasoning(text)
    if not step.get("pattern"):
        return said.strip() or None
    found = re.search(step["pattern"], said)
    return (found[1].strip() or None) if found else None


def load_method(config: SynthesisConfig) -> Method:
    """Load the shipped method of the configured name, or the file.

    Raises:
        ConfigError: There is none, or it is not a method; every problem at once.
    """
    name = config.method
    path = METHODS / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
        if not name.endswith((".yaml", ".yml")):
            shipped = ", ".join(sorted(file.stem for file in METHODS.glob("*.yaml")))
            raise ConfigError(
                Problem("method", f"there is no method {name[:120]!r}", f"name {shipped}, or a YAML file")
            )
    fields = load_prompt_file(path, _FIELDS)
    if problems := _find_faults(fields, str(path)):
        raise ConfigError(*problems)
    return Method(path, fields, config)


def _find_faults(fields: Mapping[str, Any], where: str) -> list[Problem]:
    problems = [
        Problem(where, f"`{name}` is missing", "see the shipped methods")
        for name in ("reads", "steps", "compare", "row")
        if not fields[name]
    ]
    if fields["reads"] and fields["reads"] not in READS:
        problems.append(Problem(where, f"`reads: {fields['reads']}`", f"write one of {', '.join(READS)}"))
    for name, given in (fields["choices"] or {}).items():
        if not isinstance(given, list) or not given:
            problems.append(Problem(where, f"choice `{name}` has no values", "write a list"))
    for step in fields["steps"] or ():
        if not isinstance(step, dict) or not step.get("name") or not step.get("prompt"):
            problems.append(Problem(where, f"a step is {step!r:.60}", "write its `name` and `prompt`"))
            continue
        problems += [
            Problem(where, f"unknown field `{name}` of a step, or of a wrong type", f"write {', '.join(_STEP_FIELDS)}")
            for name, value in step.items()
            if name not in _STEP_FIELDS or not isinstance(value, _STEP_FIELDS[name])
        ]
        problems += _find_pattern_faults(step, where)
    return problems


def _find_pattern_faults(step: Mapping[str, Any], where: str) -> list[Problem]:
    try:
        if isinstance(step.get("pattern"), str) and re.compile(step["pattern"]).groups != 1:
            return [Problem(where, f"the pattern of `{step['name']}` has not one group", "mark what is taken by ( )")]
    except re.error as error:
        return [Problem(where, f"the pattern of `{step['name']}`: {error}", "correct the regular expression")]
    return []


def read_source(method: Method) -> tuple[list[SourceRow], str]:
    """Return the rows that a method reads, as many as are used, and the fingerprint of the source.

    Raises:
        ConfigError: Columns are wrong.
        DataError: It cannot be read, is empty, or rows lack a prompt or a text; all of them.
    """
    from recipes_lib.data.sources.canonical import load_source

    config, reads = method.config, method.fields["reads"]
    source = load_source(
        config.dataset_name,
        config=config.dataset_config,
        revision=config.dataset_revision,
        split=config.dataset_train_split,
        columns=config.dataset_columns,
    )
    rows, problems = list[SourceRow](), list[Problem]()
    # All seeds may be drawn; of prompts and documents only those that are written.
    limit = None if reads == "seeds" else config.num_candidates
    for number, entry in enumerate(islice(source.rows(), limit)):
        if isinstance(entry, Problem):
            problems.append(entry)
            continue
        with collecting(problems):
            rows.append(_read_row(entry.columns, number, entry.where, reads))
    raise_problems(problems, config.dataset_name)
    if not rows:
        raise DataError(Problem(config.dataset_name, "is empty", "check how it was written"))
    return rows, source.fingerprint()


def _read_row(columns: Mapping[str, Any], number: int, where: str, reads: str) -> SourceRow:
    if reads != "documents":
        question = read_question(columns, number, where)
        if len(question.turns) > 1:
            raise DataError(Problem(where, "has several turns", "give one prompt a row"))
        return SourceRow(where, question.turns[0], question)
    text = columns.get("text")
    if not isinstance(text, str) or not text.strip():
        raise DataError(Problem(where, "has no `text`", "map it by dataset_columns: {text: COLUMN}"))
    return SourceRow(where, text)
