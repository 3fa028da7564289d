"""LoRA trajectory against plain PEFT under TRL's ``SFTTrainer`` on the same chats."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.parity import trl_runs
from tests.rows import write_rows
from tests.training.adapter_runs import make_adapter_trainer
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from recipes_lib.config.schema import AdapterConfig

KEYS = trl_runs.SHARED | {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "max_steps": 8,
}
ADAPTERS = {
    "lora": ({}, {}),
    "gaussian-few-layers-and-norms": (
        {
            "lora_target_modules": ["q_proj", "v_proj"],
            "init_lora_weights": "gaussian",
            "lora_modules_to_save": ["norm"],
        },
        {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian", "modules_to_save": ["norm"]},
    ),
    "rslora-dora": ({"use_rslora": True, "use_dora": True},) * 2,
    "pissa": ({"init_lora_weights": "pissa"}, {"init_lora_weights": "pissa_niter_16"}),
}


@pytest.fixture
def rows(tmp_path):
    texts = ({"prompt": f"{n} plus {n} is", "completion": f" {2 * n}, " * (1 + n % 4)} for n in range(24))
    return write_rows(tmp_path / "rows.jsonl", texts)


def train_ours(model_dir, path, tmp_path, adapter):
    _, data = trl_runs.prepare_rows("lora", model_dir, path, tmp_path, KEYS)
    trainer, recorder, _ = make_adapter_trainer(model_dir, tmp_path / "ours", data, adapter, **KEYS)
    trainer.train()
    return recorder.steps


@pytest.mark.parametrize("name", ADAPTERS)
def test_lora_losses_and_gradient_norms_equal_peft_and_trl(tiny_model_dir, rows, tmp_path, name):
    ours, theirs = ADAPTERS[name]
    shared = {"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM", "target_modules": "all-linear"}
    got = train_ours(tiny_model_dir, rows, tmp_path, AdapterConfig(use_peft=True, lora_r=8, lora_alpha=16, **ours))
    torch.manual_seed(KEYS["seed"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir), LoraConfig(**(shared | theirs)))
    arguments = partial(SFTConfig, max_length=512, **KEYS)
    expected = trl_runs.train_trl(SFTTrainer, arguments, model, tiny_model_dir, rows, tmp_path)
    assert len(got) == KEYS["max_steps"]
    assert got[-1]["loss"] < got[0]["loss"] - 0.1
    trl_runs.assert_same_steps(expected, got)
