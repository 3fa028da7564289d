"""What upstream's trainer is told, whatever the recipe says."""

import pytest
import torch
from trl import SFTConfig

from recipes_lib.config.schema import DataConfig, EvaluationConfig, ModelConfig, RecipeConfig, TokensConfig
from recipes_lib.training.layouts.launch_environment import Launch
from recipes_lib.training.trainers import arguments
from recipes_lib.training.trainers.arguments import build_autocast, build_training_arguments, resolve_precision

ONE = Launch(rank=0, local_rank=0, world_size=1, engine="")


def make_config(tmp_path, **training):
    return RecipeConfig(
        stage="sft",
        path=None,
        data=DataConfig(dataset_name="chats.jsonl"),
        tokens=TokensConfig(),
        model=ModelConfig(model_name_or_path="model"),
        evaluation=EvaluationConfig(),
        training={"output_dir": str(tmp_path), "activation_checkpointing": False} | training,
    )


def test_a_nan_is_never_hidden_and_prepared_rows_are_never_touched_again(tmp_path):
    args = build_training_arguments(make_config(tmp_path), ONE, has_eval=True)
    assert isinstance(args, SFTConfig)
    assert not args.logging_nan_inf_filter
    assert args.average_tokens_across_devices
    assert args.dataset_kwargs == {"skip_prepare_dataset": True}
    assert args.max_length is None
    assert not args.packing
    assert not args.gradient_checkpointing


def test_keys_of_the_recipe_reach_the_trainer(tmp_path):
    args = build_training_arguments(make_config(tmp_path, learning_rate=3e-4, seed=7), ONE, has_eval=True)
    assert (args.learning_rate, args.seed) == (3e-4, 7)


def test_one_process_takes_one_gpu_however_many_it_sees(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    config = make_config(tmp_path, bf16=False, per_device_train_batch_size=4, per_device_eval_batch_size=3)
    args = build_training_arguments(config, ONE, has_eval=True)
    assert (args.n_gpu, args.train_batch_size, args.eval_batch_size) == (1, 4, 3)


def test_without_held_out_data_nothing_is_evaluated(tmp_path):
    config = make_config(tmp_path, eval_strategy="steps", eval_steps=5, eval_on_start=True)
    args = build_training_arguments(config, ONE, has_eval=False)
    assert args.eval_strategy == "no"
    assert not args.eval_on_start
    assert build_training_arguments(config, ONE, has_eval=True).eval_on_start


@pytest.mark.parametrize(
    ("given", "hardware", "expected"),
    [
        ({}, True, (True, False)),
        ({}, False, (False, False)),
        ({"bf16": False}, True, (False, False)),
        ({"bf16": True}, False, (True, False)),
        ({"fp16": True}, True, (False, True)),
    ],
)
def test_bf16_is_used_where_the_hardware_has_it_and_the_recipe_does_not_say(
    tmp_path, monkeypatch, given, hardware, expected
):
    monkeypatch.setattr(arguments, "supports_bf16", lambda: hardware)
    precision = resolve_precision(make_config(tmp_path, **given))
    assert (precision["bf16"], precision["fp16"]) == expected


@pytest.mark.parametrize(
    ("given", "launched", "expected"),
    [
        ({}, "fp16", (False, True)),
        ({}, "fp8", (False, False)),
        ({}, "bf16", (True, False)),
        ({"bf16": True}, "fp16", (True, False)),
        ({"bf16": False}, "fp16", (False, False)),
    ],
)
def test_a_recipe_that_says_nothing_leaves_a_launch_file_its_precision(
    tmp_path, monkeypatch, given, launched, expected
):
    monkeypatch.setattr(arguments, "supports_bf16", lambda: True)
    precision = resolve_precision(make_config(tmp_path, **given), launched)
    assert (precision["bf16"], precision["fp16"]) == expected


@pytest.mark.parametrize("given", [{}, {"bf16": True}])
def test_a_model_alone_computes_in_the_precision_of_the_run(tmp_path, given):
    args = build_training_arguments(make_config(tmp_path, **{"bf16": False, **given}), ONE, has_eval=True)
    with build_autocast(args)():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if given else torch.float32)
