"""Errors for unknown keys: retired, misplaced, nested, secret, or a misspelling with the nearest known key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Final

import yaml

from recipes_lib.config.migration.renames import read_known
from recipes_lib.config.secrets import is_secret_key, refuse_secret_key
from recipes_lib.config.table import KeyTable
from recipes_lib.config.values import Entry
from recipes_lib.errors import Problem

_NAMES: Final[Mapping[str, str]] = {
    # model and data
    "model_name_or_path": "base_model model model_name model_path model_id pretrained pretrained_model_name_or_path",
    "tokenizer_name_or_path": "tokenizer_path tokenizer_config base_model_tokenizer",
    "model_revision": "model_version",
    "attn_implementation": "attention attn attn_impl flash_attention flash_attn use_flash_attn use_flash_attention",
    "dataset_name": "data data_path data_file data_files dataset dataset_path train_data train_dataset train_file",
    "dataset_test_split": "eval_data eval_dataset eval_file test_data test_dataset test_datasets test_file val_data "
    "val_dataset validation_file",
    "test_split_size": "eval_size eval_split_size test_size val_set_size val_size val_split validation_size "
    "validation_split_percentage",
    "dataset_mixture": "interleave_datasets mixture mix_datasets",
    "chat_template_path": "chat_template_jinja template template_file template_path",
    "max_length": "block_size context_length context_size cutoff_len max_len max_seq_len max_sequence_length "
    "model_max_length n_ctx seq_len seq_length seqlen sequence_len sequence_length",
    "loss_on": "mask_prompt mask_prompts roles_to_train train_on_input train_on_inputs train_on_prompt",
    "packing": "neat_packing pack packed pack_sequences sample_packing",
    "overlong": "excess_length_strategy truncation truncate",
    "output_dir": "checkpoint_dir out out_dir output output_folder output_path save_dir save_path",
    # optimisation
    "learning_rate": "learningrate lr max_lr peak_lr",
    "critic_learning_rate": "critic_lr value_lr",
    "lr_scheduler_type": "decay_lr lr_decay_style lr_schedule lr_scheduler schedule scheduler scheduler_type",
    "warmup_steps": "lr_warmup_iters lr_warmup_steps num_warmup_steps warmup warmup_iters warmup_proportion",
    "min_lr_ratio": "final_lr_frac lr_min_ratio min_lr_rate",
    "num_train_epochs": "epoch epochs max_epochs n_epochs num_epoch num_epochs total_epochs train_epochs",
    "max_steps": "iters iterations max_iters max_train_steps n_steps num_iters num_steps num_train_steps steps "
    "total_steps total_training_steps train_iters train_steps",
    "max_tokens": "num_tokens total_tokens train_tokens",
    "per_device_train_batch_size": "batch batch_size device_batch_size mbs micro_batch_size per_device_batch_size "
    "per_gpu_batch_size train_batch_size train_micro_batch_size_per_gpu",
    "per_device_eval_batch_size": "eval_batch_size eval_micro_batch_size test_batch_size val_batch_size",
    "gradient_accumulation_steps": "accum_steps accumulate_grad_batches accumulation_steps grad_accum "
    "grad_accum_steps grad_accumulation_steps gradient_accumulation",
    "activation_checkpointing": "enable_activation_checkpointing enable_gradient_checkpointing grad_checkpointing "
    "gradient_ckpt recompute use_gradient_checkpointing",
    "optim": "optimizer optimizer_name optimizer_type",
    "weight_decay": "wd",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "max_grad_norm": "clip_grad clip_grad_norm grad_clip gradient_clip_val gradient_clipping max_norm",
    "bf16": "bfloat16 precision pure_bf16 use_bf16",
    "torch_compile": "compile compile_model use_compile",
    "seed": "manual_seed random_seed rng_seed",
    "dataloader_num_workers": "num_workers workers",
    # adapters
    "use_peft": "adapter finetuning_type lora peft peft_config peft_type use_lora use_qlora",
    "adapter_name_or_path": "adapter_path lora_model_dir lora_path peft_model_id",
    "lora_r": "lora_rank r rank",
    "lora_alpha": "alpha",
    "lora_target_modules": "lora_target lora_target_linear target_modules",
    "lora_modules_to_save": "additional_target modules_to_save",
    "use_rslora": "rslora",
    "use_dora": "dora",
    "load_in_4bit": "bits four_bit quantization_bit use_4bit",
    "load_in_8bit": "use_8bit",
    # preferences and rewards
    "beta": "dpo_beta kl_beta pref_beta rl_beta",
    "loss_type": "dpo_loss_type pref_loss preference_loss",
    "simpo_gamma": "gamma_beta_ratio",
    "ref_model_name_or_path": "ref_model ref_model_path reference_model",
    "reward_model_name_or_path": "reward_model rm_path",
    "reward_funcs": "reward_fn reward_func reward_function reward_functions rewards",
    "teacher_model_name_or_path": "teacher teacher_model teacher_name teacher_path",
    "kl_coef": "init_kl_coef kl_loss_coef kl_penalty",
    "num_generations": "group_size n_samples_per_prompt num_return_sequences num_samples rollouts_per_prompt",
    "response_length": "max_completion_tokens max_new_tokens max_response_length",
    "cliprange": "clip_range clip_ratio",
    "lam": "gae_lambda",
    # saving and logging
    "save_steps": "checkpoint_every checkpoint_interval save_every save_freq save_interval",
    "eval_steps": "eval_every eval_freq eval_interval test_freq val_check_interval",
    "logging_steps": "log_every log_every_n_steps log_freq log_interval log_steps",
    "save_total_limit": "keep_last keep_last_n max_checkpoints save_limit",
    "report_to": "logger logger_type loggers tracker trackers use_wandb with_tracking",
    "run_name": "exp_name experiment_name wandb_name wandb_run wandb_run_name wandb_run_id",
    "hub_model_id": "hub_id hub_repo hub_repo_id repo_id",
    "hub_private_repo": "private",
}

SYNONYMS: Final[Mapping[str, str]] = {name: key for key, names in _NAMES.items() for name in names.split()}
"""Name elsewhere -> our key, of one stage or of several."""

_SECTION_WORDS = {
    "data",
    "dataset",
    "model",
    "training",
    "train",
    "tokens",
    "evaluation",
    "eval",
    "lora",
    "peft",
    "sft",
    "pretrain",
}


def explain_unknown(entry: Entry, table: KeyTable, taken: set[str]) -> Problem:
    """Return what is wrong with a key outside the table.

    Args:
        entry: The key with its value.
        table: The keys of the stage.
        taken: Every key that the user wrote, so that a successor is not offered twice.
    """
    key = entry.key
    if is_secret_key(key):
        return refuse_secret_key(entry.where, key[:60])
    known = read_known(table.stage)
    if key in known:
        retired = known[key]
        remedy = f"delete the line: `{retired.new}` is set as well" if retired.new in taken else retired.remedy
        return Problem(entry.where, f"`{key}` {retired.found}", remedy)
    nested = _nested_keys(entry.node, table)
    if nested or (isinstance(entry.node, yaml.MappingNode) and key in _SECTION_WORDS):
        names = ", ".join(nested[:3] + ["..."] * (len(nested) > 3)) or "its keys"
        return Problem(entry.where, f"`{key}` is not a key; keys are flat", f"move {names} to the left margin")
    return Problem(entry.where, f"unknown key `{key[:60]}`", _suggest(key, table, entry.flag))


def _nested_keys(node: yaml.Node, table: KeyTable) -> list[str]:
    if not isinstance(node, yaml.MappingNode):
        return []
    names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
    return [name for name in names if name in table.keys or name in read_known(table.stage)]


def _suggest(key: str, table: KeyTable, flag: bool) -> str:
    positive = key.removeprefix("no_")
    if positive in table.keys and table.keys[positive].accepts("boolean"):
        return f"write `--{positive} false`" if flag else f"write `{positive}: false`"
    plain = key.lower().replace("-", "_")
    known = read_known(table.stage)
    synonym = SYNONYMS.get(plain, "")
    if synonym in known:
        return f"it is `{synonym}` elsewhere, which {known[synonym].found}; {known[synonym].remedy}"
    # A retired spelling leads to its successor; one without is no suggestion.
    names = {name: name for name in table.keys} | {
        name: retired.new for name, retired in known.items() if retired.new in table.keys
    }
    near = [synonym] if synonym in table.keys else difflib.get_close_matches(plain, names, n=1, cutoff=0.7)
    return f"did you mean `{names[near[0]]}`?" if near else "see `--help` or docs/configs.md for the keys"
