"""A reward model learns what tells answers apart, at the token that ends them; its figures are means over pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from tests.training.pairs import Recorder, make_pairs
from transformers import AutoTokenizer
from trl import RewardConfig

from recipes_lib.config.schema import ModelConfig, PreferenceConfig
from recipes_lib.data.pairs.collator import PairCollator
from recipes_lib.models.heads.score_head import add_score_head, load_reward_model
from recipes_lib.training.monitoring.metrics import StepCounter
from recipes_lib.training.monitoring.observer import Observer
from recipes_lib.training.monitoring.progress import TrainingProgress
from recipes_lib.training.trainers.pair_trainer import RewardObjective, RewardTrainer, build_reward_objective

GOOD, BAD, END = 7, 8, 0


def make_judged_pairs(num_pairs: int = 32) -> Dataset:
    """Pairs whose chosen answer holds one certain token, and whose rejected answer another."""
    generator = np.random.default_rng(0)
    rows = {"prompt_ids": [], "chosen_ids": [], "rejected_ids": []}
    for _ in range(num_pairs):
        rows["prompt_ids"].append(generator.integers(20, 512, 6))
        for name, token in (("chosen_ids", GOOD), ("rejected_ids", BAD)):
            answer = generator.integers(20, 512, generator.integers(2, 8))
            answer[generator.integers(len(answer))] = token
            rows[name].append(np.append(answer, END))
    return Dataset.from_dict(rows).with_format("numpy")


def make_trainer(model_dir, folder, pairs, objective=None, **training):
    model = load_reward_model(ModelConfig(model_name_or_path=str(model_dir)), "sdpa", seed=0)
    add_score_head(model)
    recorder = Recorder()
    keys = {"bf16": False, "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "report_to": "none"}
    args = RewardConfig(str(folder), remove_unused_columns=False, disable_tqdm=True, **keys | training)
    trainer = RewardTrainer(
        model=model,
        args=args,
        objective=objective or RewardObjective(),
        train_dataset=pairs,
        data_collator=PairCollator(pad_token_id=1),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        observer=Observer(StepCounter(), [], [recorder], TrainingProgress()),
    )
    return trainer, recorder


def test_it_learns_which_answers_are_preferred(tiny_model_dir, tmp_path):
    keys = {"learning_rate": 3e-3, "max_steps": 60, "per_device_train_batch_size": 8, "warmup_steps": 5}
    trainer, recorder = make_trainer(tiny_model_dir, tmp_path, make_judged_pairs(), **keys)
    trainer.train()
    last = [logs for logs in recorder.logs if "loss" in logs][-5:]
    assert all(logs["rewards/accuracies"] == 1 for logs in last)
    held_out = make_judged_pairs(64).select(range(32, 64))
    batch = trainer.data_collator([held_out[number] for number in range(32)])
    scores = trainer.objective.score(trainer.model.eval(), batch)
    assert scores.figures["rewards/accuracies"].mean() > 0.9


@pytest.mark.parametrize("mistake", ["one token early", "without the end", "swapped"])
def test_a_score_read_elsewhere_is_another_score(tiny_model_dir, tmp_path, mistake):
    pairs = make_pairs(4)
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, pairs)
    rows = [pairs[number] for number in range(4)]
    right = trainer.objective.score(trainer.model.eval(), trainer.data_collator(rows)).losses
    if mistake == "without the end":
        rows = [row | {"chosen_ids": row["chosen_ids"][:-1]} for row in rows if len(row["chosen_ids"]) > 1]
        right = right[[len(pair["chosen_ids"]) > 1 for pair in pairs]]
    batch = trainer.data_collator(rows)
    if mistake == "one token early":
        batch["last_positions"] = batch["last_positions"] - 1
    if mistake == "swapped":
        batch["last_positions"] = batch["last_positions"].view(-1, 2).flip(1).flatten()
    assert not torch.allclose(trainer.objective.score(trainer.model, batch).losses, right, atol=1e-4)


def test_the_figures_are_those_of_the_scores(tiny_model_dir, tmp_path):
    pairs = make_pairs(5)
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, pairs)
    batch = trainer.data_collator([pairs[number] for number in range(5)])
    with torch.no_grad():
        scores = trainer.objective.score(trainer.model.eval(), batch)
        for number, pair in enumerate(pairs):
            for name in ("chosen", "rejected"):
                ids = torch.from_numpy(np.concatenate([pair["prompt_ids"], pair[f"{name}_ids"]]))[None]
                states = trainer.model.model(input_ids=ids).last_hidden_state[0, -1]
                expected = trainer.model.score.weight[0] @ states
                assert scores.figures[f"rewards/{name}"][number] == pytest.approx(float(expected), abs=1e-5)
    gap = scores.figures["rewards/chosen"] - scores.figures["rewards/rejected"]
    assert torch.equal(scores.figures["rewards/margins"], gap)
    assert torch.equal(scores.figures["rewards/accuracies"], (gap > 0).float())
    assert torch.allclose(scores.losses, -torch.nn.functional.logsigmoid(gap))


def test_the_objective_takes_upstreams_keys_and_ours(tmp_path):
    args = RewardConfig(str(tmp_path), use_cpu=True, center_rewards_coefficient=0.02)
    objective = build_reward_objective(args, PreferenceConfig(label_smoothing=0.1))
    assert objective == RewardObjective(label_smoothing=0.1, center_coefficient=0.02)
    args = RewardConfig(str(tmp_path), use_cpu=True, center_rewards_coefficient=None)
    assert build_reward_objective(args, PreferenceConfig()) == RewardObjective()
