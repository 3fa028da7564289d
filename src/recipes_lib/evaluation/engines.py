"""Inference engines of lm-eval (transformers, vLLM, an endpoint) with a cache of answers and checks of the model."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import math
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import torch
from accelerate import PartialState
from huggingface_hub import snapshot_download
from jinja2 import TemplateError
from lm_eval.api.model import CacheHook, CachingLM
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import has_bos_prefix, resolve_max_length
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, LogitsProcessorList
from transformers.utils import GENERATION_CONFIG_NAME

from recipes_lib.config.evaluation import EvalConfig
from recipes_lib.config.schema import ModelConfig
from recipes_lib.config.tokenization import find_prefix
from recipes_lib.errors import ConfigError, DataError, Problem, UserError, verify_extra
from recipes_lib.evaluation.endpoint import (
    QUIET_SECONDS,
    RESUME_REMEDY,
    choose_remedy,
    explain,
    join_parts,
    read_key,
    read_wait,
)
from recipes_lib.files import read_lines, read_record
from recipes_lib.models.adapters.lora import load_adapter
from recipes_lib.models.adapters.saved import ADAPTER_CONFIG, find_adapter
from recipes_lib.models.inference import temporarily
from recipes_lib.models.loading import download, explained, load_model_config, without_report
from recipes_lib.models.model_files import INDEX, WEIGHTS
from recipes_lib.processes import read_world_size

_CPU_BATCH: Final = 8
"""Default batch size on a CPU: lm-eval's ``auto`` searches by out-of-memory errors of a GPU."""
_NUM_ATTEMPTS: Final = 6
"""Attempts per request to an endpoint, as for ``Endpoint``; lm-eval limits each to 300 seconds."""
_REQUEST_METHODS: Final = ("loglikelihood", "loglikelihood_rolling", "generate_until")
"""Methods of lm-eval's models that answer requests."""
_TOKENIZER_FILES: Final = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
_LENGTHS: Final = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the longest answer in generation settings, in lm-eval's order of precedence."""


def build_engine(config: EvalConfig, settings: Mapping[str, Any]) -> Any:
    """Build lm-eval's model for an evaluation.

    Args:
        config: The evaluation's configuration.
        settings: The model, as returned by ``describe_model``.

    Raises:
        ConfigError: A package is not installed, the model cannot be loaded, the tokenizer has no chat template, or
            several processes were started that would not divide the questions among them.
    """
    # vLLM starts its own workers, and an endpoint is one server: neither divides questions among ranks.
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
    if config.apply_chat_template and tokenizer is not None:
        _verify_template(tokenizer, (config.system_instruction or "").strip())
    return model


def _verify_template(tokenizer: Any, instruction: str) -> None:
    """Verify that there is a chat template, and that it renders the system instruction.

    lm-eval 0.4.13 leaves out the system message where the template refuses it.

    Raises:
        ConfigError: There is none, or it does not.
    """
    if not getattr(tokenizer, "chat_template", None):
        remedy = "name a tokenizer with one as tokenizer_name_or_path, or remove apply_chat_template"
        raise ConfigError(Problem("apply_chat_template", "the tokenizer has no chat template", remedy))
    if not instruction:
        return
    rendered = ""
    with suppress(TemplateError):
        chat = [{"role": "system", "content": instruction}, {"role": "user", "content": "a"}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    if instruction not in rendered:
        found = "the chat template of the model has no system message"
        remedy = "remove it, or write it into the `doc_to_text` of your tasks"
        raise ConfigError(Problem("system_instruction", found, remedy))


def _build_endpoint(config: EvalConfig) -> Any:
    verify_extra("base_url", "eval", "aiohttp", "requests", "tenacity")
    # They log every failed attempt; ``CachedModel`` reports the last one.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    client = logging.getLogger("lm_eval.models.api_models")
    client.setLevel(logging.WARNING)
    client.addFilter(_keep_response)
    options: dict[str, Any] = {"model": config.model_name_or_path, "base_url": config.base_url, "seed": config.seed}
    options |= {"num_concurrent": config.num_concurrent, "batch_size": config.batch_size or 1}
    if config.is_chat_endpoint:
        return _build_patient("local-chat-completions", options)
    positions, tokenizer = None, str(find_tokenizer(str(config.tokenizer_name_or_path)))
    with suppress(ConfigError):  # The folder may contain a tokenizer only.
        positions, _ = load_model_config(ModelConfig(model_name_or_path=tokenizer))
    options |= {"tokenizer": tokenizer, "tokenizer_backend": "huggingface", "add_bos_token": True}
    options["trust_remote_code"] = config.trust_remote_code
    with explained("tokenizer_name_or_path", str(config.tokenizer_name_or_path)):
        client = _build_patient("local-completions", options | {"max_length": resolve_max_length(positions)})
    _drop_suffix(client.tokenizer)
    return client


def _build_patient(name: str, options: Mapping[str, Any]) -> Any:
    """Build lm-eval's client of an endpoint, extended to wait as long as ``Retry-After`` says.

    lm-eval 0.4.13 repeats a failed request after 1 to 10 seconds and ignores ``Retry-After``: a rate limit per minute
    would end the evaluation.
    """
    client_class: Any = get_model(name)
    num_asked = Counter[int]()

    class PatientClient(client_class):  # type: ignore[misc]
        api_key = read_key() or ""

        def model_call(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().model_call(*args, **kwargs)
            except Exception as error:
                time.sleep(_tell_failure(error))
                raise

        async def amodel_call(self, *args: Any, cache_keys: Any = None, **kwargs: Any) -> Any:
            # Windows of a whole text have no keys, only the text: lm-eval 0.4.13 fails to store their answers.
            keys = None if cache_keys and None in cache_keys else cache_keys
            try:
                return await super().amodel_call(*args, cache_keys=keys, **kwargs)
            except Exception as error:
                await asyncio.sleep(_tell_failure(error))
                raise

        def _create_payload(self, messages: Any, *args: Any, seed: int, **kwargs: Any) -> Any:
            # lm-eval 0.4.13 sends one seed, with which a server samples the same answer to each repeat of a prompt.
            num_asked[key := hash(repr(messages))] += 1
            return super()._create_payload(messages, *args, seed=seed + num_asked[key] - 1, **kwargs)

        def tok_encode(self, string: Any, add_special_tokens: bool | None = None, **_: Any) -> Any:
            # Overridden (lm-eval 0.4.13): it sends prompts without the start token, which Llama 3 and Gemma need.
            adds = self.add_bos_token if add_special_tokens is None else add_special_tokens
            return _tokenize(self.tokenizer, string, adds=adds)

        def parse_logprobs(self, outputs: Any, tokens: Any = None, **kwargs: Any) -> Any:
            _verify_logprobs(_list_choices(outputs), tokens)
            return super().parse_logprobs(outputs=outputs, tokens=tokens, **kwargs)

        def parse_generations(self, outputs: Any, **kwargs: Any) -> Any:
            # lm-eval 0.4.13 reads a chat reply without choices, or with a choice without `index`, as an empty answer,
            # and does not join the parts of a content.
            for message in (choice["message"] for choice in _list_choices(outputs) if "message" in choice):
                message["content"] = join_parts(message.get("content"))
            return super().parse_generations(outputs, **kwargs)

    return PatientClient(**options, max_retries=_NUM_ATTEMPTS)


def _tokenize(tokenizer: Any, text: str | Sequence[str], *, adds: bool) -> Any:
    """Return the token ids of a text or of several; ``adds``: with a start token, unless a chat template wrote it."""
    if not isinstance(text, str):
        return [_tokenize(tokenizer, one, adds=adds) for one in text]
    return tokenizer(text, add_special_tokens=adds and not has_bos_prefix(text, tokenizer.bos_token))["input_ids"]


_LAST_RESPONSE: Final = deque([""], maxlen=1)
"""Body of the last error response: an exception of aiohttp has only its status code."""
_NEXT_WARNING: Final = deque([0.0], maxlen=1)
"""Time of the next warning that a request is repeated, by ``time.monotonic``."""
_LOGGED_RESPONSE: Final = re.compile(r"(?:Response text|error message): (.*)\. Retrying", re.DOTALL)
"""Pattern of lm-eval 0.4.13's messages about failed requests."""


def _keep_response(record: logging.LogRecord) -> bool:
    """Store the response in a message of lm-eval's client; suppress every message."""
    _LAST_RESPONSE.extend(_LOGGED_RESPONSE.findall(record.getMessage()))
    return False


def _list_choices(outputs: Any) -> list[dict[str, Any]]:
    """Return the choices of one reply or several, each with its index.

    Raises:
        ValueError: There is none.
    """
    replies = outputs if isinstance(outputs, list) else [outputs]
    if not all(isinstance(reply, dict) and reply.get("choices") for reply in replies):
        raise ValueError(f"the reply holds no answer: {json.dumps(outputs)[:200]}")
    for reply in replies:
        for number, choice in enumerate(reply["choices"]):
            choice.setdefault("index", number)
    return [choice for reply in replies for choice in reply["choices"]]


def _verify_logprobs(choices: Sequence[Any], prompts: Sequence[Sequence[int]]) -> None:
    """Verify that choices have a log-probability for each token of their prompts, and one for the generated token.

    lm-eval 0.4.13 adds up those that it finds: without ``echo``, every choice would have the log-probability 0.

    Raises:
        ValueError: They have another number.
    """
    choices = sorted(choices, key=lambda choice: choice["index"])
    found = [len(choice["logprobs"]["token_logprobs"]) for choice in choices]
    expected = [len(prompt) + 1 for prompt in prompts]
    if found != expected:
        raise ValueError(f"log-probabilities of {found} tokens instead of {expected}")


def _read_status(error: BaseException) -> tuple[int | None, Mapping[str, str]]:
    """Return the status code, ``None`` without a response, and the headers of an exception of requests or aiohttp."""
    response = getattr(error, "response", None)
    status = getattr(error, "status", getattr(response, "status_code", None))
    return status, getattr(error, "headers", getattr(response, "headers", None)) or {}


def _tell_failure(error: Exception) -> float:
    """Say why a request is repeated, unless another was a short time ago; return the pause before it, in seconds."""
    if time.monotonic() >= _NEXT_WARNING[0]:
        _NEXT_WARNING.append(time.monotonic() + QUIET_SECONDS)
        limit = f"and is repeated ({_NUM_ATTEMPTS} attempts of at most 300 s)"
        sys.stderr.write(f"warning: a request to the endpoint failed, {limit}: {_explain(error)}\n")
    return read_wait(_read_status(error)[1].get("Retry-After"), 0.0)


def _explain(error: Exception) -> str:
    """Return the reason of a failed request in one line: the response if there is one, else the exception."""
    status, _ = _read_status(error)
    return explain(f"{status} {_LAST_RESPONSE[0]}" if (status or 0) >= 400 else error, read_key()).removesuffix(":")


def _build_vllm(config: EvalConfig, settings: Mapping[str, Any]) -> Any:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(Problem("engine", "vllm is not installed", "pip install vllm"))
    options = {**_list_options(config, settings), "seed": config.seed}
    if "base" in settings:
        options["lora_local_path"] = _find_place(config)
        saved = read_record(Path(options["lora_local_path"]) / ADAPTER_CONFIG, {"r": int})
        rank = max([saved["r"], *(saved.get("rank_pattern") or {}).values()])
        # At least vLLM's default; it accepts the powers of two up to 512.
        options["max_lora_rank"] = max(16, 1 << (rank - 1).bit_length())
        if (Path(options["lora_local_path"]) / GENERATION_CONFIG_NAME).is_file():
            options["generation_config"] = options["lora_local_path"]
    return get_model("vllm")(**options)


def _build_checked(config: EvalConfig, settings: Mapping[str, Any]) -> Any:
    has_gpu = torch.cuda.is_available() and not config.use_cpu
    if not has_gpu and read_world_size() > 1:
        # Must precede lm-eval's `Accelerator()`, which recognises several processes on CPUs only after `cpu=True`.
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


def find_tokenizer(name: str) -> Path:
    """Return the folder of a tokenizer, downloaded if it is on the Hub.

    Raises:
        ConfigError: It cannot be downloaded.
    """
    # lm-eval would load it from the Hub at the revision of the model.
    with explained("tokenizer_name_or_path", name):
        return Path(name if Path(name).is_dir() else snapshot_download(name, allow_patterns=_TOKENIZER_FILES))


def _find_place(config: EvalConfig) -> str:
    """Return the local folder of an adapter, downloaded if it is on the Hub; for another model its name."""
    # lm-eval would load an adapter and its tokenizer from the Hub at the revision of the base model.
    return str(find_adapter(config.model_name_or_path, config.model_revision) or config.model_name_or_path)


def _list_options(config: EvalConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    has_gpu, place = torch.cuda.is_available() and not config.use_cpu, _find_place(config)
    given = config.tokenizer_name_or_path
    model = settings.get("base", config.model_name_or_path)
    # PEFT saves an adapter without a tokenizer, but trainers write one to the same folder.
    has_tokenizer = "base" not in settings or (Path(place) / "tokenizer_config.json").is_file()
    return {
        "pretrained": model,
        "revision": settings.get("base_revision", config.model_revision) or "main",
        "tokenizer": str(find_tokenizer(given)) if given else place if has_tokenizer else model,
        "dtype": config.dtype,
        "trust_remote_code": config.trust_remote_code,
        "batch_size": config.batch_size or ("auto" if has_gpu else _CPU_BATCH),
        "max_batch_size": config.max_batch_size,
    }


class CheckedModel(HFLM):  # type: ignore[misc]
    """lm-eval's ``HFLM`` that refuses incomplete checkpoints and NaN logits, and supports any launch of processes."""

    AUTO_MODEL_CLASS: Any
    _model: Any
    asked: Sequence[Any] = ()
    """Requests that are being answered (``CachedModel``)."""

    def __init__(self, **options: Any) -> None:
        """Load the model; the arguments are those of ``HFLM``.

        Raises:
            ConfigError: The checkpoint or the adapter lacks weights, or the adapter does not fit its base model.
        """
        given = options["pretrained"]
        with nullcontext() if isinstance(given, str) else temporarily(given, tie_weights=_leave_ties):
            super().__init__(**options)
        # lm-eval 0.4.13 sets these only on several GPUs of one machine; otherwise each process asks every question.
        if (accelerator := getattr(self, "accelerator", None)) is not None:
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        if self.backend == "causal":
            _drop_suffix(self.tokenizer)

    def _create_model(self, *args: Any, **options: Any) -> None:
        # Overridden (lm-eval 0.4.13): weights that a checkpoint or an adapter lacks would be random.
        complete = SimpleNamespace(from_pretrained=partial(_load_complete, self.AUTO_MODEL_CLASS))
        # lm-eval would cut the rows of a padded vocabulary from the base of an adapter, and accept one without weights.
        adapter = options.pop("peft", None)
        with temporarily(self, AUTO_MODEL_CLASS=complete):
            super()._create_model(*args, **options)
        if adapter is not None:
            self._model = load_adapter(self._model, adapter, key="model_name_or_path", on_any_base=True)
        self._model.tie_weights = _leave_ties
        # lm-eval would generate with the stop tokens of the base, which may lack the one that ends a trained turn.
        if adapter is not None and (Path(adapter) / GENERATION_CONFIG_NAME).is_file():
            self._model.generation_config = GenerationConfig.from_pretrained(adapter)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the value of this rank in the place of every rank's."""
        # Overridden (lm-eval 0.4.13): ranks agree on the size of batches and pad to the same number of them, which only
        # a sharded model needs. They would wait for ever for a rank whose answers are all in the cache.
        return tensor.reshape(-1).repeat(self.world_size)

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        # Overridden (lm-eval 0.4.13): for written answers and whole texts it searches with rows of all positions, of
        # which a GPU may hold one or none: Llama 3.1 has 131,072.
        longest = self.max_length
        if not requests:
            lengths = (
                len(self.tok_encode(text)) + sum(find_answer_length(self, settings) for settings in rest)
                for text, *rest in (request.args for request in self.asked)
            )
            longest = min(longest, max(lengths, default=longest))
        with temporarily(self, _max_length=longest):
            size: int = super()._detect_batch_size(requests, pos)
        return size

    def _model_generate(self, context: Any, *args: Any, **kwargs: Any) -> Any:
        # Overridden (lm-eval 0.4.13) to verify the logits, which it does not return.
        has_nan: list[torch.Tensor] = []  # On the device, so that a token costs no synchronisation.

        def check(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            has_nan.append(scores.isnan().any())
            return scores

        processors: Any = LogitsProcessorList([check])
        try:
            tokens = super()._model_generate(context, *args, logits_processor=processors, **kwargs)
        except (TypeError, ValueError) as error:  # As for an unknown or invalid argument of `generate`.
            found = f"the model cannot generate with these settings: {str(error).splitlines()[0]}"
            raise ConfigError(Problem("gen_kwargs", found, "correct them, or the task's generation_kwargs")) from error
        if has_nan and torch.stack(has_nan).any():
            raise _build_logits_error()
        return tokens


def _leave_ties() -> None:
    """Replace ``tie_weights`` of a loaded model, whose weights are tied.

    lm-eval 0.4.13 calls it again, and transformers 5.23 fails if an adapter has trained copies of tied embeddings.
    """


def _drop_suffix(tokenizer: Any) -> None:
    """Make a tokenizer append no token to a text.

    lm-eval 0.4.13 would predict the answer after the end of text that follows the prompt, and score the wrong tokens.
    """
    bare, whole = (tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (False, True))
    prefix = find_prefix(bare, whole)
    if tokenizer.is_fast and len(whole) > len(prefix) + len(bare):
        tokens = tokenizer.convert_ids_to_tokens(prefix)
        named = list(zip(tokens, prefix, strict=True))
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing([*tokens, "$A"], special_tokens=named)


def _load_complete(auto_class: Any, name: str, **options: Any) -> Any:
    """Load a model by an auto class of transformers.

    Raises:
        ConfigError: The checkpoint lacks weights of the model.
        OSError: Its weights are no safetensors.
    """
    download(name, options.get("revision"), WEIGHTS, INDEX)
    with without_report():
        model, info = auto_class.from_pretrained(name, **options, use_safetensors=True, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        found = f"the checkpoint of {name} lacks {len(missing)} weights, such as {missing[0]}"
        remedy = f"name a complete {type(model).__name__} checkpoint"
        raise ConfigError(Problem("model_name_or_path", found, remedy))
    return model


def _build_logits_error() -> DataError:
    return DataError(Problem("model_name_or_path", "its logits are not finite", "no score would mean anything"))


class _Answers(dict[str, Any]):
    """Answers by the hash of a request: those of all processes of earlier launches, and new ones, which are saved."""

    def __init__(self, path: Path, others: Iterable[Path]) -> None:
        super().__init__()
        for row in chain.from_iterable(map(read_lines, others)):
            self.update(row or {})  # A kill may have truncated a line.
        # Line-buffered: a kill loses no answer.
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def __setitem__(self, key: str, answer: Any) -> None:
        numbers = answer if isinstance(answer, tuple | list) else (answer,)
        if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
            raise _build_logits_error()
        super().__setitem__(key, answer)
        # The first line feed ends a truncated line.
        self._file.write(f"\n{json.dumps({key: answer})}\n")

    def commit(self) -> None:
        """Do nothing: ``CachingLM`` calls this method of a database."""

    def close(self) -> None:
        self._file.close()


class CachedModel(CachingLM):  # type: ignore[misc]
    """lm-eval's ``CachingLM``, with answers stored as JSON Lines instead of pickles, which execute code when read.

    Answers that are not finite are refused, requests that leave no room for an answer are refused before they are
    sent, and any exception caused by the response of an endpoint becomes a ``ConfigError``.

    Args:
        model: lm-eval's model.
        path: File of this process's answers.
        others: Files of an earlier launch, also with another number of processes.
        endpoint: Address of the endpoint; ``None`` for a local model.

    Attributes:
        has_failed: Whether the model raised an exception.
    """

    def __init__(self, model: Any, path: Path, others: Sequence[Path] = (), endpoint: str | None = None) -> None:
        self.lm, self.cache_db, self._endpoint, self.has_failed = model, str(path), endpoint, False
        self.dbdict = _Answers(path, others)
        model.set_cache_hook(CacheHook(self))

    def close(self) -> None:
        """Close the file, and wait for all ranks, so that the first one may delete the files."""
        self.dbdict.close()
        self.lm.barrier()

    def __getattr__(self, name: str) -> Any:
        # `CachingLM` implements every method of the model by `__getattr__`, which looks up the cache first.
        method = super().__getattr__(name)
        if name not in _REQUEST_METHODS:
            return method

        def answer(requests: Sequence[Any]) -> Any:
            for request in requests:
                _verify_room(self.lm, request.args)
            try:
                with temporarily(self.lm, asked=requests):
                    return method(requests)
            except UserError:
                raise
            except Exception as error:  # A response of an endpoint can break lm-eval's parsing anywhere.
                self.has_failed = True
                _raise_endpoint_error(self._endpoint, error)

        return answer


def _raise_endpoint_error(endpoint: str | None, error: Exception) -> NoReturn:
    """Raise a ``ConfigError`` for an exception caused by an endpoint; without one, ``error`` itself."""
    if endpoint is None:
        raise error
    status, _ = _read_status(error)
    remedy = "check that it serves this model, with log-probabilities of the prompt (echo) where tasks have choices"
    from aiohttp import ClientConnectionError, ClientPayloadError  # Of the extra `eval`.

    # aiohttp's errors of a closed connection are no `OSError`; an error status is one for requests only.
    is_down = status is None and isinstance(error, OSError | ClientConnectionError | ClientPayloadError)
    remedy = RESUME_REMEDY if is_down else choose_remedy(status, remedy)
    raise ConfigError(Problem("base_url", f"{endpoint} gave no usable answer: {_explain(error)}", remedy)) from error


def find_context_length(model: Any) -> int | None:
    """Return the longest prompt and choice together, in tokens, that are scored untruncated; ``None`` if unknown.

    Source: lm-eval 0.4.13, ``_loglikelihood_tokens`` of ``HFLM``, ``VLLM`` and ``TemplateAPI``, which differ.
    """
    if getattr(model, "tokenizer", None) is None or not hasattr(model, "max_length"):
        return None
    # HFLM does not feed the last token, which only has to be predicted; vLLM must generate one additional token.
    extra = {"HFLM": 1, "VLLM": -1}
    return int(model.max_length) + next((extra[c.__name__] for c in type(model).__mro__ if c.__name__ in extra), 0)


def is_cut(model: Any, arguments: Sequence[Any]) -> bool:
    """Return whether lm-eval truncates the start of a prompt; ``False`` for a chat endpoint, where it is unknown.

    Args:
        model: lm-eval's model.
        arguments: Arguments of lm-eval's request: a prompt and a choice, or a prompt and generation settings.
    """
    room = find_context_length(model)
    if room is None or len(arguments) < 2:  # A rolling request, whose only argument is a text, is read in windows.
        return False
    prompt, rest = arguments[:2]
    if isinstance(rest, str):
        # Compare bytes first: few prompts come near the limit, and tokenizing all of them again would be slow.
        may_exceed = prompt and _count_bytes(prompt + rest) > room
        return bool(may_exceed and sum(map(len, model._encode_pair(prompt, rest))) > room)
    available = int(model.max_length) - find_answer_length(model, rest)
    return _count_bytes(prompt) > available and len(model.tok_encode(prompt)) > available


def _verify_room(model: Any, arguments: Sequence[Any]) -> None:
    """Verify that a request leaves room for at least one token of its prompt.

    Raises:
        ConfigError: The choice, or the longest answer, takes all positions.
    """
    room = find_context_length(model)
    if room is None or len(arguments) < 2:
        return
    prompt, rest = arguments[:2]
    if isinstance(rest, str):
        length = 0 if _count_bytes(rest) <= room else len(model.tok_encode(rest, add_special_tokens=False))
    else:
        room, length = int(model.max_length), find_answer_length(model, rest)
    # At least one token of the prompt must remain, from which the first one of the choice is predicted.
    if length >= room:
        found = f"an answer of {length:,} tokens does not fit its {room:,} positions: {prompt[-60:]!r} ..."
        remedy = "leave the task out, or shorten its max_gen_toks by gen_kwargs"
        raise ConfigError(Problem("model_name_or_path", found, remedy))


def find_answer_length(model: Any, settings: Mapping[str, Any]) -> int:
    """Return the longest answer in tokens: of a task's generation settings, or by default of lm-eval's model."""
    default: Any = getattr(model, "max_gen_toks", None) or getattr(model, "_max_gen_toks", 256)
    return int(next((settings[name] for name in _LENGTHS if settings.get(name) is not None), default))


def _count_bytes(text: str) -> int:
    """Return an upper bound on the tokens of a text: each has at least one byte, and a tokenizer adds few more."""
    return len(text.encode(errors="replace")) + 4
