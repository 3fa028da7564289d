"""Incompatible options of recipe and launch file: one table for ``recipes check``, every start and the docs.

``python -m recipes_lib.training.layouts.compatibility`` prints the table of ``docs/hardware.md``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from recipes_lib.config.schema import WEIGHTS, RecipeConfig, flatten_config
from recipes_lib.config.table import STAGES
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.training.layouts.launch_environment import Launch

Keys = Mapping[str, Any]
"""Keys of a recipe that are in effect; one that is absent has upstream's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """A combination that would fail late, or compute something else in silence.

    Attributes:
        recipe: What the recipe says, in Markdown; empty where the launch file alone is at fault.
        launch: What the launch file says, or the launch itself, in Markdown.
        why: What would happen.
        remedy: What to do instead.
        stages: Recipes that it is about; empty: all of them.
        keys: Of the recipe; it is told at the first of them that is set. Without any it is told of the launch file.
        applies: Whether a recipe of these stages and a launch are such a combination.
    """

    recipe: str = ""
    launch: str
    why: str
    remedy: str
    stages: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    applies: Callable[[Keys, Launch], bool]

    def tell(self, keys: Keys, config: RecipeConfig, file: str) -> Problem:
        """Return what is wrong with a recipe that it applies to, where that stands, and what to do.

        Args:
            keys: Of the recipe.
            config: The recipe.
            file: The launch file, as it is to be called.
        """
        if not self.keys:
            asked = f"recipes/{config.stage}.py and a launch with {self.launch}" if self.stages else self.launch
            return Problem(file, f"{asked}: {self.why}", self.remedy)
        key = next((key for key in self.keys if keys.get(key)), self.keys[0])
        said = f"`{key}: {keys[key]}`" if key in keys else f"`{key}`, which is not given,"
        where = config.provenance.get(key, "default")
        found = f"{said} and a launch with {self.launch}: {self.why}"
        return Problem(key if where == "default" else where, found, self.remedy)


_TENSORS: Final = "`parallelism_config_tp_size`"
_ROWS: Final = "`parallelism_config_cp_size` or `parallelism_config_sp_size`"
_SAMPLES_ANSWERS: Final = ("ppo", "rloo", "grpo")
_WITH_OTHER_MODELS: Final = ("lora", "reward", "dpo", "distill", *_SAMPLES_ANSWERS)
_UNPROVED: Final = ("neftune_noise_alpha", "torch_compile", "use_liger_kernel", "verify_steps")
_ADAMW: Final = ("adamw_torch", "adamw_torch_fused")

OF_MESHES: Final = (
    Blocked(
        launch="sizes of `parallelism_config` and `--pipeline_stages` that are not `num_processes` together",
        why="the processes do not fill the device mesh, which accelerate notices when the model is loaded",
        remedy="write sizes whose product is the number of processes",
        applies=lambda _, launch: (
            bool(launch.layout.sizes)
            and launch.layout.stages * math.prod(launch.layout.sizes.values()) != launch.world_size
        ),
    ),
    Blocked(
        launch="FSDP with a mesh and without `dp_shard`",
        why="there is nothing to shard over, which accelerate notices when the model is loaded",
        remedy="write `parallelism_config_dp_shard_size`, or use accelerate_configs/ddp.yaml",
        applies=lambda _, launch: (
            launch.engine == "FSDP"
            and bool(launch.layout.sizes)
            and not {"dp_shard", "tp", "cp"} & set(launch.layout.sizes)
        ),
    ),
    Blocked(
        launch=f"{_TENSORS} and not `distributed_type: FSDP`",
        why="tensor parallelism is applied while the model is loaded, for FSDP2 only",
        remedy="use accelerate_configs/fsdp2_tp.yaml, with dp_shard_size 1 for tensors alone",
        applies=lambda _, launch: launch.tensor_size > 1 and launch.engine != "FSDP",
    ),
    Blocked(
        launch=f"{_TENSORS} with `parallelism_config_dp_replicate_size`",
        why="tensor parallelism with sharding and replication at once is not proved",
        remedy="shard over all groups: write their number as `parallelism_config_dp_shard_size`",
        applies=lambda _, launch: launch.tensor_size > 1 and "dp_replicate" in launch.layout.sizes,
    ),
    Blocked(
        launch=f"{_TENSORS} with `mixed_precision: fp16` or `fp8`",
        why="the loss scaler and 8-bit layers take whole tensors",
        remedy="write `mixed_precision: bf16`",
        applies=lambda _, launch: launch.tensor_size > 1 and launch.precision in ("fp16", "fp8"),
    ),
    Blocked(
        launch=f"{_TENSORS} with `fsdp_offload_params: true` or `fsdp_activation_checkpointing: true`",
        why="transformers shards tensor-parallel weights itself and reads neither",
        remedy="delete the line; `activation_checkpointing: true` stands in the recipe",
        applies=lambda _, launch: (
            launch.tensor_size > 1 and (launch.layout.recomputes or launch.layout.offloads_weights)
        ),
    ),
    Blocked(
        recipe="LoRA, reward models, DPO, distillation, PPO, RLOO, GRPO",
        launch=_TENSORS,
        why="tensor parallelism does not support adapters, score heads or a second model",
        remedy="use accelerate_configs/fsdp2.yaml",
        stages=_WITH_OTHER_MODELS,
        applies=lambda _, launch: launch.tensor_size > 1,
    ),
    Blocked(
        recipe="`fp16: true`",
        launch=_TENSORS,
        why="the loss scaler takes whole tensors",
        remedy="write `bf16: true`",
        keys=("fp16",),
        applies=lambda keys, launch: launch.tensor_size > 1 and bool(keys.get("fp16")),
    ),
    Blocked(
        recipe="`optim` other than `adamw_torch`, `adamw_torch_fused`",
        launch=_TENSORS,
        why="some weights are tensor-parallel and others are not, and it is not proved to update both alike",
        remedy="write `optim: adamw_torch_fused`",
        keys=("optim",),
        applies=lambda keys, launch: launch.tensor_size > 1 and keys.get("optim", _ADAMW[1]) not in _ADAMW,
    ),
    Blocked(
        recipe=", ".join(f"`{key}`" for key in _UNPROVED),
        launch=_TENSORS,
        why="tensor-parallel ranks would add different noise, or are not proved to compute the same",
        remedy="delete the line, or use accelerate_configs/fsdp2.yaml",
        keys=_UNPROVED,
        applies=lambda keys, launch: launch.tensor_size > 1 and any(keys.get(key) for key in _UNPROVED),
    ),
    Blocked(
        launch="`parallelism_config_cp_size` and not `distributed_type: FSDP`",
        why="sequences that long need a sharded model; context parallelism is proved with FSDP2",
        remedy="use accelerate_configs/fsdp2_cp.yaml, or zero3_sp.yaml by DeepSpeed",
        applies=lambda _, launch: "cp" in launch.layout.sizes and launch.engine != "FSDP",
    ),
    Blocked(
        launch="`parallelism_config_sp_size` and not ZeRO-3",
        why="sequences that long need a sharded model; sequence parallelism by heads is proved with ZeRO-3",
        remedy="use accelerate_configs/zero3_sp.yaml, or fsdp2_cp.yaml by FSDP2",
        applies=lambda _, launch: (
            launch.shares_by_heads and (launch.engine != "DEEPSPEED" or launch.layout.zero_stage != 3)
        ),
    ),
    Blocked(
        launch=f"{_ROWS} with `parallelism_config_tp_size` or `parallelism_config_dp_replicate_size`",
        why="context parallelism with tensor parallelism or replication is not proved",
        remedy="shard over all processes: write `parallelism_config_dp_shard_size`",
        applies=lambda _, launch: launch.context_size > 1 and bool({"tp", "dp_replicate"} & set(launch.layout.sizes)),
    ),
    Blocked(
        recipe="LoRA, reward models, DPO, distillation, PPO, RLOO, GRPO",
        launch=_ROWS,
        why="rows of these recipes hold more than tokens and labels and are not split",
        remedy="use accelerate_configs/fsdp2.yaml",
        stages=_WITH_OTHER_MODELS,
        applies=lambda _, launch: launch.context_size > 1,
    ),
    Blocked(
        recipe="`dataset_streaming: true`",
        launch=_ROWS,
        why="ranks of one context-parallel group would read different rows of a stream",
        remedy="delete the line: rows are prepared once and read from the disk",
        keys=("dataset_streaming",),
        applies=lambda keys, launch: launch.context_size > 1 and bool(keys.get("dataset_streaming")),
    ),
    Blocked(
        recipe="`attn_implementation`",
        launch=_ROWS,
        why="context parallelism needs its own attention",
        remedy="delete the line",
        keys=("attn_implementation",),
        applies=lambda keys, launch: launch.context_size > 1 and bool(keys.get("attn_implementation")),
    ),
    Blocked(
        recipe=", ".join(f"`{key}`" for key in _UNPROVED),
        launch=_ROWS,
        why="it is not proved to compute the same under context parallelism",
        remedy="delete the line, or use accelerate_configs/fsdp2.yaml",
        keys=_UNPROVED,
        applies=lambda keys, launch: launch.context_size > 1 and any(keys.get(key) for key in _UNPROVED),
    ),
)
"""Those of ``combinations.BLOCKED`` that are about ``parallelism_config``."""


_STAGES: Final = "`--pipeline_stages`"
_OPTIMIZERS: Final = ("adamw_torch", "adamw_torch_fused", "muon")


def _block(key: str, why: str, remedy: str = "delete the line, or launch without pipeline parallelism") -> Blocked:
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
        why="only pretraining supports pipeline parallelism",
        remedy="launch without pipeline parallelism, by accelerate_configs/fsdp2.yaml where the model does not fit",
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
        launch="`--pipeline_stages` and DeepSpeed, context parallelism or `parallelism_config_dp_replicate_size`",
        why="a pipeline stage is sharded by FSDP2 and tensor parallelism only, over all ranks that hold it",
        remedy="use accelerate_configs/fsdp2.yaml or fsdp2_tp.yaml, or ddp.yaml, where each rank has the whole stage",
        applies=lambda _, launch: (
            launch.layout.stages > 1
            and (launch.engine == "DEEPSPEED" or bool({"dp_replicate", "cp", "sp"} & set(launch.layout.sizes)))
        ),
    ),
    Blocked(
        launch="`--pipeline_stages` and `fsdp_offload_params` or `fsdp_activation_checkpointing`",
        why="accelerate would apply it, which does not shard pipeline stages",
        remedy="use accelerate_configs/fsdp2.yaml as it is; `activation_checkpointing: true` is the recipe's",
        applies=lambda _, launch: (
            launch.layout.stages > 1 and (launch.layout.offloads_weights or launch.layout.recomputes)
        ),
    ),
    Blocked(
        launch="`--pipeline_stages` and `mixed_precision: fp16` or `fp8`",
        why="loss scaling and layer replacement need the whole model on one rank",
        remedy="use a launch file with `mixed_precision: bf16`",
        applies=lambda _, launch: launch.layout.stages > 1 and launch.precision in ("fp16", "fp8"),
    ),
    _block("fp16", "the loss scale would have to be the same on all pipeline stages", "write `bf16: true`"),
    Blocked(
        recipe="`gradient_accumulation_steps` below the stages",
        launch="`--pipeline_schedule 1f1b`",
        why="too few micro-batches to fill the pipeline, which this schedule requires",
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
    _block("batch_ramp_tokens", "a step of few micro-batches leaves most pipeline stages idle"),
    _block("max_rollbacks", "rollback is not implemented for pipeline stages"),
    _block("verify_steps", "no two ranks of a pipeline hold the same weights to compare"),
    _block("metrics", "they score sampled answers, and no rank has the whole model to sample from"),
    _block("torch_compile", "the layers of absent stages cannot be compiled"),
    _block("use_liger_kernel", "it would replace modules of absent stages"),
    Blocked(
        recipe=f"`optim` other than {', '.join(f'`{name}`' for name in _OPTIMIZERS)}",
        launch=_STAGES,
        why="its states are not proved to convert between pipeline stages and whole models",
        remedy="write `optim: adamw_torch_fused`",
        keys=("optim",),
        applies=lambda keys, launch: launch.layout.stages > 1 and keys.get("optim", _OPTIMIZERS[0]) not in _OPTIMIZERS,
    ),
)
"""Every combination that is refused in stages."""


BITSANDBYTES: Final = (
    *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "ademamix", "ademamix_8bit"),
    *("paged_ademamix_32bit", "paged_ademamix_8bit", "lion_8bit", "lion_32bit", "paged_lion_32bit", "paged_lion_8bit"),
    *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
)
"""Values of ``optim`` that are bitsandbytes'."""
STOCHASTIC_ADAMW: Final = "adamw_bf16_stochastic"
"""The value of ``optim`` that trains bfloat16 weights with ``StochasticAdamW``."""
_UPDATED_ON_HOST: Final = ("adamw_torch", "adamw_torch_fused", "adagrad", "lion_32bit")
_FUSED: Final = "adamw_torch_fused"


def _block_precision(key: str, launched: str) -> Blocked:
    return Blocked(
        recipe=f"`{key}: true`",
        launch=f"`mixed_precision: {launched}`",
        why="they contradict each other, and upstream silently takes the recipe's",
        remedy=f"delete `{key}`, or use a launch file with `mixed_precision: {key}`",
        keys=(key,),
        applies=lambda keys, launch: launch.precision == launched and bool(keys.get(key)),
    )


def _block_no_precision(key: str) -> Blocked:
    return Blocked(
        recipe=f"`{key}: false`",
        launch=f"`mixed_precision: {key}`",
        why="accelerate silently computes in the launch file's precision",
        remedy=f'delete `{key}`, or use a launch file with `mixed_precision: "no"`',
        keys=(key,),
        applies=lambda keys, launch: launch.precision == key and keys.get(key) is False,
    )


def _copies_policy(keys: Keys, launch: Launch) -> bool:
    """Whether a frozen copy of the whole policy stands beside it; ``prepare_reference`` makes it."""
    # A fresh adapter changes nothing yet, unless it began with a part of the model's own weights.
    has_base = (
        keys.get("use_peft")
        and not keys.get("adapter_name_or_path")
        and keys.get("init_lora_weights") not in ("pissa", "olora")
    )
    is_live = keys.get("precompute_ref_log_probs") is False and not keys.get("ref_model_name_or_path")
    return launch.engine == "DEEPSPEED" and is_live and not has_base


BLOCKED: Final = (
    _block_precision("bf16", "fp16"),
    _block_precision("fp16", "bf16"),
    _block_precision("bf16", "fp8"),
    _block_precision("fp16", "fp8"),
    _block_no_precision("bf16"),
    _block_no_precision("fp16"),
    Blocked(
        recipe="`dtype: bfloat16`, `dtype: float16`, without an adapter",
        launch="FSDP, products in fewer bits",
        why="accelerate trains them as float32: another run, and twice the memory",
        remedy="write `dtype: float32`, or train an adapter (`use_peft: true`)",
        keys=("dtype",),
        applies=lambda keys, launch: (
            launch.engine == "FSDP"
            and keys.get("dtype") in ("bfloat16", "float16")
            and not keys.get("use_peft")
            and not (launch.precision == "no" and keys.get("bf16") is False and not keys.get("fp16"))
        ),
    ),
    Blocked(
        recipe="`gradient_accumulation_steps`",
        launch="DeepSpeed with another number",
        why="a step has one number of micro-batches",
        remedy="write `gradient_accumulation_steps: auto` in the launch file",
        keys=("gradient_accumulation_steps",),
        applies=lambda keys, launch: (
            launch.layout.accumulation not in (None, keys.get("gradient_accumulation_steps", 1))
        ),
    ),
    Blocked(
        recipe="`max_grad_norm`",
        launch="DeepSpeed with another `gradient_clipping`",
        why="DeepSpeed clips by its own number",
        remedy="write `gradient_clipping: auto` in the launch file",
        keys=("max_grad_norm",),
        applies=lambda keys, launch: launch.layout.clipping not in (None, keys.get("max_grad_norm", 1.0)),
    ),
    Blocked(
        launch="FSDP or DeepSpeed with `use_cpu: true`",
        why="accelerate shards nothing on CPUs, in silence",
        remedy="use accelerate_configs/cpu_ddp.yaml",
        applies=lambda _, launch: bool(launch.engine and launch.layout.uses_cpu),
    ),
    *OF_MESHES,
    Blocked(
        launch="`fsdp_version: 1`, or none",
        why="checkpoints, precision and adapters are made for FSDP2; accelerate's default is 1",
        remedy="write `fsdp_version: 2`",
        applies=lambda _, launch: launch.engine == "FSDP" and launch.layout.fsdp_version != 2,
    ),
    Blocked(
        launch="FSDP with `fsdp_state_dict_type: FULL_STATE_DICT`",
        why="checkpoints are sharded whatever it says, and the final model is whole",
        remedy="write `SHARDED_STATE_DICT`",
        applies=lambda _, launch: launch.engine == "FSDP" and launch.layout.state_dict_type != "SHARDED_STATE_DICT",
    ),
    Blocked(
        launch="ZeRO-3 without `zero3_save_16bit_model: true`",
        why="the final model would be DeepSpeed's own files, which nothing else loads",
        remedy="write `zero3_save_16bit_model: true`",
        applies=lambda _, launch: (
            launch.engine == "DEEPSPEED" and launch.layout.zero_stage == 3 and not launch.layout.gathers_on_save
        ),
    ),
    Blocked(
        recipe="`activation_checkpointing: true`",
        launch="`fsdp_activation_checkpointing: true`",
        why="the layers would be computed a third time, and upstream refuses it once the model is loaded",
        remedy="delete `fsdp_activation_checkpointing` from the launch file",
        keys=("activation_checkpointing",),
        applies=lambda keys, launch: launch.layout.recomputes and bool(keys.get("activation_checkpointing")),
    ),
    Blocked(
        recipe="`optim` of bitsandbytes, `adafactor`, `adamw_bf16_stochastic`, `adamw_torch_4bit`",
        launch="FSDP",
        why="it cannot update weights that FSDP2 has sharded",
        remedy=f"write `optim: {_FUSED}` or `adamw_torch_8bit`, whose states are sharded too, or launch otherwise",
        keys=("optim",),
        applies=lambda keys, launch: (
            launch.engine == "FSDP"
            and keys.get("optim") in (*BITSANDBYTES, "adafactor", STOCHASTIC_ADAMW, "adamw_torch_4bit")
        ),
    ),
    Blocked(
        recipe="`optim: muon`",
        launch="DeepSpeed",
        why="DeepSpeed flattens the matrices that muon orthogonalises",
        remedy=f"use an FSDP2 or DDP launch file, or `optim: {_FUSED}`",
        keys=("optim",),
        applies=lambda keys, launch: launch.engine == "DEEPSPEED" and keys.get("optim") == "muon",
    ),
    Blocked(
        recipe="`optim` other than `adamw_torch`, `adamw_torch_fused`, `adagrad`, `lion_32bit`",
        launch="DeepSpeed with `offload_optimizer_device`",
        why="accelerate puts DeepSpeed's Adam in its place, in silence",
        remedy=f"write `optim: {_FUSED}`, or keep the states on the GPUs",
        keys=("optim",),
        applies=lambda keys, launch: (
            launch.layout.offloads_optimizer and keys.get("optim", _FUSED) not in _UPDATED_ON_HOST
        ),
    ),
    Blocked(
        recipe="`load_in_8bit: true`",
        launch="FSDP or DeepSpeed",
        why="the scales of 8-bit weights do not travel with their shards",
        remedy="write `load_in_4bit: true`, or launch with accelerate_configs/ddp.yaml",
        keys=("load_in_8bit",),
        applies=lambda keys, launch: bool(launch.engine and keys.get("load_in_8bit")),
    ),
    Blocked(
        recipe="`precompute_ref_log_probs: false` of a policy without a fresh adapter",
        launch="DeepSpeed",
        why="a frozen copy would be kept whole on every process beside the policy that DeepSpeed shards",
        remedy="write `precompute_ref_log_probs: true`",
        keys=("precompute_ref_log_probs",),
        applies=_copies_policy,
    ),
    Blocked(
        recipe="`max_rollbacks`",
        launch="DeepSpeed, tensor or context parallelism",
        why="rollback to a checkpoint within a run is not proved there",
        remedy="delete the line, or use accelerate_configs/fsdp2.yaml, hsdp.yaml or ddp.yaml",
        keys=("max_rollbacks",),
        applies=lambda keys, launch: (
            bool(keys.get("max_rollbacks"))
            and (launch.engine == "DEEPSPEED" or launch.tensor_size > 1 or launch.context_size > 1)
        ),
    ),
    Blocked(
        recipe="PPO, RLOO, GRPO",
        launch="DeepSpeed",
        why="DeepSpeed trains one model; PPO trains two, and each of them evaluates others",
        remedy="use accelerate_configs/fsdp2.yaml, which shards all of them; or ddp.yaml, where they fit",
        stages=_SAMPLES_ANSWERS,
        applies=lambda _, launch: launch.engine == "DEEPSPEED",
    ),
    Blocked(
        recipe="PPO with `use_peft: true`",
        launch="FSDP",
        why="policy, critic and reference would be one trunk, which FSDP2 gathers and reduces for one of them alone",
        remedy="use accelerate_configs/ddp.yaml with the adapters, or train all weights",
        stages=("ppo",),
        keys=("use_peft",),
        applies=lambda keys, launch: launch.engine == "FSDP" and bool(keys.get("use_peft")),
    ),
    Blocked(
        recipe="PPO, RLOO, GRPO with `use_transformers_continuous_batching: true`",
        launch="FSDP",
        why="its threads run the policy's own modules, which under FSDP2 are whole for one forward pass alone",
        remedy="write `use_vllm: true`; or delete the line: `generate` samples from the gathered policy",
        stages=_SAMPLES_ANSWERS,
        keys=("use_transformers_continuous_batching",),
        applies=lambda keys, launch: launch.engine == "FSDP" and bool(keys.get("use_transformers_continuous_batching")),
    ),
    Blocked(
        recipe=", ".join(f"`{key}`" for key in WEIGHTS),
        launch="DeepSpeed",
        why="hidden-state losses read layers and projections outside of the forward pass that DeepSpeed runs",
        remedy="launch with accelerate_configs/fsdp2.yaml or ddp.yaml, or delete the line",
        keys=WEIGHTS,
        applies=lambda keys, launch: launch.engine == "DEEPSPEED" and any(keys.get(key) for key in WEIGHTS),
    ),
    Blocked(
        recipe="`lmbda`",
        launch="ZeRO-3",
        why="it gathers weights in every forward pass, and answers of several processes differ in length",
        remedy="launch with accelerate_configs/fsdp2.yaml, or with ZeRO-1 or 2",
        keys=("lmbda",),
        applies=lambda keys, launch: (
            launch.engine == "DEEPSPEED" and launch.layout.zero_stage == 3 and bool(keys.get("lmbda"))
        ),
    ),
    *OF_STAGES,
)
"""Every combination that is refused."""


def verify_combination(config: RecipeConfig, launch: Launch, file: str = "launch file") -> None:
    """Refuse what a recipe and a launch file cannot ask for together.

    Args:
        config: The recipe.
        launch: How it is started.
        file: The launch file, as it is to be called.

    Raises:
        ConfigError: One or more rows of ``BLOCKED`` apply.

    Source: ``tests/training/layouts/test_compatibility.py``.
    """
    keys, of_stage = flatten_config(config), [row for row in BLOCKED if not row.stages or config.stage in row.stages]
    if problems := [row.tell(keys, config, file) for row in of_stage if row.applies(keys, launch)]:
        raise ConfigError(*problems)


def format_table() -> str:
    """Return the table of ``docs/hardware.md``, in Markdown."""
    rows = [f"| {row.recipe or 'any'} | {row.launch} | {row.why} | {row.remedy} |\n" for row in BLOCKED]
    return "".join(("| recipe | launch file | why not | instead |\n", "|---|---|---|---|\n", *rows))


if __name__ == "__main__":
    sys.stdout.write(format_table())
