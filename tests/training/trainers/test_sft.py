"""What SFT has beyond the trainer that all next-token stages share."""

from __future__ import annotations

import pytest
import torch
import trl
from tests.training.adapter_runs import make_adapter_trainer
from tests.training.trajectories import make_packs, make_trainer
from transformers import AutoModelForCausalLM

from recipes_lib.config.schema import AdapterConfig, QuantizationConfig
from recipes_lib.models.adapters.lora import add_adapter, read_adapter_state
from recipes_lib.models.quantization import build_quantization_config


def test_the_trainer_is_trls_and_reports_to_nobody(tiny_model_dir, tmp_path, monkeypatch) -> None:
    sent: list[object] = []
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda *args, **kwargs: sent.append(args))
    trainer, recorder = make_trainer(tiny_model_dir, tmp_path, make_packs(4), max_steps=1)
    trainer.train()
    assert isinstance(trainer, trl.SFTTrainer)
    assert len(recorder.steps) == 1
    assert not sent


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
@pytest.mark.parametrize("optim", ["adamw_torch", "paged_adamw_8bit"])
def test_an_adapter_on_few_bits_is_trained_in_float32_though_trl_rounds_it(
    tiny_model_dir, tmp_path, bits, optim
) -> None:
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
    assert "adapter: all 28 trained tensors have a gradient" in lines
