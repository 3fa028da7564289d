"""Target modules of adapters, mixture-of-experts layers included."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, Final

from peft import LoraConfig, PeftModel
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.heads.score_head import HEAD
from recipes_lib.models.structure import find_outside_text, is_outside

ALL_LINEAR: Final = "all-linear"
"""PEFT's name of every linear layer but the head."""

_MADE_OF_WEIGHTS: Final = ("pissa", "olora", "orthogonal")
"""Inits that read, or have the precision of, the weights of the layer."""


def check_layers(model: PreTrainedModel, config: AdapterConfig) -> Iterator[Problem]:
    """Where the layers that ``config`` names are unknown, or cannot have the adapter that it describes.

    PEFT takes a wrong name in ``lora_modules_to_save`` in silence, as it does a wrong one among right ones in
    ``lora_target_modules``.
    """
    modules = _list_modules(model)
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[no-untyped-call]
    for name in config.lora_modules_to_save or []:
        if not find_modules(model, name):
            yield _explain_unknown("lora_modules_to_save", name, modules)
    for name in config.lora_target_modules or []:
        found = find_modules(model, name)
        others = [module for module in found.values() if not isinstance(module, nn.Linear | Conv1D)]
        if not found:
            linear = [path for path, module in modules.items() if isinstance(module, nn.Linear | Conv1D)]
            yield _explain_unknown("lora_target_modules", name, linear)
        elif any(module is embedding for module in found.values() for embedding in embeddings):
            remedy = f"train it whole: lora_modules_to_save: [{name}]"
            yield Problem("lora_target_modules", f"{name} is an embedding or the output projection", remedy)
        elif find_experts(model, found):
            what = f"PEFT takes {name} of {type(model).__name__} for experts, which are no linear layers"
            remedy = "leave it out; unset, lora_target_modules are all layers that can have an adapter"
            yield Problem("lora_target_modules", what, remedy)
        elif others:
            what = type(others[0]).__name__
            yield Problem("lora_target_modules", f"{name} is a {what}, not a linear layer", "name the layers inside it")
    yield from _check_init(model, config)


def find_targets(model: PreTrainedModel, config: AdapterConfig) -> dict[str, Any]:
    """Return the linear layers that get an adapter, by their paths."""
    if config.lora_target_modules is not None:
        return {
            path: module for name in config.lora_target_modules for path, module in find_modules(model, name).items()
        }
    linear = _find_linear(model)
    experts = find_experts(model, linear)
    return {path: module for path, module in linear.items() if path not in experts}


def name_targets(model: PreTrainedModel, config: AdapterConfig) -> list[str] | str:
    """Return what PEFT is told of the layers that get an adapter.

    What the recipe says, unless PEFT would take in the experts of a mixture, or layers outside the text model.
    """
    targets = config.lora_target_modules or ALL_LINEAR
    is_exact = not takes_experts(model, targets) and not find_outside_text(model)
    return targets if is_exact else [*find_targets(model, config)]


def name_whole_modules(model: PreTrainedModel, config: AdapterConfig) -> tuple[list[str], bool]:
    """Return the names of the modules that are trained whole, and whether a tie is to be kept between two of them.

    Where one of two tied embeddings is named, both are: they are one.
    """
    named = config.lora_modules_to_save or []
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[no-untyped-call]
    paths = [path for path, module in model.named_modules() if any(module is end for end in ends)]
    others = [name for name in named if not find_modules(model, name).keys() & set(paths)]
    if not model.config.get_text_config().tie_word_embeddings or len(others) == len(named):
        return [*named], False
    return [*others, *paths], True


def stores_transposed(model: PreTrainedModel, config: AdapterConfig) -> bool:
    """Return whether the layers keep their weights as ``(in, out)``, which only GPT-2 and its kin do."""
    return any(isinstance(module, Conv1D) for module in find_targets(model, config).values())


def verify_layers(model: PeftModel, key: str) -> None:
    """Fail where an adapter has come to lie on something else than layers.

    Args:
        model: Under its adapters.
        key: Of the configuration that brought the adapter.

    Raises:
        ConfigError: One lies on stacks of experts or other bare tensors.
    """
    stacks = {name for settings in model.peft_config.values() for name in settings.target_parameters or ()}
    if stacks:
        found = f"the adapter lies on {', '.join(sorted(stacks))}, which are tensors and no linear layers"
        raise ConfigError(Problem(key, found, "name linear layers alone, or an adapter of such layers"))


def takes_experts(model: PreTrainedModel, targets: list[str] | str) -> bool:
    """Return whether PEFT, told to adapt ``targets``, would adapt stacks of experts or their routers.

    Source: ``peft.utils.transformers_weight_conversion``; ``tests/models/adapters/test_adapter_experts.py``.
    """
    settings = LoraConfig(target_modules=targets)
    try:
        convert_peft_config_for_transformers(settings, model, None)
    except ValueError:  # One of two matrices that are one stack.
        return True
    return bool(settings.target_parameters)


def find_experts(model: PreTrainedModel, paths: Iterable[str]) -> set[str]:
    """Return those of the paths that PEFT would take for experts.

    It goes by the last name, which a shared expert or a dense layer may have as well, so that an adapter of theirs
    could not be loaded again.
    """
    last_names = {path: path.rpartition(".")[2] for path in paths}
    taken = {name for name in set(last_names.values()) if takes_experts(model, [name])}
    return {path for path, name in last_names.items() if name in taken}


def find_modules(model: PreTrainedModel, name: str) -> dict[str, nn.Module]:
    """Return the modules that text passes through and whose path is ``name`` or ends with it after a dot, by path."""
    return {path: module for path, module in _list_modules(model).items() if f".{path}".endswith(f".{name}")}


def _list_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    parts = find_outside_text(model)
    return {path: module for path, module in model.named_modules() if not is_outside(path, parts)}


def _find_linear(model: PreTrainedModel) -> dict[str, nn.Module]:
    heads = [model.get_output_embeddings(), getattr(model, HEAD, None)]  # type: ignore[no-untyped-call]
    return {
        path: module
        for path, module in _list_modules(model).items()
        if isinstance(module, nn.Linear | Conv1D) and not any(module is head for head in heads)
    }


def _check_init(model: PreTrainedModel, config: AdapterConfig) -> Iterator[Problem]:
    init, key = config.init_lora_weights, "init_lora_weights"
    if init in _MADE_OF_WEIGHTS and getattr(model, "is_quantized", False):
        found = f"{init} needs weights in full precision, and these are in a few bits"
        yield Problem(key, found, "write init_lora_weights: default, or load the model in full")
        return
    if init == "orthogonal" and config.lora_r % 2:
        found = f"init_lora_weights: orthogonal needs an even rank, and lora_r is {config.lora_r}"
        yield Problem("lora_r", found, f"write {config.lora_r + 1}")
    if init == "olora" and stores_transposed(model, config):
        yield Problem(key, f"olora cannot read the weights of {type(model).__name__}", "write init_lora_weights: pissa")
    if init in ("pissa", "olora"):
        largest = min(min(layer.weight.shape) for layer in find_targets(model, config).values())
        if config.lora_r > largest:
            found = f"{init} finds at most {largest} directions in the smallest layer, and lora_r is {config.lora_r}"
            yield Problem("lora_r", found, f"write {largest} or less")


def _explain_unknown(key: str, name: str, modules: Iterable[str]) -> Problem:
    last_names = sorted({last for path in modules if (last := path.rpartition(".")[2]) and not last.isdigit()})
    near = difflib.get_close_matches(name.rpartition(".")[2], last_names, n=3)
    remedy = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(last_names)}"
    return Problem(key, f"the model has no module {name!r}", remedy)
