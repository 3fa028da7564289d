from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import trl

from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import SECTIONS, RecipeConfig


def test_sections_are_the_section_fields_of_a_recipe() -> None:
    fields = {field.name for field in dataclasses.fields(RecipeConfig)}
    assert set(SECTIONS) <= fields


@pytest.mark.parametrize("section", SECTIONS.values())
def test_a_section_is_frozen_and_has_at_most_twelve_fields(section: type) -> None:
    assert len(dataclasses.fields(section)) <= 12
    assert section.__dataclass_params__.frozen


@pytest.mark.parametrize(
    ("stage", "theirs"), [("sft", trl.SFTConfig), ("dpo", trl.DPOConfig), ("grpo", trl.GRPOConfig)]
)
def test_a_key_that_nobody_wrote_has_upstreams_value(tmp_path: Path, stage: str, theirs: type) -> None:
    flags = ["--model_name_or_path=owner/model", "--dataset_name=owner/rows", f"--output_dir={tmp_path}"]
    flags += ["--reward_funcs=[a.b:c]"] if stage == "grpo" else []
    config = load_config(stage, flags)
    assert config.read("learning_rate") == theirs(output_dir=str(tmp_path), bf16=False).learning_rate
    assert load_config(stage, [*flags, "--learning_rate=3e-4"]).read("learning_rate") == 3e-4


def test_no_key_is_in_two_sections() -> None:
    names = [field.name for section in SECTIONS.values() for field in dataclasses.fields(section)]
    assert len(names) == len(set(names))
