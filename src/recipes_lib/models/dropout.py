"""Dropout off, where the same tokens must get the same log-probabilities twice."""

from __future__ import annotations

from torch import nn


def disable_dropout(model: nn.Module) -> int:
    """Set every dropout of a model to 0, modules and the plain numbers that attention layers keep; return how many.

    Source: ``trl.trainer.utils.disable_dropout_in_model`` leaves the numbers, such as Llama's ``attention_dropout``;
    ``tests/models/test_dropout.py``.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p:
            module.p = 0.0
            count += 1
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float) and value:
                setattr(module, name, 0.0)
                count += 1
    return count
