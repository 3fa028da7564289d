"""Verification of saved weights: files are reopened, and every tensor is compared with its expected shape."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from recipes_lib.config.schema import ModelConfig
from recipes_lib.errors import DataError
from recipes_lib.files import read_record
from recipes_lib.models.loading import explained, load_model_config, read_checkpoint
from recipes_lib.models.model_files import INDEX, WEIGHTS, read_header_shapes


class BrokenSaveError(RuntimeError):
    """Saved weights differ from the trained ones; the folder must not be used."""


def read_shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    """Return the shape of every parameter by name, tied ones once; of sharded weights the full shape."""
    # ZeRO-3 replaces the data of a partitioned parameter by an empty tensor; a DTensor has the full shape.
    return {name: getattr(tensor, "ds_shape", tensor.shape) for name, tensor in model.named_parameters()}


def read_published_shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Return ``read_shapes`` with the tensor names of ``save_pretrained``.

    They differ from parameter names where transformers fuses tensors on loading, as in mixture-of-experts models.
    """
    empty = {name: torch.empty(shape, device="meta") for name, shape in read_shapes(model).items()}
    return {name: tensor.shape for name, tensor in revert_weight_conversion(model, empty).items()}


def verify_weights(folder: Path, expected: Mapping[str, torch.Size | None], weights: str = WEIGHTS) -> int:
    """Reload saved weights, verify them, and return their number of parameters.

    Args:
        folder: Folder with the file ``weights``, or with shards and their index.
        expected: Shape of each required tensor, ``None`` for any shape; tied tensors once.
        weights: Name of the weights file.

    Raises:
        BrokenSaveError: A file or a tensor is missing, or a tensor has another shape, is empty or not finite; the
            message lists them all.
        OSError: The system cannot open a file, as with too many open files or a failing disk.
    """
    try:
        names = _list_files(folder, weights)
    except DataError as error:
        raise BrokenSaveError(f"{folder} cannot be opened again: {error}") from error
    unread: list[str] = []
    faults: list[str] = []
    found: set[str] = set()
    num_parameters = 0
    for file in names:
        try:
            (folder / file).open("rb").close()  # safetensors 0.8 says of any failure that there is no such file.
            with safe_open(folder / file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                    tensor = tensors.get_tensor(name)
                    found.add(name)
                    num_parameters += tensor.numel()
                    fault = _find_fault(tensor, expected.get(name))
                    faults += [f"{name} {fault}"] if fault else []
        except FileNotFoundError:
            unread.append(f"{file} is missing")
        except SafetensorError as error:
            unread.append(f"{file} cannot be opened again: {error}")
    # Compared with the files rather than the index, which can name tensors that no file has. Those of a file that is
    # not read are missing for this reason.
    faults += [f"{name} is missing" for name in expected if name not in found and not unread]
    if faults := unread + faults:
        raise BrokenSaveError(f"{folder}: " + "; ".join(faults))
    return num_parameters


def _find_fault(tensor: Tensor, shape: torch.Size | None) -> str | None:
    if tensor.numel() == 0:
        return "is empty"
    if shape is not None and tensor.shape != shape:
        return f"has the shape {tuple(tensor.shape)} and not {tuple(shape)}"
    return None if torch.isfinite(tensor).all() else "is not finite"


def _list_files(folder: Path, weights: str) -> list[str]:
    """Return the names of the files with weights: ``weights``, or the shards of the index if there is no whole file."""
    if (folder / INDEX).exists() and not (folder / weights).exists():
        return sorted(set(read_record(folder / INDEX, {"weight_map": dict})["weight_map"].values()))
    return [weights]


def verify_checkpoint(
    config: ModelConfig,
    auto_class: Any = AutoModelForCausalLM,
    *,
    may_lack: Collection[str] = (),
    may_hold: Collection[str] = (),
    **changes: Any,
) -> None:
    """Verify names and shapes of the tensors of a local checkpoint as ``load_pretrained``, which maps the names.

    Reads the headers of its files only. Passes what is not read: Hub ids, quantised checkpoints, those with code of
    their own, and folders without weights, because the machine of the run may have them.

    Args:
        config: Name of the model.
        auto_class: As for ``load_pretrained``.
        may_lack: As for ``load_pretrained``.
        may_hold: As for ``load_pretrained``.
        **changes: Values of the model's configuration that differ from its ``config.json``.

    Raises:
        ConfigError: As ``load_pretrained``, except for tied weights that differ.
    """
    folder = Path(str(config.model_name_or_path))
    shapes = read_header_shapes(folder)
    if not shapes and any(folder.glob("pytorch_model*.bin")):
        read_checkpoint(auto_class, config)  # Raises without opening them.
    model_config = load_model_config(config)[0] if shapes else None
    if model_config is None or any(hasattr(model_config, name) for name in ("quantization_config", "auto_map")):
        return
    model_config.update(changes)
    with explained("model_name_or_path", str(config.model_name_or_path)), torch.device("meta"):
        model = auto_class.from_config(model_config)
    # Not by the files themselves, which torch would map into memory: too much for a laptop. Auto classes need them.
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    source = {"pretrained_model_name_or_path": None, "config": model.config, "state_dict": tensors}
    read_checkpoint(type(model), config, may_lack=may_lack, may_hold=may_hold, **source, device_map="meta")


_NUM_SAMPLES: Final = 4096
"""Sampled bytes of a weight file, which detect other weights without reading a large model."""


def sample_weights(*models: Path | None) -> dict[str, str] | None:
    """Return a hash of sizes and samples of the weight files in folders; ``None`` if there is no such folder."""
    folders, digest = [model for model in models if model is not None and model.is_dir()], hashlib.sha256()
    for part in (part for folder in folders for part in sorted(folder.glob("*.safetensors"))):
        if not part.stat().st_size:  # An empty file, which cannot be mapped and which no model reads.
            continue
        content = np.memmap(part, mode="r")
        # An odd stride meets all bytes of numbers; training seldom changes the highest.
        digest.update(f"{part.name} {len(content)} ".encode() + content[:: len(content) // _NUM_SAMPLES | 1].tobytes())
    return {"fingerprint": digest.hexdigest()[:16]} if folders else None
