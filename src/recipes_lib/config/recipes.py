"""Defaults, bounds, choices and refused keys: shared by all recipes first, then of each recipe.

Every key of upstream's configuration is either honoured or refused here; ``tests/config/test_recipes.py`` proves it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from recipes_lib.config.schema import (
    WEIGHTS,
    AdapterConfig,
    CriticConfig,
    DistillationConfig,
    EngineConfig,
    ForgettingConfig,
    LayersConfig,
    PPOConfig,
    PreferenceConfig,
    PretrainingConfig,
    QuantizationConfig,
    RewardsConfig,
    ScheduleConfig,
)
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
"""Defaults of every recipe that differ from upstream's: key -> (value, reason)."""

NOTES: Final[Mapping[str, str]] = {
    "activation_checkpointing": "`auto`: the fastest of none, `save_matmuls`, every second layer and every layer by "
    "which the run is planned to fit the GPU; none on a CPU.",
    "activation_checkpointing_kwargs": "`save_matmuls: true` recomputes everything but matrix products and attention.",
    "bf16": "Unset: on where the hardware multiplies bfloat16.",
    "dataloader_num_workers": "Unset: 2 on a GPU.",
    "hub_always_push": "Unset, a checkpoint that a newer one overtakes is not published.",
    "hub_model_id": "Unset: the name of `output_dir`, under the account of the token.",
    "hub_private_repo": "Only `false` asks for a public repository; one that is public is refused otherwise.",
    "hub_revision": "A branch.",
    "hub_strategy": "While training, each checkpoint is one commit with the tag `step-N`: see `docs/publishing.md`.",
    "output_dir": "The same command resumes from the newest complete checkpoint in it.",
    "push_to_hub": "In a background thread, which neither slows nor fails the training.",
    "torch_compile": "Layer by layer. Unset: on for pretraining on a GPU, and under fp8.",
    "use_liger_kernel": "Unset: on with a GPU where liger-kernel is installed; its cross-entropies stay off.",
    "use_cpu": "Unset: where there is no accelerator.",
    "vllm_importance_sampling_correction": "Here of every engine, `generate` included.",
}
"""Additions to upstream's help texts."""

BOUNDS: Final[Mapping[str, Mapping[str, float]]] = {
    key: bounds
    for bounds, keys in (
        (
            {"minimum": 0, "exclusiveMaximum": 1},
            "adam_beta1 adam_beta2 distillation_alpha lora_dropout unfinished_share",
        ),
        (
            {"exclusiveMinimum": 0},
            "adam_epsilon cliprange cliprange_value decay_steps delta device_hour_price discopop_tau "
            "distillation_temperature epsilon epsilon_high eval_steps kl_horizon kl_target_per_sequence "
            "logging_steps lora_alpha neftune_noise_alpha num_train_epochs repeat reward_timeout sampling_temperature "
            "save_steps target_kl temperature test_split_size vllm_importance_sampling_clip_max "
            "vllm_importance_sampling_clip_min weight",
        ),
        ({"minimum": 0, "maximum": 2**32 - 1}, "data_seed seed"),
        (
            {"minimum": 0},
            "beta center_rewards_coefficient critic_warmup_iterations dataloader_num_workers early_stopping_threshold "
            "eval_delay ewc_lambda kl_coef kl_to_base max_grad_norm max_rollbacks missing_eos_penalty "
            "num_sample_prompts router_aux_loss_coef simpo_gamma start_tokens vllm_server_timeout warmup_steps",
        ),
        (
            {"minimum": 1},
            "batch_ramp_tokens dataloader_prefetch_factor ddp_bucket_cap_mb ddp_timeout early_stopping_patience "
            "eval_tasks_limit eval_tasks_steps "
            "gradient_accumulation_steps lora_r loraplus_lr_ratio max_num_gen_batches max_tokens "
            "max_zero_std_rollouts "
            "num_iterations num_mini_batches num_ppo_epochs per_device_eval_batch_size "
            "per_device_train_batch_size response_length sample_max_new_tokens save_keep_steps "
            "save_total_limit steps_per_generation teacher_top_k torch_empty_cache_steps verify_steps "
            "warmup_tokens",
        ),
        (
            {"exclusiveMinimum": 0, "maximum": 1},
            "batch_ramp_start critic_learning_rate learning_rate projection_learning_rate vllm_gpu_memory_utilization",
        ),
        (
            {"minimum": 0, "maximum": 1},
            "distillation_beta gamma lam ld_alpha lmbda max_broken_fraction max_staleness max_truncated_fraction "
            "min_lr_ratio weight_decay",
        ),
        ({"minimum": 8}, "max_length"),
        ({"minimum": -1}, "max_steps"),
        ({"minimum": 0, "exclusiveMaximum": 0.5}, "label_smoothing"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, "replay_share"),
        ({"exclusiveMinimum": 1}, "dual_clip"),
        ({"minimum": 2}, "num_generations"),
        ({"minimum": 1, "maximum": 65535}, "vllm_group_port"),
    )
    for key in keys.split()
} | {key: {"minimum": 0} for key in WEIGHTS}
"""Range of each number, as JSON schema spells it; ``weight`` and ``repeat`` are those of a ``dataset_mixture`` entry,
``start_tokens`` that of a ``dataset_curriculum`` phase."""

CHOICES: Final[Mapping[str, tuple[str | bool, ...]]] = {
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
"""Keys that are a share below 1, and an integer count from 1."""

_FIXED_LENGTH = dropped("does nothing for packed rows", "delete the line; rows are packed to `max_length`")
_LAUNCH = undecided("is hardware, which is not in a recipe", "put it into the accelerate YAML (accelerate_configs/)")
_EVALUATION = dropped("belongs to upstream's evaluation loop; the hooks here keep sums only", "delete the line")
_RESUME = dropped_at((False, None), "would make a resumed run differ from an uninterrupted one", "delete the line")
_OTHER_LOSS = dropped_at((0, 0.0, None), "is another loss than the one here", "delete the line")
_PREPARED = dropped("belongs to upstream's data preparation; rows are prepared once, by `recipes prepare`")

REFUSED: Final[Mapping[str, Retired]] = {
    # The mask has one author.
    "assistant_only_loss": Retired(
        "is `loss_on` here",
        "write `loss_on: assistant`; it is the default for chats",
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
    "label_smoothing_factor": _OTHER_LOSS,
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
"""Upstream keys that recipes refuse; secrets (``hub_token``) are refused in ``secrets.py``."""

_FINE_TUNING: Final[Mapping[str, tuple[Any, str]]] = {
    "lr_scheduler_type": ("cosine", "the decay to zero that published fine-tunings use"),
    "warmup_steps": (0.03, "Adam's second moment is unreliable in the first steps"),
}
_ONE_EPOCH: Final = (1.0, "a second pass over the same pairs mostly memorises them")
_SAMPLED_AT_ONCE: Final = (32, "rows of what needs no gradient: answers that are sampled or scored")
_GROUPS: Final[Mapping[str, tuple[Any, str]]] = {
    "num_train_epochs": (1.0, "every prompt is asked once, for `num_generations` answers"),
    "per_device_eval_batch_size": _SAMPLED_AT_ONCE,
}

_RECIPE_DEFAULTS: Final[Mapping[str, Mapping[str, tuple[Any, str]]]] = {
    "sft": _FINE_TUNING,
    "lora": {
        **_FINE_TUNING,
        "learning_rate": (2e-4, "an adapter takes about ten times the rate of full fine-tuning"),
        "use_peft": (True, "this recipe trains an adapter"),
    },
    "reward": {
        **_FINE_TUNING,
        "center_rewards_coefficient": (0.01, "only differences of scores are learnt; this keeps their level near 0"),
        "learning_rate": (1e-5, "of full fine-tuning, as published reward models; an adapter takes 1e-4"),
        "num_train_epochs": _ONE_EPOCH,
    },
    "dpo": {
        **_FINE_TUNING,
        "num_train_epochs": _ONE_EPOCH,
        "precompute_ref_log_probs": (True, "the reference is read once, kept beside the data, and takes no memory"),
        "warmup_steps": (0.1, "what Zephyr and Tulu trained with"),
    },
    "ppo": {
        "learning_rate": (1e-6, "of all weights, as OpenRLHF and verl train; an adapter takes 1e-5"),
        "num_train_epochs": (1.0, "every prompt is answered once"),
        "per_device_eval_batch_size": _SAMPLED_AT_ONCE,
    },
    "distill": {
        **_FINE_TUNING,
        "learning_rate": (1e-5, "as fine-tuning; a student that is young or was cut out of its teacher takes 1e-4"),
    },
    "rloo": _GROUPS,
    "grpo": {
        **_GROUPS,
        "vllm_importance_sampling_clip_max": (2.0, "of a token, as Yao et al. 2025 and verl; TRL's 3 is of an answer"),
        "vllm_importance_sampling_mode": (
            "token_truncate",
            "the ratio of a whole answer spreads with its length: what rounds differently would mask long answers",
        ),
    },
    "pretrain": {
        "adam_beta2": (0.95, "what GPT-3, Llama, Mistral and Chinchilla trained with"),
        "learning_rate": (
            3e-4,
            "a rate of pretraining; published runs take 6e-4 at 124M to 6e-5 at 175B parameters",
        ),
        "lr_scheduler_type": ("cosine", "with `min_lr_ratio`: the decay to a tenth of the peak of published runs"),
        "num_train_epochs": (1.0, "a repeated token teaches less than a new one"),
        "warmup_steps": (0.01, "published runs warm up over 0.1 to 2 % of their steps"),
        "weight_decay": (0.1, "what GPT-3, Llama, Mistral and Chinchilla trained with"),
    },
}

_OF_PRETRAINING: Final = undecided("is a key of pretraining", "delete the line")
_OF_ADAPTERS: Final = Retired("is not a key of this recipe", "use the `lora` recipe", values={False: {}, None: {}})
_OF_PAIRS: Final = undecided("is a key of recipes on preference pairs", "use the `dpo` recipe, or delete the line")
_OF_PPO: Final = undecided("is a key of PPO", "use the `ppo` recipe, or delete the line")
_NO_MEMORY: Final = undecided("is a key of pretraining, fine-tuning and DPO", "delete the line")
_OF_FULL_TRAINING: Final = undecided("is a key of full fine-tuning", "delete the line: the base weights are frozen")
_OF_SFT: Final = undecided("is a key of fine-tuning", "delete the line")
_OF_TEACHERS: Final = undecided("is a key of distillation", "use the `distill` recipe, or delete the line")
_OF_SAMPLES: Final = dropped("has no effect: a reward model generates no text")
_LOSS: Final = dropped_at((None, "nll", "chunked_nll"), "is another loss than the one here", "delete the line")
_FULL_ROWS: Final = dropped("has no effect: documents are cut into full rows of `max_length`, and nothing is lost")
_WHOLE_PAIRS: Final = dropped("has no effect: every token of both answers counts, and pairs are always packed")
_FIXED_REFERENCE: Final = dropped_at((False, None), "moves the reference, which is fixed here", "delete the line")

_NO_ANSWERS: Final = dropped("has no effect: answers are sampled, and every token of them counts")
_FEW_PROMPTS: Final = undecided("is not a key of this recipe: prompts are few", "name one dataset by `dataset_name`")
_TASKS: Final = "eval_tasks eval_tasks_steps eval_tasks_limit eval_tasks_include_path"
_LATER: Final = undecided("is not read here", "delete the line, and score checkpoints by `recipes eval`")
_LAST_MODEL: Final = dropped("is not done here: the model after the last iteration is the result")
_NOT_HERE: Final = dropped("is not read by this recipe")
_NO_LOADER: Final = dropped("has no effect: which prompts an iteration takes follows from `seed` alone")
_NO_DDP: Final = dropped("has no effect: gradients are summed over the processes once an optimizer step")
_NO_CRITIC: Final = dropped("has no effect: there is no critic")
_TRUE_SAMPLES: Final = "would sample from another distribution than the one that log-probabilities are of"
_BY_GENERATE: Final = dropped("has no effect: answers are sampled by `generate`, continuous batching or vLLM")
_IN_URL: Final = undecided("is part of `vllm_server_base_url`", "write `vllm_server_base_url: http://HOST:PORT`")
_NO_ENTROPY: Final = undecided("is not done here: the loss has no entropy term", "delete the line")
_IN_SAMPLES: Final = dropped("is not needed: answers and their rewards are in samples.jsonl")


def _each_field(retired: Retired, *sections: type) -> dict[str, Retired]:
    return {field.name: retired for section in sections for field in dataclasses.fields(section)}


def _spelt(name: str, why: str) -> Retired:
    return Retired(f"is `{name}` here: {why}", f"write `{name}`", name)


_NO_PRETRAINING: Final[Mapping[str, Retired]] = {
    **_each_field(_OF_PRETRAINING, PretrainingConfig, ScheduleConfig),
    "min_lr_ratio": undecided(
        "is a key of pretraining",
        "write `lr_scheduler_type: cosine_with_min_lr` and `lr_scheduler_kwargs: {min_lr_rate: 0.1}`",
    ),
    "model_config": undecided("is a key of pretraining", "write `model_name_or_path`: fine-tuning needs a model"),
}
_NO_ADAPTERS: Final = _each_field(_OF_ADAPTERS, AdapterConfig, QuantizationConfig)
_NO_PAIRS: Final = {**_each_field(_OF_PAIRS, PreferenceConfig), "loss_type": _LOSS}
_NO_PPO: Final = _each_field(_OF_PPO, RewardsConfig, CriticConfig, EngineConfig, PPOConfig)
_NO_FORGETTING: Final = _each_field(_NO_MEMORY, ForgettingConfig)
_NO_EWC: Final = each("ewc_lambda ewc_fisher ewc_reference", _OF_FULL_TRAINING)
_NO_DISTILLATION: Final = _each_field(_OF_TEACHERS, DistillationConfig, LayersConfig)
_ONLY_PAIRS: Final[Mapping[str, Retired]] = {
    **_NO_PRETRAINING,
    **_NO_PPO,
    **_NO_DISTILLATION,
    **each("packing loss_on assistant_only_loss completion_only_loss", _WHOLE_PAIRS),
    "activation_offloading": dropped_at((False, None), "is not done here", "write `activation_checkpointing: true`"),
    "dataset_streaming": undecided("is not supported: pairs are prepared once", "delete the line"),
    "neftune_noise_alpha": undecided("is a key of fine-tuning", "delete the line"),
}
_PROMPTS_ONLY: Final[Mapping[str, Retired]] = {
    **_NO_PRETRAINING,
    **_NO_FORGETTING,
    **_NO_DISTILLATION,
    **_each_field(_OF_PAIRS, PreferenceConfig),
    **each("packing loss_on assistant_only_loss completion_only_loss max_truncated_fraction", _NO_ANSWERS),
    **each("prepared_dir dataset_streaming dataset_mixture", _FEW_PROMPTS),
    "eval_datasets": undecided("has no loss to measure here: answers are sampled and scored", "delete the line"),
    "metrics": dropped("has no effect: samples are scored by the rewards"),
    "sample_max_new_tokens": dropped("has no effect: samples are as long as any answer", "set `response_length`"),
    "sample_prompts": dropped("has no effect: the first prompts are answered, held-out ones where there are any"),
    "train_sampling_strategy": _NO_LOADER,
    **each("neftune_noise_alpha max_rollbacks verify_steps", _NOT_HERE),
    "vllm_tensor_parallel_size": dropped_at(
        (1,),
        "is 1 here: each process has an engine of its own",
        "write `vllm_mode: server`, and give it to `vllm serve` as `--tensor-parallel-size` (docs/ppo.md)",
    ),
    "vllm_max_model_length": dropped("is not needed: it is that of the longest prompt with its longest answer"),
    "vllm_model_impl": dropped_at(("auto",), "is chosen by vLLM", "delete the line"),
    "vllm_structured_outputs_regex": dropped_at((None,), _TRUE_SAMPLES, "delete the line"),
    **each("vllm_server_host vllm_server_port", _IN_URL),
    **each("load_best_model_at_end metric_for_best_model greater_is_better eval_delay", _LAST_MODEL),
    **each("early_stopping_patience early_stopping_threshold", _LAST_MODEL),
    **each(_TASKS, _LATER),
    **each("logging_first_step full_determinism torch_empty_cache_steps debug save_on_each_node", _NOT_HERE),
    **each("log_level log_level_replica log_on_each_node optim_target_modules", _NOT_HERE),
    **each("torch_compile torch_compile_backend torch_compile_mode", _NOT_HERE),
    **each("use_liger_kernel liger_kernel_config", _NOT_HERE),
    **each("dataloader_drop_last dataloader_num_workers dataloader_pin_memory", _NO_LOADER),
    **each("dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order", _NO_LOADER),
    "dataloader_multiprocessing_context": _NO_LOADER,
    **each("ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph", _NO_DDP),
    "fp16": dropped_at((False, None), "is not done here: it would need a loss scaler", "write `bf16: true`"),
}
_SAMPLED_IN_GROUPS: Final[Mapping[str, Retired]] = {
    **_PROMPTS_ONLY,
    **_each_field(_OF_PPO, PPOConfig),
    **_each_field(_NO_CRITIC, CriticConfig),
    "max_completion_length": Retired(
        "is `response_length` here, as in PPO", "write `response_length`", "response_length"
    ),
    "disable_dropout": dropped_at((True,), "is off: dropout would make ratios of two passes differ", "delete the line"),
    "num_generations_eval": dropped("has no effect: samples are one answer to each prompt"),
    "generation_batch_size": undecided("is counted in steps here", "write `steps_per_generation`"),
    "top_p": dropped_at((1, 1.0), _TRUE_SAMPLES, "delete the line"),
    "top_k": dropped_at((0,), _TRUE_SAMPLES, "delete the line"),
    "min_p": dropped_at((None,), _TRUE_SAMPLES, "delete the line"),
    "repetition_penalty": dropped_at((1, 1.0), _TRUE_SAMPLES, "delete the line"),
    "generation_kwargs": dropped_at((None,), _TRUE_SAMPLES, "delete the line"),
    "chat_template_kwargs": undecided("is a column of the rows here", "write it into the rows"),
    **each("cache_implementation use_transformers_paged", _BY_GENERATE),
    "ds3_gather_for_generation": dropped("is not needed: weights are not sharded in this recipe"),
    **each("log_completions log_multimodal num_completions_to_print log_unique_prompts", _IN_SAMPLES),
    "sync_ref_model": _FIXED_REFERENCE,
    **each("ref_model_mixup_alpha ref_model_sync_steps", dropped("moves the reference, which is fixed here")),
}

_LEFT_OUT: Final[Mapping[str, Mapping[str, Retired]]] = {
    "sft": {**_NO_PRETRAINING, **_NO_ADAPTERS, **_NO_PAIRS, **_NO_PPO, **_NO_DISTILLATION},
    "lora": {**_NO_PRETRAINING, **_NO_PAIRS, **_NO_PPO, **_NO_DISTILLATION, **_NO_EWC},
    "pretrain": {
        "kl_to_base": _OF_SFT,
        **_NO_ADAPTERS,
        **_NO_PAIRS,
        **_NO_PPO,
        **_NO_DISTILLATION,
        **each("packing overlong max_truncated_fraction packing_strategy truncation_mode", _FULL_ROWS),
        **each("loss_on assistant_only_loss completion_only_loss", dropped("has no effect: every token is trained on")),
        "lr_scheduler_kwargs": undecided(
            "is not read; each of them is a key of its own", "use `min_lr_ratio`, `decay_steps`, `decay_type`"
        ),
        "neftune_noise_alpha": undecided("is a key of fine-tuning", "delete the line"),
        "train_sampling_strategy": dropped("has no effect: the order of rows follows from `seed` alone"),
    },
    "reward": {
        **_ONLY_PAIRS,
        **_NO_FORGETTING,
        **each(f"num_sample_prompts sample_prompts sample_max_new_tokens metrics {_TASKS}", _OF_SAMPLES),
        **each(
            "ref_model_name_or_path ref_model_revision simpo_gamma loss_type",
            undecided("is a key of DPO", "delete the line"),
        ),
    },
    "dpo": {
        **_ONLY_PAIRS,
        "kl_to_base": undecided("is not needed: the loss holds the policy to its reference", "raise `beta`"),
        "sync_ref_model": _FIXED_REFERENCE,
        "unfinished_share": undecided("is a key of reward models", "delete the line"),
        **each("ref_model_mixup_alpha ref_model_sync_steps", dropped("moves the reference, which is fixed here")),
        "precompute_ref_batch_size": renamed("per_device_eval_batch_size", "one number for what needs no gradient"),
    },
    "ppo": {
        **_PROMPTS_ONLY,
        "loss_type": _LOSS,
        "max_num_gen_batches": undecided("is a key of groups of answers", "use the `rloo` or the `grpo` recipe"),
    },
    "distill": {
        **_NO_PRETRAINING,
        **_NO_FORGETTING,
        **_NO_ADAPTERS,
        **_NO_PAIRS,
        **{name: retired for name, retired in _NO_PPO.items() if name != "response_length"},
        "beta": _spelt("distillation_beta", "it says which divergence, and is no coefficient"),
        "temperature": undecided(
            "is two keys here: `distillation_temperature` of the loss, `sampling_temperature` of answers",
            "write one of them, or both",
        ),
        "max_completion_length": _spelt("response_length", "as in PPO"),
    },
    "rloo": {
        **_SAMPLED_IN_GROUPS,
        "loss_type": _LOSS,
        "reward_clip_range": dropped_at(
            (None,), "is not done here: a reward model's scores are cut off at ±10", "clip in your own function"
        ),
    },
    "grpo": {
        **_SAMPLED_IN_GROUPS,
        "vllm_importance_sampling_cap": renamed("vllm_importance_sampling_clip_max", "TRL 1.6"),
        "cast_lm_head_to_fp32": dropped("is not needed: the loss is computed in float32"),
        **each("entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target", _NO_ENTROPY),
        **each("top_entropy_quantile use_adaptive_entropy", _NO_ENTROPY),
        "router_aux_loss_coef": undecided("is not done here", "delete the line"),
        "log_completions_hub_repo": _IN_SAMPLES,
        "max_tool_calling_iterations": dropped_at((None,), "is not done here: answers are one turn", "delete the line"),
        "multi_objective_aggregation": dropped_at(
            ("sum_then_normalize",), "is not done here: rewards are summed by `reward_weights`", "delete the line"
        ),
    },
}

PREFERENCE_LOSSES: Final = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm", "simpo", "orpo"),
)
"""Values of DPO's ``loss_type``."""

_LOOP_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "eval_strategy": ("no", "steps"),
    "logging_strategy": ("steps",),
    "lr_scheduler_type": ("linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr"),
    "optim": ("adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit", "adafactor"),
    "save_strategy": ("no", "steps"),
}
"""Choices of PPO, RLOO and GRPO, whose RL loop builds optimizer and schedule."""
_RECIPE_CHOICES: Final[Mapping[str, Mapping[str, tuple[str | bool, ...]]]] = {
    "pretrain": {"lr_scheduler_type": ("constant", "linear", "cosine", "warmup_stable_decay", "inverse_sqrt")},
    "dpo": {"loss_type": PREFERENCE_LOSSES},
    "grpo": {
        "importance_sampling_level": ("token", "sequence"),
        "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
        "scale_rewards": ("group", "batch", "none", True, False),
        "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        **_LOOP_CHOICES,
    },
    "ppo": _LOOP_CHOICES,
    "rloo": _LOOP_CHOICES,
}

ADDED_CHOICES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "pretrain": {"optim": ("muon", "adamw_bf16_stochastic")},
}
"""Recipe -> additional values of upstream keys."""
ADDED_TEXTS: Final[Mapping[str, tuple[str, ...]]] = {"activation_checkpointing": ("auto",)}
"""Text values of upstream's booleans, in every recipe."""


def read_defaults(recipe: str) -> Mapping[str, tuple[Any, str]]:
    """Return the defaults of a recipe that differ from upstream's: key -> (value, reason)."""
    return {**DEFAULTS, **_RECIPE_DEFAULTS[recipe]}


def read_refused(recipe: str) -> Mapping[str, Retired]:
    """Return the keys of upstream or other recipes that this recipe refuses, with their messages."""
    return {**REFUSED, **_LEFT_OUT[recipe]}


def read_choices(recipe: str) -> Mapping[str, tuple[str | bool, ...]]:
    """Return the values honoured where upstream allows more."""
    return {**CHOICES, **_RECIPE_CHOICES.get(recipe, {})}
