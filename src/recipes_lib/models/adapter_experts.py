"""What PEFT takes for the experts of a mixture, which are stacks of matrices and no layers: they get no adapter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from peft import LoraConfig, PeftModel
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from transformers import PreTrainedModel

from recipes_lib.errors import ConfigError, Problem

ALL_LINEAR: Final = "all-linear"
"""PEFT's name of every linear layer but the head."""


def takes_experts(model: PreTrainedModel, targets: list[str] | str) -> bool:
    """Return whether PEFT, told to adapt ``targets``, would adapt stacks of experts or their routers.

    Source: ``peft.utils.transformers_weight_conversion``; ``tests/models/test_adapter_experts.py``.
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
