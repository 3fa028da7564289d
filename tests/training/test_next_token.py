"""The trainer: one step's normaliser, its guards, its checkpoints, and hooks that change nothing."""

import pytest
import torch
from tests.training.trajectories import Recorder, make_packs, make_trainer
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from recipes_lib.data.collators import PackedCollator
from recipes_lib.errors import DivergedError
from recipes_lib.training.checkpoints import is_complete


def weights_of(trainer):
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def assert_equal_weights(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_trajectory_is_that_of_a_plain_transformers_trainer(tiny_model_dir, tmp_path, accumulation):
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation}
    ours, recorder = make_trainer(tiny_model_dir, tmp_path / "ours", make_packs(), **cut)
    ours.train()

    plain_recorder = Recorder()
    plain = Trainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="sdpa"),
        args=TrainingArguments(
            output_dir=str(tmp_path / "plain"),
            use_cpu=True,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            max_steps=4,
            lr_scheduler_type="linear",
            remove_unused_columns=False,
            disable_tqdm=True,
            **cut,
        ),
        train_dataset=make_packs(),
        data_collator=PackedCollator(pad_token_id=1),
        callbacks=[plain_recorder],
    )
    plain.train()
    assert len(recorder.steps) == 4
    for expected, got in zip(plain_recorder.steps, recorder.steps, strict=True):
        assert got == pytest.approx(expected, rel=1e-5)


def test_a_step_without_a_target_stops_before_the_update(tiny_model_dir, tmp_path):
    packs = make_packs(8).map(lambda row: {"loss_mask": [False] * len(row["input_ids"])})
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, packs)
    before = weights_of(trainer)
    with pytest.raises(DivergedError, match="step 1 holds no token to train on"):
        trainer.train()
    assert_equal_weights(weights_of(trainer), before)


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_gradient_that_is_not_finite_stops_before_the_update(tiny_model_dir, tmp_path, max_grad_norm):
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(), max_grad_norm=max_grad_norm)
    before = weights_of(trainer)
    trainer.model.model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(DivergedError, match="gradient of step 1 is nan"):
        trainer.train()
    assert_equal_weights(weights_of(trainer), before)


def test_hooks_run_at_the_start_every_n_steps_and_at_the_end(tiny_model_dir, tmp_path):
    steps = []
    keys = {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True, "max_steps": 7}
    hooks = [lambda model, step: steps.append(step) or {"loss": 1.0}]
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(), hooks=hooks, **keys)
    trainer.train()
    assert steps == [0, 3, 6, 7]
    assert [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log] == [1.0] * 4


def test_the_last_step_is_not_evaluated_twice(tiny_model_dir, tmp_path):
    steps = []
    keys = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    hooks = [lambda model, step: steps.append(step) or {}]
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(), hooks=hooks, **keys)
    trainer.train()
    assert steps == [2, 4]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_resumed_run_ends_with_the_very_weights_of_one_that_never_stopped(tiny_model_dir, tmp_path, dropout):
    def trainer_in(folder, **training):
        trainer, recorder = make_trainer(
            tiny_model_dir, tmp_path / folder, make_packs(), max_steps=6, per_device_train_batch_size=4, **training
        )
        for layer in trainer.model.model.layers:
            layer.self_attn.attention_dropout = dropout
        return trainer, recorder

    straight, recorder = trainer_in("straight", save_strategy="steps", save_steps=3)
    straight.train()
    checkpoint = tmp_path / "straight" / "checkpoint-3"
    assert is_complete(checkpoint)

    resumed, second_recorder = trainer_in("resumed")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert second_recorder.steps == recorder.steps[3:]
    assert_equal_weights(weights_of(resumed), weights_of(straight))


def test_only_the_last_checkpoints_are_kept_and_each_is_sealed(tiny_model_dir, tmp_path):
    keys = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(), **keys)
    trainer.train()
    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert kept == ["checkpoint-3", "checkpoint-4"]
    assert all(is_complete(tmp_path / name) for name in kept)


def test_activation_checkpointing_changes_nothing_and_neftune_acts(tiny_model_dir, tmp_path):
    reference, recorder = make_trainer(tiny_model_dir, tmp_path / "0", make_packs())
    reference.train()
    checkpointed, same = make_trainer(tiny_model_dir, tmp_path / "1", make_packs(), activation_checkpointing=True)
    checkpointed.train()
    for expected, got in zip(recorder.steps, same.steps, strict=True):
        assert got == pytest.approx(expected, rel=1e-5)
    noisy, different = make_trainer(tiny_model_dir, tmp_path / "2", make_packs(), neftune_noise_alpha=5.0)
    noisy.train()
    assert different.steps[0]["loss"] != recorder.steps[0]["loss"]


@pytest.mark.slow
def test_a_compiled_model_follows_the_trajectory_of_an_eager_one(tiny_model_dir, tmp_path):
    trajectories = []
    for compiles in (False, True):
        trainer, recorder = make_trainer(tiny_model_dir, tmp_path / str(compiles), make_packs(), torch_compile=compiles)
        trainer.train()
        trajectories.append(recorder.steps)
    for eager, compiled in zip(*trajectories, strict=True):
        assert compiled == pytest.approx(eager, rel=1e-4)
