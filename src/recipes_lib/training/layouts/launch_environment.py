"""Launch environment: rank, world size, engine and device mesh from variables, and accelerate's launch files."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from recipes_lib.config.paths import LAUNCH_FILES
from recipes_lib.config.values import read_yaml
from recipes_lib.errors import ConfigError, Problem, suggest
from recipes_lib.files import read_record, verify_fields
from recipes_lib.models.parallel.pipeline_part import PipelinePart
from recipes_lib.quantities import pluralize

_EXPECTED: Final = "RECIPES_LAUNCHED"
"""World size and engine that ``recipes launch`` expects of the processes it starts."""
_LEFT_TO_LOADING: Final = "RECIPES_SHARDED_WHEN_LOADED"
"""Set when accelerate's FSDP was disabled because this library or transformers shards the model."""
_ON_CPUS: Final = "FSDP and DeepSpeed need an accelerator on every process; on CPUs use accelerate_configs/cpu_ddp.yaml"
_DIMENSIONS: Final = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
_PIPELINE_STAGES: Final = "PIPELINE_STAGES"
"""Launch files of accelerate have no pipeline keys: ``recipes launch`` sets the number of stages here."""
_SCHEDULE: Final = "PIPELINE_SCHEDULE"
SCHEDULES: Final = ("1f1b", "gpipe", "interleaved")
"""Pipeline schedules; the first is the default."""

_PRECISION: Final = "ACCELERATE_MIXED_PRECISION"
_PRECISIONS: Final = ("no", "bf16", "fp16", "fp8")
_USES_CPU: Final = "ACCELERATE_USE_CPU"
_DYNAMO: Final = "ACCELERATE_DYNAMO_BACKEND"
_DEEPSPEED_FILE: Final = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_DEEPSPEED_VARIABLES: Final = {
    "deepspeed_config_file": _DEEPSPEED_FILE,
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
}
"""Key of ``deepspeed_config`` in a launch file -> environment variable that accelerate sets."""

_VARIABLES: Final = {
    # Expandable segments: packed rows differ in length, so freed memory is reused in other sizes.
    ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"): "expandable_segments:True",
    # NCCL's flight recorder writes started and finished collectives of each rank on a timeout.
    ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
}
"""Environment variable of the launched processes, with its former names -> default."""

_START: Final = "start by `recipes launch`, `accelerate launch` or torchrun"

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallelism of a launch file; missing values are accelerate's defaults.

    Attributes:
        uses_cpu: Whether the file sets ``use_cpu``; False in several processes that ``recipes launch`` did not start.
        fsdp_version: 1 or 2.
        has_strategy: Whether FSDP has a sharding strategy of FSDP1 other than ``fsdp_sharding_strategy: FULL_SHARD``.
        recomputes: Whether FSDP applies activation checkpointing.
        offloads_weights: Whether FSDP offloads weights to the host.
        loads_once: Whether only rank 0 loads weights for FSDP, as ``accelerate launch`` has it by default.
        sizes: Size of each mesh dimension (``dp_replicate``, ``dp_shard``, ``tp``, ``cp``, ``sp``) above 1.
        zero_stage: ZeRO stage of DeepSpeed.
        gathers_on_save: Whether ZeRO-3 gathers weights on saving.
        accumulation: ``gradient_accumulation_steps`` of DeepSpeed; ``None``: the recipe's.
        clipping: ``gradient_clipping`` of DeepSpeed; ``None``: the recipe's ``max_grad_norm``.
        offloads_optimizer: Whether DeepSpeed updates weights on the host.
        pipeline_stages: Pipeline stages; 1: no pipeline parallelism.
        schedule: Pipeline schedule, one of ``SCHEDULES``.
    """

    uses_cpu: bool = False
    fsdp_version: int = 1
    has_strategy: bool = False
    recomputes: bool = False
    offloads_weights: bool = False
    loads_once: bool = True
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
        rank: Global rank of this process.
        local_rank: Rank of this process on its machine.
        world_size: Number of processes.
        engine: Requested sharding: ``FSDP``, ``DEEPSPEED`` or empty.
        precision: ``mixed_precision`` of the launch file: ``no``, ``bf16``, ``fp16`` or ``fp8``.
        layout: Parallelism of the launch file.
    """

    rank: int
    local_rank: int
    world_size: int
    engine: str
    precision: str = "no"
    layout: Layout = Layout()

    @property
    def is_main(self) -> bool:
        """Whether this process has rank 0, which writes files and logs."""
        return self.rank == 0

    @property
    def tensor_size(self) -> int:
        """Size of a tensor-parallel group; 1: no tensor parallelism."""
        return self.layout.sizes.get("tp", 1)

    @property
    def context_size(self) -> int:
        """Size of a context-parallel group; 1: no context parallelism."""
        return self.layout.sizes.get("cp", 1) * self.layout.sizes.get("sp", 1)

    @property
    def shares_by_heads(self) -> bool:
        """Whether context parallelism is Ulysses (all-to-all over heads) instead of an all-gather of keys."""
        return "sp" in self.layout.sizes

    @property
    def context_rank(self) -> int:
        """Rank in the context-parallel group."""
        return self.rank % self.context_size

    @property
    def data_size(self) -> int:
        """Number of data-parallel ranks; a tensor, context or pipeline group counts as one."""
        # At least 1: ``verify_combination`` rejects a world size below the size of one group.
        return max(1, self.world_size // (self.tensor_size * self.context_size * self.layout.pipeline_stages))

    @property
    def data_rank(self) -> int:
        """Data-parallel rank of this process, or of its group."""
        if self.layout.pipeline_stages > 1:
            # Mesh (pipeline, data, tensor): ranks with the same stage, which reduce gradients, are adjacent.
            return self.rank // self.tensor_size % self.data_size
        # Ranks of a tensor- or context-parallel group are adjacent, and take the same rows.
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
    """Read the launch from environment variables; without those of a launcher, it is a single process.

    Args:
        variables: Environment of a planned process, from ``name_variables``; ``None``: that of this process.

    Raises:
        ConfigError: A variable is not a number in its range, the precision or pipeline schedule is unknown, or
            accelerate would compile the model.
        DataError: DeepSpeed's JSON file cannot be read.
    """
    env = dict(os.environ if variables is None else variables)
    if (deepspeed_file := env.get(_DEEPSPEED_FILE, "none")) != "none":
        env |= _read_deepspeed_file(Path(deepspeed_file))
    uses_fsdp = _is_true(env, "ACCELERATE_USE_FSDP") or _is_true(env, _LEFT_TO_LOADING)
    engine = "DEEPSPEED" if _is_true(env, "ACCELERATE_USE_DEEPSPEED") else "FSDP" if uses_fsdp else ""
    precision = env.get(_PRECISION, "no").lower()
    if precision not in _PRECISIONS:
        found, remedy = f"there is no precision {precision!r}", f"write {', '.join(_PRECISIONS)}"
        raise ConfigError(Problem("mixed_precision", found, remedy))
    if env.get(_DYNAMO, "no").lower() != "no":
        # accelerate compiles the whole model, beside our compiled layers and with a graph break at each of our hooks.
        found, remedy = "it compiles the whole model", "delete it, and write `torch_compile: true` in the recipe"
        raise ConfigError(Problem("dynamo_config of the launch file", found, remedy))
    return Launch(
        rank=_read_number(env, "RANK", 0),
        local_rank=_read_number(env, "LOCAL_RANK", 0),
        world_size=_read_number(env, "WORLD_SIZE", 1, least=1),
        engine=engine,
        precision=precision,
        layout=_read_layout(env),
    )


def _read_layout(env: Mapping[str, str]) -> Layout:
    schedule = env.get(_SCHEDULE, SCHEDULES[0]).lower()
    if schedule not in SCHEDULES:
        raise ConfigError(Problem(_SCHEDULE, f"there is no schedule {schedule!r}", f"write {' or '.join(SCHEDULES)}"))
    sizes = {name: _read_number(env, f"PARALLELISM_CONFIG_{name.upper()}_SIZE", 1, least=1) for name in _DIMENSIONS}
    accumulation, clipping = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING"
    reshards, strategy = env.get("FSDP_RESHARD_AFTER_FORWARD", "true"), env.get("FSDP_SHARDING_STRATEGY", "1")
    return Layout(
        uses_cpu=_is_true(env, _USES_CPU),
        fsdp_version=_read_number(env, "FSDP_VERSION", 1, least=1),
        has_strategy=reshards.lower() not in ("true", "false") or strategy.upper() not in ("1", "FULL_SHARD", "NONE"),
        recomputes=_is_true(env, "FSDP_ACTIVATION_CHECKPOINTING"),
        offloads_weights=_is_true(env, "FSDP_OFFLOAD_PARAMS"),
        loads_once=env.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "true").lower() in {"1", "true"},
        sizes={name: size for name, size in sizes.items() if size > 1},
        zero_stage=_read_number(env, "ACCELERATE_DEEPSPEED_ZERO_STAGE", 2),
        gathers_on_save=_is_true(env, "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"),
        accumulation=None if env.get(accumulation, "auto") == "auto" else _read_number(env, accumulation, 1, least=1),
        clipping=None if env.get(clipping, "auto") == "auto" else _read_number(env, clipping, 1.0),
        offloads_optimizer=env.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none") != "none",
        pipeline_stages=_read_number(env, _PIPELINE_STAGES, 1, least=1),
        schedule=schedule,
    )


def _read_deepspeed_file(path: Path) -> dict[str, str]:
    """Read a JSON file of DeepSpeed as the environment variables of a launch file without one.

    Raises:
        DataError: It is not a JSON object with ``zero_optimization``.
        ConfigError: It would replace keys of the recipe or of the launch file.

    Source: accelerate ``DeepSpeedPlugin.__post_init__``, transformers ``deepspeed_optim_sched``.
    """
    remedy = "correct the file, or `deepspeed_config_file` of the launch file"
    fields = {"zero_optimization": dict, "fp16": dict | None, "bf16": dict | None}
    document = read_record(path, fields, remedy=remedy)
    zero = document["zero_optimization"]
    verify_fields(zero, {"offload_optimizer": dict | None}, f"{path}: zero_optimization", remedy=remedy)
    # DeepSpeed would use its own optimizer, schedule, batch and mesh in place of those of recipe and launch file.
    problems = [
        Problem(f"{path}: {name}", "it would replace keys of recipe or launch file", f"delete `{name}` from the file")
        for name in ("optimizer", "scheduler", "tensor_parallel", "train_batch_size", "train_micro_batch_size_per_gpu")
        if document.get(name, "auto") != "auto"
    ]
    if problems:
        raise ConfigError(*problems)
    values = {
        # Without the key, accelerate sets 1, and DeepSpeed does not clip.
        "gradient_accumulation_steps": document.get("gradient_accumulation_steps", 1),
        "gradient_clipping": document.get("gradient_clipping", 0.0),
        "zero_stage": zero.get("stage", 0),
        "offload_optimizer_device": (zero.get("offload_optimizer") or {}).get("device", "none"),
        "zero3_save_16bit_model": zero.get("stage3_gather_16bit_weights_on_model_save", False),
    }
    variables = {_DEEPSPEED_VARIABLES[name]: str(value) for name, value in values.items() if value != "auto"}
    enabled = [name for name in ("fp16", "bf16") if (document.get(name) or {}).get("enabled") is True]
    return variables | ({_PRECISION: enabled[0]} if enabled else {})


def _read_number(env: Mapping[str, str], name: str, default: _Number, least: int = 0) -> _Number:
    text = env.get(name, str(default))
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


def _is_true(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").lower() in {"1", "true"}


def read_environment() -> Mapping[str, str]:
    """Return the variables of this process."""
    return dict(os.environ)


def disable_accelerate_parallelism(launch: Launch) -> None:
    """Disable accelerate's tensor, context and pipeline parallelism, which this library implements, and 8-bit gathers.

    accelerate 1.15 does not apply tensor parallelism to a loaded model, and does not support models that transformers
    shards during loading. It would shard a pipeline stage over all ranks instead of those with the stage. Its context
    parallelism drops attention masks (ring attention under FSDP, sdpa under DeepSpeed), so packed documents would
    attend to each other, and under DeepSpeed it doubles gradients at ZeRO-1 and 2. For an all-gather in 8 bits, under
    fp8 also of one process, it replaces weights after the optimizer was created, which would update the former ones.
    """
    os.environ["ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"] = "false"
    if launch.engine == "FSDP" and (launch.tensor_size > 1 or launch.layout.pipeline_stages > 1):
        os.environ[_LEFT_TO_LOADING] = "true"
        os.environ["ACCELERATE_USE_FSDP"] = os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "false"
    if launch.context_size > 1:
        os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "false"


def configure_vllm(*, tf32: bool) -> None:
    """Configure vLLM to run in this process and send no usage data; must precede its import.

    Args:
        tf32: Whether this process multiplies float32 matrices in TF32.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    if tf32:
        # vLLM sets torch's precision of the whole process, by default without TF32.
        os.environ.setdefault("VLLM_FLOAT32_MATMUL_PRECISION", "high")
    if allocator := os.environ.get("PYTORCH_ALLOC_CONF"):
        # vLLM suspends expandable segments in the memory pools of its sleep mode, and reads the former name only.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", allocator)


def expect_launch(launch: Launch) -> None:
    """Set environment variables of the processes to start: the planned launch, GPU allocator and NCCL options.

    Raises:
        ConfigError: As ``verify_rendezvous``, a variable that accelerate reads is not a number.
    """
    _verify_counts()
    os.environ[_EXPECTED] = f"{launch.world_size} {launch.engine}"
    os.environ.update(name_pipeline(launch.layout.pipeline_stages, launch.layout.schedule))
    if launch.layout.uses_cpu:
        # accelerate passes it on to a single process only; several would use the GPUs of the machine.
        os.environ[_USES_CPU] = "true"
    for names, value in _VARIABLES.items():
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value


def verify_expected(launch: Launch) -> None:
    """Raise if the launch of this process differs from that of ``expect_launch``; needs no communication.

    Raises:
        ConfigError: World size or engine differ.
    """
    if (expected := os.environ.get(_EXPECTED)) is None:
        return
    num_processes, _, engine = expected.partition(" ")
    if (int(num_processes), engine) != (launch.world_size, launch.engine):
        found = (
            f"expected {num_processes} processes with {engine or 'no sharding'}; this process is one of "
            f"{launch.world_size} with {launch.engine or 'no sharding'}"
        )
        remedy = "check that all machines were started with the same launch file"
        raise ConfigError(Problem("launch", found, remedy))


def verify_rendezvous(launch: Launch) -> None:
    """Raise if this process cannot join the process group, before it loads anything.

    Raises:
        ConfigError: A variable of the launcher is missing, the rank is out of range, or the port or a count invalid.
        ConfigError: ``srun`` or ``mpirun`` started several processes that do not know each other.
    """
    if launch.world_size == 1:
        _verify_single_process(launch)
        return
    problems = []
    # Without LOCAL_RANK, accelerate would not join the processes of a GPU run.
    if missing := [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        found = f"is {launch.world_size}, and {', '.join(missing)} is not set"
        remedy = f"{_START}, or unset WORLD_SIZE for one process"
        problems.append(Problem("WORLD_SIZE", found, remedy))
    elif launch.rank >= launch.world_size:
        found = f"is {launch.rank}, and the ranks of {launch.world_size} processes end at {launch.world_size - 1}"
        problems.append(Problem("RANK", found, "give every process another rank, from 0 on"))
    if (port := os.environ.get("MASTER_PORT")) and not (port.isdecimal() and 1 <= int(port) < 2**16):
        problems.append(Problem("MASTER_PORT", f"{port!r} is not a port", "write a number from 1 to 65535"))
    if problems:
        raise ConfigError(*problems)
    _verify_counts()


def _verify_counts() -> None:
    # accelerate converts them with ``int``, where OpenMP and torch ignore an invalid value.
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        _read_number(os.environ, name, 1)


def _verify_single_process(launch: Launch) -> None:
    # A process of another rank would take itself for one of several, and write nothing.
    for name, rank in (("RANK", launch.rank), ("LOCAL_RANK", launch.local_rank)):
        if rank:
            raise ConfigError(Problem(name, f"is {rank}, and WORLD_SIZE is 1 or not set", f"unset {name}, or {_START}"))
    # With LOCAL_RANK, accelerate joins a process group.
    missing = [name for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if "LOCAL_RANK" in os.environ and missing:
        found = f"is set, and {', '.join(missing)} is not"
        raise ConfigError(Problem("LOCAL_RANK", found, f"unset LOCAL_RANK, or {_START}"))
    if "WORLD_SIZE" in os.environ:
        return
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if (size := os.environ.get(name, "")).isdecimal() and int(size) > 1:
            found = f"{size} processes were started without WORLD_SIZE: each would train its own model"
            remedy = "start `recipes launch` or torchrun once per machine; for separate runs, set WORLD_SIZE=1"
            raise ConfigError(Problem(name, found, remedy))


def verify_accelerator(launch: Launch, *, is_available: bool, num_gpus: int = 0) -> None:
    """Raise if this machine lacks accelerators that the launch needs, before anything is loaded.

    Args:
        launch: The requested launch.
        is_available: Whether torch finds an accelerator.
        num_gpus: CUDA devices that torch finds; 0 for a run on CPUs.

    Raises:
        ConfigError: The launch file asks for FSDP or DeepSpeed, and there is no accelerator.
        ConfigError: There are GPUs, but fewer than processes on this machine.
    """
    if "ACCELERATE_TORCH_DEVICE" in os.environ:
        return
    if launch.engine and not is_available:
        found = f"the launch file asks for {launch.engine}, and torch finds no GPU on this machine"
        raise ConfigError(Problem("launch", found, _ON_CPUS))
    if 0 < num_gpus <= launch.local_rank:
        found = f"is {launch.local_rank}, and this process sees {pluralize(num_gpus, 'GPU')}"
        remedy = "start one process per GPU, each with all GPUs of the machine visible (CUDA_VISIBLE_DEVICES)"
        raise ConfigError(Problem("LOCAL_RANK", found, remedy))


def verify_launch(launch: Launch, num_processes: int, distributed_type: str) -> None:
    """Raise if accelerate has silently changed the launch.

    Args:
        launch: The requested launch.
        num_processes: World size of accelerate's state.
        distributed_type: Value of accelerate's ``DistributedType``, such as ``NO`` or ``MULTI_GPU``; for FSDP it is
            still ``MULTI_GPU``.

    Raises:
        ConfigError: The process group has another number of processes than were started.
        ConfigError: The launch file asks for FSDP or DeepSpeed, and accelerate runs without it.
    """
    if num_processes != launch.world_size:
        found = f"accelerate joined {num_processes} of {launch.world_size} processes: each would train its own model"
        remedy = "on a machine without GPUs use accelerate_configs/cpu_ddp.yaml, or `torchrun --nproc_per_node N`"
        raise ConfigError(Problem("launch", found, remedy))
    # accelerate switches to FSDP only with several accelerators, and only in ``Accelerator.__init__``, which loading a
    # model may call earlier.
    becomes = "FSDP" if launch.engine == "FSDP" and distributed_type not in ("NO", "MULTI_CPU") else distributed_type
    if launch.engine and becomes != launch.engine:
        found = f"the launch file asks for {launch.engine} but accelerate is running {distributed_type}"
        raise ConfigError(Problem("launch", found, _ON_CPUS))


def verify_engine(launch: Launch, distributed_type: str, *, tensor_size: int = 1, is_in_shards: bool = False) -> None:
    """Raise if the sharding of a run differs from the launch, once the ``Accelerator`` exists.

    Args:
        launch: The requested launch.
        distributed_type: ``distributed_type`` of the ``Accelerator``.
        tensor_size: Tensor-parallel ranks of the loaded model.
        is_in_shards: Whether the model was sharded without accelerate.

    Raises:
        ConfigError: The engine differs.
        ConfigError: The size of tensor-parallel groups differs.
    """
    remedy = f"start by `accelerate launch --config_file` and a file of {LAUNCH_FILES}/"
    if tensor_size != launch.tensor_size:
        found = f"expected {launch.tensor_size} tensor-parallel ranks, and the model has {tensor_size}"
        raise ConfigError(Problem("launch", found, remedy))
    engine = distributed_type if distributed_type in ENGINES else "FSDP" if is_in_shards else ""
    if engine != launch.engine:
        found = f"{launch.engine or 'no sharding'} was launched and accelerate is running {distributed_type}"
        raise ConfigError(Problem("launch", found, remedy))


ENGINES: Final = ("FSDP", "DEEPSPEED")
"""Values of accelerate's ``distributed_type`` that shard a model."""
_KINDS: Final = (
    *("NO", "MULTI_GPU", *ENGINES, "MULTI_XPU", "MULTI_NPU", "MULTI_MLU"),
    *("MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON"),
)
"""Supported values of ``distributed_type``. ``MULTI_CPU`` needs mpirun, whose processes do not know each other."""
_PARTS: Final = ("fsdp_config", "deepspeed_config", "parallelism_config", "dynamo_config", "fp8_config")


def read_launch_file(path: Path) -> dict[str, Any]:
    """Return the contents of a launch file.

    Raises:
        ConfigError: As ``read_yaml``; it is not a mapping, ``distributed_type`` is missing or not supported, the number
            of processes or machines or ``gpu_ids`` is invalid, a section is not a mapping, or a key is unknown.
    """
    document = read_yaml(path)
    if not isinstance(document, dict) or "distributed_type" not in document:
        found = "has no `distributed_type`: not a launch file, which may name DeepSpeed's as `deepspeed_config_file`"
        raise ConfigError(Problem(str(path), found, f"start from one of {LAUNCH_FILES}/"))
    for name in ("distributed_type", "mixed_precision"):
        if isinstance(document.get(name), bool):
            found = f"{document[name]!r} is not a string: without quotes YAML takes NO for false"
            raise ConfigError(Problem(f"{path}: {name}", found, f"quote it: {name}: 'NO'"))
    if (kind := str(document["distributed_type"])) not in _KINDS:
        remedy = suggest(kind.upper(), _KINDS[:4], f"write one of {', '.join(_KINDS[:4])}", "{}")
        remedy = f"take {LAUNCH_FILES}/cpu_ddp.yaml" if kind == "MULTI_CPU" else remedy
        raise ConfigError(Problem(f"{path}: distributed_type", f"{kind!r} is not supported", remedy))
    for part in _PARTS:
        if not isinstance(document.get(part) or {}, dict):
            raise ConfigError(Problem(f"{path}: {part}", "it is not a mapping", f"take that of one of {LAUNCH_FILES}/"))
    for name in ("num_processes", "num_machines"):
        count = document.get(name, 1)
        if type(count) is not int or count < 1:
            found = f"{count!r} is not a number of {name.removeprefix('num_')}"
            raise ConfigError(Problem(f"{path}: {name}", found, "write a whole number from 1 on"))
    if not isinstance(ids := document.get("gpu_ids"), str | None):  # accelerate splits it, or sets a variable to it.
        raise ConfigError(Problem(f"{path}: gpu_ids", f"{ids!r} is not a string", f"quote it: gpu_ids: '{ids}'"))
    _verify_keys(document, path)
    return document


def _verify_keys(document: Mapping[str, Any], path: Path) -> None:
    """Raise for keys that accelerate does not know: it ignores those of a section, and fails for others."""
    # Not at module level: they import torch.
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    known = {action.dest for action in launch_command_parser()._actions} | ClusterConfig.__dataclass_fields__.keys()
    unknown = [key for key in document if key not in known]
    for part in _PARTS:
        # accelerate adds the prefixes `fsdp_`, `dynamo_` and `fp8_` where they are missing.
        prefix = "" if part in ("deepspeed_config", "parallelism_config") else part.removesuffix("config")
        unknown += [key for key in document.get(part) or {} if not {key, f"{prefix}{key}"} & known]
    if unknown:
        found = "the installed accelerate has no such key"
        raise ConfigError(*(Problem(f"{path}: {key}", found, suggest(key, known, "delete it")) for key in unknown))


def name_variables(document: Mapping[str, Any], num_processes: int | None = None) -> dict[str, str]:
    """Return the environment variables that a launch would set for rank 0, for ``read_launch``.

    Args:
        document: From ``read_launch_file``.
        num_processes: World size; ``None``: that of the file.

    Source: accelerate ``prepare_multi_gpu_env``, ``prepare_deepspeed_cmd_env``;
    ``tests/training/layouts/test_launch_files.py`` compares both.
    """
    variables: dict[str, Any] = {
        "WORLD_SIZE": document.get("num_processes", 1) if num_processes is None else num_processes,
        _PRECISION: document.get("mixed_precision") or "no",
        _USES_CPU: document.get("use_cpu", False),
        # YAML reads an unquoted `NO` as false.
        _DYNAMO: (document.get("dynamo_config") or {}).get("dynamo_backend") or "no",
    }
    kind = document["distributed_type"]
    if kind in ENGINES:
        variables[f"ACCELERATE_USE_{kind}"] = "true"
    if kind == "FSDP":
        # As accelerate, also without the prefix `fsdp_`, as files of older versions have it.
        given = {str(name).removeprefix("fsdp_"): value for name, value in (document.get("fsdp_config") or {}).items()}
        variables |= {f"FSDP_{name.upper()}": value for name, value in given.items()}
    if kind == "DEEPSPEED":
        given = {name: value for name, value in (document.get("deepspeed_config") or {}).items() if value is not None}
        variables |= {variable: given[name] for name, variable in _DEEPSPEED_VARIABLES.items() if name in given}
    variables |= {str(name).upper(): value for name, value in (document.get("parallelism_config") or {}).items()}
    return {name: str(value) for name, value in variables.items()}


def plan_launch(
    file: Path | None, num_processes: int | None = None, pipeline: Mapping[str, str] | None = None
) -> Launch:
    """Return the launch state that rank 0 would have.

    Args:
        file: The launch file; ``None``: a launch without one.
        num_processes: World size; ``None``: that of the file, or 1.
        pipeline: From ``name_pipeline``; ``None``: no pipeline parallelism.

    Raises:
        ConfigError: As ``read_launch_file`` and ``read_launch``; ``num_processes`` is below 1; or the file is for one
            process.
    """
    if num_processes is not None and num_processes < 1:
        raise ConfigError(Problem("--num_processes", f"is {num_processes}", "write 1 or more"))
    document = {"distributed_type": "NO"} if file is None else read_launch_file(file)
    launch = read_launch({**name_variables(document, num_processes), **(pipeline or {})})
    if file is not None and document["distributed_type"] == "NO" and launch.world_size > 1:
        found = f"{file} is for one process, not for {launch.world_size}"
        several = "for several, use accelerate_configs/ddp.yaml, or cpu_ddp.yaml on CPUs"
        raise ConfigError(Problem("--hardware", found, f"for one, use `--num_processes 1`; {several}"))
    return launch
