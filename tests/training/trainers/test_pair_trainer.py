"""A mean over pairs: however a step is cut, in the last one of an epoch too, and in what is logged."""

from __future__ import annotations

import pytest
import torch
from tests.training.pairs import Setting, make_pair_trainer, make_pairs, train_pairs
from tests.training.trajectories import assert_equal_weights, weights_of

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.training.guards.start_checks import StartChecks
from recipes_lib.training.guards.step_facts import StepInputs
from recipes_lib.training.trainers.pair_batches import PairScores

CUTS = {
    "8x1": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "2x4": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "1x8": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
}
LOGGED = ("loss", "grad_norm", "learning_rate", "logps/chosen", "logps/chosen_shift", "rewards/margins")
LOSSES = [["sigmoid"], ["sigmoid", "sft"]]


@pytest.mark.parametrize("names", LOSSES, ids="+".join)
@pytest.mark.parametrize("num_pairs", [16, 13])
def test_how_a_step_is_cut_changes_nothing(tiny_model_dir, tmp_path, names, num_pairs):
    """Thirteen pairs are a step of eight and one of five, in each epoch."""
    trajectories = {}
    for name in ("8x1", "2x4", "1x8"):
        options = {"loss_type": names, "precompute_ref_log_probs": True, **CUTS[name]}
        trainer, recorder = make_pair_trainer(tiny_model_dir, tmp_path / name, make_pairs(num_pairs), **options)
        trainer.train()
        trajectories[name] = [{key: log[key] for key in LOGGED} for log in recorder.logs if "loss" in log]
    expected = trajectories.pop("8x1")
    assert len({step["loss"] for step in expected}) == 4
    for name, trajectory in trajectories.items():
        for step, (wanted, got) in enumerate(zip(expected, trajectory, strict=True), 1):
            assert got == pytest.approx(wanted, rel=1e-5, abs=1e-6), f"{name}, step {step}"


def test_a_logged_figure_is_the_mean_over_all_pairs_since_the_last_log(tiny_model_dir, tmp_path):
    """Each pair of an epoch counts once, those of a smaller last step no more than others."""
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
        trainer.remove_callback(StartChecks)  # They score pairs that are no step's.
        return trainer

    for logging_steps, num_logs in ((1, 4), (3, 1), (2, 2)):
        seen.clear()
        options["logging_steps"] = logging_steps
        options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        trainer, recorder = make_pair_trainer(tiny_model_dir, tmp_path / str(logging_steps), pairs, **options)
        watch(trainer).train()
        logs = [log for log in recorder.logs if "loss" in log]
        assert len(logs) == num_logs
        steps = [seen[0:2], seen[2:4], seen[4:6], seen[6:7]]
        assert len(seen) == 7
        for number, log in enumerate(logs):
            window = steps[number * logging_steps : (number + 1) * logging_steps]
            for name in ("logps/chosen", "rewards/margins", "rewards/accuracies", "logps/chosen_shift"):
                values = [value for step in window for batch in step for value in batch[name]]
                assert log[name] == pytest.approx(sum(values) / len(values), rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("use_peft", [False, True])
def test_a_resumed_run_ends_with_the_very_weights_of_one_that_never_stopped(tiny_model_dir, tmp_path, use_peft):
    """Stopped within the second epoch, whose last step is a smaller one."""
    options = {
        "setting": Setting(adapter=AdapterConfig(use_peft=use_peft, lora_r=4)),
        "precompute_ref_log_probs": True,
        "loss_type": ["sigmoid", "sft"],
        "max_steps": 6,
        **CUTS["2x4"],
    }
    keys = {"save_strategy": "steps", "save_steps": 3}
    straight, recorder = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs(13), **options, **keys)
    straight.train()
    resumed, second = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs(13), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert second.steps == recorder.steps[3:]
    assert_equal_weights(weights_of(resumed), weights_of(straight))


def test_activation_checkpointing_changes_nothing(tiny_model_dir, tmp_path):
    for use_peft in (False, True):
        setting = Setting(adapter=AdapterConfig(use_peft=use_peft, lora_r=4))
        trajectories = [
            train_pairs(
                tiny_model_dir,
                tmp_path / f"{use_peft} {is_on}",
                make_pairs(),
                setting=setting,
                activation_checkpointing=is_on,
            )
            for is_on in (False, True)
        ]
        for expected, got in zip(*trajectories, strict=True):
            assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_compiled_model_follows_the_trajectory_of_an_eager_one(tiny_model_dir, tmp_path):
    trajectories = [
        train_pairs(tiny_model_dir, tmp_path / str(compiles), make_pairs(), torch_compile=compiles)
        for compiles in (False, True)
    ]
    for eager, compiled in zip(*trajectories, strict=True):
        assert compiled == pytest.approx(eager, rel=1e-4)


def test_the_load_balancing_loss_of_experts_weighs_the_tokens_of_its_batch(tiny_model_dir, tmp_path):
    trainer, _ = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs())
    trainer.router_aux_loss_coef, trainer.guard.inputs = 0.5, StepInputs(num_tokens=torch.tensor(24))
    batch = {"num_completion_tokens": torch.ones(6, dtype=torch.int64), "num_tokens": torch.tensor(6)}
    scores = PairScores(losses=torch.tensor([1.0, 2.0, 6.0]), figures={}, aux_loss=torch.tensor(8.0))
    trainer.score_pairs = lambda model, batch: scores
    assert float(trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(6))) == 9 / 6 + 0.5 * 8 / 4
    # Only the pairs that count are in the mean.
    trainer.router_aux_loss_coef = 0.0
    counted = {**batch, "num_counted_pairs": 2}
    loss = trainer.compute_loss(trainer.model, counted, num_items_in_batch=torch.tensor(5))
    assert float(loss) == pytest.approx(3 / 5)
    assert float(trainer.compute_loss(trainer.model, counted)) == 1.5
