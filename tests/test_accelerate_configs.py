"""The launch files: keys that the installed accelerate knows, hardware only, and launches that are what they say."""

from __future__ import annotations

import json
import math
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
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

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
    on_one_gpu, by_deepspeed = {"single_gpu", "fp8"}, {"zero1", "zero2", "zero3", "zero3_offload", "zero3_sp"}
    by_torch = {"ddp", "fsdp2", "fsdp2_cp", "fsdp2_offload", "fsdp2_tp", "hsdp"}
    assert set(NAMES) == {"cpu", "cpu_ddp"} | by_torch | on_one_gpu | by_deepspeed


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_accelerate_knows_every_key(file: Path) -> None:
    assert find_unknown_keys(yaml.safe_load(file.read_text())) == []
    assert load_config_from_file(str(file)).num_processes >= 1


def test_a_key_that_accelerate_would_ignore_is_found() -> None:
    assert find_unknown_keys({"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard": True}}) == ["fsdp_reshard"]
    assert find_unknown_keys({"distributed": "NO"}) == ["distributed"]


def read_environment(file: Path, *flags: str) -> dict[str, str]:
    """What accelerate itself hands to the processes of a launch."""
    arguments = ["--config_file", str(file), "--main_process_port", "0", *flags, "recipe.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        command, environment = prepare_deepspeed_cmd_env(args)
        assert command is None, "processes of several machines would be started over ssh by the first of them"
        return environment
    return prepare_multi_gpu_env(args)


SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
ZERO3 = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ddp", {"ACCELERATE_MIXED_PRECISION": "bf16"}),
        ("fsdp2", SHARDED | {"FSDP_OFFLOAD_PARAMS": "false", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}),
        ("fsdp2_offload", SHARDED | {"FSDP_OFFLOAD_PARAMS": "true"}),
        (
            "hsdp",
            SHARDED | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "8"},
        ),
        (
            "fsdp2_tp",
            SHARDED | {"PARALLELISM_CONFIG_TP_SIZE": "8", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
        ),
        ("fsdp2_cp", SHARDED | {"PARALLELISM_CONFIG_CP_SIZE": "4", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}),
        ("zero1", {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}),
        ("zero2", {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}),
        ("zero3", ZERO3 | {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none"}),
        ("zero3_sp", ZERO3 | {"PARALLELISM_CONFIG_SP_SIZE": "4", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}),
        (
            "zero3_offload",
            ZERO3 | {f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_DEVICE": "cpu" for what in ("PARAM", "OPTIMIZER")},
        ),
    ],
)
def test_the_processes_are_told_what_the_file_says(
    name: str, expected: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    environment = read_environment(FOLDER / f"{name}.yaml", "--machine_rank", "0", "--main_process_ip", "127.0.0.1")
    assert {key: environment[key] for key in expected} == expected
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    if "PARALLELISM_CONFIG_DP_SHARD_SIZE" in expected:
        parts = ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")
        sizes = [int(environment[f"PARALLELISM_CONFIG_{part}_SIZE"]) for part in parts]
        assert math.prod(sizes) == yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["num_processes"]


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero3_offload", "zero3_sp"])
def test_each_of_several_machines_starts_its_own_processes(name: str) -> None:
    """By torch's launcher; left alone, DeepSpeed on each of them would start processes on a list of hosts."""
    told = ("--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "127.0.0.1")
    assert read_environment(FOLDER / f"{name}.yaml", *told)["ACCELERATE_USE_DEEPSPEED"] == "true"


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
@pytest.mark.parametrize(
    ("name", "expected"),
    [pytest.param("cpu", [1, "NO", "cpu"], marks=pytest.mark.slow), ("cpu_ddp", [2, "MULTI_CPU", "cpu"])],
)
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
