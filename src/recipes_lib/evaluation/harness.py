"""Evaluation by lm-eval: scores, standard errors and every answer of a model on tasks."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from lm_eval.evaluator import evaluate

from recipes_lib.config.evaluation import EvalConfig
from recipes_lib.config.schema import ModelConfig
from recipes_lib.environment import read_versions
from recipes_lib.errors import ConfigError, DataError, Problem, list_first
from recipes_lib.evaluation.engines import Remembering, build_engine, is_cut
from recipes_lib.evaluation.suites import load_tasks
from recipes_lib.files import hash_file, read_lines, replace_record, replacing, verify_fields
from recipes_lib.models.adapters.saved import ADAPTER_WEIGHTS, find_adapter, read_base
from recipes_lib.models.loading import load_model_config

RECORD: Final = "eval.json"
SAMPLES: Final = "samples.jsonl"
_FIELDS: Final = {**dict.fromkeys(("task", "filter", "doc_hash", "prompt_hash"), str), "scores": dict}
_CACHE: Final = ".requests"
_DECISIVE: Final = (
    *("*.safetensors", "*.bin", "*config.json", "tokenizer.json", "*.model", "vocab*", "merges.txt", "*.jinja"),
)
"""Files of a model that decide its answers."""
_SETTINGS: Final = (
    *("limit", "apply_chat_template", "fewshot_as_multiturn", "system_instruction", "gen_kwargs", "seed"),
    *("engine", "dtype", "attn_implementation", "tokenizer_name_or_path"),
)
"""Keys that affect answers, besides model and tasks."""


def evaluate_model(config: EvalConfig) -> dict[str, Any] | None:
    """Evaluate a model on its tasks, and write ``eval.json`` and ``samples.jsonl``.

    Answers are kept as they come: the same command resumes a run that was killed.

    Returns:
        What ``eval.json`` holds; ``None`` in a process that is not the first of several.

    Raises:
        ConfigError: As ``load_tasks``; the model cannot be had, or cannot answer: it has no chat template, too few
            positions, or is no language model.
        DataError: Its logits are not finite.

    Source: equal to ``lm_eval run`` on the same tasks, every score and answer, in ``tests/evaluation/test_harness.py``.
    """
    tasks, settings = load_tasks(config), describe_model(config)
    versions = read_versions() | {"lm-eval": importlib.metadata.version("lm-eval")}
    began = time.time()
    _verify_choices(config, tasks["tasks"])
    model = build_engine(config, settings)
    _verify_shares(config, tasks["tasks"], model.world_size)
    asked = {key: getattr(config, key) for key in _SETTINGS}
    # Answers do not depend on how many questions are asked: a higher limit reuses those of a lower one.
    key = _hash([settings, {**asked, "limit": None}, versions])
    cache = config.folder / _CACHE / f"{key}-{model.rank}.sqlite"
    remembering = Remembering(model, cache, sorted(cache.parent.glob(f"{key}-*")), config.base_url)
    results = ask_tasks(remembering, tasks, config)
    remembering.close()
    if results is None:
        return None
    rows = [_describe_sample(task, sample, model) for task, found in results["samples"].items() for sample in found]
    record = {
        "model": settings,
        "tasks": {task: _summarise(task, results, rows) for task in results["configs"]},
        "groups": {
            name: _summarise_group(name, results, tasks["groups"], rows) for name in results.get("groups") or ()
        },
        "settings": asked,
        "versions": versions,
        "seconds": round(time.time() - began, 1),
    }
    with replacing(config.folder / SAMPLES) as partial:
        partial.write_text("".join(f"{json.dumps(row, default=str)}\n" for row in rows), encoding="utf-8")
    replace_record(config.folder / RECORD, record)
    # Only now: a process killed before the record is written asks nothing again.
    for file in cache.parent.glob(f"{key}-*"):
        file.unlink()
    with suppress(OSError):  # Another evaluation's answers may lie there.
        cache.parent.rmdir()
    return record


def ask_tasks(model: Any, tasks: dict[str, Any], config: EvalConfig, *, with_errors: bool = True) -> Any:
    """Ask every question as ``lm_eval run`` does, and return lm-eval's results; ``None`` on all ranks but the first.

    Sets the random states of Python, numpy and torch.

    Args:
        model: Of lm-eval.
        tasks: As ``load_tasks`` returns them; they may have been asked before.
        config: Few-shot seed, number of questions and templates.
        with_errors: Compute standard errors; of some metrics by a bootstrap, which takes seconds.
    """
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=config.seed)
    # The default of ``lm_eval run``.
    random.seed(0)
    np.random.seed(1234)  # noqa: NPY002 - the one that lm-eval's tasks draw from
    torch.manual_seed(1234)
    return evaluate(
        model,
        tasks,
        limit=config.limit,
        bootstrap_iters=100_000 if with_errors else 0,
        apply_chat_template=config.apply_chat_template,
        fewshot_as_multiturn=config.fewshot_as_multiturn,
        system_instruction=config.system_instruction,
        confirm_run_unsafe_code=config.confirm_run_unsafe_code,
    )


def describe_model(config: EvalConfig) -> dict[str, Any]:
    """Return which model is meant: its name, the base of an adapter, and a hash of its files or its commit.

    Raises:
        ConfigError: It cannot be had, is no language model, or is a checkpoint in shards.
    """
    name, revision = config.model_name_or_path, config.model_revision
    if config.base_url is not None:
        return {"name": name, "endpoint": config.base_url, **_describe_tokenizer(config)}
    folder = Path(name)
    if (folder / "model_shards").is_dir() and not list(folder.glob("*.safetensors")):
        remedy = f"recipes export {name} FOLDER, and evaluate that"
        raise ConfigError(Problem("model_name_or_path", "is a checkpoint in shards", remedy))
    adapter = find_adapter(name, revision)
    if adapter is not None and not (adapter / ADAPTER_WEIGHTS).is_file():  # PEFT would look for them on the Hub.
        remedy = "name a complete adapter; pickled weights could run code: convert them where you trust them"
        raise ConfigError(Problem("model_name_or_path", f"{name} has no {ADAPTER_WEIGHTS}", remedy))
    named = ModelConfig(model_name_or_path=name, model_revision=revision, trust_remote_code=config.trust_remote_code)
    if adapter is not None:
        named = replace(named, **read_base(adapter)._asdict())
    settings, _ = load_model_config(named)
    if wrong := [kind for kind in settings.architectures or [] if "Classification" in kind or "RewardModel" in kind]:
        found = f"{name} is a {wrong[0]}, which does not generate text"
        raise ConfigError(Problem("model_name_or_path", found, "name a language model"))
    described: dict[str, Any] = {"name": name, "fingerprint": _fingerprint(adapter or folder, settings)}
    if adapter is not None:
        described |= {"base": named.model_name_or_path, "base_revision": named.model_revision}
        described["base_fingerprint"] = _fingerprint(Path(str(named.model_name_or_path)), settings)
    return described | _describe_tokenizer(config)


def _describe_tokenizer(config: EvalConfig) -> dict[str, Any]:
    """A tokenizer of another place; the model's own is part of its fingerprint."""
    if config.tokenizer_name_or_path is None:
        return {}
    return {"tokenizer_fingerprint": _fingerprint(Path(config.tokenizer_name_or_path), None)}


def _fingerprint(folder: Path, settings: Any) -> str:
    """The commit of a model of the Hub; of a folder a hash of what decides its answers."""
    if not folder.is_dir():
        # A commit names every file of the Hub; hashing tens of gigabytes would say no more.
        return str(getattr(settings, "_commit_hash", None))
    files = sorted(file for pattern in _DECISIVE for file in folder.glob(pattern))
    return _hash([(file.name, hash_file(file)) for file in files])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _verify_choices(config: EvalConfig, tasks: Mapping[str, Any]) -> None:
    """Raise for tasks that need log-probabilities, which chat endpoints do not return."""
    if not config.is_chat_endpoint:
        return
    scored = [name for name, task in tasks.items() if task.get_config("output_type") != "generate_until"]
    if scored:
        found = f"{list_first(scored)} need log-probabilities, which an endpoint of chats does not tell"
        raise ConfigError(Problem("tasks", found, "leave them out, or name an endpoint of completions"))


def _verify_shares(config: EvalConfig, tasks: Mapping[str, Any], world_size: int) -> None:
    """Raise if there are more processes than questions: lm-eval reads the first one of each process."""
    for name, task in tasks.items():
        if (number := min(len(task.eval_docs), config.limit or len(task.eval_docs))) < world_size:
            found = f"{number} questions are shared by {world_size} processes"
            raise ConfigError(Problem(f"tasks: {name}", found, "start fewer processes, or leave the task out"))


def _describe_sample(task: str, sample: Mapping[str, Any], model: Any) -> dict[str, Any]:
    asked = sample["arguments"]
    return {
        "task": task,
        "doc_id": sample["doc_id"],
        "filter": sample["filter"],
        "prompt": str(getattr(asked[0][0], "prompt", asked[0][0])),
        "choices": [one[1] for one in asked if len(one) > 1 and isinstance(one[1], str)],
        "target": sample["target"],
        "answers": sample["filtered_resps"],
        "scores": {name: sample[name] for name in sample["metrics"]},
        "is_cut": any(is_cut(model, arguments) for arguments in asked),
        # Of the answers as the model gave them: a filter writes "[invalid]" where it finds nothing.
        "is_empty": all(isinstance(text, str) and not text.strip() for given in sample["resps"] for text in given),
        "doc_hash": sample["doc_hash"],
        "prompt_hash": sample["prompt_hash"],
    }


def _summarise(task: str, results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    own = [row for row in rows if row["task"] == task]
    # A task with several filters has a row for each; questions are counted once.
    questions = {row["doc_id"]: row for row in own}.values()
    return {
        "scores": read_scores(results["results"][task]),
        "num_questions": len(questions),
        "num_fewshot": results["n-shot"].get(task),
        "version": results["versions"].get(task),
        "num_cut": sum(row["is_cut"] for row in questions),
        "num_empty": sum(row["is_empty"] for row in questions),
        # Sorted, because several processes hand over their questions in an order of their own.
        "prompts_hash": _hash(sorted([row["doc_id"], row["prompt_hash"]] for row in questions)),
        "higher_is_better": results["higher_is_better"].get(task, {}),
        "dataset": results["configs"][task].get("dataset_path"),
    }


def _summarise_group(
    name: str, results: Mapping[str, Any], groups: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    members = [task.task_name for task in groups[name].get_all_tasks()]
    ways = groups[name].aggregate_metric_list or ()
    return {
        "scores": read_scores(results["groups"][name]),
        "num_questions": len({(row["task"], row["doc_id"]) for row in rows if row["task"] in members}),
        "num_fewshot": results["n-shot"].get(members[0]),
        "version": results["versions"].get(name),
        "dataset": results["configs"][members[0]].get("dataset_path"),
        "tasks": members,
        "is_weighted_by_size": all(way.weight_by_size for way in ways),
    }


def read_scores(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Metrics with their standard errors, by ``metric`` or, where a filter chose the answer, ``metric, filter``."""
    scores = {}
    for name, value in found.items():
        metric, comma, chosen = name.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = found.get(f"{metric}_stderr,{chosen}")
        label = metric if chosen == "none" else f"{metric}, {chosen}"
        stderr = float(error) if isinstance(error, float) and math.isfinite(error) else None  # Of one question: NaN.
        scores[label] = {"value": float(value), "stderr": stderr}
    return scores


def read_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``samples.jsonl``.

    Raises:
        DataError: There is none, or a line of it is broken.
    """
    path = folder / SAMPLES
    if not path.is_file():
        raise DataError(Problem(str(folder), f"has no {SAMPLES}", "name a folder that `recipes eval` has written"))
    for number, row in enumerate(read_lines(path), 1):
        if row is None:
            raise DataError(Problem(f"{path}:{number}", "is not a JSON object", "evaluate again"))
        verify_fields(row, _FIELDS, f"{path}:{number}", remedy="evaluate again")
        yield row
