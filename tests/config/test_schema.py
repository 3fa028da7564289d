"""Sections of a configuration, and defaults of upstream keys."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import trl
from transformers import TrainingArguments

from recipes_lib.config import schema
from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import SECTIONS, read_training


@pytest.mark.parametrize("section", SECTIONS.values())
def test_section_is_frozen_and_small(section: type) -> None:
    assert len(dataclasses.fields(section)) <= 12
    assert section.__dataclass_params__.frozen


@pytest.mark.parametrize(
    ("recipe", "theirs"), [("sft", trl.SFTConfig), ("dpo", trl.DPOConfig), ("grpo", trl.GRPOConfig)]
)
def test_unset_key_has_upstream_value(tmp_path: Path, recipe: str, theirs: type) -> None:
    flags = ["--model_name_or_path=owner/model", "--dataset_name=owner/rows", f"--output_dir={tmp_path}"]
    flags += ["--reward_funcs=[a.b:c]"] if recipe == "grpo" else []
    config = load_config(recipe, flags)
    assert config.read("learning_rate") == theirs(output_dir=str(tmp_path), bf16=False).learning_rate
    assert load_config(recipe, [*flags, "--learning_rate=3e-4"]).read("learning_rate") == 3e-4


def test_errors_locate_a_key_where_the_user_set_it(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text("model_name_or_path: o/m\ndataset_name: o/d\noutput_dir: out\n")
    config = load_config("sft", ["--config", str(file), "--seed=7"])
    assert config.locate("dataset_name") == f"{file}:2"
    assert config.locate("seed") == "--seed"
    assert config.provenance["packing"] == "default"
    assert config.locate("packing") == "packing"
    derived = dataclasses.replace(config, provenance={"seed": "derived: of another key"})
    assert derived.locate("seed") == "seed"


def test_read_training_defaults_match_upstream() -> None:
    sources = [path.read_text() for path in Path(schema.__file__).parents[1].rglob("*.py")]
    read = {key for source in sources for key in re.findall(r'read_training\(\w+, "(\w+)"\)', source)}
    theirs = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    assert "per_device_train_batch_size" in read
    assert {key: read_training({}, key) for key in read} == {key: theirs[key] for key in read}
    assert read_training({"max_steps": 3}, "max_steps") == 3
    with pytest.raises(KeyError):
        read_training({}, "batch_size")
