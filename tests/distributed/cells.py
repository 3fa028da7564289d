"""What is trained in every layout, and how far two runs are from being the same one."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import tiny
from tests.distributed import sharding
from tests.faults import recipe_runs
from tests.rows import read_rows

from recipes_lib.config.schema import ModelConfig
from recipes_lib.models.loading import load_causal_lm
from recipes_lib.training.forgetting.fisher import Fisher, write_fisher
from recipes_lib.training.trainers.reference import hash_weights

LEFT_OUT = ("seconds", "per_second", "tokens_per_s", "runtime", "time", "mfu", "memory", "epoch", "flos")
OF_WEIGHTS = {"parameter_norm", "update_ratio"}
"""Figures that a run under DeepSpeed has not."""
TIED = json.dumps({"model_type": "llama", "tie_word_embeddings": True} | recipe_runs.SIZES)
EVERY = {"max_steps": 3, "save_steps": 2, "eval_steps": 2}
UNEVEN = {"test_split_size": 40, "packing": "false"}
"""What is left of 59 chats makes an epoch of two steps of eight rows and one of three."""
MUON_TOLERANCE = 2e-4
"""Muon iterates in bf16, which makes more of the order of a sum."""
HOST_ADAM_TOLERANCE = 5e-5
"""DeepSpeed's Adam for hosts rounds otherwise than torch's, by which a weight is 1e-7 off, and a reward 1e-5."""
LAYERS: dict[str, Any] = {
    "feature_weight": 0.5,
    "attention_weight": 3.0,
    "similarity_weight": 2.0,
    "distance_weight": 1.5,
    "angle_weight": 0.7,
    "attn_implementation": "eager",
}
"""Every part of the loss that compares layers."""
REINFORCED: dict[str, Any] = {
    "max_steps": 6,
    "reward_funcs": "[tests.faults.recipe_runs:measure_shortness]",
}
"""Three iterations of two steps, of GRPO two of four, whose rewards are the same on any number of processes."""
ADAPTER: dict[str, Any] = {"use_peft": "true", "lora_r": 4}
FULL_PRECISION = ("--mixed_precision", "no")
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or " " in sys.prefix,
    reason="DeepSpeed compiles its collectives, for which it needs g++ and an environment in a path without spaces",
)
"""What starts DeepSpeed is marked by it."""
# Those that the tests of single layouts take; the matrix takes all.
CELLS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "sft packed": ("sft", 4, {}),
    "pretrain tied": ("pretrain", 1, {"model_config": TIED}),
    "lora padded": ("lora", 1, UNEVEN),
    "reward": ("reward", 1, {}),
}
FURTHER_CELLS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dpo live": ("dpo", 4, {"precompute_ref_log_probs": "false"}),
    "dpo adapter stored": ("dpo adapter", 1, {}),
    "distill": ("distill", 4, {}),
    "distill on policy": ("distill", 1, UNEVEN | {"lmbda": 0.5, "distillation_beta": 1.0, "response_length": 8}),
    "distill layers": ("distill", 4, LAYERS),
    "sft packed once": ("sft", 1, {}),
    "sft padded": ("sft", 1, {"packing": "false"}),
    "sft padded, accumulated": ("sft", 4, UNEVEN),
    "pretrain accumulated": ("pretrain", 4, {}),
    "lora packed": ("lora", 4, {"packing": "true"}),
    "reward adapter": ("reward", 4, ADAPTER | {"test_split_size": 15}),
    "dpo stored": ("dpo", 1, {}),
    "dpo adapter live": ("dpo adapter", 4, {"precompute_ref_log_probs": "false"}),
    "sft remembering": (
        "sft",
        4,
        {
            "replay_dataset": "earlier.jsonl",
            "replay_share": 0.25,
            "ewc_lambda": 3.0,
            "ewc_reference": "teacher",
            "kl_to_base": 0.5,
        },
    ),
    "lora remembering": ("lora", 4, {"kl_to_base": 0.5, "replay_dataset": "earlier.jsonl"}),
    "recomputed": ("sft", 1, {"activation_checkpointing": "true"}),
    "muon": ("pretrain", 1, {"optim": "muon"}),
    **{
        f"{stage} lora" if more else stage: (stage, 4, REINFORCED | more)
        for stage in ("ppo", "rloo", "grpo")
        for more in ({}, ADAPTER)
    },
    "grpo qlora": ("grpo", 4, REINFORCED | ADAPTER | {"load_in_4bit": "true"}),
}


def write_inputs(folder: Path) -> None:
    """Write model, teacher, tokenizer and data of all cells."""
    recipe_runs.write_inputs(folder)
    teacher = tiny.save_model(folder / "teacher", tiny.build_tokenizer(), seed=1)
    recipe_runs.write_chats(folder / "earlier.jsonl", range(100, 130))
    model = load_causal_lm(ModelConfig(model_name_or_path=str(teacher)), "eager")
    diagonal = {name: (7 * parameter.detach()).sin().abs() for name, parameter in model.named_parameters()}
    facts = {"model_name_or_path": None, "model_revision": None}
    write_fisher(teacher, Fisher(diagonal, 1, 1), weights=hash_weights(model), **facts)


def build_jobs(inputs: Path, cells: Mapping[str, Any], num_processes: int) -> dict[str, sharding.Job]:
    """Eight rows a step, however many processes take them."""
    jobs = {}
    for name, (recipe, wanted, more) in cells.items():
        accumulation = min(wanted, 8 // num_processes)
        batch = {
            "gradient_accumulation_steps": accumulation,
            "per_device_train_batch_size": 8 // accumulation // num_processes,
        }
        if recipe == "distill":
            recipe_keys = recipe_runs.make_keys(
                inputs, "sft", num_processes, teacher_model_name_or_path=inputs / "teacher"
            )
        else:
            recipe_keys = recipe_runs.make_keys(inputs, recipe, num_processes)
        if "steps_per_generation" in recipe_keys:
            batch["steps_per_generation"] = 2 * accumulation
        of_inputs = {name: inputs / more[name] for name in ("replay_dataset", "ewc_reference") if name in more}
        keys = {**recipe_keys, **EVERY, **batch, **more, **of_inputs}
        jobs[name] = {"stage": recipe.split()[0], "keys": keys}
    return jobs


def in_bf16(job: sharding.Job) -> sharding.Job:
    """Return a job whose products are in bf16."""
    return {**job, "keys": {**job["keys"], "bf16": "true"}}


def read_weights(run: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in run.glob("*.safetensors") for name, tensor in load_file(file).items()}


def measure_gaps(one: Path, two: Path) -> dict[str, float]:
    """Return the largest difference of each figure, held-out ones and the weights included.

    Relative where a figure is above 1, absolute below, as ``pytest.approx`` has it; infinite where one is not a number.
    ``answers`` is 1 where a sampled answer is another one, 0 where all are the same.

    Args:
        one: A finished run.
        two: Another.
    """
    events = [read_rows(run / "metrics.jsonl") for run in (one, two)]
    assert len(events[0]) == len(events[1]) >= 3 + 2, (one, two)
    losses = [event["loss"] for event in events[0] if event["kind"] == "train"]
    assert len(set(losses)) >= 2, "a run that stands still proves nothing"
    gaps: dict[str, float] = {}
    for expected, got in zip(*events, strict=True):
        assert expected.keys() - OF_WEIGHTS <= got.keys() <= expected.keys()
        for figure, value in expected.items():
            if figure in got and isinstance(value, int | float) and not any(part in figure for part in LEFT_OUT):
                gap = abs(got[figure] - value) / max(abs(value), 1)
                # Of a gap that is not a number nobody can say that it is the largest.
                gaps[figure] = max(gaps.get(figure, 0.0), math.inf if math.isnan(gap) else gap)
    if (one / "samples.jsonl").exists():
        answers = [(run / "samples.jsonl").read_text() for run in (one, two)]
        gaps["answers"] = float(answers[0] != answers[1])
    gaps["weights"] = measure_weight_gap(one, two)
    return gaps


def measure_weight_gap(one: Path, two: Path) -> float:
    """Return the largest difference of a weight of two finished runs; infinite where one is not a number."""
    weights = [read_weights(run) for run in (one, two)]
    assert weights[0].keys() == weights[1].keys() != set()
    gaps = (weights[1][name].sub(tensor).abs().nan_to_num(nan=math.inf) for name, tensor in weights[0].items())
    return max(float(gap.max()) for gap in gaps)
