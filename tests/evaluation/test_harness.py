"""`recipes eval` against lm-eval's own evaluator and closed forms."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from tests.evaluation.conftest import WORDS
from tests.rows import read_rows, write_rows
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes_lib.config.evaluation import EvalConfig
from recipes_lib.errors import ConfigError, DataError
from recipes_lib.evaluation import harness
from recipes_lib.evaluation.engines import CachedModel, CheckedModel
from recipes_lib.evaluation.harness import RECORD, SAMPLES, describe_model, evaluate_model, read_samples, read_scores
from recipes_lib.evaluation.suites import OWN_TASKS
from recipes_lib.files import try_lock

LOCAL = ("local_choice", "local_written", "local_rolling")


def change_config(model: Path, **changes: Any) -> None:
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | changes))


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default takes a second for each task whose standard error is bootstrapped."""
    monkeypatch.setattr(harness, "_BOOTSTRAP_ITERATIONS", 1000)


def build(model: Path, tasks: Path, *names: str, **keys: Any) -> EvalConfig:
    return EvalConfig(
        model_name_or_path=str(model), tasks=list(names or LOCAL), include_path=[str(tasks)], use_cpu=True, **keys
    )


def test_scores_and_answers_match_lm_eval(model: Path, tasks: Path) -> None:
    record = evaluate_model(build(model, tasks, num_fewshot=2, batch_size=4))
    assert record is not None
    theirs: Any = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model)},
        tasks=list(LOCAL),
        num_fewshot=2,
        batch_size=4,
        bootstrap_iters=1000,
        device="cpu",
        task_manager=TaskManager(include_path=[tasks], include_defaults=False),
    )
    for task, found in record["tasks"].items():
        expected = theirs["results"][task]
        assert found["scores"], task
        for metric, score in found["scores"].items():
            assert score["value"] == expected[f"{metric},none"]
            stderr = expected[f"{metric}_stderr,none"]
            # A bootstrap of 1,000 resamples has a relative error of 2 %. Of equal scores, there is no estimate.
            known = isinstance(stderr, float) and stderr > 0
            assert score["stderr"] == (pytest.approx(stderr, rel=0.1) if known else None)
    for row in read_samples(model / "eval"):
        (sample,) = [one for one in theirs["samples"][row["task"]] if one["doc_id"] == row["doc_id"]]
        assert row["prompt_hash"] == sample["prompt_hash"]
        assert row["answers"] == json.loads(json.dumps(sample["filtered_resps"]))


def test_seed_determines_sampled_answers(model: Path, tasks: Path, tmp_path: Path) -> None:
    """With the same answers for all seeds, repeated evaluations would show no variance."""
    options = {"gen_kwargs": {"do_sample": True, "temperature": 1.0}}
    answers = []
    for number, seed in enumerate((1, 1, 2)):
        config = build(model, tasks, "local_written", output_dir=str(tmp_path / str(number)), seed=seed, **options)
        evaluate_model(config)
        answers.append([row["answers"] for row in read_samples(config.folder)])
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def add_tokens(model: Path, form: str) -> None:
    """Make the tokenizer of a model add BOS, EOS or both to a text, ``$A``."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.bos_token = "<|im_start|>"
    names = {"BOS": tokenizer.bos_token, "EOS": tokenizer.eos_token}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        [names.get(part, part) for part in form.split()],
        special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in names.values()],
    )
    tokenizer.save_pretrained(model)


def test_end_token_that_a_tokenizer_appends_to_texts_is_not_part_of_a_prompt(model: Path, tasks: Path) -> None:
    answers = {}
    for form in ("BOS $A", "BOS $A EOS"):
        add_tokens(model, form)
        assert evaluate_model(build(model, tasks)) is not None
        answers[form] = [row["answers"] for row in read_samples(model / "eval")]
    assert answers["BOS $A"] == answers["BOS $A EOS"]


def test_metric_that_fails_is_an_error_of_the_task(model, tasks, tmp_path, monkeypatch) -> None:
    """F1 of more than two classes needs an average; the stored answers serve the corrected task."""
    task = json.loads((tasks / "choice.yaml").read_text())
    (tmp_path / "f1.yaml").write_text(json.dumps(task | {"metric_list": [{"metric": "f1", "aggregation": "f1"}]}))
    with pytest.raises(ConfigError, match="tasks: local_choice: their metrics cannot be computed: ValueError"):
        evaluate_model(build(model, tmp_path, "local_choice"))
    monkeypatch.setattr(CheckedModel, "_loglikelihood_tokens", lambda *_, **__: pytest.fail("asked again"))
    (tmp_path / "f1.yaml").write_text(json.dumps(task))
    assert evaluate_model(build(model, tmp_path, "local_choice"))


@pytest.mark.parametrize(("error", "stderr"), [(0.1, 0.1), (0.0, None), (math.nan, None), ("N/A", None)])
def test_standard_error_that_says_nothing_is_undefined(error: float | str, stderr: float | None) -> None:
    """It is 0 for equal scores, which would look like certainty, and not a number for a single question."""
    found = {"acc,none": 1.0, "acc_stderr,none": error, "alias": "name"}
    assert read_scores(found) == {"acc": {"value": 1.0, "stderr": stderr}}


class TableModel(TemplateLM):  # type: ignore[misc]
    """lm-eval model defined by a log-probability function and an answer function."""

    rank, world_size = 0, 1

    def __init__(self, score: Any, generate: Any = None) -> None:
        super().__init__()
        self.score, self.generate, self.num_asked = score, generate, 0

    eot_token_id = 0

    def tok_encode(self, string: str, **_: Any) -> list[int]:
        return list(string.encode())

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
        raise NotImplementedError

    def loglikelihood(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        self.num_asked += len(requests)
        answers = []
        for request in requests:
            answers.append((self.score(*request.args), False))
            self.cache_hook.add_partial("loglikelihood", request.args, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
        return [self.score(*request.args) for request in requests]

    def generate_until(self, requests: Any, **_: Any) -> list[str]:
        return [self.generate(request.args[0]) for request in requests]


def answer(table: TableModel, config: EvalConfig, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(harness, "build_engine", lambda *_: table)
    record = evaluate_model(config)
    assert record is not None
    return record["tasks"]


def test_scores_of_table_models_match_closed_form(model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = read_rows(tasks.parent / "choice.jsonl")
    gold = {f"Q: {row['q']}\nA:": f" {row['choices'][row['gold']]}" for row in rows}
    oracle = TableModel(
        lambda prompt, text: float(gold["Q:" + prompt.rpartition("Q:")[2]] == text), lambda p: p.split()[1].strip(",")
    )
    found = answer(oracle, build(model, tasks, "local_choice", "local_written"), monkeypatch)
    assert found["local_choice"]["scores"]["acc"]["value"] == 1
    assert found["local_written"]["scores"]["exact_match"]["value"] == 1
    contrary = TableModel(lambda *args: -oracle.score(*args), lambda _: "")
    found = answer(contrary, build(model, tasks, "local_choice", "local_written"), monkeypatch)
    assert found["local_choice"]["scores"]["acc"]["value"] == 0
    assert (found["local_written"]["num_empty"], found["local_written"]["num_questions"]) == (9, 9)
    first = TableModel(lambda _, text: -float(text.strip() != "dog"))
    acc = answer(first, build(model, tasks, "local_choice"), monkeypatch)["local_choice"]["scores"]["acc"]["value"]
    # It chooses "dog" if available, else the first of four equal choices.
    chosen = [row["choices"].index("dog") if "dog" in row["choices"] else 0 for row in rows]
    assert acc == sum(at == row["gold"] for at, row in zip(chosen, rows, strict=True)) / len(rows)


def test_empty_answers_and_reasoning_are_counted_before_filters(model, tasks, tmp_path, monkeypatch) -> None:
    chosen = [{"function": "regex", "regex_pattern": "([0-9]+)"}, {"function": "take_first"}]
    task = json.loads((tasks / "written.yaml").read_text())
    task |= {"task": "filtered", "filter_list": [{"name": "strict", "filter": chosen}]}
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "filtered.yaml").write_text(json.dumps(task))
    texts = (("", 9, 0), ("no number", 0, 0), ("<think>Well.</think>", 0, 9), ("Well.</think>", 0, 9))
    for text, empty, reasoning in (*texts, ("<think>Well, so", 0, 9)):
        table = TableModel(None, lambda _, text=text: text)
        found = answer(table, build(model, tmp_path / "own", "filtered"), monkeypatch)["filtered"]
        assert next(read_samples(model / "eval"))["answers"] == ["[invalid]"]
        assert (found["num_empty"], found["num_reasoning"]) == (empty, reasoning)


def test_reasoning_that_the_prompt_opens_is_counted(model, tasks, tmp_path, monkeypatch) -> None:
    """As under the template of DeepSeek-R1: an answer that the length limit has cut has no tag at all."""
    task = json.loads((tasks / "written.yaml").read_text()) | {"doc_to_text": "{{q}}<think>\n"}
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "opened.yaml").write_text(json.dumps(task))
    table = TableModel(None, lambda _: "Well, so")
    found = answer(table, build(model, tmp_path / "own", "local_written"), monkeypatch)["local_written"]
    assert found["num_reasoning"] == found["num_questions"]


def test_scores_of_own_task_may_be_numpy_scalars(model, tasks, tmp_path, monkeypatch) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own.py").write_text(
        "import numpy as np\n\ndef score(doc, results):\n    return {'acc': np.bool_(results[0] == doc['a'])}\n\n"
        "def average(items):\n    return np.float32(np.mean(items))\n"
    )
    task = json.loads((tasks / "written.yaml").read_text()) | {"task": "own"}
    del task["metric_list"]
    (tmp_path / "own" / "own.yaml").write_text(
        "process_results: !function own.score\nmetric_list: [{metric: acc, aggregation: !function own.average}]\n"
        + yaml.safe_dump(task)
    )
    found = answer(TableModel(None, lambda _: WORDS[0]), build(model, tmp_path / "own", "own"), monkeypatch)["own"]
    assert found["scores"]["acc"]["value"] == pytest.approx(1 / len(WORDS))
    assert [row["scores"]["acc"] for row in read_samples(model / "eval")] == [True] + [False] * (len(WORDS) - 1)


def test_code_task_runs_in_sandbox(model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Incorrect programs are in ``tasks/test_programs.py``."""
    config = build(model, tasks, "local_code", confirm_run_unsafe_code=True)
    found = answer(TableModel(None, lambda _: "    return 1"), config, monkeypatch)
    assert found["local_code"]["scores"]["pass@1"]["value"] == 1


def test_mbpp_prompt_is_that_of_its_paper(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is the README of google-research/mbpp: the format, and tasks 2, 3 and 4 as examples."""
    rows = [
        {"task_id": at, "text": f"Task {at}.", "code": f"def f():\r\n  return {at}", "test_setup_code": ""}
        | {"test_list": [f"assert f() == {at}"] * 3}
        for at in range(1, 12)
    ]
    files = {
        "prompt": str(write_rows(tmp_path / "prompt.jsonl", rows[:10])),
        "test": str(write_rows(tmp_path / "test.jsonl", rows[10:])),
    }
    task = {"include": f"{OWN_TASKS}/mbpp_sandboxed.yaml", "task": "local_mbpp", "dataset_path": "json"}
    task |= {"dataset_name": None, "dataset_kwargs": {"data_files": files}}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mbpp.yaml").write_text(json.dumps(task))
    config = build(model, tmp_path / "tasks", "local_mbpp", confirm_run_unsafe_code=True)
    found = answer(TableModel(None, lambda _: "def f():\n    return 11\n"), config, monkeypatch)
    assert found["local_mbpp"]["scores"]["pass@1"]["value"] == 1
    shown = [
        f"You are an expert Python programmer, and here is your task: Task {at}. Your code should pass these tests:\n\n"
        + f"assert f() == {at}\n" * 3
        + "[BEGIN]\n"
        for at in (2, 3, 4, 11)
    ]
    solved = [f"def f():\r\n  return {at}\n[DONE]\n\n" for at in (2, 3, 4)] + [""]
    expected = "".join(part for pair in zip(shown, solved, strict=True) for part in pair)
    assert next(read_samples(model / "eval"))["prompt"] == expected


def test_bits_per_byte_of_uniform_model(model: Path, tasks: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(model)
    torch.nn.init.zeros_(network.get_output_embeddings().weight)
    network.config.tie_word_embeddings = False
    network.save_pretrained(model)
    record = evaluate_model(build(model, tasks, "local_rolling"))
    assert record is not None
    tokenizer, texts = AutoTokenizer.from_pretrained(model), [f"Say {word}, please" for word in WORDS]
    num_tokens = sum(len(tokenizer(text)["input_ids"]) for text in texts)
    expected = num_tokens * math.log2(network.config.vocab_size) / sum(len(text.encode()) for text in texts)
    assert record["tasks"]["local_rolling"]["scores"]["bits_per_byte"]["value"] == pytest.approx(expected, rel=1e-6)


def test_non_finite_logits_are_refused(model: Path, tasks: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(model)
    torch.nn.init.constant_(network.model.layers[0].mlp.up_proj.weight, math.nan)
    network.save_pretrained(model)
    for task in LOCAL:
        for _ in range(2):  # Answers before the error must not be cached.
            with pytest.raises(DataError, match="its logits are not finite"):
                evaluate_model(build(model, tasks, task))
    assert not (model / "eval" / RECORD).exists()


def test_truncated_questions_are_counted(model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_config(model, max_position_embeddings=16)
    record = evaluate_model(build(model, tasks, "local_choice", "local_written"))
    assert record is not None
    cut = {task: found["num_cut"] for task, found in record["tasks"].items()}
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [f"Say {word}, please" for word in WORDS]
    assert cut["local_written"] == sum(len(tokenizer(prompt)["input_ids"]) > 16 - 8 for prompt in prompts)
    assert cut["local_choice"] == record["tasks"]["local_choice"]["num_questions"]
    assert all(row["is_cut"] for row in read_samples(model / "eval") if row["task"] == "local_choice")
    # Killed after the last answer: all answers are cached, none is requested again.
    with monkeypatch.context() as patched:
        patched.setattr(CachedModel, "close", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            evaluate_model(build(model, tasks, "local_choice"))
    monkeypatch.setattr(CheckedModel, "_loglikelihood_tokens", None)
    again = evaluate_model(build(model, tasks, "local_choice"))
    assert again is not None
    assert again["tasks"]["local_choice"]["num_cut"] == cut["local_choice"]
    with pytest.raises(ConfigError, match="an answer of 16 tokens does not fit its 16 positions"):
        evaluate_model(build(model, tasks, "local_written", gen_kwargs={"max_gen_toks": 16}))
    with pytest.raises(ConfigError, match=r"gen_kwargs: the model cannot generate with these settings: .*'typo'"):
        evaluate_model(build(model, tasks, "local_written", gen_kwargs={"typo": 1}))


def test_answered_requests_are_not_repeated_after_kill(model, tasks, monkeypatch) -> None:
    def fail_after(number: int) -> TableModel:
        left = iter(range(number))

        def score(_prompt: str, text: str) -> float:
            next(left)
            return -float(len(text))

        return TableModel(score)

    config = build(model, tasks, "local_choice")
    killed, resumed, again = fail_after(50), fail_after(1000), fail_after(1000)
    with pytest.raises(StopIteration):
        answer(killed, config, monkeypatch)
    assert not (model / "eval" / RECORD).exists()
    answer(resumed, config, monkeypatch)
    assert (model / "eval" / SAMPLES).exists()
    assert not (model / "eval" / ".requests").exists()
    # A completed evaluation does not serve as a cache of the next one.
    answer(again, config, monkeypatch)
    assert (killed.num_asked, resumed.num_asked, again.num_asked) == (144, 94, 144)


def test_results_of_another_evaluation_are_kept(model, tasks, monkeypatch, capsys) -> None:
    def run(*names: str, **keys: Any) -> None:
        answer(TableModel(lambda *texts: -float(len(texts[-1]))), build(model, tasks, *names, **keys), monkeypatch)

    folder = model / "eval"
    run("local_choice", limit=3)
    run("local_choice", limit=3)
    first = [(folder / name).read_bytes() for name in (RECORD, SAMPLES)]
    assert not list(folder.glob("earlier-*"))  # The same evaluation replaces its results.
    (folder / "watch.json").write_text("{}")
    run("local_choice")
    assert (folder / "earlier-1" / "watch.json").exists()
    assert not (folder / "watch.json").exists()
    assert [(folder / "earlier-1" / name).read_bytes() for name in (RECORD, SAMPLES)] == first
    assert "earlier-1" in capsys.readouterr().err
    run("local_rolling")
    assert json.loads((folder / "earlier-2" / RECORD).read_text())["tasks"].keys() == {"local_choice"}
    assert json.loads((folder / RECORD).read_text())["tasks"].keys() == {"local_rolling"}
    (folder / RECORD).write_text('{"tasks": [1], "model": 2}')
    run("local_rolling")
    assert (folder / "earlier-3" / RECORD).exists()


def test_output_folder_is_locked_and_must_be_writable(model, tasks, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(harness, "build_engine", lambda *_: TableModel(lambda *_: 0.0))
    (tmp_path / "out" / ".requests").mkdir(parents=True)
    config = build(model, tasks, "local_choice", output_dir=str(tmp_path / "out"))
    with (tmp_path / "out" / ".requests" / "lock").open("w") as lock:
        assert try_lock(lock)
        with pytest.raises(ConfigError, match="another process is evaluating into this folder"):
            evaluate_model(config)
    assert evaluate_model(config) is not None
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        evaluate_model(replace(config, output_dir=str(tmp_path / "file" / "out")))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "the tokenizer has no chat template"),
        ("{{ messages[-1].content }}", "system_instruction: the chat template of the model has no system message"),
        ("{{ raise_exception('no system') if messages[0].role == 'system' }}", "has no system message"),
    ],
)
def test_apply_chat_template_needs_a_template_that_renders_the_instruction(model, tasks, template, message) -> None:
    for file in model.glob("*.jinja"):
        file.write_text(template) if template else file.unlink()
    with pytest.raises(ConfigError, match=message):
        evaluate_model(build(model, tasks, "local_written", apply_chat_template=True, system_instruction="Be brief."))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "which does not generate text"),
        ({"architectures": ["LlamaForRewardModel"]}, "which does not generate text"),
        ({"architectures": ["BertForMaskedLM"]}, "which does not generate text"),
        ({"architectures": None, "model_type": "llava"}, "is a llava, which does not generate text"),
        ({"architectures": None, "model_type": "t5"}, None),
        ({"model_type": "no such"}, "model_name_or_path"),
    ],
)
def test_non_causal_model_is_refused(model: Path, tasks: Path, change: dict[str, Any], message: str | None) -> None:
    change_config(model, **change)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        describe_model(build(model, tasks))


def test_sharded_checkpoint_is_refused_with_export_command(tmp_path: Path, tasks: Path) -> None:
    (tmp_path / "model_shards").mkdir()
    with pytest.raises(ConfigError, match="is a training checkpoint, not a model"):
        describe_model(build(tmp_path, tasks))
