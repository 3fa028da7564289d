"""Keys of `recipes eval`."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes_lib.errors import ConfigError

MINIMAL = "model_name_or_path: a/b\ntasks: [core]\n"


def test_results_folder_defaults_to_model_folder(parse, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert parse("eval", f"model_name_or_path: {tmp_path}/m\ntasks: [x]\n").folder == tmp_path / "m" / "eval"
    assert parse("eval", f"{MINIMAL}output_dir: out\n").folder == Path("out")


def test_tokenizer_with_code_may_be_a_local_folder(parse, tmp_path: Path) -> None:
    text = f"model_name_or_path: {tmp_path}\ntasks: [x]\ntrust_remote_code: true\ntokenizer_name_or_path: {tmp_path}\n"
    assert parse("eval", text).trust_remote_code


def test_missing_model_is_the_only_problem(parse) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("eval", "tasks: [core]\n")
    assert [problem.found for problem in caught.value.problems] == ["`model_name_or_path` is missing"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("task: [core]\nmodel_name_or_path: a/b\n", "did you mean `tasks`"),
        (MINIMAL.replace("[core]", "[]"), "`tasks` is empty"),
        (f"{MINIMAL}output_dir: o\n".replace("a/b", "a/b/c"), "neither an existing path nor a Hub id: 'a/b/c'"),
        (f"{MINIMAL}output_dir: o\ntokenizer_name_or_path: ./gone\n", "does not exist: './gone'"),
        (f"{MINIMAL}output_dir: o\ntrust_remote_code: true\ntokenizer_name_or_path: c/d\n", "run code of c/d"),
        (f"{MINIMAL}limit: 0\n", "`limit` is 0"),
        (f"{MINIMAL}include_path: [gone]\n", "no folder 'gone'"),
        ("tasks: [core]\nmodel_name_or_path: ./gone\n", "does not exist: './gone'"),
        (MINIMAL, "no folder here for the results"),
        (f"{MINIMAL}output_dir: o\nbase_url: http://localhost/v1/completions\n", "needs the tokenizer"),
        (f"{MINIMAL}output_dir: o\nbase_url: http://localhost/v1/chat/completions\n", "expects messages"),
        (f"{MINIMAL}output_dir: o\nbase_url: http://localhost/v1\nengine: vllm\n", "`engine` and `base_url`"),
    ],
)
def test_invalid_config_is_refused_with_remedy(parse, text: str, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        parse("eval", text)
