"""Tensors without memory are cast and counted as a GPU would; with real models, see ``tests/rl/test_memory.py``."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.planning.activations import FLOAT32_ON_CUDA, count_activations, on_fakes

OF = {
    **dict.fromkeys(("softmax", "softmin", "log_softmax", "cumsum", "cumprod"), (0,)),
    "layer_norm": ((4,),),
    "group_norm": (2,),
    "pow": (3,),
}
"""What a function takes besides a tensor, or two of them."""


def call(name: str, device: str) -> torch.dtype:
    """Call a function with what it takes, in ``bfloat16``, and return the type of the result."""
    one, ids = (
        torch.ones(4, *shape, dtype=dtype, device=device) for shape, dtype in (((4,), torch.bfloat16), ((), int))
    )
    others = (ids,) if name in ("cross_entropy", "nll_loss") else ()
    if name.endswith("1_loss") or name in ("mse_loss", "kl_div", "cosine_similarity"):
        others = (one,)
    function = getattr(functional, name, None) or getattr(torch, name)
    return function(one, *others, *OF.get(name, ())).dtype


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", [*sorted(FLOAT32_ON_CUDA), "relu", "tanh"])
def test_functions_run_in_the_type_that_they_have_on_cuda(name, monkeypatch) -> None:
    with FakeTensorMode():
        # What torch itself does; `torch.autocast` asks for a GPU, of which nothing is used.
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", True)
        try:
            expected = call(name, "cuda") if name in FLOAT32_ON_CUDA else torch.bfloat16
        finally:
            torch.set_autocast_enabled("cuda", False)
    with on_fakes(nn.Linear(1, 1), is_half=True):
        assert call(name, "cpu") == expected
    with on_fakes(nn.Linear(1, 1), is_half=False):
        assert call(name, "cpu") == torch.bfloat16


def test_layer_norms_and_powers_in_32_bits_keep_more_of_gpt2(monkeypatch) -> None:
    """A layer's two norms pass 32 bits on, and so does the power in its activation function."""

    def count(activation: str) -> int:
        config = GPT2Config(n_layer=2, n_embd=64, n_head=4, activation_function=activation)
        with torch.device("meta"):
            model = GPT2LMHeadModel(config).to(torch.bfloat16)
            add_loss_head(model)
        with on_fakes(model, is_half=True):
            return count_activations(model, 2, 32, 31).total

    with_power, without = count("gelu_new"), count("gelu")
    monkeypatch.setattr("recipes_lib.planning.activations.FLOAT32_ON_CUDA", frozenset())
    assert with_power > count("gelu_new")
    assert without > count("gelu")
    assert with_power - without > count("gelu_new") - count("gelu")
