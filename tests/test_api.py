"""Python API, compared with the recipes: results, errors, and the state of the calling process."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.faults import recipe_runs

import recipes_lib
from recipes_lib import check, load_run, train
from recipes_lib.api import _load
from recipes_lib.errors import ConfigError


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    recipe_runs.write_inputs(tmp_path)
    more = {"max_steps": 2, "eval_steps": 1, "logging_steps": 1, "save_strategy": "no", "num_sample_prompts": 0}
    made = recipe_runs.make_keys(tmp_path, "sft", **more, output_dir=tmp_path / "run")
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in made.items() if name != "save_steps"
    }


def test_train_returns_finished_run(keys: dict[str, Any], tmp_path: Path) -> None:
    assert check("sft", keys) == []
    run = train("sft", keys, learning_rate=1e-3)
    losses = [event["loss"] for event in run.metrics if event["kind"] == "train"]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    assert [event["step"] for event in run.metrics] == sorted(event["step"] for event in run.metrics)
    assert run.facts["config"]["learning_rate"] == 1e-3
    assert load_file(run.path / "model.safetensors")
    again = train("sft", keys, learning_rate=1e-3)
    assert (again.facts, again.metrics) == (run.facts, run.metrics)
    assert load_run(str(tmp_path / "run")).metrics == run.metrics


def test_config_file_and_overrides_match_command_line(keys: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    assert check("lora", path, lora_target_modules=["q_proj"], max_steps=3) == []
    (problem,) = check("sft", path, learnin_rate=1)
    assert problem.where == "--learnin_rate"
    with pytest.raises(ConfigError, match="learnin_rate"):
        train("sft", path, learnin_rate=1)
    with pytest.raises(ConfigError, match="there is no recipe 'sfd'"):
        train("sfd", path)


def test_python_and_numpy_values_are_converted(keys: dict[str, Any], tmp_path: Path) -> None:
    values = {**keys, "output_dir": tmp_path / "run", "learning_rate": np.float32(2e-5), "max_steps": np.int64(3)}
    assert check("sft", values) == []
    loaded = _load("sft", values, {"bf16": None, "packing": False})
    assert loaded.training["output_dir"] == str(tmp_path / "run")
    assert loaded.training["learning_rate"] == pytest.approx(2e-5)
    assert loaded.training["max_steps"] == 3
    assert (loaded.training["bf16"], loaded.tokens.packing) == (None, False)


def test_import_of_package_does_not_import_torch() -> None:
    script = "import sys, recipes_lib; recipes_lib.train; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        recipes_lib.trian  # noqa: B018
