"""``trust_remote_code``: code runs from pinned commits and local folders only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes_lib.config.schema import ModelConfig, TokensConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.loading import list_code, load_causal_lm, load_model_config, load_tokenizer, verify_remote_code

COMMIT = "0" * 40


def catch_refusal(config: ModelConfig, load: Any = verify_remote_code) -> str:
    with pytest.raises(ConfigError) as caught:
        load(config)
    (problem,) = caught.value.problems
    assert problem.where == "trust_remote_code"
    return f"{problem.found}; {problem.remedy}"


@pytest.mark.parametrize("revision", [None, "main", "v1.0", "0" * 39])
def test_remote_code_requires_commit_of_model(revision: str | None) -> None:
    config = ModelConfig(model_name_or_path="org/model", trust_remote_code=True, model_revision=revision)
    loads = (load_model_config, lambda c: load_causal_lm(c, "sdpa"), lambda c: load_tokenizer(c, TokensConfig()))
    for load in loads:
        assert "set model_revision to the 40-digit commit" in catch_refusal(config, load)


@pytest.mark.parametrize("tokens", [{"tokenizer_name_or_path": "org/tokens"}, {"tokenizer_revision": "main"}])
def test_remote_code_requires_commit_of_tokenizer(tokens: dict[str, str]) -> None:
    config = ModelConfig(model_name_or_path="org/model", trust_remote_code=True, model_revision=COMMIT, **tokens)
    assert "set tokenizer_revision to the 40-digit commit" in catch_refusal(config)


@pytest.mark.parametrize(
    ("file", "auto_map"),
    [
        ("config.json", {"AutoConfig": "own.Config", "AutoModelForCausalLM": "other/repo--modeling.Model"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["own.Slow", "other/repo--fast.Fast"]}),
        ("tokenizer_config.json", ["other/repo--slow.Slow", None]),
    ],
)
def test_code_of_another_repository_is_refused(tmp_path: Path, file: str, auto_map: Any) -> None:
    (tmp_path / file).write_text(json.dumps({"auto_map": auto_map}))
    config = ModelConfig(model_name_or_path=str(tmp_path), trust_remote_code=True)
    refusal = catch_refusal(config)
    assert f"{tmp_path} runs code of another repository, other/repo" in refusal
    assert "remove `other/repo--`" in refusal


@pytest.mark.parametrize("text", ['{"auto_map": {"AutoConfig": "own.Config"}}', "{}", "{", '{"auto_map": 3}'])
def test_code_in_local_folder_is_accepted(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    verify_remote_code(ModelConfig(model_name_or_path=str(tmp_path), trust_remote_code=True))


def test_remote_code_is_not_checked_if_disabled() -> None:
    verify_remote_code(ModelConfig(model_name_or_path="org/model"))


def test_pinned_repository_is_loaded() -> None:
    pinned = ModelConfig(model_name_or_path="org/model", trust_remote_code=True, model_revision=COMMIT)
    with pytest.raises(ConfigError) as caught:
        load_model_config(pinned)
    assert caught.value.problems[0].where == "model_name_or_path"


def test_list_code_follows_auto_map_and_relative_imports(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "own.Config", "AutoModel": "other/repo--foreign.Model", "AutoTokenizer": ["gone.T", None]}
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    assert list_code(tmp_path) == set()
    texts = {"own.py": "from .near import a\nimport beside", "near.py": "from .own import Config", "beside.py": ""}
    for name, text in {**texts, "foreign.py": ""}.items():
        (tmp_path / name).write_text(text)
    assert list_code(tmp_path) == {"own.py", "near.py"}
    (tmp_path / "config.json").write_text("{")
    assert list_code(tmp_path) == set()
