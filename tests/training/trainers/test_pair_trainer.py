"""Preference and reward training: mean over pairs, logged metrics, resume, and the reward objective."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from tests.training.pairs import Setting, make_pair_trainer, make_pairs, make_reward_trainer, train_pairs
from tests.training.trajectories import assert_equal_weights, weights_of
from trl import RewardConfig

from recipes_lib.config.schema import AdapterConfig, PreferenceConfig
from recipes_lib.training.guards.start_checks import StartChecks
from recipes_lib.training.guards.step_facts import StepInputs
from recipes_lib.training.monitoring.callbacks import TermMetrics
from recipes_lib.training.trainers.pair_batches import PairScores
from recipes_lib.training.trainers.pair_trainer import build_reward_score

WHOLE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
TWO_BY_FOUR = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
LOGGED = ("loss", "grad_norm", "learning_rate", "logps/chosen", "logps/chosen_shift", "rewards/margins")


def test_trajectory_is_independent_of_gradient_accumulation(tiny_model_dir, tmp_path):
    """Thirteen pairs are a step of eight and one of five in each epoch."""
    trajectories = []
    for number, batch in enumerate((WHOLE, TWO_BY_FOUR)):
        options = {"loss_type": ["sigmoid", "sft"], "precompute_ref_log_probs": True, **batch}
        trainer, recorder = make_pair_trainer(tiny_model_dir, tmp_path / str(number), make_pairs(13), **options)
        trainer.train()
        trajectories.append([{key: log[key] for key in LOGGED} for log in recorder.train_logs])
    assert len({step["loss"] for step in trajectories[0]}) == 4
    for step, (wanted, got) in enumerate(zip(*trajectories, strict=True), 1):
        assert got == pytest.approx(wanted, rel=1e-5, abs=1e-6), f"step {step}"


def test_logged_metrics_are_means_over_pairs_since_last_log(tiny_model_dir, tmp_path):
    """Every pair of an epoch has the same weight, also in a smaller last step."""
    options = {"num_train_epochs": 1.0, "max_steps": -1, "learning_rate": 1e-3, "logging_steps": 1}
    pairs = make_pairs(13)
    seen = []

    def watch(trainer):
        score = trainer.score_pairs

        def score_and_keep(model, batch):
            scores = score(model, batch)
            seen.append({name: values.tolist() for name, values in scores.figures.items()})
            return scores

        trainer.score_pairs = score_and_keep
        trainer.remove_callback(StartChecks)  # Their passes would be in ``seen``.
        return trainer

    for logging_steps, num_logs in ((1, 4), (3, 1), (2, 2)):
        seen.clear()
        options["logging_steps"] = logging_steps
        options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        trainer, recorder = make_pair_trainer(tiny_model_dir, tmp_path / str(logging_steps), pairs, **options)
        watch(trainer).train()
        logs = recorder.train_logs
        assert len(logs) == num_logs
        steps = [seen[0:2], seen[2:4], seen[4:6], seen[6:7]]
        assert len(seen) == 7
        for number, log in enumerate(logs):
            window = steps[number * logging_steps : (number + 1) * logging_steps]
            for name in ("logps/chosen", "rewards/margins", "rewards/accuracies", "logps/chosen_shift"):
                values = [value for step in window for batch in step for value in batch[name]]
                assert log[name] == pytest.approx(sum(values) / len(values), rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("use_peft", [False, True])
def test_resumed_run_is_bit_identical(tiny_model_dir, tmp_path, use_peft):
    """Resumed in the second epoch, whose last step is smaller."""
    options = {
        "setting": Setting(adapter=AdapterConfig(use_peft=use_peft, lora_r=4)),
        "precompute_ref_log_probs": True,
        "loss_type": ["sigmoid", "sft"],
        "max_steps": 6,
        **TWO_BY_FOUR,
    }
    keys = {"save_strategy": "steps", "save_steps": 3}
    straight, recorder = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs(13), **options, **keys)
    straight.train()
    resumed, second = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs(13), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert second.steps == recorder.steps[3:]
    assert_equal_weights(weights_of(resumed), weights_of(straight))


def test_activation_checkpointing_keeps_trajectory(tiny_model_dir, tmp_path):
    """That of an adapter too: ``tests/training/guards/test_adapter_checks.py``."""
    trajectories = [
        train_pairs(tiny_model_dir, tmp_path / str(is_on), make_pairs(), activation_checkpointing=is_on)
        for is_on in (False, True)
    ]
    for expected, got in zip(*trajectories, strict=True):
        assert got == pytest.approx(expected, rel=1e-5)


def test_router_loss_is_weighted_by_tokens_of_batch(tiny_model_dir, tmp_path):
    trainer, _ = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs())
    trainer.router_aux_loss_coef, trainer.guard.inputs = 0.5, StepInputs(num_tokens=torch.tensor(24))
    batch = {"num_completion_tokens": torch.ones(6, dtype=torch.int64), "num_tokens": torch.tensor(6)}
    margins = {"margin": torch.tensor([0.5, 0.25, 8.0])}
    scores = PairScores(losses=torch.tensor([1.0, 2.0, 6.0]), figures=margins, aux_loss=torch.tensor(8.0))
    trainer.score_pairs = lambda model, batch: scores
    assert float(trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(6))) == 9 / 6 + 0.5 * 8 / 4
    # Means are over counted pairs only.
    trainer.router_aux_loss_coef, trainer.figures = 0.0, TermMetrics()
    counted = {**batch, "num_counted_pairs": 2}
    loss = trainer.compute_loss(trainer.model, counted, num_items_in_batch=torch.tensor(5))
    assert float(loss) == pytest.approx(3 / 5)
    logs = {"loss": 0.0}
    trainer.figures.on_log(trainer.args, trainer.state, trainer.control, logs)
    assert logs["margin"] == 0.375
    assert float(trainer.compute_loss(trainer.model, counted)) == 1.5


GOOD, BAD, END = 7, 8, 0


def make_judged_pairs(num_pairs: int = 32) -> Dataset:
    """Return pairs whose chosen answers contain the token ``GOOD`` and rejected answers ``BAD``."""
    generator = np.random.default_rng(0)
    rows = {"prompt_ids": [], "chosen_ids": [], "rejected_ids": []}
    for _ in range(num_pairs):
        rows["prompt_ids"].append(generator.integers(20, 512, 6))
        for name, token in (("chosen_ids", GOOD), ("rejected_ids", BAD)):
            answer = generator.integers(20, 512, generator.integers(2, 8))
            answer[generator.integers(len(answer))] = token
            rows[name].append(np.append(answer, END))
    return Dataset.from_dict(rows).with_format("numpy")


def test_reward_model_learns_preferred_token(tiny_model_dir, tmp_path):
    keys = {"learning_rate": 3e-3, "max_steps": 60, "per_device_train_batch_size": 8, "warmup_steps": 5}
    trainer, recorder = make_reward_trainer(tiny_model_dir, tmp_path, make_judged_pairs(), **keys)
    trainer.train()
    last = recorder.train_logs[-5:]
    assert all(logs["rewards/accuracies"] == 1 for logs in last)
    held_out = make_judged_pairs(64).select(range(32, 64))
    batch = trainer.data_collator([held_out[number] for number in range(32)])
    scores = trainer.score_pairs(trainer.model.eval(), batch)
    assert scores.figures["rewards/accuracies"].mean() > 0.9


@pytest.mark.parametrize("mistake", ["one token early", "without the end", "swapped"])
def test_wrong_score_position_changes_losses(tiny_model_dir, tmp_path, mistake):
    pairs = make_pairs(4)
    trainer, _ = make_reward_trainer(tiny_model_dir, tmp_path, pairs)
    rows = [pairs[number] for number in range(4)]
    right = trainer.score_pairs(trainer.model.eval(), trainer.data_collator(rows)).losses
    if mistake == "without the end":
        rows = [row | {"chosen_ids": row["chosen_ids"][:-1]} for row in rows if len(row["chosen_ids"]) > 1]
        right = right[[len(pair["chosen_ids"]) > 1 for pair in pairs]]
    batch = trainer.data_collator(rows)
    if mistake == "one token early":
        batch["last_positions"] = batch["last_positions"] - 1
    if mistake == "swapped":
        batch["last_positions"] = batch["last_positions"].view(-1, 2).flip(1).flatten()
    assert not torch.allclose(trainer.score_pairs(trainer.model, batch).losses, right, atol=1e-4)


def test_reward_metrics_equal_scores_of_hidden_states(tiny_model_dir, tmp_path):
    pairs = make_pairs(5)
    trainer, _ = make_reward_trainer(tiny_model_dir, tmp_path, pairs)
    batch = trainer.data_collator([pairs[number] for number in range(5)])
    with torch.no_grad():
        scores = trainer.score_pairs(trainer.model.eval(), batch)
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


@pytest.mark.parametrize("coefficient", [0.02, None])
def test_reward_loss_reads_keys(tmp_path, coefficient):
    args = RewardConfig(str(tmp_path), use_cpu=True, center_rewards_coefficient=coefficient)
    score = build_reward_score(args, PreferenceConfig(label_smoothing=0.1))
    assert score.keywords == {"label_smoothing": 0.1, "center_coefficient": coefficient or 0.0}
