"""KL divergence to the base model, against full logits; the base is a copy or the model without adapter."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.trajectories import make_packs, make_trainer
from transformers import AutoModelForCausalLM

from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import AdapterConfig
from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.losses.next_token import index_targets
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.training.trainers.next_token_trainer import KL_TO_BASE, BaseDivergence, load_base


@pytest.fixture
def batch() -> dict[str, Any]:
    batch = PackedCollator(pad_token_id=1)(list(make_packs(3)))
    return {name: batch[name] for name in ("input_ids", "position_ids", "labels")}


def compute_parts(model: Any, base: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference: cross-entropy and KL(model || base) from full logits, summed over targets."""
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    is_target = batch["labels"][:, 1:] >= 0
    logps, base_logps = (
        each(**inputs, use_cache=False).logits[:, :-1][is_target].log_softmax(-1) for each in (model, base)
    )
    nll = -logps.gather(1, batch["labels"][:, 1:][is_target][:, None]).sum()
    return nll, (logps.exp() * (logps - base_logps.detach())).sum()


def assert_equals_full_logits(
    model: Any, divergence: BaseDivergence, base: Any, batch: dict[str, Any], coefficient: float
) -> None:
    nll, kl = compute_parts(model, base, batch)
    trained = [part for part in model.parameters() if part.requires_grad]
    expected = torch.autograd.grad(nll + coefficient * kl, trained)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    positions = index_targets(batch["labels"][:, 1:])
    loss, *_, figures = divergence.score(model, inputs, batch["labels"], positions)
    torch.testing.assert_close(figures[KL_TO_BASE], kl.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss, nll + coefficient * kl, rtol=1e-5, atol=1e-4)
    assert kl > 0.1
    for gradient, other in zip(torch.autograd.grad(loss, trained), expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-5)


def perturb(model: Any) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for part in model.parameters():
            if part.requires_grad:
                part.add_(torch.randn_like(part), alpha=0.05)


@pytest.mark.parametrize("coefficient", [0.1, 3.0])
def test_divergence_to_frozen_copy(tiny_model_dir: Path, batch: dict[str, Any], coefficient: float) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    base = copy.deepcopy(model).requires_grad_(False)
    perturb(model)
    frozen = copy.deepcopy(base)
    for each in (model, frozen):
        add_loss_head(each)
    assert_equals_full_logits(model, BaseDivergence(coefficient, frozen), base, batch, coefficient)


def test_divergence_to_model_without_adapter(tiny_model_dir: Path, batch: dict[str, Any]) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model: Any = add_adapter(copy.deepcopy(base), AdapterConfig(use_peft=True, lora_r=4), seed=0)
    perturb(model)
    add_loss_head(model)
    assert_equals_full_logits(model, BaseDivergence(0.5, None), base, batch, 0.5)


def test_larger_coefficient_keeps_run_closer_to_base(tiny_model_dir: Path, tmp_path: Path) -> None:
    keys = {"model_name_or_path": tiny_model_dir, "dataset_name": "d", "output_dir": tmp_path}
    flags = [f"--{name}={value}" for name, value in keys.items()]
    assert load_base(load_config("sft", flags), "sdpa") is None
    ends = []
    for coefficient in (0.001, 10.0):
        config = load_config("sft", [*flags, f"--kl_to_base={coefficient}"])
        keys = {"max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        trainer, recorder = make_trainer(
            tiny_model_dir, tmp_path / str(coefficient), make_packs(), base=load_base(config, "sdpa"), **keys
        )
        trainer.train()
        figures = [logs[KL_TO_BASE] for logs in recorder.train_logs]
        assert len(figures) == 6
        assert abs(figures[0]) < 1e-6
        ends.append(figures[-1])
    assert ends[0] > 1.2 * ends[1] > 0
