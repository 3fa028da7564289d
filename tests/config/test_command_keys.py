"""Keys of a command: flags over the file, each problem with its place; values are adapted once they are valid."""

from __future__ import annotations

from pathlib import Path

from recipes_lib.config.loader import Given, expand_paths, read_given


def test_flags_over_the_file_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "eval.yaml"
    path.write_text("limit: 3\nseed: 1\nlimt: 2\n")
    given = read_given("eval", ["--config", str(path), "--seed", "2"], lambda key, value: (key, value))
    assert isinstance(given, Given)
    assert given.values == {"limit": ("limit", 3), "seed": ("seed", 2)}
    assert (given.where("limit"), given.where("seed"), given.where("tasks")) == (f"{path}:1", "--seed", str(path))
    given.require(limit="no", tasks="write them")
    assert [problem.where for problem in given.problems] == [f"{path}:3", str(path)]


def test_a_secret_is_refused_and_not_repeated() -> None:
    given = read_given("eval", ["--system_instruction", "hf_" + "a" * 34], lambda _, value: value)
    assert isinstance(given, Given)
    assert not given.values
    assert "a" * 34 not in str(given.problems)


def test_the_home_folder_is_found_in_lists_too(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_paths(["~/a", "b", None]) == [f"{tmp_path}/a", "b", None]
