"""Tables of `recipes.yaml` against upstream's argument classes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from tests.config.generate import read_bounds, read_choices, read_defaults, read_helps, read_notes
from tests.forked import ROOT
from transformers import TrainingArguments
from trl import DPOConfig, GRPOConfig, RewardConfig, RLOOConfig, SFTConfig

from recipes_lib.config.loader import load_config, read_synonyms
from recipes_lib.config.recipes import build_retired, read_known, read_refused
from recipes_lib.config.rules import SHARE_OR_COUNT
from recipes_lib.config.schema import SECTIONS
from recipes_lib.config.table import RECIPE_NAMES, TABLES, load_table
from recipes_lib.config.values import is_secret_key


def test_notes_and_bounds_name_existing_keys() -> None:
    keys = {key for table in TABLES for key in load_table(table).keys}
    notes = {name for recipe in RECIPE_NAMES for name in read_notes(recipe)}
    assert keys >= notes | set(read_helps()) | set(SHARE_OR_COUNT)
    assert keys | {"weight", "repeat", "start_tokens"} >= set(read_bounds())


CLASSES: dict[str, Any] = {
    "pretrain": TrainingArguments,
    "sft": SFTConfig,
    "lora": SFTConfig,
    "reward": RewardConfig,
    "dpo": DPOConfig,
    "ppo": TrainingArguments,
    "distill": SFTConfig,
    "rloo": RLOOConfig,
    "grpo": GRPOConfig,
}
UPSTREAM = {recipe: {field.name for field in dataclasses.fields(CLASSES[recipe])} for recipe in RECIPE_NAMES}
OURS = {field.name for section in SECTIONS.values() for field in dataclasses.fields(section)}


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_every_upstream_key_is_either_accepted_or_refused(recipe: str) -> None:
    honoured, refused = set(load_table(recipe).keys), set(read_refused(recipe))
    secret = {key for key in UPSTREAM[recipe] - honoured if is_secret_key(key)}
    assert not (UPSTREAM[recipe] | OURS) - honoured - refused - secret
    assert not honoured & refused
    assert refused <= {key for keys in UPSTREAM.values() for key in keys} | OURS


REMOVED = {
    # PPOConfig of TRL 0.8 to 1.12, without the keys that it inherited.
    "ppo": """
        accelerator_kwargs adap_kl_ctrl backward_batch_size batch_size cliprange cliprange_value compare_steps
        dataset_num_proc ds3_gather_for_generation early_stopping exp_name forward_batch_size gamma
        global_backward_batch_size global_batch_size horizon init_kl_coef is_encoder_decoder is_peft_model kl_coef
        kl_estimator kl_penalty lam local_batch_size local_mini_batch_size local_rollout_forward_batch_size log_with
        micro_batch_size mini_batch_size missing_eos_penalty model_adapter_name model_name num_mini_batches
        num_ppo_epochs num_sample_generations num_total_batches optimize_cuda_cache optimize_device_cache ppo_epochs
        project_kwargs push_to_hub_if_best_kwargs query_dataset ratio_threshold ref_adapter_name response_length
        reward_model reward_model_path score_clip sft_model_path steps stop_token stop_token_id target target_kl
        task_name temperature total_episodes tracker_kwargs tracker_project_name use_score_norm use_score_scaling
        vf_coef whiten_rewards world_size
    """,
    # Keys that TRL's RLOOConfig and GRPOConfig lost before 1.16.
    "rloo": """
        cliprange exp_name kl_coef local_rollout_forward_batch_size max_prompt_length missing_eos_penalty
        normalize_advantage normalize_reward num_mini_batches num_ppo_epochs reward_model_path rloo_k stop_token
        token_level_kl total_episodes vllm_guided_decoding_regex wandb_log_unique_prompts whiten_rewards
    """,
    "grpo": """
        max_prompt_length use_liger_loss vllm_device vllm_dtype vllm_enable_prefix_caching vllm_guided_decoding_regex
        vllm_max_model_len wandb_log_unique_prompts
    """,
    # DPOConfig of TRL 0.8 to 0.28; GKDConfig, whose trainer is experimental, and CPOConfig, which has SimPO.
    "dpo": """
        base_model_attribute_name cpo_alpha dataset_num_proc force_use_ref_model generate_during_eval is_encoder_decoder
        label_pad_token_id max_completion_length max_prompt_length max_target_length model_adapter_name padding_value
        ref_adapter_name ref_model_init_kwargs reference_free rpo_alpha simpo_gamma tools use_liger_loss
        use_logits_to_keep use_num_logits_to_keep
    """,
    "distill": "beta lmbda max_new_tokens seq_kd teacher_model_init_kwargs teacher_model_name_or_path temperature",
}


@pytest.mark.parametrize("recipe", REMOVED)
def test_removed_trl_key_is_accepted_renamed_or_refused(recipe: str) -> None:
    keys = load_table(recipe).keys
    explained = {*keys, *read_known(recipe), *(name for name, key in read_synonyms().items() if key in keys)}
    assert set(REMOVED[recipe].split()) <= explained


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_rejected_key_is_not_sent_to_the_same_recipe(recipe: str) -> None:
    remedies = {key: retired.remedy for key, retired in read_known(recipe).items()}
    assert not [key for key, remedy in remedies.items() if f"use the `{recipe}` recipe" in remedy]


def test_accepted_keys_of_trl_are_read_outside_of_the_configuration() -> None:
    """TRL's trainers, which are not used, are their only other readers."""
    sources = [path for path in (ROOT / "src").rglob("*.py") if "config" not in path.parts]
    words = {word for path in sources for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    upstream = {field.name for field in dataclasses.fields(TrainingArguments)}
    for recipe in RECIPE_NAMES:
        assert not (UPSTREAM[recipe] - upstream) & set(load_table(recipe).keys) - words, recipe


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_changed_defaults_differ_from_upstream_and_have_reasons(recipe: str) -> None:
    defaults, keys = read_defaults(recipe), load_table(recipe).keys
    assert set(defaults) <= UPSTREAM[recipe] | OURS
    assert {name for name in defaults if keys[name].default == keys[name].upstream_default} == set()
    assert all(reason for _, reason in defaults.values())
    for name, values in read_choices(recipe).items():
        schema = {} if name in read_refused(recipe) else keys[name].schema
        assert not schema or schema.get("items", schema)["enum"] == list(values)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_refused_key_has_reason(problems_of, recipe: str) -> None:
    refused = read_refused(recipe)
    problems = problems_of("".join(f"{key}: 1\n" for key in refused), recipe=recipe)
    for line, key in enumerate(refused, start=5):
        found = [problem.found for problem in problems if problem.where == f"recipe.yaml:{line}"]
        assert [text.startswith(f"`{key}` ") for text in found] == [True], key


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_upstream_arguments_accept_recipe_values(recipes, recipe: str, tmp_path) -> None:
    config = load_config(recipe, ["--config", str(recipes[recipe]), "--use_cpu", "--output_dir", str(tmp_path)])
    arguments = CLASSES[recipe](**config.training)
    for key, (value, _) in read_defaults(recipe).items():
        if key not in ("report_to", "learning_rate") and key in UPSTREAM[recipe]:
            assert getattr(arguments, key) == value


def test_retired_key_entry_defines_its_rewrite() -> None:
    retired = build_retired(
        [
            {"keys": "old", "new": "new", "since": "1.0"},
            {"keys": "gone lost", "found": "is gone"},
            {"keys": "lost", "found": "is gone", "remedy": "stop", "at": [False, None]},
            {"keys": "open", "found": "is gone", "at": []},
            {"sections": "schedule", "found": "is gone", "values": {True: {"a": "b"}}},
        ]
    )
    assert retired["old"].rewrite([1]) == {"new": [1]}
    assert (retired["old"].found, retired["old"].remedy) == ("was renamed to `new` (1.0)", "write `new`")
    assert retired["gone"].rewrite({"any": 1}) == {}
    assert [retired["lost"].rewrite(value) for value in (False, True)] == [{}, None]
    assert retired["open"].rewrite("x") is None
    assert [retired["decay_steps"].rewrite(value) for value in (True, {"not": "hashable"})] == [{"a": "b"}, None]


@pytest.mark.parametrize("recipe", ["dpo", "grpo"])
def test_help_of_the_loss_names_every_value(recipe: str) -> None:
    key = load_table(recipe).keys["loss_type"]
    values = key.schema.get("enum") or key.schema["items"]["enum"]
    assert [value for value in values if value not in key.help] == []
