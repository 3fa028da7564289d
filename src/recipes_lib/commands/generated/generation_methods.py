"""Methods of ``recipes synthesize``: the source rows, the prompts sent to the model, and the rows that are written.

A method is a YAML file, shipped in ``methods/`` or written by the user:

- ``reads``: ``seeds`` (a prompt contains several source rows), ``prompts`` or ``documents`` (one source row each);
- ``choices``: name -> list of values, one of which is drawn for each row;
- ``steps``: requests in order, each with ``name`` and ``prompt``; optional: ``system``; ``context: true``, which also
  sends the messages before the prompt; ``pattern``, a regular expression whose group is the result of the reply;
- ``compare``: text that near duplicates are found by; ``compare_with_source: true`` also compares with source rows;
- ``row``: the row that is written; ``context`` in place of a message stands for the messages before the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from recipes_lib.config.synthesis_keys import SynthesisConfig
from recipes_lib.data.sources.messages import RowError, check_text
from recipes_lib.errors import ConfigError, DataError, Problem, collect_problems, raise_problems
from recipes_lib.evaluation.endpoint import Chat, Message, split_reasoning
from recipes_lib.evaluation.judge_questions import Question, read_question
from recipes_lib.evaluation.judges import load_prompt_file, render_prompt

METHODS: Final = Path(__file__).with_name("methods")
READS: Final = ("seeds", "prompts", "documents")
_REQUIRED: Final = {"reads": str, "steps": list, "compare": str, "row": dict}
_FIELDS: Final = {**_REQUIRED, "choices": dict, "compare_with_source": bool}
_STEP_FIELDS: Final = {"name": str, "prompt": str, "system": str, "context": bool, "pattern": str}
_CONTEXT: Final = "context"


class SourceRow(NamedTuple):
    """A row of the source.

    Attributes:
        where: Location, ``file row N``.
        text: Prompt or document.
        question: The parsed prompt of seeds and prompts; ``None`` for documents.
    """

    where: str
    text: str
    question: Question | None = None


class Method(NamedTuple):
    """A method of generation with the configuration of a run.

    Attributes:
        path: File of the method.
        fields: Fields of the file.
        config: Configuration of the run: source, seed, numbers of rows and answers.
    """

    path: Path
    fields: Mapping[str, Any]
    config: SynthesisConfig

    @property
    def steps(self) -> Sequence[Mapping[str, Any]]:
        """Steps in order; replies of the last one are the answers."""
        steps: Sequence[Mapping[str, Any]] = self.fields["steps"]
        return steps

    def draw(self, rows: Sequence[SourceRow], number: int) -> dict[str, Any]:
        """Return the template values of a row: its source rows, and a value of each choice.

        Args:
            rows: Source rows.
            number: Number of the generated row; it determines the values, together with the seed.
        """
        # One generator per row: draws do not depend on other rows, so that a resumed run equals an uninterrupted one.
        generator = np.random.default_rng([self.config.seed, number])
        values: dict[str, Any] = {
            name: given[int(generator.integers(len(given)))] for name, given in (self.fields["choices"] or {}).items()
        }
        if self.fields["reads"] == "seeds":
            chosen = generator.choice(len(rows), min(self.config.num_seeds, len(rows)), replace=False)
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
        """Return the chat that a step sends.

        Raises:
            ConfigError: As ``render_prompt``.
        """
        messages: list[Message] = list(values.get(_CONTEXT, ())) if step.get("context") else []
        if step.get("system"):
            # Replaces a system message of the source row: a chat has at most one.
            system = render_prompt(step["system"], f"{self.path}: system", values)
            messages = [{"role": "system", "content": system}, *(one for one in messages if one["role"] != "system")]
        prompt = render_prompt(step["prompt"], f"{self.path}: {step['name']}", values)
        return [*messages, {"role": "user", "content": prompt}]

    def build_row(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row to write, rendered from the template ``row``.

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
        if not isinstance(value, list):
            return value
        filled: list[Any] = []
        for one in value:
            # A system message of the method replaces that of the source row.
            has_system = any(isinstance(before, dict) and before.get("role") == "system" for before in filled)
            if one == _CONTEXT:
                context = values.get(_CONTEXT, ())
                filled += [message for message in context if not has_system or message["role"] != "system"]
            else:
                filled.append(self._fill(one, values))
        return filled

    def build_question(self, row: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[Question, str]:
        """Return question and answer of a built row, for a judge; for plain text, the last prompt is the question."""
        number = str(values.get("number", ""))
        if isinstance(row.get("messages"), list):
            *context, last, answer = row["messages"]
            references = values.get("references", ())
            return Question(number, None, context, [str(last["content"])], references), str(answer["content"])
        texts = [str(text) for text in row.values()]
        asked = str(row["prompt"]) if "prompt" in row else str(self.build_chat(self.steps[-1], values)[-1]["content"])
        return Question(number, None, [], [asked]), texts[-1]

    def read_compared(self, values: Mapping[str, Any]) -> str:
        """Return the text that near duplicates are found by."""
        return render_prompt(self.fields["compare"], f"{self.path}: compare", values)


def take_reply(step: Mapping[str, Any], text: str) -> str | None:
    """Return the result of a reply: the group of the pattern, else the whole text; ``None`` if it is empty.

    Reasoning in ``<think>`` is removed first.
    """
    _, said = split_reasoning(text)
    if not step.get("pattern"):
        return said.strip() or None
    found = re.search(step["pattern"], said)
    # A group in an alternative that did not match is `None`.
    return ((found[1] or "").strip() or None) if found else None


def load_method(config: SynthesisConfig) -> Method:
    """Load the shipped method with the configured name, or a file.

    Raises:
        ConfigError: There is no such method, or its file is invalid; all problems at once.
    """
    name = config.method
    path = METHODS / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
        if not name.endswith((".yaml", ".yml")):
            shipped = ", ".join(sorted(file.stem for file in METHODS.glob("*.yaml")))
            remedy = f"name {shipped}, or a YAML file"
            raise ConfigError(Problem("method", f"there is no method {name[:120]!r}", remedy))
    fields = load_prompt_file(path, _FIELDS)
    raise_problems(_find_faults(fields, str(path)), str(path), ConfigError)
    return Method(path, fields, config)


def _find_faults(fields: Mapping[str, Any], where: str) -> Iterator[Problem]:
    for name in _REQUIRED:
        if not fields[name]:
            yield Problem(where, f"`{name}` is missing", "see the shipped methods")
    if fields["reads"] and fields["reads"] not in READS:
        yield Problem(where, f"`reads: {fields['reads']}`", f"write one of {', '.join(READS)}")
    for name, given in (fields["choices"] or {}).items():
        if not isinstance(given, list) or not given:
            yield Problem(where, f"choice `{name}` has no values", "write a list")
    messages = (fields["row"] or {}).get("messages")
    if isinstance(messages, list) and len(messages) < 2:
        yield Problem(where, "`row: messages` lacks a question or an answer", "write both; `context` may precede them")
    for step in fields["steps"] or ():
        if isinstance(step, dict) and step.get("name") and step.get("prompt"):
            yield from _find_step_faults(step, where)
        else:
            yield Problem(where, f"a step is {step!r:.60}", "write its `name` and `prompt`")


def _find_step_faults(step: Mapping[str, Any], where: str) -> Iterator[Problem]:
    for name, value in step.items():
        if name not in _STEP_FIELDS or not isinstance(value, _STEP_FIELDS[name]):
            found = f"unknown field `{name}` of a step, or of a wrong type"
            yield Problem(where, found, f"write {', '.join(_STEP_FIELDS)}")
    try:
        if isinstance(step.get("pattern"), str) and re.compile(step["pattern"]).groups != 1:
            found = f"the pattern of `{step['name']}` does not have exactly one group"
            yield Problem(where, found, "enclose the part to extract in ( )")
    except re.error as error:
        yield Problem(where, f"the pattern of `{step['name']}`: {error}", "correct the regular expression")


def read_source(method: Method) -> tuple[list[SourceRow], str]:
    """Return the source rows that a method uses, and the fingerprint of the source.

    Raises:
        ConfigError: ``dataset_columns`` is wrong, or all repeated rows would be removed as near duplicates.
        DataError: The source cannot be read or is empty, or rows have no prompt or text; all problems at once.
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
    # Any seed may be drawn; prompts and documents are used in order.
    limit = None if reads == "seeds" else config.num_candidates
    for number, entry in enumerate(islice(source.rows(), limit)):
        with collect_problems(problems):
            if isinstance(entry, Problem):
                raise DataError(entry)
            rows.append(_read_row(entry.columns, number, entry.where, reads))
    raise_problems(problems, config.dataset_name)
    if not rows:
        raise DataError(Problem(config.dataset_name, "is empty", "check how it was written"))
    is_generated = any(step["name"] in method.fields["compare"] for step in method.steps)
    is_repeated = reads != "seeds" and (config.num_candidates or 0) > len(rows)
    if is_repeated and not is_generated and config.near_duplicates_threshold is not None:
        found = f"repeats the {reads} of the source, {len(rows):,}; repeated ones are removed as near duplicates"
        remedy = "write `num_answers` for several answers to a prompt, or `near_duplicates_threshold: null`"
        raise ConfigError(Problem("num_candidates", found, remedy))
    return rows, source.fingerprint()


def _read_row(columns: Mapping[str, Any], number: int, where: str, reads: str) -> SourceRow:
    question, text, context = None, columns.get("text"), list[Message]()
    if reads != "documents":
        question = read_question(columns, number, where)
        if len(question.turns) > 1:
            raise DataError(Problem(where, "has several turns", "give one prompt a row"))
        if columns.get("tools"):
            remedy = "remove such rows, or write `dataset_columns: {tools: null}` for answers without them"
            raise DataError(Problem(where, "has `tools`, which the writer is not shown", remedy))
        text, context = question.turns[0], list(question.context)
    elif not isinstance(text, str) or not text.strip():
        raise DataError(Problem(where, "has no `text`", "map it by dataset_columns: {text: COLUMN}"))
    try:
        # Not when it is sent: with a corrected source, the replies to the rows before it would be lost.
        check_text("".join([str(text), *(str(message["content"]) for message in context)]), "the text")
    except RowError as error:
        raise DataError(Problem(where, error.found, error.remedy)) from None
    return SourceRow(where, str(text), question)
