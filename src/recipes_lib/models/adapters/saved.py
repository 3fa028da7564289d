"""Metadata of a saved adapter: base model, compatibility, parametrisation."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils.hub import has_file

from recipes_lib.config.schema import ModelConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.inference import unwrap_adapter
from recipes_lib.models.loading import download, explained

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"

TaskType = Literal["CAUSAL_LM", "SEQ_CLS"]

INITS_CHANGING_BASE: Final = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Prefixes of ``init_lora_weights`` that change the base weights, mostly by subtracting the initial adapter."""

BASE_LAYER: Final = ".base_layer."
"""Part of the names of base weights inside adapted layers; PEFT also saves those of adapted embeddings."""


def find_adapter(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of a saved adapter, downloaded from the Hub if necessary; ``None`` if ``name`` is no adapter.

    Args:
        name: Folder or Hub id.
        revision: Commit, tag or branch on the Hub.

    Raises:
        ConfigError: It cannot be downloaded from the Hub.
    """
    with explained("model_name_or_path", name):
        download(name, revision, ADAPTER_CONFIG)
        if not has_file(name, ADAPTER_CONFIG, revision=revision):
            return None
        if Path(name).is_dir():
            return Path(name)
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.jinja", ADAPTER_WEIGHTS]))


def find_base(named: ModelConfig) -> tuple[ModelConfig, Path | None]:
    """Return the base model of a saved adapter, and the folder of the adapter; ``named`` and ``None`` for a full model.

    Args:
        named: Folder or Hub id, and revision, of the adapter or model.

    Raises:
        ConfigError: As ``find_adapter``; or the adapter's configuration cannot be read, or names no base model.
    """
    folder = find_adapter(str(named.model_name_or_path), named.model_revision)
    if folder is None:
        return named, None
    with explained("model_name_or_path", str(folder)):
        settings = PeftConfig.from_pretrained(str(folder))
    if not settings.base_model_name_or_path:
        remedy = f"write its base into {ADAPTER_CONFIG}, as base_model_name_or_path"
        raise ConfigError(Problem("model_name_or_path", f"{folder} is an adapter that names no base model", remedy))
    base = replace(named, model_name_or_path=settings.base_model_name_or_path, model_revision=settings.revision)
    return base, folder


def find_shareable(
    name: str, revision: str | None, base: PreTrainedConfig, *, is_quantized: bool
) -> tuple[Path | None, str]:
    """Find a saved reward model that can be loaded as an adapter of an already loaded base model.

    Args:
        name: Folder or Hub id of the reward model.
        revision: Commit, tag or branch on the Hub.
        base: Configuration of the loaded base model.
        is_quantized: Whether the loaded base model is quantised; reward statistics are measured without quantisation.

    Returns:
        Folder of the adapter and an empty string; or ``None`` and the reason.

    Raises:
        ConfigError: As ``find_adapter``.
    """
    folder = find_adapter(name, revision)
    if folder is None:
        return None, f"{name} is no adapter"
    saved = PeftConfig.from_pretrained(str(folder))
    reasons = [found for found, _ in (*check_saved(saved, folder, "SEQ_CLS"), *check_base(saved, base))]
    if is_quantized:
        reasons.append("has statistics of unquantised weights, and the policy is quantised")
    if others := set(getattr(saved, "modules_to_save", None) or ()) - {"score", "classifier"}:
        reasons.append(f"has a fully trained {min(others)}")
    return (None, f"{name} {reasons[0]}") if reasons else (folder, "")


def name_in_file(name: str) -> str:
    """Return the name of an adapter parameter in PEFT's file, which has no adapter name.

    Args:
        name: Name of the parameter in the PEFT model, with the adapter name ``default``.

    Source: PEFT's ``get_peft_model_state_dict``; ``tests/models/adapters/test_saved.py``.
    """
    plain = name.replace(".modules_to_save.default.", ".").replace(".default.", ".").removesuffix(".default")
    # The magnitude of DoRA is a module with a weight in the model, and a tensor in the file.
    return plain.removesuffix(".weight") if plain.endswith(".lora_magnitude_vector.weight") else plain


def convert_to_original_base(folder: Path, initial_factors: dict[str, Tensor]) -> None:
    """Convert a saved ``pissa`` or ``olora`` adapter so that it fits the original base weights.

    The trained model is ``W - s B0 A0 + s B A = W + s [B, -B0] [A; A0]``, an adapter of twice the rank with the same
    scale ``s``. Unlike PEFT's conversion, this one keeps DoRA's magnitudes and fully trained modules.

    Args:
        folder: Folder of the saved adapter, changed in place.
        initial_factors: ``A0`` and ``B0`` by their names in the file, from the model's ``initial_factors``.

    Source: PEFT's ``LoraModel.subtract_mutated_init``; ``tests/models/adapters/test_lora.py``.
    """
    weights = load_file(folder / ADAPTER_WEIGHTS)
    for name, initial in initial_factors.items():
        parts = [weights[name], initial] if ".lora_A." in name else [weights[name], -initial]
        weights[name] = torch.cat(parts, dim=0 if ".lora_A." in name else 1).contiguous()
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    settings = LoraConfig.from_pretrained(str(folder))
    settings.r *= 2
    # The scale is alpha / r, or alpha / sqrt(r) for rsLoRA.
    settings.lora_alpha *= 2**0.5 if settings.use_rslora else 2
    settings.init_lora_weights = True
    settings.save_pretrained(str(folder))


def check_saved(saved: PeftConfig, folder: Path, task_type: str) -> Iterator[tuple[str, str]]:
    """Yield problem and remedy for each reason why a saved adapter cannot be loaded on any model.

    Raises:
        OSError: Its weights cannot be opened.
    """
    if saved.peft_type != "LORA":
        yield f"is a {saved.peft_type} adapter", "name a LoRA adapter, or merge it with PEFT first"
        return
    if not (folder / ADAPTER_WEIGHTS).is_file():
        yield f"has no {ADAPTER_WEIGHTS}", "pickled weights could run code: convert them where you trust them"
    else:  # safetensors reports any file that it cannot open as missing.
        (folder / ADAPTER_WEIGHTS).open("rb").close()
    # Without a task, as by LoraConfig's default, the adapter fits any.
    if saved.task_type not in (None, task_type):
        yield f"was trained for {saved.task_type}, not {task_type}", "merge it with PEFT first"
    if saved.bias != "none":
        yield "trains biases of the base, which stay changed when it is disabled", "merge it with PEFT first"
    if getattr(saved, "lora_bias", False):
        yield (
            "trains biases of B (lora_bias), which layers without a bias cannot merge",
            "name one with lora_bias: false",
        )
    # It applies from the last invocation in a row on, so not to packed documents before it, and cannot be merged.
    if getattr(saved, "alora_invocation_tokens", None):
        yield "is an activated LoRA (alora_invocation_tokens)", "name an adapter that applies to all tokens"
    if changes_base_weights(saved):
        found = f"belongs to base weights changed by {saved.init_lora_weights}, which no file contains"
        yield found, "name the output directory of its run, not a checkpoint"
    # As for ``use_dora`` in training/layouts/compatibility.yaml.
    if saved.use_dora and is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]
        yield "is a DoRA adapter, which ZeRO-3 does not support", "launch with accelerate_configs/fsdp2.yaml or ZeRO-2"
    if saved.layer_replication:
        yield "replicates layers of the base, which stay when it is disabled", "merge it with PEFT first"


def check_base(saved: PeftConfig, base: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """Yield problem and remedy if the base model differs from the one that the adapter was trained on."""
    if saved.base_model_name_or_path is None:
        return
    wanted, given = str(saved.base_model_name_or_path), str(base.name_or_path)
    if wanted != given and Path(wanted).resolve() != Path(given).resolve():
        remedy = f"name that one, or write {given} into its {ADAPTER_CONFIG} if they are the same"
        yield f"was trained on {wanted}, and the model is {given}", remedy
        return
    # Branches and tags may move, so only full commit hashes are compared.
    commits = [saved.revision or "", getattr(base, "_commit_hash", None) or ""]
    if commits[0] != commits[1] and all(re.fullmatch(r"[0-9a-f]{40}", commit) for commit in commits):
        yield (
            f"was trained on commit {commits[0]} of {wanted}, and this is {commits[1]}",
            f"set model_revision: {commits[0]}",
        )


def changes_base_weights(settings: PeftConfig) -> bool:
    """Return whether the adapter's initialisation changed the base weights."""
    return str(settings.init_lora_weights).startswith(INITS_CHANGING_BASE)


def read_base_changing_init(folder: Path) -> str | None:
    """Return the initialisation of a saved adapter if it changed the base weights; otherwise ``None``."""
    settings = PeftConfig.from_pretrained(str(folder))
    return str(settings.init_lora_weights) if changes_base_weights(settings) else None


@torch.no_grad()
def iterate_weights(model: Any, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each weight with the active adapter merged, under its name without an adapter.

    Layers are merged one at a time, and their original weights are restored exactly: PEFT's ``unmerge`` subtracts,
    which would leave rounding errors in weights that the reference model shares.

    Args:
        model: Model with or without LoRA adapters.
        names: Names of the parameters to yield, in the model inside the PEFT wrapper; ``None`` for all.

    Raises:
        ValueError: The adapter is on bare parameters, has fully trained modules, whose names differ, or biases of B.

    Source: ``trl.generation.VLLMGeneration``; ``tests/models/adapters/test_saved.py``.
    """
    layers = dict(unwrap_adapter(model).named_modules())
    for name, parameter in _base_parameters(model):
        if names is not None and name not in names:
            continue
        owner, is_adapted, rest = name.partition(BASE_LAYER)
        if not is_adapted or rest != "weight":
            yield name.replace(BASE_LAYER, "."), parameter.detach()
            continue
        layer = layers[owner]
        # Merged in place, copied, and restored from a copy before the next layer.
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
        has_bias = any(getattr(module, "lora_bias", {}).values())
        if hasattr(module, "modules_to_save") or hasattr(module, "token_adapter") or has_bias or not is_layer:
            raise ValueError(
                "an adapter on bare parameters, or with fully trained modules or tokens, or biases of B, is not merged "
                "weight by weight"
            )
    # Below an adapted layer, only the parameters of base_layer belong to the model.
    adapted = tuple(f"{name}." for name, module in base.named_modules() if hasattr(module, "base_layer"))
    for name, parameter in base.named_parameters():
        if BASE_LAYER in name or not name.startswith(adapted):
            yield name, parameter
