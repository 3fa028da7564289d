"""Keys of `recipes synthesize`: strict, and contradictions are found before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes_lib.config.synthesis_keys import SynthesisConfig, parse_synthesis_command
from recipes_lib.config.table import load_table
from recipes_lib.errors import ConfigError

BASE = ["--model_name_or_path", "m/m", "--dataset_name", "d", "--output_dir", "o"]


def test_a_file_and_flags_make_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "synthesize.yaml"
    path.write_text("model_name_or_path: m/m\ndataset_name: owner/d\noutput_dir: o\nlanguages: [en]\nnum_answers: 4\n")
    config = parse_synthesis_command(["--config", str(path), "--num_answers", "2"])
    assert isinstance(config, SynthesisConfig)
    assert (config.num_answers, config.languages, config.path) == (2, ["en"], path)
    assert set(config.list_values()) == set(load_table("synthesize").keys)
    printed = parse_synthesis_command(["--config", str(path), "--print-config"])
    assert isinstance(printed, str)
    assert "num_answers: 4" in printed


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--max_cost", "3"], "input_price"),
        (["--min_score", "3"], "name a judge"),
        (["--min_agreement", "0.5"], "num_answers: 2"),
        (["--judge", "reward/model", "--judge_prompt", "p"], "URL#NAME"),
        (["--judge", "http://h/v1"], "http://h/v1#NAME"),
        (["--base_url", "http://h/v1", "--engine", "vllm"], "leave one of the two out"),
        (["--num_answer", "3"], "did you mean `num_answers`"),
        (["--diversity", "2"], "diversity"),
        (["--openai_api_key", "sk-1"], "openai_api_key"),
    ],
)
def test_a_contradiction_is_one_error(flags: list[str], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        parse_synthesis_command([*BASE, *flags])


def test_what_is_missing_is_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_synthesis_command(["--model_name_or_path", "./absent"])
    assert len(caught.value.problems) == 3
