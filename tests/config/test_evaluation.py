"""The keys of an evaluation: every problem at once, with its place and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes_lib.config.evaluation import EVAL_SECTIONS, EvalConfig, parse_eval_command
from recipes_lib.config.table import load_table
from recipes_lib.errors import ConfigError


def parse(folder: Path, text: str, *flags: str) -> Any:
    path = folder / "eval.yaml"
    path.write_text(text)
    return parse_eval_command(["--config", str(path), *flags])


def test_every_field_is_a_key_with_its_default() -> None:
    keys = load_table("eval").keys
    fields = {name: kind for section in EVAL_SECTIONS.values() for name, kind in section.__dataclass_fields__.items()}
    assert keys.keys() == fields.keys()
    assert all(len(section.__dataclass_fields__) <= 12 for section in EVAL_SECTIONS.values())


def test_flags_go_over_the_file_and_results_into_the_model(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    config = parse(tmp_path, f"model_name_or_path: {tmp_path}/m\ntasks: [core]\nlimit: 5\n", "--limit", "7")
    assert (config.limit, config.tasks, config.folder) == (7, ["core"], tmp_path / "m" / "eval")
    assert parse(tmp_path, "model_name_or_path: a/b\ntasks: [x]\noutput_dir: out\n").folder == Path("out")


def test_a_file_that_cannot_be_read_is_the_only_problem(tmp_path: Path) -> None:
    for name in ("gone.yaml", "."):
        with pytest.raises(ConfigError) as caught:
            parse_eval_command(["--config", str(tmp_path / name)])
        assert len(caught.value.problems) == 1


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, "task: [core]\nlimit: 0\ninclude_path: [gone]\nmodel_name_or_path: ./gone\n")
    told = str(caught.value)
    for part in (
        "did you mean `tasks`",
        "`tasks` is missing",
        "`limit` is 0",
        "no folder 'gone'",
        "there is no './gone'",
    ):
        assert part in told
    with pytest.raises(ConfigError, match="no folder here for the results"):
        parse(tmp_path, "model_name_or_path: a/b\ntasks: [core]\n")
    with pytest.raises(ConfigError, match="needs the tokenizer"):
        parse(
            tmp_path, "model_name_or_path: a\ntasks: [core]\noutput_dir: o\nbase_url: http://localhost/v1/completions\n"
        )


def test_what_is_printed_loads_again(tmp_path: Path) -> None:
    text = parse(tmp_path, "model_name_or_path: a/b\ntasks: [core]\noutput_dir: o\n", "--print_config")
    again = parse(tmp_path, text)
    assert isinstance(again, EvalConfig)
    assert (again.tasks, again.output_dir) == (["core"], "o")
    assert "--confirm_run_unsafe_code" in parse_eval_command(["--help"])
