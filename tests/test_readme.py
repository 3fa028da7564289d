"""README: the matrix of methods and layouts, compared with the keys and the table of incompatible options."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.forked import ROOT

from recipes_lib.config.table import load_table
from recipes_lib.training.layouts.compatibility import BLOCKED
from recipes_lib.training.layouts.launch_environment import name_pipeline, plan_launch

README = (ROOT / "README.md").read_text(encoding="utf-8")
METHODS = {
    "pretraining": "pretrain",
    "SFT": "sft",
    "reward model": "reward",
    "DPO": "dpo",
    "PPO": "ppo",
    "RLOO, GRPO": "grpo",
    "distillation": "distill",
}
LAUNCHES = {"DDP": "ddp", "FSDP2": "fsdp2", "ZeRO": "zero2", "TP": "fsdp2_tp", "CP": "fsdp2_cp", "PP": "ddp"}
KEYS = {"LoRA": "use_peft", "QLoRA": "load_in_4bit", "vLLM": "use_vllm"}


def read_matrix() -> dict[str, dict[str, bool]]:
    (first,) = [line for line in README.splitlines() if line.startswith("| method |")]
    head = [cell.strip() for cell in first.strip("|").split("|")]
    lines = README.split(first)[1].splitlines()[2:]
    matrix = {}
    for line in lines:
        if not line.startswith("|"):
            break
        name, *cells = [re.sub(r"^\[(.*)\]\(.*\)$", r"\1", cell.strip()) for cell in line.strip("|").split("|")]
        matrix[name] = {column: cell.startswith("✓") for column, cell in zip(head[1:], cells, strict=True)}
    return matrix


def is_possible(recipe: str, column: str) -> bool:
    # Adapters of SFT have their own recipe, with the same loss and data.
    recipe = "lora" if recipe == "sft" and column in ("LoRA", "QLoRA") else recipe
    if column in KEYS:
        return KEYS[column] in load_table(recipe).keys or (recipe, column) == ("lora", "LoRA")
    if column == "full":
        return True
    keys: dict[str, Any] = {"precompute_ref_log_probs": True, "gradient_accumulation_steps": 8}
    pipeline = name_pipeline(2, "gpipe") if column == "PP" else None
    launch = plan_launch(ROOT / "accelerate_configs" / f"{LAUNCHES[column]}.yaml", None, pipeline)
    return not any(row.applies(keys, launch) for row in BLOCKED if not row.recipes or recipe in row.recipes)


@pytest.mark.parametrize("method", METHODS)
def test_method_matrix_matches_compatibility_rules(method: str) -> None:
    row = read_matrix()[method]
    assert row == {column: is_possible(METHODS[method], column) for column in row}


def test_comparison_rows_link_to_pages() -> None:
    table = README.split("## Why not")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert rows
    assert [row for row in rows if "](docs/" not in row] == []
