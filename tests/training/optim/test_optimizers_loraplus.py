"""LoRA+: a higher learning rate of B matrices, with any optimizer, compared with PEFT."""

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from tests.models.adapter_models import INPUT_IDS, build_model
from tests.training.adapter_runs import make_adapter_trainer
from tests.training.trajectories import make_packs
from transformers import Trainer, TrainingArguments

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.training.optim.optimizers import describe_groups, split_loraplus_groups

RATIO = 16.0


def adapt(**keys):
    return add_adapter(build_model("llama"), AdapterConfig(use_peft=True, lora_r=4, **keys), seed=0)


def build_optimizer(model, tmp_path, optim="adamw_torch", **training):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, optim=optim, learning_rate=1e-3, **training)
    return Trainer(model=model, args=args).create_optimizer()


def take_steps(model, optimizer, num_steps=5):
    for _ in range(num_steps):
        model(input_ids=INPUT_IDS, labels=INPUT_IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters() if parameter.requires_grad]


def test_weights_equal_peft_loraplus(tmp_path):
    model, peft_model = adapt(), adapt()
    optimizer = build_optimizer(model, tmp_path)
    split_loraplus_groups(optimizer, model, RATIO)
    reference = create_loraplus_optimizer(peft_model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=RATIO)
    expected = take_steps(peft_model, reference)
    torch.testing.assert_close(take_steps(model, optimizer), expected, rtol=1e-6, atol=1e-7)
    plain = adapt()
    assert not torch.allclose(take_steps(plain, build_optimizer(plain, tmp_path))[1], expected[1])


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd", "adafactor", "adamw_8bit", "paged_adamw_8bit"])
def test_loraplus_changes_learning_rate_of_b_matrices_only(tmp_path, optim):
    model = adapt(use_dora=True, lora_modules_to_save=["embed_tokens", "norm"])
    plain = build_optimizer(model, tmp_path, optim, weight_decay=0.1)
    before = {
        id(parameter): (group["lr"], group["weight_decay"])
        for group in plain.param_groups
        for parameter in group["params"]
    }
    optimizer = build_optimizer(model, tmp_path, optim, weight_decay=0.1)
    split_loraplus_groups(optimizer, model, RATIO)
    rows = describe_groups(optimizer, model)
    fast = [row for row in rows if row.learning_rate == pytest.approx(1e-3 * RATIO)]
    assert [name for row in fast for name in row.parameters if ".lora_B." not in name] == []
    assert sum(row.num_tensors for row in fast) == 2 * 7
    after = {
        id(parameter): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert after.keys() == before.keys()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate, decay = before[id(parameter)]
            assert after[id(parameter)] == (rate * RATIO if ".lora_B." in name else rate, decay)
    moved = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    assert all(not torch.equal(*pair) for pair in zip(moved, take_steps(model, optimizer), strict=True))


def test_trainer_splits_groups_once_and_resumes_bit_identically(tiny_model_dir, tmp_path):
    def train(folder, **options):
        trainer, recorder, _ = make_adapter_trainer(
            tiny_model_dir,
            tmp_path / folder,
            make_packs(),
            AdapterConfig(use_peft=True, lora_r=4, loraplus_lr_ratio=RATIO),
            save_strategy="steps",
            save_steps=2,
        )
        trainer.train(**options)
        return trainer, recorder

    straight, recorder = train("straight")
    straight.create_optimizer()  # upstream calls it more than once
    groups = straight.optimizer.optimizer.param_groups
    assert sorted(group["initial_lr"] for group in groups if group["params"]) == pytest.approx([1e-3, 1e-3 * RATIO])
    resumed, second = train("resumed", resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert second.steps == recorder.steps[2:]
    pairs = zip(straight.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
