"""A look at a model changes no module's mode, whatever happens in between."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recipes_lib.models.evaluation import evaluating, halved_for_flash


def test_every_module_is_in_the_mode_it_was_in_after_an_error_too():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5))).train()
    model[1].eval()
    before = [module.training for module in model.modules()]
    assert len(set(before)) == 2
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        assert not model(torch.ones(1, 2)).requires_grad
    assert [module.training for module in model.modules()] == before
    with pytest.raises(RuntimeError), evaluating(model):
        raise RuntimeError
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(("kernel", "dtype"), [("flash_attention_2", torch.bfloat16), ("sdpa", torch.float32)])
def test_only_flash_attention_makes_products_half(kernel, dtype):
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(_attn_implementation=kernel))
    with halved_for_flash(model):
        assert model(torch.ones(1, 2)).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16), halved_for_flash(model):
        assert model(torch.ones(1, 2)).dtype == torch.bfloat16
