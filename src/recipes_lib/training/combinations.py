"""What a recipe and a launch file cannot ask for together: one table for ``recipes check``, every start and the docs.

``python -m recipes_lib.training.combinations`` prints the table of ``docs/hardware.md``.
"""

from __future__ import annotations

import sys
from typing import Final

from recipes_lib.config.layer_keys import WEIGHTS
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.config.show import flatten_config
from recipes_lib.errors import ConfigError
from recipes_lib.training.blocked import Blocked, Keys
from recipes_lib.training.blocked_meshes import OF_MESHES
from recipes_lib.training.blocked_stages import OF_STAGES
from recipes_lib.training.launch import Launch

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
_ENGINES: Final = ("use_vllm", "use_transformers_continuous_batching")


def _block_precision(key: str, launched: str) -> Blocked:
    return Blocked(
        recipe=f"`{key}: true`",
        launch=f"`mixed_precision: {launched}`",
        why="the two contradict each other, and upstream would take the recipe's in silence",
        remedy=f"delete `{key}`, or use a launch file with `mixed_precision: {key}`",
        keys=(key,),
        applies=lambda keys, launch: launch.precision == launched and bool(keys.get(key)),
    )


def _block_no_precision(key: str) -> Blocked:
    return Blocked(
        recipe=f"`{key}: false`",
        launch=f"`mixed_precision: {key}`",
        why="accelerate computes in what the launch file says, in silence",
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
        why="accelerate trains them as float32, so that it is another run, and twice the memory",
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
        why="a step has but one number of micro-batches",
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
        why="checkpoints, precision and adapters are made for FSDP2; accelerate takes 1 where nothing is said",
        remedy="write `fsdp_version: 2`",
        applies=lambda _, launch: launch.engine == "FSDP" and launch.layout.fsdp_version != 2,
    ),
    Blocked(
        launch="FSDP with `fsdp_state_dict_type: FULL_STATE_DICT`",
        why="checkpoints are shards whatever it says, and the final model is whole",
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
        recipe="`optim` of bitsandbytes, `adafactor`, `adamw_bf16_stochastic`",
        launch="FSDP",
        why="it cannot update weights that FSDP2 has sharded",
        remedy=f"write `optim: {_FUSED}`, whose states are sharded too, or launch otherwise",
        keys=("optim",),
        applies=lambda keys, launch: (
            launch.engine == "FSDP" and keys.get("optim") in (*BITSANDBYTES, "adafactor", STOCHASTIC_ADAMW)
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
        launch="FSDP or DeepSpeed",
        why="a sharded model cannot go back inside a run",
        remedy="delete the line, or launch without FSDP and DeepSpeed",
        keys=("max_rollbacks",),
        applies=lambda keys, launch: bool(launch.engine and keys.get("max_rollbacks")),
    ),
    Blocked(
        recipe="RLOO, GRPO",
        launch="FSDP or DeepSpeed",
        why="answers are sampled from weights that these stages do not split",
        remedy="use accelerate_configs/ddp.yaml, with an adapter (`use_peft: true`) where memory is short",
        stages=("rloo", "grpo"),
        applies=lambda _, launch: bool(launch.engine),
    ),
    Blocked(
        recipe="PPO",
        launch="DeepSpeed",
        why="it trains one model, and PPO trains two and reads two more",
        remedy="use accelerate_configs/fsdp2.yaml, which shards all four; or ddp.yaml, where they fit",
        stages=("ppo",),
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
        recipe="PPO with `use_vllm`, `use_transformers_continuous_batching`",
        launch="FSDP",
        why="this engine takes over whole weights, and under FSDP2 no process has them",
        remedy="delete the line: `generate` samples from the shards; or use accelerate_configs/ddp.yaml",
        stages=("ppo",),
        keys=_ENGINES,
        applies=lambda keys, launch: launch.engine == "FSDP" and any(keys.get(key) for key in _ENGINES),
    ),
    Blocked(
        recipe=", ".join(f"`{key}`" for key in WEIGHTS),
        launch="FSDP or DeepSpeed",
        why="layers are compared behind the forward pass, when their weights are freed",
        remedy="launch with accelerate_configs/ddp.yaml, or delete the line",
        keys=WEIGHTS,
        applies=lambda keys, launch: bool(launch.engine) and any(keys.get(key) for key in WEIGHTS),
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

    Source: ``tests/training/test_combinations.py``.
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
