"""Training arguments: overrides of recipe keys, precision of recipe and launch file, and requirements of fp8."""

from __future__ import annotations

import dataclasses
import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import AORecipeKwargs
from tests.training.configurations import build_recipe
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig

from recipes_lib.errors import ConfigError
from recipes_lib.training.layouts.launch_environment import Launch
from recipes_lib.training.trainers import arguments
from recipes_lib.training.trainers.arguments import (
    build_autocast,
    build_training_arguments,
    get_rounding_dtype,
    resolve_precision,
    verify_fp8,
    verify_fp8_layers,
)

ONE = Launch(rank=0, local_rank=0, world_size=1, engine="")


def make_config(tmp_path, **training):
    return build_recipe({"output_dir": str(tmp_path), "activation_checkpointing": False} | training)


def test_overrides_log_nan_losses_and_skip_preparation(tmp_path):
    args = build_training_arguments(make_config(tmp_path), ONE, has_eval=True)
    assert isinstance(args, SFTConfig)
    assert not args.logging_nan_inf_filter
    assert args.average_tokens_across_devices
    assert args.dataset_kwargs == {"skip_prepare_dataset": True}
    assert args.max_length is None
    assert not args.packing
    assert not args.gradient_checkpointing


def test_null_is_no_tracker(tmp_path):
    assert build_training_arguments(make_config(tmp_path, report_to=None), ONE, has_eval=False).report_to == []


@pytest.mark.skipif(sys.platform != "linux", reason="workers are not forked there")
@pytest.mark.parametrize(
    ("keys", "method"),
    [
        ({}, None),
        ({"dataloader_num_workers": 1}, "fork"),
        ({"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "spawn"}, "spawn"),
    ],
)
def test_data_loader_workers_are_forked(keys, method, tmp_path):
    args = build_training_arguments(make_config(tmp_path, **keys), ONE, has_eval=True)
    assert args.dataloader_multiprocessing_context == method


def test_single_process_uses_one_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    # Its default counts devices in a CUDA build, which would then initialise the driver.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    config = make_config(tmp_path, bf16=False, per_device_train_batch_size=4, per_device_eval_batch_size=3)
    args = build_training_arguments(config, ONE, has_eval=True)
    assert (args.n_gpu, args.train_batch_size, args.eval_batch_size) == (1, 4, 3)


def test_evaluation_is_disabled_without_held_out_data(tmp_path):
    config = make_config(tmp_path, eval_strategy="steps", eval_steps=5, eval_on_start=True)
    args = build_training_arguments(config, ONE, has_eval=False)
    assert args.eval_strategy == "no"
    assert not args.eval_on_start
    assert build_training_arguments(config, ONE, has_eval=True).eval_on_start


def test_commands_without_evaluation_take_configuration_of_run_with_best_model(tmp_path):
    """As ``recipes fisher`` and ``recipes distill-store`` do."""
    keys = {"load_best_model_at_end": True, "save_steps": 5, "eval_strategy": "steps", "eval_steps": 5}
    args = build_training_arguments(make_config(tmp_path, **keys), ONE, has_eval=False)
    assert not args.load_best_model_at_end


@pytest.mark.parametrize(
    ("metric", "is_greater"),
    [
        *(
            (name, False)
            for name in ("eval_loss", "code_bits_per_byte", "wikitext_word_perplexity", "wer", "word_error_rate")
        ),
        *((name, True) for name in ("eval_token_accuracy", "rewards/accuracies", "judge_win_rate", "f1", "answer")),
    ],
)
def test_direction_of_best_metric_follows_from_its_name(tmp_path, metric, is_greater):
    config = make_config(tmp_path, metric_for_best_model=metric)
    assert build_training_arguments(config, ONE, has_eval=True).greater_is_better is is_greater
    opposite = config.with_training({"greater_is_better": not is_greater})
    assert build_training_arguments(opposite, ONE, has_eval=True).greater_is_better is not is_greater


@pytest.mark.parametrize(
    ("keys", "supports_bf16", "expected"),
    [
        ({}, True, (True, False)),
        ({}, False, (False, False)),
        ({"bf16": False}, True, (False, False)),
        ({"bf16": True}, False, (True, False)),
        ({"fp16": True}, True, (False, True)),
    ],
)
def test_precision_defaults_to_bf16_on_supporting_hardware(tmp_path, monkeypatch, keys, supports_bf16, expected):
    monkeypatch.setattr(arguments, "supports_bf16", lambda **_: supports_bf16)
    precision = resolve_precision(make_config(tmp_path, **keys))
    assert (precision["bf16"], precision["fp16"]) == expected


@pytest.mark.parametrize(
    ("keys", "launched", "expected"),
    [
        ({}, "fp16", (False, True)),
        ({}, "fp8", (False, False)),
        ({"bf16": True}, "fp8", (False, False)),
        ({}, "bf16", (True, False)),
        ({"bf16": True}, "fp16", (True, False)),
        ({"bf16": False}, "fp16", (False, True)),
        ({"fp16": False}, "bf16", (True, False)),
    ],
)
def test_precision_of_launch_file_applies_if_recipe_sets_none(tmp_path, monkeypatch, keys, launched, expected):
    for supports_bf16 in (True, False):
        monkeypatch.setattr(arguments, "supports_bf16", lambda supports_bf16=supports_bf16, **_: supports_bf16)
        precision = resolve_precision(make_config(tmp_path, **keys), launched)
        assert (precision["bf16"], precision["fp16"]) == expected


@pytest.mark.parametrize("scheduler", ["reduce_lr_on_plateau", "greedy"])
def test_value_error_of_upstream_is_reported_at_its_key(tmp_path, scheduler):
    config = make_config(tmp_path, lr_scheduler_type=scheduler)
    found = f"lr_scheduler_type.* {scheduler} requires an eval strategy\n +write another value, or delete the line"
    with pytest.raises(ConfigError, match=found):
        build_training_arguments(config, ONE, has_eval=False)


def test_beta_of_zero_is_accepted_by_torch(tmp_path):
    args = build_training_arguments(make_config(tmp_path, adam_beta1=0), ONE, has_eval=False)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], betas=(args.adam_beta1, args.adam_beta2))
    assert optimizer.defaults["betas"][0] == 0


def test_driver_that_accelerate_refuses_is_reported(tmp_path, monkeypatch):
    def refuse(_):
        raise NotImplementedError("RTX 4000 does not support P2P")

    monkeypatch.setattr(PartialState, "set_device", refuse)
    with pytest.raises(ConfigError, match="launch: RTX 4000 does not support P2P"):
        build_training_arguments(make_config(tmp_path), ONE, has_eval=False)
    PartialState._reset_state()


@pytest.mark.parametrize("key", ["ddp_find_unused_parameters", "ddp_broadcast_buffers"])
def test_ddp_does_no_work_that_language_models_do_not_need(key, tmp_path):
    """Without these defaults, each step would traverse the graph, and broadcast buffers, once more."""
    assert getattr(build_training_arguments(make_config(tmp_path), ONE, has_eval=False), key) is False
    assert getattr(build_training_arguments(make_config(tmp_path, **{key: True}), ONE, has_eval=False), key) is True


@pytest.mark.parametrize(("keys", "seconds"), [({"ddp_timeout": 7}, 7), ({}, 1800)])
def test_collectives_on_cpus_wait_for_ddp_timeout(keys, seconds, tmp_path, monkeypatch):
    """transformers passes it on for accelerators only."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, str(value))

    def join(backend, *, timeout=None, **_):
        raise ConnectionError(f"{backend}: {timeout}")

    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    config = make_config(tmp_path, use_cpu=True, bf16=False, **keys)
    with pytest.raises(ConnectionError, match=f"gloo: {timedelta(seconds=seconds)}"):
        build_training_arguments(config, dataclasses.replace(ONE, world_size=2), has_eval=False)


def test_missing_distributed_backend_is_refused(tmp_path):
    """transformers would report an uninitialised process group."""
    with pytest.raises(ConfigError, match="ddp_backend: this torch has no backend 'mccl'"):
        build_training_arguments(make_config(tmp_path, ddp_backend="mccl"), ONE, has_eval=False)
    # One process has no process group.
    build_training_arguments(make_config(tmp_path, ddp_backend="gloo"), ONE, has_eval=False)


@pytest.mark.parametrize("keys", [{}, {"bf16": True}])
def test_autocast_has_compute_dtype_of_run(tmp_path, keys):
    args = build_training_arguments(make_config(tmp_path, **{"bf16": False, **keys}), ONE, has_eval=True)
    with build_autocast(args)():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if keys else torch.float32)


def test_rounding_dtype_is_float16_under_tf32(tmp_path, monkeypatch):
    args = build_training_arguments(make_config(tmp_path, bf16=False), ONE, has_eval=True)
    models = [SimpleNamespace(dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    assert [get_rounding_dtype(model, args) for model in models] == [torch.bfloat16, torch.float32]
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    assert [get_rounding_dtype(model, args) for model in models] == [torch.bfloat16, torch.float16]


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda name: object())


def test_fp8_reports_missing_gpu_and_missing_torchao(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        verify_fp8("fp8")
    assert "pip install torchao" in str(error.value)
    assert "this machine has no GPU" in str(error.value)


@pytest.mark.usefixtures("hopper")
def test_fp8_refuses_gpu_of_older_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"this machine has a GPU of compute capability 8\.0"):
        verify_fp8("fp8")


@pytest.mark.usefixtures("hopper")
def test_fp8_is_accepted_on_hopper_with_torchao():
    verify_fp8("fp8")


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_other_precisions_have_no_requirements(precision):
    verify_fp8(precision)


def test_fp8_of_launch_file_disables_default_bf16_and_keeps_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "1")  # As `accelerate launch` sets it.
    monkeypatch.setattr("recipes_lib.training.trainers.arguments.verify_fp8", lambda precision: None)
    monkeypatch.setattr("recipes_lib.training.trainers.arguments.verify_compiler", lambda *_: None)
    launch = Launch(rank=0, local_rank=0, world_size=1, engine="", precision="fp8")
    args = build_training_arguments(make_config(tmp_path), launch, has_eval=False)
    assert args.mixed_precision == "fp8"
    assert not args.bf16
    # In place of torchao's: with its all-gather in 8 bits, accelerate would replace weights that the optimizer has.
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", SimpleNamespace(Float8LinearConfig=SimpleNamespace))
    monkeypatch.setattr("accelerate.utils.dataclasses.is_torchao_available", lambda: True)
    assert not AORecipeKwargs().config.enable_fsdp_float8_all_gather


def test_fp8_refuses_model_without_convertible_layer():
    tiny = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    verify_fp8_layers(LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, **tiny)))
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no inner"):
        verify_fp8_layers(LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=20, **tiny)))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no inner"):
        verify_fp8_layers(GPT2LMHeadModel(GPT2Config(vocab_size=32, n_layer=1, n_head=2, n_embd=32)))
    with pytest.raises(ConfigError, match="Sequential"):
        verify_fp8_layers(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
