"""Launch environment: rank, world size, engine and device mesh from variables, and accelerate's launch files."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.parallel.pipeline_part import PipelinePart
from recipes_lib.shipped import LAUNCH_FILES

_EXPECTED: Final = "RECIPES_LAUNCHED"
"""Launch verification: what ``recipes launch`` expects, world size and engine."""
_LEFT_TO_LOADING: Final = "RECIPES_SHARDED_WHEN_LOADED"
"""Set where accelerate's own sharding was switched off, since transformers shards the model while it loads it."""
_ON_CPUS: Final = "FSDP and DeepSpeed need an accelerator on every process; on CPUs use accelerate_configs/cpu_ddp.yaml"
_DIMENSIONS: Final = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
_PIPELINE_STAGES: Final = "PIPELINE_STAGES"
"""Launch files of accelerate have no pipeline keys: ``recipes launch`` sets the number of stages here."""
_SCHEDULE: Final = "PIPELINE_SCHEDULE"
SCHEDULES: Final = ("1f1b", "gpipe", "interleaved")
"""In which order the micro-batches of a step go through a pipeline; the first is taken where nothing is said."""

_VARIABLES: Final = {
    # Expandable segments: packed rows differ in length, so freed memory is reused in other sizes.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # NCCL's flight recorder writes started and finished collectives of each rank on a timeout.
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""Of the processes of a launch, unless the user has set them."""

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallelism of a launch file; missing values are accelerate's defaults.

    Attributes:
        uses_cpu: Whether the file asks for CPUs; processes that torch's launcher started are not told.
        fsdp_version: 1 or 2.
        state_dict_type: ``SHARDED_STATE_DICT`` or another of FSDP's.
        recomputes: Whether FSDP recomputes activations.
        offloads_weights: Whether FSDP keeps weights on the host.
        sizes: Processes along each dimension of the mesh (``dp_replicate``, ``dp_shard``, ``tp``, ``cp``, ``sp``) that
            has more than one.
        zero_stage: Of DeepSpeed.
        gathers_on_save: Whether ZeRO-3 gathers weights on saving.
        accumulation: ``gradient_accumulation_steps`` of DeepSpeed; ``None`` leaves it to the recipe.
        clipping: ``gradient_clipping`` of DeepSpeed; ``None`` leaves it to the recipe.
        offloads_optimizer: Whether DeepSpeed updates on the host.
        pipeline_stages: Processes of a pipeline, each with a part of the layers; 1 is none.
        schedule: One of ``SCHEDULES``.
    """

    uses_cpu: bool = False
    fsdp_version: int = 1
    state_dict_type: str = "SHARDED_STATE_DICT"
    recomputes: bool = False
    offloads_weights: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    zero_stage: int = 2
    gathers_on_save: bool = False
    accumulation: int | None = None
    clipping: float | None = None
    offloads_optimizer: bool = False
    pipeline_stages: int = 1
    schedule: str = SCHEDULES[0]


@dataclass(frozen=True, slots=True)
class Launch:
    """State of the launch in this process, from the launcher (accelerate, torchrun, SLURM through either).

    Attributes:
        rank: Index of this process among all.
        local_rank: Index of this process on its machine.
        world_size: Number of processes.
        engine: ``FSDP``, ``DEEPSPEED`` or empty: the sharding that the launch file asked accelerate for.
        precision: ``mixed_precision`` of the launch file: ``no``, ``bf16``, ``fp16`` or ``fp8``.
        layout: What else the launch file says.
    """

    rank: int
    local_rank: int
    world_size: int
    engine: str
    precision: str = "no"
    layout: Layout = Layout()

    @property
    def is_main(self) -> bool:
        """True on the one process that writes files and prints."""
        return self.rank == 0

    @property
    def tensor_size(self) -> int:
        """Size of the tensor-parallel group; 1: no tensor parallelism."""
        return self.layout.sizes.get("tp", 1)

    @property
    def tensor_rank(self) -> int:
        """Rank in the tensor-parallel group."""
        return self.rank % self.tensor_size

    @property
    def context_size(self) -> int:
        """Size of the context-parallel group; 1: no context parallelism."""
        return self.layout.sizes.get("cp", 1) * self.layout.sizes.get("sp", 1)

    @property
    def shares_by_heads(self) -> bool:
        """Whether context parallelism is Ulysses (all-to-all of heads) instead of an all-gather of keys."""
        return "sp" in self.layout.sizes

    @property
    def context_rank(self) -> int:
        """Rank in the context-parallel group."""
        return self.rank % self.context_size

    @property
    def data_size(self) -> int:
        """Number of data-parallel ranks; a tensor, context or pipeline group counts as one."""
        # A launch that does not fill one group is rejected by the next check.
        return max(1, self.world_size // (self.tensor_size * self.context_size * self.layout.pipeline_stages))

    @property
    def data_rank(self) -> int:
        """Data-parallel rank of this process, or of its group."""
        if self.layout.pipeline_stages > 1:
            # Ranks of a pipeline are far apart, so that ranks with the same stage, which reduce gradients, are
            # neighbours.
            return self.rank // self.tensor_size % self.data_size
        # Ranks of a tensor or context group are neighbours, and take the same rows.
        return self.rank * self.data_size // self.world_size

    @property
    def part(self) -> PipelinePart | None:
        """Layers of this process's pipeline stage; ``None``: the whole model."""
        if self.layout.pipeline_stages == 1:
            return None
        num_chunks = 2 if self.layout.schedule == "interleaved" else 1
        stage = self.rank * self.layout.pipeline_stages // self.world_size
        return PipelinePart(stage, self.layout.pipeline_stages, num_chunks, self.tensor_size)


def read_launch(variables: Mapping[str, str] | None = None) -> Launch:
    """Read the launch from the environment; one process without variables of a launcher.

    Args:
        variables: Those of another process, such as the one that a launch file would start; ``None`` is this one's.

    Raises:
        ConfigError: A number is none, or there is no such schedule of a pipeline.
    """
    told = os.environ if variables is None else variables
    engine = ""
    if _is_true(told, "ACCELERATE_USE_FSDP") or _is_true(told, _LEFT_TO_LOADING):
        engine = "FSDP"
    if _is_true(told, "ACCELERATE_USE_DEEPSPEED"):
        engine = "DEEPSPEED"
    return Launch(
        rank=_read_number(told, "RANK", 0),
        local_rank=_read_number(told, "LOCAL_RANK", 0),
        world_size=_read_number(told, "WORLD_SIZE", 1, least=1),
        engine=engine,
        precision=told.get("ACCELERATE_MIXED_PRECISION", "no").lower(),
        layout=_read_layout(told),
    )


def _read_layout(told: Mapping[str, str]) -> Layout:
    schedule = told.get(_SCHEDULE, SCHEDULES[0]).lower()
    if schedule not in SCHEDULES:
        raise ConfigError(Problem(_SCHEDULE, f"there is no schedule {schedule!r}", f"write {' or '.join(SCHEDULES)}"))
    sizes = {name: _read_number(told, f"PARALLELISM_CONFIG_{name.upper()}_SIZE", 1, least=1) for name in _DIMENSIONS}
    accumulation, clipping = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING"
    return Layout(
        uses_cpu=_is_true(told, "ACCELERATE_USE_CPU"),
        fsdp_version=_read_number(told, "FSDP_VERSION", 1, least=1),
        state_dict_type=told.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT"),
        recomputes=_is_true(told, "FSDP_ACTIVATION_CHECKPOINTING"),
        offloads_weights=_is_true(told, "FSDP_OFFLOAD_PARAMS"),
        sizes={name: size for name, size in sizes.items() if size > 1},
        zero_stage=_read_number(told, "ACCELERATE_DEEPSPEED_ZERO_STAGE", 2),
        gathers_on_save=_is_true(told, "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"),
        accumulation=None if told.get(accumulation, "auto") == "auto" else _read_number(told, accumulation, 1, least=1),
        clipping=None if told.get(clipping, "auto") in ("auto", "none") else _read_number(told, clipping, 1.0),
        offloads_optimizer=told.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none") != "none",
        pipeline_stages=_read_number(told, _PIPELINE_STAGES, 1, least=1),
        schedule=schedule,
    )


def _read_number(told: Mapping[str, str], name: str, default: _Number, least: int = 0) -> _Number:
    text = told.get(name, str(default))
    try:
        number = type(default)(text)  # ``int`` refuses "1.5", which ``float`` takes.
        is_right = number >= least and math.isfinite(number)
    except ValueError:
        is_right = False
    if not is_right:
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise ConfigError(Problem(name, f"{text!r} is not {kind} from {least} on", f"write {kind}"))
    return number


def add_pipeline_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of pipeline parallelism; the defaults are the environment variables."""
    layout = read_launch().layout
    parser.add_argument(
        "--pipeline_stages", type=int, default=layout.pipeline_stages, help="processes that share the layers of a model"
    )
    parser.add_argument("--pipeline_schedule", default=layout.schedule, help=f"one of {', '.join(SCHEDULES)}")


def name_pipeline(stages: int, schedule: str) -> dict[str, str]:
    """Return the environment variables of pipeline parallelism."""
    return {_PIPELINE_STAGES: str(stages), _SCHEDULE: schedule}


def _is_true(told: Mapping[str, str], name: str) -> bool:
    return told.get(name, "").lower() in {"1", "true"}


def read_environment() -> Mapping[str, str]:
    """Return the variables of this process."""
    return dict(os.environ)


def keep_from_accelerate(launch: Launch) -> None:
    """Disable the parallelism of accelerate that this library implements; accelerate only starts the processes.

    accelerate 1.15 does not apply tensor parallelism to a loaded model, and does not support transformers' classes for
    one that is sharded while it is loaded. It would shard a pipeline stage over all ranks, not over those that hold it.
    Under context parallelism it would drop the attention masks, for torch's ring under FSDP and for sdpa under
    DeepSpeed, so that packed documents see each other; and DeepSpeed doubles gradients at ZeRO-1 and 2.
    """
    if launch.engine == "FSDP" and (launch.tensor_size > 1 or launch.layout.pipeline_stages > 1):
        os.environ[_LEFT_TO_LOADING] = "true"
        os.environ["ACCELERATE_USE_FSDP"] = os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "false"
    if launch.context_size > 1:
        os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "false"


def keep_engine_in_process() -> None:
    """Configure vLLM to run in this process and send no usage data; before it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"


def expect_launch(num_processes: int, engine: str, pipeline: Mapping[str, str] | None = None) -> None:
    """Set the expected world size and sharding for the processes that this one starts.

    Also sets the options of the GPU allocator and of NCCL's flight recorder.

    Args:
        num_processes: Over all machines.
        engine: As ``Launch`` has it.
        pipeline: From ``name_pipeline``.
    """
    os.environ[_EXPECTED] = f"{num_processes} {engine}"
    os.environ.update(pipeline or {})
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)


def verify_expected(launch: Launch) -> None:
    """Raise in a process whose launch differs from the expected one; first of all checks, without communication.

    Raises:
        ConfigError: There are more or fewer processes than ``recipes launch`` asked for, or something else shards them.
    """
    if (expected := os.environ.get(_EXPECTED)) is None:
        return
    num_processes, _, engine = expected.partition(" ")
    if (int(num_processes), engine) != (launch.world_size, launch.engine):
        found = (
            f"{num_processes} processes under {engine or 'no sharding'} were asked for; this is one of "
            f"{launch.world_size} under {launch.engine or 'no sharding'}"
        )
        raise ConfigError(Problem("launch", found, "see whether all machines were started, with the same launch file"))


def verify_rendezvous(launch: Launch) -> None:
    """Raise if one of several processes cannot meet the others, before it loads anything.

    Raises:
        ConfigError: Its rank is out of range, or the address of the rendezvous is missing.
    """
    if launch.world_size == 1:
        return
    problems = []
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        found = f"is {launch.world_size}, and there is no {', '.join(missing)}"
        remedy = "start by `recipes launch`, `accelerate launch` or torchrun, or unset WORLD_SIZE for one process"
        problems.append(Problem("WORLD_SIZE", found, remedy))
    elif launch.rank >= launch.world_size:
        found = f"is {launch.rank}, and the ranks of {launch.world_size} processes end at {launch.world_size - 1}"
        problems.append(Problem("RANK", found, "give every process a rank of its own, from 0 on"))
    if (port := os.environ.get("MASTER_PORT")) and not (port.isdecimal() and 1 <= int(port) < 2**16):
        problems.append(Problem("MASTER_PORT", f"{port!r} is not a port", "write a number from 1 to 65535"))
    if problems:
        raise ConfigError(*problems)


def verify_accelerator(launch: Launch, *, is_available: bool) -> None:
    """Raise for a sharded run on a machine without the accelerator that it needs, before anything is loaded.

    Args:
        launch: What the launcher asked for.
        is_available: Whether torch finds an accelerator.

    Raises:
        ConfigError: The launch file asked for FSDP or DeepSpeed, which need one.
    """
    if launch.engine and not is_available and "ACCELERATE_TORCH_DEVICE" not in os.environ:
        found = f"the launch file asks for {launch.engine}, and torch finds no GPU on this machine"
        raise ConfigError(Problem("launch", found, _ON_CPUS))


def verify_launch(launch: Launch, num_processes: int, distributed_type: str) -> None:
    """Raise if accelerate has silently changed the launch.

    Args:
        launch: What the launcher asked for.
        num_processes: ``accelerate``'s number of processes, after its state exists.
        distributed_type: ``accelerate``'s ``DistributedType`` value, such as ``NO`` or ``MULTI_GPU``; FSDP on several
            GPUs is ``MULTI_GPU`` still.

    Raises:
        ConfigError: Fewer processes work together than were started, so that each would train a copy of its own.
        ConfigError: The launch file asked for FSDP or DeepSpeed and accelerate is running without it.
    """
    if num_processes != launch.world_size:
        raise ConfigError(
            Problem(
                "launch",
                f"{launch.world_size} processes were started but accelerate joined {num_processes}: "
                "each would train a model of its own",
                "on a machine without GPUs set use_cpu: true in the launch file and distributed_type: MULTI_GPU, "
                "or start with `torchrun --nproc_per_node N`",
            )
        )
    # accelerate uses FSDP only with several accelerators, and only once its Accelerator is built; other code that loads
    # a model can build it earlier.
    becomes = "FSDP" if launch.engine == "FSDP" and distributed_type not in ("NO", "MULTI_CPU") else distributed_type
    if launch.engine and becomes != launch.engine:
        raise ConfigError(
            Problem(
                "launch",
                f"the launch file asks for {launch.engine} but accelerate is running {distributed_type}",
                _ON_CPUS,
            )
        )


def verify_engine(launch: Launch, distributed_type: str, *, tensor_size: int = 1, is_in_shards: bool = False) -> None:
    """Raise if the run is not sharded by the launched engine, once accelerate has chosen one.

    Args:
        launch: What the launcher asked for.
        distributed_type: Of the finished ``Accelerator``.
        tensor_size: Processes that share the tensors of the model.
        is_in_shards: Whether it is sharded already, without accelerate.

    Raises:
        ConfigError: The launch file asked for FSDP or DeepSpeed and there is none, or the other way round.
        ConfigError: It asked for tensors to be shared by another number of processes.
    """
    if tensor_size != launch.tensor_size:
        found = f"tensors were to be cut into {launch.tensor_size}, and the model's are in {tensor_size}"
        raise ConfigError(Problem("launch", found, "start by `accelerate launch --config_file` and one of our files"))
    engine = distributed_type if distributed_type in ("FSDP", "DEEPSPEED") else ""
    if is_in_shards and not engine:
        engine = "FSDP"
    if engine != launch.engine:
        found = f"{launch.engine or 'no sharding'} was launched and accelerate is running {distributed_type}"
        raise ConfigError(Problem("launch", found, "start by `accelerate launch --config_file` and one of our files"))


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
        raise ConfigError(Problem(str(path), f"it is not YAML in UTF-8: {error}", "fix it")) from error
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
    """Return the environment variables of the main process of a launch, for ``read_launch``.

    Args:
        document: Of the launch file.
        num_processes: Over all machines; ``None`` as the file says.

    Source: accelerate ``prepare_multi_gpu_env``, ``prepare_deepspeed_cmd_env``;
    ``tests/training/layouts/test_launch_files.py`` compares both.
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
    """Return the launch state of the main process, before the launch.

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
