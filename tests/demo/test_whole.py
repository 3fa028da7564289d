"""The whole demo as a process: every stage improves its metric."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.rows import read_events


@pytest.mark.slow
def test_each_stage_of_demo_learns(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "recipes_lib.cli", "demo", "--output_dir", str(tmp_path / "a demo")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs = {
        name: read_events(tmp_path / "a demo" / name, "eval")
        for name in ("pretrain", "sft", "lora", "reward", "dpo", "ppo", "grpo", "labels", "distill")
    }
    assert runs["pretrain"][-1]["eval_loss"] < runs["pretrain"][0]["eval_loss"] - 2
    for stage in ("sft", "lora"):
        assert runs[stage][0]["eval_exact_match"] < 0.05
        assert runs[stage][-1]["eval_exact_match"] > 0.5
    assert runs["dpo"][-1]["eval_rewards/accuracies"] > 0.8
    before, after = runs["ppo"][0], runs["ppo"][-1]
    assert after["eval_reward"] > before["eval_reward"] + 0.08
    assert after["eval_reward/exact_match"] > before["eval_reward/exact_match"] + 0.04
    assert after["eval_stop_rate"] > 0.95
    assert runs["grpo"][-1]["eval_reward"] > runs["grpo"][0]["eval_reward"] + 0.04
    bits = {name: runs[name][-1]["eval_bits_per_byte"] for name in ("pretrain", "distill", "labels")}
    assert runs["distill"][0] == {**runs["labels"][0], "eval_seconds": runs["distill"][0]["eval_seconds"]}
    assert bits["pretrain"] < bits["distill"] < bits["labels"] - 0.01
    assert "At equal tokens, distillation gains" in done.stdout
    verdict = json.loads((tmp_path / "a demo" / "reward" / "reward_report.json").read_text(encoding="utf-8"))
    assert verdict["failed_gates"] == []
    assert verdict["accuracy_low"] > 0.65
    assert "Is the reward model good enough for PPO? Yes" in done.stdout
    assert "ppo: KL to the fine-tuned model" in done.stdout
