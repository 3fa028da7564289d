"""Distillation trajectory against the dense computation, metrics, and an unchanged teacher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.training.students import KEYS, make_distiller
from tests.training.trajectories import Recorder, assert_equal_weights, make_packs, weights_of
from torch.nn import functional
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.distillation.distill_trainer import verify_first_sums
from recipes_lib.errors import DivergedError
from recipes_lib.losses.distillation import DistillationSums

OBJECTIVE: dict[str, Any] = {"distillation_alpha": 0.3, "distillation_temperature": 2.0}


class DenseTrainer(Trainer):
    """Dense reference: logits of both models, torch's losses, the mean over the targets of the step."""

    model_accepts_loss_kwargs = True
    teacher: Any = None

    def get_batch_samples(self, iterator: Any, num_batches: int, device: Any) -> Any:
        batches, _ = super().get_batch_samples(iterator, num_batches, device)
        return batches, sum((batch["labels"][:, 1:] >= 0).sum() for batch in batches)

    def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Any:
        labels = inputs.pop("labels")[:, 1:]
        is_target = labels >= 0
        places = {name: inputs[name] for name in ("input_ids", "position_ids")}
        logits = model(**places, use_cache=False).logits[:, :-1][is_target]
        with torch.no_grad():
            taught = self.teacher(**places, use_cache=False).logits[:, :-1][is_target]
        nll = functional.cross_entropy(logits, labels[is_target], reduction="sum")
        kl = functional.kl_div(
            (logits / 2).log_softmax(-1), (taught / 2).log_softmax(-1), reduction="sum", log_target=True
        )
        return (0.3 * nll + 0.7 * 4 * kl) / num_items_in_batch


@pytest.mark.parametrize("adapter", [{}, {"use_peft": True, "lora_r": 4}], ids=["full", "adapter"])
def test_trajectory_equals_dense_computation(tiny_model_dir, student_dir, tmp_path, adapter) -> None:
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    keys = {**OBJECTIVE, **cut, **adapter}
    ours, recorder, _ = make_distiller(student_dir, tiny_model_dir, tmp_path / "ours", make_packs(), **keys)
    model = AutoModelForCausalLM.from_pretrained(student_dir)
    if adapter:
        ours.model.save_pretrained(tmp_path / "adapter")
        model = PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)
    ours.train()
    plain_recorder = Recorder()
    plain = DenseTrainer(
        model=model,
        args=TrainingArguments(str(tmp_path / "plain"), **(KEYS | cut), remove_unused_columns=False, disable_tqdm=True),
        train_dataset=make_packs(),
        data_collator=PackedCollator(pad_token_id=1),
        callbacks=[plain_recorder],
    )
    plain.teacher = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    plain.train()
    assert len(recorder.steps) == 4
    for expected, got in zip(plain_recorder.steps, recorder.steps, strict=True):
        assert got == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def finished(tiny_model_dir, student_dir, tmp_path_factory) -> Any:
    """A finished run with a checkpoint, what it logged and printed, and the teacher's weights before it."""
    folder = tmp_path_factory.mktemp("finished")
    keys = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 1, "gradient_accumulation_steps": 2}
    keys |= OBJECTIVE | {"per_device_train_batch_size": 2}
    trainer, recorder, lines = make_distiller(student_dir, tiny_model_dir, folder, make_packs(), **keys)
    before = {name: tensor.clone() for name, tensor in trainer.teacher.state_dict().items()}
    trainer.train()
    return SimpleNamespace(trainer=trainer, recorder=recorder, lines=lines, before=before, folder=folder)


def test_metrics_are_means_over_targets_and_sum_to_loss(finished) -> None:
    recorder, lines = finished.recorder, finished.lines
    for log in recorder.train_logs:
        expected = 0.3 * log["distillation/nll"] + 0.7 * 4 * log["distillation/divergence"]
        assert log["loss"] == pytest.approx(expected, rel=1e-4)
        assert 0 <= log["distillation/agreement"] <= 1
        assert log["distillation/teacher_nll"] == pytest.approx(6.3, abs=0.5), "random weights over 512 tokens"
    assert sum(line.startswith("step 0: loss on labels in nats: student") for line in lines) == 1


def test_teacher_is_unchanged_and_not_saved(finished) -> None:
    trainer, checkpoint = finished.trainer, finished.folder / "checkpoint-4"
    assert_equal_weights(finished.before, trainer.teacher.state_dict())
    assert not trainer.teacher.training
    assert not any(parameter.requires_grad for parameter in trainer.teacher.parameters())
    trained = {parameter for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert not trained & set(trainer.teacher.parameters())
    saved = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert_equal_weights(saved.state_dict(), weights_of(trainer))
    sizes = [path.stat().st_size for path in checkpoint.glob("*.safetensors")]
    assert sum(sizes) < 1.1 * 4 * saved.num_parameters()


def test_distillation_from_itself_has_no_loss_and_no_gradient(tiny_model_dir, tmp_path) -> None:
    keys = {"distillation_alpha": 0.0, "distillation_beta": 0.5, "weight_decay": 0.0, "optim": "sgd", "max_steps": 2}
    keys |= {"per_device_train_batch_size": 2}
    trainer, recorder, lines = make_distiller(tiny_model_dir, tiny_model_dir, tmp_path, make_packs(), **keys)
    before = weights_of(trainer)
    trainer.train()
    for step in recorder.steps:
        assert abs(step["loss"]) < 1e-6
        assert step["grad_norm"] < 1e-5
    for name, tensor in weights_of(trainer).items():
        torch.testing.assert_close(tensor, before[name], atol=1e-7, rtol=0)
    assert any(line.endswith("divergence 0") or "e-" in line for line in lines if line.startswith("step 0"))


def test_copy_that_differs_from_teacher_stops_at_first_step(tiny_model_dir, tmp_path) -> None:
    trainer, _, _ = make_distiller(tiny_model_dir, tiny_model_dir, tmp_path, make_packs())
    with torch.no_grad():
        trainer.teacher.lm_head.weight.mul_(1.5)
    before = weights_of(trainer)
    with pytest.raises(DivergedError, match="its own teacher"):
        trainer.train()
    assert_equal_weights(before, weights_of(trainer))


def test_worse_teacher_is_reported() -> None:
    def report(nll: float, teacher_nll: float) -> str:
        figures = [torch.tensor(10 * value) for value in (0.0, nll, 0.5, teacher_nll)]
        counts = [torch.tensor(10)] * 3
        return verify_first_sums(DistillationSums(*figures, *counts), torch.float32, is_own_teacher=False)

    assert report(3.0, 2.0) == "step 0: loss on labels in nats: student 3.000, teacher 2.000, divergence 0.5"
    assert "check that it is the right one" in report(2.0, 3.0)
