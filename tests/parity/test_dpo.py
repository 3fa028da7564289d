"""DPO trajectory against TRL's ``DPOTrainer`` on the same rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trl
from tests.parity import trl_runs
from tests.rows import write_rows
from tests.training.trajectories import Recorder
from transformers import AutoTokenizer
from trl import DPOConfig

from recipes_lib.config.loader import load_config
from recipes_lib.data.pairs.preference_sets import load_pair_data
from recipes_lib.models.loading import load_model_config
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.monitoring.callbacks import Observer
from recipes_lib.training.monitoring.metrics import StepCounter
from recipes_lib.training.monitoring.progress import TrainingProgress
from recipes_lib.training.trainers.arguments import build_training_arguments
from recipes_lib.training.trainers.dpo_trainer import DPOTrainer, build_objective, prepare_reference
from recipes_lib.training.trainers.pair_trainer import build_pair_collator, choose_pair_attention
from recipes_lib.training.trainers.trained_model import load_policy

# TRL also scores tokens after the end of an answer; this template has none.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHARED = trl_runs.PAIRS | {"beta": 0.2}
DPO: dict[str, Any] = {"loss_type": ["sigmoid"], "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
# TRL averages over the tokens of a micro-batch, ours over those of a step: equal without accumulation.
RPO: dict[str, Any] = {
    "loss_type": ["sigmoid", "sft"],
    "loss_weights": [1.0, 0.3],
    "ld_alpha": 0.5,
    "per_device_train_batch_size": 4,
}


def make_pairs(layout: str) -> Iterator[dict[str, Any]]:
    """Yield sixteen pairs of unequal lengths, in some of which the rejected answer is longer."""
    for n in range(16):
        prompt = f"What is {n} times {n + 3}? " * (1 + n % 3)
        chosen, rejected = f"It is {n * (n + 3)}. " * (1 + n % 4), "Who knows? " * (1 + (n + 2) % 3) + str(n)
        if layout == "chat":
            turns = (("user", prompt), ("assistant", chosen), ("assistant", rejected))
            prompt, chosen, rejected = ([{"role": role, "content": text}] for role, text in turns)
            prompt = [{"role": "system", "content": "Be brief."}, *prompt]
        yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def train_ours(model_dir: Path, folder: Path, output_dir: Path, **keys: Any) -> list[dict[str, float]]:
    """Train as the recipe does, without run record and export."""
    keys = SHARED | {
        "model_name_or_path": model_dir,
        "dataset_name": folder / "rows.jsonl",
        "output_dir": output_dir,
        "prepared_dir": output_dir / "prepared",
        **keys,
    }
    config = load_config("dpo", [f"--{name}={_format_loss_types(value)}" for name, value in keys.items()])
    launch = read_launch()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    data = load_pair_data(config, tokenizer)
    args = build_training_arguments(config, launch, has_eval=False)
    attention = choose_pair_attention(config, load_model_config(config.model)[0], args, max_length=data.max_length)
    assert attention.layout == ("shared" if keys["shared_prompt"] else "separate")
    model = load_policy(config, attention.implementation, args, launch)
    objective = build_objective(args, config.preference)
    stored, data = prepare_reference(config, objective, data, model, attention, args)
    assert (stored is not None) == keys["precompute_ref_log_probs"]
    recorder = Recorder()
    DPOTrainer(
        model=model,
        args=args,
        objective=objective,
        stored=stored,
        is_own_reference=True,
        train_dataset=data.train,
        data_collator=build_pair_collator(tokenizer, attention),
        processing_class=tokenizer,
        observer=Observer(StepCounter(), [], [recorder], TrainingProgress()),
    ).train()
    return recorder.steps


def _format_loss_types(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list | bool) else str(value)


# Each layout with and without a shared prompt, stored and computed log-probabilities: pairwise, not all eight.
@pytest.mark.parametrize(
    ("layout", "keys", "options"),
    [("chat", DPO, [(True, True), (False, False)]), ("text", RPO, [(True, False), (False, True)])],
    ids=["dpo", "rpo"],
)
def test_dpo_trajectory_equals_trl(layout, keys, options, tiny_model_dir, tmp_path) -> None:
    model_dir = trl_runs.copy_with_template(tiny_model_dir, tmp_path / "model", TEMPLATE)
    rows = write_rows(tmp_path / "rows.jsonl", make_pairs(layout))
    arguments = partial(DPOConfig, max_length=None, **SHARED, **keys)
    theirs = trl_runs.train_trl(trl.DPOTrainer, arguments, str(model_dir), model_dir, rows, tmp_path)
    assert len(theirs) == SHARED["max_steps"]
    assert theirs[0]["loss"] - theirs[-1]["loss"] > 0.1
    for is_shared, is_stored in options:
        names = {"shared_prompt": is_shared, "precompute_ref_log_probs": is_stored}
        trl_runs.assert_same_steps(theirs, train_ours(model_dir, tmp_path, tmp_path / f"{names}", **keys, **names))
