from __future__ import annotations

import dataclasses

import pytest

from recipes_lib.config.schema import SECTIONS, RecipeConfig


def test_sections_are_the_section_fields_of_a_recipe() -> None:
    fields = {field.name for field in dataclasses.fields(RecipeConfig)}
    assert set(SECTIONS) <= fields


@pytest.mark.parametrize("section", SECTIONS.values())
def test_a_section_is_frozen_and_has_at_most_twelve_fields(section: type) -> None:
    assert len(dataclasses.fields(section)) <= 12
    assert section.__dataclass_params__.frozen


def test_no_key_is_in_two_sections() -> None:
    names = [field.name for section in SECTIONS.values() for field in dataclasses.fields(section)]
    assert len(names) == len(set(names))
