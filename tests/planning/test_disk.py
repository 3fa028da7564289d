"""Disk space of checkpoints, compared with files of the Trainer; errors on a full disk."""

import shutil

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from recipes_lib.errors import ConfigError
from recipes_lib.planning.disk import count_state_bytes, plan_disk, verify_disk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"])
def test_checkpoint_size_matches_files_of_trainer(tiny_model_dir, tmp_path, optim, dtype):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=dtype)
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7]] * 4, "labels": [[5, 6, 7]] * 4})
    optim_args = {"optim_args": "momentum=0.9"} if optim == "sgd" else {}
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=2, save_steps=1, optim=optim, report_to="none", **optim_args
    )
    Trainer(model=model, args=args, train_dataset=rows).train()
    written = sum((tmp_path / "checkpoint-1" / name).stat().st_size for name in ("model.safetensors", "optimizer.pt"))
    state_bytes = count_state_bytes({"optim": optim} | optim_args, dtype.itemsize)
    assert model.num_parameters() * (dtype.itemsize + state_bytes) == pytest.approx(written, rel=0.1)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2


@pytest.mark.parametrize(
    ("training", "options", "expected"),
    [
        ({"save_steps": 10}, {}, 10),
        ({"save_steps": 10, "save_total_limit": 2}, {}, 3),
        ({"save_steps": 90, "save_total_limit": 5}, {}, 2),
        ({"save_steps": 0.25}, {}, 4),
        ({"save_steps": 30}, {}, 4),
        ({"save_strategy": "no"}, {}, 0),
        ({"save_strategy": "epoch", "num_train_epochs": 3}, {}, 3),
        # An incomplete last epoch is saved too.
        ({"save_strategy": "epoch", "num_train_epochs": 2.5}, {}, 3),
        # `max_steps` decides, and epochs are unknown, or counted by the caller.
        ({"save_strategy": "epoch", "max_steps": 100}, {}, 1),
        ({"save_strategy": "epoch", "max_steps": 100}, {"num_epochs": 7.2}, 8),
        ({"save_strategy": "epoch", "num_train_epochs": 1000}, {}, 100),
        ({"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 20, "max_steps": 100}, {}, 5),
        ({"save_strategy": "best", "eval_strategy": "steps", "logging_steps": 25}, {}, 4),
        ({"save_strategy": "best", "eval_strategy": "epoch", "num_train_epochs": 3}, {}, 3),
        # Checkpoints that are kept beyond `save_total_limit`.
        ({"save_steps": 10, "save_total_limit": 2}, {"keep_every": 50}, 5),
        ({"save_steps": 10, "save_total_limit": 2}, {"keep_every": 50, "num_protected": 1}, 6),
        ({"save_steps": 10, "save_total_limit": 2}, {"keep_every": 10}, 10),
        ({"save_steps": 10, "save_total_limit": 2, "load_best_model_at_end": True}, {}, 4),
        ({"save_steps": 10, "save_total_limit": 2, "metric_for_best_model": "eval_loss"}, {}, 4),
    ],
)
def test_checkpoints_are_counted_at_their_maximum(tmp_path, training, options, expected):
    plan = plan_disk(1000, 10, 100, {"output_dir": str(tmp_path)} | training, **options)
    assert (plan.num_checkpoints, plan.total_bytes) == (expected, expected * 1000 + 10)


def test_states_have_fixed_width_or_that_of_weights() -> None:
    """SGD without momentum has none."""
    widths = {"adamw_torch": (8, 4), "adamw_bnb_8bit": (2.3, 2.3), "sgd": (0, 0)}
    for optim, expected in widths.items():
        assert tuple(count_state_bytes({"optim": optim}, width) for width in (4, 2)) == expected


def test_too_small_disk_raises_with_remedy(tmp_path, monkeypatch):
    verify_disk(plan_disk(100, 40, 100, {"output_dir": str(tmp_path)}), "outputs")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 10**6))
    plan = plan_disk(12 * 10**6, 4 * 10**6, 100, {"output_dir": str(tmp_path / "not" / "there"), "save_steps": 50})
    with pytest.raises(ConfigError, match="save_total_limit"):
        verify_disk(plan, "outputs")
