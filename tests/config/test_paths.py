"""Paths and Hub names in configurations; files of the package: the working directory comes first."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.forked import ROOT

from recipes_lib.config.loader import load_config
from recipes_lib.config.paths import expand_home, find_launch_file, find_recipe, find_shipped, is_local, names_path
from recipes_lib.data.sources.local_files import COMPRESSIONS, READERS
from recipes_lib.errors import ConfigError, MissingPath


@pytest.mark.parametrize(
    "line",
    [
        "chat_template_path: template.jinja",
        "chat_template_path: template",
        "replay_from: gone",
        "tokenizer_name_or_path: ./tokenizer",
        "dataset_test_split: held_out.jsonl",
        "dataset_test_split: ./test",
        "dataset_test_split: data/test",
        "prepared_dir: {file}",
        "prepared_dir: ~cachedir/x",
    ],
)
def test_missing_or_invalid_path_is_refused(problems_of, tmp_path: Path, line: str) -> None:
    (tmp_path / "file").touch()
    (problem,) = problems_of(line.format(file=tmp_path / "file") + "\n")
    assert problem.where == "recipe.yaml:5"


def test_chat_template_of_the_hub_is_downloaded_first(problems_of) -> None:
    """TRL also accepts a repository."""
    (problem,) = problems_of("chat_template_path: owner/model\n")
    assert "hf download owner/model chat_template.jinja" in problem.remedy


@pytest.mark.parametrize("split", ["test", "test_sft", "train[90%:]", "v1.5"])
def test_bare_word_is_a_split_name(problems_of, split: str) -> None:
    assert not names_path(split)
    assert not problems_of(f"dataset_test_split: {split}\n")


@pytest.mark.parametrize("suffix", READERS)
def test_names_path_knows_every_readable_suffix(suffix: str) -> None:
    assert names_path(f"held_out{suffix}")
    assert all(names_path(f"held_out{suffix}{compression}") for compression in COMPRESSIONS)


@pytest.mark.parametrize("name", ["./gone", "~/gone-for-ever", "/gone", "gone.jsonl", "a/b/c", "a b", "''", "C:\\data"])
def test_dataset_name_must_be_path_or_hub_id(problems_of, name: str) -> None:
    text = f"model_name_or_path: a/b\noutput_dir: o\ndataset_name: {name}\n"
    (problem,) = problems_of(text=text)
    assert problem.where == "recipe.yaml:3"
    # What an earlier stage of a pipeline may yet write.
    assert isinstance(problem, MissingPath) is (name not in ("a b", "''"))


@pytest.mark.parametrize("name", ["https://huggingface.co/datasets/owner/name", "s3://bucket/rows.jsonl"])
def test_url_is_refused_with_its_remedy(problems_of, name: str) -> None:
    (problem,) = problems_of(text=f"model_name_or_path: a/b\noutput_dir: o\ndataset_name: {name}\n")
    assert problem.remedy.startswith("URLs are not read")


def test_mixture_entry_may_be_a_name(write, problems_of) -> None:
    path = write("model_name_or_path: a/b\noutput_dir: o\ndataset_mixture: [a/b, {name: c/d, repeat: 2}]\n")
    names = [{"name": "a/b"}, {"name": "c/d", "repeat": 2}]
    assert load_config("sft", ["--config", str(path)]).data.dataset_mixture == names
    text = "model_name_or_path: a/b\noutput_dir: o\ndataset_mixture:\n- a/b\n- gone.jsonl\n- ''\n"
    assert [problem.where for problem in problems_of(text=text)] == ["recipe.yaml:5", "recipe.yaml:6"]
    text = "model_name_or_path: a/b\noutput_dir: o\ndataset_mixture: gone.jsonl\n"
    assert [problem.where for problem in problems_of(text=text)] == ["recipe.yaml:3"]


@pytest.mark.parametrize("line", ["output_dir: $SCRATCH/run", "prepared_dir: ${TMP}", "dataset_name: $DATA/x.jsonl"])
def test_variable_in_path_is_refused(problems_of, line: str) -> None:
    """Nothing expands it: the run would write to a folder of that name."""
    keys = {"model_name_or_path": "a/b", "dataset_name": "a/b", "output_dir": "o"} | dict([line.split(": ")])
    (problem,) = problems_of(text="".join(f"{key}: {value}\n" for key, value in keys.items()))
    assert "variables are not expanded" in problem.remedy


def test_missing_file_suggests_nearest_sibling(problems_of, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    text = (
        f"model_name_or_path: a/b\noutput_dir: o\ndataset_mixture:\n  - weight: 1\n    name: {tmp_path}/trian.jsonl\n"
    )
    (problem,) = problems_of(text=text)
    assert problem.where == "recipe.yaml:5"
    assert str(tmp_path / "train.jsonl") in problem.remedy


def test_home_is_expanded_in_paths(monkeypatch, write, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.jsonl").touch()
    path = write("model_name_or_path: ~/model\ndataset_mixture: [{name: ~/rows.jsonl}]\noutput_dir: ~/out\n")
    config = load_config("sft", ["--config", str(path)])
    assert config.data.dataset_mixture == [{"name": str(tmp_path / "rows.jsonl")}]
    assert config.model.model_name_or_path == str(tmp_path / "model")
    assert config.training["output_dir"] == str(tmp_path / "out")


@pytest.mark.parametrize("name", ["~data", "~data/x", "~no-such-user/x"])
def test_tilde_user_prefix_is_not_expanded(name: str) -> None:
    assert expand_home(name) == name


def test_missing_home_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match="no home folder"):
        expand_home("~/x")
    assert expand_home("x") == "x"


def test_revision_of_local_path_is_refused_unless_path_is_a_flag(problems_of, write, minimal_text, tmp_path) -> None:
    (tmp_path / "model").mkdir()
    local = f"{tmp_path}/model"
    text = f"model_name_or_path: {local}\nmodel_revision: main\ndataset_name: a/b\noutput_dir: o\n"
    assert [problem.where for problem in problems_of(text=text)] == ["recipe.yaml:2"]
    path = write(minimal_text + "model_revision: main\n")
    config = load_config("sft", ["--config", str(path), "--model_name_or_path", local])
    assert config.model.model_revision is None
    assert config.provenance["model_revision"].startswith("derived")


def test_is_local_never_raises() -> None:
    assert not any(is_local(text) for text in ("", "\0", "x" * 5000, None, 3))


def test_package_files_are_found_outside_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_launch_file("fsdp2") == ROOT / "accelerate_configs" / "fsdp2.yaml"
    assert find_recipe("sft") == ROOT / "recipes" / "sft.py"
    config = Path("recipes/configs/llama3-8b/sft.yaml")
    assert find_shipped(config) == ROOT / config


def test_working_directory_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine = Path("accelerate_configs/fsdp2.yaml")
    mine.parent.mkdir()
    mine.write_text("mine")
    assert find_launch_file("fsdp2") == mine
    # The extensions of accelerate's files make a name a path.
    for name in ("other.yaml", "other.yml", "other.json"):
        Path(name).touch()
        assert find_launch_file(name) == Path(name)


def test_other_paths_are_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path("src/recipes_lib"), Path("recipes/none.yaml"), tmp_path / "recipes" / "sft.py"):
        assert find_shipped(path) == path


def test_missing_launch_file_lists_available_ones() -> None:
    with pytest.raises(ConfigError, match=r"there is no launch file accelerate_configs/none.yaml\n.*fsdp2, fsdp2_cp"):
        find_launch_file("none")
