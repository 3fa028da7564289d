"""Remarks of `migrate` about keys whose meaning differs from upstream's."""

from __future__ import annotations

import pytest

from recipes_lib.config.loader import read_synonyms
from recipes_lib.config.recipes import read_renames
from recipes_lib.config.table import RECIPE_NAMES, load_table


@pytest.mark.parametrize("meaning", read_renames().meanings, ids=lambda meaning: meaning.where)
def test_meaning_names_existing_keys(meaning) -> None:
    known = {key for recipe in RECIPE_NAMES for key in load_table(recipe).keys} | read_synonyms().keys()
    known |= read_renames().retired.keys() | read_renames().elsewhere.keys()
    assert meaning.decisive in known
    assert not meaning.unless or known & {*meaning.unless.split()}
    assert not meaning.keys or known & {*meaning.keys.split()}


@pytest.mark.parametrize(
    ("recipe", "present", "expected"),
    [
        ("sft", {"packing"}, ["`loss_on: all`"]),
        ("sft", {"loss_on"}, ["`packing: false`"]),
        ("sft", {"loss_on", "packing", "max_seq_length"}, ["`overlong: truncate`"]),
        ("sft", {"loss_on", "packing", "max_length", "overlong"}, []),
        ("sft", {"loss_on", "packing", "system_prompt"}, ["`system_prompt`"]),
        ("grpo", {"missing_eos_penalty", "system_prompt"}, []),
        ("dpo", {"dataset"}, ["`dataset_name`"]),
        ("dpo", {"dataset", "dataset_mixture"}, []),
        ("dpo", {"stage"}, ["`--recipe lora`"]),
        ("dpo", {"stage", "finetuning_type"}, []),
        ("lora", {"base_model", "packing"}, ["`num_train_epochs: 1`", "`per_device_train_batch_size: 1`"]),
        ("dpo", {"base_model", "micro_batch_size"}, []),
        ("pretrain", {"lr_scheduler_type"}, ["`min_lr_ratio: 0`"]),
        ("pretrain", {"lr_scheduler_type", "min_lr_ratio"}, []),
        ("dpo", {"max_length"}, ["`overlong: drop`"]),
        ("reward", {"max_length"}, []),
        ("grpo", {"max_prompt_length", "missing_eos_penalty"}, ["`overlong: drop`"]),
        ("grpo", {"num_generations"}, ["`missing_eos_penalty: null`"]),
        ("grpo", {"use_vllm", "missing_eos_penalty"}, ["`vllm_importance_sampling_mode: sequence_mask`"]),
        ("sft", {"loss_on", "packing", "gradient_accumulation_steps"}, []),
        ("ppo", {"num_mini_batches", "overlong", "missing_eos_penalty"}, ["`gradient_accumulation_steps`"]),
        ("rloo", {"num_mini_batches", "overlong", "missing_eos_penalty"}, []),
        # axolotl masks prompts and drops long examples, LLaMA-Factory masks prompts and truncates.
        (
            "lora",
            {"base_model", "num_epochs", "micro_batch_size", "sequence_len", "max_length", "packing"},
            ["`overlong: drop`"],
        ),
        ("sft", {"finetuning_type", "lora_rank", "lora_alpha", "max_length", "packing"}, ["`overlong: truncate`"]),
        ("sft", {"loss_on", "packing", "optimizer._component_"}, ["`lr_scheduler_type: constant`"]),
        ("sft", {"loss_on", "packing", "optimizer._component_", "lr_scheduler._component_"}, []),
        (
            "ppo",
            {"actor_rollout_ref.actor.optim.lr", "missing_eos_penalty"},
            ["`lr_scheduler_type: constant_with_warmup`"],
        ),
        ("ppo", {"actor_rollout_ref.actor.optim.lr", "missing_eos_penalty", "lr_scheduler_type"}, []),
        ("reward", {"adam.lr"}, ["`lr_scheduler_type: cosine_with_min_lr`"]),
        ("reward", {"adam.lr", "lr_scheduler"}, []),
        (
            "distill",
            {"teacher_model_name_or_path", "packing"},
            ["`distillation_alpha: 0`", "`lmbda: 0.5`", "`distillation_beta: 0.5`"],
        ),
        ("distill", {"teacher_model_name_or_path", "packing", "distillation_alpha", "lmbda", "beta"}, []),
        ("sft", {"teacher_model_name_or_path", "loss_on", "packing"}, []),
    ],
)
def test_undecided_meanings_are_reported(recipe, present, expected) -> None:
    advices = [
        meaning.advice
        for meaning in read_renames().meanings
        if meaning.concerns(present, load_table(recipe).keys.keys())
    ]
    assert ["`" + advice.split("`")[1] + "`" for advice in advices] == expected
