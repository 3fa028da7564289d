"""The recipes of RLOO and GRPO from end to end, as a user runs them."""

from __future__ import annotations

import json

import pytest
from tests.distributed import sharding
from tests.faults import recipe_runs
from tests.forked import ROOT, run_script
from tests.rows import read_events
from transformers import AutoModelForCausalLM, AutoTokenizer

KEYS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "num_generations": 4,
    "missing_eos_penalty": "null",
    "max_steps": 4,
    "eval_steps": 2,
    "save_steps": 4,
}


@pytest.mark.multiprocess
def test_two_processes_answer_the_groups_of_a_step_between_them(inputs, tmp_path):
    # Three prompts a process and a step of the fourteen: the last ones of an epoch make no step.
    keys = recipe_runs.make_keys(inputs, "grpo", **KEYS | {"test_split_size": 46, "num_iterations": 1})
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


def test_it_leaves_a_model_its_record_and_a_report(inputs, tmp_path):
    out = tmp_path / "out put"
    keys = recipe_runs.make_keys(inputs, "rloo", **KEYS, output_dir=out)
    done = run_script(ROOT / "recipes" / "rloo.py", *(f"--{name}={value}" for name, value in keys.items()))
    assert done.returncode == 0, done.stderr
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
