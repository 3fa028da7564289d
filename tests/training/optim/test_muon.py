"""Muon with AdamW: update compared with an SVD in numpy, parameter groups, and state."""

import numpy as np
import pytest
import torch
from tests.training.optim.small_models import build, compute_loss, take_steps
from tests.training.optim.states import measure_group_bytes, measure_state_bytes
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments

from recipes_lib.training.optim.optimizers import MuonAdamW, build_muon, describe_groups

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95
NO_OTHERS = [{"params": []}]


def build_optimizer(model, tmp_path, *, decay_embeddings=True, **training):
    training = {"learning_rate": LR, "weight_decay": DECAY, "adam_beta2": 0.95} | training
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **training)
    return build_muon(model, args, decay_embeddings=decay_embeddings)


def flatten(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def orthogonalise(matrix):
    """Apply five quintic Newton-Schulz steps to the singular values."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.sqrt((values**2).sum())
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left * values @ right


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8)])
def test_muon_update_equals_svd_in_numpy(shape):
    generator = np.random.default_rng(0)
    expected, momentum = generator.standard_normal(shape), np.zeros(shape)
    matrix = torch.nn.Parameter(torch.tensor(expected, dtype=torch.float32))
    optimizer = MuonAdamW([matrix], NO_OTHERS, lr=LR, weight_decay=DECAY, betas=(0.9, 0.95), eps=1e-8)
    moved = 0.0
    for _ in range(4):
        gradient = generator.standard_normal(shape)
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        nesterov = (1 - MOMENTUM) * gradient + MOMENTUM * momentum
        update = LR * 0.2 * np.sqrt(max(shape)) * orthogonalise(nesterov)
        expected = (1 - LR * DECAY) * expected - update
        moved += np.linalg.norm(update)
        matrix.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
    # Torch iterates in bfloat16, with 8 significant bits.
    assert np.linalg.norm(matrix.detach().numpy() - expected) < 0.01 * moved


def test_muon_updates_hidden_matrices_and_adamw_the_rest(tmp_path):
    model = build("llama")
    rows = describe_groups(build_optimizer(model, tmp_path), model)
    assert [(row.optimizer, row.weight_decay) for row in rows] == [("Muon", DECAY), ("AdamW", DECAY), ("AdamW", 0.0)]
    layer = "model.layers.*."
    assert rows[0].parameters == (
        *(f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    )
    assert set(rows[1].parameters) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert all("norm" in name for name in rows[2].parameters)
    assert sum(row.num_tensors for row in rows) == len(list(model.parameters()))


def test_tied_embedding_is_in_one_adamw_group(tmp_path):
    model = build("llama-tied")
    muon, _, kept = build_optimizer(model, tmp_path, decay_embeddings=False).param_groups
    embedding = model.get_input_embeddings().weight
    assert sum(parameter is embedding for parameter in kept["params"]) == 1
    assert not any(parameter is embedding for parameter in muon["params"])


@pytest.mark.parametrize(
    ("name", "expected_adamw", "expected_muon"),
    [
        (
            "mixtral",
            {"model.layers.*.mlp.experts.gate_up_proj", "model.layers.*.mlp.experts.down_proj"},
            {"model.layers.*.mlp.gate.weight"},
        ),
        ("gpt2", {"transformer.wte.weight", "transformer.wpe.weight"}, {"transformer.h.*.attn.c_attn.weight"}),
    ],
)
def test_stacked_experts_and_position_embeddings_use_adamw(tmp_path, name, expected_adamw, expected_muon):
    model = build(name)
    muon, decaying, _ = describe_groups(build_optimizer(model, tmp_path), model)
    assert expected_muon <= set(muon.parameters)
    assert expected_adamw <= set(decaying.parameters)


def test_stacked_expert_biases_do_not_decay(tmp_path):
    model = build("gpt-oss")
    _, _, kept = describe_groups(build_optimizer(model, tmp_path), model)
    assert "model.layers.*.mlp.experts.gate_up_proj_bias" in kept.parameters


def test_frozen_parameters_are_in_no_group(tmp_path):
    model = build("llama")
    model.requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(True)
    before = flatten(model.model.layers[0])
    optimizer = build_optimizer(model, tmp_path)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 0, 0]
    take_steps(model, optimizer)
    assert torch.equal(flatten(model.model.layers[0]), before)


def test_combined_optimizer_equals_separate_muon_and_adamw(tmp_path):
    ours, theirs = build("llama"), build("llama")
    optimizer = build_optimizer(ours, tmp_path)
    names = dict(theirs.named_parameters())
    groups = {
        "muon": [p for n, p in names.items() if "proj" in n],
        "decaying": [names["model.embed_tokens.weight"], names["lm_head.weight"]],
        "norms": [p for n, p in names.items() if "norm" in n],
    }
    pair = [
        torch.optim.Muon(groups["muon"], lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": groups["decaying"]}, {"params": groups["norms"], "weight_decay": 0.0}],
            lr=LR,
            betas=(0.9, 0.95),
            weight_decay=DECAY,
        ),
    ]
    for model, optimizers in ((ours, [optimizer]), (theirs, pair)):
        schedules = [LambdaLR(one, lambda step: 1 / (1 + step)) for one in optimizers]
        for _ in range(4):
            compute_loss(model).backward()
            for each in (*optimizers, *schedules):
                each.step()
            model.zero_grad()
    assert torch.equal(flatten(ours), flatten(theirs))


def test_replaced_parameters_are_updated(tmp_path):
    """Sharding replaces the tensors in the groups of an existing optimizer."""
    model = build("llama")
    optimizer = build_optimizer(model, tmp_path)
    replaced = [torch.nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    by_id = dict(zip(map(id, model.parameters()), replaced, strict=True))
    for group in optimizer.param_groups:
        group["params"] = [by_id[id(parameter)] for parameter in group["params"]]
    for parameter in replaced:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not any(torch.equal(old, new) for old, new in zip(model.parameters(), replaced, strict=True))


def test_closure_is_evaluated_once_with_gradients(tmp_path):
    model, losses = build("llama"), []
    optimizer = build_optimizer(model, tmp_path)
    before = flatten(model)

    def closure():
        loss = compute_loss(model)
        loss.backward()
        losses.append(loss.item())
        return loss.item()

    assert optimizer.step(closure) == losses[0]
    assert len(losses) == 1
    assert not torch.equal(flatten(model), before)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_state_bytes_of_muon_and_adamw(tmp_path):
    model = build("llama")
    optimizer = build_optimizer(model, tmp_path)
    take_steps(model, optimizer, 1)
    muon, *others = measure_group_bytes(optimizer)
    assert muon == 4
    assert others == pytest.approx([8, 8], abs=0.3)
    assert 4 < measure_state_bytes(optimizer) < 8
