"""Loading of models and tokenizers from a folder or the Hub, and verification that they belong together."""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import PartialState
from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.dynamic_module_utils import get_relative_imports
from transformers.utils.hub import cached_file
from transformers.utils.logging import EmptyTqdm, set_tqdm_hook

from recipes_lib.config.paths import find_shipped
from recipes_lib.config.schema import ModelConfig, QuantizationConfig, RecipeConfig, TokensConfig
from recipes_lib.environment import explain_refusal_of_hub, go_offline_unless_reachable
from recipes_lib.errors import ConfigError, DataError, Problem, UserError, explain_refusal, iterate_causes, list_first
from recipes_lib.files import read_json, read_record, read_text
from recipes_lib.models.model_files import INDEX, MODEL_SHARDS, POLICY, SENTENCEPIECE, WEIGHTS, find_damage, is_model
from recipes_lib.models.parallel.zero3 import register_gather_hooks
from recipes_lib.models.quantization import (
    build_dequantization,
    check_quantization,
    find_unquantized,
    keep_differentiable,
)
from recipes_lib.models.structure import find_dropped_modules, freeze_outside_text, verify_causal, verify_settings

logger = logging.getLogger(__name__)

_NAMES_CODE: Final = ("config.json", "tokenizer_config.json")
"""Files with an ``auto_map``, which maps auto classes to classes of the repository's own modules."""
SPECIAL_TOKENS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
_REASONS: Final[Sequence[tuple[type[Exception] | str, str, str]]] = (
    (GatedRepoError, "is gated", "accept its terms at https://huggingface.co/{name}, then `hf auth login`"),
    (RepositoryNotFoundError, "is no folder, and not on the Hub or private", "check the spelling, or `hf auth login`"),
    (RevisionNotFoundError, "has no such revision", "check model_revision and tokenizer_revision"),
    (LocalEntryNotFoundError, "is no folder, nor cached; the Hub is out of reach", "`hf download {name}` while online"),
    (HFValidationError, "is neither a folder nor a Hub id", "check the path"),
    ("trust_remote_code", "has its own code", "review it; set trust_remote_code: true, model_revision to its commit"),
    ("unable to mmap", "has a weights file that is larger than the memory of this machine", "use one with more"),
    (
        "safetensors",
        "has no whole safetensors weights, and pickled ones could run code",
        "convert them where you trust them: from_pretrained, then save_pretrained",
    ),
    (
        "Should have a `model_type` key",
        "has no config.json of a model",
        "`recipes merge` an adapter first, or to train it further name its base here and it in adapter_name_or_path",
    ),
    ("backend tokenizer", "has no tokenizer files", "copy them beside it, or set tokenizer_name_or_path"),
    (
        "AutoModelForSequenceClassification",
        "is of an architecture without a score head in transformers",
        "choose a model that has one, such as of Llama, Qwen, Mistral, Gemma, Phi or OPT",
    ),
)
"""Exception in the chain of causes or substring of its message, the problem, and the remedy."""


def load_tokenizer(config: ModelConfig, tokens: TokensConfig) -> PreTrainedTokenizerBase:
    """Load the fast tokenizer, with the configured end-of-text token, padding token and chat template.

    A tokenizer without a padding token pads with its end-of-text token, since padding is identified by length, never by
    token id. No tokens are added, so that the model is never resized.

    Args:
        config: Name and revision of the tokenizer, by default those of the model.
        tokens: Configured special tokens and chat template.

    Raises:
        ConfigError: The tokenizer cannot be loaded, is not a fast one, or lacks an end-of-text token or a configured
            token; or the chat template cannot be read.
    """
    own = config.tokenizer_name_or_path
    key, name = ("tokenizer_name_or_path", own) if own else ("model_name_or_path", str(config.model_name_or_path))
    revision = config.tokenizer_revision or (None if own else config.model_revision)
    verify_remote_code(config)
    with explained(key, name):
        download(name, revision, "tokenizer.json", "tokenizer_config.json", SENTENCEPIECE)
        download(name, revision, "special_tokens_map.json", "chat_template.jinja")
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name,
            revision=revision,
            trust_remote_code=config.trust_remote_code,
            # Beside mistral-common, which vLLM installs, transformers would prefer a tekken.json: not a fast tokenizer.
            mistral_format=False,
        )
    problems = []
    if not tokenizer.is_fast:
        remedy = "use a model with a tokenizer.json: the loss mask needs the offsets of a fast tokenizer"
        problems.append(Problem(key, f"the tokenizer of {name} is not a fast one", remedy))
    vocabulary = tokenizer.get_vocab()
    for kind, token in (("eos_token", tokens.eos_token), ("pad_token", tokens.pad_token)):
        if token is not None and token not in vocabulary:
            remedy = f"name one that it has, such as {', '.join(tokenizer.all_special_tokens[:5])}"
            problems.append(Problem(kind, f"the tokenizer of {name} has no token {token!r}", remedy))
        elif token is not None:
            setattr(tokenizer, kind, token)
    if tokenizer.eos_token is None and tokens.eos_token is None:
        problems.append(Problem("eos_token", f"the tokenizer of {name} has no end-of-text token", "set eos_token"))
    problems += _set_chat_template(tokenizer, tokens.chat_template_path, name)
    if problems:
        raise ConfigError(*problems)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _set_chat_template(tokenizer: PreTrainedTokenizerBase, path: str | None, name: str) -> Iterator[Problem]:
    """Set the chat template in a file, if one is configured; yield the problem if no template can be used."""
    if path is not None:
        try:
            tokenizer.chat_template = read_text(
                find_shipped(Path(path)), "chat_template_path", "name a Jinja file in UTF-8"
            )
        except ConfigError as error:
            yield from error.problems
    elif isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        names = ", ".join(sorted(tokenizer.chat_template))
        found = f"the tokenizer of {name} has chat templates without a default: {names}"
        remedy = "name a file with one of them, or save the tokenizer with it alone"
        yield Problem("chat_template_path", found, remedy)


def load_model_config(config: ModelConfig) -> tuple[PreTrainedConfig, GenerationConfig]:
    """Load the configuration and the generation configuration of a model, without weights.

    Raises:
        ConfigError: One of them cannot be loaded; or as ``verify_settings``.
    """
    verify_remote_code(config)
    name = str(config.model_name_or_path)
    with explained("model_name_or_path", name):
        model_config = AutoConfig.from_pretrained(name, **_load_options(config))
        try:
            generation_config = GenerationConfig.from_pretrained(name, revision=config.model_revision or "main")
        except OSError as error:  # Many models have no generation_config.json; transformers derives it in the same way.
            folder = find_model_folder(name, config.model_revision)
            # Damaged, or not sent: its stop tokens would be lost.
            if (folder and (folder / "generation_config.json").exists()) or explain_refusal_of_hub(error):
                raise
            generation_config = GenerationConfig.from_model_config(model_config)
        verify_settings("model_name_or_path", model_config)
    return model_config, generation_config


def choose_teacher(config: RecipeConfig) -> ModelConfig:
    """Return the configuration for loading the teacher, with its name, revision and dtype."""
    distillation = config.distillation
    return replace(
        config.model,
        model_name_or_path=distillation.teacher_model_name_or_path,
        model_revision=distillation.teacher_model_revision,
        dtype=distillation.teacher_dtype,
        tokenizer_name_or_path=None,
        tokenizer_revision=None,
    )


def load_causal_lm(
    config: ModelConfig,
    attn_implementation: str,
    quantization: BitsAndBytesConfig | None = None,
    *,
    model_class: Any = AutoModelForCausalLM,
    distribution: DistributedConfig | None = None,
) -> PreTrainedModel:
    """Load a causal language model in training mode, every weight from the checkpoint, in the master weights' dtype.

    Args:
        config: Name, revision and dtype of the model.
        attn_implementation: Attention kernel from ``choose_attention``.
        quantization: Result of ``build_quantization_config``; all linear layers except the output projection are
            quantised.
        model_class: Class from ``build_pipeline_stage_class``, to load the weights of one pipeline stage only.
        distribution: Result of ``build_distribution``; each rank reads its shards only.

    Raises:
        ConfigError: The model cannot be loaded, its weights are not safetensors, or a weight is missing, unexpected or
            of another shape than in the architecture; or as ``verify_causal``.
    """
    options: dict[str, Any] = {} if distribution is None else {"distributed_config": distribution}
    model, _ = load_pretrained(model_class, config, attn_implementation, quantization, **options)
    return model


def hide_progress_bars() -> Any:
    """Hide transformers' progress bars of loading and saving; those of downloads are kept.

    Returns:
        Argument of ``set_tqdm_hook`` that restores the previous state.
    """
    # ``disable_progress_bar`` hides those of the Hub too, without which a download of minutes looks like a hang.
    return set_tqdm_hook(lambda _, args, kwargs: EmptyTqdm(*args, **kwargs))  # type: ignore[no-untyped-call]


def verify_folder(name: str) -> None:
    """Raise a ``ConfigError`` for a folder that is no model: a checkpoint in shards or of RL, or with an adapter in it.

    Args:
        name: Folder; Hub ids pass.
    """
    folder, found = Path(name), ""
    parts = (MODEL_SHARDS, POLICY, f"{POLICY}.safetensors")
    if any((folder / part).exists() for part in parts) and not is_model(folder):
        found = f"{name} is a training checkpoint, not a model"
        remedy = f"run `recipes export {name} FOLDER`, and name FOLDER"
    elif all((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        # transformers would load the sum of both, and train nothing.
        found = f"{name} has an adapter beside the config.json of a model"
        remedy = f"to train their sum, run `recipes merge --adapter {name} --output FOLDER`, and name FOLDER; "
        remedy += "to train the model, move adapter_config.json elsewhere"
    if found:
        raise ConfigError(Problem("model_name_or_path", found, remedy))


def load_pretrained(
    auto_class: Any,
    config: ModelConfig,
    attn_implementation: str,
    quantization: BitsAndBytesConfig | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, set[str]]:
    """Load a model for any task as ``load_causal_lm``; also return the names of weights missing in its checkpoint.

    Modules outside the text model are frozen.

    Args:
        auto_class: Auto class of transformers, such as ``AutoModelForCausalLM``.
        config: Name, revision and dtype of the model.
        attn_implementation: Attention kernel from ``choose_attention``.
        quantization: As for ``load_causal_lm``.
        **options: ``may_lack``: names of weights that may be missing in the checkpoint; transformers initialises them.
            ``may_hold``: names of weights that the architecture does not have and that are ignored. Others are further
            arguments of ``from_pretrained``.

    Raises:
        ConfigError: As ``load_causal_lm``.
    """
    name = str(config.model_name_or_path)
    model_config, _ = load_model_config(config)
    verify_causal("model_name_or_path", model_config)
    if quantization and (faults := [*check_quantization(name, model_config, quantization)]):
        raise ConfigError(*faults)
    if quantization and PartialState().device.type == "cpu":
        # transformers' default for quantised weights is a GPU, also for a run on the CPU of a machine with one.
        options["device_map"] = {"": "cpu"}
    quantization_config = quantization or build_dequantization(model_config)
    options |= {"attn_implementation": attn_implementation, "quantization_config": quantization_config}
    model, missing = read_checkpoint(auto_class, config, **options)
    cautions = find_dropped_modules(model, model_config), quantization and find_unquantized(model)
    for caution in filter(None, cautions):
        logger.warning("%s: %s", name, caution)
    freeze_outside_text(model)
    register_gather_hooks(model)
    # transformers 5.23 no longer sets it; adapters record it as the revision of their base.
    model.config._commit_hash = find_commit(name, config.model_revision)
    keep_differentiable(model)
    # With a KV cache, transformers does not isolate packed documents; generate() has its own setting.
    model.config.use_cache, model.config.return_dict = False, True
    text = model.config.get_text_config()
    if getattr(text, "output_router_logits", False):
        # The loss head reads this attribute instead: with the key, transformers fails to continue padded prompts.
        model.has_router_loss, text.output_router_logits = True, False
    # from_pretrained returns the model in evaluation mode.
    model.train()
    return model, missing


def read_checkpoint(
    auto_class: Any,
    config: ModelConfig,
    /,  # Of ``from_pretrained``, `config` is an option.
    *,
    may_lack: Collection[str] = (),
    may_hold: Collection[str] = (),
    **options: Any,
) -> tuple[Any, set[str]]:
    """Return a model with the tensors of its checkpoint, and the names of missing ones; as ``load_pretrained``."""
    verify_remote_code(config)
    name = str(config.model_name_or_path)
    verify_folder(name)
    # Before loading: with an index whose names match no tensors, transformers allocates tens of GB before it fails.
    if damage := find_damage(Path(name)):
        raise ConfigError(Problem("model_name_or_path", f"{name}: {damage}", "save or download the model again"))
    with explained("model_name_or_path", name), without_report():
        download(name, config.model_revision, WEIGHTS, INDEX)
        model, info = auto_class.from_pretrained(
            **{"pretrained_model_name_or_path": name, "use_safetensors": True, **options},
            dtype=config.dtype,
            # Other shapes are reported below, together with missing and unexpected weights.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **_load_options(config),
        )
    if conversions := getattr(model, "_weight_conversions", None):
        # Under ZeRO-3, transformers 5.23 also keeps unused ones, which saving reverts: the text model of Qwen 3.5 would
        # get the names of its multimodal model, and Gemma 3 `language_model.model.model`.
        model._weight_conversions = [one for one in conversions if one.was_used()]
    if problems := _list_problems(name, model, info, may_lack, may_hold):
        quantized = [*check_quantization(name, load_model_config(config)[0], QuantizationConfig())]
        raise ConfigError(*(quantized or problems))
    return model, set(info["missing_keys"])


def _list_problems(
    name: str, model: Any, info: Any, may_lack: Collection[str], may_hold: Collection[str]
) -> list[Problem]:
    """Return the differences between the tensors of a checkpoint and those of its architecture."""
    architecture, remedy = type(model).__name__, f"name a complete {type(model).__name__} checkpoint"
    # Weights of other pipeline stages are unexpected here, but not in the whole model.
    elsewhere: frozenset[str] = getattr(model, "whole_names", frozenset())
    mismatched = {f"{key} {tuple(found)} for {tuple(wanted)}" for key, found, wanted in info["mismatched_keys"]}
    # transformers does not tie weights that differ in the checkpoint, and other programs ignore one of them.
    tied = set() if elsewhere else {*model.get_expanded_tied_weights_keys(all_submodels=True)}
    own = f"the configuration of {name} ties weights to others from which they differ in its checkpoint:"
    return [
        Problem("model_name_or_path", f"{found} {list_first(sorted(keys))}", remedy)
        for found, keys, remedy in (
            (f"the checkpoint of {name} lacks", set(info["missing_keys"]) - set(may_lack), remedy),
            (f"{architecture} has no weights called", set(info["unexpected_keys"]) - set(may_hold) - elsewhere, remedy),
            (f"the checkpoint of {name} has other shapes:", mismatched, remedy),
            (own, tied - {*model.all_tied_weights_keys}, "write tie_word_embeddings: false into its config.json"),
        )
        if keys
    ]


def find_model_folder(name: str, revision: str | None) -> Path | None:
    """Return the folder of a loaded model: its own, or for a model of the Hub its snapshot in the local cache."""
    if Path(name).is_dir():
        return Path(name)
    cached = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def find_commit(name: str, revision: str | None) -> str | None:
    """Return the Hub commit of a loaded model, from the local cache; ``None`` for a folder.

    Args:
        name: Hub id or folder.
        revision: Requested commit, tag or branch.
    """
    folder = None if Path(name).is_dir() else find_model_folder(name, revision)
    return None if folder is None else folder.name  # snapshots/<commit>


def check_agreement(
    config: PreTrainedConfig,
    generation_config: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
) -> list[Problem]:
    """Return contradictions between model and tokenizer: embedding rows, start token, sequence length.

    End tokens are not compared, because ``set_stop_tokens`` adds those of training.

    Args:
        config: Configuration of the model.
        generation_config: Generation configuration of the model.
        tokenizer: Tokenizer from ``load_tokenizer``.
        max_length: Maximum length of a row in tokens.
    """
    text = config.get_text_config()
    problems = []
    missing, _ = find_tokens_without_row(config, tokenizer)
    if missing:
        tokens = list_first(sorted(missing))
        found = f"the model has {text.vocab_size} embedding rows, none for {tokens} of the tokenizer"
        problems.append(
            Problem("tokenizer_name_or_path", found, "use the model's own tokenizer, or resize the model first")
        )
    # Either configuration may give the start token; some checkpoints update only one of them.
    starts = _ids(generation_config.bos_token_id) | _ids(text.bos_token_id)
    if starts and tokenizer.bos_token_id is not None and tokenizer.bos_token_id not in starts:
        names = " or ".join(repr(tokenizer.convert_ids_to_tokens(token_id)) for token_id in sorted(starts))
        found = f"the model starts with {names}, the tokenizer with {tokenizer.bos_token!r}"
        problems.append(Problem("tokenizer_name_or_path", found, "use the model's own tokenizer"))
    positions = getattr(text, "max_position_embeddings", None)
    if max_length is not None and positions is not None and max_length > positions:
        found = f"{max_length} tokens are more than the {positions} positions of the model"
        problems.append(Problem("max_length", found, f"set it to {positions} at most, in RL lower response_length too"))
    return problems


def find_tokens_without_row(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], list[str]]:
    """Return the tokens without an embedding row: required ones, and optional ones.

    Special tokens are optional, such as an image token for text-only data, unless they start, end or pad a row, or
    occur in the chat template.

    Args:
        config: Configuration of the model.
        tokenizer: Tokenizer from ``load_tokenizer``.
    """
    num_rows, template = config.get_text_config().vocab_size, str(tokenizer.chat_template)
    roles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    added = tokenizer.added_tokens_decoder
    missing: list[str] = []
    spare: list[str] = []
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if token_id >= num_rows:
            is_spare = token_id in added and added[token_id].special and token_id not in roles and token not in template
            (spare if is_spare else missing).append(token)
    return missing, spare


def describe_spare_tokens(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a clause about optional tokens without an embedding row; empty if there are none."""
    _, spare = find_tokens_without_row(config, tokenizer)
    return f"; no text may contain {list_first(sorted(spare))}, for which the model has no embedding" if spare else ""


def describe_ids_beyond(num_ids: int, *configs: PreTrainedConfig | GenerationConfig) -> str:
    """Return a clause about special tokens of configurations with ids of ``num_ids`` or more; empty without such."""
    ids = [
        (name, token_id) for one in configs for name in SPECIAL_TOKENS for token_id in _ids(getattr(one, name, None))
    ]
    # Published files also have strings there, which transformers ignores.
    beyond = {f"{name} {token_id}" for name, token_id in ids if isinstance(token_id, int) and token_id >= num_ids}
    return f"there are {num_ids:,} token ids, and none is {list_first(sorted(beyond))}" if beyond else ""


def download(name: str, revision: str | None, *files: str) -> None:
    """Download optional files: transformers 5.23 takes those that the Hub refuses (too many requests) for missing."""
    if not (Path(name).is_dir() or constants.HF_HUB_OFFLINE):
        for file in files:
            with suppress(RemoteEntryNotFoundError):
                hf_hub_download(name, file, revision=revision)


def _load_options(config: ModelConfig) -> dict[str, Any]:
    return {"revision": config.model_revision, "trust_remote_code": config.trust_remote_code}


@contextmanager
def explained(key: str, name: str) -> Iterator[None]:
    """Convert errors of transformers and the Hub to a ``ConfigError``, without retries if the Hub is unreachable.

    Args:
        key: Configuration key that named the model.
        name: Folder or Hub id.
    """
    go_offline_unless_reachable(name)
    try:
        yield
    # Neither is caused by the loaded files.
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Corrupt files raise any type; the tokenizers library raises a bare Exception.
        raise ConfigError(Problem(key, *_explain(name, error))) from error


@contextmanager
def without_report() -> Iterator[None]:
    """Suppress transformers' bars, and its report of missing and unexpected weights, which the caller checks."""
    previous = hide_progress_bars()
    loader = logging.getLogger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    loader.addFilter(is_other)
    try:
        yield
    finally:
        loader.removeFilter(is_other)
        set_tqdm_hook(previous)


def _explain(name: str, error: Exception) -> tuple[str, str]:
    """Return the problem and its remedy."""
    if name.endswith(".gguf") or (any(Path(name).glob("*.gguf")) and not (Path(name) / "config.json").exists()):
        return f"{name} is in llama.cpp's format, GGUF", "name the safetensors model that it was converted from"
    # transformers wraps exceptions of huggingface_hub in OSError.
    if refusal := explain_refusal_of_hub(error):
        return f"{name}: {refusal[0]}", refusal[1]
    causes, is_offline = list(iterate_causes(error)), constants.HF_HUB_OFFLINE and not Path(name).is_dir()
    for kind, found, remedy in _REASONS:
        if kind in str(error) if isinstance(kind, str) else any(isinstance(cause, kind) for cause in causes):
            if kind == "safetensors" and is_offline:
                found, remedy = "is cached without its weights, and offline", "`hf download {name}` while online"
            return f"{name} {found}", remedy.format(name=name)
    folder = Path(name) if Path(name).exists() else find_model_folder(name, None) or Path(name)
    # The tokenizers library does not name the file that it cannot read.
    for path in () if ".json" in str(error) else sorted(folder.glob("*.json")):
        try:
            read_json(path)
        except DataError as damage:
            return f"{path} {damage.problems[0].found}", "write or download it again"
        if path.read_bytes().startswith(codecs.BOM_UTF8):
            return f"{path} begins with a byte order mark", "save it in UTF-8 without one"
    # Such as a full disk of the Hub's cache.
    exhausted = explain_refusal(error)
    remedy = f"check that it is a complete model; if it is of the Hub, `hf download {name} --force-download`"
    return f"{name} cannot be loaded: {_first_line(error)}", exhausted.remedy if exhausted else remedy


def _first_line(error: Exception) -> str:
    first, _, rest = str(error).strip().partition("\n")
    # Validation errors give the reason on the second line.
    words = f"{first} {rest.strip().partition(chr(10))[0]}" if first.rstrip().endswith(":") else first
    return words if isinstance(error, OSError | ValueError) and words else f"{type(error).__name__} {words}".strip()


def _ids(token_id: int | list[int] | None) -> set[int]:
    return {one for one in tree_leaves(token_id) if one is not None}  # Untrusted files nest lists.


def verify_remote_code(config: ModelConfig) -> None:
    """Require a pinned commit for code from the Hub, so that it can be reviewed.

    Raises:
        ConfigError: With ``trust_remote_code``, a repository has no pinned commit; or its ``auto_map`` refers to
            another repository, whose latest commit transformers would run.
    """
    if not config.trust_remote_code:
        return
    repositories = [(str(config.model_name_or_path), "model_revision", config.model_revision)]
    if config.tokenizer_name_or_path is not None or config.tokenizer_revision is not None:
        name = config.tokenizer_name_or_path or str(config.model_name_or_path)
        repositories.append((name, "tokenizer_revision", config.tokenizer_revision))
    for name, key, revision in repositories:
        is_commit = re.fullmatch(r"[0-9a-f]{40}", revision or "") is not None
        if not is_commit and not Path(name).is_dir():
            found = f"the code of {name} would run at an unpinned version"
            remedy = f"set {key} to the 40-digit commit that you have reviewed"
            raise ConfigError(Problem("trust_remote_code", found, remedy))
        for other in sorted(set(_list_owners(name, revision)) - {name}):
            found = f"{name} runs code of another repository, {other}, at an unpinned version"
            remedy = f"put the reviewed code into a copy of {name}, and remove `{other}--` from its `auto_map`"
            raise ConfigError(Problem("trust_remote_code", found, remedy))


def list_code(folder: Path) -> set[str]:
    """Return the code files of a folder that its configurations refer to, with their relative imports."""
    references = [one for file in _NAMES_CODE for one in _list_references(folder / file) if "--" not in one]
    waiting = {f"{reference.split('.')[0]}.py" for reference in references}
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found and (folder / name).is_file():
            found.add(name)
            waiting |= {f"{module}.py" for module in get_relative_imports(folder / name)}
    return found


def _list_owners(name: str, revision: str | None) -> Iterator[str]:
    """Yield the other repositories whose code a repository or folder refers to."""
    for file in _NAMES_CODE:
        try:
            path = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError):
            continue  # Loading reports the reason.
        for reference in _list_references(Path(path)) if path else ():
            if "--" in reference:
                yield reference.split("--")[0]


def _list_references(path: Path) -> Iterator[str]:
    """Yield the code references of a configuration, such as ``modeling.Model``; none if it is unreadable."""
    try:
        content = read_record(path)
    except DataError:
        return  # Loading reports the reason.
    # Nested: ``AutoTokenizer`` maps to a list of a slow and a fast class.
    yield from (leaf for leaf in tree_leaves(content.get("auto_map")) if isinstance(leaf, str))
