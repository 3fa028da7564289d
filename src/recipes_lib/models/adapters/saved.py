"""Metadata of a saved adapter: base model, compatibility, parametrisation."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils.hub import has_file

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.inference import unwrap_adapter
from recipes_lib.models.loading import explained

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"

TaskType = Literal["CAUSAL_LM", "SEQ_CLS"]

TAKEN_OUT_OF_WEIGHTS: Final = ("pissa", "olora")
"""Beginnings of the inits that leave the base without what they put into the adapter."""

_BASE = ".base_layer."


def find_adapter(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of a saved adapter, downloaded from the Hub if necessary; ``None`` if ``name`` is no adapter.

    Raises:
        ConfigError: It is on the Hub, and cannot be fetched.
    """
    with explained("model_name_or_path", name):
        if not has_file(name, ADAPTER_CONFIG, revision=revision):
            return None
        if Path(name).is_dir():
            return Path(name)
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.jinja", ADAPTER_WEIGHTS]))


class Base(NamedTuple):
    """Base model of an adapter, with the field names of ``ModelConfig``."""

    model_name_or_path: str
    model_revision: str | None


def read_base(folder: Path) -> Base:
    """Return the base model of an adapter from its configuration.

    Raises:
        ConfigError: The configuration cannot be read, or names no base.
    """
    with explained("model_name_or_path", str(folder)):
        settings = PeftConfig.from_pretrained(str(folder))
    if not settings.base_model_name_or_path:
        remedy = f"write its base into {ADAPTER_CONFIG}, as base_model_name_or_path"
        raise ConfigError(Problem("model_name_or_path", f"{folder} is an adapter that names no base model", remedy))
    return Base(settings.base_model_name_or_path, settings.revision)


def find_shareable(
    name: str, revision: str | None, base: PreTrainedConfig, *, is_quantized: bool
) -> tuple[Path | None, str]:
    """Find a saved reward model that can be loaded as an adapter on the weights of another model.

    Args:
        name: Folder or Hub id of the reward model.
        revision: Of a Hub model.
        base: Configuration of the other model, as it was loaded.
        is_quantized: Whether that is in a few bits; a reward model's scale was measured without.

    Returns:
        Its folder, or ``None``; and in words why not.

    Raises:
        ConfigError: As ``find_adapter``.
    """
    folder = find_adapter(name, revision)
    if folder is None:
        return None, f"{name} is no adapter"
    saved = PeftConfig.from_pretrained(str(folder))
    reasons = [found for found, _ in (*check_saved(saved, folder, "SEQ_CLS"), *check_base(saved, base))]
    if is_quantized:
        reasons.append("was measured on weights that are not quantised, and the policy's are")
    if others := set(getattr(saved, "modules_to_save", None) or ()) - {"score", "classifier"}:
        reasons.append(f"brings a whole {min(others)} of its own")
    return (None, f"{name} {reasons[0]}") if reasons else (folder, "")


def name_in_file(name: str) -> str:
    """Return the name of an adapter parameter in PEFT's file, without the adapter name.

    Source: PEFT's ``get_peft_model_state_dict``; ``tests/models/adapters/test_saved.py``.
    """
    plain = name.replace(".modules_to_save.default.", ".").replace(".default.", ".").removesuffix(".default")
    # DoRA's magnitudes are a module with one weight in the model, and a tensor in the file.
    return plain.removesuffix(".weight") if plain.endswith(".lora_magnitude_vector.weight") else plain


def restate_for_original_base(folder: Path, initial_factors: dict[str, Tensor]) -> None:
    """Convert a saved ``pissa`` or ``olora`` adapter so that it fits the original base weights.

    The base lost ``s B0 A0`` and gained ``s B A``: together ``s [B, -B0] [A; A0]``, an adapter of twice the rank at the
    same scale ``s``. Unlike PEFT's own conversion, it keeps DoRA's magnitudes and the fully trained modules.

    Args:
        folder: Of the saved adapter.
        initial_factors: ``A0`` and ``B0`` by their names in the file, as ``add_adapter`` left them on the model.

    Source: PEFT's ``LoraModel.subtract_mutated_init``; ``tests/models/adapters/test_lora.py``.
    """
    weights = load_file(folder / ADAPTER_WEIGHTS)
    for name, initial in initial_factors.items():
        parts = [weights[name], initial] if ".lora_A." in name else [weights[name], -initial]
        weights[name] = torch.cat(parts, dim=0 if ".lora_A." in name else 1).contiguous()
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    settings = LoraConfig.from_pretrained(str(folder))
    settings.r *= 2
    settings.lora_alpha *= 2**0.5 if settings.use_rslora else 2
    settings.init_lora_weights = True
    settings.save_pretrained(str(folder))


def check_saved(saved: PeftConfig, folder: Path, task_type: str) -> Iterator[tuple[str, str]]:
    """Return problem and remedy if a saved adapter cannot be loaded on any model."""
    if saved.peft_type != "LORA":
        yield f"is a {saved.peft_type} adapter", "name a LoRA adapter"
        return
    if not (folder / ADAPTER_WEIGHTS).is_file():
        yield f"has no {ADAPTER_WEIGHTS}", "pickled weights could run code: convert them where you trust them"
    if saved.task_type != task_type:
        yield f"was trained for {saved.task_type}, and this is {task_type}", "merge it first: `recipes merge`"
    if saved.bias != "none":
        yield "trains biases of the base, which stay when it is switched off", "name an adapter with bias: none"
    if has_such_an_init(saved):
        found = f"fits a base that {saved.init_lora_weights} had taken it out of, and that no file holds"
        yield found, "name the output directory of its run, not a checkpoint"


def check_base(saved: PeftConfig, base: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """Return problem and remedy if the base differs from the one that the adapter was trained on."""
    wanted, given = saved.base_model_name_or_path, str(base.name_or_path)
    if wanted is None:
        return
    if wanted != given and Path(wanted).resolve() != Path(given).resolve():
        remedy = f"name that one, or write {given} into its {ADAPTER_CONFIG} if they are the same"
        yield f"was trained on {wanted}, and the model is {given}", remedy
        return
    commits = [saved.revision or "", read_commit(base) or ""]
    if commits[0] != commits[1] and all(re.fullmatch(r"[0-9a-f]{40}", commit) for commit in commits):
        yield (
            f"was trained on commit {commits[0]} of {wanted}, and this is {commits[1]}",
            f"set model_revision: {commits[0]}",
        )


def has_such_an_init(settings: PeftConfig) -> bool:
    """Return whether the adapter's initialisation took a part of the base weights."""
    return str(settings.init_lora_weights).startswith(TAKEN_OUT_OF_WEIGHTS)


def read_such_an_init(folder: Path) -> str | None:
    """Return the initialisation of a saved adapter if no file has the matching base; else ``None``."""
    settings = PeftConfig.from_pretrained(str(folder))
    return str(settings.init_lora_weights) if has_such_an_init(settings) else None


def read_commit(config: PreTrainedConfig) -> str | None:
    """Return the Hub commit of a model configuration; ``None`` for a folder."""
    return getattr(config, "_commit_hash", None)


@torch.no_grad()
def iterate_weights(model: Any, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight once, under its name without an adapter, with the active adapter merged.

    One layer at a time is merged, and its original bits are restored afterwards: PEFT's ``unmerge`` subtracts, which
    would leave rounding errors in weights that the reference shares.

    Args:
        model: A model, or a PEFT model of low rank around it.
        names: Of those parameters of the model below the adapter that are wanted; ``None``: all.

    Raises:
        ValueError: The adapter lies on bare tensors or trains modules whole, which have other names then.

    Source: ``trl.generation.VLLMGeneration``; ``tests/models/adapters/test_merged_weights.py``.
    """
    layers = dict(unwrap_adapter(model).named_modules())
    for name, parameter in _base_parameters(model):
        if names is not None and name not in names:
            continue
        owner, is_adapted, rest = name.partition(_BASE)
        if not is_adapted or rest != "weight":
            yield name.replace(_BASE, "."), parameter.detach()
            continue
        layer = layers[owner]
        before = parameter.detach().clone()
        layer.merge()
        merged = parameter.detach().clone()
        layer.unmerge()
        parameter.copy_(before)
        yield f"{owner}.{rest}", merged


def _base_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    base = unwrap_adapter(model)
    for module in base.modules():
        is_layer = not hasattr(module, "base_layer") or hasattr(module.base_layer, "weight")
        if hasattr(module, "modules_to_save") or not is_layer:
            raise ValueError(
                "an adapter on bare tensors, or on modules trained whole, is not added to weights one by one"
            )
    adapted = tuple(f"{name}." for name, module in base.named_modules() if hasattr(module, "base_layer"))
    for name, parameter in base.named_parameters():
        if _BASE in name or not name.startswith(adapted):
            yield name, parameter
