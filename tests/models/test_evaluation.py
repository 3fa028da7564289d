"""A look at a model changes no module's mode, whatever happens in between."""

import pytest
import torch
from torch import nn

from recipes_lib.models.evaluation import evaluating


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
