"""`--print-config` and `--help`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import flatten_config
from recipes_lib.config.table import RECIPE_NAMES, load_table

# Printed defaults must be accepted next to keys that make them ineffective.
MIXTURE = ["--dataset_name=null", "--dataset_mixture=[{name: c/d}]"]
CASES = [
    *((recipe, []) for recipe in RECIPE_NAMES),
    *((recipe, MIXTURE) for recipe in ("sft", "pretrain", "dpo", "distill")),
    ("sft", ["--max_steps", "10", "--warmup_steps", "2"]),
    ("sft", ["--eval_strategy", "no"]),
    ("sft", ["--save_strategy", "epoch", "--run_name", "null", "--pad_token", "#: '\"\u00e9"]),
    ("sft", ["--sample_prompts", '["a # b"]', "--test_split_size", "0.1", "--bf16"]),
]


@pytest.fixture
def print_text(capsys: pytest.CaptureFixture[str]) -> Callable[[str, Sequence[str]], str]:
    """Load a configuration with ``--help`` or ``--print-config``, and return the printed text."""

    def call(recipe: str, arguments: Sequence[str]) -> str:
        with pytest.raises(SystemExit, match=r"^0$"):
            load_config(recipe, arguments)
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize(("recipe", "flags"), CASES)
def test_printed_config_round_trips(print_text, recipes, tmp_path, recipe, flags) -> None:
    arguments = ["--config", str(recipes[recipe]), *flags]
    copy = tmp_path / "printed.yaml"
    copy.write_text(print_text(recipe, [*arguments, "--print-config"]), encoding="utf-8")
    before, after = load_config(recipe, arguments), load_config(recipe, ["--config", str(copy)])
    assert flatten_config(before).items() <= flatten_config(after).items()
    keys = load_table(recipe).keys
    assert all(value == before.training.get(key, keys[key].default) for key, value in after.training.items())


def test_printed_config_shows_provenance_of_every_key(print_text, write, minimal_text: str) -> None:
    path = write(minimal_text)
    flags = ["--config", str(path), "--seed", "3", "--max_steps", "9", "--print-config"]
    lines = print_text("sft", flags).splitlines()
    starts = {line.lstrip("# ").partition(":")[0]: line for line in lines if ":" in line}
    assert starts.keys() >= load_table("sft").keys.keys()
    assert starts["learning_rate"].endswith(f"# {path}:4")
    assert starts["seed"].endswith("# --seed")
    assert starts["packing"].endswith("# default")
    assert starts["save_steps"].endswith("# default (ours)")
    assert starts["num_train_epochs"] == "# num_train_epochs: derived: `max_steps` decides the length"


def test_help_lists_every_key_once_within_the_terminal(print_text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = print_text("sft", ["--help"]).splitlines()
    named = [line.strip().removeprefix("--") for line in lines if line.startswith("  --") and " " not in line.strip()]
    assert sorted(named) == sorted(load_table("sft").keys)
    assert max(map(len, lines)) <= 80
