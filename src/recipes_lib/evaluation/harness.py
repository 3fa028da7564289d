"""One evaluation: lm-eval asks a model the questions of tasks; scores, standard errors and every answer are kept."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from lm_eval.api.model import CacheHook, CachingLM
from lm_eval.api.registry import get_model
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from sqlitedict import SqliteDict
from transformers import LogitsProcessor, LogitsProcessorList

from recipes_lib.config.evaluation import EvalConfig
from recipes_lib.config.schema import ModelConfig
from recipes_lib.environment import read_versions
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.evaluation.suites import load_tasks
from recipes_lib.files import hash_file, read_lines, replace_record, replacing, verify_fields
from recipes_lib.models.adapters.saved import find_adapter, read_base
from recipes_lib.models.loading import load_model_config

RECORD: Final = "eval.json"
SAMPLES: Final = "samples.jsonl"
_FIELDS: Final = {**dict.fromkeys(("task", "filter", "doc_hash", "prompt_hash"), str), "scores": dict}
_CACHE: Final = ".requests"
_CPU_BATCH: Final = 8


def evaluate_model(config: EvalConfig) -> dict[str, Any] | None:
    """Ask a model the questions of its tasks, and write ``eval.json`` and ``samples.jsonl``.

    Answers are kept as they come: the same command resumes a run that was killed.

    Returns:
        What ``eval.json`` holds; ``None`` in a process that is not the first of several.

    Raises:
        ConfigError: As ``load_tasks``; the model cannot be had, or cannot answer: it has no chat template, too few
            positions, or is no language model.
        DataError: Its logits are not finite.

    Source: equal to ``lm_eval run`` on the same tasks, every score and answer, in ``tests/evaluation/test_harness.py``.
    """
    # It tells of every default of a task file, and of every prompt that is cut; those are counted, and told once.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    tasks, settings = load_tasks(config), describe_model(config)
    began = time.time()
    model = _build_model(config, settings)
    if config.apply_chat_template and not config.base_url and not model.tokenizer.chat_template:
        remedy = "name one as tokenizer_name_or_path, or leave apply_chat_template out"
        raise ConfigError(Problem("apply_chat_template", "the tokenizer has no chat template", remedy))
    key = _hash([settings, config.gen_kwargs, config.dtype, read_versions()])
    cache = config.folder / _CACHE / f"{key}-{model.rank}.sqlite"
    # As ``lm_eval run`` does unless told otherwise.
    random.seed(0)
    np.random.seed(1234)  # noqa: NPY002 - the one that lm-eval's tasks draw from
    torch.manual_seed(1234)
    results: Any = evaluate(
        _Remembering(model, cache),
        tasks,
        limit=config.limit,
        apply_chat_template=config.apply_chat_template,
        fewshot_as_multiturn=config.fewshot_as_multiturn,
        system_instruction=config.system_instruction,
        confirm_run_unsafe_code=config.confirm_run_unsafe_code,
    )
    if results is None:
        return None
    cut: set[str] = getattr(model, "cut", set())
    rows = [_describe_sample(task, sample, cut) for task, found in results["samples"].items() for sample in found]
    record = {
        "model": settings,
        "tasks": {task: _summarise(task, results, rows) for task in results["configs"]},
        "groups": {group: _read_scores(found) for group, found in (results.get("groups") or {}).items()},
        "settings": {
            key: getattr(config, key)
            for key in (
                "limit",
                "apply_chat_template",
                "fewshot_as_multiturn",
                "system_instruction",
                "gen_kwargs",
                "seed",
            )
        },
        "versions": read_versions(),
        "seconds": round(time.time() - began, 1),
    }
    with replacing(config.folder / SAMPLES) as partial:
        partial.write_text("".join(f"{json.dumps(row, default=str)}\n" for row in rows), encoding="utf-8")
    replace_record(config.folder / RECORD, record)
    for file in cache.parent.glob(f"{key}-*"):
        file.unlink()
    with suppress(OSError):  # Another evaluation's answers may lie there.
        cache.parent.rmdir()
    return record


def describe_model(config: EvalConfig) -> dict[str, Any]:
    """Return which model is meant: its name, the base of an adapter, and a hash of its files or its commit.

    Raises:
        ConfigError: It cannot be had, is no language model, or is a checkpoint in shards.
    """
    name, revision = config.model_name_or_path, config.model_revision
    if config.base_url is not None:
        return {"name": name, "endpoint": config.base_url}
    folder = Path(name)
    if (folder / "model_shards").is_dir() and not list(folder.glob("*.safetensors")):
        remedy = f"recipes export {name} --output_dir FOLDER, and evaluate that"
        raise ConfigError(Problem("model_name_or_path", "is a checkpoint in shards", remedy))
    adapter = find_adapter(name, revision)
    base = None if adapter is None else read_base(adapter)
    named = ModelConfig(
        model_name_or_path=name if base is None else base.model_name_or_path,
        model_revision=revision if base is None else base.model_revision,
        trust_remote_code=config.trust_remote_code,
    )
    settings, _ = load_model_config(named)
    architectures = settings.architectures or []
    if wrong := [kind for kind in architectures if "Classification" in kind or "RewardModel" in kind]:
        found = f"{name} is a {wrong[0]}, which does not generate text"
        raise ConfigError(Problem("model_name_or_path", found, "name a language model"))
    described: dict[str, Any] = {"name": name, "fingerprint": _fingerprint(adapter or folder, settings)}
    if base is not None:
        described |= {"base": base.model_name_or_path, "base_revision": base.model_revision}
    return described


def _fingerprint(folder: Path, settings: Any) -> str:
    """The commit of a model of the Hub; of a folder a hash of what decides its answers."""
    if not folder.is_dir():
        return str(getattr(settings, "_commit_hash", None))
    patterns = ("*.safetensors", "*config.json", "tokenizer.json", "*.jinja")
    files = sorted(file for pattern in patterns for file in folder.glob(pattern))
    return _hash([(file.name, hash_file(file)) for file in files])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _build_model(config: EvalConfig, settings: Mapping[str, Any]) -> Any:
    """Build what lm-eval asks: a model by transformers or vLLM, or an endpoint."""
    if config.base_url is not None:
        kind = (
            "local-chat-completions"
            if config.base_url.rstrip("/").endswith("chat/completions")
            else "local-completions"
        )
        return get_model(kind)(
            model=config.model_name_or_path,
            base_url=config.base_url,
            tokenizer=config.tokenizer_name_or_path,
            num_concurrent=config.num_concurrent,
            batch_size=config.batch_size or 1,
        )
    has_gpu = torch.cuda.is_available() and not config.use_cpu
    place = config.model_name_or_path
    options: dict[str, Any] = {
        "pretrained": settings.get("base", place),
        "revision": settings.get("base_revision", config.model_revision) or "main",
        "tokenizer": config.tokenizer_name_or_path or place,
        "dtype": config.dtype,
        "trust_remote_code": config.trust_remote_code,
        "batch_size": config.batch_size or ("auto" if has_gpu else _CPU_BATCH),
        "max_batch_size": config.max_batch_size,
    }
    if config.engine == "vllm":
        if "base" in settings:
            options |= {"lora_local_path": place}
        return get_model("vllm")(**options)
    if "base" in settings:
        options["peft"] = place
    if config.attn_implementation:
        options["attn_implementation"] = config.attn_implementation
    return CheckedModel(**options, device="cuda" if has_gpu else "cpu")


class CheckedModel(HFLM):  # type: ignore[misc]
    """lm-eval's model of transformers that counts what it cuts, and ends where logits are not finite.

    lm-eval cuts the beginning of what is too long, and takes the comparison of two numbers that are none for an answer.

    Attributes:
        cut: Prompts whose beginning the model did not see.
    """

    def __init__(self, **options: Any) -> None:
        """Load the model; arguments as of ``HFLM``."""
        super().__init__(**options)
        self.cut: set[str] = set()
        # lm-eval 0.4.13 shares questions out on several GPUs of one machine alone; else each process would ask all.
        if (accelerator := getattr(self, "accelerator", None)) is not None:
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes

    def _loglikelihood_tokens(self, requests: Sequence[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        # Overridden (lm-eval 0.4.13) for both counts: here requests are tokens, and results numbers.
        prompts = ["" if named is None else named[0] for named, *_ in requests]  # A window of a long text has no name.
        for prompt, (_, context, continuation) in zip(prompts, requests, strict=True):
            if len(continuation) > self.max_length:
                raise _refuse_length(prompt, len(continuation), self.max_length)
            if len(context) + len(continuation) > self.max_length + 1:
                self.cut.add(prompt)
        results: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, *args, **kwargs)
        for prompt, (logp, _) in zip(prompts, results, strict=True):
            if not math.isfinite(logp):
                raise _refuse_logits(prompt)
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate answers, as ``HFLM`` does."""
        for prompt, settings in (request.args for request in requests):
            room = self.max_length - int(settings.get("max_gen_toks", self.max_gen_toks))
            if room <= 0:
                raise _refuse_length(prompt, self.max_length - room, self.max_length)
            if len(prompt) > room and len(self.tok_encode(prompt)) > room:  # A token has at least one character.
                self.cut.add(prompt)
        answers: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
        return answers

    def _model_generate(self, context: Any, *args: Any, **kwargs: Any) -> Any:
        # Overridden (lm-eval 0.4.13) for the logits, which are seen nowhere else.
        watch = _Watch()
        tokens = super()._model_generate(context, *args, logits_processor=LogitsProcessorList([watch]), **kwargs)
        if watch.is_broken is not None and bool(watch.is_broken):
            raise _refuse_logits(self.tok_decode(context[0].tolist()))
        return tokens


class _Watch(LogitsProcessor):
    """Remembers on the device whether a logit was no number: nothing waits for it before the answers are there."""

    def __init__(self) -> None:
        self.is_broken: torch.Tensor | None = None

    def __call__(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        broken = scores.isnan().any()
        self.is_broken = broken if self.is_broken is None else self.is_broken | broken
        return scores


def _refuse_length(prompt: str, length: int, room: int) -> ConfigError:
    found = f"an answer of {length:,} tokens does not fit its {room:,} positions: {prompt[-60:]!r} ..."
    return ConfigError(
        Problem("model_name_or_path", found, "leave the task out, or shorten its max_gen_toks by gen_kwargs")
    )


def _refuse_logits(prompt: str) -> DataError:
    return DataError(
        Problem(
            "model_name_or_path", f"its logits are not finite after {prompt[-60:]!r}", "no score would mean anything"
        )
    )


class _Remembering(CachingLM):  # type: ignore[misc]
    """lm-eval's cache of answers, in JSON: its own are pickles, which run code when they are read."""

    def __init__(self, model: Any, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lm, self.cache_db = model, str(path)
        self.dbdict = SqliteDict(self.cache_db, autocommit=True, encode=json.dumps, decode=json.loads)
        model.set_cache_hook(CacheHook(self))


def _describe_sample(task: str, sample: Mapping[str, Any], cut: set[str]) -> dict[str, Any]:
    prompts = [str(arguments[0]) for arguments in sample["arguments"]]
    choices = [
        arguments[1] for arguments in sample["arguments"] if len(arguments) > 1 and isinstance(arguments[1], str)
    ]
    answers = sample["filtered_resps"]
    return {
        "task": task,
        "doc_id": sample["doc_id"],
        "filter": sample["filter"],
        "prompt": prompts[0],
        "choices": choices,
        "target": sample["target"],
        "answers": answers,
        "scores": {name: sample[name] for name in sample["metrics"]},
        "is_cut": any(prompt in cut for prompt in prompts),
        "is_empty": all(isinstance(answer, str) and not answer.strip() for answer in answers),
        "doc_hash": sample["doc_hash"],
        "prompt_hash": sample["prompt_hash"],
    }


def _summarise(task: str, results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    own = [row for row in rows if row["task"] == task]
    questions = {row["doc_id"]: row for row in own}.values()
    return {
        "scores": _read_scores(results["results"][task]),
        "num_questions": len(questions),
        "num_fewshot": results["n-shot"].get(task),
        "version": results["versions"].get(task),
        "num_cut": sum(row["is_cut"] for row in questions),
        "num_empty": sum(row["is_empty"] for row in questions),
        "prompts_hash": _hash(sorted([row["doc_id"], row["prompt_hash"]] for row in questions)),
        "higher_is_better": results["higher_is_better"].get(task, {}),
        "dataset": results["configs"][task].get("dataset_path"),
    }


def _read_scores(found: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Metrics with their standard errors, by ``metric`` or, where a filter chose the answer, ``metric, filter``."""
    scores = {}
    for name, value in found.items():
        metric, comma, chosen = name.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = found.get(f"{metric}_stderr,{chosen}")
        label = metric if chosen == "none" else f"{metric}, {chosen}"
        scores[label] = {"value": float(value), "stderr": error if isinstance(error, float) else None}
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
