"""Optimizer states in bytes per parameter, measured after one step, beside the published values.

python benchmarks/optimizer_states.py [--output build/optimizer_states.json]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import write_results
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from recipes_lib.errors import ConfigError
from recipes_lib.training.optim.optimizers import (
    build_muon,
    get_decay_names,
    verify_optimizer,
)

VOCABULARY, WIDTH, LAYERS = 1024, 512, 4
WEIGHT_AND_GRADIENT_BYTES = 4 + 4
OPTIMIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "sgd": ({}, "0"),
    "sgd, momentum": ({"optim": "sgd", "optim_args": "momentum=0.9"}, "4"),
    "adamw_torch_fused": ({}, "8"),
    "adafactor": ({}, "4 or less"),
    "muon": ({}, "4; 8 for other than matrices"),
    "lion_32bit": ({}, "4"),
    "lion_8bit": ({}, "1"),
    "adamw_8bit": ({}, "2"),
    "paged_adamw_8bit": ({}, "2"),
    "adamw_torch_8bit": ({}, "2"),
    "adamw_torch_4bit": ({}, "1"),
    "ademamix": ({}, "12"),
    "schedule_free_adamw": ({"lr_scheduler_type": "constant"}, "8"),
    "stable_adamw": ({}, "8"),
    "adagrad": ({}, "4"),
    "rmsprop": ({}, "4"),
}
"""Name -> its training keys, and the published bytes per parameter for float32 weights."""


class MatricesApart(Trainer):
    """Upstream's trainer with two parameter groups: hidden matrices, then embeddings and norms."""

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """Return the hidden matrices."""
        return get_decay_names(model, decay_embeddings=False)


def main() -> None:
    """Measure each installed optimizer; list what the others need."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = [["optimizer", "published", "measured", "with weight and gradient", "of matrices", "of embeddings"]]
    raw: dict[str, Any] = {}
    for name, (keys, published) in OPTIMIZERS.items():
        training = {"optim": name} | keys
        try:
            verify_optimizer(SimpleNamespace(recipe="sft", training=training))
        except ConfigError as error:
            raw[name] = {"published": published, "reason": error.problems[0].found}
            table.append([name, published, error.problems[0].found, "", "", ""])
            continue
        figures = measure(training)
        raw[name] = {"published": published} | figures
        total = WEIGHT_AND_GRADIENT_BYTES + figures["state_bytes"]
        cells = [figures["state_bytes"], total, figures["matrices"], figures["embeddings"]]
        table.append([name, published, *(f"{cell:.2f}" for cell in cells)])
    title = f"State bytes a parameter: a {LAYERS}-layer Llama of width {WIDTH} and vocabulary {VOCABULARY}, float32"
    write_results(options.output, title, table, raw)


def measure(training: dict[str, Any]) -> dict[str, float]:
    """Return bytes per parameter after one step: in total, for hidden matrices, and for embeddings and norms."""
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": 11 * WIDTH // 4, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=LAYERS, **shape))
    optimizer = build_optimizer(model, training)
    if hasattr(optimizer, "train"):
        optimizer.train()  # Schedule-free optimizers have a training mode.
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    # `tests` is not part of the installed package.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.training.optim.states import measure_group_bytes, measure_state_bytes

    matrices, embeddings = measure_group_bytes(optimizer)
    return {"state_bytes": measure_state_bytes(optimizer), "matrices": matrices, "embeddings": embeddings}


def build_optimizer(model: LlamaForCausalLM, training: dict[str, Any]) -> torch.optim.Optimizer:
    """Build the optimizer as a training run does."""
    is_muon = training["optim"] == "muon"
    keys = {name: value for name, value in training.items() if not (is_muon and name == "optim")}
    args = TrainingArguments(output_dir="build", use_cpu=True, weight_decay=0.1, **keys)
    if is_muon:
        return build_muon(model, args, decay_embeddings=False)
    return MatricesApart(model=model, args=args).create_optimizer()


if __name__ == "__main__":
    main()
