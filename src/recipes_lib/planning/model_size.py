"""Parameter counts without allocating memory, and training cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.planning.compute import FORWARD_AND_BACKWARD, compute_flops_per_token

TOKENS_PER_PARAMETER: Final = 20.0
"""Tokens that a compute-optimal run trains on, for each parameter: Hoffmann et al. 2022 (Chinchilla), table 3."""

_FORWARD_FLOPS: Final = 2
_SECONDS_PER_HOUR: Final = 3600


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameters of a model, each shared one counted once.

    Attributes:
        total: All of them.
        non_embedding: All but the rows of tokens and positions, and the projection on the vocabulary.
        active: Those that a token meets: of routed experts only the chosen ones. In a dense model, all.
    """

    total: int
    non_embedding: int
    active: int


def compute_model_size(config: PretrainedConfig) -> ModelSize:
    """Count the parameters of the model that training would build from ``config``; nothing is downloaded.

    Raises:
        ConfigError: No such model can be built.

    Source: the published counts of the models in ``tests/planning/test_model_size.py``.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        flops = compute_flops_per_token(config, 0)
    except (KeyError, ValueError, RuntimeError, ZeroDivisionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        found = f"a {config.model_type} model cannot be built: {reason}"
        raise ConfigError(Problem("model_config", found, "check the sizes against each other")) from error
    head = model.get_output_embeddings()
    tables = {
        parameter
        for module in model.modules()
        if module is head or isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    total = int(model.num_parameters())
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1) - sum(
        table.numel() for table in tables if table.ndim > 1
    )
    # A token that attends to nothing costs its matrix products alone, each weight once.
    met = round(flops.body / (FORWARD_AND_BACKWARD * _FORWARD_FLOPS))
    return ModelSize(
        total=total,
        non_embedding=total - sum(table.numel() for table in tables),
        active=total - (matrices - met),
    )


def compute_training_flops(num_parameters: float, num_tokens: float) -> float:
    """Return ``6 N D``, the usual estimate of a run's floating-point operations; attention is not in it.

    Args:
        num_parameters: ``N``; those that are active.
        num_tokens: ``D``.

    Source: Kaplan et al. 2020, section 2.1; against the figures of GPT-3, Chinchilla and Llama 3 405B in
    ``tests/planning/test_model_size.py``.
    """
    return FORWARD_AND_BACKWARD * _FORWARD_FLOPS * num_parameters * num_tokens


def compute_hours(num_flops: float, num_gpus: int, peak: float, mfu: float) -> float:
    """Return the hours that a run takes: ``FLOPs / (GPUs * peak * MFU * 3600)``.

    Args:
        num_flops: Operations that the run needs; what is computed twice to save memory is not counted.
        num_gpus: GPUs it runs on.
        peak: FLOP/s of one GPU, from ``peak_flops``.
        mfu: Share of the peak that is of use, above 0 and at most 1.

    Source: Narayanan et al. 2021 (Megatron), equation 4; its training days in ``tests/planning/test_model_size.py``.
    """
    return num_flops / (num_gpus * peak * mfu * _SECONDS_PER_HOUR)
