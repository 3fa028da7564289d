"""fp8 is what it says or it is refused: accelerate would fall back to fp16, and upstream's arguments to bf16."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from recipes_lib.config.loader import load_config
from recipes_lib.errors import ConfigError
from recipes_lib.training.layouts.launch_environment import Launch
from recipes_lib.training.trainers import arguments as fp8
from recipes_lib.training.trainers.arguments import build_training_arguments, verify_fp8, verify_fp8_layers


@pytest.fixture
def make(tmp_path):
    def make_config(**keys):
        given = {"model_name_or_path": "o/m", "dataset_name": "o/d", "output_dir": tmp_path, "max_length": 8, **keys}
        return load_config("pretrain", [f"--{name}={value}" for name, value in given.items()])

    return make_config


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(fp8.importlib.util, "find_spec", lambda name: object())


def test_without_a_gpu_and_torchao_every_reason_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fp8.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        verify_fp8("fp8")
    told = str(error.value)
    assert "pip install torchao" in told
    assert "here is no GPU" in told


@pytest.mark.usefixtures("hopper")
def test_an_older_gpu_is_refused_by_its_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"here is a GPU of compute capability 8\.0"):
        verify_fp8("fp8")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("precision", ["fp8", "bf16", "no"])
def test_what_can_be_is_not_refused(precision):
    verify_fp8(precision)


def test_other_precisions_ask_for_nothing():
    verify_fp8("bf16")


def test_the_launch_files_fp8_is_not_overruled_by_the_default_of_bf16(make, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setattr("recipes_lib.training.trainers.arguments.verify_fp8", lambda precision: None)
    launch = Launch(rank=0, local_rank=0, world_size=1, engine="", precision="fp8")
    args = build_training_arguments(make(save_strategy="no"), launch, has_eval=False, num_steps=1)
    assert args.mixed_precision == "fp8"
    assert not args.bf16


def test_a_model_with_nothing_to_convert_is_refused():
    tiny = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    verify_fp8_layers(LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, **tiny)))
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no inner"):
        verify_fp8_layers(LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=20, **tiny)))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no inner"):
        verify_fp8_layers(GPT2LMHeadModel(GPT2Config(vocab_size=32, n_layer=1, n_head=2, n_embd=32)))
    with pytest.raises(ConfigError, match="Sequential"):
        verify_fp8_layers(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
