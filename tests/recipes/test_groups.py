"""The RLOO and GRPO recipes end to end."""

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
def test_groups_of_step_are_divided_over_ranks(inputs, tmp_path):
    # Three of the fourteen prompts per rank and step: the last two of an epoch are dropped.
    keys = recipe_runs.make_keys(inputs, "grpo", **KEYS | {"test_split_size": 46, "num_iterations": 1})
    jobs = {
        name: {"stage": "grpo", "keys": keys | {"per_device_train_batch_size": size}}
        for name, size in (("three groups", 12), ("one group", 4))
    }
    sharding.run_jobs(jobs, tmp_path, "cpu_ddp")
    for name, num_answers in (("three groups", 24), ("one group", 8)):
        record = json.loads((tmp_path / name / "run.json").read_text())
        recorded = [record[key] for key in ("status", "num_processes", "answers_per_generation")]
        assert recorded == ["done", 2, num_answers]
        assert [event["step"] for event in read_events(tmp_path / name)] == [1, 2, 3, 4]


def test_rloo_run_writes_model_record_and_report(inputs, tmp_path):
    out = tmp_path / "out put"
    keys = recipe_runs.make_keys(inputs, "rloo", **KEYS, output_dir=out)
    run_script(ROOT / "recipes" / "rloo.py", keys)
    record = json.loads((out / "run.json").read_text())
    assert (record["status"], record["stage"], record["answers_per_generation"]) == ("done", "rloo", 4)
    assert [event["step"] for event in read_events(out, "eval")] == [0, 2, 4]
    first = read_events(out)[0]
    # RLOO subtracts the KL penalty, and that of answers without a stop token.
    assert first["reward"] <= first["objective/score"] + 1e-6
    assert "After training, step 4" in (out / "report.html").read_text()
    tokenizer = AutoTokenizer.from_pretrained(out)
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert set(AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id) == ends
    assert not (out / "training_args.bin").exists()
