"""Every recipe stops when it is asked to, and goes on by the same command to the very weights."""

from __future__ import annotations

import json

import pytest
import torch
from tests.recipes.preferences import make_rows
from tests.recipes.test_preempted import finish, start, stop_at
from tests.rows import write_rows
from tests.training.pairs import load_weights

PAIRS = {"test_split_size": 2, "per_device_train_batch_size": 2}
RECIPE_NAMES = {
    "pretrain": {"max_length": 64, "max_steps": 6, "learning_rate": 1e-3},
    "lora": {"test_split_size": 2, "lora_r": 4, "lora_dropout": 0.1, "learning_rate": 1e-3},
    "reward": {**PAIRS, "learning_rate": 1e-3},
    "dpo": {**PAIRS, "learning_rate": 1e-4},
}


def describe(recipe, tiny_model_dir, folder):
    """The keys of a run of six steps that is saved at its end."""
    data = folder / "rows.jsonl"
    if recipe in ("reward", "dpo"):
        write_rows(data, make_rows(14))
    elif recipe == "pretrain":
        data.write_text("".join(json.dumps({"text": f"Document {n} of many. " * 30}) + "\n" for n in range(40)))
    else:
        rows = ({"prompt": f"{n}?", "completion": f" {n}, yes. " * (1 + n % 5)} for n in range(40))
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model_name_or_path": tiny_model_dir,
        "dataset_name": data,
        "prepared_dir": folder / "prepared",
        "bf16": "false",
        "use_cpu": "true",
        "max_steps": 6,
        "save_steps": 100,
        **({} if recipe == "reward" else {"num_sample_prompts": 1, "sample_max_new_tokens": 2}),
    } | RECIPE_NAMES[recipe]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "phase", "call", "saved"),
    [
        ("pretrain", "step", 3, "checkpoint-3 is complete"),
        ("lora", "step", 3, "checkpoint-3 is complete"),
        ("reward", "pairs", 3, "checkpoint-3 is complete"),
        ("dpo", "pairs", 3, "checkpoint-3 is complete"),
        ("dpo", "reference", 1, "nothing was to be saved yet"),
    ],
)
def test_a_recipe_stops_and_goes_on_to_the_very_weights(tiny_model_dir, tmp_path, recipe, phase, call, saved):
    keys = describe(recipe, tiny_model_dir, tmp_path)
    code, told = finish(start(keys, tmp_path / "straight", recipe=recipe))
    assert code == 0, told[-3000:]

    (tmp_path / "stopped").mkdir()
    run = tmp_path / "stopped" / "run"
    if phase == "reference":
        keys["prepared_dir"] = tmp_path / "prepared again"  # Where nothing is known of the reference.
    code, told = stop_at(keys, run, (phase, call, 0), recipe=recipe)
    assert code == 75, told[-3000:]
    assert saved in told.splitlines()[-1]
    code, told = finish(start(keys, run, recipe=recipe))
    assert code == 0, told[-3000:]

    expected, got = load_weights(tmp_path / "straight"), load_weights(run)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
