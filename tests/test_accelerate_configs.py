"""Launch files in ``accelerate_configs/``: keys known to the installed accelerate, hardware only, actual launches."""

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
state = PartialState(cpu=True)  # as TrainingArguments(use_cpu=True) creates it
if state.is_main_process:
    report = [state.num_processes, state.distributed_type.value, state.device.type]
    pathlib.Path(sys.argv[1]).write_text(json.dumps(report))
state.destroy_process_group()
"""


def find_unknown_keys(document: Mapping[str, Any]) -> list[str]:
    """Return keys that accelerate would silently ignore; nested ones must be options of ``accelerate launch``."""
    options = {action.dest for action in launch_command_parser()._actions}
    top = set(document) - set(ClusterConfig.__dataclass_fields__)
    nested = {
        key for section in document.values() if isinstance(section, dict) for key in section if key not in options
    }
    return sorted(top | nested)


def test_launch_files_cover_every_kind_of_hardware() -> None:
    on_one_gpu, by_deepspeed = {"single_gpu", "fp8"}, {"zero1", "zero2", "zero3", "zero3_offload", "zero3_sp"}
    by_torch = {"ddp", "fsdp2", "fsdp2_cp", "fsdp2_offload", "fsdp2_tp", "hsdp"}
    assert set(NAMES) == {"cpu", "cpu_ddp"} | by_torch | on_one_gpu | by_deepspeed


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_launch_file_keys_are_known_to_accelerate(file: Path) -> None:
    assert find_unknown_keys(yaml.safe_load(file.read_text())) == []
    assert load_config_from_file(str(file)).num_processes >= 1


def test_find_unknown_keys_reports_keys_that_accelerate_ignores() -> None:
    assert find_unknown_keys({"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard": True}}) == ["fsdp_reshard"]
    assert find_unknown_keys({"distributed": "NO"}) == ["distributed"]


def read_environment(file: Path, *flags: str) -> dict[str, str]:
    """Return the environment variables that accelerate itself sets for the processes of a launch."""
    arguments = ["--config_file", str(file), "--main_process_port", "0", *flags, "recipe.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        command, environment = prepare_deepspeed_cmd_env(args)
        assert command is None, "the first machine would start the processes of all machines over ssh"
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
        ("hsdp", SHARDED | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "8"}),
        ("fsdp2_tp", SHARDED | {"PARALLELISM_CONFIG_TP_SIZE": "8", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}),
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
def test_launch_file_sets_environment_of_processes(name, expected, monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    environment = read_environment(FOLDER / f"{name}.yaml", "--machine_rank", "0", "--main_process_ip", "127.0.0.1")
    assert {key: environment[key] for key in expected} == expected
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    if "PARALLELISM_CONFIG_DP_SHARD_SIZE" in expected:
        parts = ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")
        sizes = [int(environment[f"PARALLELISM_CONFIG_{part}_SIZE"]) for part in parts]
        assert math.prod(sizes) == yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["num_processes"]


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero3_offload", "zero3_sp"])
def test_deepspeed_multi_node_launch_uses_torch_launcher(name: str) -> None:
    """By default, accelerate starts DeepSpeed's own launcher, which needs a host file and ssh."""
    flags = ("--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "127.0.0.1")
    assert read_environment(FOLDER / f"{name}.yaml", *flags)["ACCELERATE_USE_DEEPSPEED"] == "true"


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_launch_file_begins_with_three_comment_lines(file: Path) -> None:
    header = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert file.read_text().splitlines()[:3] == header
    assert f"--config_file accelerate_configs/{file.name} " in header[1]


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_launch_file_sets_no_training_hyperparameter(file: Path) -> None:
    """Settings that both could define are left to the recipe (``auto`` for DeepSpeed)."""
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
def test_cpu_launch_has_the_declared_processes(name: str, expected: list[object], tmp_path: Path) -> None:
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    command += ["--config_file", str(FOLDER / f"{name}.yaml"), str(script), str(tmp_path / "report.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "report.json").read_text()) == expected
