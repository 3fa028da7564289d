"""Content keys of prepared sets, computed without importing or loading what prepares them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from recipes_lib.config.paths import expand_home
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.files import hash_file
from recipes_lib.shipped import find_shipped

TOKENIZER_FILES: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
)
"""Files of a model folder that make a tokenizer."""

_TOKENIZER_CLASS_FILES: Final = ("config.json", "*.py")
"""Files that may name its class, or be it."""

_PACKAGES: Final = ("jinja2", "tokenizers", "transformers")
_TOLD_BY_CONTENT: Final = {"dataset_name", "dataset_revision", "chat_template_path", "prepared_dir"}
"""Options that only say where something lies: what lies there is in the key instead, so moving it changes nothing."""


def collect_inputs(config: RecipeConfig, sources: Mapping[str, str]) -> dict[str, Any]:
    """Everything that decides the content of a prepared set, as JSON values; the key is their hash.

    Args:
        config: The run.
        sources: Fingerprint of the rows of each split.

    Raises:
        ConfigError: The tokenizer or the chat template cannot be found.
    """
    options = dataclasses.asdict(config.data) | dataclasses.asdict(config.tokens)
    template = read_chat_template(config)
    return {
        "sources": dict(sources),
        "options": {name: value for name, value in options.items() if name not in _TOLD_BY_CONTENT},
        "trust_remote_code": config.model.trust_remote_code,
        "chat_template": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
        "tokenizer": _hash_files(find_tokenizer_folder(config), (*TOKENIZER_FILES, *_TOKENIZER_CLASS_FILES)),
        "code": _hash_files(Path(__file__).parents[1], ("**/*.py",)),
        "versions": {package: version(package) for package in _PACKAGES},
    }


def find_tokenizer_folder(config: RecipeConfig) -> Path:
    """The folder with the files of the run's tokenizer; those of a Hub model are fetched into its cache.

    Raises:
        ConfigError: There is no such folder or Hub model, or it has no tokenizer.
    """
    own = config.model.tokenizer_name_or_path
    name = own or str(config.model.model_name_or_path)
    option = "tokenizer_name_or_path" if own else "model_name_or_path"
    folder = Path(name) if Path(name).is_dir() else _fetch(config, option, name)
    if not _list_files(folder, TOKENIZER_FILES):
        raise _missing(
            config, option, f"{name} has no tokenizer files", "name the tokenizer with tokenizer_name_or_path"
        )
    return folder


def read_chat_template(config: RecipeConfig) -> str | None:
    """The text of ``chat_template_path``; ``None`` when the tokenizer's own template is used.

    Raises:
        ConfigError: The file cannot be read as text.
    """
    path = config.tokens.chat_template_path
    try:
        return None if path is None else find_shipped(Path(expand_home(path))).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        found = f"the chat template {path} cannot be read: {reason}"
        raise _missing(config, "chat_template_path", found, "name a Jinja file") from error


def _fetch(config: RecipeConfig, option: str, name: str) -> Path:
    from huggingface_hub import snapshot_download  # a tokenizer on disk does not need it

    is_models = option == "model_name_or_path"
    revision = config.model.tokenizer_revision or (config.model.model_revision if is_models else None)
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=[*TOKENIZER_FILES, *_TOKENIZER_CLASS_FILES])
        )
    except (OSError, ValueError) as error:  # not a repository id, no such repository, no network and not in the cache
        reason = str(error).splitlines()[0]
        raise _missing(config, option, f"no folder and no Hub model {name!r}: {reason}", "check the name") from error


def _list_files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _hash_files(folder: Path, patterns: tuple[str, ...]) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): hash_file(path) for path in _list_files(folder, patterns)}


def _missing(config: RecipeConfig, option: str, found: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(config.provenance.get(option, option), found, remedy))
