"""Keys of `recipes synthesize`; incompatible keys are refused before a model is loaded."""

from __future__ import annotations

import pytest

from recipes_lib.config.synthesis_keys import SynthesisConfig
from recipes_lib.errors import ConfigError

BASE = ["--model_name_or_path", "m/m", "--dataset_name", "d", "--output_dir", "o"]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--max_cost", "3"], "input_price"),
        (["--min_score", "3"], "write `judge: ...`"),
        (["--min_agreement", "0.5"], "num_answers: 2"),
        (["--judge", "reward/model", "--judge_prompt", "p"], "URL#NAME"),
        (["--judge", "http://h/v1"], "http://h/v1#NAME"),
        (["--judge", "./gone"], "does not exist: './gone'"),
        (["--base_url", "http://h/v1", "--engine", "vllm"], "keep one"),
        (["--diversity", "2"], "diversity"),
        (["--openai_api_key", "sk-1"], "openai_api_key"),
    ],
)
def test_incompatible_keys_are_refused(flags: list[str], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        SynthesisConfig.parse([*BASE, *flags])


def test_prompt_of_a_judge_is_accepted() -> None:
    flags = ["--judge", "http://h/v1#name", "--judge_prompt", __file__]
    assert SynthesisConfig.parse([*BASE, *flags]).judge_prompt == __file__
