"""Local tasks and a tiny model, for evaluations without a network."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tests import tiny

WORDS = ("sun", "dog", "bread", "river", "winter", "house", "city", "poem", "week")
CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl, train: {folder}/choice.jsonl}}}}
output_type: multiple_choice
test_split: test
fewshot_split: train
num_fewshot: 1
doc_to_text: "Q: {{{{{column}}}}}\\nA:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 1.0}}
"""
WRITTEN = """
task: local_written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/written.jsonl}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match}}]
metadata: {{version: 1.0}}
"""
ROLLING = """
task: local_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/written.jsonl}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{q}}}}"
metric_list: [{{metric: bits_per_byte}}]
metadata: {{version: 1.0}}
"""
GROUP = """
group: local_group
task: [local_choice, local_other]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
"""
CODE = """
task: local_code
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/code.jsonl}}}}
include: {own}/humaneval_sandboxed.yaml
generation_kwargs: {{until: ["\\ndef"], max_gen_toks: 8}}
"""


def write_tasks(folder: Path) -> Path:
    """Write five local tasks, a group of two, and one whose template does not fit its data; return their folder."""
    from recipes_lib.evaluation.suites import OWN_TASKS

    drawn = random.Random(0)
    choices = [
        {"q": f"What follows {word} {at}?", "choices": drawn.sample(WORDS, 4), "gold": drawn.randrange(4)}
        for at, word in enumerate(WORDS * 4)
    ]
    written = [{"q": f"Say {word}, please", "a": word} for word in WORDS]
    code = [{"prompt": "def f():\n", "test": "def check(g):\n    assert g() == 1", "entry_point": "f"}]
    for name, rows in {"choice": choices, "written": written, "code": code}.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "tasks").mkdir()
    for name, text in {
        "choice": CHOICE.format(name="local_choice", folder=folder, column="q"),
        "other": CHOICE.format(name="local_other", folder=folder, column="q"),
        "group": GROUP,
        "broken": CHOICE.format(name="local_broken", folder=folder, column="q.missing.column"),
        "written": WRITTEN.format(folder=folder),
        "rolling": ROLLING.format(folder=folder),
        "code": CODE.format(folder=folder, own=OWN_TASKS),
    }.items():
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    return folder / "tasks"


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of local task files."""
    return write_tasks(tmp_path_factory.mktemp("local tasks"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model of its own, so that results go into its folder."""
    tiny.save_model(tmp_path / "model", tiny.build_tokenizer())
    return tmp_path / "model"
