"""Tensors without memory are cast and counted as a GPU would; with real models, see ``tests/rl/test_memory.py``."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.planning.activations import (
    CAUSAL,
    FLOAT32_ON_CUDA,
    Activations,
    Checkpointing,
    LayerBytes,
    count_activations,
    fuse_as_liger,
    on_fakes,
)

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
            return count_activations(model, 2, 32, 31).count(Checkpointing())

    with_power, without = count("gelu_new"), count("gelu")
    monkeypatch.setattr("recipes_lib.planning.activations.FLOAT32_ON_CUDA", frozenset())
    assert with_power > count("gelu_new")
    assert without > count("gelu")
    assert with_power - without > count("gelu_new") - count("gelu")


SHAPES = [(64, 256, 4, 4, 2, 32), (128, 192, 4, 2, 1, 48), (96, 160, 6, 1, 3, 16), (256, 512, 8, 8, 1, 64)]
"""Width, MLP, heads, key-value heads, rows and length."""


def count_layer(shape: tuple[int, ...], *, kernel: str = CAUSAL, is_fused: bool = False) -> LayerBytes:
    """Bytes of the second layer of a Llama, whose inputs are neither embeddings nor positions."""
    hidden, inner, heads, groups, rows, length = shape
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=32, **sizes, num_attention_heads=heads, num_key_value_heads=groups)
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation=kernel)
        add_loss_head(model)
    with on_fakes(model, is_half=True):
        if is_fused:
            fuse_as_liger(model)
        return count_activations(model, rows, length, length - 1).layers[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_keeps_what_closed_forms_say(shape) -> None:
    """To the byte: all of it, what `save_matmuls` keeps, its input, and what Liger's kernels leave."""
    hidden, inner, heads, groups, rows, length = shape
    tokens, keys = rows * length, 4 * hidden * groups // heads
    assert count_layer(shape) == LayerBytes(
        total=tokens * (20 * hidden + keys + 8 * inner + 4 * heads + 8),
        inputs=2 * hidden * tokens,
        products=tokens * (8 * hidden + keys + 4 * inner + 4 * heads),
    )
    fused = count_layer(shape, is_fused=True).total
    assert fused == tokens * (12 * hidden + keys + 6 * inner + 4 * heads + 8)


def test_eager_attention_keeps_the_probabilities_of_each_pair_of_tokens() -> None:
    """In 32 and in 16 bits, and no sum of each row."""
    more = count_layer((64, 256, 4, 4, 2, 48), kernel="eager").total - count_layer((64, 256, 4, 4, 2, 48)).total
    assert more == 6 * 2 * 4 * 48**2 - 4 * 2 * 4 * 48


def test_checkpointing_keeps_inputs_products_or_every_other_layer() -> None:
    kept = Activations(100, (LayerBytes(50, 4, 20), LayerBytes(60, 4, 20))).extend(5)
    assert kept.count(Checkpointing()) == 100 + 50 + 4 * 60
    assert kept.count(Checkpointing(1)) == 100 + 5 * 4 + 60
    assert kept.count(Checkpointing(2)) == 100 + 3 * 4 + 2 * 60 + 60
    assert kept.count(Checkpointing(1, keeps_products=True)) == 100 + 5 * (4 + 20) + 60 - 20
    assert kept.count(Checkpointing(1, offloads=True)) == 100 + 60 + 4
    # Of several micro-batches one is in its backward pass.
    assert kept.count(Checkpointing(1), in_flight=3) == 3 * (100 + 5 * 4) + 60
