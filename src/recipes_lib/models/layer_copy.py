"""A student cut out of its teacher: some of the layers, everything else whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.layers import find_layers


def cut_layers(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Leave a causal language model with some of its layers, in the order given, and its configuration to match.

    Embeddings, final norm, output projection and all widths stay. Of what the configuration says layer by layer, such
    as ``layer_types``, the entries of the layers that stay are kept.

    Args:
        model: Changed in place, in weights and configuration.
        layers: Their numbers, from 1.

    Raises:
        ConfigError: The model has no such layer, or none is left.

    Source: Sanh et al. 2019 (DistilBERT, arXiv 1910.01108, section 3), which takes every second layer;
        ``tests/models/test_layer_copy.py``.
    """
    whole = find_layers(model)
    count = len(whole)
    if not layers or min(layers) < 1 or max(layers) > count:
        found = f"layers {list(layers)} are asked for, and {type(model).__name__} has 1 to {count}"
        raise ConfigError(Problem("--layers", found, "name layers that it has"))
    kept = nn.ModuleList(whole[number - 1] for number in layers)
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is whole:
                setattr(parent, name, kept)
    config: Any = model.config.get_text_config()
    by_layer = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == count}
    config.num_hidden_layers = len(layers)
    for name, value in by_layer.items():
        setattr(config, name, [value[number - 1] for number in layers])


@torch.no_grad()
def compute_proof_logits(model: Any) -> Tensor:
    """Return what a model says of sixteen tokens, ``(16, V)``."""
    vocab_size = model.config.get_text_config().vocab_size
    input_ids = torch.arange(1, 17, device=model.device)[None] % vocab_size
    was_training = model.training
    model.eval()
    logits: Tensor = model(input_ids=input_ids, use_cache=False).logits[0]
    model.train(was_training)
    return logits


def verify_copy(student: PreTrainedModel, cut: PreTrainedModel, folder: Path) -> None:
    """Hold a student that was loaded again against the model that it was written from, to the bit.

    Args:
        student: From ``folder``.
        cut: By ``cut_layers``, on the same device and in the same precision.
        folder: To be named.

    Raises:
        ConfigError: A tensor differs; or the architecture treats layers by their place in the whole model, so that the
            loaded one says something else.
    """
    own, expected = student.state_dict(), cut.state_dict()
    differing = [name for name in expected if name not in own or not torch.equal(own[name], expected[name])]
    if differing or not torch.equal(compute_proof_logits(student), compute_proof_logits(cut)):
        what = f"the tensor {differing[0]}" if differing else "what it says"
        found = f"{type(cut).__name__} cannot be cut: loaded again from {folder}, {what} is another"
        raise ConfigError(Problem("--teacher", found, "name layers whose places in the model do not matter, or all"))
