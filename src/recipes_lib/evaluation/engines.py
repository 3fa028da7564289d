"""Inference engines of lm-eval: transformers, vLLM or an endpoint, with an answer cache and error handling."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import math
import sqlite3
import time
import warnings
from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from accelerate import PartialState
from lm_eval.api.model import CacheHook, CachingLM
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import resolve_max_length
from sqlitedict import SqliteDict
from transformers import LogitsProcessorList

from recipes_lib.config.evaluation import EvalConfig
from recipes_lib.config.schema import ModelConfig
from recipes_lib.errors import ConfigError, DataError, Problem, UserError
from recipes_lib.evaluation.endpoint import KEY_REFUSED, KEY_REMEDY, REPEATED, RESUME_REMEDY, read_wait
from recipes_lib.models.adapters.lora import without_old_name
from recipes_lib.models.adapters.saved import find_adapter
from recipes_lib.models.loading import explained, load_model_config, without_report
from recipes_lib.processes import read_world_size

_CPU_BATCH: Final = 8
_NUM_ATTEMPTS: Final = 6
"""For each request to an endpoint, as ``Endpoint`` makes them; each may take lm-eval's 300 seconds."""
_ASKED: Final = ("loglikelihood", "loglikelihood_rolling", "generate_until")
_LENGTHS: Final = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the longest answer in a request, in lm-eval's order."""


def build_engine(config: EvalConfig, settings: Mapping[str, Any]) -> Any:
    """Build the engine of an evaluation.

    Args:
        config: Of the evaluation.
        settings: The model, as ``describe_model`` has it.

    Raises:
        ConfigError: A package is not installed, the tokenizer has no chat template, or several processes were started
            that would not share the questions.
    """
    # vLLM starts workers of its own, and an endpoint is one server: neither shares questions over ranks.
    if (config.base_url or config.engine == "vllm") and read_world_size() > 1:
        found = f"{read_world_size()} processes were started, and each would ask every question"
        raise ConfigError(Problem("base_url" if config.base_url else "engine", found, "start one, by `recipes eval`"))
    if config.base_url is not None:
        model = _build_endpoint(config)
    elif config.engine == "vllm":
        model = _build_vllm(config, settings)
    else:
        model = _build_checked(config, settings)
    tokenizer = getattr(model, "tokenizer", None)
    if config.apply_chat_template and tokenizer is not None and not getattr(tokenizer, "chat_template", None):
        remedy = "name one as tokenizer_name_or_path, or leave apply_chat_template out"
        raise ConfigError(Problem("apply_chat_template", "the tokenizer has no chat template", remedy))
    return model


def _build_endpoint(config: EvalConfig) -> Any:
    if missing := [name for name in ("aiohttp", "requests", "tenacity") if importlib.util.find_spec(name) is None]:
        raise ConfigError(Problem("base_url", f"{missing[0]} is not installed", "pip install 'recipes-lib[eval]'"))
    # They tell of every attempt, and of every request that waits behind one; the last one is told by ``Remembering``.
    for name in ("lm_eval.models.api_models", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    options: dict[str, Any] = {"model": config.model_name_or_path, "base_url": config.base_url, "seed": config.seed}
    options |= {"num_concurrent": config.num_concurrent, "batch_size": config.batch_size or 1}
    if config.is_chat_endpoint:
        return _build_patient("local-chat-completions", options)
    positions = None
    with suppress(ConfigError):  # A place may hold a tokenizer alone.
        positions, _ = load_model_config(ModelConfig(model_name_or_path=config.tokenizer_name_or_path))
    options |= {"tokenizer": config.tokenizer_name_or_path, "tokenizer_backend": "huggingface"}
    return _build_patient("local-completions", options | {"max_length": resolve_max_length(positions)})


def _build_patient(name: str, options: Mapping[str, Any]) -> Any:
    """Build lm-eval's client of an endpoint, which then waits as long as a busy server asks for.

    lm-eval 0.4.13 repeats a failed request 1 to 10 seconds later and does not read ``Retry-After``, so that a rate
    limit of requests per minute would end the evaluation.
    """
    kind: Any = get_model(name)

    class PatientClient(kind):  # type: ignore[misc]
        def model_call(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().model_call(*args, **kwargs)
            except Exception as error:
                time.sleep(_read_pause(error))
                raise

        async def amodel_call(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return await super().amodel_call(*args, **kwargs)
            except Exception as error:
                await asyncio.sleep(_read_pause(error))
                raise

        def parse_generations(self, outputs: Any, **kwargs: Any) -> Any:
            for reply in outputs if isinstance(outputs, list) else [outputs]:
                # Of chats, lm-eval takes a reply without them, or a choice without a number, for an empty answer.
                for number, choice in enumerate(reply["choices"]):
                    choice.setdefault("index", number)
            return super().parse_generations(outputs, **kwargs)

    return PatientClient(**options, max_retries=_NUM_ATTEMPTS)


def _read_status(error: BaseException) -> tuple[int | None, Mapping[str, str]]:
    """Return status code and headers in an error of requests or aiohttp."""
    response = getattr(error, "response", None)
    status = getattr(error, "status", getattr(response, "status_code", None))
    return status, getattr(error, "headers", getattr(response, "headers", None)) or {}


def _read_pause(error: BaseException) -> float:
    return read_wait(_read_status(error)[1].get("Retry-After"), 0.0)


def _build_vllm(config: EvalConfig, settings: Mapping[str, Any]) -> Any:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(Problem("engine", "vllm is not installed", "pip install vllm"))
    options = _list_options(config, settings)
    if "base" in settings:
        options["lora_local_path"] = _find_place(config)
    return get_model("vllm")(**options)


def _build_checked(config: EvalConfig, settings: Mapping[str, Any]) -> Any:
    has_gpu = torch.cuda.is_available() and not config.use_cpu
    if not has_gpu and read_world_size() > 1:
        # accelerate takes processes on CPUs for ones of a launch only where it is told so before lm-eval asks it.
        PartialState(cpu=True, timeout=timedelta(weeks=52))
    options = _list_options(config, settings)
    if "base" in settings:
        options["peft"] = _find_place(config)
    if config.attn_implementation:
        options["attn_implementation"] = config.attn_implementation
    with explained("model_name_or_path", str(config.model_name_or_path)):
        model = CheckedModel(**options, device="cuda" if has_gpu else "cpu")
    if model.world_size != read_world_size():
        found = f"{read_world_size()} processes were started, and {model.world_size} share the questions"
        raise ConfigError(Problem("recipes eval", found, "start them by accelerate launch or torchrun"))
    return model


def _find_place(config: EvalConfig) -> str:
    """Return the folder of an adapter, also of one on the Hub; else the name of the model."""
    # A folder, because lm-eval asks for the adapter and its tokenizer by the revision of the base.
    return str(find_adapter(config.model_name_or_path, config.model_revision) or config.model_name_or_path)


def _list_options(config: EvalConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    has_gpu, place = torch.cuda.is_available() and not config.use_cpu, _find_place(config)
    model = settings.get("base", config.model_name_or_path)
    # PEFT saves an adapter without a tokenizer; trainers write one beside it.
    has_tokenizer = "base" not in settings or (Path(place) / "tokenizer_config.json").is_file()
    return {
        "pretrained": model,
        "revision": settings.get("base_revision", config.model_revision) or "main",
        "tokenizer": config.tokenizer_name_or_path or (place if has_tokenizer else model),
        "dtype": config.dtype,
        "trust_remote_code": config.trust_remote_code,
        "batch_size": config.batch_size or ("auto" if has_gpu else _CPU_BATCH),
        "max_batch_size": config.max_batch_size,
    }


class CheckedModel(HFLM):  # type: ignore[misc]
    """lm-eval's model of transformers that ends where logits are not finite, on every rank of a launch."""

    AUTO_MODEL_CLASS: Any

    def __init__(self, **options: Any) -> None:
        """Load the model; arguments as of ``HFLM``."""
        super().__init__(**options)
        # lm-eval 0.4.13 shares questions out on several GPUs of one machine alone; else each process would ask all.
        if (accelerator := getattr(self, "accelerator", None)) is not None:
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes

    def _create_model(self, *args: Any, **options: Any) -> None:
        # Overridden (lm-eval 0.4.13): it evaluates a checkpoint or an adapter that lacks weights with random ones.
        chosen, self.AUTO_MODEL_CLASS = self.AUTO_MODEL_CLASS, _WholeModel(self.AUTO_MODEL_CLASS)
        adapter = options.get("peft")
        try:
            with without_old_name():
                warnings.filterwarnings("error", message="Found missing adapter keys")  # PEFT 0.21 only warns.
                super()._create_model(*args, **options)
        except UserWarning as warning:
            found = f"the adapter {adapter} lacks weights that its configuration announces: {str(warning)[:200]} ..."
            raise ConfigError(Problem("model_name_or_path", found, "name a complete adapter")) from warning
        except RuntimeError as error:
            if adapter is None or "size mismatch" not in str(error):
                raise
            found = f"the adapter {adapter} does not fit its base: {str(error).strip().splitlines()[-1].strip()}"
            raise ConfigError(Problem("model_name_or_path", found, "name the base that it was trained on")) from error
        finally:
            self.AUTO_MODEL_CLASS = chosen

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, as ``HFLM`` does."""
        # Overridden (lm-eval 0.4.13): it gathers counts to make them equal on all ranks, which hangs where one has
        # nothing left to ask, and which only a model in shards needs.
        shared, self._world_size = self._world_size, 1
        try:
            scores: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self._world_size = shared
        return scores

    def _model_generate(self, context: Any, *args: Any, **kwargs: Any) -> Any:
        # Overridden (lm-eval 0.4.13) for the logits, which are seen nowhere else.
        broken: list[torch.Tensor] = []  # On the device: each token is watched without synchronisation.

        def watch(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            broken.append(scores.isnan().any())
            return scores

        processors: Any = LogitsProcessorList([watch])
        tokens = super()._model_generate(context, *args, logits_processor=processors, **kwargs)
        if broken and torch.stack(broken).any():
            raise _refuse_logits()
        return tokens


@dataclass(frozen=True)
class _WholeModel:
    """A class of transformers that refuses checkpoints without all weights of the model."""

    auto_class: Any

    def from_pretrained(self, name: str, **options: Any) -> Any:
        with without_report():
            model, info = self.auto_class.from_pretrained(name, **options, output_loading_info=True)
        if missing := sorted(info["missing_keys"]):
            found = f"the checkpoint of {name} lacks {len(missing)} weights, such as {missing[0]}"
            raise ConfigError(
                Problem("model_name_or_path", found, f"name a complete {type(model).__name__} checkpoint")
            )
        return model


def _refuse_logits() -> DataError:
    return DataError(Problem("model_name_or_path", "its logits are not finite", "no score would mean anything"))


class _Answers(ChainMap[str, Any]):
    """Answers of this process, before those that any process of an earlier launch has left."""

    # `CachingLM` commits after each kind of request; a `ChainMap` has no such method.
    def commit(self) -> None:
        self.maps[0].commit()  # type: ignore[attr-defined]


class Remembering(CachingLM):  # type: ignore[misc]
    """lm-eval's cache of answers, in JSON: its own are pickles, which run code when they are read.

    Nothing that is not finite enters it. A question without room is refused before it is asked, and what an endpoint
    breaks is told as its.

    Args:
        model: What is asked.
        path: File of this process's answers.
        others: Files of an earlier launch.
        endpoint: Its address, if it is one.
    """

    def __init__(self, model: Any, path: Path, others: Sequence[Path] = (), endpoint: str | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lm, self.cache_db, self._endpoint = model, str(path), endpoint
        earlier: dict[str, Any] = {}
        for other in others:
            with suppress(RuntimeError, sqlite3.Error), _open(other, flag="r") as answers:  # Killed before its first.
                earlier.update(answers.items())
        model.barrier()  # Nobody reads a file that another process of this launch writes.
        self._own = _open(path)
        self.dbdict = _Answers(self._own, earlier)
        model.set_cache_hook(CacheHook(self))

    def close(self) -> None:
        """Close the file, and wait until every process has come this far."""
        self._own.close()
        self.lm.barrier()

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name not in _ASKED:
            return found

        def ask(requests: Sequence[Any]) -> Any:
            for request in requests:
                _verify_room(self.lm, request.args)
            try:
                return found(requests)
            except UserError:
                raise
            except Exception as error:  # An answer of an endpoint can be anything, and break lm-eval anywhere.
                _refuse_answer(self._endpoint, error)

        return ask


def _open(path: Path, flag: str = "c") -> Any:
    return SqliteDict(str(path), autocommit=True, encode=_encode, decode=json.loads, flag=flag)


def _encode(answer: Any) -> str:
    numbers = answer if isinstance(answer, tuple | list) else (answer,)
    if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
        raise _refuse_logits()
    return json.dumps(answer)


def _refuse_answer(endpoint: str | None, error: Exception) -> NoReturn:
    if endpoint is None:
        raise error
    told = f"{type(error).__name__}: {error}".splitlines()[0][:300].removesuffix(": ")  # A timeout has no words.
    status, _ = _read_status(error)
    remedy = "see that it serves this model, with log-probabilities of the prompt (echo) where tasks have choices"
    if status in KEY_REFUSED:
        remedy = KEY_REMEDY
    elif isinstance(error, OSError) or status in REPEATED or (status or 0) >= 500:
        remedy = RESUME_REMEDY
    raise ConfigError(Problem("base_url", f"{endpoint} has no answer to use: {told}", remedy)) from error


def find_room(model: Any) -> int | None:
    """Return the context length in tokens, prompt and choice together; ``None`` if unknown.

    Source: lm-eval 0.4.13, ``_loglikelihood_tokens`` of ``HFLM``, ``VLLM`` and ``TemplateAPI``, each another.
    """
    if getattr(model, "tokenizer", None) is None or not hasattr(model, "max_length"):
        return None
    # HFLM does not feed the last token, whose successor nobody asks for; vLLM has to generate one token more.
    kind = {"HFLM": 1, "VLLM": -1}
    return int(model.max_length) + next((kind[one.__name__] for one in type(model).__mro__ if one.__name__ in kind), 0)


def is_cut(model: Any, arguments: Sequence[Any]) -> bool:
    """Return whether a question is truncated at its start.

    Args:
        model: With ``tok_encode`` and ``max_length``; of a chat endpoint nothing is known.
        arguments: Of lm-eval's request: a prompt and a choice, or a prompt and settings of generation.
    """
    room = find_room(model)
    if room is None or len(arguments) < 2:  # A text that is scored as a whole is read in windows.
        return False
    prompt, rest = arguments[:2]
    if isinstance(rest, str):
        # Bytes first: a tokenizer would read every prompt a second time, and few of them come near the limit.
        if _count_bytes(prompt + rest) <= room or not prompt:
            return False
        return sum(map(len, model._encode_pair(prompt, rest))) > room
    left = int(model.max_length) - find_answer_length(model, rest)
    return _count_bytes(prompt) > left and len(model.tok_encode(prompt)) > left


def _verify_room(model: Any, arguments: Sequence[Any]) -> None:
    room = find_room(model)
    if room is None or len(arguments) < 2:
        return
    prompt, rest = arguments[:2]
    if isinstance(rest, str):
        length = 0 if _count_bytes(rest) <= room else len(model.tok_encode(rest, add_special_tokens=False))
    else:
        room, length = int(model.max_length), find_answer_length(model, rest)
    # At least one token of the prompt must stay: the first of the choice is predicted from it.
    if length >= room:
        found = f"an answer of {length:,} tokens does not fit its {room:,} positions: {prompt[-60:]!r} ..."
        remedy = "leave the task out, or shorten its max_gen_toks by gen_kwargs"
        raise ConfigError(Problem("model_name_or_path", found, remedy))


def find_answer_length(model: Any, settings: Mapping[str, Any]) -> int:
    """Return the longest answer that a task's generation settings allow, in tokens; lm-eval's default without one."""
    default: Any = getattr(model, "max_gen_toks", None) or getattr(model, "_max_gen_toks", 256)
    return int(next((settings[name] for name in _LENGTHS if settings.get(name) is not None), default))


def _count_bytes(text: str) -> int:
    """At most so many tokens, with some room for those that a tokenizer adds: each is of a byte or more."""
    return len(text.encode(errors="replace")) + 4
