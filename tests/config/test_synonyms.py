from __future__ import annotations

import pytest

from recipes_lib.config.loader import read_synonyms
from recipes_lib.config.migration.renames import read_known
from recipes_lib.config.table import STAGES, load_table

SYNONYMS = read_synonyms()
KEYS = {key for stage in STAGES for key in load_table(stage).keys}


def test_a_synonym_is_no_key_and_stands_for_one() -> None:
    assert set(SYNONYMS.values()) <= KEYS
    assert not SYNONYMS.keys() & KEYS
    # What has a row of its own in the lists of retired keys is explained there.
    assert not [name for stage in STAGES for name in SYNONYMS if name in read_known(stage)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["lr", "batch_size", "epochs", "peft_config", "seq_len", "pref_beta", "group_size"])
def test_a_synonym_leads_to_a_key_of_the_stage_or_says_why_not(problems_of, stage: str, name: str) -> None:
    (problem,) = problems_of(flags=[f"--{name}", "1"], stage=stage)
    key, keys = SYNONYMS[name], load_table(stage).keys
    assert (f"did you mean `{key}`?" in problem.remedy) is (key in keys)
    assert key in keys or f"`{key}`" in problem.remedy
