"""A trainer's layout is chosen by what holds its weights; what a layout writes, the others' tests open again."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recipes_lib.training.checkpoints.model_layout import (
    ModelLayout,
    PipelineLayout,
    ReplicatedLayout,
    ShardedLayout,
    choose_layout,
)


def make_trainer(*, deepspeed=False, fsdp=False, part=False):
    model = nn.Linear(2, 2)
    if part:
        model.part = object()
    return SimpleNamespace(model=model, is_deepspeed_enabled=deepspeed, is_fsdp_enabled=fsdp)


@pytest.mark.parametrize(
    ("launch", "layout", "engine", "is_shared", "has_engine_norm"),
    [
        ({}, ReplicatedLayout, "", False, False),
        ({"fsdp": True}, ShardedLayout, "FSDP", True, True),
        ({"part": True}, PipelineLayout, "FSDP", True, False),
        ({"part": True, "fsdp": True}, PipelineLayout, "FSDP", True, True),
        ({"deepspeed": True}, ModelLayout, "DEEPSPEED", True, True),
    ],
)
def test_the_layout_is_what_holds_the_weights(launch, layout, engine, is_shared, has_engine_norm):
    chosen = choose_layout(make_trainer(**launch))
    assert type(chosen) is layout
    assert (chosen.engine, chosen.is_shared, chosen.has_engine_norm) == (engine, is_shared, has_engine_norm)


def test_what_zero_gathered_holds_a_tied_tensor_once():
    model = SimpleNamespace(all_tied_weights_keys={"lm_head.weight": "model.embed_tokens.weight"})
    embedding = torch.ones(2)
    state = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    assert ModelLayout().drop_copies(model, state) == {"model.embed_tokens.weight": embedding}


def test_upstream_does_what_an_engine_does_itself(tmp_path):
    layout, model = ModelLayout(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    assert (
        layout.save_model(tmp_path, model, None, None) is layout.save_optimizer(tmp_path, {}, optimizer, None) is None
    )
    assert not layout.load_model(tmp_path, model)
    assert not layout.load_optimizer(tmp_path, model, {}, optimizer, lambda _: optimizer)
    assert layout.gather(model) is None
