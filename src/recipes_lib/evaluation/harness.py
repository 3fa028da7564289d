"""Benchmark evaluation by lm-eval: scores, standard errors, and all answers of a model."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from lm_eval.evaluator import evaluate
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

from recipes_lib.config.evaluation import EvalConfig
from recipes_lib.config.schema import ModelConfig
from recipes_lib.environment import read_versions
from recipes_lib.errors import ConfigError, DataError, Problem, UserError, list_first
from recipes_lib.evaluation.endpoint import THINKS, split_reasoning
from recipes_lib.evaluation.engines import CachedModel, build_engine, find_tokenizer, is_cut
from recipes_lib.evaluation.suites import load_tasks
from recipes_lib.files import (
    explain_write_errors,
    find_record,
    hash_file,
    read_lines,
    replace_record,
    replace_text,
    try_lock,
    verify_fields,
)
from recipes_lib.models.adapters.saved import ADAPTER_WEIGHTS, find_base
from recipes_lib.models.loading import load_model_config, verify_folder

RECORD: Final = "eval.json"
SAMPLES: Final = "samples.jsonl"
_FIELDS: Final = {**dict.fromkeys(("task", "filter", "doc_hash", "prompt_hash"), str), "scores": dict}
_CACHE: Final = ".requests"
_AUTO: Final = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
"""Architectures that lm-eval loads."""
_DECISIVE: Final = (
    *("*.safetensors", "*.bin", "*config.json", "tokenizer.json", "*.model", "vocab*", "merges.txt", "*.jinja"),
)
"""Patterns of the files of a model that determine its answers."""
_BOOTSTRAP_ITERATIONS: Final = 100_000
"""Resamples for standard errors, the default of ``lm_eval run``."""
_SETTINGS: Final = (
    *("limit", "apply_chat_template", "fewshot_as_multiturn", "system_instruction", "gen_kwargs", "seed"),
    *("engine", "dtype", "attn_implementation", "tokenizer_name_or_path"),
)
"""Configuration keys that affect answers, in addition to the model and the tasks."""


def evaluate_model(config: EvalConfig) -> dict[str, Any] | None:
    """Evaluate a model on the configured tasks, and write ``eval.json`` and ``samples.jsonl``.

    Answers are stored as they arrive: the same command resumes an evaluation that was killed.

    Returns:
        The content of ``eval.json``; ``None`` on all ranks but the first.

    Raises:
        ConfigError: As ``load_tasks``; or the model cannot be loaded, is not a language model, has no chat template
            although one is required, or has too few positions for a task.
        DataError: The model's logits are not finite.

    Source: every score and answer equals that of ``lm_eval run``, in ``tests/evaluation/test_harness.py``.
    """
    tasks, settings = load_tasks(config), describe_model(config)
    versions = read_versions() | {"lm-eval": importlib.metadata.version("lm-eval")}
    began = time.monotonic()
    _verify_choices(config, tasks["tasks"])
    # After all checks that need no model: loading one can take minutes.
    model = build_engine(config, settings)
    _verify_world_size(config, tasks["tasks"], model.world_size)
    with _lock_cache(config.folder / _CACHE, is_main=model.rank == 0) as cache:
        return _run_cached(model, tasks, config, {"model": settings, "versions": versions}, cache, began)


@contextmanager
def _lock_cache(folder: Path, *, is_main: bool) -> Iterator[Path]:
    """Create the folder of stored answers, and lock it on the first rank until the evaluation ends.

    Raises:
        ConfigError: Another process, which would delete the same files, evaluates into this folder, or the folder
            cannot be written.
    """
    with explain_write_errors(folder.parent, "name another output_dir"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w") if is_main else None
    if lock is None:
        yield folder
        return
    with lock:
        if try_lock(lock) is False:
            found = "another process is evaluating into this folder"
            raise ConfigError(Problem(str(folder.parent), found, "wait for it, or name another output_dir"))
        try:
            yield folder
        finally:
            (folder / "lock").unlink(missing_ok=True)
            with suppress(OSError):  # The folder contains answers of an unfinished evaluation.
                folder.rmdir()


def _run_cached(
    model: Any, tasks: dict[str, Any], config: EvalConfig, origin: dict[str, Any], cache: Path, began: float
) -> dict[str, Any] | None:
    """Run the tasks with the answers stored in ``cache``, and write the results; return the record of the first rank.

    Args:
        model: lm-eval's model.
        tasks: Tasks as returned by ``load_tasks``.
        config: The evaluation's configuration.
        origin: ``model``, as returned by ``describe_model``, and ``versions`` of packages.
        cache: Folder of stored answers.
        began: Value of ``time.monotonic`` at which the evaluation began.
    """
    chosen = {key: getattr(config, key) for key in _SETTINGS}
    # Answers do not depend on the number of questions: an evaluation with a higher limit reuses those of a lower one.
    key = _hash([origin["model"], {**chosen, "limit": None}, origin["versions"]])
    cached = CachedModel(model, cache / f"{key}-{model.rank}.jsonl", sorted(cache.glob(f"{key}-*")), config.base_url)
    results = run_tasks(cached, tasks, config)
    cached.close()
    if results is None:
        return None
    rows = [_describe_sample(task, sample, model) for task, group in results["samples"].items() for sample in group]
    record = {
        "model": origin["model"],
        "tasks": {task: _summarise(task, results, rows) for task in results["configs"]},
        "groups": {
            name: _summarise_group(name, results, tasks["groups"], rows) for name in results.get("groups") or ()
        },
        "settings": chosen,
        "versions": origin["versions"],
        "seconds": round(time.monotonic() - began, 1),
    }
    with explain_write_errors(config.folder, "free some space; the same command resumes"):
        _keep_earlier(config.folder, record)
        replace_text(config.folder / SAMPLES, "".join(f"{json.dumps(row, default=_simplify)}\n" for row in rows))
        replace_record(config.folder / RECORD, record)
    # After the record is written, so that an evaluation killed before that repeats no request.
    for file in cache.glob(f"{key}-*"):
        file.unlink(missing_ok=True)
    return record


def _keep_earlier(folder: Path, record: Mapping[str, Any]) -> None:
    """Move the results of another model, other questions or settings to ``earlier-N``; equal ones are replaced."""

    def identify(results: Mapping[str, Any]) -> str:
        # Of an earlier version, or edited by hand, tasks may be anything: a crash now would lose the new results.
        tasks = results["tasks"].items() if isinstance(results.get("tasks"), dict) else ()
        prompts = {name: task.get("prompts_hash") for name, task in tasks if isinstance(task, dict)}
        return _hash([results.get("model"), results.get("settings"), prompts])

    before = find_record(folder / RECORD)
    if not before or identify(before) == identify(record):
        return
    aside = next(path for number in itertools.count(1) if not (path := folder / f"earlier-{number}").exists())
    aside.mkdir()
    # With the page, and the file by which `eval watch` takes results for its own. The record last: after a kill in
    # between, what is left is moved again.
    for name in (SAMPLES, "report.html", "watch.json", RECORD):
        with suppress(FileNotFoundError):
            (folder / name).rename(aside / name)
    sys.stderr.write(f"earlier results of other questions, settings or weights are kept in {aside}\n")


def _simplify(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


def run_tasks(model: CachedModel, tasks: dict[str, Any], config: EvalConfig, *, with_errors: bool = True) -> Any:
    """Run the tasks as ``lm_eval run`` does, and return lm-eval's results; ``None`` on all ranks but the first.

    Sets the global random states of Python, numpy and torch. All ranks must call it: lm-eval gathers their answers.

    Args:
        model: lm-eval's model, which stores its answers.
        tasks: Tasks as returned by ``load_tasks``; they can be used several times.
        config: Seed, number of questions and templates.
        with_errors: Compute standard errors; for some metrics by a bootstrap, which takes seconds.

    Raises:
        ConfigError: A metric, a filter or a function of a task fails.
        DataError: The model's logits are not finite.
    """
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=config.seed)
    # The default seeds of ``lm_eval run``.
    random.seed(0)
    np.random.seed(1234)  # noqa: NPY002 - the global state, from which lm-eval's tasks sample
    torch.manual_seed(config.seed)  # From which answers are sampled; 1234 by default, as there.
    try:
        return evaluate(
            model,
            tasks,
            limit=config.limit,
            bootstrap_iters=_BOOTSTRAP_ITERATIONS if with_errors else 0,
            apply_chat_template=config.apply_chat_template,
            fewshot_as_multiturn=config.fewshot_as_multiturn,
            system_instruction=config.system_instruction,
            confirm_run_unsafe_code=config.confirm_run_unsafe_code,
        )
    except Exception as error:
        if model.has_failed or isinstance(error, UserError):
            raise
        # All answers are there, so that it is a metric, a filter or a function of a task.
        found = f"their metrics cannot be computed: {type(error).__name__}: {error}"
        remedy = "correct the task's file; the same command resumes"
        raise ConfigError(Problem(f"tasks: {list_first(list(tasks['tasks']))}", found, remedy)) from error


def describe_model(config: EvalConfig) -> dict[str, Any]:
    """Return the identity of the model: its name, the base of an adapter, and a hash of its files or its commit.

    Raises:
        ConfigError: The model cannot be found, is not a language model, or is a sharded training checkpoint.
    """
    name, revision = config.model_name_or_path, config.model_revision
    if config.base_url is not None:
        return {"name": name, "endpoint": config.base_url, **_describe_tokenizer(config)}
    named = ModelConfig(model_name_or_path=name, model_revision=revision, trust_remote_code=config.trust_remote_code)
    base, adapter = find_base(named)
    if adapter is None:  # Beside an adapter, a `config.json` is that of its base, as axolotl writes it.
        verify_folder(name)
    # PEFT would search the Hub for missing weights.
    elif not (adapter / ADAPTER_WEIGHTS).is_file():
        remedy = "name a complete adapter; convert pickled weights, which can run code, only if you trust them"
        raise ConfigError(Problem("model_name_or_path", f"{name} has no {ADAPTER_WEIGHTS}", remedy))
    settings, _ = load_model_config(base)
    others = ("Classification", "RewardModel", "MaskedLM")
    wrong = [kind for kind in settings.architectures or [] if any(other in kind for other in others)]
    # vLLM and code from the Hub have classes of their own.
    has_own = config.engine == "vllm" or hasattr(settings, "auto_map")
    if wrong or not (has_own or any(type(settings) in mapping for mapping in _AUTO)):
        found = f"{name} is a {[*wrong, settings.model_type][0]}, which does not generate text"
        raise ConfigError(Problem("model_name_or_path", found, "name a language model"))
    described: dict[str, Any] = {"name": name, "fingerprint": _fingerprint(adapter or Path(name), settings)}
    if adapter is not None:
        described |= {"base": base.model_name_or_path, "base_revision": base.model_revision}
        described["base_fingerprint"] = _fingerprint(Path(str(base.model_name_or_path)), settings)
    return described | _describe_tokenizer(config)


def _describe_tokenizer(config: EvalConfig) -> dict[str, Any]:
    """Return the fingerprint of a separate tokenizer; the model's own is part of the model's fingerprint.

    Raises:
        ConfigError: The tokenizer cannot be found.
    """
    if (name := config.tokenizer_name_or_path) is None:
        return {}
    folder = find_tokenizer(name)
    # A snapshot of the Hub is named by its commit; it may also hold files of the model.
    return {"tokenizer_fingerprint": _fingerprint(folder, None) if Path(name).is_dir() else folder.name}


def _fingerprint(folder: Path, settings: Any) -> str:
    """Return a hash of the decisive files of a folder, or the commit of a model of the Hub, from ``settings``."""
    if not folder.is_dir():
        # A commit identifies every file, without hashing tens of gigabytes.
        return str(getattr(settings, "_commit_hash", None))
    files = sorted(file for pattern in _DECISIVE for file in folder.glob(pattern))
    return _hash([(file.name, hash_file(file)) for file in files])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _verify_choices(config: EvalConfig, tasks: Mapping[str, Any]) -> None:
    """Verify that no task needs log-probabilities if the endpoint is one of chats, which does not return them.

    Raises:
        ConfigError: A task needs log-probabilities.
    """
    scored = [name for name, task in tasks.items() if task.get_config("output_type") != "generate_until"]
    if scored and config.is_chat_endpoint:
        found = f"{list_first(scored)} need log-probabilities, which a chat endpoint does not return"
        raise ConfigError(Problem("tasks", found, "remove them, or name a completions endpoint"))


def _verify_world_size(config: EvalConfig, tasks: Mapping[str, Any], world_size: int) -> None:
    """Verify that every rank has a question of each task: lm-eval indexes the first one of each rank.

    Raises:
        ConfigError: A task has fewer questions than there are processes.
    """
    for name, task in tasks.items():
        if (number := min(len(task.eval_docs), config.limit or len(task.eval_docs))) < world_size:
            found = f"{number} questions are divided among {world_size} processes"
            raise ConfigError(Problem(f"tasks: {name}", found, "start fewer processes, or remove the task"))


def _describe_sample(task: str, sample: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return the row of ``samples.jsonl`` of a question and a filter."""
    requests = sample["arguments"]  # (prompt, choice) or (prompt, settings); one for each choice of a question.
    # Unfiltered: some filters return "[invalid]" if they find nothing.
    answers = [answer for answers in sample["resps"] for answer in answers]
    # Prompts for chat endpoints are objects of lm-eval, with the JSON of the messages.
    prompt = str(getattr(requests[0][0], "prompt", requests[0][0]))
    opened = THINKS if prompt.rstrip().endswith(THINKS) else ""
    return {
        "task": task,
        "doc_id": sample["doc_id"],
        "filter": sample["filter"],
        "prompt": prompt,
        "choices": [request[1] for request in requests if len(request) > 1 and isinstance(request[1], str)],
        "target": sample["target"],
        "answers": sample["filtered_resps"],
        "scores": {name: sample[name] for name in sample["metrics"]},
        "is_cut": any(is_cut(model, arguments) for arguments in requests),
        "is_empty": all(isinstance(answer, str) and not answer.strip() for answer in answers),
        "has_reasoning": any(
            isinstance(answer, str) and split_reasoning(opened + answer)[0] is not None for answer in answers
        ),
        "doc_hash": sample["doc_hash"],
        "prompt_hash": sample["prompt_hash"],
    }


def _summarise(task: str, results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entry of a task in ``eval.json``."""
    # A task with several filters has a row for each of them; questions are counted once.
    questions = {row["doc_id"]: row for row in rows if row["task"] == task}.values()
    return {
        "scores": read_scores(results["results"][task]),
        "num_questions": len(questions),
        "num_fewshot": results["n-shot"].get(task),
        "version": results["versions"].get(task),
        "num_cut": sum(row["is_cut"] for row in questions),
        "num_empty": sum(row["is_empty"] for row in questions),
        "num_reasoning": sum(row["has_reasoning"] for row in questions),
        # Sorted: with several processes, the order of the questions depends on the world size.
        "prompts_hash": _hash(sorted([row["doc_id"], row["prompt_hash"]] for row in questions)),
        "higher_is_better": results["higher_is_better"].get(task, {}),
        "dataset": results["configs"][task].get("dataset_path"),
    }


def _summarise_group(
    name: str, results: Mapping[str, Any], groups: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the entry of a group of tasks in ``eval.json``."""
    members = [task.task_name for task in groups[name].get_all_tasks()]
    aggregations = groups[name].aggregate_metric_list or ()
    return {
        "scores": read_scores(results["groups"][name]),
        "num_questions": len({(row["task"], row["doc_id"]) for row in rows if row["task"] in members}),
        "num_fewshot": results["n-shot"].get(members[0]),
        "version": results["versions"].get(name),
        "dataset": results["configs"][members[0]].get("dataset_path"),
        "tasks": members,
        "is_weighted_by_size": all(aggregation.weight_by_size for aggregation in aggregations),
    }


def read_scores(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the scores of a task with their standard errors: label -> ``{"value": ..., "stderr": ...}``.

    A label is ``metric``, or ``metric, filter`` if a filter selected the answer. A standard error is ``None`` if it is
    not defined, as for a single question, or 0, as for equal scores: three right answers of three would be 1 ± 0.

    Args:
        found: Results of a task in lm-eval's form, ``{"metric,filter": value, "metric_stderr,filter": value}``.
    """
    scores = {}
    for name, value in found.items():
        metric, comma, filter_name = name.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, Real):
            continue
        error = found.get(f"{metric}_stderr,{filter_name}")
        label = metric if filter_name == "none" else f"{metric}, {filter_name}"
        stderr = float(error) if isinstance(error, float) and 0 < error < math.inf else None
        scores[label] = {"value": float(value), "stderr": stderr}
    return scores


def read_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``samples.jsonl`` in a folder.

    Raises:
        DataError: The file is missing, or a line is invalid.
    """
    path = folder / SAMPLES
    if not path.is_file():
        raise DataError(Problem(str(folder), f"has no {SAMPLES}", "name a folder that `recipes eval` has written"))
    for number, row in enumerate(read_lines(path), 1):
        if row is None:
            raise DataError(Problem(f"{path}:{number}", "is not a JSON object", "evaluate again"))
        verify_fields(row, _FIELDS, f"{path}:{number}", remedy="evaluate again")
        yield row
