"""Shipped configurations, offline: checked and planned with the shapes of their models, run on small models."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from tests import stand_ins
from tests.distributed import sharding
from tests.forked import ROOT

from recipes_lib.cli import main
from recipes_lib.config.loader import load_config
from recipes_lib.config.table import RECIPE_NAMES
from recipes_lib.models.attention import kernels
from recipes_lib.planning.compute import find_planned_model
from recipes_lib.training.layouts.launch_environment import plan_launch
from recipes_lib.training.optim.compilation import choose_compilation, choose_liger
from recipes_lib.training.trainers.pair_trainer import choose_pair_attention

FOLDER = ROOT / "recipes" / "configs"
PAGE = ROOT / "docs" / "recipes.md"
STAND_INS = {
    "model_name_or_path": "model",
    "teacher_model_name_or_path": "teacher",
    "reward_model_name_or_path": "reward",
}


def read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


CONFIGS = {
    path.relative_to(FOLDER).with_suffix("").as_posix(): path
    for path in sorted(FOLDER.rglob("*.yaml"))
    if path.parent.name != "demo"
    and path.stem.split("_")[0] in RECIPE_NAMES  # eval, corpus and synthesize do not train
    and "model_name_or_path" in read(path)
}
TRAINED = {
    **CONFIGS,
    **{
        path.relative_to(FOLDER).with_suffix("").as_posix(): path
        for path in sorted(FOLDER.rglob("pretrain*.yaml"))
        if path.parent.name != "demo"
    },
}
USED = re.compile(r"^# On an H100: (.*)$", re.MULTILINE)
PLANNED = re.compile(r"^# Planned for H100: (.*)$", re.MULTILINE)
FEW = {
    "bf16": "false",
    "use_cpu": "true",
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "no",
    "max_truncated_fraction": 1,
    "num_sample_prompts": 0,
}
FEW_OF_RECIPE: dict[str, dict[str, Any]] = {
    "pretrain": {"max_tokens": 2 * 2 * 64, "max_length": 64, "warmup_steps": 1, "test_split_size": 2},
    "ppo": {"num_mini_batches": 2, "response_length": 8, "max_length": 96, "per_device_train_batch_size": 4},
    "grpo": {
        "num_generations": 2,
        "steps_per_generation": 1,
        "response_length": 8,
        "max_length": 96,
        "per_device_train_batch_size": 4,
    },
}
NOT_OF_RECIPE = {"pretrain": ("max_steps",), "reward": ("num_sample_prompts",)}
# bitsandbytes and vLLM may not be installed; a random model earns no reward by the shipped functions.
REPLACED = {
    "load_in_4bit": "false",
    "use_bnb_nested_quant": "true",
    "optim": "adamw_torch",
    "reward_funcs": "[tests.faults.recipe_runs:prefer_short]",
    "use_vllm": "false",
    "vllm_gpu_memory_utilization": "0.3",
    "vllm_enable_sleep_mode": "false",
}


def find_recipe(name: str) -> str:
    return name.split("/")[1].split("_")[0]


def build_jobs(folder: Path, names: list[str]) -> Iterator[tuple[str, sharding.Job]]:
    """Yield each configuration as a job, with a small model and rows of the same columns."""
    for name in names:
        values, recipe = read(CONFIGS[name]), find_recipe(name)
        keys: dict[str, Any] = {"config": CONFIGS[name], "prepared_dir": folder / "prepared", **FEW}
        if recipe in ("ppo", "grpo", "rloo"):
            del keys["prepared_dir"]
        if recipe not in ("sft", "lora", "distill"):
            del keys["max_truncated_fraction"]
        for key in NOT_OF_RECIPE.get(recipe, ()):
            del keys[key]
        keys |= FEW_OF_RECIPE.get(recipe, {})
        for key, kind in STAND_INS.items():
            if key in values:
                known = values[key] if values[key] in stand_ins.SHAPES else values["model_name_or_path"]
                place = folder / kind / known.replace("/", "--")
                if not place.exists():
                    stand_ins.save_small(known, place, is_scorer=kind == "reward")
                keys |= {key: place, key.replace("name_or_path", "revision"): "null"}
        keys |= {key: value for key, value in REPLACED.items() if key in values}
        yield name, {"stage": recipe, "keys": keys | replace_data(values, folder)}


def replace_data(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the keys that replace Hub datasets by files."""
    if "dataset_mixture" in values:
        parts = [
            {"name": str(stand_ins.write_rows(part["name"], folder)[0]), "weight": part["weight"]}
            for part in values["dataset_mixture"]
        ]
        return {"dataset_mixture": json.dumps(parts)}
    train, test = stand_ins.write_rows(values["dataset_name"], folder)
    return {
        "dataset_name": train,
        "dataset_test_split": test,
        "dataset_train_split": "train",
        **{key: "null" for key in ("dataset_config", "dataset_revision") if key in values},
    }


def describe_plan(name: str) -> str:
    """Return the plan of a configuration for the launch of its own command, in one line."""
    head = CONFIGS[name].read_text(encoding="utf-8").split("\n\n")[0]
    command = next(line for line in head.splitlines() if str(CONFIGS[name].relative_to(ROOT)) in line)
    launch = re.search(r"accelerate_configs/(\w+)\.yaml", command)
    layout = launch[1] if launch else "single_gpu"
    number = re.search(r"--num_processes (\d+)", command)
    processes = number[1] if number else "1" if layout == "single_gpu" else "8"
    # The width of the terminal breaks lines.
    with mock.patch.dict(os.environ, COLUMNS="200"), contextlib.redirect_stdout(io.StringIO()) as stream:
        assert main(["plan", "--config", str(CONFIGS[name]), "--num_processes", processes, "--gpu", "H100"]) == 0
    output = stream.getvalue()
    memory = re.search(r"([\d.]+) GB (?:with all|at most)", output[output.index(f"accelerate_configs/{layout}.yaml") :])
    assert memory
    time = re.search(r"^time +([\d.e-]+) s a step.*\n +([\d.]+) hours for 1,000,000,000", output, re.MULTILINE)
    iteration = re.search(r"^time +([\d.]+) s an iteration", output, re.MULTILINE)
    whole = re.search(r"^time +([\d.,]+) hours", output, re.MULTILINE)
    line = f"{memory[1]} GB on each GPU"
    if time:
        line += f"; {time[1]} s a step, {time[2]} hours for a billion tokens"
    if iteration:
        line += f"; {iteration[1]} s an iteration"
    if whole:
        line += f"; {whole[1]} hours"
    if share := re.search(r"^share of peak +([\d.]+)", output, re.MULTILINE):
        line += f", at {float(share[1]):.0%} of the peak".replace("%", " %")
    return f"{line}."


def describe_kernels(name: str) -> str:
    """Return the kernels of a run on an H100, by the functions that training uses, in one line."""
    config = load_config(find_recipe(name), ["--config", str(TRAINED[name])])
    device = torch.device("cuda")
    args: Any = SimpleNamespace(bf16=True, fp16=False, mixed_precision="bf16", device=device)
    model_config, attentions = find_planned_model(config), dict.fromkeys(())
    for installed in ("flash_attention_3", "flash_attention_2", ""):
        there = {flash: lambda is_there=flash == installed: is_there for flash in kernels.FLASH_IS_INSTALLED}
        with mock.patch.dict(kernels.FLASH_IS_INSTALLED, there):
            attentions[choose_implementation(config, model_config, args)] = None
    launch = plan_launch(None)
    with (
        mock.patch("recipes_lib.training.optim.compilation.find_compiler_obstacle", return_value=""),
        mock.patch("recipes_lib.training.optim.compilation.is_liger_kernel_available", return_value=True),
    ):
        is_compiled = choose_compilation(config, launch, is_cuda=True) is not None
        uses_liger = choose_liger(config, launch, is_cuda=True)["use_liger_kernel"]
    checkpointing = {"auto": "by the memory plan (auto)", True: "of every layer"}
    return (
        f"attention by {' or '.join(attentions)}; Liger's kernels {'on' if uses_liger else 'off'}; layers "
        f"{'compiled' if is_compiled else 'eager'}; activation checkpointing "
        f"{checkpointing.get(config.read('activation_checkpointing'), 'off')}."
    )


def choose_implementation(config: Any, model_config: Any, args: Any) -> str:
    """Return the attention implementation that a recipe chooses."""
    if config.recipe in ("dpo", "reward"):
        length = config.tokens.max_length or 1024
        return choose_pair_attention(config, model_config, args, max_length=length).implementation
    samples = config.recipe in ("ppo", "rloo", "grpo")
    packing = not (samples or config.pretraining.cross_document_attention) and config.tokens.packing
    choice = kernels.choose_attention(config.model, model_config, args, packing=packing, flattens=not samples)
    return choice.implementation


QUICK = ["qwen3-0.6b/sft", "smollm2-1.7b/pretrain_continued"]
# Architectures and recipes pairwise; the others are slow.
REPRESENTATIVE = ["gemma3-1b/sft", "llama3-8b/reward", "qwen3-0.6b/dpo", "llama3-1b/distill", "smollm3-3b/sft"]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_planned_header_matches_planner(name) -> None:
    found = PLANNED.search(CONFIGS[name].read_text(encoding="utf-8"))
    assert found, "write `# Planned for H100: ...` below the hardware"
    assert found[1] == describe_plan(name), "run python -m tests.recipes.planned_headers"


@pytest.mark.parametrize("name", TRAINED)
def test_kernels_header_matches_choices_of_training(name) -> None:
    found = USED.search(TRAINED[name].read_text(encoding="utf-8"))
    assert found, "run python -m tests.recipes.planned_headers"
    assert found[1] == describe_kernels(name), "run python -m tests.recipes.planned_headers"


def test_page_lists_every_config_with_its_plan() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "](" in line]
    assert len([row for row in rows if row.startswith("| [")]) == len(CONFIGS)
    for name, path in CONFIGS.items():
        (row,) = [row for row in rows if row.startswith(f"| [{name}](../{path.relative_to(ROOT)})")]
        found = PLANNED.search(path.read_text(encoding="utf-8"))
        assert (found[1].rstrip(".") if found else "") == row.rpartition("|")[0].rpartition("|")[2].strip()


@pytest.mark.parametrize(
    "name", [name if name in REPRESENTATIVE else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_config_passes_check_on_shape_of_its_model(name, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    # Weights of 70B need not fit on this disk.
    monkeypatch.setattr("recipes_lib.planning.disk.shutil.disk_usage", lambda _: SimpleNamespace(free=10**14))
    values, keys = read(CONFIGS[name]), {}
    for key in STAND_INS:
        if key in values:
            known = values[key] if values[key] in stand_ins.SHAPES else values["model_name_or_path"]
            keys |= {key: stand_ins.save_shape(known, tmp_path / key), key.replace("name_or_path", "revision"): "null"}
    keys |= replace_data(values, tmp_path) | {"output_dir": tmp_path / "out", "use_cpu": "true"}
    if find_recipe(name) not in ("ppo", "grpo"):
        keys["prepared_dir"] = tmp_path / "prepared"
    if find_recipe(name) == "pretrain":
        keys["test_split_size"] = 2
    if find_recipe(name) == "grpo":
        # The configuration answers more than these 24 prompts per iteration.
        keys |= FEW_OF_RECIPE["grpo"] | {"gradient_accumulation_steps": 1}
        keys |= {key: value for key, value in REPLACED.items() if "vllm" in key and key in values}
    flags = [f"--{key}={value}" for key, value in keys.items()]
    code = main(["check", "--config", str(CONFIGS[name]), "--recipe", find_recipe(name), *flags])
    captured = capsys.readouterr()
    assert code == 0, captured.out + captured.err
    assert "ready to train" in captured.out


@pytest.mark.parametrize("names", [REPRESENTATIVE, pytest.param(list(CONFIGS), marks=pytest.mark.slow)], ids=len)
def test_configs_train_two_steps_on_small_models(names, tmp_path) -> None:
    jobs = dict(build_jobs(tmp_path, names))
    ended = sharding.run_jobs(jobs, tmp_path / "out")
    assert ended["codes"] == dict.fromkeys(names, 0)
    for name, job in jobs.items():
        assert (tmp_path / "out" / name / "run.json").exists()
        config = load_config(job["stage"], ["--config", str(CONFIGS[name])])
        weights = "adapter_model" if config.adapter.use_peft else "model"
        assert (tmp_path / "out" / name / f"{weights}.safetensors").exists()


def group_by_launch() -> dict[tuple[str, str], list[str]]:
    """Group configurations by launch file and recipe; those for one GPU run under DDP."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, path in CONFIGS.items():
        layout = "fsdp2" if "fsdp2.yaml" in path.read_text(encoding="utf-8") else "ddp"
        groups.setdefault((layout, find_recipe(name)), []).append(name)
    return groups


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("group", group_by_launch().items(), ids=lambda group: "-".join(group[0]))
def test_configs_train_on_two_processes_by_launch_file(group, tmp_path) -> None:
    (layout, _), names = group
    jobs = dict(build_jobs(tmp_path, names))
    ended = sharding.run_jobs(jobs, tmp_path / "out", layout, "--mixed_precision", "no")
    assert ended["codes"] == dict.fromkeys(names, 0)
