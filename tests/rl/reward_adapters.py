"""Reward model of the keys task as an adapter, with a random head."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.models.adapters.lora import add_adapter


def write_reward_adapter(policy_dir: Path, folder: Path) -> Path:
    """Write a reward model as an adapter of rank 3 on the policy, with mean 0.7 and standard deviation 2.5."""
    torch.manual_seed(1)
    base = AutoModelForSequenceClassification.from_pretrained(policy_dir, num_labels=1)
    model = add_adapter(base, AdapterConfig(use_peft=True, lora_r=3), seed=1, task_type="SEQ_CLS")
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy_dir).save_pretrained(folder)
    (folder / "reward_scale.json").write_text(json.dumps({"mean": 0.7, "std": 2.5}))
    return folder
