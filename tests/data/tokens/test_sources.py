"""Keys and names of token sources, and what they depend on."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from recipes_lib.config.schema import DataConfig, PretrainingConfig, TokensConfig
from recipes_lib.data.store import compute_key
from recipes_lib.data.tokens import token_sets as token_sources
from recipes_lib.data.tokens.token_sets import WITHOUT_EFFECT, load_corpora, load_held_out, select_options
from recipes_lib.errors import ConfigError, DataError

SECTIONS = (DataConfig, TokensConfig, PretrainingConfig)
ROOM = Path(token_sources.__file__).parents[1]


def keys_of(config, num_tokens=None) -> list[str]:
    return [compute_key(corpus.collect_inputs(config)) for corpus in load_corpora(config, num_tokens)]


@pytest.fixture
def texts(tmp_path):
    """Two text files of the same size, by name."""
    files = {name: tmp_path / f"{name}.txt" for name in "ab"}
    for name, path in files.items():
        path.write_text(f"{name} one\n\n{name} two\n")
    return {name: str(path) for name, path in files.items()}


CHANGES = {
    "dataset_format": "text",
    "dataset_columns": {"messages": None},
    "test_split_size": 0.1,
    "eos_token": "<|im_end|>",
    "text_documents": "line",
    "broken_rows": "drop",
    "max_broken_fraction": 0.5,
    "trust_remote_code": True,
}
WITHOUT_CHANGE = {
    "max_length": 64,
    "prepared_dir": "elsewhere",
    "dataset_num_proc": 3,
    "allow_eval_overlap": True,
    "eval_datasets": {"more": {"name": "elsewhere"}},
    "pad_token": "<|im_end|>",
    "seed": 7,
    "cross_document_attention": True,
    "max_tokens": 1000,
    "decay_embeddings": False,
    "expected_curve": "curve.json",
}
DECIDED_ELSEWHERE = {
    # The source and its location.
    *("dataset_name", "dataset_config", "dataset_revision", "dataset_train_split", "dataset_test_split"),
    # Tested below, and in `packed/test_keys.py`.
    *("dataset_mixture", "dataset_curriculum", "dataset_streaming", "chat_template_path"),
    # Refused in pretraining, and not read here.
    *("loss_on", "overlong", "max_truncated_fraction", "packing"),
}


def test_key_table_covers_every_option():
    options = {field.name for section in SECTIONS for field in dataclasses.fields(section)}
    assert options <= CHANGES.keys() | WITHOUT_CHANGE.keys() | DECIDED_ELSEWHERE


@pytest.mark.parametrize("option", [*CHANGES, *WITHOUT_CHANGE])
def test_only_content_options_change_key(build_config, texts, option):
    before, after = (
        keys_of(build_config(dataset_name=texts["a"], **options))
        for options in ({}, {option: (CHANGES | WITHOUT_CHANGE)[option]})
    )
    assert (before != after) == (option in CHANGES)


def test_source_key_is_independent_of_mixture(build_config, texts):
    alone = [keys_of(build_config(dataset_name=texts[name]))[0] for name in "ab"]
    mixture = [{"name": texts["b"], "weight": 0.2}, {"name": texts["a"], "weight": 3.0}]
    assert keys_of(build_config(dataset_mixture=mixture)) == alone[::-1]
    curriculum = [{"start_tokens": 0, "weights": [1, 2]}]
    assert keys_of(build_config(dataset_mixture=mixture, dataset_curriculum=curriculum)) == alone[::-1]
    assert len(set(alone)) == 2


def test_seed_changes_key_only_if_used(build_config, texts):
    keys = [keys_of(build_config(dataset_name=texts["a"], test_split_size=0.5, seed=seed)) for seed in (0, 1)]
    assert keys[0] != keys[1]


def test_stream_budget_changes_key(build_config, texts):
    config = build_config(dataset_name=texts["a"], dataset_streaming=True, max_length=8)
    keys = [keys_of(config, num_tokens) for num_tokens in (100, 200)]
    assert len({*map(tuple, keys), tuple(keys_of(build_config(dataset_name=texts["a"])))}) == 3
    assert keys_of(build_config(dataset_name=texts["a"]), 100) == keys_of(build_config(dataset_name=texts["a"]))


def find_needed_modules(module: str) -> set[str]:
    """Return the modules of ``data`` that a module imports, directly or indirectly, except for typing only."""
    needed, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        tree = ast.parse((ROOM / name).read_text())
        guards = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ]
        for_types = {id(node) for guard in guards for node in ast.walk(guard)}
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and id(node) not in for_types]
        for node in imports:
            package, _, path = str(node.module).replace(".", "/").partition("recipes_lib/data/")
            if path and not package:
                # A package, of which modules are imported, or a module.
                modules = [f"{path}/{alias.name}" for alias in node.names] if (ROOM / path).is_dir() else [path]
                waiting += [f"{module}.py" for module in modules]
    return needed


def test_options_outside_key_leave_bytes_unchanged(build_config, texts):
    needed = find_needed_modules("tokens/token_sets.py") | find_needed_modules("chat/encoder.py")
    assert {"sources/formats.py", "chat/templates.py", "tokens/shards.py", "sources/readers.py"} <= needed
    # Otherwise, a change of other modules would tokenise every corpus again.
    modules = {path.relative_to(ROOM).as_posix() for path in ROOM.rglob("*.py") if path.name != "__init__.py"}
    assert modules - needed == WITHOUT_EFFECT
    (corpus,) = load_corpora(build_config(dataset_name=texts["a"]))
    assert corpus.collect_inputs(build_config())["code"].keys() >= needed


def test_all_tokens_are_trained_for_any_layout(build_config):
    assert select_options(build_config(loss_on="assistant")).tokens.loss_on == "all"


def test_source_names_differ_by_distinguishing_key(build_config, texts, tmp_path):
    for split in ("train", "test"):
        (tmp_path / "d" / split).mkdir(parents=True)
        (tmp_path / "d" / split / "1.txt").write_text(split)
    folder = str(tmp_path / "d")
    mixture = [{"name": folder, "split": "train"}, {"name": folder, "split": "test"}, {"name": texts["a"]}]
    names = [corpus.name for corpus in load_corpora(build_config(dataset_mixture=mixture))]
    assert names == [f"{folder}:train", f"{folder}:test", texts["a"]]
    with pytest.raises(ConfigError, match="listed 2 times"):
        load_corpora(build_config(dataset_mixture=[{"name": texts["a"], "weight": 1.0}, {"name": texts["a"]}]))


def test_unopenable_sources_are_reported_together(build_config, tmp_path):
    mixture = [{"name": str(tmp_path / "x.txt")}, {"name": str(tmp_path / "y.txt")}]
    with pytest.raises(DataError) as raised:
        load_corpora(build_config(dataset_mixture=mixture))
    assert len(raised.value.problems) == 2


def test_text_documents_select_document_unit(build_config, texts):
    found = {}
    for unit in ("file", "paragraph", "line"):
        (corpus,) = load_corpora(build_config(dataset_name=texts["a"], text_documents=unit))
        found[unit] = [row.text for row in corpus.rows()]
    assert found == {"file": ["a one\n\na two\n"], "paragraph": ["a one", "a two"], "line": ["a one", "a two"]}


def test_held_out_data_is_path_or_split(build_config, texts, tmp_path, monkeypatch):
    assert load_held_out(build_config(dataset_name=texts["a"])) is None
    by_path = load_held_out(build_config(dataset_name=texts["a"], dataset_test_split=texts["b"], test_split_size=0.5))
    assert (by_path.name, by_path.test_size) == (texts["b"], None)
    for split in ("train", "test"):
        (tmp_path / "d" / split).mkdir(parents=True)
        (tmp_path / "d" / split / "1.txt").write_text(split)
    (tmp_path / "test").mkdir()
    monkeypatch.chdir(tmp_path)
    by_split = load_held_out(build_config(dataset_name=str(tmp_path / "d"), dataset_test_split="test"))
    assert [row.text for row in by_split.rows()] == ["test"]
    with pytest.raises(ConfigError, match="a mixture has no splits"):
        load_held_out(build_config(dataset_mixture=[{"name": texts["a"]}], dataset_test_split="test"))


def test_dataset_test_split_excludes_drawing(build_config, texts):
    config = build_config(dataset_name=texts["a"], dataset_test_split=texts["b"], test_split_size=0.5)
    assert [corpus.test_size for corpus in load_corpora(config)] == [None]
