"""``recipes plan`` of PPO: what a run holds in memory, and which launch file and device hold it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes_lib.cli import main


@pytest.fixture
def plan(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Write a recipe with changes, plan it, and return what was told."""

    def plan(*flags: object, code: int = 0, **changes: Any) -> str:
        keys = {
            "model_name_or_path": str(tiny_model_dir),
            "dataset_name": "owner/prompts",
            "output_dir": "out",
            "reward_funcs": ["package.module:function"],
            "per_device_eval_batch_size": 4,
            "response_length": 32,
            "bf16": False,
            **changes,
        }
        path = tmp_path / "ppo_tiny.yaml"
        path.write_text(yaml.safe_dump(keys))
        assert main(["plan", "--config", str(path), *map(str, flags)]) == code
        told = capsys.readouterr()
        return told.err if code else told.out

    return plan


def read(told: str, name: str) -> float:
    return float(re.search(rf"([\d.]+) GB  {name}$", told, re.MULTILINE)[1])


def test_terms_add_up_to_phases_and_the_largest_is_told(plan) -> None:
    told = plan()
    assert told.startswith(
        "accelerate_configs/ddp.yaml: a copy of everything on each process\n    models of their own\n"
    )
    assert "shared by" not in told
    # Adapters on one trunk are not shared by processes.
    assert "shared by" not in plan("--num_processes", 4, use_peft=True)
    phases = [float(size) for size in re.findall(r"([\d.]+) GB  ", told.split("at once")[1])]
    assert len(phases) == 5
    assert max(phases) == pytest.approx(float(re.search(r"([\d.]+) GB at most", told)[1]), abs=0.06)
    assert "fits 24 GB, 48 GB, 80 GB, 141 GB, 192 GB" in told
    assert "reward model" not in told
    assert "adapters of policy and critic" in plan(use_peft=True)


def test_a_batch_that_no_device_holds_fits_none(plan) -> None:
    rows = {"per_device_eval_batch_size": 10_000_000}
    assert "does not fit 24 GB, 48 GB, 80 GB, 141 GB, 192 GB" in plan(**rows)
    assert "does not fit H100" in plan("--gpu", "H100", **rows)
    assert "fits NVIDIA A100-SXM4-80GB" in plan("--gpu", "NVIDIA A100-SXM4-80GB")


def test_several_processes_are_told_both_ways(plan) -> None:
    alone, shared = plan("--num_processes", 4, per_device_eval_batch_size=1000).split("shared by 4 processes")
    assert read(alone, "logits of a batch") == read(shared, "logits of a batch")
    assert "gathered for sampling" in shared
    assert "gathered" not in alone


def test_what_makes_no_sense_is_refused(plan) -> None:
    assert "write 1 or more" in plan("--num_processes", 0, code=2)
    assert "the memory of 'Abacus' is not known" in plan("--gpu", "Abacus", code=2)
    assert "kl_coeff" in plan(kl_coeff=1, code=2)
