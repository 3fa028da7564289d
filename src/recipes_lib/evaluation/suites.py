"""Benchmark suites with the few-shot settings of their publications, and loading of lm-eval's and the user's tasks."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants
from jinja2 import TemplateError
from lm_eval.api.samplers import ContextSampler
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from recipes_lib.config.evaluation import EvalConfig
from recipes_lib.config.paths import expand_home
from recipes_lib.environment import go_offline_unless_reachable
from recipes_lib.errors import ConfigError, Problem, explain_refusal, list_first, suggest

OWN_TASKS: Final = Path(__file__).with_name("tasks")
SUITES: Final[Mapping[str, Mapping[str, int | None]]] = {
    "core": {
        **{"arc_easy": 0, "arc_challenge": 25, "hellaswag": 10, "piqa": 0, "winogrande": 5},
        **{"boolq": 0, "openbookqa": 0, "lambada_openai": 0},
    },
    "knowledge": {"mmlu": 5, "mmlu_pro": None},
    "math": {"gsm8k": 5, "minerva_math": None},
    "code": {"humaneval_sandboxed": None, "mbpp_sandboxed": None},
    "chat": {"ifeval": None},
    "safety": {"truthfulqa_mc1": None, "truthfulqa_mc2": None, "toxigen": None},
}
"""Suite -> its tasks with the number of few-shot examples; ``None``: that of the task file.

Source: the Open LLM Leaderboard of 2023 for ARC, HellaSwag, WinoGrande, MMLU and GSM8K; the tasks' own papers.
"""
_FORMATS: Final = ("arrow", "csv", "json", "parquet", "text")
"""Values of ``dataset_path`` that name a format of files, which `datasets` searches for in the working directory."""
_NETWORK: Final = "make its data available: run once with a network, or name your own task file that reads local data"
_PACKAGES: Final = "pip install 'recipes-lib[eval]' or that package; a module of the task itself must be in its folder"
_METRICS: Final = "correct its `metric_list`"
_COLUMNS: Final = "compare the names in the task file with the columns of the data"


def load_tasks(config: EvalConfig) -> dict[str, Any]:
    """Load tasks and their data, in lm-eval's form (``tasks``, ``groups``, ``group_map``), and try a question of each.

    Raises:
        ConfigError: There is no home folder for the cache. Or a task does not exist, its data cannot be loaded or do
            not match its templates, or it runs code without ``confirm_run_unsafe_code``. All problems of all tasks are
            reported together.
    """
    expand_home(constants.HF_HOME)  # Without a home folder, `datasets` would create one named `~` here.
    # lm-eval logs every default of a task file and every truncated prompt; `num_cut` of the record counts the latter.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    wanted = _expand(config)
    manager = _index(config, wanted)
    problems, found, away = list[Problem](), dict[str, Any](), list[str]()
    for name, num_fewshot in wanted.items():
        # One task at a time, so that a failure does not hide the problems of the others.
        try:
            _verify_places(manager, name)
            loaded = manager.load([name])
        except ConnectionError:  # From `datasets`; its message is about offline mode, which the user need not have set.
            away.append(name)
            continue
        except Exception as error:  # Any exception of a task file, of `datasets` or of the Hub.
            problems.append(_describe_failure(name, error))
            continue
        for kind, entries in loaded.items():
            found.setdefault(kind, {}).update(entries)
        for part, task in loaded["tasks"].items():
            problems += _set_up(part, task, config, num_fewshot)
    if away:
        reason = "their data are not in the cache, and the Hub is out of reach"
        problems.append(Problem(f"tasks: {list_first(away)}", reason, _NETWORK))
    if problems:
        raise ConfigError(*problems)
    return found


def _verify_places(manager: TaskManager, name: str) -> None:
    """Go offline unless the datasets of a task are reachable.

    Raises:
        ValueError: The task names a format instead of files.
    """
    listed = [settings for _, settings in _enumerate_settings(manager, name)]
    for place, names_files in {(str(one.get("dataset_path")), bool(one.get("dataset_kwargs"))) for one in listed}:
        if "/" in place:
            go_offline_unless_reachable(place)
        elif place in _FORMATS and not names_files:
            raise ValueError(f"without `data_files`, {place} would be any such files of the working directory")


def list_datasets(config: EvalConfig) -> list[dict[str, Any]]:
    """Return the datasets of the tasks, without loading them, as entries of ``benchmarks`` of a corpus.

    Raises:
        ConfigError: A task does not exist, or its file does not name a dataset.
    """
    wanted = list(_expand(config))
    manager = _index(config, wanted)
    found: dict[str, dict[str, Any]] = {}
    for name in wanted:
        for task, settings in _enumerate_settings(manager, name):
            for place in _list_places(task, settings):
                found.setdefault(repr(place), {**place, "label": task})
    return list(found.values())


def _enumerate_settings(manager: TaskManager, member: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the names and settings of a task, or of all tasks of a group or tag.

    Args:
        manager: Index of tasks.
        member: A name, or settings in the file of a group: of a task, which may only override some, or of a group.
    """
    own = {"task": member} if isinstance(member, str) else member
    name = members = own.get("task", own.get("group"))
    if isinstance(name, str):
        entry = manager.task_index.get(name)
        found: Mapping[str, Any] = {}
        if entry is not None and entry.kind.name == "TAG":
            found = {"task": sorted(entry.tags)}
        elif entry is not None:
            found = load_yaml(entry.yaml_path, resolve_func=False)
        members = found.get("task")
        if not isinstance(members, list):
            yield name, {**found, **own}
            return
    for inner in members or ():
        yield from _enumerate_settings(manager, inner)


def _list_places(task: str, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the files or the Hub dataset of a task's questions, as entries of ``benchmarks``."""
    options = settings.get("dataset_kwargs") or {}
    splits = (settings.get(f"{name}_split") for name in ("test", "validation", "training"))
    split = next(filter(None, splits), "test")
    if (files := options.get("data_files")) is not None:
        files = files.get(split, ()) if isinstance(files, Mapping) else files
        yield from ({"name": file} for file in ([files] if isinstance(files, str) else files))
    elif settings.get("dataset_path"):
        place = {"name": settings["dataset_path"], "config": settings.get("dataset_name"), "split": split}
        yield {name: value for name, value in {**place, "revision": options.get("revision")}.items() if value}
    else:
        remedy = "name its data in `benchmarks` of the corpus, and the other tasks in `benchmarks_of`"
        raise ConfigError(Problem(f"tasks: {task}", "its file does not say where its questions are", remedy))


def _describe_failure(name: str, error: BaseException) -> Problem:
    """Return the problem of a task whose loading raised ``error``, with a remedy for the cause."""
    # The first cause of a chain is the most specific one.
    cause = error
    while cause.__cause__ is not None and not isinstance(cause, ModuleNotFoundError):
        cause = cause.__cause__
    # `str` of a KeyError is the `repr` of its key.
    message = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    reason = " ".join(message.split())[:300] or type(error).__name__
    found, remedy = f"cannot be loaded: {reason}", "correct its task file"
    if isinstance(cause, ModuleNotFoundError):
        found, remedy = f"needs a package that is not installed: {cause}", _PACKAGES
    elif isinstance(error, TemplateError):
        found, remedy = f"its templates do not fit its first row: {reason}", _COLUMNS
    elif isinstance(error, StopIteration) or reason.endswith("out of bounds for size 0"):
        # Its split is empty, or `process_docs` has removed every row.
        found, remedy = "has no question", "name a split with rows in its task file"
    elif isinstance(error, IndexError):
        remedy = "compare `doc_to_choice` and `doc_to_target` with the data"
        found = f"the answer of its first row is not among its choices, or a choice is empty: {reason}"
    elif isinstance(error, KeyError) and error.args == (None,):  # From lm-eval 0.4.13 for an unknown metric.
        found, remedy = "names a metric that lm-eval does not have", _METRICS
    elif isinstance(error, KeyError) and " " not in reason:
        found = f"names {reason!r}, and its data or lm-eval have no such thing"
    elif type(error).__name__ == "DatasetGenerationError":  # By name: only the package `data` imports `datasets`.
        found, remedy = f"its data cannot be read: {type(cause).__name__}: {cause}", "correct the file of its data"
    elif isinstance(error, OSError) and type(error) is not FileNotFoundError:
        refusal = explain_refusal(error)  # Of this machine, such as a full disk of the cache.
        # Not for a missing local file, but for a dataset of the Hub that cannot be reached.
        remedy = refusal.remedy if refusal else _NETWORK
    return Problem(f"tasks: {name}", found.splitlines()[0][:320], remedy)


def _index(config: EvalConfig, wanted: Collection[str]) -> TaskManager:
    """Index the user's and our tasks; lm-eval's 14,000 files, which take seconds, only if other tasks are wanted.

    Raises:
        ConfigError: A task does not exist.
    """
    folders = [OWN_TASKS, *map(Path, config.include_path or ())]
    own = TaskManager(include_path=folders, include_defaults=False)
    if not _list_unknown(own, wanted):
        return own
    manager = TaskManager(include_path=folders)
    if unknown := _list_unknown(manager, wanted):
        missing = (_describe_unknown(name, manager.all_tasks) for name in unknown)
        raise ConfigError(*missing, *_list_broken(folders[1:]))
    return manager


def _list_unknown(manager: TaskManager, wanted: Collection[str]) -> list[str]:
    """Return the tasks, and the members of groups among them, that are not in the index."""
    unknown: dict[str, None] = {}
    for name in wanted:
        if (entry := manager.task_index.get(name)) is None:
            unknown[name] = None
            continue
        members = (entry.cfg or {}).get("task")
        if isinstance(members, list):
            inner = [member for member in members if isinstance(member, str) and member != name]
            unknown |= dict.fromkeys(_list_unknown(manager, inner))
    return list(unknown)


def _list_broken(folders: Collection[Path]) -> Iterator[Problem]:
    """Yield a problem for each of the user's task files that cannot be read, which lm-eval skips silently."""
    for path in sorted(path for folder in folders for path in folder.rglob("*.yaml")):
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:  # Invalid YAML, another encoding, a missing included file.
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            yield Problem(str(path), f"is not a task file: {reason}", "correct it, or move it out of the folder")


def _expand(config: EvalConfig) -> dict[str, int | None]:
    """Return the configured tasks, suites expanded, with their number of few-shot examples."""
    shots = {task: count for name in config.tasks for task, count in SUITES.get(name, {name: None}).items()}
    return shots if config.num_fewshot is None else dict.fromkeys(shots, config.num_fewshot)


def _describe_unknown(name: str, known: Collection[str]) -> Problem:
    remedy = suggest(name, [*SUITES, *sorted(known)], f"the suites are {', '.join(SUITES)}")
    return Problem("tasks", f"there is no task {name!r}", remedy)


def _set_up(name: str, task: Any, config: EvalConfig, num_fewshot: int | None) -> list[Problem]:
    """Configure a task as ``lm_eval run`` does, which has tried its first question; return the problems."""
    where = f"tasks: {name}"
    own = task.get_config("num_fewshot")
    # As `lm_eval run`: an unset number of examples is 0, and the 0 of a task file is kept, as of IFEval.
    task.set_config(key="num_fewshot", value=(own if own == 0 or num_fewshot is None else num_fewshot) or 0)
    if (missing := _find_missing(task, config) or _find_missing_shots(task)) is not None:
        return [Problem(where, *missing)]
    if config.gen_kwargs and task.get_config("output_type") == "generate_until":
        task.set_config(key="generation_kwargs", value=dict(config.gen_kwargs), update=True)
    if "stop" in (task.get_config("generation_kwargs") or ()):
        return [Problem(where, "its generation settings have `stop`", "write `until`, as lm-eval names it")]
    if task.get_config("output_type") != "multiple_choice":
        return []
    docs = list(itertools.islice(task.eval_docs, config.limit))
    for number, doc in enumerate(docs, 1):
        choices = None
        with suppress(Exception):  # Of a template; lm-eval raises TypeError for a task without `doc_to_choice`.
            choices = task.doc_to_choice(doc)
        # lm-eval would iterate over the characters of a string, and without choices fail after the last answer.
        if not (isinstance(choices, list) and choices):
            found = f"the choices of its row {number} are {choices!r:.80}"
            return [Problem(where, found, "write `doc_to_choice` as a list, and leave out rows without choices")]
    if task.multiple_input or task.config.process_results or any(_has_answer(task, doc) for doc in docs):
        return []
    first = task.doc_to_target(task.eval_docs[0])
    found = f"no question has its answer among its choices; that of the first is {first!r:.80}"
    return [Problem(where, found, "name a split with answers, which test splits may hide, or correct `doc_to_target`")]


def _find_missing_shots(task: Any) -> tuple[str, str] | None:
    """Return too large a number of few-shot examples and its remedy; ``None`` if there are enough rows."""
    number, sampler = task.get_config("num_fewshot"), getattr(task, "sampler", None)
    if not number or sampler is None:
        return None
    # At random from the split of the questions, lm-eval draws one more, to leave out the question.
    draws_more = type(sampler) is ContextSampler and task.fewshot_cfg.split == task.config.test_split
    pool = len(sampler.df) - draws_more
    found = f"{number} few-shot examples cannot be drawn from {pool:,}"
    return None if number <= pool else (found, "lower num_fewshot, or name a `fewshot_split` with more rows")


def _has_answer(task: Any, doc: Any) -> bool:
    """Return whether the answer of a row is one of its choices; for others, as the label -1, every answer is wrong."""
    choices, target = task.doc_to_choice(doc), task.doc_to_target(doc)
    targets = target if isinstance(target, list) else [target]
    return any(one in (range(len(choices)) if isinstance(one, int) else choices) for one in targets)


def _find_missing(task: Any, config: EvalConfig) -> tuple[str, str] | None:
    """Return an unmet requirement of a task and its remedy, which lm-eval would report only after the last answer."""
    if getattr(task, "UNSAFE_CODE", False) and not config.confirm_run_unsafe_code:
        remedy = "read docs/evaluation.md on code, then run `recipes eval` with confirm_run_unsafe_code: true"
        return "runs the code that the model writes", remedy
    if unknown := [metric for metric, function in task.aggregation().items() if not callable(function)]:
        return f"the aggregation of {list_first(unknown)} is unknown to lm-eval", _METRICS
    if _lacks_punkt(task):
        remedy = "python -m nltk.downloader punkt_tab, where there is a network"
        return "counts sentences by NLTK's punkt_tab, which is not installed", remedy
    return None


def _lacks_punkt(task: Any) -> bool:
    """Return whether IFEval's sentence tokenizer is missing, which it loads only after the last answer."""
    is_ifeval = ".ifeval." in str(getattr(task.config.process_results, "__module__", ""))
    with suppress(LookupError):
        return is_ifeval and not sys.modules["nltk"].data.find("tokenizers/punkt_tab")
    return True
