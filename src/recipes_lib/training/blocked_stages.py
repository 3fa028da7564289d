"""What a recipe and a launch in stages cannot ask for together: rows of the table of ``combinations``."""

from __future__ import annotations

from typing import Final

from recipes_lib.config.table import STAGES
from recipes_lib.training.blocked import Blocked, Keys
from recipes_lib.training.launch import Launch

_STAGES: Final = "`--pipeline_stages`"
_OPTIMIZERS: Final = ("adamw_torch", "adamw_torch_fused", "muon")


def _block(key: str, why: str, remedy: str = "delete the line, or launch without stages") -> Blocked:
    return Blocked(
        recipe=f"`{key}`",
        launch=_STAGES,
        why=why,
        remedy=remedy,
        keys=(key,),
        applies=lambda keys, launch: launch.layout.stages > 1 and bool(keys.get(key)),
    )


def _count_batches(keys: Keys) -> int:
    num_batches: int = keys.get("gradient_accumulation_steps", 1)
    return num_batches


def _is_by(launch: Launch, schedule: str) -> bool:
    return launch.layout.stages > 1 and launch.layout.schedule == schedule


OF_STAGES: Final = (
    Blocked(
        recipe="any but pretraining",
        launch=_STAGES,
        why="pretraining alone is computed in stages",
        remedy="launch without stages, by accelerate_configs/fsdp2.yaml where the model does not fit",
        stages=tuple(stage for stage in STAGES if stage != "pretrain"),
        applies=lambda _, launch: launch.layout.stages > 1,
    ),
    Blocked(
        launch="`--pipeline_stages` that do not divide the number of processes",
        why="some processes would be in no pipeline",
        remedy="write a number of stages that divides `--num_processes`",
        applies=lambda _, launch: bool(launch.world_size % launch.layout.stages),
    ),
    Blocked(
        launch="`--pipeline_stages` and DeepSpeed or a mesh",
        why="a stage is shared out by FSDP2 alone, to all that hold it",
        remedy="use accelerate_configs/fsdp2.yaml, or ddp.yaml, by which each of them has the whole stage",
        applies=lambda _, launch: (
            launch.layout.stages > 1 and (launch.engine == "DEEPSPEED" or bool(launch.layout.sizes))
        ),
    ),
    Blocked(
        launch="`--pipeline_stages` and `fsdp_offload_params` or `fsdp_activation_checkpointing`",
        why="accelerate would do it, which does not shard a model in stages",
        remedy="use accelerate_configs/fsdp2.yaml as it is; `activation_checkpointing: true` is the recipe's",
        applies=lambda _, launch: (
            launch.layout.stages > 1 and (launch.layout.offloads_weights or launch.layout.recomputes)
        ),
    ),
    Blocked(
        launch="`--pipeline_stages` and `mixed_precision: fp16` or `fp8`",
        why="losses are scaled, and layers replaced, in a model that one process holds",
        remedy="use a launch file with `mixed_precision: bf16`",
        applies=lambda _, launch: launch.layout.stages > 1 and launch.precision in ("fp16", "fp8"),
    ),
    _block("fp16", "the scale of the loss would have to be the same on all stages", "write `bf16: true`"),
    Blocked(
        recipe="`gradient_accumulation_steps` below the stages",
        launch="`--pipeline_schedule 1f1b`",
        why="so few micro-batches do not fill the pipeline, and this schedule needs it full",
        remedy="write as many as there are stages, better four times as many and smaller ones",
        keys=("gradient_accumulation_steps",),
        applies=lambda keys, launch: _is_by(launch, "1f1b") and _count_batches(keys) < launch.layout.stages,
    ),
    Blocked(
        recipe="`gradient_accumulation_steps` that is no multiple of the stages",
        launch="`--pipeline_schedule interleaved`",
        why="the chunks of a process take turns by groups of as many micro-batches as there are stages",
        remedy="write a multiple of the stages",
        keys=("gradient_accumulation_steps",),
        applies=lambda keys, launch: (
            _is_by(launch, "interleaved") and bool(_count_batches(keys) % launch.layout.stages)
        ),
    ),
    _block("batch_ramp_tokens", "a step of few micro-batches leaves most stages idle"),
    _block("max_rollbacks", "a model in stages cannot go back inside a run"),
    _block("verify_steps", "no two processes of a pipeline hold the same weights to compare"),
    _block("metrics", "they score sampled answers, and no process has enough of the model to sample any"),
    _block("torch_compile", "it would compile a model that no process runs as a whole"),
    Blocked(
        recipe=f"`optim` other than {', '.join(f'`{name}`' for name in _OPTIMIZERS)}",
        launch=_STAGES,
        why="its states are not known to travel between stages and whole models",
        remedy="write `optim: adamw_torch_fused`",
        keys=("optim",),
        applies=lambda keys, launch: launch.layout.stages > 1 and keys.get("optim", _OPTIMIZERS[0]) not in _OPTIMIZERS,
    ),
)
"""Every combination that is refused in stages."""
