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
from recipes_lib.config.table import RECIPE_NAMES
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.training.layouts.launch_environment import Launch

Keys = Mapping[str, Any]
"""Keys of a recipe that are in effect; one that is absent has upstream's default."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """A combination that would fail late, or silently compute something else.

    Attributes:
        launch: What the launch file says, or the launch itself, in Markdown.
        is_launched: Whether a launch is such.
        why: What would happen.
        remedy: What to do instead.
        keys: Of the recipe; it is told at the first of them that is set. Without any it is told of the launch file.
        recipe_text: The condition on the recipe, in Markdown; empty: one of ``keys`` is set, or any recipe if none.
        recipes: Recipes that it is about; empty: all of them.
        is_asked: Whether keys of a recipe are such; ``None``: where one of ``keys`` is set, or always without any.
    """

    launch: str
    is_launched: Callable[[Launch], object]
    why: str
    remedy: str
    keys: tuple[str, ...] = ()
    recipe_text: str = ""
    recipes: tuple[str, ...] = ()
    is_asked: Callable[[Keys, Launch], object] | None = None

    def applies(self, keys: Keys, launch: Launch) -> bool:
        """Return whether this combination applies to a recipe and a launch."""
        if not self.is_launched(launch):
            return False
        if self.is_asked is not None:
            return bool(self.is_asked(keys, launch))
        return not self.keys or any(keys.get(key) for key in self.keys)

    def tell(self, keys: Keys, config: RecipeConfig, file: str) -> Problem:
        """Return the problem of an affected recipe: key, reason, and remedy.

        Args:
            keys: Of the recipe.
            config: The recipe.
            file: The launch file, as it is to be called.
        """
        if not self.keys:
            asked = f"recipes/{config.recipe}.py and a launch with {self.launch}" if self.recipes else self.launch
            return Problem(file, f"{asked}: {self.why}", self.remedy)
        key = next((key for key in self.keys if keys.get(key)), self.keys[0])
        said = f"`{key}: {keys[key]}`" if key in keys else f"`{key}`, which is not given,"
        where = config.provenance.get(key, "default")
        found = f"{said} and a launch with {self.launch}: {self.why}"
        return Problem(key if where == "default" else where, found, self.remedy)


_SAMPLES_ANSWERS: Final = ("ppo", "rloo", "grpo")
_WITH_OTHER_MODELS: Final = ("lora", "reward", "dpo", "distill", *_SAMPLES_ANSWERS)
_OTHER_MODELS: Final = "LoRA, reward models, DPO, distillation, PPO, RLOO, GRPO"
_REMEMBERING: Final = ("ewc_lambda", "kl_to_base")
_UNPROVED: Final = ("neftune_noise_alpha", "torch_compile", "use_liger_kernel", "verify_steps", *_REMEMBERING)


def _is_by(engine: str, zero_stage: int | None = None) -> Callable[[Launch], bool]:
    return lambda launch: launch.engine == engine and zero_stage in (None, launch.layout.zero_stage)


def _is_scaled(launch: Launch) -> bool:
    return launch.precision in ("fp16", "fp8")


def _has_tensors(launch: Launch) -> bool:
    return launch.tensor_size > 1


def _has_rows(launch: Launch) -> bool:
    return launch.context_size > 1


def _has_pipeline(launch: Launch) -> bool:
    return launch.layout.pipeline_stages > 1


def _is_optim_outside(*allowed: str) -> Callable[[Keys, Launch], bool]:
    return lambda keys, _: keys.get("optim", allowed[0]) not in allowed


_FSDP: Final = ("FSDP", _is_by("FSDP"))
_DEEPSPEED: Final = ("DeepSpeed", _is_by("DEEPSPEED"))
_TENSORS: Final = ("`parallelism_config_tp_size`", _has_tensors)
_ROWS: Final = ("`parallelism_config_cp_size` or `parallelism_config_sp_size`", _has_rows)
_PIPELINE: Final = ("`--pipeline_stages`", _has_pipeline)

OF_MESHES: Final = (
    Blocked(
        "sizes of `parallelism_config` and `--pipeline_stages` that are not `num_processes` together",
        lambda launch: (
            launch.layout.sizes
            and launch.layout.pipeline_stages * math.prod(launch.layout.sizes.values()) != launch.world_size
        ),
        "the processes do not fill the device mesh, which accelerate notices when the model is loaded",
        "write sizes whose product is the number of processes",
    ),
    Blocked(
        "FSDP with a mesh and without `dp_shard`",
        lambda launch: (
            launch.engine == "FSDP" and launch.layout.sizes and not {"dp_shard", "tp", "cp"} & set(launch.layout.sizes)
        ),
        "there is nothing to shard over, which accelerate notices when the model is loaded",
        "write `parallelism_config_dp_shard_size`, or use accelerate_configs/ddp.yaml",
    ),
    Blocked(
        f"{_TENSORS[0]} and not `distributed_type: FSDP`",
        lambda launch: _has_tensors(launch) and launch.engine != "FSDP",
        "tensor parallelism is applied while the model is loaded, for FSDP2 only",
        "use accelerate_configs/fsdp2_tp.yaml, with dp_shard_size 1 for tensors alone",
    ),
    Blocked(
        f"{_TENSORS[0]} with `parallelism_config_dp_replicate_size`",
        lambda launch: _has_tensors(launch) and "dp_replicate" in launch.layout.sizes,
        "tensor parallelism with sharding and replication at once is not proved",
        "shard over all groups: write their number as `parallelism_config_dp_shard_size`",
    ),
    Blocked(
        f"{_TENSORS[0]} with `mixed_precision: fp16` or `fp8`",
        lambda launch: _has_tensors(launch) and _is_scaled(launch),
        "the loss scaler and 8-bit layers take whole tensors",
        "write `mixed_precision: bf16`",
    ),
    Blocked(
        f"{_TENSORS[0]} with `fsdp_offload_params: true` or `fsdp_activation_checkpointing: true`",
        lambda launch: _has_tensors(launch) and (launch.layout.recomputes or launch.layout.offloads_weights),
        "transformers shards tensor-parallel weights itself and reads neither",
        "delete the line; `activation_checkpointing: true` stands in the recipe",
    ),
    Blocked(
        *_TENSORS,
        "tensor parallelism does not support adapters, score heads or a second model",
        "use accelerate_configs/fsdp2.yaml",
        recipe_text=_OTHER_MODELS,
        recipes=_WITH_OTHER_MODELS,
    ),
    Blocked(*_TENSORS, "the loss scaler takes whole tensors", "write `bf16: true`", ("fp16",), "`fp16: true`"),
    Blocked(
        *_TENSORS,
        "some weights are tensor-parallel and others are not, and it is not proved to update both alike",
        "write `optim: adamw_torch_fused`",
        ("optim",),
        "`optim` other than `adamw_torch`, `adamw_torch_fused`",
        is_asked=_is_optim_outside("adamw_torch", "adamw_torch_fused"),
    ),
    Blocked(
        *_TENSORS,
        "tensor-parallel ranks would add different noise, or are not proved to compute the same",
        "delete the line, or use accelerate_configs/fsdp2.yaml",
        _UNPROVED,
    ),
    Blocked(
        "`parallelism_config_cp_size` and not `distributed_type: FSDP`",
        lambda launch: "cp" in launch.layout.sizes and launch.engine != "FSDP",
        "sequences that long need a sharded model; context parallelism is proved with FSDP2",
        "use accelerate_configs/fsdp2_cp.yaml, or zero3_sp.yaml by DeepSpeed",
    ),
    Blocked(
        "`parallelism_config_sp_size` and not ZeRO-3",
        lambda launch: launch.shares_by_heads and not _is_by("DEEPSPEED", 3)(launch),
        "sequences that long need a sharded model; sequence parallelism by heads is proved with ZeRO-3",
        "use accelerate_configs/zero3_sp.yaml, or fsdp2_cp.yaml by FSDP2",
    ),
    Blocked(
        f"{_ROWS[0]} with `parallelism_config_tp_size` or `parallelism_config_dp_replicate_size`",
        lambda launch: _has_rows(launch) and {"tp", "dp_replicate"} & set(launch.layout.sizes),
        "context parallelism with tensor parallelism or replication is not proved",
        "shard over all processes: write `parallelism_config_dp_shard_size`",
    ),
    Blocked(
        *_ROWS,
        "rows of these recipes hold more than tokens and labels and are not split",
        "use accelerate_configs/fsdp2.yaml",
        recipe_text=_OTHER_MODELS,
        recipes=_WITH_OTHER_MODELS,
    ),
    Blocked(
        *_ROWS,
        "ranks of one context-parallel group would read different rows of a stream",
        "delete the line: rows are prepared once and read from the disk",
        ("dataset_streaming",),
        "`dataset_streaming: true`",
    ),
    Blocked(*_ROWS, "context parallelism needs its own attention", "delete the line", ("attn_implementation",)),
    Blocked(
        *_ROWS,
        "it is not proved to compute the same under context parallelism",
        "delete the line, or use accelerate_configs/fsdp2.yaml",
        _UNPROVED,
    ),
)
"""Those of ``BLOCKED`` that are about ``parallelism_config``."""


_PIPELINE_OPTIMIZERS: Final = ("adamw_torch", "adamw_torch_fused", "muon")
_WITHOUT_PIPELINE: Final = "delete the line, or launch without pipeline parallelism"


def _count_batches(keys: Keys) -> int:
    num_batches: int = keys.get("gradient_accumulation_steps", 1)
    return num_batches


OF_PIPELINES: Final = (
    Blocked(
        *_PIPELINE,
        "only pretraining supports pipeline parallelism",
        "launch without pipeline parallelism, by accelerate_configs/fsdp2.yaml where the model does not fit",
        recipe_text="any but pretraining",
        recipes=tuple(recipe for recipe in RECIPE_NAMES if recipe != "pretrain"),
    ),
    Blocked(
        "`--pipeline_stages` that do not divide the number of processes",
        lambda launch: launch.world_size % launch.layout.pipeline_stages,
        "some processes would be in no pipeline",
        "write a number of pipeline stages that divides `--num_processes`",
    ),
    Blocked(
        "`--pipeline_stages` and DeepSpeed, context parallelism or `parallelism_config_dp_replicate_size`",
        lambda launch: (
            _has_pipeline(launch)
            and (launch.engine == "DEEPSPEED" or {"dp_replicate", "cp", "sp"} & set(launch.layout.sizes))
        ),
        "a pipeline stage is sharded by FSDP2 and tensor parallelism only, over all ranks that hold it",
        "use accelerate_configs/fsdp2.yaml or fsdp2_tp.yaml, or ddp.yaml, where each rank has the whole pipeline stage",
    ),
    Blocked(
        "`--pipeline_stages` and `fsdp_offload_params` or `fsdp_activation_checkpointing`",
        lambda launch: _has_pipeline(launch) and (launch.layout.offloads_weights or launch.layout.recomputes),
        "accelerate would apply it, which does not shard pipeline stages",
        "use accelerate_configs/fsdp2.yaml as it is; `activation_checkpointing: true` is the recipe's",
    ),
    Blocked(
        "`--pipeline_stages` and `mixed_precision: fp16` or `fp8`",
        lambda launch: _has_pipeline(launch) and _is_scaled(launch),
        "loss scaling and layer replacement need the whole model on one rank",
        "use a launch file with `mixed_precision: bf16`",
    ),
    Blocked(
        *_PIPELINE, "the loss scale would have to be the same on all pipeline stages", "write `bf16: true`", ("fp16",)
    ),
    Blocked(
        "`--pipeline_schedule 1f1b`",
        lambda launch: _has_pipeline(launch) and launch.layout.schedule == "1f1b",
        "too few micro-batches to fill the pipeline, which this schedule requires",
        "write as many as there are pipeline stages, better four times as many and smaller ones",
        ("gradient_accumulation_steps",),
        "`gradient_accumulation_steps` below the number of pipeline stages",
        is_asked=lambda keys, launch: _count_batches(keys) < launch.layout.pipeline_stages,
    ),
    Blocked(
        "`--pipeline_schedule interleaved`",
        lambda launch: _has_pipeline(launch) and launch.layout.schedule == "interleaved",
        "the chunks of a process take turns by groups of as many micro-batches as there are pipeline stages",
        "write a multiple of the number of pipeline stages",
        ("gradient_accumulation_steps",),
        "`gradient_accumulation_steps` that is no multiple of the number of pipeline stages",
        is_asked=lambda keys, launch: _count_batches(keys) % launch.layout.pipeline_stages,
    ),
    *(
        Blocked(*_PIPELINE, why, _WITHOUT_PIPELINE, (key,))
        for key, why in (
            ("batch_ramp_tokens", "a step of few micro-batches leaves most pipeline stages idle"),
            ("verify_steps", "no two ranks of a pipeline hold the same weights to compare"),
            ("metrics", "they score sampled answers, and no rank has the whole model to sample from"),
            ("ewc_lambda", "the penalty is not proved where each rank holds some layers"),
            ("torch_compile", "the layers of absent pipeline stages cannot be compiled"),
            ("use_liger_kernel", "it would replace modules of absent pipeline stages"),
        )
    ),
    Blocked(
        *_PIPELINE,
        "its states are not proved to convert between pipeline stages and whole models",
        "write `optim: adamw_torch_fused`",
        ("optim",),
        f"`optim` other than {', '.join(f'`{name}`' for name in _PIPELINE_OPTIMIZERS)}",
        is_asked=_is_optim_outside(*_PIPELINE_OPTIMIZERS),
    ),
)
"""Every combination that pipeline parallelism refuses."""


BITSANDBYTES: Final = (
    *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "ademamix", "ademamix_8bit"),
    *("paged_ademamix_32bit", "paged_ademamix_8bit", "lion_8bit", "lion_32bit", "paged_lion_32bit", "paged_lion_8bit"),
    *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
)
"""Values of ``optim`` that are bitsandbytes'."""
STOCHASTIC_ADAMW: Final = "adamw_bf16_stochastic"
"""The value of ``optim`` that trains bfloat16 weights with ``StochasticAdamW``."""
_UPDATED_ON_HOST: Final = ("adamw_torch_fused", "adamw_torch", "adagrad", "lion_32bit")
_NOT_SHARDED: Final = (*BITSANDBYTES, "adafactor", STOCHASTIC_ADAMW, "adamw_torch_4bit")


def _block_precision(key: str, launched: str) -> Blocked:
    return Blocked(
        f"`mixed_precision: {launched}`",
        lambda launch: launch.precision == launched,
        "they contradict each other, and upstream silently takes the recipe's",
        f"delete `{key}`, or use a launch file with `mixed_precision: {key}`",
        (key,),
        f"`{key}: true`",
    )


def _block_no_precision(key: str) -> Blocked:
    return Blocked(
        f"`mixed_precision: {key}`",
        lambda launch: launch.precision == key,
        "accelerate silently computes in the launch file's precision",
        f'delete `{key}`, or use a launch file with `mixed_precision: "no"`',
        (key,),
        f"`{key}: false`",
        is_asked=lambda keys, _: keys.get(key) is False,
    )


def _trains_few_bits(keys: Keys, launch: Launch) -> bool:
    """Whether 16-bit weights are trained with a compute dtype of fewer bits."""
    is_all_float32 = launch.precision == "no" and keys.get("bf16") is False and not keys.get("fp16")
    return keys.get("dtype") in ("bfloat16", "float16") and not keys.get("use_peft") and not is_all_float32


def _copies_policy(keys: Keys, _: Launch) -> bool:
    """Whether a frozen copy of the whole policy exists beside it; ``prepare_reference`` makes it."""
    # A new adapter changes nothing yet, unless its initialisation took a part of the base weights.
    has_base = (
        keys.get("use_peft")
        and not keys.get("adapter_name_or_path")
        and keys.get("init_lora_weights") not in ("pissa", "olora")
    )
    is_live = keys.get("precompute_ref_log_probs") is False and not keys.get("ref_model_name_or_path")
    return is_live and not has_base


BLOCKED: Final = (
    _block_precision("bf16", "fp16"),
    _block_precision("fp16", "bf16"),
    _block_precision("bf16", "fp8"),
    _block_precision("fp16", "fp8"),
    _block_no_precision("bf16"),
    _block_no_precision("fp16"),
    Blocked(
        "FSDP, products in fewer bits",
        _FSDP[1],
        "accelerate trains them as float32: another run, and twice the memory",
        "write `dtype: float32`, or train an adapter (`use_peft: true`)",
        ("dtype",),
        "`dtype: bfloat16`, `dtype: float16`, without an adapter",
        is_asked=_trains_few_bits,
    ),
    Blocked(
        "DeepSpeed with another number",
        lambda launch: launch.layout.accumulation is not None,
        "a step has one number of micro-batches",
        "write `gradient_accumulation_steps: auto` in the launch file",
        ("gradient_accumulation_steps",),
        is_asked=lambda keys, launch: launch.layout.accumulation != _count_batches(keys),
    ),
    Blocked(
        "DeepSpeed with another `gradient_clipping`",
        lambda launch: launch.layout.clipping is not None,
        "DeepSpeed clips by its own number",
        "write `gradient_clipping: auto` in the launch file",
        ("max_grad_norm",),
        is_asked=lambda keys, launch: launch.layout.clipping != keys.get("max_grad_norm", 1.0),
    ),
    Blocked(
        "FSDP or DeepSpeed with `use_cpu: true`",
        lambda launch: launch.engine and launch.layout.uses_cpu,
        "accelerate shards nothing on CPUs, in silence",
        "use accelerate_configs/cpu_ddp.yaml",
    ),
    *OF_MESHES,
    Blocked(
        "`fsdp_version: 1`, or none",
        lambda launch: launch.engine == "FSDP" and launch.layout.fsdp_version != 2,
        "checkpoints, precision and adapters are made for FSDP2; accelerate's default is 1",
        "write `fsdp_version: 2`",
    ),
    Blocked(
        "FSDP with `fsdp_state_dict_type: FULL_STATE_DICT`",
        lambda launch: launch.engine == "FSDP" and launch.layout.state_dict_type != "SHARDED_STATE_DICT",
        "checkpoints are sharded whatever it says, and the final model is whole",
        "write `SHARDED_STATE_DICT`",
    ),
    Blocked(
        "ZeRO-3 without `zero3_save_16bit_model: true`",
        lambda launch: _is_by("DEEPSPEED", 3)(launch) and not launch.layout.gathers_on_save,
        "the final model would be DeepSpeed's own files, which nothing else loads",
        "write `zero3_save_16bit_model: true`",
    ),
    Blocked(
        "`fsdp_activation_checkpointing: true`",
        lambda launch: launch.layout.recomputes,
        "the layers would be computed a third time, and upstream refuses it once the model is loaded",
        "delete `fsdp_activation_checkpointing` from the launch file",
        ("activation_checkpointing",),
        "`activation_checkpointing: true`",
    ),
    Blocked(
        *_FSDP,
        "it cannot update weights that FSDP2 has sharded",
        "write `optim: adamw_torch_fused` or `adamw_torch_8bit`, whose states are sharded too, or launch otherwise",
        ("optim",),
        "`optim` of bitsandbytes, `adafactor`, `adamw_bf16_stochastic`, `adamw_torch_4bit`",
        is_asked=lambda keys, _: keys.get("optim") in _NOT_SHARDED,
    ),
    Blocked(
        *_DEEPSPEED,
        "DeepSpeed flattens the matrices that muon orthogonalises",
        "use an FSDP2 or DDP launch file, or `optim: adamw_torch_fused`",
        ("optim",),
        "`optim: muon`",
        is_asked=lambda keys, _: keys.get("optim") == "muon",
    ),
    Blocked(
        "DeepSpeed with `offload_optimizer_device`",
        lambda launch: launch.layout.offloads_optimizer,
        "accelerate puts DeepSpeed's Adam in its place, in silence",
        "write `optim: adamw_torch_fused`, or keep the states on the GPUs",
        ("optim",),
        "`optim` other than `adamw_torch`, `adamw_torch_fused`, `adagrad`, `lion_32bit`",
        is_asked=_is_optim_outside(*_UPDATED_ON_HOST),
    ),
    Blocked(
        "FSDP or DeepSpeed",
        lambda launch: launch.engine,
        "the scales of 8-bit weights do not travel with their shards",
        "write `load_in_4bit: true`, or launch with accelerate_configs/ddp.yaml",
        ("load_in_8bit",),
        "`load_in_8bit: true`",
    ),
    Blocked(
        *_DEEPSPEED,
        "a frozen copy would be kept whole on every process beside the policy that DeepSpeed shards",
        "write `precompute_ref_log_probs: true`",
        ("precompute_ref_log_probs",),
        "`precompute_ref_log_probs: false` of a policy without a fresh adapter",
        is_asked=_copies_policy,
    ),
    Blocked(
        "DeepSpeed, tensor or context parallelism",
        lambda launch: launch.engine == "DEEPSPEED" or _has_tensors(launch) or _has_rows(launch),
        "rollback to a checkpoint within a run is not proved there",
        "delete the line, or use accelerate_configs/fsdp2.yaml, hsdp.yaml or ddp.yaml",
        ("max_rollbacks",),
    ),
    Blocked(
        *_DEEPSPEED,
        "DeepSpeed trains one model; these recipes evaluate others besides, and PPO trains two",
        "use accelerate_configs/fsdp2.yaml, which shards all of them; or ddp.yaml, where they fit",
        recipe_text="PPO, RLOO, GRPO",
        recipes=_SAMPLES_ANSWERS,
    ),
    Blocked(
        *_FSDP,
        "its threads run the policy's own modules, which under FSDP2 are whole for one forward pass alone",
        "write `use_vllm: true`; or delete the line: `generate` samples from the gathered policy",
        ("use_transformers_continuous_batching",),
        "PPO, RLOO, GRPO with `use_transformers_continuous_batching: true`",
        _SAMPLES_ANSWERS,
    ),
    Blocked(
        *_DEEPSPEED,
        "hidden-state losses read layers and projections outside of the forward pass that DeepSpeed runs",
        "launch with accelerate_configs/fsdp2.yaml or ddp.yaml, or delete the line",
        WEIGHTS,
    ),
    Blocked(
        *_DEEPSPEED,
        "it makes the update by itself, from gradients without the penalty, and shards no second model",
        "launch with accelerate_configs/fsdp2.yaml or ddp.yaml",
        _REMEMBERING,
    ),
    Blocked(
        "ZeRO-3",
        _is_by("DEEPSPEED", 3),
        "it gathers weights in every forward pass, and answers of several processes differ in length",
        "launch with accelerate_configs/fsdp2.yaml, or with ZeRO-1 or 2",
        ("lmbda",),
    ),
    Blocked(
        "FSDP, DeepSpeed, context or pipeline parallelism",
        lambda launch: launch.engine or _has_rows(launch) or _has_pipeline(launch),
        "one process answers the questions, from weights that are whole",
        "launch with accelerate_configs/ddp.yaml, or score checkpoints by `recipes eval`",
        ("eval_tasks",),
    ),
    *OF_PIPELINES,
)
"""Every combination that is refused."""


def verify_combination(config: RecipeConfig, launch: Launch, file: str = "launch file") -> None:
    """Raise for incompatible options of a recipe and a launch file.

    Args:
        config: The recipe.
        launch: How it is started.
        file: The launch file, as it is to be called.

    Raises:
        ConfigError: One or more rows of ``BLOCKED`` apply.

    Source: ``tests/training/layouts/test_compatibility.py``.
    """
    keys = flatten_config(config)
    rows = [row for row in BLOCKED if not row.recipes or config.recipe in row.recipes]
    if problems := [row.tell(keys, config, file) for row in rows if row.applies(keys, launch)]:
        raise ConfigError(*problems)


def format_table() -> str:
    """Return the table of ``docs/hardware.md``, in Markdown."""
    rows = [
        f"| {row.recipe_text or ', '.join(f'`{key}`' for key in row.keys) or 'any'} "
        f"| {row.launch} | {row.why} | {row.remedy} |\n"
        for row in BLOCKED
    ]
    return "".join(("| recipe | launch file | why not | instead |\n", "|---|---|---|---|\n", *rows))


if __name__ == "__main__":
    sys.stdout.write(format_table())
