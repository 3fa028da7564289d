"""Command-line flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import flatten_config
from recipes_lib.errors import ConfigError

BASE = ["--model_name_or_path", "o/m", "--dataset_name", "o/d", "--output_dir", "out"]


def load(*flags: str):
    return load_config("sft", [*BASE, *flags])


def problems(*flags: str):
    with pytest.raises(ConfigError) as caught:
        load(*flags)
    return caught.value.problems


@pytest.mark.parametrize("flags", [["--learning_rate", "1e-5"], ["--learning_rate=1e-5"], ["--learning-rate", "1e-5"]])
def test_flag_spellings_are_equivalent(flags: list[str]) -> None:
    config = load(*flags)
    assert config.path is None
    assert config.training["learning_rate"] == 1e-5
    assert config.provenance["learning_rate"] == "--learning_rate"


def test_leading_file_is_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("learning_rate: 1e-5\n")
    config = load_config("sft", [str(tmp_path / "a.yaml"), *BASE])
    assert (config.path, config.training["learning_rate"]) == (tmp_path / "a.yaml", 1e-5)


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        (["--torch_compile", "--packing", "false"], {"torch_compile": True, "packing": False}),
        (["--max_steps", "-1"], {"max_steps": -1}),
        (["--sample_prompts", '["a: b", "c"]'], {"sample_prompts": ["a: b", "c"]}),
        (["--lr_scheduler_kwargs", '{"num_cycles": 2}'], {"lr_scheduler_kwargs": {"num_cycles": 2}}),
        (["--run_name", "a: [b"], {"run_name": "a: [b"}),
        (["--pad_token", "null"], {"pad_token": None}),
    ],
    ids=["bare flag", "negative number", "list", "mapping", "text is not YAML", "null"],
)
def test_flag_value_is_parsed(flags: list[str], values: dict[str, object]) -> None:
    config = flatten_config(load(*flags))
    assert {key: config[key] for key in values} == values


def test_file_value_overridden_by_flag_is_not_validated(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("model_name_or_path: ./gone\ndataset_name: c/d\noutput_dir: o\n")
    assert load_config("sft", ["--config", str(path), "--model_name_or_path", "a/b"]).model.model_name_or_path == "a/b"


@pytest.mark.parametrize(
    ("flags", "where", "word"),
    [
        (["--learning_rate"], "--learning_rate", "no value"),
        (["--learning_rate", "1e-5", "--learning_rate", "1e-4"], "--learning_rate", "repeated"),
        (["recipe.yaml"], "recipe.yaml", "not a flag"),
        (["--sample_prompts", "[a"], "--sample_prompts", "expected"),
        (["--config"], "--config", "no value"),
        (["--config", "~data/sft.yaml"], "~data/sft.yaml", "no such file"),
        (["--no-packing"], "--no_packing", "unknown"),
        (["--learning_rate", "x"], "--learning_rate", "'x'"),
    ],
)
def test_invalid_flag_is_reported(flags: list[str], where: str, word: str) -> None:
    (problem,) = problems(*flags)
    assert problem.where == where
    assert word in problem.found
    assert problem.remedy


def test_file_beside_a_missing_one_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("output_dir: o\n")
    assert problems("--config", str(tmp_path / "sft.yml"))[0].remedy == f"did you mean {tmp_path / 'sft.yaml'}?"
    assert problems("--config", str(tmp_path / "no" / "sft.yml"))[0].remedy == "give the path of a YAML file"


def test_shell_quoting_is_suggested_only_for_syntax_errors() -> None:
    assert problems("--sample_prompts", "[a")[0].remedy == "quote the JSON for the shell"
    assert problems("--sample_prompts", '["\\ud83d hi"]')[0].remedy == "write the character itself"
