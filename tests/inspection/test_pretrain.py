"""``recipes check`` of pretraining, against the objects that training uses."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tests.rows import read_events
from tests.training.pretraining import build_config, run_recipe, write_documents

from recipes_lib.cli import main
from recipes_lib.commands.check import check
from recipes_lib.training.layouts.launch_environment import plan_launch


def run_check(config, num_processes=1, pipeline=None):
    output = io.StringIO()
    launch = plan_launch(None, num_processes, pipeline)
    problems = check(config, launch, Console(file=output, width=200, highlight=False))
    return problems, output.getvalue()


def test_valid_run_is_ready_with_rates_of_training(tmp_path, tiny_tokenizer_dir, monkeypatch) -> None:
    config = build_config(tmp_path, tiny_tokenizer_dir, test_split_size=0.2, max_steps=9, warmup_steps=2)
    problems, text = run_check(config)
    assert not problems
    for fact in (
        "ready to train",
        "llama",
        "9 steps of 64 tokens; 576 tokens in all",
        "held out of",
        "2 steps of warm-up",
    ):
        assert fact in text
    assert not (tmp_path / "out").exists()
    run_recipe(config, monkeypatch)
    rates = [step["learning_rate"] for step in read_events(tmp_path / "out")]
    printed = text.split("learning rate at 0, 25, 50, 75, 100 %: ")[1].splitlines()[0].split(", ")
    assert printed == [f"{rates[step]:.2e}" for step in (0, 2, 4, 6, 8)]


def test_pipeline_parallel_run_is_planned_per_pipeline(tmp_path, tiny_tokenizer_dir) -> None:
    """Four ranks in two pipelines of two stages read the rows of two data-parallel ranks."""
    config = build_config(tmp_path, tiny_tokenizer_dir, gradient_accumulation_steps=2, max_steps=4)
    problems, text = run_check(config, 4, {"PIPELINE_STAGES": "2"})
    assert not problems
    assert "4 processes, each with 1/2 of the layers" in text
    (steps,) = [line for line in text.splitlines() if "tokens in all" in line]
    assert steps in run_check(config, 2)[1]
    assert steps not in run_check(config, 4)[1]


@pytest.mark.parametrize(
    ("keys", "variables", "words"),
    [
        ({}, {"PIPELINE_STAGES": "4"}, "2 layers cannot be split into 4 equal chunks"),
        ({}, {"PIPELINE_STAGES": "3"}, "do not divide the number of processes"),
        ({"optim": "adafactor"}, {"PIPELINE_STAGES": "2"}, "conversion of its states between pipeline stages"),
    ],
)
def test_unsupported_pipeline_parallel_options_are_reported(tmp_path, tiny_tokenizer_dir, keys, variables, words):
    config = build_config(tmp_path, tiny_tokenizer_dir, gradient_accumulation_steps=4, **keys)
    problems, text = run_check(config, 4, variables)
    assert any(words in problem.found for problem in problems), text


def test_all_problems_are_reported_together(tmp_path, tiny_tokenizer_dir) -> None:
    architecture = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 100}
    write_documents(tmp_path / "documents.jsonl", 2)
    config = build_config(tmp_path, tiny_tokenizer_dir, model_config=architecture, max_length=2048)
    problems, text = run_check(config)
    assert {"tokenizer_name_or_path", str(tmp_path / "documents.jsonl")} <= {problem.where for problem in problems}
    assert f"{len(problems)} problems" in text


def test_missing_optional_package_is_warning(tmp_path, tiny_tokenizer_dir, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    problems, text = run_check(build_config(tmp_path, tiny_tokenizer_dir, optim="adamw_torch_8bit"))
    assert not problems
    assert "warning: optim: adamw_torch_8bit needs the package torchao" in text


def test_options_that_optimizer_does_not_take_are_problem(tmp_path, tiny_tokenizer_dir) -> None:
    problems, _ = run_check(build_config(tmp_path, tiny_tokenizer_dir, optim_args="momentom=0.9"))
    assert [problem.where for problem in problems] == ["optim_args"]


@pytest.mark.parametrize("name", ["pretrain.yaml", "mine.yaml"])
def test_recipe_is_inferred_from_file_name(tmp_path, tiny_tokenizer_dir, name, capsys) -> None:
    documents = write_documents(tmp_path / "documents.jsonl")
    keys = {
        "model_config": "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_attention_heads: 4}",
        "tokenizer_name_or_path": tiny_tokenizer_dir,
        "dataset_name": documents,
        "output_dir": tmp_path / "out",
        "prepared_dir": tmp_path / "prepared",
        "max_length": 32,
        "max_steps": 3,
    }
    (tmp_path / name).write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))
    recipe = [] if name == "pretrain.yaml" else ["--recipe", "pretrain"]
    assert main(["check", *recipe, "--config", str(tmp_path / name)]) == 0
    assert main(["prepare", *recipe, "--config", str(tmp_path / name)]) == 0
    assert main(["preview", *recipe, "--config", str(tmp_path / name), "--rows", "1"]) == 0
    output = capsys.readouterr().out
    assert "already prepared" in output
    assert "trained on" in output
    assert main(["check", "--recipe", "pretrian", "--config", str(tmp_path / name)]) == 2


def test_model_that_cannot_be_built_is_one_problem(tmp_path, tiny_tokenizer_dir) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    architecture = {"model_type": "llama", "rope_scaling": {"rope_type": "nope"}, **sizes}
    problems, _ = run_check(build_config(tmp_path, tiny_tokenizer_dir, model_config=architecture))
    assert [problem.found for problem in problems] == ["a llama model cannot be built: 'nope'"]
