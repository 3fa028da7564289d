"""Base trainer: guards, evaluation hooks, resume, checkpoints, and the load-balancing loss."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.training.trajectories import make_packs, make_trainer
from transformers import (
    JetMoeConfig,
    JetMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from recipes_lib.errors import ConfigError
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.training.layouts.launch_environment import Launch, Layout
from recipes_lib.training.trainers.recipe_trainer import configure_router_loss


@pytest.mark.parametrize(
    ("layout", "num_groups"),
    [(Layout(), 8), (Layout(sizes={"tp": 2, "dp_shard": 4}), 4), (Layout(sizes={"cp": 4, "dp_shard": 2}), 2)],
)
def test_rows_per_step_count_data_parallel_ranks(tiny_model_dir, tmp_path, layout, num_groups):
    keys = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(), **keys)
    assert trainer.get_total_train_batch_size(trainer.args) == 2 * 3
    trainer.launch = Launch(rank=0, local_rank=0, world_size=8, engine="", layout=layout)
    assert trainer.get_total_train_batch_size(trainer.args) == 2 * 3 * num_groups


def test_dropping_all_rows_is_refused(tiny_model_dir, tmp_path):
    """transformers ends the run at step 0, and the initial model would be exported."""
    keys = {"per_device_train_batch_size": 64, "dataloader_drop_last": True}
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(), **keys)
    with pytest.raises(ConfigError, match="dataloader_drop_last: drops all 16 rows"):
        trainer.train()


ONE = Launch(rank=0, local_rank=0, world_size=1, engine="")
SIZES = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("key", "by_default", "in_config", "coefficient", "is_on"),
    [
        (None, True, False, 0.5, True),
        (None, False, False, 0.5, False),
        (None, False, True, 0.5, True),
        (0.1, True, False, 0.1, True),
        (0.1, False, False, 0.1, True),
        (0.0, True, True, 0.0, False),
        (0.0, False, True, 0.0, False),
    ],
)
def test_router_loss_follows_key_and_model_config(key, by_default, in_config, coefficient, is_on) -> None:
    config = MixtralConfig(
        **SIZES, num_key_value_heads=2, router_aux_loss_coef=0.5, output_router_logits=in_config, num_local_experts=2
    )
    model = MixtralForCausalLM(config)
    assert configure_router_loss(model, key, ONE, by_default=by_default) == coefficient
    add_loss_head(model)
    ids = torch.arange(8)[None]
    assert (model(input_ids=ids, labels=ids, loss_head=True).aux_loss is not None) is is_on
    # Both are saved with the model.
    assert model.config.output_router_logits is in_config
    assert model.config.router_aux_loss_coef == coefficient


@pytest.mark.parametrize("layout", [Layout(sizes={"cp": 2}), Layout(pipeline_stages=2)], ids=["context", "pipeline"])
def test_router_loss_is_refused_where_ranks_share_tokens_or_layers(layout) -> None:
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2))
    launch = Launch(rank=0, local_rank=0, world_size=2, engine="", layout=layout)
    with pytest.raises(ConfigError, match="router_aux_loss_coef: context and pipeline parallelism"):
        configure_router_loss(model, None, launch, by_default=True)
    assert configure_router_loss(model, 0.0, launch, by_default=True) == 0.0


def test_jetmoe_has_another_name_of_the_router_coefficient() -> None:
    shape = {name: size for name, size in SIZES.items() if name != "num_attention_heads"}
    config = JetMoeConfig(**shape, num_key_value_heads=1, kv_channels=4, num_local_experts=2, aux_loss_coef=0.5)
    model = JetMoeForCausalLM(config)
    assert configure_router_loss(model, None, ONE, by_default=True) == 0.5
    assert configure_router_loss(model, 0.1, ONE, by_default=True) == model.config.aux_loss_coef == 0.1


def test_router_loss_of_dense_model_is_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    assert configure_router_loss(model, None, ONE, by_default=True) == 0.0
    with pytest.raises(ConfigError, match="LlamaForCausalLM is no mixture of experts"):
        configure_router_loss(get_peft_model(model, LoraConfig()), 0.5, ONE, by_default=True)
