"""The PPO recipe end to end: model, adapter, reward model, failing reward function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.distributed import sharding
from tests.distributed.cells import assert_exported
from tests.forked import run_script
from tests.rows import read_events, write_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

RECIPE = Path(__file__).parents[2] / "recipes" / "ppo.py"
REWARDS = """
import random

def prefer_short(*, prompts, completions, completion_ids, answer, **_):
    assert prompts[0][0]["role"] == "user" and answer[0].isdigit()
    return [-len(ids) / 16 + 0.001 * random.random() for ids in completion_ids]
"""


def make_keys(model_dir: Path, folder: Path, **keys: object) -> dict[str, object]:
    return {
        "model_name_or_path": model_dir,
        "dataset_name": folder / "prompts.jsonl",
        "output_dir": folder / "out put",
        "reward_funcs": "[my_rewards:prefer_short]",
        "test_split_size": 4,
        "per_device_train_batch_size": 4,
        "num_mini_batches": 2,
        "response_length": 12,
        "max_steps": 12,
        "learning_rate": 1e-3,
        "bf16": False,
        "eval_steps": 4,
        "save_steps": 4,
        **keys,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    rows = [{"prompt": [{"role": "user", "content": f"{n} plus {n}?"}], "answer": str(2 * n)} for n in range(20)]
    write_rows(folder / "prompts.jsonl", rows)
    (folder / "my_rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture
def run_here(tiny_model_dir, folder, monkeypatch):
    """Return a function that runs the recipe in this process, without report, and returns its exit code."""
    monkeypatch.syspath_prepend(folder)
    return lambda **keys: sharding.run_recipe("ppo", make_keys(tiny_model_dir, folder, **keys))


def test_run_writes_model_record_and_report(tiny_model_dir, folder):
    keys = make_keys(tiny_model_dir, folder)
    run_script(RECIPE, keys, paths=[folder])
    finished = folder / "out put"
    record = json.loads((finished / "run.json").read_text())
    assert record["status"] == "done"
    assert record["stage"] == "ppo"
    assert record["data"]["num_prompts"] == 16
    assert [event["step"] for event in read_events(finished, "train")] == [4, 8, 12]
    assert [event["step"] for event in read_events(finished, "eval")] == [0, 4, 8, 12]
    assert read_events(finished, "train")[0]["objective/kl_seq"] == pytest.approx(0, abs=1e-6)
    assert "After training, step 12" in (finished / "report.html").read_text()
    model = AutoModelForCausalLM.from_pretrained(finished)
    tokenizer = AutoTokenizer.from_pretrained(finished)
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert set(model.generation_config.eos_token_id) == ends
    assert not (finished / "training_args.bin").exists()
    assert_exported(finished, 12, folder / "exported")


def test_adapter_is_saved_without_critic(run_here, folder):
    out = folder / "adapter"
    assert run_here(output_dir=out, use_peft=True, max_steps=4) == 0
    assert (out / "adapter_model.safetensors").exists()
    assert not (out / "critic").exists()
    adapted = AutoModelForCausalLM.from_pretrained(out)
    assert any(parameter.any() for name, parameter in adapted.named_parameters() if "lora_B" in name)
    assert_exported(out, 4, folder / "exported adapter")


def test_reward_model_scores_and_initialises_critic(run_here, tiny_model_dir, folder):
    reward_model = folder / "reward model"
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1)
    model.save_pretrained(reward_model)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(reward_model)
    keys = {"reward_model_name_or_path": reward_model, "reward_weights": "[1.0, 0.5]", "max_steps": 4}
    assert run_here(output_dir=folder / "with model", **keys) == 0
    (event,) = read_events(folder / "with model", "train")
    parts = [event[f"objective/score/{name}"] for name in ("prefer_short", "reward_model")]
    assert event["objective/score"] == pytest.approx(parts[0] + 0.5 * parts[1], abs=1e-5)
    assert event["value/mean"] != 0


FAILING = """
def compare(solution, **_):
    pass

def build():
    print("built")
    return fail

def fail(**_):
    raise KeyError('solution')
"""


def test_failing_reward_function_is_user_error(run_here, folder, capsys):
    (folder / "broken_rewards.py").write_text(FAILING)
    assert run_here(output_dir=folder / "uncallable", reward_funcs="[broken_rewards:compare]") == 2
    assert "compare cannot be called: missing a required argument: 'solution'" in capsys.readouterr().err
    assert run_here(output_dir=folder / "broken", reward_funcs="[broken_rewards:build()]") == 2
    printed, error = capsys.readouterr()
    # A factory may load a model.
    assert printed.count("built") == 1
    assert "build failed on" in error
    assert "KeyError: 'solution'" in error
    assert "Traceback" not in error
