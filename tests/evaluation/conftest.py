"""Local lm-eval tasks and a tiny model, for evaluation without a network."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from tests.rows import write_rows

WORDS = ("sun", "dog", "bread", "river", "winter", "house", "city", "poem", "week")
CHOICE = {
    "output_type": "multiple_choice",
    "fewshot_split": "train",
    "num_fewshot": 1,
    "doc_to_text": "Q: {{q}}\nA:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "gold",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
WRITTEN = {
    "output_type": "generate_until",
    "doc_to_text": "{{q}}",
    "doc_to_target": "{{a}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{q}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}
AVERAGED = [{"metric": "acc", "weight_by_size": True}]


def write_tasks(folder: Path) -> Path:
    """Write local tasks, a group of two, and a task whose template does not fit its data; return their folder."""
    from recipes_lib.evaluation.suites import OWN_TASKS

    drawn = random.Random(0)
    choices = [
        {"q": f"What follows {word} {at}?", "choices": drawn.sample(WORDS, 4), "gold": drawn.randrange(4)}
        for at, word in enumerate(WORDS * 4)
    ]
    written = [{"q": f"Say {word}, please", "a": word} for word in WORDS]
    code = [{"prompt": "def f():\n", "test": "def check(g):\n    assert g() == 1", "entry_point": "f"}]
    for name, rows in {"choice": choices, "written": written, "code": code}.items():
        write_rows(folder / f"{name}.jsonl", rows)
    (folder / "tasks").mkdir()
    code_keys = {"include": f"{OWN_TASKS}/humaneval_sandboxed.yaml"}
    code_keys["generation_kwargs"] = {"until": ["\ndef"], "max_gen_toks": 8}
    for name, (data, keys) in {
        "choice": ("choice", CHOICE),
        "other": ("choice", CHOICE),
        "broken": ("choice", {**CHOICE, "doc_to_text": "{{q.missing.column}}"}),
        "written": ("written", WRITTEN),
        "rolling": ("written", ROLLING),
        "code": ("code", code_keys),
    }.items():
        files = dict.fromkeys(("test", "train"), f"{folder}/{data}.jsonl")
        task = {"task": f"local_{name}", "dataset_path": "json", "dataset_kwargs": {"data_files": files}}
        task |= {} if name == "code" else {"test_split": "test", "metadata": {"version": 1.0}}
        (folder / "tasks" / f"{name}.yaml").write_text(json.dumps(task | keys))
    group = {"group": "local_group", "task": ["local_choice", "local_other"], "aggregate_metric_list": AVERAGED}
    (folder / "tasks" / "group.yaml").write_text(json.dumps(group))
    return folder / "tasks"


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of local task files."""
    return write_tasks(tmp_path_factory.mktemp("local tasks"))


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """Tiny model in a folder of its own, because results are written there by default."""
    return shutil.copytree(tiny_model_dir, tmp_path / "model")
