"""Distillation loss on live models: alignment of positions, vocabularies, wrappers and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import sizes
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from recipes_lib.losses.distillation import Objective
from recipes_lib.models.heads.loss_head import add_loss_head, score_beside_teacher


def load(folder: Path, *, is_teacher: bool) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder)
    add_loss_head(model)
    return model.requires_grad_(not is_teacher)


def make_teacher() -> Any:
    """A model with a soft cap on its logits and a smaller vocabulary than the student's."""
    config = Gemma2Config(
        **sizes(32, 1, 2, vocab_size=500, num_key_value_heads=1, head_dim=16), final_logit_softcapping=3.0
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(100)
    add_loss_head(model)
    return model.requires_grad_(False)


def make_batch() -> tuple[dict[str, Tensor], Tensor]:
    """Two rows of two documents, with some targets."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 500, (2, 12), generator=generator)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).repeat(2, 1)
    labels = torch.where(torch.rand(2, 12, generator=generator) < 0.5, ids, -100)
    labels[positions == 0] = -100
    return {"input_ids": ids, "position_ids": positions}, labels


def test_distillation_loss_equals_dense_logits_at_targets(tiny_model_dir) -> None:
    student, teacher, (inputs, labels) = load(tiny_model_dir, is_teacher=False), make_teacher(), make_batch()
    sums = score_beside_teacher(student, teacher, inputs, labels, Objective(0.3, 0.0, 2.0)).result
    is_target = labels[:, 1:] >= 0
    logits, taught = (model(**inputs, use_cache=False).logits[:, :-1][is_target] for model in (student, teacher))
    assert taught.abs().max() > 2, "the soft cap has an effect"
    nll = functional.cross_entropy(logits, labels[:, 1:][is_target], reduction="sum")
    student_logps, teacher_logps = (logits[:, :500] / 2).log_softmax(-1), (taught / 2).log_softmax(-1)
    kl = functional.kl_div(student_logps, teacher_logps, reduction="sum", log_target=True)
    torch.testing.assert_close(sums.loss_sum, 0.3 * nll + 0.7 * 4 * kl)
    assert sums.num_targets == is_target.sum()

    names, parameters = zip(*student.named_parameters(), strict=True)
    expected = torch.autograd.grad(0.3 * nll + 0.7 * 4 * kl, parameters)
    for name, got, wanted in zip(names, torch.autograd.grad(sums.loss_sum, parameters), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("shift", [1, 3])
def test_misaligned_teacher_has_large_divergence(tiny_model_dir, shift: int) -> None:
    student, teacher = (load(tiny_model_dir, is_teacher=is_teacher) for is_teacher in (False, True))
    inputs, labels = make_batch()
    aligned = score_beside_teacher(student, teacher, inputs, labels, Objective(0.0)).result
    assert abs(aligned.divergence_sum.item()) < 1e-4

    def shifted(*, head: Any, **inputs: Any) -> Any:
        return teacher(**inputs, head=lambda hidden, *args, **rest: head(hidden.roll(shift, 1), *args, **rest))

    apart = score_beside_teacher(student, shifted, inputs, labels, Objective(0.0)).result
    assert (apart.divergence_sum / apart.num_targets).item() > 1e-4


def test_teacher_saves_no_tensors_for_backward(tiny_model_dir) -> None:
    student, teacher = load(tiny_model_dir, is_teacher=False), make_teacher()
    returned = []
    teacher.register_forward_hook(lambda *args: returned.append(args[-1]))
    inputs, labels = make_batch()
    loss = score_beside_teacher(student, teacher, inputs, labels, Objective()).result.loss_sum
    assert returned == [(None, None)]
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
