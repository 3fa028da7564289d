"""The recipes of RLOO and GRPO from end to end, as a user runs them: finished, stopped and gone on with, refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.distributed import sharding
from tests.forked import run_script
from tests.rows import read_events, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

RECIPES = Path(__file__).parents[2] / "recipes"
REWARDS = """
def prefer_short(*, prompts, completions, completion_ids, answer, **_):
    assert prompts[0][0]["role"] == "user" and answer[0].isdigit()
    return [-len(set(ids)) / 16 for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    rows = [{"question": f"{n} plus {n}?", "answer": str(2 * n)} for n in range(20)]
    write_rows(folder / "prompts.jsonl", rows)
    (folder / "my_rewards.py").write_text(REWARDS)
    return folder


def make_keys(model_dir: Path, folder: Path) -> dict[str, object]:
    return {
        "model_name_or_path": model_dir,
        "dataset_name": folder / "prompts.jsonl",
        "reward_funcs": "[my_rewards:prefer_short]",
        "test_split_size": 4,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "response_length": 12,
        "missing_eos_penalty": "null",
        "max_steps": 4,
        "learning_rate": 1e-3,
        "bf16": False,
        "eval_steps": 2,
        "save_steps": 4,
    }


def run(recipe: str, model_dir: Path, folder: Path, name: str, **keys: object) -> subprocess.CompletedProcess[str]:
    given = {**make_keys(model_dir, folder), "output_dir": folder / name, **keys}
    flags = [f"--{name}={value}" for name, value in given.items()]
    return run_script(RECIPES / f"{recipe}.py", *flags, paths=[folder])


@pytest.mark.multiprocess
def test_two_processes_answer_the_groups_of_a_step_between_them(tiny_model_dir, folder, tmp_path):
    keys = make_keys(tiny_model_dir, folder) | {"reward_funcs": "[tests.faults.recipe_runs:prefer_short]"}
    # Three prompts a process and a step of the sixteen: the last ones of an epoch make no step.
    jobs = {
        name: {"stage": "grpo", "keys": keys | {"per_device_train_batch_size": size}}
        for name, size in (("three", 12), ("one", 4))
    }
    sharding.run_jobs(jobs, tmp_path, "cpu_ddp")
    for name, num_answers in (("three", 24), ("one", 8)):
        record = json.loads((tmp_path / name / "run.json").read_text())
        told = [record[key] for key in ("status", "num_processes", "answers_per_generation")]
        assert told == ["done", 2, num_answers]
        assert [event["step"] for event in read_events(tmp_path / name)] == [1, 2, 3, 4]


def test_it_leaves_a_model_its_record_and_a_report(tiny_model_dir, folder):
    done = run("rloo", tiny_model_dir, folder, "out put")
    assert done.returncode == 0, done.stderr
    out = folder / "out put"
    record = json.loads((out / "run.json").read_text())
    assert (record["status"], record["stage"], record["answers_per_generation"]) == ("done", "rloo", 4)
    assert [event["step"] for event in read_events(out, "eval")] == [0, 2, 4]
    first = read_events(out)[0]
    # RLOO's reward is less the penalty of an answer that does not end, and the KL.
    assert first["reward"] <= first["objective/score"] + 1e-6
    assert "After training, step 4" in (out / "report.html").read_text()
    tokenizer = AutoTokenizer.from_pretrained(out)
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert set(AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id) == ends
    assert not (out / "training_args.bin").exists()
