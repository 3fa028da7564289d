"""Next-token objective: one normaliser per step, compared with transformers' trainer."""

import pytest
import torch
from tests.training import trajectories
from tests.training.adapter_runs import make_adapter_trainer
from tests.training.trajectories import Recorder, assert_equal_weights, make_packs, make_trainer, weights_of
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from recipes_lib.config.schema import AdapterConfig, QuantizationConfig
from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.errors import DivergedError
from recipes_lib.models.adapters.lora import add_adapter, read_adapter_state
from recipes_lib.models.quantization import build_quantization_config
from recipes_lib.training.guards.watchdog import WATCHDOG


def test_trajectory_equals_transformers_trainer(tiny_model_dir, tmp_path):
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    trainer, recorder = make_trainer(tiny_model_dir, tmp_path / "trainer", make_packs(), **batch)
    trainer.train()

    plain_recorder = Recorder()
    plain = Trainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="sdpa"),
        args=TrainingArguments(
            str(tmp_path / "plain"), remove_unused_columns=False, disable_tqdm=True, **trajectories.KEYS, **batch
        ),
        train_dataset=make_packs(),
        data_collator=PackedCollator(pad_token_id=1),
        callbacks=[plain_recorder],
    )
    plain.train()
    assert len(recorder.steps) == 4
    for expected, got in zip(plain_recorder.steps, recorder.steps, strict=True):
        assert got == pytest.approx(expected, rel=1e-5)


def test_every_batch_of_the_data_loader_is_progress(tiny_model_dir, tmp_path, monkeypatch):
    """A resumed stream loads all earlier batches in its first step, for hours where there are many."""
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(8))
    beats = []
    monkeypatch.setattr(WATCHDOG, "beat", lambda: beats.append(1))
    assert len(beats) == 0 < len(list(trainer.get_train_dataloader())) == len(beats)


def test_step_without_targets_stops_before_update(tiny_model_dir, tmp_path):
    packs = make_packs(8).map(lambda row: {"loss_mask": [False] * len(row["input_ids"])})
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, packs)
    before = weights_of(trainer)
    with pytest.raises(DivergedError, match="step 1 holds no token to train on"):
        trainer.train()
    assert_equal_weights(weights_of(trainer), before)


def test_neftune_changes_first_loss(tiny_model_dir, tmp_path):
    losses = []
    for alpha in (None, 5.0):
        folder = tmp_path / str(alpha)
        trainer, recorder = make_trainer(tiny_model_dir, folder, make_packs(), neftune_noise_alpha=alpha, max_steps=1)
        trainer.train()
        losses.append(recorder.steps[0]["loss"])
    assert losses[0] != losses[1]


@pytest.mark.parametrize(("bits", "optim"), [("load_in_4bit", "paged_adamw_8bit"), ("load_in_8bit", "adamw_torch")])
def test_adapter_on_quantized_model_is_trained_in_float32(tiny_model_dir, tmp_path, bits, optim) -> None:
    adapter = AdapterConfig(use_peft=True, lora_r=4)
    quantization = build_quantization_config(QuantizationConfig(**{bits: True}), torch.float32, "")
    trainer, recorder, lines = make_adapter_trainer(
        tiny_model_dir, tmp_path, make_packs(), adapter, quantization=quantization, optim=optim, max_steps=6
    )
    fresh = read_adapter_state(add_adapter(AutoModelForCausalLM.from_pretrained(tiny_model_dir), adapter, seed=42))
    state = read_adapter_state(trainer.model)
    assert all(torch.equal(state[name], tensor) for name, tensor in fresh.items())
    trainer.train()
    assert {tensor.dtype for tensor in read_adapter_state(trainer.model).values()} == {torch.float32}
    assert recorder.steps[-1]["loss"] < recorder.steps[0]["loss"]
    assert "gradients: all 28 trained tensors have one" in lines


def test_training_of_16_bit_weights_has_a_warning(tiny_model_dir, tmp_path):
    trainer, recorder = make_trainer(tiny_model_dir, tmp_path / "wide", make_packs(), max_steps=1)
    trainer.train()
    assert not [line for line in recorder.lines if line.startswith("warning: trained weights")]
    trainer, recorder = make_trainer(tiny_model_dir, tmp_path / "narrow", make_packs(), max_steps=1)
    trainer.model.bfloat16()
    trainer.train()
    assert len([line for line in recorder.lines if line.startswith("warning: trained weights")]) == 1
