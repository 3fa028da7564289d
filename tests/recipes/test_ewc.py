"""Elastic weight consolidation end to end: ``recipes fisher``, then runs with its penalty."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed import sharding
from tests.faults import recipe_runs
from tests.rows import read_events

from recipes_lib.cli import main as run_recipes

STEPS = 4
COEFFICIENT = 1e5
"""Large enough to change the weights within a few steps."""


@pytest.fixture(scope="module")
def inputs(inputs: Path) -> Path:
    """Folder with data and a model, and the Fisher information of documents beside the model."""
    shutil.copytree(inputs / "model", inputs / "earlier")
    keys = {"dataset_name": inputs / "documents.jsonl", "model_name_or_path": inputs / "earlier", "max_length": 32}
    keys |= {"output_dir": inputs / "earlier", "prepared_dir": inputs / "prepared", "max_steps": 4}
    keys |= {"bf16": "false", "use_cpu": "true", "num_documents": 20}
    flags = [f"--{name}={value}" for name, value in keys.items()]
    assert run_recipes(["fisher", "--recipe=pretrain", *flags]) == 0
    return inputs


def train(inputs: Path, folder: Path, name: str, **keys: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    usual = {"max_steps": STEPS, "logging_steps": 1, "save_steps": 1, "save_total_limit": STEPS}
    usual |= {"model_name_or_path": inputs / "earlier", "eval_strategy": "no"}
    unset = ("eval_steps", "test_split_size", "num_sample_prompts", "sample_max_new_tokens")
    of_pretraining = ("model_config", "tokenizer_name_or_path") if name == "pretrain" else ()
    keys = {**usual, **keys, **dict.fromkeys((*unset, *of_pretraining)), "output_dir": folder}
    assert sharding.run_recipe(name, recipe_runs.make_keys(inputs, name, **keys)) == 0
    return read_events(folder, "train"), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["pretrain", "dpo"])
def test_logged_penalty_matches_weights_before_step(inputs: Path, tmp_path: Path, name: str) -> None:
    fisher, reference = (load_file(inputs / "earlier" / f"{file}.safetensors") for file in ("fisher", "model"))

    def compute_penalty(weights: dict[str, torch.Tensor]) -> float:
        differences = ((fisher[key] * (weights[key] - reference[key]).double() ** 2).sum() for key in fisher)
        return COEFFICIENT / 2 * float(sum(differences))

    plain, free = train(inputs, tmp_path / "plain", name)
    zero, weights = train(inputs, tmp_path / "zero", name, ewc_lambda=0.0)
    assert free.keys() == weights.keys()
    assert all(torch.equal(free[key], weights[key]) for key in free)
    learnt = ("step", "loss", "grad_norm", "learning_rate")
    assert [[event[key] for key in learnt] for event in zero] == [[event[key] for key in learnt] for event in plain]
    assert not any("ewc_penalty" in event for event in zero)

    held, weights = train(inputs, tmp_path / "held", name, ewc_lambda=COEFFICIENT)
    before = [reference, *(load_file(tmp_path / f"held/checkpoint-{at}/model.safetensors") for at in range(1, STEPS))]
    assert len(held) == STEPS
    assert held[0]["ewc_penalty"] == 0
    assert [event["ewc_penalty"] for event in held] == pytest.approx([compute_penalty(one) for one in before], rel=1e-4)
    assert compute_penalty(weights) < 0.9 * compute_penalty(free)
