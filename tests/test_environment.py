"""Package versions and Git commit that a run records."""

from __future__ import annotations

import importlib.metadata
import subprocess

import torch
from packaging.version import Version

from recipes_lib import environment
from recipes_lib.environment import read_git_commit, read_versions


def test_versions_match_imported_packages(monkeypatch):
    # The wheels of PyPI have their build tag (+cu130) in the module alone.
    assert Version(read_versions()["torch"]).public == Version(torch.__version__).public

    def find(name):
        if name == "peft":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(environment.importlib.metadata, "version", find)
    environment.find_version.cache_clear()
    assert read_versions()["peft"] == "not installed"
    environment.find_version.cache_clear()


def test_git_commit_marks_modified_files_as_dirty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert read_git_commit() is None

    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True)

    (tmp_path / "file").write_text("first")
    git("init")
    git("add", "file")
    git("commit", "-m", "first")
    commit = read_git_commit()
    assert len(commit) == 40
    (tmp_path / "file").write_text("second")
    assert read_git_commit() == f"{commit}-dirty"
