"""Rules between keys of a recipe: compatible and incompatible combinations, with line and remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipes_lib.config import rules
from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import WEIGHTS
from recipes_lib.config.table import RECIPE_NAMES, load_table, read_lists
from recipes_lib.errors import ConfigError

COMMIT = "a" * 40
PINNED = f"trust_remote_code: true\nmodel_revision: {COMMIT}"
STREAM = "dataset_streaming: true\nmax_steps: 9\nwarmup_steps: 0\nmax_length: 64"
AHEAD = "use_vllm: true\nvllm_mode: server\nmax_staleness: 1"
INCOMPATIBLE: dict[str, list[tuple[str, int, str]]] = {
    "sft": [
        ("early_stopping_patience: 2\neval_strategy: no", 5, "no effect: `eval_strategy` is"),
        ("greater_is_better: true", 5, "no effect: `metric_for_best_model`, `load_best_model_at_end` are null"),
        ("early_stopping_threshold: 0.1", 5, "no effect: `early_stopping_patience` is null"),
        ("adam_beta2: 0.95\noptim: sgd", 5, "`adam_beta2` has no effect: `optim` does not take it"),
        ("optim_target_modules: all-linear", 5, "`optim_target_modules` has no effect: `optim` is"),
        ("optim: lion_8bit\nadam_epsilon: 1.0e-6", 6, "`adam_epsilon` has no effect"),
        ("activation_checkpointing_kwargs: {save_matmuls: true}", 5, "no effect: `activation_checkpointing` is false"),
        (
            "early_stopping_patience: 2",
            5,
            "has no effect: `dataset_test_split`, `test_split_size`, `eval_datasets` are",
        ),
        ("load_best_model_at_end: true", 5, "no effect: `dataset_test_split`, `test_split_size`, `eval_datasets` are"),
        *(
            (f"{keys}{more}", 5, "follows the held-out loss, and there is none")
            for keys in ("save_strategy: best", "lr_scheduler_type: reduce_lr_on_plateau", "lr_scheduler_type: greedy")
            for more in ("", "\neval_strategy: no\ntest_split_size: 9")
        ),
        ("load_best_model_at_end: true\neval_strategy: no\ntest_split_size: 9", 5, "a checkpoint at every evaluation"),
        ("dataloader_multiprocessing_context: fork", 5, "has no effect: `dataloader_num_workers` is 0"),
        ("dataloader_num_workers: 2\ndataloader_in_order: false", 6, "others in every run, and after a resumption"),
        ("eval_datasets: {a b: x}", 5, "part of metric names"),
        ("eval_datasets: {a: {name: x, weight: 2}}", 5, "`weight` is not a key of an entry of `eval_datasets.a`"),
        ("eval_datasets:\n  a: x\n  b:\n    split: test", 8, "`eval_datasets.b` has no `name`"),
        ("eval_datasets: {a: ./gone}", 5, "`eval_datasets.a` does not exist: './gone'"),
        ("dataset_mixture: [{name: a/b}]", 5, "recipe.yaml:2) are both set"),
        ("dataset_test_split: test\ntest_split_size: 10", 6, "recipe.yaml:5"),
        ("fp16: true\nbf16: true", 6, "fp16"),
        ("system_prompt: ''", 5, "`system_prompt` is empty"),
        ("system_prompt: ' '", 5, "`system_prompt` is empty"),
        ("dataset_streaming: true\nmax_length: 64", 5, "max_steps"),
        (f"{STREAM}\ntest_split_size: 0.1", 9, "held out of a stream"),
        ("overlong: truncate", 5, "max_length"),
        ("max_length: null\noverlong: drop", 6, "max_length"),
        ("trust_remote_code: true", 5, "trust_remote_code"),
        (f"{PINNED}\ntokenizer_name_or_path: org/tokens", 5, "repository org/tokens"),
        (f"{PINNED}\ntokenizer_revision: main", 5, "`tokenizer_revision:` as a commit"),
        ("trust_remote_code: true\nmodel_revision: main", 5, "trust_remote_code"),
        ("fp16: true\ndtype: float16", 5, "dtype"),
        ("eval_strategy: epoch\neval_steps: 10", 6, "eval_strategy"),
        ("eval_strategy: no\neval_steps: 10", 6, "eval_strategy"),
        ("save_strategy: epoch\nsave_steps: 10", 6, "save_strategy"),
        ("eval_strategy: no\neval_on_start: true", 6, "eval_strategy"),
        ("max_steps: 10\nnum_train_epochs: 2", 6, "max_steps"),
        ("max_broken_fraction: 0.1", 5, 'no effect: `broken_rows` is "error"'),
        ("max_steps: 0", 5, "max_steps"),
        ("max_steps: 10\nwarmup_steps: 10", 6, "warm-up"),
        ("warmup_steps: 1.0", 5, "neither a share nor a count"),
        ("logging_steps: 2.5", 5, "neither a share nor a count"),
        ("lr_scheduler_type: warmup_stable_decay", 5, "num_decay_steps"),
        ("lr_scheduler_type: cosine_with_min_lr", 5, "min_lr"),
        ("metrics: [accuracy]", 5, "import path"),
        ("metric_for_best_model: eval_lss\ntest_split_size: 9", 5, "no metric `lss`"),
        ("metric_for_best_model: rewards/accuracies\ntest_split_size: 9", 5, "no metric `rewards/accuracies`"),
        ("metric_for_best_model: val_loss\ntest_split_size: 9", 5, "no metric `val_loss`"),
        ("metric_for_best_model: loss\nsample_prompts: [hi]", 5, "no metric `loss`"),
        ("num_sample_prompts: 0\nsample_prompts: [hi]", 6, "num_sample_prompts"),
        ("load_best_model_at_end: true\nsave_strategy: epoch\ntest_split_size: 9", 5, "checkpoint at every evaluation"),
        ("load_best_model_at_end: true\nsave_steps: 30\neval_steps: 20\ntest_split_size: 9", 5, "multiple"),
        ("load_best_model_at_end: true\nsave_steps: 30\ntest_split_size: 9", 5, "multiple"),
        ("dataloader_prefetch_factor: 2", 5, "workers"),
        ("max_rollbacks: 2\nsave_strategy: no", 5, "no effect: `save_strategy` is"),
        (f"max_rollbacks: 2\n{STREAM}", 5, "dataset_streaming"),
        ("max_steps: 9\nwarmup_steps: 0\ndataset_streaming: true\nmax_length: x", 8, "`max_length` is 'x'"),
        (f"{STREAM}\nsave_strategy: epoch", 9, "the length of an epoch is unknown for a stream"),
        ("save_keep_steps: 100", 5, "is not a multiple of"),
        ("save_keep_steps: 100\nsave_steps: 30", 5, "is not a multiple of"),
        ("save_keep_steps: 100\nsave_strategy: no", 5, "no effect: `save_strategy` is"),
        ("replay_dataset: me/old\nreplay_from: .", 6, "one source of replayed rows"),
        ("replay_share: 0.1", 5, "has no effect"),
        ("hub_always_push: true\nhub_strategy: every_save", 5, "has no effect: `push_to_hub` is false"),
        ("hub_always_push: true\npush_to_hub: true", 5, "has no effect: `hub_strategy` is"),
        ("replay_dataset: me/old\nreplay_share: 1.0", 6, "below 1"),
        ("replay_from: ./nowhere", 5, "does not exist"),
        (f"{STREAM}\nreplay_dataset: me/old", 9, "the share of replay, is unknown"),
        ("ewc_fisher: identity", 5, "has no effect"),
        ("ewc_lambda: -1", 5, "at least 0"),
        ("ewc_lambda: 1\nverify_steps: 5", 5, "does not include the penalty"),
        ("feature_weight: 1.0", 5, "`distill` recipe"),
    ],
    "lora": [
        ("use_peft: false", 5, "`use_peft` is false"),
        ("load_in_4bit: true\nload_in_8bit: true", 5, "are both set"),
        ("adapter_name_or_path: owner/adapter\nlora_r: 8", 6, "`lora_r` has no effect"),
        ("adapter_name_or_path: owner/adapter\nlora_alpha: 64", 6, "`lora_alpha` has no effect"),
        ("adapter_name_or_path: owner/adapter\nuse_rslora: true", 6, "`use_rslora` has no effect"),
        ("bnb_4bit_quant_type: fp4", 5, "`bnb_4bit_quant_type` has no effect: `load_in_4bit` is false"),
        ("load_in_8bit: true\nuse_bnb_nested_quant: false", 6, "has no effect: `load_in_4bit` is false"),
        ("ewc_lambda: 1", 5, "full fine-tuning"),
        ("kl_to_base: 0.1\nlora_modules_to_save: [lm_head]", 5, "must be the base's"),
        ("kl_to_base: 0.1\nadapter_name_or_path: me/adapter", 5, "not the initial model"),
        ("kl_to_base: 0.1\ninit_lora_weights: pissa", 6, "changes the base"),
        *(
            (f"{key}: true\ninit_lora_weights: {init}", 6, f"{init}` needs unquantised weights, and `{key}` is true")
            for key in ("load_in_4bit", "load_in_8bit")
            for init in ("pissa", "olora", "orthogonal")
        ),
        ("lora_target_modules: []", 5, "no layer would have an adapter"),
        ("lora_target_modules: [q_proj, v_proj]\nlora_modules_to_save: [q_proj]", 6, "trained in full and adapted"),
    ],
    "dpo": [
        ("loss_type: [sigmoid, sft]\neval_datasets: {a: x/y}", 6, "a mean over the tokens of one held-out set"),
        ("f_alpha_divergence_coef: 0.3", 5, "`f_alpha_divergence_coef` has no effect: `f_divergence_type` is"),
        ("lora_r: 8", 5, "`lora_r` has no effect: `use_peft` is false"),
        ("use_peft: true\nlora_dropout: 0.1", 6, "adds noise"),
        ("loss_type: [sigmoid, sft]\nloss_weights: [1.0]", 6, "1 numbers for 2 losses"),
        ("metric_for_best_model: perplexity\ntest_split_size: 9", 5, "no metric `perplexity`"),
        ("simpo_gamma: 1.0", 5, "`simpo_gamma` has no effect: `loss_type` is"),
        ("loss_type: sigmoid\nlabel_smoothing: 0.1", 6, "`label_smoothing` has no effect: `loss_type` is"),
        ("loss_type: exo_pair", 5, "needs `label_smoothing`"),
        ("loss_type: robust\nlabel_smoothing: 0.5", 6, "below 0.5"),
        ("loss_type: []", 5, "there is no loss"),
        ("loss_weights: [0.0]", 5, "there is no loss"),
        ("f_divergence_type: kl", 5, "'kl'"),
        ("loss_type: [sigmoid, apo_zero]\nf_divergence_type: forward_kl", 6, "is not defined for apo_zero"),
        ("loss_type: [sigmoid, aot]\nuse_weighting: true", 6, "take apart"),
        ("loss_type: orpo\nref_model_name_or_path: a/b", 6, 'no effect: `loss_type` is ["orpo"]'),
        ("ref_model_revision: v2", 5, "no effect: `ref_model_name_or_path` is null"),
        ("loss_type: sigmiod", 5, "`loss_type` is 'sigmiod'"),
        ("beta: 0", 5, "makes the loss constant"),
        ("ewc_lambda: 1\nuse_peft: true", 5, "do not change"),
        ("kl_to_base: 1", 5, "raise `beta`"),
    ],
    "reward": [
        ("load_in_4bit: true", 5, "`load_in_4bit` has no effect: `use_peft` is false"),
        ("max_length: 64\noverlong: truncate", 6, "truncate prompts or answers"),
        ("replay_dataset: me/old", 5, "pretraining, fine-tuning and DPO"),
    ],
    "pretrain": [
        ("model_config: {model_type: llama}\ntokenizer_name_or_path: a/b", 5, "are both set"),
        ("dtype: bfloat16\noptim: adamw_torch_4bit", 5, "below 1/512, are rounded to 0"),
        ("dtype: float16\noptim: adamw_torch_4bit\noptim_args: bf16_stochastic_round=True", 5, "are rounded to 0"),
        ("max_tokens: 1000\nmax_steps: 5", 6, "`max_steps` has no effect"),
        ("max_tokens: 1000\nnum_train_epochs: 2", 6, "`num_train_epochs` has no effect"),
        ("warmup_tokens: 10\nwarmup_steps: 5", 6, "`warmup_steps` has no effect"),
        ("warmup_tokens: 1000\nmax_tokens: 1000", 5, "as long as the run"),
        ("decay_steps: 5", 5, "`decay_steps` has no effect"),
        ("batch_ramp_start: 0.5", 5, "no effect: `batch_ramp_tokens` is null"),
        ("dtype: bfloat16", 5, "rounded to 0"),
        ("optim: adamw_bf16_stochastic", 5, "needs bfloat16 weights"),
        ("dataset_curriculum: [{start_tokens: 0, weights: [1]}]", 5, "needs a mixture"),
        ("dataset_streaming: true", 5, "needs `max_steps`"),
        ("lr_scheduler_type: warmup_stable_decay\ndecay_type: exponential\nmin_lr_ratio: 0", 7, "from its first step"),
    ],
    "ppo": [
        ("reward_weights: [1, 2]", 5, "2 numbers for 1 rewards"),
        ("reward_weights: [0.0]", 5, "are all 0"),
        ("kl_coef: 0\nkl_target_per_sequence: 6", 6, "no effect: `kl_coef` is 0"),
        ("reward_model_revision: main", 5, "no effect: `reward_model_name_or_path` is null"),
        ("response_length: 64\nmax_length: 64", 6, "no room for a prompt"),
        ("max_length: 1024\noverlong: truncate", 6, "truncate prompts"),
        ("kl_horizon: 100", 5, "no effect: `kl_target_per_sequence` is null"),
        ("dual_clip: 1.1", 5, "`dual_clip` (1.1) is below 1 + `cliprange` (1.2)"),
        ("dual_clip: 3\ncliprange: 2.5", 5, "below 1 + `cliprange` (3.5)"),
        ("use_peft: true\nlora_dropout: 0.1", 6, "are compared"),
        ("use_peft: true\ninit_lora_weights: pissa", 6, "the reference"),
        ("use_peft: true\nlora_modules_to_save: [lm_head]", 6, "not supported in this recipe"),
        ("use_vllm: true\nuse_transformers_continuous_batching: true", 5, "one generation engine"),
        ("vllm_enable_sleep_mode: true", 5, "no effect: `use_vllm` is false"),
        ("use_vllm: true\nvllm_group_port: 5000", 6, "write `vllm_mode: server`"),
        ("use_vllm: true\nvllm_mode: server\nvllm_gpu_memory_utilization: 0.5", 7, "write `vllm_mode: colocate`"),
        ("use_vllm: true\nvllm_gpu_memory_utilization: 0", 6, "vllm_gpu_memory_utilization"),
        ("transformers_continuous_batching_config: {page_size: 16}", 5, "`use_transformers_continuous_batching`"),
        ("use_transformers_continuous_batching: true\nattn_implementation: varlen", 6, "not support"),
        ("use_vllm: true\nuse_peft: true\nload_in_4bit: true", 5, "which are not quantised"),
        ("use_vllm: true\nvllm_mode: colocated", 6, "colocate"),
        ("use_vllm: true\nvllm_tensor_parallel_size: 2", 6, "--tensor-parallel-size"),
        ("use_vllm: true\nmax_staleness: 1", 6, "server"),
        ("use_vllm: true\nvllm_mode: server\nmax_staleness: 2", 7, "max_staleness"),
        ("use_peft: true\nsave_critic: true", 6, "the critic is an adapter"),
        ("push_to_hub: true\nhub_strategy: every_save", 6, "are not model folders"),
        ("kl_estimator: k3", 5, "k2 and k3 do not have the gradient of the KL"),
        ("reward_model_path: a/b", 5, "was renamed to `reward_model_name_or_path`"),
        ("num_generations: 4", 5, "not a key of this recipe"),
    ],
    "grpo": [
        ("scale_rewards: groups", 5, "write one of group, batch, none or true or false"),
        ("use_bias_correction_kl: false", 5, "no effect: `beta` is 0.0"),
        ("delta: 4\nloss_type: sapo", 5, "write `loss_type: grpo or dr_grpo"),
        ("delta: 0.28", 5, "write a number above 1"),
        ("vespo_k_pos: 3", 5, "write `loss_type: vespo`"),
        ("epsilon: 0.1\nloss_type: sapo", 5, "`epsilon` has no effect"),
        ("epsilon_high: 0.28\nloss_type: vespo", 5, "`epsilon_high` has no effect"),
        ("importance_sampling_level: sequence\nloss_type: vespo", 5, "`importance_sampling_level` has no effect"),
        ("loss_type: cispo", 5, "write `epsilon_high: 5`"),
        ("loss_type: cispo\nepsilon_high: 0.28", 5, "at 0.28"),
        ("entropy_target: 0.3", 5, "the loss has no entropy term"),
        ("num_generations: 1", 5, "num_generations"),
        ("num_generations:", 5, "`num_generations` is null"),
        ("top_p: 0.9", 5, "another distribution"),
        ("vllm_importance_sampling_cap: 3", 5, "vllm_importance_sampling_clip_max"),
        ("vllm_importance_sampling_clip_max: 0.5", 5, "write a number at least 1"),
        ("vllm_importance_sampling_clip_min: 2", 5, "write a number at most 1"),
        ("vllm_importance_sampling_clip_min: 1\nvllm_importance_sampling_clip_max: 1", 5, "write less than 1"),
        ("off_policy_mask_threshold: -0.1", 5, "write a number at least 0"),
        ("loss_type: vespo\nvespo_lambda_neg: -1", 6, "write a number at least 0"),
        ("vllm_importance_sampling_correction: false\nvllm_importance_sampling_mode: token_mask", 6, "effect"),
        ("loss_type: vespo\nvllm_importance_sampling_mode: sequence_mask", 6, "weights whole sequences"),
        (f"{AHEAD}\nmax_num_gen_batches: 3", 7, "selects the next prompts"),
        (f"{AHEAD}\nvllm_importance_sampling_correction: false", 7, "need `vllm_importance_sampling_correction`"),
    ],
    "rloo": [
        ("use_vllm: true\nvllm_structured_outputs_regex: a+", 6, "another distribution"),
        ("max_completion_length: 64", 5, "is `response_length` here"),
        ("kl_coef: 0.1", 5, "renamed to `beta`"),
        ("critic_learning_rate: 1e-5", 5, "there is no critic"),
        ("use_peft: true\nlora_dropout: 0.1", 6, "are compared"),
        ("loss_type: dapo", 5, "one loss"),
    ],
    "distill": [
        *((f"teacher_top_k: 64\nattn_implementation: eager\n{key}: 0.1", 7, "no hidden states") for key in WEIGHTS),
        *((f"use_peft: true\nattn_implementation: eager\n{key}: 0.1", 7, "all weights are trained") for key in WEIGHTS),
        ("attention_weight: 1.0", 5, "write `attn_implementation: eager`"),
        ("attention_weight: 1.0\nattn_implementation: sdpa", 5, "write `attn_implementation: eager`"),
        ("feature_loss: cosine", 5, "`feature_loss` has no effect: `feature_weight` is 0.0"),
        ("angle_weight: 1.0\nfeature_layers: [1]", 6, "`feature_layers` has no effect"),
        ("feature_weight: 1.0\nrelation_layers: [1]", 6, "`relation_layers` has no effect"),
        ("projection_learning_rate: 0.1", 5, "has no effect"),
        ("feature_weight: -1.0", 5, "feature_weight"),
        ("feature_weight: 1.0\nfeature_layers: [0, 1]", 6, "indices start at 1"),
        ("feature_weight: 1.0\nfeature_layers: [2, 2]", 6, "must be distinct"),
        ("feature_weight: 1.0\nfeature_layers: []", 6, "indices start at 1"),
        ("similarity_weight: 1.0\ntorch_compile: true", 6, "drops the forward hooks of `similarity_weight`"),
        ("feature_weight: 1.0\nfeature_loss: mae", 6, "mse, cosine"),
        (f"teacher_top_k: 64\n{STREAM}", 5, "indexed by row"),
        ("beta: 0.5", 5, "`distillation_beta`"),
        ("temperature: 2.0", 5, "`distillation_temperature`"),
        ("max_completion_length: 64", 5, "`response_length`"),
        ("lmbda: 0.5\nteacher_top_k: 64", 6, "on-policy answers are not in the store"),
        ("lmbda: 1.5", 5, "lmbda"),
        ("lmbda: 0.5\nsampling_temperature: 0", 6, "sampling_temperature"),
        ("distillation_beta: 1.5", 5, "distillation_beta"),
        ("distillation_alpha: 1.0", 5, "distillation_alpha"),
        ("teacher_top_k: 0", 5, "teacher_top_k"),
    ],
}
"""Recipe -> lines added to the minimal recipe, line of the single problem, and a part of its text."""
COMPATIBLE = {
    "ppo": ["kl_target_per_sequence: 6\nkl_horizon: 100\nreward_weights: [2]", "dual_clip: 1.3\ncliprange: 0.3"],
    "rloo": ["beta: 0.1\nnum_iterations: 2\nsteps_per_generation: 4\nuse_peft: true"],
    "grpo": [
        "beta: 0\nloss_type: dr_grpo\ndelta: 2\nscale_rewards: none",
        "scale_rewards: true",
        "scale_rewards: false",
        "loss_type: cispo\nepsilon_high: 1",
        "sapo_temperature_pos: 1.1\nloss_type: sapo\nnum_generations: 4",
        "push_to_hub: true\nhub_strategy: end",
        "hub_strategy: every_save\nattn_implementation: varlen",
        "vllm_importance_sampling_clip_min: 0.5",
        "vllm_importance_sampling_clip_min: 0.5\nvllm_importance_sampling_clip_max: null",
        "vllm_importance_sampling_mode: sequence_mask",
        "vllm_importance_sampling_mode: token_mask\nloss_type: vespo",
    ],
    "pretrain": [
        "dtype: bfloat16\noptim: adamw_torch_4bit\noptim_args: bf16_stochastic_round=True",
        "dtype: bfloat16\noptim: adamw_torch_8bit\noptim_args: bf16_stochastic_round = true",
        "dtype: bfloat16\noptim: adamw_bf16_stochastic",
        "max_steps: -1\nmax_tokens: 1000",
    ],
    "sft": [
        "max_steps: 10\nwarmup_steps: 0.1\ndataset_streaming: true\nmax_length: 64",
        "max_steps: -1\nnum_train_epochs: 1",
        f"trust_remote_code: true\nmodel_revision: {COMMIT}",
        "load_best_model_at_end: true\ntest_split_size: 9",
        "load_best_model_at_end: true\nsave_steps: 40\neval_steps: 20\ndataset_test_split: test",
        "load_best_model_at_end: true\nsave_strategy: best\neval_datasets: {b: c/d}",
        "save_keep_steps: 100\nsave_steps: 25",
        "save_keep_steps: 100\nsave_strategy: epoch",
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}",
        "lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {num_decay_steps: 10}",
        "dataset_mixture: null",
        "dataloader_num_workers: 2\ndataloader_prefetch_factor: 2",
        "metrics: [my.module:Exact]",
        "metric_for_best_model: exact\nmetrics: [my.module:Exact]\ntest_split_size: 9",
        "metric_for_best_model: eval_core_acc\neval_tasks: [core]\ntest_split_size: 9",
        "metric_for_best_model: web_loss\neval_datasets: {web: a/b}",
        "metric_for_best_model: stop_rate\nsample_prompts: [hi]",
        "fp16: true\nbf16: false",
        "replay_dataset: me/old\newc_lambda: 1\nkl_to_base: 0.1",
        "ewc_lambda: 0.01\newc_fisher: identity\newc_reference: me/model",
    ],
    "lora": [
        "load_in_4bit: true\nlora_dropout: 0.05",
        "load_in_4bit: true\nbnb_4bit_quant_type: fp4",
        "kl_to_base: 0.1\nreplay_dataset: me/old",
    ],
    "reward": [
        "metric_for_best_model: rewards/accuracies\ntest_split_size: 9",
        "label_smoothing: 0.1\nuse_peft: true\nlora_modules_to_save: [score]",
    ],
    "dpo": [
        "loss_type: sigmoid",
        "loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.2]",
        "f_divergence_type: alpha_divergence\nf_alpha_divergence_coef: 0.5",
        "loss_type: simpo\nsimpo_gamma: 1.0\nbeta: 2.5",
        "use_peft: true\nlora_r: 8\nload_in_8bit: true",
        "ewc_lambda: 1\nreplay_dataset: me/old\nreplay_share: 0.2",
    ],
    "distill": [
        "feature_weight: 0.1\nfeature_loss: cosine\nfeature_layers: [2, 4]\nprojection_learning_rate: 0.01",
        "attention_weight: 1.0\nattn_implementation: eager",
        "similarity_weight: 1\ndistance_weight: 2\nangle_weight: 0.5\nrelation_layers: [3]",
        "teacher_top_k: 64",
        "distillation_beta: 0",
        "distillation_beta: 1",
        "lmbda: 1\nresponse_length: 64",
        "lmbda: 0\nteacher_top_k: 64",
    ],
}


@pytest.mark.parametrize(
    ("recipe", "lines", "line", "words"), [(recipe, *row) for recipe, rows in INCOMPATIBLE.items() for row in rows]
)
def test_incompatible_keys_are_refused_at_their_line(problems_of, recipe, lines, line, words) -> None:
    (problem,) = problems_of(f"{lines}\n", recipe=recipe)
    assert problem.where == f"recipe.yaml:{line}"
    assert words in problem.found + problem.remedy
    assert problem.remedy


@pytest.mark.parametrize(
    ("recipe", "lines"), [(recipe, lines) for recipe in COMPATIBLE for lines in COMPATIBLE[recipe]]
)
def test_compatible_keys_are_accepted(problems_of, recipe: str, lines: str) -> None:
    assert not problems_of(f"{lines}\n", recipe=recipe)


@pytest.mark.parametrize(
    ("recipe", "lines", "found"),
    [
        ("ppo", "model_name_or_path: a/b\n", "no reward: neither"),
        ("ppo", "model_name_or_path: a/b\nreward_funcs: [length]\n", "not an import path"),
        ("ppo", "model_name_or_path: a/b\nreward_funcs: [a.b:f(x=1, y=2)]\nreward_weights: [1]\n", "quote its items"),
        ("rloo", "model_name_or_path: a/b\nreward_funcs: ['__main__:f']\nreward_timeout: 9\n", "in a file of its own"),
        ("grpo", "model_name_or_path: a/b\nreward_funcs: [accuracy]\n", "one of recipes_lib.rl.verifiers"),
        ("ppo", "model_name_or_path: a/b\nreward_funcs: {a: b}\nreward_weights: [1]\n", "`reward_funcs` is a mapping"),
        ("pretrain", "max_length: 64\n", "neither `model_config` nor"),
        ("pretrain", "max_length: 64\nmodel_config: 3\n", "`model_config` is '3'"),
        ("pretrain", "max_length: 64\nmodel_config: {model_type: llama}\n", "has no tokenizer"),
        (
            "pretrain",
            "max_length: 64\nmodel_config: {model_type: llama}\ntokenizer_name_or_path: {a: b}\n",
            "`tokenizer_name_or_path` is a mapping",
        ),
        (
            "pretrain",
            "max_length: 64\nmodel_config: {vocab_size: 8}\ntokenizer_name_or_path: a/b\n",
            "`model_config` has no `model_type`",
        ),
    ],
)
def test_start_of_ppo_and_pretraining_is_one_problem(problems_of, recipe: str, lines: str, found: str) -> None:
    (problem,) = problems_of(text=f"dataset_name: owner/dataset\noutput_dir: out\n{lines}", recipe=recipe)
    assert found in f"{problem.found}: {problem.remedy}"


def test_missing_keys_are_reported_together(problems_of) -> None:
    problems = problems_of(text="{}\n")
    assert [problem.found.split("`")[1] for problem in problems] == ["model_name_or_path", "output_dir", "dataset_name"]
    assert {problem.where for problem in problems} == {"recipe.yaml"}


@pytest.mark.parametrize("blank", ["''", "' '"])
def test_blank_output_dir_is_refused(problems_of, blank: str) -> None:
    (problem,) = problems_of(text=f"model_name_or_path: a/b\ndataset_name: c/d\noutput_dir: {blank}\n")
    assert (problem.where, problem.found) == ("recipe.yaml:3", "`output_dir` is empty")


@pytest.mark.parametrize("key", ["dataset_config", "dataset_revision", "dataset_train_split"])
def test_dataset_key_next_to_mixture_is_refused(problems_of, key: str) -> None:
    text = f"model_name_or_path: a/b\noutput_dir: o\ndataset_mixture: [{{name: c/d}}]\n{key}: validation\n"
    (problem,) = problems_of(text=text)
    assert (problem.where, "both set" in problem.found) == ("recipe.yaml:3", True)
    assert "in the mixture's entries" in problem.remedy


def test_invalid_value_is_not_also_reported_as_incompatible(problems_of) -> None:
    assert len(problems_of("max_steps: x\ndataset_streaming: true\nmax_length: 64\n")) == 1
    assert len(problems_of("max_length: x\noverlong: drop\n")) == 1


def test_key_without_effect_is_accepted_at_its_default(problems_of) -> None:
    assert not problems_of("replay_share: 0.05\n")
    assert len(problems_of("replay_share: 0.1\n")) == 1


def test_flag_drops_file_key_that_it_makes_ineffective(write, minimal_text: str) -> None:
    path = write(minimal_text + "num_train_epochs: 3\neval_steps: 10\n")
    config = load_config("sft", ["--config", str(path), "--max_steps", "2", "--eval_strategy", "no"])
    assert "num_train_epochs" not in config.training
    assert "eval_steps" not in config.training
    assert config.training["eval_on_start"] is False
    assert config.provenance["num_train_epochs"] == "derived: `max_steps` decides the length"


COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"


@pytest.mark.parametrize(
    ("flags", "lines", "revision"),
    [
        ([], "", COMMIT),
        (["--model_name_or_path", "owner/other"], "", None),
        (["--model_name_or_path", "owner/other", "--model_revision", COMMIT], "", COMMIT),
        (["--model_name_or_path", "owner/model"], "", COMMIT),
        (["--model_name_or_path", "owner/other"], f"trust_remote_code: true\ntokenizer_revision: {COMMIT}\n", COMMIT),
    ],
)
def test_commit_in_file_is_not_of_model_of_flag(write, minimal_text: str, flags, lines: str, revision) -> None:
    path = write(f"{minimal_text}model_revision: {COMMIT}\n{lines}")
    assert load_config("sft", ["--config", str(path), *flags]).model.model_revision == revision


def test_branch_in_file_is_kept_for_model_of_flag(write, minimal_text: str) -> None:
    path = write(f"{minimal_text}model_revision: main\n")
    assert load_config("sft", ["--config", str(path), "--model_name_or_path", "o/other"]).model.model_revision == "main"


def test_flag_made_ineffective_by_file_is_refused(problems_of) -> None:
    (problem,) = problems_of("max_steps: 100\n", flags=["--num_train_epochs", "1"])
    assert problem.where == "--num_train_epochs"


@pytest.mark.parametrize(
    ("weights", "refused_sum"),
    [
        (["0.8", "0.2"], None),
        (["80", "20"], None),
        (["0.33", "0.33", "0.33"], None),
        (["1"], None),
        (["0.5", "1"], "1.5"),
        (["2", "2"], "4"),
        (["1", "1"], "2"),
        (["0.5"], "0.5"),
        (["1", "null"], "1"),
    ],
)
def test_ambiguous_mixture_weights_are_refused_in_fine_tuning(weights: list[str], refused_sum: str | None) -> None:
    def load(recipe: str, key: str) -> None:
        entries = [f"{{name: a/b{at}, {key}: {value}}}" for at, value in enumerate(weights) if value != "null"]
        entries += [f"{{name: c/d{at}}}" for at, value in enumerate(weights) if value == "null"]
        flags = [f"--dataset_mixture=[{', '.join(entries)}]", "--model_name_or_path=a/b", "--output_dir=o"]
        load_config(recipe, [*flags, "--max_length=64"])

    load("sft", "repeat")
    load("pretrain", "weight")
    if refused_sum is None:
        load("sft", "weight")
    else:
        with pytest.raises(ConfigError, match=f"add up to {refused_sum}\n") as caught:
            load("sft", "weight")
        (problem,) = caught.value.problems
        assert "`repeat`" in problem.remedy


@pytest.mark.parametrize("recipe", ["sft", "pretrain"])
def test_mixture_with_weight_and_repeat_is_refused(recipe: str) -> None:
    mixture = "--dataset_mixture=[{name: a/b, weight: 1}, {name: c/d, repeat: 2}]"
    with pytest.raises(ConfigError, match="both `weight` and `repeat`"):
        load_config(recipe, [mixture, "--model_name_or_path=a/b", "--output_dir=o", "--max_length=64"])


@pytest.mark.parametrize(
    ("phases", "found"),
    [
        ([(0, [1, 2]), (100, [2, 1])], None),
        ([(5, [1, 2])], "start at [5]"),
        ([(0, [1, 2]), (0, [2, 1])], "start at [0, 0]"),
        ([(0, [1])], "phase 0"),
        ([(0, [1, -1])], "phase 0"),
        ([(0, [0, 0])], "phase 0"),
        ([], "start at [] tokens"),
    ],
)
def test_curriculum_phases_are_validated(problems_of, phases, found) -> None:
    curriculum = [{"start_tokens": start, "weights": weights} for start, weights in phases]
    text = "model_name_or_path: owner/model\noutput_dir: out\nmax_length: 64\n"
    text += f"dataset_mixture: [{{name: a/b}}, {{name: c/d}}]\ndataset_curriculum: {curriculum}\n"
    problems = problems_of("", text=text, recipe="pretrain")
    assert [problem.found for problem in problems if found and found in problem.found] or (
        found is None and not problems
    )


CONFLICTS = [*read_lists(Path(rules.__file__).with_name("rules.yaml"))["conflicts"], *rules.DECISIONS]


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: f"{row['key']}: {row.get('found', row.get('why'))}")
def test_conflicts_and_decisions_name_keys_and_values(row) -> None:
    """A misspelt key or value would never apply."""
    tables = [load_table(recipe).keys for recipe in row.get("recipes", " ".join(RECIPE_NAMES)).split()]
    compared = [*row.get("when", {}).items(), *row.get("unless", {}).items()]
    assert any({row["key"], row.get("decider", row["key"])} <= keys.keys() for keys in tables)
    for key, values in compared:
        schemas = [keys[key].schema for keys in tables if key in keys]
        assert schemas
        for value in values:
            assert value is None or any(value in schema.get("enum", [value]) for schema in schemas), value


def test_streaming_reports_all_incompatible_keys(problems_of) -> None:
    text = "model_name_or_path: a/b\noutput_dir: o\ndataset_mixture: [{name: a/b}]\nmax_steps: 1\n"
    problems = problems_of("dataset_streaming: true\ntest_split_size: 5\n", text=text)
    assert sorted((problem.where, problem.remedy) for problem in problems) == [
        ("recipe.yaml", "write `max_length: ...`"),
        ("recipe.yaml:5", "set it to false, or mix the data on disk first"),
        ("recipe.yaml:6", "name held-out data with `dataset_test_split`"),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('dataset_mixture=[{"name": "a/b", "weight": 60}, {"name": "c/d"}]', "a `weight` is a share of the mixture"),
        ('dataset_mixture=[{"name": "a/b", "weight": true}]', "weight` is 'true'"),
        ('dataset_mixture=[{"name": "a/b", "repeat": NaN}]', "repeat` is 'NaN'"),
        ('dataset_mixture=[{"name": "a/b", "format": "chat"}]', "format` is 'chat'"),
        ('dataset_mixture=["a/b", null]', "`dataset_mixture[1]` has no value"),
        ("dataset_mixture=[]", "is empty"),
        ("dataset_columns=[1]", "a list"),
        ('eval_datasets={"x": {"name": "a/b", "split": [3]}}', "`eval_datasets.x.split` is a list"),
        ('eval_datasets={"x": {"name": "a/b", "format": "chat"}}', "`eval_datasets.x.format` is 'chat'"),
        ('eval_datasets={"x": {"name": "a/b", "columns": [1]}}', "`eval_datasets.x.columns` is a list"),
        ('eval_datasets={"x": {"split": "a"}}', "`eval_datasets.x` has no `name`"),
        ('eval_datasets={"x": null}', "`eval_datasets.x` has no value"),
        *((f"test_split_size={size}", "`test_split_size` is") for size in ("0", "-1", "1.5", "nan", "inf", "true")),
    ],
)
def test_invalid_data_keys_are_refused(data: str, message: str) -> None:
    """``data.sources`` relies on these checks and does not repeat them."""
    named = [] if data.startswith("dataset_mixture") else ["--dataset_name=a/b"]
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config("sft", [f"--{data}", *named, "--model_name_or_path=a/b", "--output_dir=o"])
