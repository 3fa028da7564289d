"""What cannot be together where processes form a mesh: groups that share tensors, shards or sequences."""

from __future__ import annotations

import math
from typing import Final

from recipes_lib.training.blocked import Blocked

_TENSORS: Final = "`parallelism_config_tp_size`"
_ROWS: Final = "`parallelism_config_cp_size` or `parallelism_config_sp_size`"
_WITH_OTHER_MODELS: Final = ("lora", "reward", "dpo", "distill", "ppo", "rloo", "grpo")
_UNPROVED: Final = ("neftune_noise_alpha", "torch_compile", "verify_steps")
_ADAMW: Final = ("adamw_torch", "adamw_torch_fused")

OF_MESHES: Final = (
    Blocked(
        launch="sizes of `parallelism_config` that are not `num_processes` together",
        why="the processes do not fill the mesh, which accelerate finds out when the model is loaded",
        remedy="write sizes whose product is the number of processes",
        applies=lambda _, launch: (
            bool(launch.layout.sizes) and math.prod(launch.layout.sizes.values()) != launch.world_size
        ),
    ),
    Blocked(
        launch="FSDP with a mesh and without `dp_shard`",
        why="there is nothing to shard over, which accelerate finds out when the model is loaded",
        remedy="write `parallelism_config_dp_shard_size`, or use accelerate_configs/ddp.yaml",
        applies=lambda _, launch: (
            launch.engine == "FSDP"
            and bool(launch.layout.sizes)
            and not {"dp_shard", "tp", "cp"} & set(launch.layout.sizes)
        ),
    ),
    Blocked(
        launch=f"{_TENSORS} and not `distributed_type: FSDP`",
        why="tensors are cut while the model is loaded, for FSDP2 and nothing else",
        remedy="use accelerate_configs/fsdp2_tp.yaml, with dp_shard_size 1 for tensors alone",
        applies=lambda _, launch: launch.tensor_size > 1 and launch.engine != "FSDP",
    ),
    Blocked(
        launch=f"{_TENSORS} with `parallelism_config_dp_replicate_size`",
        why="weights that are cut, sharded and replicated at once are not proved to give the same numbers",
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
        why="transformers shards what it cuts, and reads neither",
        remedy="delete the line; `activation_checkpointing: true` stands in the recipe",
        applies=lambda _, launch: (
            launch.tensor_size > 1 and (launch.layout.recomputes or launch.layout.offloads_weights)
        ),
    ),
    Blocked(
        recipe="LoRA, reward models, DPO, distillation, PPO, RLOO, GRPO",
        launch=_TENSORS,
        why="an adapter, a score head or a second model would stand whole beside tensors that are cut",
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
        why="some weights are cut and others are not, and it is not proved to update both alike",
        remedy="write `optim: adamw_torch_fused`",
        keys=("optim",),
        applies=lambda keys, launch: launch.tensor_size > 1 and keys.get("optim", _ADAMW[1]) not in _ADAMW,
    ),
    Blocked(
        recipe=", ".join(f"`{key}`" for key in _UNPROVED),
        launch=_TENSORS,
        why="processes that share tensors would add other noise, or are not proved to compute the same",
        remedy="delete the line, or use accelerate_configs/fsdp2.yaml",
        keys=_UNPROVED,
        applies=lambda keys, launch: launch.tensor_size > 1 and any(keys.get(key) for key in _UNPROVED),
    ),
    Blocked(
        launch="`parallelism_config_cp_size` and not `distributed_type: FSDP`",
        why="rows that long need a model that is sharded, and what shares them by keys is proved with FSDP2",
        remedy="use accelerate_configs/fsdp2_cp.yaml, or zero3_sp.yaml by DeepSpeed",
        applies=lambda _, launch: "cp" in launch.layout.sizes and launch.engine != "FSDP",
    ),
    Blocked(
        launch="`parallelism_config_sp_size` and not ZeRO-3",
        why="rows that long need a model that is sharded, and what shares them by heads is proved with ZeRO-3",
        remedy="use accelerate_configs/zero3_sp.yaml, or fsdp2_cp.yaml by FSDP2",
        applies=lambda _, launch: (
            launch.shares_by_heads and (launch.engine != "DEEPSPEED" or launch.layout.zero_stage != 3)
        ),
    ),
    Blocked(
        launch=f"{_ROWS} with `parallelism_config_tp_size` or `parallelism_config_dp_replicate_size`",
        why="rows that are shared by processes that also share tensors, or replicate, are not proved",
        remedy="shard over all processes: write `parallelism_config_dp_shard_size`",
        applies=lambda _, launch: launch.context_size > 1 and bool({"tp", "dp_replicate"} & set(launch.layout.sizes)),
    ),
    Blocked(
        recipe="LoRA, reward models, DPO, distillation, PPO, RLOO, GRPO",
        launch=_ROWS,
        why="a row of these stages holds more than tokens and their successors, and is not cut",
        remedy="use accelerate_configs/fsdp2.yaml",
        stages=_WITH_OTHER_MODELS,
        applies=lambda _, launch: launch.context_size > 1,
    ),
    Blocked(
        recipe="`dataset_streaming: true`",
        launch=_ROWS,
        why="a stream is dealt out to processes, and those that share a row would each have another",
        remedy="delete the line: rows are prepared once and read from the disk",
        keys=("dataset_streaming",),
        applies=lambda keys, launch: launch.context_size > 1 and bool(keys.get("dataset_streaming")),
    ),
    Blocked(
        recipe="`attn_implementation`",
        launch=_ROWS,
        why="a row that is shared needs the attention that reaches over processes",
        remedy="delete the line",
        keys=("attn_implementation",),
        applies=lambda keys, launch: launch.context_size > 1 and bool(keys.get("attn_implementation")),
    ),
    Blocked(
        recipe=", ".join(f"`{key}`" for key in _UNPROVED),
        launch=_ROWS,
        why="it is not proved to compute the same where a row is shared",
        remedy="delete the line, or use accelerate_configs/fsdp2.yaml",
        keys=_UNPROVED,
        applies=lambda keys, launch: launch.context_size > 1 and any(keys.get(key) for key in _UNPROVED),
    ),
)
"""Those of ``combinations.BLOCKED`` that are about ``parallelism_config``."""
