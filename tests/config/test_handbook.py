"""Every recipe that alignment-handbook published migrates, loads and trains by its own method.

``handbook_recipes.json`` has their keys and values as of July 2025; a short chat template stands in for theirs.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import yaml
from tests.recipes.preferences import load_recipe
from tests.rows import read_events, write_rows

from recipes_lib.boundary import run_command
from recipes_lib.config.loader import check_text, load_config
from recipes_lib.config.migration.migrate import migrate
from recipes_lib.config.schema import flatten_config

RECIPES = json.loads(Path(__file__).with_name("handbook_recipes.json").read_text(encoding="utf-8"))
TODAY = {
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
"""Keys that are compared apart, that say how upstream prepares or launches, or that are left to the user."""
TRAINED = {
    "zephyr-7b-beta/sft/config_full": None,
    "zephyr-7b-beta/sft/config_qlora": None,
    "zephyr-7b-beta/dpo/config_full": "sigmoid",
    "zephyr-141b-A35b/orpo/config_full": "orpo",
    "smollm3/dpo/apo": "apo_zero",
}
"""One of each method, and its loss."""


def recipe_of(name: str) -> str:
    kind, file = name.split("/")[1:]
    return "dpo" if kind in ("dpo", "orpo") else "lora" if "qlora" in file else "sft"


@pytest.fixture
def migrated(tmp_path):
    """Write a recipe of the handbook under its name and migrate it."""

    def migrate_recipe(name: str):
        path = tmp_path / f"{name.removesuffix('.yaml')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(RECIPES[f"{name.removesuffix('.yaml')}.yaml"], sort_keys=False))
        return path, migrate(path)

    return migrate_recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_the_handbook_keeps_its_method_and_its_values(name: str, migrated) -> None:
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
            assert keys[TODAY.get(key, key)] == expected, key
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


def test_with_the_recipe_given_orpo_is_orpo_still(migrated) -> None:
    path, _ = migrated("zephyr-141b-A35b/orpo/config_full")
    assert yaml.safe_load(migrate(path, "dpo").text)["loss_type"] == "orpo"


@pytest.mark.parametrize("name", TRAINED)
def test_a_method_of_the_handbook_trains(name: str, migrated, tiny_model_dir, tmp_path, monkeypatch) -> None:
    _, migration = migrated(name)
    recipe, rows = migration.recipe, []
    for number in range(8):
        chats = [
            [{"role": "user", "content": f"hello {number}"}, {"role": "assistant", "content": answer}]
            for answer in ("hi", "go away")
        ]
        rows.append(
            dict(zip(("chosen", "rejected"), chats, strict=True)) if recipe == "dpo" else {"messages": chats[0]}
        )
    data = tmp_path / "rows.jsonl"
    write_rows(data, rows)
    keys = yaml.safe_load(migration.text)
    # What is of this machine and of these rows; the method stays.
    of_data = ("dataset_", "num_train_epochs")
    keys = {key: value for key, value in keys.items() if not key.startswith(of_data)} | {
        "model_name_or_path": str(tiny_model_dir),
        "model_revision": None,
        "dataset_name": str(data),
        "test_split_size": 2,
        "output_dir": str(tmp_path / "out"),
        "prepared_dir": str(tmp_path / "prepared"),
        "attn_implementation": "sdpa",
        "max_length": 128,
        "max_steps": 2,
        "warmup_steps": 1,
        "logging_steps": 1,
        "num_sample_prompts": 0,
        "push_to_hub": False,
        "report_to": "none",
    }
    if importlib.util.find_spec("bitsandbytes") is None:
        keys.pop("load_in_4bit", None)
    if any(part in keys.get("optim", "") for part in ("8bit", "paged")):
        keys["optim"] = "adamw_torch"
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(keys))
    monkeypatch.setattr("recipes_lib.training.evaluation.build.measure_matmul_flops", lambda dtype: 1e9)
    script = load_recipe(recipe)
    monkeypatch.setattr("recipes_lib.publish.final_model.finish_run", lambda run: None)
    config = load_config(recipe, ["--config", str(path)])
    assert (config.adapter.use_peft, recipe == "dpo" and config.read("loss_type")) == (
        "qlora" in name,
        recipe == "dpo" and [TRAINED[name]],
    )
    assert run_command(lambda: script.main(config)) == 0
    assert read_events(tmp_path / "out")[-1]["step"] == 2
