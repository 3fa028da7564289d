"""Resolution of task names, and checks of task files on their first row."""

from __future__ import annotations

import errno
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from tests.forked import ROOT

from recipes_lib.config.evaluation import EvalConfig
from recipes_lib.errors import ConfigError
from recipes_lib.evaluation import suites
from recipes_lib.evaluation.suites import SUITES, _expand, list_datasets, load_tasks


def build(tasks: Path, *names: str, **keys: Any) -> EvalConfig:
    return EvalConfig(model_name_or_path="m", tasks=list(names), include_path=[str(tasks)], **keys)


def test_num_fewshot_overrides_task_file(tasks: Path) -> None:
    loaded = load_tasks(build(tasks, "local_choice", "local_written"))["tasks"]
    assert {name: task.get_config("num_fewshot") for name, task in loaded.items()} == {
        "local_choice": 1,
        "local_written": 0,
    }
    names = ("local_choice", "local_written", "local_code")
    loaded = load_tasks(build(tasks, *names, num_fewshot=3, confirm_run_unsafe_code=True))["tasks"]
    # As `lm_eval run`, which keeps the 0 of a task file.
    assert [loaded[name].get_config("num_fewshot") for name in names] == [3, 3, 0]


def test_more_fewshot_examples_than_rows_are_refused(tasks: Path, tmp_path: Path) -> None:
    """Before the model is loaded; of the split of the questions, one row is the question."""
    own = json.loads((tasks / "choice.yaml").read_text()) | {"task": "own", "fewshot_split": "test"}
    (tmp_path / "own.yaml").write_text(json.dumps(own))
    for folder, name, pool in ((tasks, "local_choice", 36), (tmp_path, "own", 35)):
        assert load_tasks(build(folder, name, num_fewshot=pool))
        with pytest.raises(ConfigError, match=f"tasks: {name}: {pool + 1} few-shot examples .* from {pool}"):
            load_tasks(build(folder, name, num_fewshot=pool + 1))


def test_stop_in_gen_kwargs_is_refused_with_its_name_in_lm_eval(tasks: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks: local_written: .* `stop`\n +write `until`"):
        load_tasks(build(tasks, "local_written", gen_kwargs={"stop": ["x"]}))


def test_gen_kwargs_override_task_file(tasks: Path) -> None:
    (task,) = load_tasks(build(tasks, "local_written", gen_kwargs={"max_gen_toks": 3}))["tasks"].values()
    assert task.get_config("generation_kwargs") == {"until": ["\n"], "max_gen_toks": 3}


def test_unusable_tasks_are_reported_together(tasks: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tasks(build(tasks, "local_broken", "local_code", "local_choice"))
    problems = {problem.where: problem for problem in caught.value.problems}
    assert problems.keys() == {"tasks: local_broken", "tasks: local_code"}
    assert "templates do not fit its first row" in problems["tasks: local_broken"].found
    assert "confirm_run_unsafe_code" in problems["tasks: local_code"].remedy
    assert load_tasks(build(tasks, "local_code", confirm_run_unsafe_code=True))


CHOICE: dict[str, Any] = {
    "task": "own",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{q}}",
    "doc_to_choice": "c",
    "doc_to_target": "l",
}


ROW = json.dumps({"q": "?", "c": ["a", "b"], "l": 0})


@pytest.mark.parametrize(
    ("rows", "change", "message"),
    [
        ("", {}, "has no question"),
        (ROW.replace("0", "9"), {}, "the answer of its first row is not among its choices"),
        (ROW.replace('"a", "b"', ""), {}, "the answer of its first row is not among its choices"),
        (ROW.replace('"b"', '""'), {}, "or a choice is empty"),
        (ROW.replace("0", "-1"), {}, "no question has its answer among its choices; that of the first is -1"),
        (ROW.replace("0", '"c"'), {}, "no question has its answer among its choices; that of the first is 'c'"),
        (ROW.replace('["a", "b"]', '"ab"'), {}, "the choices of its row 1 are 'ab'; write `doc_to_choice` as"),
        (ROW, {"doc_to_choice": None}, "the choices of its row 1 are None; write `doc_to_choice` as"),
        (ROW + "\n" + ROW.replace('"a", "b"', ""), {}, r"the choices of its row 2 are \[\]; .*, and leave out rows"),
        (ROW[:16], {}, "its data cannot be read: .*JSON parse error"),
        (ROW, {"metric_list": [{"metric": "acurracy"}]}, "a metric that lm-eval does not have; correct its `metric_l"),
        (ROW, {"metric_list": [{"metric": "acc", "aggregation": "meen"}]}, "the aggregation of acc is unknown"),
        (ROW, {"test_split": "validation"}, "'validation', and its data or lm-eval have no such thing; correct its t"),
        (ROW, {"output_type": "generate"}, "Got invalid output_type 'generate'"),
        (ROW, {"test_splitt": "test"}, "'test_splitt'.*; correct its task file"),
        (ROW, {"dataset_kwargs": {"data_files": {"test": "gone.jsonl"}}}, "gone.jsonl'; correct its task file"),
        (ROW, {"dataset_kwargs": {}}, "without `data_files`, json would be any such files"),
        (ROW, {"dataset_path": "not/there"}, "make its data available"),
    ],
)
def test_invalid_task_file_is_refused(tmp_path: Path, rows: str, change: dict[str, Any], message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(rows)
    files = {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    (tmp_path / "own.yaml").write_text(json.dumps(CHOICE | files | change))
    with pytest.raises(ConfigError) as caught:
        load_tasks(build(tmp_path, "own"))
    (problem,) = caught.value.problems
    assert problem.where == "tasks: own"
    assert re.search(message, f"{problem.found}; {problem.remedy}")


def test_tasks_whose_data_are_out_of_reach_are_one_problem(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.yaml").write_text(json.dumps(CHOICE | {"task": name, "dataset_path": f"not/{name}"}))
    with pytest.raises(ConfigError) as caught:
        load_tasks(build(tmp_path, *"abcd"))
    (problem,) = caught.value.problems
    assert problem.where == "tasks: a, b, c and 1 more"
    assert "Offline" not in str(problem)


def test_questions_without_an_answer_are_allowed_beside_others(tmp_path: Path) -> None:
    """Labels are -1 where a benchmark hides them; lm-eval counts such a question as wrong."""
    (tmp_path / "rows.jsonl").write_text(f"{ROW.replace('0', '-1')}\n{ROW}\n")
    files = {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    (tmp_path / "own.yaml").write_text(json.dumps(CHOICE | files))
    assert load_tasks(build(tmp_path, "own"))
    with pytest.raises(ConfigError, match="no question has its answer"):
        load_tasks(build(tmp_path, "own", limit=1))


def test_task_whose_rows_are_all_filtered_has_no_question(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(ROW)
    (tmp_path / "own.py").write_text("def keep(rows):\n    return rows.filter(lambda row: False)\n")
    files = {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    (tmp_path / "own.yaml").write_text(f"process_docs: !function own.keep\n{yaml.safe_dump(CHOICE | files)}")
    with pytest.raises(ConfigError, match="has no question"):
        load_tasks(build(tmp_path, "own"))


@pytest.mark.usefixtures("without_lm_eval_tasks")
def test_group_with_missing_member_is_refused(tmp_path: Path) -> None:
    (tmp_path / "group.yaml").write_text(json.dumps({"group": "all", "task": ["absent_one"]}))
    with pytest.raises(ConfigError, match="no task 'absent_one'"):
        load_tasks(build(tmp_path, "all"))


@pytest.mark.usefixtures("without_lm_eval_tasks")
def test_unreadable_task_file_is_named_with_unknown_task(tmp_path: Path) -> None:
    (tmp_path / "torn.yaml").write_text("task: mine\n  x: [")
    with pytest.raises(ConfigError) as caught:
        load_tasks(build(tmp_path, "mine"))
    assert [problem.where for problem in caught.value.problems] == ["tasks", str(tmp_path / "torn.yaml")]


@pytest.mark.slow  # Reads 14,000 files.
def test_user_group_may_contain_lm_eval_tasks(tmp_path: Path) -> None:
    (tmp_path / "group.yaml").write_text("group: mine\ntask: [hellaswag]\n")
    assert [place["name"] for place in list_datasets(build(tmp_path, "mine"))] == ["Rowan/hellaswag"]


PUBLISHED = Path(lm_eval.__file__).parent / "tasks"
QUESTION = {"problem": "What is 1+1?", "solution": "It is $\\boxed{2}$.", "level": "1", "type": "Algebra"}
INSTRUCTION = {"key": 1, "prompt": "p", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


def include(folder: Path, task: str, row: dict[str, Any]) -> Path:
    (folder / "rows.jsonl").write_text(json.dumps(row))
    (folder / "own.yaml").write_text(
        f"include: {PUBLISHED}/{task}.yaml\ntask: own\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs: {{data_files: {{train: {folder}/rows.jsonl, test: {folder}/rows.jsonl}}}}\n"
    )
    return folder


def test_math_verify_and_ifeval_score_with_eval_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = build(include(tmp_path, "minerva_math/minerva_math_algebra", QUESTION), "own")
    (task,) = load_tasks(config)["tasks"].values()
    said = "The final answer is $\\frac{4}{2}$. I hope it is correct."
    assert task.process_results(task.eval_docs[0], [f"Final Answer: {said}"])["math_verify"] == 1
    # NLTK would try to download its data.
    monkeypatch.setattr("nltk.data.find", lambda _: "here")
    (task,) = load_tasks(build(include(tmp_path, "ifeval/ifeval", INSTRUCTION), "own"))["tasks"].values()
    assert task.process_results(task.eval_docs[0], ["no comma"])["prompt_level_strict_acc"] is True

    def find(_: str) -> None:
        raise LookupError

    monkeypatch.setattr("nltk.data.find", find)
    with pytest.raises(ConfigError, match="NLTK's punkt_tab, which is not installed") as caught:
        load_tasks(build(tmp_path, "own"))
    assert "python -m nltk.downloader punkt_tab" in caught.value.problems[0].remedy


def test_missing_package_is_not_reported_as_missing_data(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import no_such_package\n")
    (tmp_path / "own.yaml").write_text(
        "task: own\ndataset_path: org/rows\noutput_type: generate_until\ntest_split: test\n"
        "doc_to_text: q\ndoc_to_target: a\nprocess_results: !function own.score\n"
    )
    with pytest.raises(ConfigError, match=r"needs a package that is not installed: .*no_such_package") as caught:
        load_tasks(build(tmp_path, "own"))
    assert "pip install 'recipes-lib[eval]'" in caught.value.problems[0].remedy


@pytest.fixture
def without_lm_eval_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Index only the user's and our tasks: lm-eval's 14,000 files take seconds."""
    index = suites.TaskManager
    monkeypatch.setattr(suites, "TaskManager", lambda **keys: index(**keys | {"include_defaults": False}))


@pytest.mark.usefixtures("without_lm_eval_tasks")
def test_unknown_task_suggests_nearest(tasks: Path) -> None:
    with pytest.raises(ConfigError, match="there is no task 'local_choise'") as caught:
        load_tasks(build(tasks, "local_choise", "humaneval_sandboxd", "zzzz"))
    remedies = [problem.remedy for problem in caught.value.problems]
    assert remedies[0].startswith("did you mean `local_choice`")
    assert "humaneval_sandboxed" in remedies[1]
    assert remedies[2].startswith("the suites are core, ")


def test_suite_expands_to_published_tasks_and_shots() -> None:
    config = EvalConfig(model_name_or_path="m", tasks=["math", "arc_challenge", "core", "gsm8k"])
    others = [name for name in SUITES["core"] if name != "arc_challenge"]
    assert list(expanded := _expand(config)) == [*SUITES["math"], "arc_challenge", *others]
    assert expanded["arc_challenge"] == 25
    assert expanded["minerva_math"] is None
    assert set(_expand(replace(config, num_fewshot=2)).values()) == {2}


@pytest.mark.parametrize("suite", SUITES)
def test_page_lists_few_shot_examples_of_suite(suite: str) -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{suite}` \| (.*) \|$", page, re.MULTILINE)
    listed = [re.findall(r" (\d+)$", name) for name in row.split(", ")]
    for shots, count in zip(listed, SUITES[suite].values(), strict=suite != "safety"):  # Two tasks of TruthfulQA.
        assert count is None or shots == [str(count)]


@pytest.mark.usefixtures("without_lm_eval_tasks")
def test_list_datasets_resolves_task_files(tmp_path: Path) -> None:
    shared = "output_type: generate_until\ndoc_to_text: q\ndoc_to_target: a\n"
    (tmp_path / "base").write_text(f"dataset_path: org/sets\ntest_split: exam\n{shared}")
    (tmp_path / "hub.yaml").write_text("task: hub\ntag: all_of_it\ninclude: base\ndataset_name: one\n")
    (tmp_path / "same.yaml").write_text("task: same\ninclude: base\ndataset_name: one\n")
    (tmp_path / "local.yaml").write_text(
        "task: local\ndataset_path: json\nvalidation_split: dev\n"
        f"dataset_kwargs: {{data_files: {{dev: [{tmp_path}/a.jsonl, b.jsonl], train: c.jsonl}}}}\n{shared}"
    )
    (tmp_path / "outer.yaml").write_text("group: outer\ntask: [{task: hub, num_fewshot: 2}, inner]\n")
    (tmp_path / "inner.yaml").write_text("group: inner\ntask: [local, same]\n")
    whole = "{task: whole, dataset_path: json, dataset_kwargs: {data_files: whole.jsonl}}"
    (tmp_path / "nested.yaml").write_text(
        f"group: nested\ntask: [{{group: part, task: [inner, {whole}]}}, {{task: hub, dataset_name: two}}]\n"
    )
    hub = {"name": "org/sets", "config": "one", "split": "exam"}
    local = [{"name": name, "label": "local"} for name in (f"{tmp_path}/a.jsonl", "b.jsonl")]
    assert list_datasets(build(tmp_path, "outer")) == [{**hub, "label": "hub"}, *local]
    assert list_datasets(build(tmp_path, "all_of_it")) == [{**hub, "label": "hub"}]
    named = [{**hub, "label": "same"}, {"name": "whole.jsonl", "label": "whole"}]
    assert list_datasets(build(tmp_path, "nested")) == [*local, *named, {**hub, "config": "two", "label": "hub"}]
    (tmp_path / "mute.yaml").write_text(f"task: mute\n{shared}")
    with pytest.raises(ConfigError, match="where its questions are"):
        list_datasets(build(tmp_path, "mute"))
    with pytest.raises(ConfigError, match="no task 'gone'"):
        list_datasets(build(tmp_path, "gone"))


@pytest.mark.slow
def test_suite_tasks_are_known_to_lm_eval() -> None:
    known = set(suites.TaskManager(include_path=[suites.OWN_TASKS]).all_tasks)
    assert {task for suite in SUITES.values() for task in suite} <= known


def test_cache_that_cannot_be_locked_is_not_reported_as_missing_data(tasks: Path, monkeypatch) -> None:
    def load(self: object, names: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(suites.TaskManager, "load", load)
    with pytest.raises(ConfigError, match="No locks available\n    set HF_HOME or the output"):
        load_tasks(build(tasks, "local_choice"))


def test_cache_needs_a_home_folder(tasks: Path, monkeypatch) -> None:
    """Otherwise `datasets` creates a folder named `~` in the working directory."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", "~/.cache/huggingface")
    with pytest.raises(ConfigError, match="no home folder"):
        load_tasks(build(tasks, "local_choice"))
