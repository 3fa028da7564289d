"""Tables of renamed and removed keys against upstream's dataclasses."""

from __future__ import annotations

import dataclasses

import pytest
import trl

from recipes_lib.config.recipes import read_known, read_renames
from recipes_lib.config.table import RECIPE_NAMES, load_table
from recipes_lib.config.values import is_secret_key

KEYS = load_table("sft").keys

# Fields of TrainingArguments in transformers 4.40 to 5.14 that 5.23 has not, and of SFTConfig, ModelConfig and the
# script arguments in TRL 0.8 to 1.8 that a recipe has not, read from the released wheels.
GONE_FROM_TRANSFORMERS = """
_n_gpu adafactor dispatch_batches evaluation_strategy fp16_backend fp16_opt_level fsdp_min_num_params
fsdp_transformer_layer_cls_to_wrap group_by_length half_precision_backend include_inputs_for_metrics
include_tokens_per_second jit_mode_eval logging_dir mp_parameters no_cuda overwrite_output_dir past_index
per_gpu_eval_batch_size per_gpu_train_batch_size push_to_hub_model_id push_to_hub_organization push_to_hub_token
ray_scope save_safetensors split_batches torchdynamo tp_size tpu_metrics_debug tpu_num_cores use_ipex
use_legacy_prediction_loop use_mps_device warmup_ratio
"""
GONE_FROM_TRL = """
chars_per_token dataset_batch_size dataset_test_name dataset_train_name datasets gradient_checkpointing_use_reentrant
ignore_bias_buffers max_seq_length num_of_sequences streaming torch_dtype use_liger
"""
# Keys of the recipes and argument classes of alignment-handbook that neither library has.
HANDBOOK = """
auto_insert_empty_system_msg base_model_revision chat_template dataset_configs dataset_mixer dataset_splits
hub_model_revision model_code_revision preprocessing_num_workers text_column tokenizer truncation_side
use_flash_attention_2
"""


def test_removed_upstream_key_has_explanation() -> None:
    keys = f"{GONE_FROM_TRANSFORMERS} {GONE_FROM_TRL} {HANDBOOK}".split()
    assert [key for key in keys if key not in read_renames().retired and not is_secret_key(key)] == []


@pytest.mark.parametrize("config", [trl.ModelConfig, trl.DPOConfig, trl.RewardConfig])
def test_keys_of_trl_configs_are_known(config: type) -> None:
    for field in dataclasses.fields(config):
        named = field.name in KEYS or field.name in read_known("sft") or is_secret_key(field.name)
        assert named, field.name


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_retired_keys_are_no_keys_and_their_values_become_keys(recipe: str) -> None:
    keys = load_table(recipe).keys
    assert not set(read_known(recipe)) & set(keys)
    for key, retired in read_known(recipe).items():
        assert retired.remedy, key
        for new in (retired.values or {}).values():
            assert set(new) <= set(keys), key


def test_renamed_values_are_choices_of_the_key() -> None:
    for (key, old), new in read_renames().values.items():
        words = {"null": "null", "boolean": "false", "number": "0"}
        plain = [word for kind, word in words.items() if KEYS[key].accepts(kind)]
        choices = KEYS[key].schema.get("enum", plain)
        assert new in choices
        assert old not in choices


def test_renamed_mixture_keys_are_keys_of_an_entry() -> None:
    properties = KEYS["dataset_mixture"].schema["items"]["properties"]
    renamed = read_renames().mixture
    assert set(renamed.values()) <= set(properties)
    assert not set(renamed) & set(properties)
