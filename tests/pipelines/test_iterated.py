"""Iterated DPO, the shipped pipeline: two rounds on a tiny policy raise its reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.forked import ROOT
from tests.rl import keys_task

from recipes_lib.pipelines.pipeline import load_pipeline
from recipes_lib.pipelines.runner import run_pipeline


@pytest.mark.slow
def test_two_rounds_raise_reward_and_second_run_does_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    policy = keys_task.write_policy(tmp_path / "policy", 0)
    prompts = keys_task.write_prompts(tmp_path / "prompts.jsonl", 400, seed=5)
    shared = {"bf16": False, "use_cpu": True, "model_name_or_path": str(policy), "output_dir": str(tmp_path / "unused")}
    sampling = {
        **shared,
        "dataset_name": str(prompts),
        "reward_funcs": ["tests.rl.keys_task:score_first_key"],
        "response_length": keys_task.MAX_ANSWER,
        "per_device_eval_batch_size": 64,
    }
    training = {
        **shared,
        "dataset_name": str(prompts),
        "prepared_dir": str(tmp_path / "prepared"),
        "learning_rate": 0.001,
        "per_device_train_batch_size": 32,
        "num_train_epochs": 6,
        "beta": 0.1,
        "save_strategy": "no",
    }
    for name, keys in (("ppo", sampling), ("dpo", training)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(keys))
    document = yaml.safe_load((ROOT / "recipes" / "pipelines" / "iterated_dpo.yaml").read_text())
    loop = document["stages"]["loop"]
    loop |= {"rounds": 2, "start": {"policy": str(policy)}}
    loop["stages"]["pairs"]["config"] = str(tmp_path / "ppo.yaml")
    loop["stages"]["policy"]["config"] = str(tmp_path / "dpo.yaml")
    path, out = tmp_path / "pipeline.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    pipeline, messages = load_pipeline(path, str(out)), list[str]()
    for _ in range(2):
        assert run_pipeline(pipeline, pipeline.stages, messages.append) == 0
    records = [json.loads((out / f"pairs-{n}.jsonl.record.json").read_text()) for n in (1, 2)]
    means = [record["score_sum"] / record["num_answers"] for record in records]
    assert means[1] > means[0] + 0.1
    assert [line.endswith("already done") for line in messages] == [False] * 4 + [True] * 4
