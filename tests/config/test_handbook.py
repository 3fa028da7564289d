"""Migration of the recipes published by alignment-handbook.

``handbook_recipes.json`` has their keys and values as of July 2025, with a shortened chat template.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from recipes_lib.config.loader import check_text
from recipes_lib.config.migration.migrate import migrate
from recipes_lib.config.schema import flatten_config

RECIPES = json.loads(Path(__file__).with_name("handbook_recipes.json").read_text(encoding="utf-8"))
CURRENT_NAMES = {
    "torch_dtype": "dtype",
    "max_seq_length": "max_length",
    "warmup_ratio": "warmup_steps",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "hub_model_revision": "hub_revision",
}
DROPPED = {
    *("assistant_only_loss", "chat_template", "dataset_mixer", "dataset_mixture", "dataset_splits"),
    *("average_tokens_across_devices", "dataset_kwargs", "dataset_num_proc", "do_eval", "do_train"),
    *("max_prompt_length", "overwrite_output_dir", "packing_strategy", "padding_free", "remove_unused_columns"),
    *("trust_remote_code", "use_liger_kernel"),
}
"""Keys that are compared separately, concern preparation or launching, or need review."""


def recipe_of(name: str) -> str:
    kind, file = name.split("/")[1:]
    return "dpo" if kind in ("dpo", "orpo") else "lora" if "qlora" in file else "sft"


@pytest.fixture
def migrated(tmp_path):
    """Write a handbook recipe under its published name and migrate it."""

    def migrate_recipe(name: str):
        path = tmp_path / f"{name.removesuffix('.yaml')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(RECIPES[f"{name.removesuffix('.yaml')}.yaml"], sort_keys=False))
        return path, migrate(path)

    return migrate_recipe


@pytest.mark.parametrize("name", RECIPES)
def test_handbook_recipe_keeps_method_and_values(name: str, migrated) -> None:
    path, migration = migrated(name)
    assert migration.recipe == recipe_of(name)
    assert migration.is_ready
    config = check_text(migration.recipe, migration.text, path)
    keys = flatten_config(config)
    old = RECIPES[name]
    for key, value in old.items():
        if key not in DROPPED and value is not None:
            # TRL switches dropout off before it compares log-probabilities.
            expected = 0 if key == "lora_dropout" and migration.recipe == "dpo" else value
            expected = [expected] if key == "loss_type" else expected
            assert keys[CURRENT_NAMES.get(key, key)] == expected, key
    if migration.recipe == "dpo":
        assert config.read("loss_type") == ["orpo" if "/orpo/" in name else old.get("loss_type", "sigmoid")]
    else:
        assert config.tokens.loss_on == ("assistant" if old.get("assistant_only_loss") else None)
    if "chat_template" in old:
        assert Path(keys["chat_template_path"]).read_text(encoding="utf-8") == old["chat_template"]
    datasets = old.get("dataset_mixture", {}).get("datasets", [])
    assert [entry["name"] for entry in keys["dataset_mixture"] or []] == [entry["id"] for entry in datasets]
    path.write_text(migration.text)
    again = migrate(path, migration.recipe)
    assert (again.text, [change for change in again.changes if change.line]) == (migration.text, [])


def test_orpo_loss_is_kept_with_explicit_recipe(migrated) -> None:
    path, _ = migrated("zephyr-141b-A35b/orpo/config_full")
    assert yaml.safe_load(migrate(path, "dpo").text)["loss_type"] == "orpo"
