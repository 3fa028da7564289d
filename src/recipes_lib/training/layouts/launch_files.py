"""accelerate's launch files: reading, and the environment of a process that one starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.shipped import LAUNCH_FILES
from recipes_lib.training.layouts.launch_environment import Launch, read_launch

ENGINES: Final = ("FSDP", "DEEPSPEED")
"""What shards a model, as ``distributed_type`` of a launch file and as accelerate's ``DistributedType``."""
_PARTS: Final = ("fsdp_config", "deepspeed_config", "parallelism_config")
_OF_DEEPSPEED: Final = {
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
}


def read_launch_file(path: Path) -> dict[str, Any]:
    """Return the contents of a launch file.

    Raises:
        ConfigError: It is no YAML in UTF-8, no mapping, does not say in words what kind of launch it is, counts no
            processes, or a part of it is no mapping.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(str(path), f"it is no YAML in UTF-8: {error}", "mend it")) from error
    if not isinstance(document, dict) or "distributed_type" not in document:
        found = "has no `distributed_type`, so it is not a launch file of accelerate"
        raise ConfigError(Problem(str(path), found, f"start from one of {LAUNCH_FILES}/"))
    if not isinstance(document["distributed_type"], str):
        found = f"{document['distributed_type']!r} is not a string: without quotes YAML takes NO for false"
        raise ConfigError(Problem(f"{path}: distributed_type", found, "quote it: distributed_type: 'NO'"))
    for part in _PARTS:
        if not isinstance(document.get(part) or {}, dict):
            raise ConfigError(Problem(f"{path}: {part}", "it is not a mapping", f"take that of one of {LAUNCH_FILES}/"))
    count = document.get("num_processes", 1)
    if type(count) is not int or count < 1:
        found = f"{count!r} is not a number of processes"
        raise ConfigError(Problem(f"{path}: num_processes", found, "write a whole number from 1 on"))
    return document


def name_variables(document: Mapping[str, Any], num_processes: int | None = None) -> dict[str, str]:
    """Return the variables of the main process of a launch, as ``read_launch`` takes them.

    Args:
        document: Of the launch file.
        num_processes: Over all machines; ``None`` as the file says.

    Source: accelerate ``prepare_multi_gpu_env``, ``prepare_deepspeed_cmd_env``;
    ``tests/training/layouts/test_launch_files.py`` holds both against each other.
    """
    variables: dict[str, Any] = {
        "WORLD_SIZE": document.get("num_processes", 1) if num_processes is None else num_processes,
        "ACCELERATE_MIXED_PRECISION": document.get("mixed_precision") or "no",
        "ACCELERATE_USE_CPU": document.get("use_cpu", False),
    }
    kind = document["distributed_type"]
    if kind in ENGINES:
        variables[f"ACCELERATE_USE_{kind}"] = "true"
    if kind == "FSDP":
        variables |= {str(name).upper(): value for name, value in (document.get("fsdp_config") or {}).items()}
    if kind == "DEEPSPEED":
        given = document.get("deepspeed_config") or {}
        variables |= {_OF_DEEPSPEED[name]: value for name, value in given.items() if name in _OF_DEEPSPEED}
    variables |= {str(name).upper(): value for name, value in (document.get("parallelism_config") or {}).items()}
    return {name: str(value) for name, value in variables.items()}


def plan_launch(
    file: Path | None, num_processes: int | None = None, pipeline: Mapping[str, str] | None = None
) -> Launch:
    """Return what the main process of a launch will read, before there is one.

    Args:
        file: The launch file; ``None``: processes that are started without one.
        num_processes: Over all machines; ``None`` as the file says, or 1.
        pipeline: From ``name_pipeline``; ``None``: there is none.

    Raises:
        ConfigError: The file is none, or a number in it or the schedule; there would be no process.
    """
    if num_processes is not None and num_processes < 1:
        raise ConfigError(Problem("--num_processes", f"is {num_processes}", "write 1 or more"))
    document = {"distributed_type": "NO"} if file is None else read_launch_file(file)
    return read_launch({**name_variables(document, num_processes), **(pipeline or {})})
