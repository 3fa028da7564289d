"""Differences between recipes: their defaults, the keys that they leave out and why, and the values they allow.

What all recipes share is in ``defaults.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from recipes_lib.config.defaults import CHOICES, DEFAULTS, REFUSED
from recipes_lib.config.schema import (
    AdapterConfig,
    DistillationConfig,
    EngineConfig,
    LayersConfig,
    PPOConfig,
    PreferenceConfig,
    PretrainingConfig,
    QuantizationConfig,
    RewardsConfig,
    ScheduleConfig,
)
from recipes_lib.config.table import Retired, dropped, dropped_at, each, renamed, undecided

_FINE_TUNING: Final[Mapping[str, tuple[Any, str]]] = {
    "lr_scheduler_type": ("cosine", "the decay to zero that published fine-tunings use"),
    "warmup_steps": (0.03, "Adam's second moment is unreliable in the first steps"),
}
_ONE_EPOCH: Final = (1.0, "a second pass over the same pairs mostly memorises them")
_GROUPS: Final[Mapping[str, tuple[Any, str]]] = {
    "disable_dropout": (True, "log-probabilities of two passes are compared"),
    "num_train_epochs": (1.0, "every prompt is asked once, for `num_generations` answers"),
    "per_device_eval_batch_size": (32, "prompts that are answered at once in an evaluation"),
}

_STAGE_DEFAULTS: Final[Mapping[str, Mapping[str, tuple[Any, str]]]] = {
    "sft": _FINE_TUNING,
    "lora": {
        **_FINE_TUNING,
        "learning_rate": (2e-4, "an adapter takes about ten times the rate of full fine-tuning"),
        "use_peft": (True, "this stage trains an adapter"),
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
        "per_device_eval_batch_size": (32, "rows of what needs no gradient: answers that are sampled or scored"),
    },
    "distill": {
        **_FINE_TUNING,
        "learning_rate": (1e-5, "as fine-tuning; a student that is young or was cut out of its teacher takes 1e-4"),
    },
    "rloo": _GROUPS,
    "grpo": _GROUPS,
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
_OF_ADAPTERS: Final = Retired("is not a key of this stage", "use the `lora` recipe", values={False: {}, None: {}})
_OF_PAIRS: Final = undecided("is a key of the stages that learn from pairs", "use the `dpo` recipe, or delete the line")
_OF_PPO: Final = undecided("is a key of PPO", "use the `ppo` recipe, or delete the line")
_OF_TEACHERS: Final = undecided("is a key of distillation", "use the `distill` recipe, or delete the line")
_OF_SAMPLES: Final = dropped("has no effect: a reward model writes no answers")
_LOSS: Final = dropped_at((None, "nll", "chunked_nll"), "is another loss than the one here", "delete the line")
_FULL_ROWS: Final = dropped("has no effect: documents are cut into full rows of `max_length`, and nothing is lost")
_WHOLE_PAIRS: Final = dropped("has no effect: every token of both answers counts, and pairs share rows by themselves")
_FIXED_REFERENCE: Final = dropped_at((False, None), "moves the reference, which is fixed here", "delete the line")

_NO_ANSWERS: Final = dropped("has no effect: answers are sampled, and every token of them counts")
_FEW_PROMPTS: Final = undecided("is not a key of this stage: prompts are few", "name one dataset by `dataset_name`")
_LAST_MODEL: Final = dropped("is not done here: the model after the last iteration is the result")
_NOT_HERE: Final = dropped("is not read by this stage")
_NO_LOADER: Final = dropped("has no effect: which prompts an iteration takes follows from `seed` alone")
_NO_DDP: Final = dropped("has no effect: gradients are summed over the processes once an optimizer step")
_NO_CRITIC: Final = dropped("has no effect: there is no critic")
_TRUE_SAMPLES: Final = "would sample from another distribution than the one that log-probabilities are of"
_BY_GENERATE: Final = dropped("is not wired in this stage: answers are sampled by `generate`")
_IN_SAMPLES: Final = dropped("is not needed: answers and their rewards are in samples.jsonl")
_VLLM: Final = (
    "use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url "
    "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization "
    "vllm_max_model_length vllm_tensor_parallel_size"
)
_VLLM_WEIGHTS: Final = (
    "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_cap "
    "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min"
)


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
_NO_PPO: Final = _each_field(_OF_PPO, RewardsConfig, EngineConfig, PPOConfig)
_NO_DISTILLATION: Final = _each_field(_OF_TEACHERS, DistillationConfig, LayersConfig)
_ONLY_PAIRS: Final[Mapping[str, Retired]] = {
    **_NO_PRETRAINING,
    **_NO_PPO,
    **_NO_DISTILLATION,
    **each("packing loss_on assistant_only_loss completion_only_loss", _WHOLE_PAIRS),
    "activation_offloading": dropped_at((False, None), "is not done here", "write `activation_checkpointing: true`"),
    "dataset_streaming": undecided("cannot be: pairs are prepared once", "delete the line"),
    "neftune_noise_alpha": undecided("is a key of fine-tuning", "delete the line"),
}
_PROMPTS_ONLY: Final[Mapping[str, Retired]] = {
    **_NO_PRETRAINING,
    **_NO_DISTILLATION,
    **_each_field(_OF_PAIRS, PreferenceConfig),
    **each("packing loss_on assistant_only_loss completion_only_loss max_truncated_fraction", _NO_ANSWERS),
    **each("prepared_dir dataset_streaming dataset_mixture", _FEW_PROMPTS),
    "metrics": dropped("has no effect: samples are scored by the rewards"),
    "sample_max_new_tokens": dropped("has no effect: samples are as long as any answer", "set `response_length`"),
    "sample_prompts": dropped("has no effect: the first prompts are answered, held-out ones where there are any"),
    "train_sampling_strategy": _NO_LOADER,
    **each("neftune_noise_alpha max_rollbacks verify_steps", _NOT_HERE),
}
_SAMPLED_IN_GROUPS: Final[Mapping[str, Retired]] = {
    **_PROMPTS_ONLY,
    **_each_field(_OF_PPO, PPOConfig),
    **each("critic_model_name_or_path critic_learning_rate critic_warmup_iterations save_critic", _NO_CRITIC),
    "max_completion_length": Retired(
        "is `response_length` here, as in PPO", "write `response_length`", "response_length"
    ),
    "num_generations_eval": dropped("has no effect: samples are one answer to each prompt"),
    "generation_batch_size": undecided("is counted in steps here", "write `steps_per_generation`"),
    "top_p": dropped_at((1, 1.0), _TRUE_SAMPLES, "delete the line"),
    "top_k": dropped_at((0,), _TRUE_SAMPLES, "delete the line"),
    "min_p": dropped_at((None,), _TRUE_SAMPLES, "delete the line"),
    "repetition_penalty": dropped_at((1, 1.0), _TRUE_SAMPLES, "delete the line"),
    "generation_kwargs": dropped_at((None,), _TRUE_SAMPLES, "delete the line"),
    "chat_template_kwargs": undecided("is a column of the rows here", "write it into the rows"),
    **each("cache_implementation use_transformers_paged use_transformers_continuous_batching", _BY_GENERATE),
    **each("transformers_continuous_batching_config", _BY_GENERATE),
    **each(_VLLM, _BY_GENERATE),
    "ds3_gather_for_generation": dropped("is not needed: weights are not sharded in this stage"),
    **each("log_completions log_multimodal num_completions_to_print log_unique_prompts", _IN_SAMPLES),
    "sync_ref_model": _FIXED_REFERENCE,
    **each("ref_model_mixup_alpha ref_model_sync_steps", dropped("moves the reference, which is fixed here")),
}

_LEFT_OUT: Final[Mapping[str, Mapping[str, Retired]]] = {
    "sft": {**_NO_PRETRAINING, **_NO_ADAPTERS, **_NO_PAIRS, **_NO_PPO, **_NO_DISTILLATION},
    "lora": {**_NO_PRETRAINING, **_NO_PAIRS, **_NO_PPO, **_NO_DISTILLATION},
    "pretrain": {
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
        **each("num_sample_prompts sample_prompts sample_max_new_tokens metrics", _OF_SAMPLES),
        **each(
            "ref_model_name_or_path ref_model_revision simpo_gamma loss_type",
            undecided("is a key of DPO", "delete the line"),
        ),
    },
    "dpo": {
        **_ONLY_PAIRS,
        "sync_ref_model": _FIXED_REFERENCE,
        "unfinished_share": undecided("is a key of reward models", "delete the line"),
        **each("ref_model_mixup_alpha ref_model_sync_steps", dropped("moves the reference, which is fixed here")),
        "precompute_ref_batch_size": renamed("per_device_eval_batch_size", "one number for what needs no gradient"),
    },
    "ppo": {
        **_PROMPTS_ONLY,
        "loss_type": _LOSS,
        **each("load_best_model_at_end metric_for_best_model greater_is_better eval_delay", _LAST_MODEL),
        **each("logging_first_step full_determinism torch_empty_cache_steps debug save_on_each_node", _NOT_HERE),
        **each("log_level log_level_replica log_on_each_node optim_target_modules", _NOT_HERE),
        **each("torch_compile torch_compile_backend torch_compile_mode", _NOT_HERE),
        **each("dataloader_drop_last dataloader_num_workers dataloader_pin_memory", _NO_LOADER),
        **each("dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order", _NO_LOADER),
        "dataloader_multiprocessing_context": _NO_LOADER,
        **each("ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph", _NO_DDP),
        "fp16": dropped_at((False, None), "is not done here: it would need a loss scaler", "write `bf16: true`"),
    },
    "distill": {
        **_NO_PRETRAINING,
        **_NO_ADAPTERS,
        **_NO_PAIRS,
        **{name: retired for name, retired in _NO_PPO.items() if name != "response_length"},
        "beta": _spelt("distillation_beta", "it says which divergence, and no price"),
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
            (None,), "is not done here: a reward model's scores are cut off at ±10", "let a function of yours clip"
        ),
    },
    "grpo": {
        **_SAMPLED_IN_GROUPS,
        **each(_VLLM_WEIGHTS, _BY_GENERATE),
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
"""Values of ``loss_type`` of DPO."""

_STAGE_CHOICES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "pretrain": {"lr_scheduler_type": ("constant", "linear", "cosine", "warmup_stable_decay", "inverse_sqrt")},
    "dpo": {"loss_type": PREFERENCE_LOSSES},
    "grpo": {
        "importance_sampling_level": ("token", "sequence"),
        "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
        "scale_rewards": ("group", "batch", "none"),
    },
    "ppo": {
        "eval_strategy": ("no", "steps"),
        "logging_strategy": ("steps",),
        "lr_scheduler_type": ("linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr"),
        "optim": ("adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit", "adafactor"),
        "save_strategy": ("no", "steps"),
    },
}

ADDED_CHOICES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "pretrain": {"optim": ("muon", "adamw_bf16_stochastic")},
}
"""Stage -> values of an upstream key that upstream has not."""


def read_defaults(stage: str) -> Mapping[str, tuple[Any, str]]:
    """Return the effective defaults of a stage that are not upstream's: key -> (value, reason)."""
    return {**DEFAULTS, **_STAGE_DEFAULTS[stage]}


def read_refused(stage: str) -> Mapping[str, Retired]:
    """Return the keys that upstream or another stage has and this one has not, each with what to say about it."""
    return {**REFUSED, **_LEFT_OUT[stage]}


def read_choices(stage: str) -> Mapping[str, tuple[str, ...]]:
    """Return the values honoured where upstream allows more."""
    return {**CHOICES, **_STAGE_CHOICES.get(stage, {})}
