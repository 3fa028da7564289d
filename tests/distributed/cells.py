"""Runs that are compared between layouts (cells), and measures of the difference of two runs."""

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
from tests.distributed import sharding
from tests.faults import recipe_runs
from tests.rows import read_rows

from recipes_lib.commands.weights import export_checkpoint
from recipes_lib.config.schema import ModelConfig
from recipes_lib.models.loading import load_causal_lm
from recipes_lib.models.model_files import list_model_files
from recipes_lib.training.forgetting.fisher import Fisher, write_fisher
from recipes_lib.training.trainers.reference import hash_weights

LEFT_OUT = ("seconds", "per_second", "tokens_per_s", "runtime", "time", "mfu", "memory", "epoch", "flos")
WEIGHT_METRICS = {"parameter_norm", "update_ratio"}
"""Metrics that a run under DeepSpeed does not log."""
TIED = json.dumps({"model_type": "llama", "tie_word_embeddings": True} | recipe_runs.SIZES)
EVERY = {"max_steps": 3, "save_steps": 2, "eval_steps": 3}
UNEVEN = {"test_split_size": 40, "packing": "false"}
"""19 of 59 chats are left to train on: an epoch has two steps of eight rows and one of three."""
MUON_TOLERANCE = 2e-4
"""Muon iterates in bf16, which amplifies differences in summation order."""
HOST_ADAM_TOLERANCE = 5e-5
"""DeepSpeed's CPU Adam rounds differently from torch's: weights differ by 1e-7, rewards by 1e-5."""
GRPO_TOLERANCE = 1e-4
"""Of weights: Adam divides each gradient by its own magnitude, so that rounding decides the update of single weights
whose gradient is nearly zero; the learning rate is 1e-3."""
LAYERS: dict[str, Any] = {
    "feature_weight": 0.5,
    "attention_weight": 3.0,
    "similarity_weight": 2.0,
    "distance_weight": 1.5,
    "angle_weight": 0.7,
    "attn_implementation": "eager",
}
"""All hidden-state and attention losses."""
REINFORCED: dict[str, Any] = {
    "max_steps": 6,
    "eval_steps": 2,
    "reward_funcs": "[tests.faults.recipe_runs:measure_shortness]",
}
"""Three iterations of two steps (GRPO: two of four), with rewards that do not depend on the world size."""
ADAPTER: dict[str, Any] = {"use_peft": "true", "lora_r": 4}
FULL_PRECISION = ("--mixed_precision", "no")
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or " " in sys.prefix,
    reason="DeepSpeed compiles its collectives, for which it needs g++ and an environment in a path without spaces",
)
"""Mark of tests that start DeepSpeed."""
# Cells of the tests of single layouts; the matrix runs all.
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
    "distill qlora": ("distill", 4, ADAPTER | {"load_in_4bit": "true", "lmbda": 0.5, "response_length": 8}),
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
    """Write models, tokenizer and data of all cells."""
    recipe_runs.write_inputs(folder)
    teacher = folder / "teacher"
    recipe_runs.write_chats(folder / "earlier.jsonl", range(100, 130))
    model = load_causal_lm(ModelConfig(model_name_or_path=str(teacher)), "eager")
    diagonal = {name: (7 * parameter.detach()).sin().abs() for name, parameter in model.named_parameters()}
    facts = {"model_name_or_path": None, "model_revision": None}
    write_fisher(teacher, Fisher(diagonal, 1, 1), weights=hash_weights(model), **facts)


def build_jobs(inputs: Path, cells: Mapping[str, Any], num_processes: int) -> dict[str, sharding.Job]:
    """Build the jobs of cells with eight rows per step, for any world size."""
    jobs = {}
    for name, (recipe, wanted, more) in cells.items():
        accumulation = min(wanted, 8 // num_processes)
        batch = {
            "gradient_accumulation_steps": accumulation,
            "per_device_train_batch_size": 8 // accumulation // num_processes,
        }
        recipe_keys = recipe_runs.make_keys(inputs, recipe, num_processes)
        if "steps_per_generation" in recipe_keys:
            batch["steps_per_generation"] = 2 * accumulation
        of_inputs = {name: inputs / more[name] for name in ("replay_dataset", "ewc_reference") if name in more}
        keys = {**recipe_keys, **EVERY, **batch, **more, **of_inputs}
        jobs[name] = {"stage": recipe.split()[0], "keys": keys}
    return jobs


def in_bf16(job: sharding.Job) -> sharding.Job:
    """Return the job with bf16 autocast."""
    return {**job, "keys": {**job["keys"], "bf16": "true"}}


def resume(job: sharding.Job, run: Path, step: int = 2) -> sharding.Job:
    """Return the job resumed from a checkpoint of a finished run."""
    return {**job, "copy_of": run, "step": step}


def read_losses(run: Path) -> list[float]:
    """Return the training and held-out losses of a run, in order."""
    events = read_rows(run / "metrics.jsonl")
    return [event[name] for event in events for name in ("loss", "eval_loss") if name in event]


def read_weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all safetensors files of a folder."""
    return {name: tensor for file in run.glob("*.safetensors") for name, tensor in load_file(file).items()}


def measure_gaps(one: Path, two: Path) -> dict[str, float]:
    """Return the largest difference of each metric between two finished runs, and of their ``weights``.

    Differences are relative above 1 and absolute below; NaN counts as infinite. ``answers`` is 1 if a sampled answer
    differs, else 0.

    Args:
        one: Folder of the reference run.
        two: Folder of the other run.
    """
    events = [read_rows(run / "metrics.jsonl") for run in (one, two)]
    assert len(events[0]) == len(events[1]) >= 3 + 2, (one, two)
    losses = [event["loss"] for event in events[0] if event["kind"] == "train"]
    assert len(set(losses)) >= 2, "the loss does not change"
    gaps: dict[str, float] = {}
    for expected, got in zip(*events, strict=True):
        assert expected.keys() - WEIGHT_METRICS <= got.keys() <= expected.keys()
        for figure, value in expected.items():
            if figure in got and isinstance(value, int | float) and not any(part in figure for part in LEFT_OUT):
                gap = abs(got[figure] - value) / max(abs(value), 1)
                # ``max`` ignores NaN or not, depending on the order.
                gaps[figure] = max(gaps.get(figure, 0.0), math.inf if math.isnan(gap) else gap)
    if (one / "samples.jsonl").exists():
        answers = [(run / "samples.jsonl").read_text() for run in (one, two)]
        gaps["answers"] = float(answers[0] != answers[1])
    gaps["weights"] = measure_weight_gap(one, two)
    return gaps


def measure_weight_gap(one: Path, two: Path) -> float:
    """Return the largest difference of a weight between two finished runs; infinite for NaN."""
    weights = [read_weights(run) for run in (one, two)]
    assert weights[0].keys() == weights[1].keys() != set()
    gaps = (weights[1][name].sub(tensor).abs().nan_to_num(nan=math.inf) for name, tensor in weights[0].items())
    return max(float(gap.max()) for gap in gaps)


def assert_exported(run: Path, step: int, exported: Path) -> None:
    """Assert that the export of the checkpoint of the last step is the model that the run has written."""
    export_checkpoint(run / f"checkpoint-{step}", exported)
    names = list_model_files(run)
    assert list_model_files(exported) == names
    assert measure_weight_gap(run, exported) == 0
    # ``inference_mode`` of an adapter's differs, which PEFT sets when it loads one.
    for name in names:
        if not name.startswith("adapter") and not name.endswith(".safetensors"):
            assert (exported / name).read_bytes() == (run / name).read_bytes(), name


def assert_same_run(expected: Path, run: Path, tolerance: float = 1e-5) -> set[str]:
    """Assert that metrics, samples and weights of two finished runs differ by at most ``tolerance``.

    Returns:
        Names of what was compared: metrics, ``answers`` and ``weights``.
    """
    gaps = measure_gaps(expected, run)
    wrong = {name: gap for name, gap in gaps.items() if not gap <= tolerance}
    assert not wrong, (run, wrong)
    return set(gaps)


def assert_resumed(expected: Path, run: Path, tolerance: float = 0.0, step: int = 2) -> None:
    """Assert that a run was resumed from this step, and that its weights differ by at most ``tolerance``."""
    assert json.loads((run / "run.json").read_text())["resumed_from"] == f"checkpoint-{step}"
    assert measure_weight_gap(expected, run) <= tolerance
