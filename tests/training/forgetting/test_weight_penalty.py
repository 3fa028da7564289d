"""EWC and L2-SP penalty, against closed forms and autograd; added once per optimizer step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tests import tiny
from tests.training.trajectories import make_packs, make_trainer
from torch import nn
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState

from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError
from recipes_lib.training.forgetting.fisher import Fisher, write_fisher
from recipes_lib.training.forgetting.weight_penalty import PENALTY, WeightPenalty, load_penalty
from recipes_lib.training.trainers.reference import hash_weights


def build_penalty(coefficient: float, model: nn.Module, reference: nn.Module, fisher: Any = None) -> WeightPenalty:
    penalty = WeightPenalty(coefficient, reference, fisher)
    penalty.prepare(Accelerator(cpu=True), model)
    penalty.on_train_begin(None, None, None, model=model)
    return penalty


def test_ewc_minimum_of_linear_regression_is_joint_solution() -> None:
    """With an orthogonal design matrix of the first data, the Fisher information is diagonal."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    first = torch.linalg.qr(draw(64, 6)).Q * torch.linspace(1, 4, 6, dtype=torch.float64)
    second = draw(64, 6)
    first_y, second_y = (design @ draw(6, 1) + 0.1 * draw(64, 1) for design in (first, second))
    before, model = (nn.Linear(6, 1, bias=False, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        before.weight.copy_(torch.linalg.lstsq(first, first_y).solution.T)
        joint = torch.linalg.lstsq(torch.cat([first, second]), torch.cat([first_y, second_y])).solution
        model.weight.copy_(joint.T)
    penalty = build_penalty(1.0, model, before, {"weight": (first**2).sum(0)[None]})
    (0.5 * (model(second) - second_y).square().sum()).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.abs().max() > 1
    penalty.add_gradients()
    # Strictly convex: the gradient is 0 only at the minimum.
    assert model.weight.grad.abs().max() < 1e-9


@pytest.mark.parametrize("has_fisher", [True, False])
def test_added_gradient_equals_autograd(has_fisher: bool) -> None:
    torch.manual_seed(0)
    model, reference = (nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)) for _ in range(2))
    fisher = {name: torch.rand_like(part) for name, part in model.named_parameters()} if has_fisher else None
    anchors = {name: part.detach().clone() for name, part in reference.named_parameters()}
    expected = sum(
        ((1 if fisher is None else fisher[name]) * (part - anchors[name]) ** 2).sum()
        for name, part in model.named_parameters()
    )
    value = 0.3 / 2 * expected
    gradients = torch.autograd.grad(value, list(model.parameters()))
    model[1].bias.requires_grad_(False)
    # `recipes fisher` writes those of trained weights.
    written = fisher and {name: value for name, value in fisher.items() if name != "1.bias"}
    penalty = build_penalty(0.3, model, reference, written)
    for part in model.parameters():
        part.grad = torch.ones_like(part) if part.requires_grad else None
    penalty.add_gradients()
    for part, gradient in zip(model.parameters(), gradients, strict=True):
        if part.requires_grad:
            torch.testing.assert_close(part.grad, 1 + gradient)
            part.grad.zero_()
    frozen = 0.3 / 2 * ((1 if fisher is None else fisher["1.bias"]) * (model[1].bias - anchors["1.bias"]) ** 2).sum()
    assert penalty.compute_value() == pytest.approx(float((value - frozen).detach()), rel=1e-5)
    # Multiplied by the scale of a loss scaler, as the gradients of the loss are.
    penalty.add_gradients(8.0)
    torch.testing.assert_close(model[0].weight.grad, 8 * gradients[0])
    # A weight without a gradient, such as of an expert without tokens, is not updated.
    model[0].weight.grad = None
    penalty.add_gradients()
    assert model[0].weight.grad is None


@pytest.mark.parametrize(("name", "is_added"), [("loss", True), ("eval_loss", False)])
def test_penalty_is_logged_with_losses_of_training_only(name: str, is_added: bool) -> None:
    penalty, logs = build_penalty(0.3, nn.Linear(2, 2), nn.Linear(2, 2)), {name: 1.0}
    penalty.on_log(None, TrainerState(), TrainerControl(), logs)
    assert (PENALTY in logs) is is_added


def test_penalty_does_not_depend_on_gradient_accumulation(tiny_model_dir, tiny_tokenizer, tmp_path) -> None:
    other = tiny.save_model(tmp_path / "other", tiny_tokenizer, seed=5)
    runs = []
    for number, (rows, accumulation) in enumerate(((8, 1), (1, 8))):
        reference = AutoModelForCausalLM.from_pretrained(other)
        keys = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation, "max_steps": 3}
        penalty = WeightPenalty(0.05, reference, None)
        trainer, recorder = make_trainer(tiny_model_dir, tmp_path / str(number), make_packs(), penalty=penalty, **keys)
        trainer.train()
        runs.append((recorder.steps, [logs[PENALTY] for logs in recorder.train_logs]))
    (steps, penalties), (others, other_penalties) = runs
    for step, other_step in zip(steps, others, strict=True):
        assert other_step == pytest.approx(step, rel=1e-5)
    assert other_penalties == pytest.approx(penalties, rel=1e-5)
    # The reference has other random weights, which the penalty pulls towards.
    assert penalties[0] > penalties[1] > penalties[2] > 0
    plain, recorder = make_trainer(tiny_model_dir, tmp_path / "plain", make_packs(), **keys)
    plain.train()
    assert recorder.steps[0]["loss"] == pytest.approx(steps[0]["loss"], rel=1e-5)
    assert recorder.steps[0]["grad_norm"] != pytest.approx(steps[0]["grad_norm"], rel=1e-3)


def test_float32_fisher_of_bfloat16_weights() -> None:
    model, reference = nn.Linear(2, 1, bias=False).bfloat16(), nn.Linear(2, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 1.0]]))
        reference.weight.copy_(torch.tensor([[1.0, 0.0]]))
    penalty = build_penalty(0.5, model, reference, {"weight": torch.tensor([[2.0, 4.0]])})
    model.weight.grad = torch.zeros_like(model.weight)
    penalty.add_gradients()
    assert model.weight.grad.tolist() == [[2.0, 2.0]]
    assert penalty.compute_value() == 0.5 / 2 * (2 * 2**2 + 4 * 1**2)


@pytest.fixture
def make_config(tiny_model_dir: Path, tmp_path: Path):
    """Build configurations of runs with a Fisher information of 1 everywhere, in ``.folder``."""
    folder = tmp_path / "reference"
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    diagonal = {name: torch.ones_like(part) for name, part in model.named_parameters()}
    facts = {"model_name_or_path": str(tiny_model_dir), "model_revision": None}
    write_fisher(folder, Fisher(diagonal, 1, 1), weights=hash_weights(model), **facts)

    def build(**keys: Any) -> RecipeConfig:
        keys = {"ewc_lambda": 2.0, "ewc_reference": folder, **keys}
        keys |= {"model_name_or_path": tiny_model_dir, "dataset_name": "d", "output_dir": tmp_path}
        return load_config("sft", [f"--{name}={value}" for name, value in keys.items()])

    build.folder = folder  # type: ignore[attr-defined]
    return build


def test_fisher_of_ones_equals_l2_sp(make_config: Any, tiny_model_dir: Path) -> None:
    assert load_penalty(make_config(ewc_lambda=0.0, ewc_reference="null")) is None
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    gradients = []
    for keys in ({}, {"ewc_fisher": "identity", "ewc_reference": "null"}):
        penalty = load_penalty(make_config(**keys))
        assert penalty is not None
        penalty.prepare(Accelerator(cpu=True), model)
        penalty.on_train_begin(None, None, None, model=model)
        for part in model.parameters():
            part.grad = torch.zeros_like(part)
        with torch.no_grad():
            next(model.parameters())[3] = 5.0
        penalty.add_gradients()
        gradients.append([part.grad.clone() for part in model.parameters() if part.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert gradients[0][0][3].abs().sum() > 0


def test_fisher_of_other_model_is_rejected(make_config: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    record = json.loads((make_config.folder / "fisher.json").read_text())

    def assert_rejected(message: str, **changed: Any) -> None:
        (make_config.folder / "fisher.json").write_text(json.dumps(record | changed))
        with pytest.raises(ConfigError, match=message) as caught:
            load_penalty(make_config())
        (problem,) = caught.value.problems
        assert problem.where == make_config().provenance["ewc_reference"]
        assert problem.remedy

    assert_rejected("other weights", weights="0" * 64)
    other = tiny.save_model(tmp_path / "other", tiny_tokenizer, seed=1)
    assert_rejected("other weights", model_name_or_path=str(other))
    smaller = tmp_path / "smaller"
    model = AutoModelForCausalLM.from_pretrained(other)
    config = model.config
    config.num_hidden_layers = 1
    type(model)(config).save_pretrained(smaller)
    assert_rejected("9 weights of another shape or name", model_name_or_path=str(smaller))
    (make_config.folder / "fisher.json").write_text(json.dumps(record))
    penalty = load_penalty(make_config())
    assert penalty is not None
    with pytest.raises(ConfigError, match="9 weights have another name or shape"):
        penalty.prepare(Accelerator(cpu=True), AutoModelForCausalLM.from_pretrained(smaller))
    with pytest.raises(ConfigError, match="has no Fisher information"):
        load_penalty(make_config(ewc_reference=tmp_path))
