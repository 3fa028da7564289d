"""Inference of the training method from keys and file names."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes_lib.config.migration.legacy_files import infer_method
from recipes_lib.config.migration.migrate import migrate
from recipes_lib.config.table import RECIPE_NAMES
from recipes_lib.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "values", "recipe", "loss"),
    [
        ("orpo/config_full", {"beta": 0.05}, "dpo", "orpo"),
        ("simpo/config", {"beta": 2.0, "loss_type": "simpo"}, "dpo", None),
        ("dpo/config_qlora", {"beta": 0.1, "use_peft": True}, "dpo", None),
        ("sft/config_qlora", {"use_peft": True}, "lora", None),
        ("sft/config_full", {"load_in_4bit": True}, "lora", None),
        ("sft/config_lora", {}, "lora", None),
        ("dpo/config_lora", {}, "dpo", None),
        ("online/dpo_full", {"output_dir": "data/gold"}, "dpo", None),
        ("dpo/config", {"output_dir": "data/gold"}, "dpo", None),
        ("mine/config", {"output_dir": "data/gold"}, "sft", None),
        ("sft/config_full", {"use_peft": False}, "sft", None),
        ("cpt/config_full", {}, "pretrain", None),
        ("recipes/mine", {}, "sft", None),
        ("recipes/mine", {"loss_type": "apo_zero"}, "dpo", None),
        ("recipes/mine", {"loss_type": ["sigmoid", "sft"]}, "dpo", None),
        ("recipes/mine", {"loss_type": "dapo"}, "grpo", None),
        ("recipes/mine", {"reward_model": True, "adapter": "lora"}, "reward", None),
        ("recipes/mine", {"reward_model": "a/b"}, "sft", None),
        ("recipes/mine", {"center_rewards_coefficient": 0.01}, "reward", None),
        ("recipes/mine", {"beta": 0.1, "output_dir": "data/zephyr-orpo-141b/"}, "dpo", "orpo"),
        ("recipes/mine", {"num_generations": 8, "beta": 0.0}, "grpo", None),
        ("rloo/mine", {"num_generations": 8, "beta": 0.0}, "rloo", None),
        ("recipes/mine", {"kl_coef": 0.05, "reward_model_path": "a/b"}, "ppo", None),
        ("recipes/mine", {"kl_coef": 0.05, "rloo_k": 4}, "rloo", None),
        ("recipes/mine", {"num_ppo_epochs": 4, "num_generations": 4}, "rloo", None),
        ("recipes/mine", {"rloo_k": 4, "packing": True}, "rloo", None),
        ("recipes/mine", {"actor_rollout_ref.model.path": "a/b"}, "grpo", None),
        ("recipes/mine", {"algorithm.adv_estimator": "gae", "actor_rollout_ref.rollout.n": 1}, "ppo", None),
        ("recipes/mine", {"algorithm.adv_estimator": "rloo"}, "rloo", None),
        ("recipes/mine", {"rlhf_type": "simpo", "tuner_type": "lora"}, "dpo", "simpo"),
        ("recipes/mine", {"trainer_type": "TRL_DPO"}, "dpo", None),
        ("qwen2/1.5_to_0.5B_KD_lora_distributed", {"packing": False}, "distill", None),
        ("recipes/mine", {"kd_trainer": True, "adapter": "lora"}, "distill", None),
        ("recipes/gkd", {"teacher_model_name_or_path": "a/b", "beta": 0.5}, "distill", None),
        ("sft/config_distill", {"output_dir": "data/Distill-7B"}, "sft", None),
        ("sft/config_distill", {"teacher_model_name_or_path": "a/b"}, "distill", None),
        # Keys take precedence over the folder name.
        ("sft/config", {"precompute_ref_log_probs": True}, "dpo", None),
        ("dpo/config", {"completion_only_loss": True}, "sft", None),
        ("recipes/mine", {"rl": "ipo", "adapter": "qlora", "load_in_4bit": True}, "dpo", "ipo"),
        ("recipes/mine", {"stage": "rm", "finetuning_type": "full"}, "reward", None),
        ("recipes/mine", {"stage": "pt", "finetuning_type": "full"}, "pretrain", None),
        # As in files of nanotron.
        ("recipes/tiny_llama", {"model_config": {"num_hidden_layers": 2}}, "pretrain", None),
        ("sft/gemma-4b-pt", {}, "sft", None),
        ("recipes/mine", {"adapter": "lora"}, "lora", None),
        ("recipes/mine", {"stage": "dpo", "packing": False, "finetuning_type": "lora"}, "dpo", None),
        ("grpo_fast/mine", {"total_episodes": 9600, "beta": 0.01}, "grpo", None),
        ("recipes/1B_full_ppo", {"lmbda": 0.95, "whiten_rewards": True}, "ppo", None),
        ("recipes/gkd", {"lmbda": 0.5, "beta": 0.5}, "distill", None),
        ("dpo/multi_node", {"beta": 5, "packing": True}, "dpo", None),
        ("recipes/mine", {"beta": 5, "packing": True}, "dpo", None),
        ("sft/mine", {"stage": "sft", "finetuning_type": "lora", "beta": 0.1}, "lora", None),
    ],
)
def test_method_is_inferred_from_keys_then_from_names(name: str, values: dict, recipe: str, loss: str | None) -> None:
    folder, _, stem = name.partition("/")
    method = infer_method([stem, folder], values)
    assert (method.recipe, method.loss_type, method.doubt) == (recipe, loss, "")


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_method_is_inferred_from_file_name(recipe: str) -> None:
    assert infer_method([f"{recipe}_small", "configs"], {}).recipe == recipe


@pytest.mark.parametrize("name", ["cpo", "online_dpo", "nash_md", "bco", "kto"])
def test_unsupported_method_is_refused_unless_recipe_is_given(name: str) -> None:
    for names in ([name, "scripts"], ["config_full", name]):
        with pytest.raises(ConfigError, match=name.split("_")[0].upper()):
            infer_method(names, {"beta": 0.1})
    assert infer_method([name, "scripts"], {"beta": 0.1}, "dpo").recipe == "dpo"
    assert infer_method(["orpo"], {}, "sft").loss_type is None


@pytest.mark.parametrize("values", [{"diffusion": {"eps": 5e-4}}, {"process_reward_model": True, "packing": False}])
def test_key_of_an_unsupported_method_is_refused_unless_recipe_is_given(values: dict) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(values))}` is a method, which no recipe trains"):
        infer_method(["sft-1b", "examples"], values)
    assert infer_method(["sft-1b", "examples"], values, "sft").recipe == "sft"
    assert infer_method(["sft-1b"], {"process_reward_model": False}).recipe == "sft"


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ("sft", "beta: 0.1"),
        ("sft", "loss_type: ipo"),
        ("sft", "use_peft: true"),
        ("sft", "load_in_4bit: true"),
        ("reward", "num_generations: 4"),
    ],
)
def test_recipe_that_changes_the_method_needs_review(write, minimal_text: str, recipe: str, line: str) -> None:
    assert migrate(write(minimal_text), recipe).is_ready
    migration = migrate(write(f"{minimal_text}{line}\n"), recipe)
    assert not migration.is_ready
    assert any(change.by_hand and "another method" in change.what for change in migration.changes)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mine.yaml", "rl: gdpo"),
        ("mine.yaml", "stage: pt"),
        ("mine.yaml", "rlhf_type: prm"),
        ("cpt.yaml", "adapter: lora\nmax_length: 64"),
        ("mine.yaml", "stage: pt\nfinetuning_type: lora\nmax_length: 64"),
    ],
)
def test_file_of_another_method_is_not_ready(tmp_path: Path, minimal_text: str, name: str, line: str) -> None:
    """It would train by fine-tuning, or all weights instead of an adapter."""
    path = tmp_path / name
    path.write_text(f"{minimal_text}{line}\n")
    assert not migrate(path).is_ready


def test_relative_path_is_resolved_to_infer_method(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "orpo").mkdir()
    (tmp_path / "orpo" / "config.yaml").write_text("model_name_or_path: a/b\ndataset_name: c/d\noutput_dir: o\n")
    monkeypatch.chdir(tmp_path / "orpo")
    assert "loss_type: orpo" in migrate(Path("config.yaml")).text


@pytest.mark.parametrize("key", ["relora", "use_dft_loss", "use_eaft"])
def test_method_that_no_recipe_trains_is_refused(write, minimal_text: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"`{key}` is a method, which no recipe trains"):
        migrate(write(f"{minimal_text}{key}: true\n"))
    assert migrate(write(f"{minimal_text}{key}: false\n")).recipe == "sft"


@pytest.mark.parametrize("line", ["finetuning_type: oft", "adapter: ia3"])
def test_unknown_kind_of_adapter_is_another_method(write, minimal_text: str, line: str) -> None:
    migration = migrate(write(f"{minimal_text}{line}\n"))
    assert not migration.is_ready
    assert any(f"`{line}` names no recipe" in change.what for change in migration.changes)


def test_changed_configuration_of_axolotl_model_is_no_pretraining(write) -> None:
    old = "base_model: a/b\nadapter: lora\ndatasets: [{path: c/d}]\noutput_dir: o\nlearning_rate: 1e-4\n"
    migration = migrate(write(f"{old}model_config: {{output_router_logits: true}}\n"))
    assert (migration.recipe, migration.is_ready) == ("lora", True)
    assert any(change.by_hand and "`model_config`" in change.what for change in migration.changes)
