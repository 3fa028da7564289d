"""The launch files: keys that the installed accelerate knows, hardware only, and launches that are what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import launch_command_parser

FOLDER = Path(__file__).parents[1] / "accelerate_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
NAMES = [file.stem for file in FILES]

REPORT = """
import json, pathlib, sys
from accelerate import PartialState
state = PartialState(cpu=True)  # as TrainingArguments(use_cpu=True) makes it
if state.is_main_process:
    report = [state.num_processes, state.distributed_type.value, state.device.type]
    pathlib.Path(sys.argv[1]).write_text(json.dumps(report))
state.destroy_process_group()
"""


def find_unknown_keys(document: Mapping[str, Any]) -> list[str]:
    """Nested keys are options of ``accelerate launch``; accelerate takes any key and ignores what it does not know."""
    options = {action.dest for action in launch_command_parser()._actions}
    top = set(document) - set(ClusterConfig.__dataclass_fields__)
    nested = {
        key for section in document.values() if isinstance(section, dict) for key in section if key not in options
    }
    return sorted(top | nested)


def test_every_kind_of_hardware_has_its_file() -> None:
    assert set(NAMES) == {"cpu", "cpu_ddp", "single_gpu", "ddp", "fp8", "fsdp2", "zero2", "zero3"}


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_accelerate_knows_every_key(file: Path) -> None:
    assert find_unknown_keys(yaml.safe_load(file.read_text())) == []
    assert load_config_from_file(str(file)).num_processes >= 1


def test_a_key_that_accelerate_would_ignore_is_found() -> None:
    assert find_unknown_keys({"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard": True}}) == ["fsdp_reshard"]
    assert find_unknown_keys({"distributed": "NO"}) == ["distributed"]


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_three_lines_say_what_and_how(file: Path) -> None:
    header = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert file.read_text().splitlines()[:3] == header
    assert f"--config_file accelerate_configs/{file.name} " in header[1]


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_the_method_stays_in_the_recipe(file: Path) -> None:
    """What both could say, the launch file leaves to the recipe."""
    document = yaml.safe_load(file.read_text())
    nested = document.get("deepspeed_config", {})
    assert all(nested.get(key, "auto") == "auto" for key in ("gradient_clipping", "gradient_accumulation_steps"))
    assert bool(nested) == (document["distributed_type"] == "DEEPSPEED")
    if nested:
        assert {"gradient_clipping", "gradient_accumulation_steps"} <= set(nested)
    assert not re.search(
        "activation_checkpointing|learning_rate|max_grad_norm", file.read_text().split("distributed_type")[1]
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "expected"), [("cpu", [1, "NO", "cpu"]), ("cpu_ddp", [2, "MULTI_CPU", "cpu"])])
def test_a_launch_on_cpus_is_what_the_file_says(name: str, expected: list[object], tmp_path: Path) -> None:
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    command += ["--config_file", str(FOLDER / f"{name}.yaml"), str(script), str(tmp_path / "report.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "report.json").read_text()) == expected
