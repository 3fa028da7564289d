"""Shipped configurations load, are pinned, and a mutation of any line is reported at that line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.config.conftest import PARSERS
from tests.forked import ROOT

from recipes_lib.config.loader import load_config
from recipes_lib.config.table import TABLES, load_table
from recipes_lib.config.values import Entry, read_entries
from recipes_lib.errors import ConfigError

CONFIGS = sorted((ROOT / "recipes" / "configs").rglob("*.yaml"))
PATHS = (
    *("model_name_or_path", "tokenizer_name_or_path", "teacher_model_name_or_path"),
    *("dataset_name", "dataset_test_split", "chat_template_path"),
)

# Keys of Hub repositories, and the key of the commit.
PINS = {
    "model_name_or_path": "model_revision",
    "tokenizer_name_or_path": "tokenizer_revision",
    "teacher_model_name_or_path": "teacher_model_revision",
    "dataset_name": "dataset_revision",
}
# Its commit could not be determined.
UNPINNED = "alignment-handbook/zephyr-7b-sft-full"


def recipe_of(path: Path) -> str:
    """Return the recipe of ``<recipe>[_<variant>].yaml``."""
    return next(recipe for recipe in TABLES if path.stem.split("_")[0] == recipe)


def load(path: Path, file: Path) -> object:
    """Load ``file`` with the parser for the recipe of ``path``."""
    argv, recipe = ["--config", str(file)], recipe_of(path)
    return PARSERS[recipe](argv) if recipe in PARSERS else load_config(recipe, argv)


def entries_of(path: Path) -> list[Entry]:
    return read_entries(path.read_text(encoding="utf-8"), str(path), [])


def identify(path: Path, entry: Entry) -> tuple[str, str]:
    """Return key and schema of an entry: recipes that share both read it alike."""
    return entry.key, str(load_table(recipe_of(path)).keys[entry.key].schema)


FIRST_FILE = {identify(path, entry): path for path in reversed(CONFIGS) for entry in entries_of(path)}
"""First file with each key and schema; mutating the same key in other files proves nothing more."""


def first_entries_of(path: Path) -> list[Entry]:
    return [entry for entry in entries_of(path) if FIRST_FILE[identify(path, entry)] == path]


def break_line(path: Path, entry: Entry, new: str, tmp_path: Path) -> list[str]:
    """Replace the lines of ``entry`` by ``new`` and return the line numbers of the problems."""
    lines = path.read_text(encoding="utf-8").splitlines()
    first = entry.key_node.start_mark.line
    for index in range(first + 1, len(lines)):
        if not lines[index].startswith((" ", "-")):
            break
        lines[index] = ""
    lines[first] = new
    broken = tmp_path / path.name
    broken.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path, broken)
    assert caught.value.exit_code == 2
    return [problem.where.removeprefix(f"{broken}:") for problem in caught.value.problems]


def write_mistakes(path: Path, entry: Entry) -> Iterator[str]:
    """Yield mutations of an entry: misspelt key, wrong type, missing path, value out of range."""
    line = path.read_text(encoding="utf-8").splitlines()[entry.key_node.start_mark.line]
    yield line.replace(entry.key, entry.key + "x", 1)
    schema = load_table(recipe_of(path)).keys[entry.key].schema
    kinds = set(schema["type"])
    yield f"{entry.key}: {'[{a: b}]' if 'object' in kinds or 'items' in schema else '{a: b}'}"
    if entry.key in PATHS:
        yield f"{entry.key}: ./gone/{entry.key}"
    if kinds & {"number", "integer"}:
        yield f"{entry.key}: -2"
    elif "enum" in schema or kinds == {"boolean"}:
        yield f"{entry.key}: sometimes"


@pytest.fixture(autouse=True)
def _working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Working directory with `recipes` and the data files that `make demo` writes."""
    (tmp_path / "data").mkdir()
    for name in ("pretrain", "sft", "brief", "pairs", "questions"):
        (tmp_path / "data" / f"{name}.jsonl").touch()
        (tmp_path / "data" / f"{name}_held_out.jsonl").touch()
    for name in ("corpus", "tokenizer", "pretrain", "sft", "reward", "student"):
        (tmp_path / name).mkdir()
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)


def test_shipped_configs_exist() -> None:
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
class TestShippedConfig:
    def test_loads_and_header_has_command_and_hardware(self, path: Path) -> None:
        load(path, path)
        head = path.read_text(encoding="utf-8").split("\n\n")[0]
        assert "--config" in head
        assert str(path.relative_to(ROOT)) in head
        assert "Expect" in head
        assert "Hardware" in head

    def test_one_gpu_header_names_single_gpu_launch_file(self, path: Path) -> None:
        head = path.read_text(encoding="utf-8").split("\n\n")[0]
        if re.search(r"Hardware: one GPU", head):
            assert not re.search(r"accelerate_configs/(?!single_gpu)", head)

    def test_hub_repositories_are_pinned_to_a_commit(self, path: Path) -> None:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        for key, revision in PINS.items():
            if path.parent.name != "demo" and values.get(key) not in (None, UNPINNED):
                assert re.fullmatch("[0-9a-f]{40}", str(values.get(revision))), (key, revision)
        for part in (*values.get("dataset_mixture", ()), *values.get("sources", ()), *values.get("benchmarks", ())):
            if path.parent.name != "demo":
                assert re.fullmatch("[0-9a-f]{40}", str(part.get("revision"))), part["name"]

    def test_mutated_line_is_reported_at_its_number(self, path: Path, tmp_path: Path) -> None:
        for entry in first_entries_of(path):
            for wrong in write_mistakes(path, entry):
                found = break_line(path, entry, wrong, tmp_path)
                assert str(entry.key_node.start_mark.line + 1) in found, wrong
