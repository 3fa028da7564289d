"""The recipe as a user runs it: an adapter that a stranger loads with plain PEFT, and that merges into a model."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.forked import ROOT, run_script
from tests.recipes.stranger import ask
from tests.rows import read_rows, write_rows

from recipes_lib import cli

ANSWERS = ["Paris.", "Seven days.", "It is\nfour.", "blue, mostly"]
QUESTIONS = ["capital of France", "days in a week", "two plus two", "the sky"]


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats, with spaces.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    write_rows(path, rows)
    return path


def run_lora(tmp_path, tiny_model_dir, chats, *, output="a run", code=0, num_processes=None, **keys):
    keys = {
        "model_name_or_path": tiny_model_dir,
        "dataset_name": chats,
        "output_dir": tmp_path / output,
        "prepared_dir": tmp_path / "prepared",
        "bf16": "false",
        "learning_rate": 1e-2,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "max_length": 64,
        "num_sample_prompts": 0,
        "save_strategy": "no",
    } | keys
    flags = [f"--{name}={value}" for name, value in keys.items()]
    done = run_script(ROOT / "recipes" / "lora.py", *flags, num_processes=num_processes)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stderr


def test_an_adapter_learns_chats_and_a_stranger_gets_the_answers_from_it_and_from_the_merged_model(
    tmp_path, tiny_model_dir, chats
):
    keys = {"max_steps": 60, "lora_r": 32, "lora_modules_to_save": "[norm]", "loraplus_lr_ratio": 4}
    told = run_lora(tmp_path, tiny_model_dir, chats, **keys)
    output = tmp_path / "a run"
    for line in ("changes no logit", "33 trained tensors have a gradient", "frozen tensors are unchanged"):
        assert line in told
    answers = ask(tiny_model_dir, output, QUESTIONS)
    assert [(answer["text"], answer["stopped"]) for answer in answers] == [(answer, True) for answer in ANSWERS]
    names = {path.name for path in output.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "generation_config.json", "README.md"} <= names
    assert {"tokenizer.json", "chat_template.jinja", "run.json", "metrics.jsonl", "report.html"} <= names
    assert not names & {"model.safetensors", "training_args.bin", "_unverified"}
    record = json.loads((output / "run.json").read_text())
    assert record["status"] == "done"
    assert record["adapter"]["base_model"] == str(tiny_model_dir)

    assert cli.main(["merge", "--adapter", str(output), "--output", str(tmp_path / "m m")]) == 0
    assert ask(tmp_path / "m m", tmp_path / "m m", QUESTIONS) == answers


def test_a_run_that_stopped_goes_on_to_the_very_same_adapter(tmp_path, tiny_model_dir, chats):
    keys = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "lora_dropout": 0.1, "max_length": 32}
    run_lora(tmp_path, tiny_model_dir, chats, output="straight", **keys)
    run_lora(tmp_path, tiny_model_dir, chats, output="stopped", **keys)
    # As if it had been killed after its first checkpoint.
    stopped = tmp_path / "stopped"
    for path in (stopped / "checkpoint-6").iterdir():
        path.unlink()
    (stopped / "checkpoint-6").rmdir()
    (stopped / "adapter_model.safetensors").unlink()
    record = json.loads((stopped / "run.json").read_text())
    (stopped / "run.json").write_text(json.dumps(record | {"status": "running"}))
    run_lora(tmp_path, tiny_model_dir, chats, output="stopped", **keys)
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("straight", "stopped"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert json.loads((stopped / "run.json").read_text())["resumed_from"] == "checkpoint-3"


@pytest.mark.multiprocess
def test_two_processes_leave_the_adapter_that_one_leaves(tmp_path, tiny_model_dir, chats):
    keys = {"packing": "false", "num_sample_prompts": 2, "optim": "sgd", "learning_rate": 1}
    run_lora(tmp_path, tiny_model_dir, chats, output="one", **keys)
    run_lora(tmp_path, tiny_model_dir, chats, output="two", num_processes=2, per_device_train_batch_size=2, **keys)
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)
    assert json.loads((tmp_path / "two" / "run.json").read_text())["num_processes"] == 2


def test_a_second_run_goes_on_with_the_adapter_of_the_first(tmp_path, tiny_model_dir, chats):
    run_lora(tmp_path, tiny_model_dir, chats, output="first")
    told = run_lora(tmp_path, tiny_model_dir, chats, output="second", adapter_name_or_path=tmp_path / "first")
    assert "changes no logit" not in told
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    ]
    assert losses[1][0] < losses[0][0]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"lora_target_modules": "[q_porj]"}, "did you mean q_proj"),
        ({"adapter_name_or_path": "nowhere/at/all"}, "adapter_name_or_path"),
        ({"use_peft": "false"}, "use the `sft` recipe"),
    ],
)
def test_a_mistake_ends_with_exit_code_two_and_a_remedy(tmp_path, tiny_model_dir, chats, keys, told):
    errors = run_lora(tmp_path, tiny_model_dir, chats, code=2, **keys)
    assert told in errors
    assert "Traceback" not in errors


def test_an_adapter_learns_on_few_bits(tmp_path, tiny_model_dir, chats):
    told = run_lora(tmp_path, tiny_model_dir, chats, load_in_4bit="true", optim="paged_adamw_8bit", max_steps=6)
    assert "28 trained tensors have a gradient" in told
    events = read_rows(tmp_path / "a run" / "metrics.jsonl")
    assert events[-1]["loss"] < events[0]["loss"]
