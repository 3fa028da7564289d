"""Differences from upstream: other defaults, bounds on values, and upstream keys that are refused, each with a reason.

Every key of upstream's configuration is either honoured or refused here; ``tests/config/test_defaults.py`` proves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from recipes_lib.config.schema import WEIGHTS
from recipes_lib.config.table import Retired, dropped, dropped_at, each, renamed, undecided

DEFAULTS: Final[Mapping[str, tuple[Any, str]]] = {
    "activation_checkpointing": (False, "recomputing costs about a third of the speed; on, it saves memory"),
    "eval_on_start": (True, "a broken evaluation fails before the training, and the gain is measured from the start"),
    "eval_steps": (0.1, "ten evaluations a run"),
    "eval_strategy": ("steps", "held-out loss while training, where there are held-out rows"),
    "hub_private_repo": (True, "nothing becomes public by accident"),
    "hub_strategy": ("end", "checkpoints are published where that is asked for"),
    "logging_steps": (1, "a line of metrics.jsonl costs nothing, and a spike lasts a few steps"),
    "report_to": ("none", "metrics.jsonl is always written; a tracker is asked for by name"),
    "save_steps": (0.1, "a tenth of the run is the most that a crash can cost, whatever its length"),
    "save_total_limit": (2, "the last checkpoint and the one before it; optimizer states fill disks"),
}
"""Effective defaults of every stage that are not upstream's: key -> (value, reason)."""

NOTES: Final[Mapping[str, str]] = {
    "activation_checkpointing_kwargs": "`save_matmuls: true` recomputes everything but matrix products and attention.",
    "bf16": "Unset: on where the hardware multiplies bfloat16.",
    "hub_always_push": "Unset, a checkpoint that a newer one overtakes is not published.",
    "hub_model_id": "Unset: the name of `output_dir`, under the account of the token.",
    "hub_private_repo": "Only `false` asks for a public repository; one that is public is refused otherwise.",
    "hub_revision": "A branch.",
    "hub_strategy": "While training, each checkpoint is one commit with the tag `step-N`: see `docs/publishing.md`.",
    "output_dir": "The same command resumes from the newest complete checkpoint in it.",
    "push_to_hub": "By a thread beside training, which it neither slows nor fails.",
    "use_cpu": "Unset: where there is no accelerator.",
}
"""What an upstream help text does not say about the key here."""

BOUNDS: Final[Mapping[str, Mapping[str, float]]] = {
    "adam_beta1": {"minimum": 0, "exclusiveMaximum": 1},
    "adam_beta2": {"minimum": 0, "exclusiveMaximum": 1},
    "adam_epsilon": {"exclusiveMinimum": 0},
    "data_seed": {"minimum": 0, "maximum": 2**32 - 1},
    "dataloader_num_workers": {"minimum": 0},
    "dataloader_prefetch_factor": {"minimum": 1},
    "ddp_bucket_cap_mb": {"minimum": 1},
    "ddp_timeout": {"minimum": 1},
    "device_hour_price": {"exclusiveMinimum": 0},
    "eval_delay": {"minimum": 0},
    "eval_steps": {"exclusiveMinimum": 0},
    "gradient_accumulation_steps": {"minimum": 1},
    "learning_rate": {"exclusiveMinimum": 0, "maximum": 1},
    "logging_steps": {"exclusiveMinimum": 0},
    "max_broken_fraction": {"minimum": 0, "maximum": 1},
    "max_grad_norm": {"minimum": 0},
    "max_length": {"minimum": 8},
    "max_rollbacks": {"minimum": 0},
    "max_steps": {"minimum": -1},
    "max_truncated_fraction": {"minimum": 0, "maximum": 1},
    "neftune_noise_alpha": {"exclusiveMinimum": 0},
    "num_sample_prompts": {"minimum": 0},
    "num_train_epochs": {"exclusiveMinimum": 0},
    "per_device_eval_batch_size": {"minimum": 1},
    "per_device_train_batch_size": {"minimum": 1},
    "router_aux_loss_coef": {"minimum": 0},
    "sample_max_new_tokens": {"minimum": 1},
    "repeat": {"exclusiveMinimum": 0},
    "save_keep_steps": {"minimum": 1},
    "save_steps": {"exclusiveMinimum": 0},
    "save_total_limit": {"minimum": 1},
    "seed": {"minimum": 0, "maximum": 2**32 - 1},
    "test_split_size": {"exclusiveMinimum": 0},
    "torch_empty_cache_steps": {"minimum": 1},
    "verify_steps": {"minimum": 1},
    "warmup_steps": {"minimum": 0},
    "weight": {"exclusiveMinimum": 0},
    "weight_decay": {"minimum": 0, "maximum": 1},
    # pretraining
    "batch_ramp_start": {"exclusiveMinimum": 0, "maximum": 1},
    "batch_ramp_tokens": {"minimum": 1},
    "decay_steps": {"exclusiveMinimum": 0},
    "max_tokens": {"minimum": 1},
    "min_lr_ratio": {"minimum": 0, "maximum": 1},
    "start_tokens": {"minimum": 0},
    "warmup_tokens": {"minimum": 1},
    # adapters
    "lora_alpha": {"exclusiveMinimum": 0},
    "lora_dropout": {"minimum": 0, "exclusiveMaximum": 1},
    "lora_r": {"minimum": 1},
    "loraplus_lr_ratio": {"minimum": 1},
    # preferences
    "beta": {"minimum": 0},
    "center_rewards_coefficient": {"minimum": 0},
    "discopop_tau": {"exclusiveMinimum": 0},
    "label_smoothing": {"minimum": 0, "exclusiveMaximum": 0.5},
    "ld_alpha": {"minimum": 0, "maximum": 1},
    "simpo_gamma": {"minimum": 0},
    "unfinished_share": {"minimum": 0, "exclusiveMaximum": 1},
    # reinforcement learning
    "cliprange": {"exclusiveMinimum": 0},
    "cliprange_value": {"exclusiveMinimum": 0},
    "critic_learning_rate": {"exclusiveMinimum": 0, "maximum": 1},
    "critic_warmup_iterations": {"minimum": 0},
    "delta": {"exclusiveMinimum": 0},
    "dual_clip": {"exclusiveMinimum": 1},
    "epsilon": {"exclusiveMinimum": 0},
    "epsilon_high": {"exclusiveMinimum": 0},
    "gamma": {"minimum": 0, "maximum": 1},
    "kl_coef": {"minimum": 0},
    "kl_horizon": {"exclusiveMinimum": 0},
    "kl_target_per_sequence": {"exclusiveMinimum": 0},
    "lam": {"minimum": 0, "maximum": 1},
    "max_zero_std_rollouts": {"minimum": 1},
    "missing_eos_penalty": {"minimum": 0},
    "num_generations": {"minimum": 2},
    "num_iterations": {"minimum": 1},
    "num_mini_batches": {"minimum": 1},
    "num_ppo_epochs": {"minimum": 1},
    "response_length": {"minimum": 1},
    "steps_per_generation": {"minimum": 1},
    "target_kl": {"exclusiveMinimum": 0},
    "temperature": {"exclusiveMinimum": 0},
    "top_entropy_quantile": {"exclusiveMinimum": 0, "maximum": 1},
    "vllm_group_port": {"minimum": 1, "maximum": 65535},
    "vllm_server_timeout": {"minimum": 0},
    # distillation
    **{key: {"minimum": 0} for key in WEIGHTS},
    "distillation_alpha": {"minimum": 0, "exclusiveMaximum": 1},
    "distillation_beta": {"minimum": 0, "maximum": 1},
    "distillation_temperature": {"exclusiveMinimum": 0},
    "projection_learning_rate": {"exclusiveMinimum": 0, "maximum": 1},
    "lmbda": {"minimum": 0, "maximum": 1},
    "sampling_temperature": {"exclusiveMinimum": 0},
    "teacher_top_k": {"minimum": 1},
}
"""Range of each number, as JSON schema spells it; ``weight`` and ``repeat`` are those of a ``dataset_mixture`` entry,
``start_tokens`` that of a ``dataset_curriculum`` phase."""

CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "debug": ("", "underflow_overflow"),
    # Length-aware sampling reads a length column and reorders rows; packed rows are all of one length.
    "train_sampling_strategy": ("random", "sequential"),
}
"""Values honoured where upstream allows more."""

SHARE_OR_COUNT: Final = (
    "warmup_steps",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "test_split_size",
    "decay_steps",
)
"""Numbers that are a share below 1 and a whole count from 1 on."""

_FIXED_LENGTH = dropped("does nothing for packed rows", "delete the line; rows are packed to `max_length`")
_LAUNCH = undecided("is hardware, which is not in a recipe", "put it into the accelerate YAML (accelerate_configs/)")
_EVALUATION = dropped("belongs to upstream's evaluation loop; the hooks here keep sums only", "delete the line")
_RESUME = dropped_at((False, None), "would make a resumed run differ from an uninterrupted one", "delete the line")
_LOSS = dropped_at((0, 0.0, None), "is another loss than the one here", "delete the line")
_PREPARED = dropped("belongs to upstream's data preparation; rows are prepared once, by `recipes prepare`")
_LIGER = dropped_at((False, None), "replaces the loss head, which is already computed in chunks", "delete the line")

REFUSED: Final[Mapping[str, Retired]] = {
    # The mask has one author.
    "assistant_only_loss": Retired(
        "is `loss_on` here",
        "write `loss_on: assistant`; chats train on it unless told otherwise",
        "loss_on",
        # At false TRL goes by the rows: the completion of a prompt, all of a text; so is `loss_on` left out.
        {True: {"loss_on": "assistant"}, False: {}, None: {}},
    ),
    "completion_only_loss": Retired(
        "is `loss_on` here",
        "write `loss_on: completion`, or `loss_on: all`",
        "loss_on",
        {True: {"loss_on": "completion"}, False: {"loss_on": "all"}, None: {}},
    ),
    # Data preparation has one author too.
    "dataset_text_field": dropped_at(
        ("text", None), "is not needed; the column is `text`", "write `dataset_columns: {text: NAME}`"
    ),
    **each("dataset_kwargs dataset_num_proc shuffle_dataset eval_packing", _PREPARED),
    "packing_strategy": Retired(
        "is not needed; packing is best-fit and keeps examples apart",
        "delete the line; `overlong: split` cuts examples longer than `max_length` into several",
        "overlong",
        {"bfd": {}, "bfd_split": {"overlong": "split"}, "bfd-requeue": {"overlong": "split"}, "ffd": {}},
    ),
    "padding_free": dropped("is not needed", "delete the line; `packing` leaves no padding"),
    "pad_to_multiple_of": _FIXED_LENGTH,
    "truncation_mode": Retired(
        "is `overlong` here",
        "write `overlong: truncate`, which keeps the start, or drop, split or error",
        "overlong",
        {"keep_start": {"overlong": "truncate"}},
    ),
    "remove_unused_columns": _PREPARED,
    "length_column_name": _FIXED_LENGTH,
    "label_names": _PREPARED,
    # The loss is ours.
    "label_smoothing_factor": _LOSS,
    **each("use_liger_kernel liger_kernel_config", _LIGER),
    "average_tokens_across_devices": dropped_at((True,), "is always on; off, results depend on the number of GPUs", ""),
    "logging_nan_inf_filter": dropped("is always off; on, it hides a loss that destroys the weights"),
    "use_cache": dropped_at((False,), "lets packed examples see each other", "delete the line"),
    "gradient_checkpointing": renamed("activation_checkpointing", "transformers 5.23"),
    "gradient_checkpointing_kwargs": renamed("activation_checkpointing_kwargs", "transformers 5.23"),
    "model_init_kwargs": undecided(
        "is not read; what loading a model takes has keys of its own",
        "use `dtype`, `attn_implementation`, `model_revision`, `trust_remote_code`",
    ),
    # Evaluation is the hooks'.
    **each("eval_do_concat_batches eval_use_gather_object eval_accumulation_steps batch_eval_metrics", _EVALUATION),
    **each("include_for_metrics prediction_loss_only bf16_full_eval fp16_full_eval", _EVALUATION),
    # The script decides what is run, and on what.
    **each("do_train do_eval do_predict", dropped("is not needed: the script trains, `eval_strategy` evaluates")),
    **each("fsdp fsdp_config deepspeed parallelism_config accelerator_config", _LAUNCH),
    "local_rank": dropped("comes from the launcher"),
    "auto_find_batch_size": dropped_at(
        (False,), "changes the effective batch in silence", "set `per_device_train_batch_size`"
    ),
    # A run resumes by itself, and exactly.
    "resume_from_checkpoint": dropped_at(
        (True, False, None), "is not needed: the same command resumes from the newest complete checkpoint", ""
    ),
    **each("ignore_data_skip restore_callback_states_from_checkpoint save_only_model", _RESUME),
    "enable_jit_checkpoint": dropped("is not needed: a preempted run writes a checkpoint and exits with 75"),
    # Logs.
    "disable_tqdm": dropped("is not needed: the progress line goes where there is a terminal"),
    "include_num_input_tokens_seen": dropped("is not needed: metrics.jsonl counts tokens"),
    "skip_memory_metrics": dropped("is not needed: metrics.jsonl has the memory"),
}
"""Keys that upstream has and a recipe has not; secrets (``hub_token``) are refused in ``secrets.py``."""
