"""Pretraining runs with pipeline parallelism, and the single-process runs with which they are compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.distributed.cells import EVERY
from tests.faults import recipe_runs

from recipes_lib.training.layouts.launch_environment import name_pipeline

METRICS = {"eval_bits_per_byte", "grad_norm", "parameter_norm", "update_ratio", "num_target_tokens"}
LAYERS = recipe_runs.SIZES | {"num_hidden_layers": 4}
UNTIED = json.dumps({"model_type": "llama"} | LAYERS)
TIED = json.dumps({"model_type": "llama", "tie_word_embeddings": True} | LAYERS)
# Name -> schedule, keys of the recipe. Documents differ in length, so micro-batches differ in their number of targets.
CELLS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "packed": ("1f1b", {"model_config": UNTIED}),
    "tied": ("gpipe", {"model_config": TIED, "cross_document_attention": "true"}),
    "interleaved": ("interleaved", {"model_config": UNTIED, "max_grad_norm": 0.1}),
}
SLOW_CELLS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "tied packed": ("1f1b", {"model_config": TIED}),
    "tied interleaved": ("interleaved", {"model_config": TIED}),
    "recomputed": ("1f1b", {"model_config": UNTIED, "activation_checkpointing": "true"}),
    "muon": ("1f1b", {"model_config": UNTIED, "optim": "muon"}),
}


def build_job(inputs: Path, cell: str, num_stages: int = 1, num_replicas: int = 1, **besides: Any) -> dict[str, Any]:
    """Build a job with eight rows per step: four micro-batches of each pipeline; ``besides`` are further keys."""
    schedule, more = (CELLS | SLOW_CELLS)[cell]
    batch = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2 // num_replicas}
    keys = {**recipe_runs.make_keys(inputs, "pretrain"), **EVERY, "num_sample_prompts": 0, **batch, **more, **besides}
    return {"stage": "pretrain", "keys": keys, "variables": name_pipeline(num_stages, schedule)}


def build_rollback(inputs: Path, num_stages: int, num_replicas: int = 1, *, save_steps: int) -> dict[str, Any]:
    """Build a run that rolls back from a spike at step 3, and one without the rows that the former skips."""
    keys = {"max_steps": 5, "save_steps": save_steps, "max_rollbacks": 1}
    job = build_job(inputs, "tied", num_stages, num_replicas, **keys)
    return {name: job | {"fault": name} for name in ("spike", "without skipped rows")}
