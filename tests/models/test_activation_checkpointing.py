"""Activation checkpointing: unchanged loss and gradients, and no recomputed matrix product in selective mode."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.training.trajectories import make_packs, make_trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from recipes_lib.models.activation_checkpointing import enable_checkpointing, is_product

MODES = (
    None,
    {"every_n_layers": 2, "save_matmuls": False},
    {"save_matmuls": True},
    {"save_matmuls": True, "every_n_layers": 2},
    {"offload": True},
)


def test_checkpointing_keeps_training_trajectory(tiny_model_dir, tmp_path) -> None:
    plain, recorder = make_trainer(tiny_model_dir, tmp_path / "plain", make_packs(8), max_steps=2)
    plain.train()
    for mode in MODES:
        keys = {"activation_checkpointing": True, "activation_checkpointing_kwargs": mode, "max_steps": 2}
        trainer, checkpointed = make_trainer(tiny_model_dir, tmp_path / "ours", make_packs(8), **keys)
        trainer.train()
        assert trainer.model.is_gradient_checkpointing
        for expected, got in zip(recorder.steps, checkpointed.steps, strict=True):
            assert got == pytest.approx(expected, rel=1e-5), mode


def count_flops(model_dir, options) -> int:
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").train()
    if options is not None:
        enable_checkpointing(model, options)
    ids = torch.arange(4, 36)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter.get_total_flops()


def test_selective_checkpointing_recomputes_no_matmul(tiny_model_dir) -> None:
    without = count_flops(tiny_model_dir, None)
    whole = count_flops(tiny_model_dir, {})
    assert count_flops(tiny_model_dir, {"save_matmuls": True}) == without
    assert whole > 1.15 * without


class ProductCounter(TorchDispatchMode):
    """Counts the products of experts."""

    num = 0

    def __torch_dispatch__(self, operator, _types, args=(), kwargs=None):
        self.num += "grouped_mm" in operator.name()
        return operator(*args, **(kwargs or {}))


def test_selective_checkpointing_recomputes_no_product_of_experts() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 2}
    config = MixtralConfig(vocab_size=64, num_attention_heads=2, num_key_value_heads=2, **sizes)
    ids, counts = torch.arange(4, 36)[None], []
    for options in (None, {"save_matmuls": True}, {}):
        model = MixtralForCausalLM(config).train()
        if options is not None:
            enable_checkpointing(model, options)
        with ProductCounter() as counter:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        counts.append(counter.num)
    assert 0 < counts[0] == counts[1] < counts[2]


def test_products_in_8_bits_are_saved() -> None:
    assert is_product(torch.ops.aten._scaled_mm.default)
    assert not is_product(torch.ops.aten.mul.Tensor)


def test_activations_are_offloaded_only_on_request(monkeypatch) -> None:
    found: list[bool] = []
    model = SimpleNamespace(activation_checkpointing_enable=lambda _, *, offload, **__: found.append(offload))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for options in (None, {"offload": False}, {"offload": True}):
        enable_checkpointing(model, options)
    assert found == [False, False, True]
