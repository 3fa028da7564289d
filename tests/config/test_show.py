from __future__ import annotations

import dataclasses

import pytest

from recipes_lib.config.loader import load_config, parse_command
from recipes_lib.config.schema import flatten_config
from recipes_lib.config.table import RECIPE_NAMES, load_table


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--max_steps", "10", "--warmup_steps", "2"],
        ["--eval_strategy", "no"],
        ["--save_strategy", "epoch", "--run_name", "null", "--pad_token", "#: '\"\u00e9"],
        ["--sample_prompts", '["a # b"]', "--test_split_size", "0.1", "--bf16"],
    ],
)
def test_the_printed_configuration_loads_and_is_the_same_run(write, sound: str, tmp_path, flags: list[str]) -> None:
    arguments = ["--config", str(write(sound)), *flags]
    printed = parse_command("sft", [*arguments, "--print-config"])
    copy = tmp_path / "printed.yaml"
    copy.write_text(printed, encoding="utf-8")
    before, after = load_config("sft", arguments), load_config("sft", ["--config", str(copy)])
    for section in ("data", "tokens", "model", "evaluation"):
        assert getattr(before, section) == getattr(after, section)
    keys = load_table("sft").keys
    assert all(after.training[key] == before.training.get(key, keys[key].default) for key in after.training)
    assert dict(before.training).items() <= dict(after.training).items()


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_what_any_recipe_prints_loads_again(recipe: str, tmp_path) -> None:
    """Options at their default ask for nothing, so that they stand beside whatever leaves them without effect."""
    arguments = ["--output_dir=o", "--model_name_or_path=a/b", "--dataset_mixture=[{name: c/d}]"]
    if recipe == "pretrain":
        arguments.append("--max_length=64")
    if recipe == "distill":
        arguments.append("--teacher_model_name_or_path=e/f")
    if recipe in ("ppo", "rloo", "grpo"):
        arguments[-1] = "--dataset_name=c/d"
        arguments.append("--reward_model_name_or_path=g/h")
    copy = tmp_path / f"{recipe}.yaml"
    copy.write_text(parse_command(recipe, [*arguments, "--print-config"]), encoding="utf-8")
    assert (
        flatten_config(load_config(recipe, [f"--config={copy}"])).items()
        >= flatten_config(load_config(recipe, arguments)).items()
    )


def test_every_key_is_printed_with_its_provenance(write, sound: str) -> None:
    path = write(sound)
    lines = parse_command(
        "sft", ["--config", str(path), "--seed", "3", "--max_steps", "9", "--print-config"]
    ).splitlines()
    starts = {line.lstrip("# ").partition(":")[0]: line for line in lines if ":" in line}
    assert starts.keys() >= load_table("sft").keys.keys()
    assert starts["learning_rate"].endswith(f"# {path}:4")
    assert starts["seed"].endswith("# --seed")
    assert starts["packing"].endswith("# default")
    assert starts["save_steps"].endswith("# default (ours)")
    assert starts["num_train_epochs"] == "# num_train_epochs: derived: `max_steps` decides the length"


def test_help_names_every_key_once() -> None:
    lines = parse_command("sft", ["--help"]).splitlines()
    named = [line.strip().removeprefix("--") for line in lines if line.startswith("  --") and " " not in line.strip()]
    assert sorted(named) == sorted(load_table("sft").keys)
    assert max(map(len, lines)) <= 120


def test_sections_hold_only_their_own_keys(write, sound: str) -> None:
    config = load_config("sft", ["--config", str(write(sound))])
    for section in ("data", "tokens", "model", "evaluation"):
        names = {field.name for field in dataclasses.fields(getattr(config, section))}
        assert not names & set(config.training)
