"""Files of a saved model or adapter, and their integrity. Imports no torch, because commands list files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from recipes_lib.errors import DataError
from recipes_lib.files import read_record

_WEIGHTS: Final = ("model*.safetensors", "adapter_model*.safetensors")
_LFS: Final = b"version https://git-lfs"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
MODEL_SHARDS: Final = "model_shards"
"""Folder of the weights in a checkpoint of FSDP2, tensor or pipeline parallelism, which transformers does not read."""
POLICY: Final = "policy"
"""Name of the policy's weights in a checkpoint of RL: a safetensors file, or a folder with shards."""
TEMPLATES: Final = "additional_chat_templates"
"""Folder of a tokenizer's chat templates besides the default one."""
SENTENCEPIECE: Final = "tokenizer.model"
MODEL_FILES: Final = (
    *(*_WEIGHTS, INDEX, "config.json", "adapter_config.json", "generation_config.json", "reward_scale.json"),
    *("chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.model"),
)
"""Patterns of the files that Hugging Face tools need to load a model or an adapter."""


def list_model_files(folder: Path) -> list[str]:
    """Return the names of the model's files in a folder, without subfolders."""
    return sorted({path.name for pattern in MODEL_FILES for path in folder.glob(pattern) if path.is_file()})


def find_sentencepiece(keys: Mapping[str, Any]) -> Path | None:
    """Return the SentencePiece model of a loaded tokenizer; ``None`` if it has none, or its folder was deleted.

    Args:
        keys: Names and revisions of model and tokenizer by their keys; others are ignored.
    """
    # Slow to import, and not needed to list files.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    own = keys.get("tokenizer_name_or_path")
    name = str(own or keys.get("model_name_or_path"))
    revision = str(keys.get("tokenizer_revision") or (None if own else keys.get("model_revision")) or "main")
    with suppress(HFValidationError):  # Of a deleted folder.
        is_local = Path(name).is_dir()
        file = Path(name, SENTENCEPIECE) if is_local else try_to_load_from_cache(name, SENTENCEPIECE, revision=revision)
        if isinstance(file, str | Path) and Path(file).is_file():
            return Path(file)
    return None


def is_model(folder: Path) -> bool:
    """Return whether a folder has a configuration and safetensors weights of a model or an adapter."""
    has_config = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    return has_config and bool(_list_weights(folder))


def find_missing(folder: Path, names: Iterable[str]) -> str | None:
    """Return what is missing or damaged in a saved model; ``None`` if it is complete.

    Args:
        folder: Folder of the model.
        names: Names of its files when it was saved (``list_model_files``).
    """
    for name in names:
        if not (folder / name).is_file():
            return f"{name} is missing"
    return find_damage(folder) if is_model(folder) else "there are no weights with a configuration"


def find_damage(folder: Path) -> str | None:
    """Return the damage of a model's weights, such as a missing shard or a truncated file; ``None`` if there is none.

    Only headers are read, since saving has verified every tensor.
    """
    try:
        names = _list_read(folder)
    except DataError as error:
        return str(error)
    for name in sorted(names):
        try:
            with (folder / name).open("rb") as file:
                # A clone without Git LFS has small text files in place of the weights.
                if file.read(len(_LFS)) == _LFS:
                    return f"{name} is a Git LFS pointer: run git lfs pull"
            if not _read_shapes(folder / name):
                return f"{name} holds no tensor"
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, SafetensorError) as error:
            return f"{name} cannot be opened: {error}"
    return None


def read_header_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shape of every tensor of an undamaged model by name, from headers; empty without safetensors."""
    files = (folder / name for name in _list_read(folder) if not name.startswith("adapter_"))
    return {name: shape for file in files for name, shape in _read_shapes(file).items()}


def _read_shapes(file: Path) -> dict[str, list[int]]:
    # framework="numpy" does not import torch.
    with safe_open(file, framework="numpy") as tensors:
        return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 (no mapping)


def _list_read(folder: Path) -> set[str]:
    """Return the names of the weight files of a folder that transformers reads, existing or not."""
    weights, index = _list_weights(folder), folder / INDEX
    adapters = {name for name in weights if name.startswith("adapter_")}
    # transformers ignores other shards and indices, which an earlier save may have left.
    if WEIGHTS in weights:
        return {WEIGHTS, *adapters}
    if index.is_file():
        return {*map(str, read_record(index, {"weight_map": dict})["weight_map"].values()), *adapters}
    return weights


def _list_weights(folder: Path) -> set[str]:
    return {path.name for pattern in _WEIGHTS for path in folder.glob(pattern)}
