"""Configuration of `clean`, `eval` and `synthesize`: flags, problems, and the printed configuration."""

from __future__ import annotations

import pytest
from tests.config.conftest import PARSERS

from recipes_lib.config.loader import expand_paths
from recipes_lib.errors import ConfigError

MINIMAL = {
    "corpus": "sources: [{name: web.jsonl}]\noutput_dir: o\nnum_samples: 1\n",
    "eval": "model_name_or_path: a/b\ntasks: [core]\noutput_dir: o\nseed: 1\n",
    "synthesize": "model_name_or_path: a/b\ndataset_name: c/d\noutput_dir: o\nseed: 1\n",
}
REQUIRED = {
    "corpus": {"sources", "output_dir"},
    "eval": {"model_name_or_path", "tasks"},
    "synthesize": {"model_name_or_path", "dataset_name", "output_dir"},
}


@pytest.mark.parametrize("command", MINIMAL)
class TestCommand:
    def test_flags_override_file_and_printed_config_round_trips(
        self, parse, monkeypatch, tmp_path, capsys, command
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        name = "num_samples" if command == "corpus" else "seed"
        flags = [f"--{name}=2", "--output_dir=~/x"]
        config = parse(command, MINIMAL[command], *flags)
        assert (getattr(config, name), config.output_dir) == (2, f"{tmp_path}/x")
        assert config.path == tmp_path / f"{command}.yaml"
        with pytest.raises(SystemExit, match=r"^0$"):
            parse(command, MINIMAL[command], *flags, "--print-config")
        printed = capsys.readouterr().out
        lines = {line.partition(":")[0]: line for line in printed.splitlines()}
        assert lines[name].endswith(f"# --{name}")
        assert lines["model_name_or_path" if "model" in MINIMAL[command] else "sources"].endswith(f"{config.path}:1")
        assert parse(command, printed) == config

    def test_all_problems_have_locations_and_repeat_no_secret(self, parse, tmp_path, command) -> None:
        with pytest.raises(ConfigError) as caught:
            parse(command, "outptu_dir: x\n", "--seeed", "1", "--tokenizer_name_or_path", "hf_" + "a" * 34)
        problems = caught.value.problems
        path = str(tmp_path / f"{command}.yaml")
        assert [problem.where for problem in problems[:2]] == [f"{path}:1", "--seeed"]
        assert "did you mean `output_dir`" in problems[0].remedy
        assert {problem.found for problem in problems if problem.where == path} >= {
            f"`{key}` is missing" for key in REQUIRED[command]
        }
        assert "a" * 34 not in str(caught.value)

    def test_help_precedes_reading_and_unreadable_file_is_one_problem(self, tmp_path, capsys, command) -> None:
        with pytest.raises(SystemExit, match=r"^0$"):
            PARSERS[command](["--config", "/gone", "--help"])
        assert "usage: recipes " in capsys.readouterr().out
        for name in ("gone.yaml", "."):
            with pytest.raises(ConfigError) as caught:
                PARSERS[command](["--config", str(tmp_path / name)])
            assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("command", "key", "given", "found"),
    [
        *((command, "output_dir", "$HOME/o", "variables are not expanded") for command in MINIMAL),
        *((command, "output_dir", "file", "is an existing file") for command in MINIMAL),
        ("eval", "include_path", "gone", "there is no folder 'gone'"),
        ("eval", "tokenizer_name_or_path", "a/b/c", "neither an existing path nor a Hub id"),
        ("synthesize", "dataset_name", "./gone.jsonl", "does not exist"),
        ("synthesize", "refusals_path", "gone", "does not exist"),
        ("corpus", "language_model_path", "gone", "does not exist"),
        ("corpus", "tokenizer_name_or_path", "./gone", "does not exist"),
    ],
)
def test_paths_are_those_of_recipes(parse, monkeypatch, tmp_path, command, key, given, found) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    parse(command, MINIMAL[command])
    with pytest.raises(ConfigError, match=found):
        parse(command, MINIMAL[command], f"--{key}={given}")


def test_endpoint_names_its_models(parse) -> None:
    url = "--base_url=http://localhost:8000/v1/chat/completions"
    config = parse("eval", MINIMAL["eval"], url, "--apply_chat_template", "--model_name_or_path=a/b:free")
    assert config.model_name_or_path == "a/b:free"


def test_expand_paths_expands_home_in_lists(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_paths(["~/a", "b", None]) == [f"{tmp_path}/a", "b", None]


@pytest.mark.parametrize(
    ("command", "key", "given"),
    [
        ("eval", "model_name_or_path", "a/b"),
        ("synthesize", "model_name_or_path", "a/b"),
        ("synthesize", "dataset_name", "c/d"),
    ],
)
def test_commit_in_file_is_not_of_repository_of_flag(parse, command, key, given) -> None:
    revision = f"{key.partition('_')[0]}_revision"
    text = f"{MINIMAL[command]}{revision}: {'0' * 40}\n"
    assert getattr(parse(command, text, f"--{key}=o/other"), revision) is None
    assert getattr(parse(command, text, f"--{key}={given}"), revision) == "0" * 40
