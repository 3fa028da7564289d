"""Hidden-state and attention distillation: alignment at targets, projections, resume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tests.training.students import make_distiller
from tests.training.trajectories import assert_equal_weights, make_packs, weights_of
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from recipes_lib.config.schema import LayersConfig
from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.distillation.layer_features import PROJECTIONS, PROJECTIONS_FILE, LayerDistillation, TargetPositions
from recipes_lib.errors import ConfigError

FEATURES: dict[str, Any] = {"feature_weight": 0.5}
RELATIONS: dict[str, Any] = {"similarity_weight": 2.0, "distance_weight": 1.5, "angle_weight": 0.7}
ATTENTION: dict[str, Any] = {"attention_weight": 3.0, "attn_implementation": "eager"}
ALL: dict[str, Any] = FEATURES | RELATIONS | ATTENTION
WEIGHTS = {name.removesuffix("_weight"): weight for name, weight in ALL.items() if name.endswith("_weight")}
Run = tuple[Any, Any, list[str]]


@pytest.fixture
def compute(tiny_model_dir: Path, student_dir: Path, tmp_path: Path) -> Any:
    """Loss, loss parts and gradients of some rows, before the first step."""

    def run(packs: Any, **keys: Any) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
        trainer, _, _ = make_distiller(student_dir, tiny_model_dir, tmp_path / "run", packs, **keys)
        trainer.model.eval()
        batch = PackedCollator(pad_token_id=1)([packs[at] for at in range(len(packs))])
        batch.pop("row_ids", None)
        with trainer.layers.attached():
            trainer.compute_loss(trainer.model, dict(batch)).backward()
            gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
        loss = trainer.compute_loss(trainer.model, dict(batch)).item()
        logs: dict[str, float] = {"loss": loss}
        trainer.figures.on_log(trainer.args, trainer.state, trainer.control, logs)
        parts = {name.removeprefix("distillation/"): value for name, value in logs.items() if name != "loss"}
        return loss, parts, gradients

    return run


def make_row(*documents: int, seed: int = 0) -> dict[str, Any]:
    """A row of documents of these lengths, which also seed them; about two thirds of the tokens are targets."""
    draws = [np.random.default_rng([seed, length]) for length in documents]
    pairs = list(zip(draws, documents, strict=True))
    return {
        "input_ids": np.concatenate([draw.integers(4, 512, size=length) for draw, length in pairs]),
        "loss_mask": np.concatenate([draw.random(length) < 0.7 for draw, length in pairs]),
        "seq_lengths": list(documents),
        "row_ids": list(range(len(documents))),
    }


def make_rows(*rows: dict[str, Any]) -> Dataset:
    return Dataset.from_list([{name: list(value) for name, value in row.items()} for row in rows]).with_format("numpy")


def shift_states(model: Any, inputs: Any, output: Any) -> None:
    if output.hidden_states is not None:
        output.hidden_states = tuple(states + 1 for states in output.hidden_states)


@pytest.mark.parametrize("broken", [0, 1], ids=["student", "teacher"])
def test_model_whose_states_are_not_those_of_its_layers_is_refused(tiny_model_dir, broken) -> None:
    pair = [AutoModelForCausalLM.from_pretrained(tiny_model_dir) for _ in range(2)]
    LayerDistillation(LayersConfig(feature_weight=1.0), *pair)
    pair[broken].base_model.register_forward_hook(shift_states)
    with pytest.raises(ConfigError, match="are not the hidden states"):
        LayerDistillation(LayersConfig(feature_weight=1.0), *pair)


def test_target_positions_are_counted_by_document() -> None:
    labels = torch.tensor([[-100, 5, -100, -100, 7, 0], [-100, -100, 3, -100, -100, -100]])
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2]])
    places = TargetPositions(labels, position_ids)
    assert places.lengths == [1, 2, 1]
    assert places.take(torch.arange(12).view(2, 6)).tolist() == [0, 3, 4, 7]


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_targets_are_searched_once_and_their_gradients_added_without_sorting() -> None:
    """Each search is a host sync on a GPU; the gradient of ``states[mask]`` sorts the positions."""
    states, labels = torch.ones(2, 6, 3, requires_grad=True), torch.arange(12).view(2, 6)
    with Operations() as operations:
        places = TargetPositions(labels, torch.arange(6).repeat(2, 1))
        (places.take(states) * places.take(states)).sum().backward()
    assert operations.counts["nonzero"] == 1
    assert not [name for name in operations.counts if name == "index" or "index_put" in name]


@torch.no_grad()
def reference_parts(batch: Any, student_dir: Path, teacher_dir: Path) -> dict[str, float]:
    """Attention and similarity losses of the last layer, from the models' full outputs."""
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    wanted = {"use_cache": False, "output_hidden_states": True, "output_attentions": True}
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()(**inputs, **wanted)
        for folder in (student_dir, teacher_dir)
    )
    is_target = batch["labels"][:, 1:] >= 0
    own, other = (model.hidden_states[-1][:, :-1][is_target].double() for model in (student, teacher))
    p, q = (model.attentions[-1].mean(1)[:, :-1][is_target].double() for model in (teacher, student))
    attention = functional.kl_div(q.log().nan_to_num(neginf=0), p, reduction="sum")
    documents = (batch["position_ids"] == 0).flatten().cumsum(0).view(is_target.shape[0], -1)[:, :-1][is_target]
    similarity = 0.0
    for document in documents.unique():
        grams = [functional.normalize(states[documents == document], dim=-1) for states in (own, other)]
        grams = [gram @ gram.T for gram in grams]
        similarity += float((grams[0] - grams[1]).square().mean(dim=1).sum())
    return {"attention": float(attention) / len(own), "similarity": similarity / len(own)}


def test_feature_losses_equal_full_outputs(compute, student_dir, tiny_model_dir) -> None:
    packs = make_packs(4)
    loss, parts, _ = compute(packs, **ALL)
    batch = PackedCollator(pad_token_id=1)([packs[at] for at in range(4)])
    for name, expected in reference_parts(batch, student_dir, tiny_model_dir).items():
        # Attention probabilities hardly differ, so that float32 rounding of their logarithms dominates: abs.
        assert parts[name] == pytest.approx(expected, rel=1e-5, abs=2e-8), name
    response = 0.5 * parts["nll"] + 0.5 * parts["divergence"]
    assert loss == pytest.approx(response + sum(weight * parts[name] for name, weight in WEIGHTS.items()), rel=1e-6)


@pytest.mark.parametrize("part", WEIGHTS)
def test_each_feature_loss_changes_gradients(compute, part) -> None:
    packs = make_packs(2)
    keys = {f"{part}_weight": 1.0, "attn_implementation": "eager"}
    plain, with_part = compute(packs, attn_implementation="eager"), compute(packs, **keys)
    assert part not in plain[1]
    assert with_part[1][part] > 1e-7
    assert with_part[0] == pytest.approx(plain[0] + with_part[1][part], rel=1e-6)
    # The query projection of the only layer influences every loss.
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (with_part[2][name] - plain[2][name]).abs().max() > 1e-9


def test_features_of_itself_have_no_loss(tiny_model_dir, tmp_path) -> None:
    keys = ALL | {"distillation_alpha": 0.0, "optim": "sgd", "max_steps": 2, "per_device_train_batch_size": 2}
    trainer, recorder, _ = make_distiller(tiny_model_dir, tiny_model_dir, tmp_path, make_packs(), **keys)
    trainer.train()
    for log in recorder.train_logs:
        for part in WEIGHTS:
            assert abs(log[f"distillation/{part}"]) < 1e-6, part
    for step in recorder.steps:
        assert abs(step["loss"]) < 1e-5
        assert step["grad_norm"] < 1e-4


def test_feature_losses_are_independent_of_document_order_and_rows(compute) -> None:
    """Against each document in its own batch, averaged over targets, and against other orders."""
    keys = ALL | {"feature_layers": [1]}
    rows = [make_row(length) for length in (9, 14, 6)]
    # The first token of a document is not a target.
    counts = [int(row["loss_mask"][1:].sum()) for row in rows]
    shares = [count / sum(counts) for count in counts]
    alone = [compute(make_rows(row), **keys) for row in rows]

    def average(figures: Any) -> Any:
        return sum(share * figure for share, figure in zip(shares, figures, strict=True))

    loss = average(own for own, _, _ in alone)
    parts = {name: average(own[name] for _, own, _ in alone) for name in alone[0][1]}
    gradients = {name: average(own[name] for _, _, own in alone) for name in alone[0][2]}
    for batch in (make_rows(make_row(9, 14, 6)), make_rows(make_row(6, 9, 14)), make_rows(rows[1], rows[2], rows[0])):
        got = compute(batch, **keys)
        assert got[0] == pytest.approx(loss, rel=1e-5)
        # A divergence is a small difference of sums of order 1: it is exact to their rounding, not to its own.
        assert got[1] == pytest.approx(parts, rel=1e-4, abs=torch.finfo(torch.float32).eps)
        for name, gradient in got[2].items():
            torch.testing.assert_close(gradient, gradients[name], atol=1e-5, rtol=1e-3)


def test_feature_losses_are_independent_of_accumulation_and_checkpointing(tiny_model_dir, student_dir, tmp_path):
    logs = []
    accumulated = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "activation_checkpointing": True}
    for name, keys in (("plain", {"per_device_train_batch_size": 4}), ("accumulated", accumulated)):
        trainer, recorder, _ = make_distiller(student_dir, tiny_model_dir, tmp_path / name, make_packs(), **ALL | keys)
        trainer.train()
        logs.append(recorder.train_logs)
    assert len(logs[0]) == 4
    for expected, got in zip(*logs, strict=True):
        for name in ("loss", "grad_norm", *(f"distillation/{part}" for part in WEIGHTS)):
            # Absolute: the divergence of attention, 5e-5, is a difference of terms of order 1 in float32.
            assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7), name


KEYS: dict[str, Any] = ALL | {"projection_learning_rate": 0.02, "weight_decay": 0.1, "per_device_train_batch_size": 2}


@pytest.fixture(scope="module")
def finished(tiny_model_dir, student_dir, tmp_path_factory) -> Any:
    """A finished run with two checkpoints, what it logged and printed, and the projection before it."""
    keys, folder = KEYS | {"save_strategy": "steps", "save_steps": 2}, tmp_path_factory.mktemp("finished")
    trainer, recorder, lines = make_distiller(student_dir, tiny_model_dir, folder, make_packs(), **keys)
    (before,) = (weight.clone() for weight in trainer.layers._projections.parameters())
    trainer.train()
    return SimpleNamespace(trainer=trainer, recorder=recorder, lines=lines, before=before, folder=folder)


def test_projections_have_their_own_learning_rate_and_file(finished) -> None:
    trainer, before = finished.trainer, finished.before
    assert before.shape == (64, 32)
    (projection,) = trainer.layers._projections.parameters()
    assert (projection - before).abs().max() > 0.01
    (group,) = [group for group in trainer.optimizer.param_groups if projection in set(group["params"])]
    assert group["params"] == [projection]
    assert (group["initial_lr"], group["weight_decay"]) == (0.02, 0.0)
    assert not any(PROJECTIONS in name for name, _ in trainer.model.named_parameters())
    checkpoint = finished.folder / "checkpoint-4"
    assert not any(PROJECTIONS in name for name in load_file(checkpoint / "model.safetensors"))
    state = torch.load(checkpoint / PROJECTIONS_FILE, weights_only=True)
    assert torch.equal(state["1.weight"], projection)
    saved, info = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert_equal_weights(saved.state_dict(), weights_of(trainer))
    assert not any(info.values())
    assert any("gradients: all" in line for line in finished.lines)


# After the test above, because it loads the best checkpoint into the finished run.
def test_resume_restores_weights_and_projections_bitwise(tiny_model_dir, student_dir, finished) -> None:
    straight, best = finished.trainer, finished.folder / "checkpoint-2"
    resumed, second, lines = make_distiller(student_dir, tiny_model_dir, finished.folder, make_packs(), **KEYS)
    resumed.train(resume_from_checkpoint=str(best))
    assert not any(line.startswith("step 0") for line in lines)
    assert second.steps == finished.recorder.steps[2:]
    assert_equal_weights(weights_of(resumed), weights_of(straight))
    assert_equal_weights(resumed.layers._projections.state_dict(), straight.layers._projections.state_dict())
    # load_best_model_at_end with a best checkpoint that is not the last.
    straight.state.best_model_checkpoint = str(best)
    with straight.layers.attached():
        straight._load_best_model()
    assert_equal_weights(weights_of(straight), AutoModelForCausalLM.from_pretrained(best).state_dict())
    projections = torch.load(best / PROJECTIONS_FILE, weights_only=True)
    assert_equal_weights(straight.layers._projections.state_dict(), projections)


def test_nonexistent_student_layer_is_refused(tiny_model_dir, student_dir, tmp_path) -> None:
    for keys in (FEATURES | {"feature_layers": [1, 2]}, RELATIONS | {"relation_layers": [3]}):
        with pytest.raises(ConfigError, match="and the student has 1"):
            make_distiller(student_dir, tiny_model_dir, tmp_path, make_packs(), **keys)
