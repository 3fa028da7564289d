"""Activation memory on fake tensors, compared with closed forms; with real models in ``tests/rl/test_memory.py``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.planning.runs import build_config
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.planning import activations
from recipes_lib.planning.activations import (
    CAUSAL,
    FLOAT32_ON_CUDA,
    Activations,
    Checkpointing,
    LayerBytes,
    count_activations,
    fuse_layers,
    list_layers,
    on_fakes,
)
from recipes_lib.planning.memory import _count_row, count_kept
from recipes_lib.planning.memory_plan import Layout

ARGUMENTS = {
    **dict.fromkeys(("softmax", "softmin", "log_softmax", "cumsum", "cumprod"), (0,)),
    "layer_norm": ((4,),),
    "group_norm": (2,),
    "pow": (3,),
}
"""Further positional arguments of functions."""


def call(name: str, device: str) -> torch.dtype:
    """Call a function on ``bfloat16`` tensors, and return the dtype of the result."""
    one, ids = (
        torch.ones(4, *shape, dtype=dtype, device=device) for shape, dtype in (((4,), torch.bfloat16), ((), int))
    )
    others = (ids,) if name in ("cross_entropy", "nll_loss") else ()
    if name.endswith("1_loss") or name in ("mse_loss", "kl_div", "cosine_similarity"):
        others = (one,)
    function = getattr(functional, name, None) or getattr(torch, name)
    return function(one, *others, *ARGUMENTS.get(name, ())).dtype


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", [*sorted(FLOAT32_ON_CUDA), "relu", "tanh"])
def test_autocast_dtypes_match_cuda(name, monkeypatch) -> None:
    with FakeTensorMode():
        # `torch.autocast("cuda")` would require a GPU.
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


def test_float32_layer_norms_and_powers_increase_activations_of_gpt2(monkeypatch) -> None:
    """The outputs of two norms per layer, and of the power in ``gelu_new``, are in ``float32``."""

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


def test_long_rows_are_counted_by_as_many_operations_as_short_ones() -> None:
    """Chunks of the logits of a million tokens would take minutes."""

    def count(length: int) -> int:
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=1))
            add_loss_head(model)
        with on_fakes(model, is_half=True):
            return count_activations(model, 1, length, length - 1).num_operations

    assert count(1 << 20) == count(64)


def count_layer(shape: tuple[int, ...], *, kernel: str = CAUSAL, is_fused: bool = False) -> LayerBytes:
    """Return bytes of the second layer of a Llama; the first one also holds rotary tables."""
    hidden, inner, heads, groups, rows, length = shape
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=32, **sizes, num_attention_heads=heads, num_key_value_heads=groups)
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation=kernel)
        add_loss_head(model)
    with on_fakes(model, is_half=True):
        if is_fused:
            fuse_layers(model)
        return count_activations(model, rows, length, length - 1).layers[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_activations_match_closed_forms(shape) -> None:
    """Exactly: all activations, the input, products of `save_matmuls`, and with Liger's kernels."""
    hidden, inner, heads, groups, rows, length = shape
    tokens, keys = rows * length, 4 * hidden * groups // heads
    assert count_layer(shape) == LayerBytes(
        total=tokens * (20 * hidden + keys + 8 * inner + 4 * heads + 8),
        inputs=2 * hidden * tokens,
        products=tokens * (8 * hidden + keys + 4 * inner + 4 * heads),
    )
    fused = count_layer(shape, is_fused=True).total
    assert fused == tokens * (12 * hidden + keys + 6 * inner + 4 * heads + 8)


def test_fused_norm_without_weight_saves_its_input() -> None:
    norm = Gemma4RMSNorm(8, with_scale=False)
    fuse_layers(norm)
    output = norm(torch.zeros(2, 8, requires_grad=True))  # Kept: torch 2.11 frees what an unused output has saved.
    assert [tuple(tensor.shape) for tensor in output.grad_fn.saved_tensors] == [(2, 8), (2,)]


def test_eager_attention_keeps_quadratic_probabilities() -> None:
    """Probabilities in 32 and 16 bits, without the log-sum-exp of each row."""
    more = count_layer((64, 256, 4, 4, 2, 48), kernel="eager").total - count_layer((64, 256, 4, 4, 2, 48)).total
    assert more == 6 * 2 * 4 * 48**2 - 4 * 2 * 4 * 48


LATENT = DeepseekV3Config(
    **{"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 2},
)


@pytest.mark.parametrize("config", [LATENT, GPT2Config(vocab_size=32, n_layer=2, n_embd=64, n_head=4, attn_pdrop=0.1)])
def test_no_probabilities_are_kept_with_latent_attention_or_dropout(config) -> None:
    """The activations of a layer are proportional to the length of a row."""

    def count(length: int) -> int:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=CAUSAL)
            add_loss_head(model)
        with on_fakes(model, is_half=True):
            return count_activations(model, 2, length, length - 1).layers[1].total

    assert count(96) == 3 * count(32)


def test_sparse_attention_which_reads_its_mask_is_counted(tiny_model_dir) -> None:
    sizes = {"qk_rope_head_dim": 8, "index_head_dim": 16, "index_n_heads": 2, "first_k_dense_replace": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16}
    config = DeepseekV32Config(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=2, **heads, **sizes
    )
    run = build_config("sft", model_name_or_path=tiny_model_dir, max_length=64)
    assert count_kept(run, config, Layout("single_gpu")).layers[1].total > 0


FEW_HEADS = {"vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
KIMI = {"linear_num_heads": 2, "linear_head_dim": 16, "layer_types": ["linear_attention"] * 2, "intermediate_size": 96}
GATED = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8}
SCANS = {
    "mamba": {"vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2},
    "mamba2": {**FEW_HEADS, "num_heads": 8, "head_dim": 16, "chunk_size": 16, "n_groups": 1},
}


def count_recurrent(name: str, length: int, **sizes: object) -> int:
    """Return the bytes that the second layer saves for each token, from the difference of two lengths."""
    config = AutoConfig.for_model(name, **sizes, pad_token_id=None)

    def count(length: int) -> int:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
            add_loss_head(model)
        with on_fakes(model, is_half=True):
            return count_activations(model, 1, length, length - 1).layers[1].total

    return (count(2 * length) - count(length)) // length


@pytest.mark.parametrize(
    ("name", "sizes"), [("kimi_linear", KIMI), ("qwen3_next", {**GATED, "layer_types": ["linear_attention"] * 2})]
)
def test_linear_attention_saves_no_products_of_pairs_of_tokens(name, sizes) -> None:
    """Bytes per token are equal within a chunk of 64 tokens, to which references pad, and over several chunks."""
    assert count_recurrent(name, 16, **FEW_HEADS, **sizes) == count_recurrent(name, 192, **FEW_HEADS, **sizes)


@pytest.mark.parametrize(("name", "num_copies"), [("mamba", 1), ("mamba2", 2)])
def test_scans_save_state_inputs_and_no_states(name, num_copies) -> None:
    """A wider state adds two 16-bit features per token, in Mamba 2 before and after the convolution."""
    wider, narrower = (count_recurrent(name, 64, state_size=size, **SCANS[name]) for size in (24, 16))
    assert wider - narrower == num_copies * 2 * 2 * (24 - 16)


def test_recurrence_without_its_package_on_gpu_machine_is_the_reference(monkeypatch) -> None:
    from transformers.models.mamba import modeling_mamba

    function, kernel = modeling_mamba.mamba_selective_scan, count_recurrent("mamba", 8, **SCANS["mamba"])
    assert modeling_mamba.mamba_selective_scan is function
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert count_recurrent("mamba", 8, **SCANS["mamba"]) > 10 * kernel
    monkeypatch.setattr(activations, "find_spec", lambda package: package in ("mamba_ssm", "causal_conv1d"))
    assert count_recurrent("mamba", 8, **SCANS["mamba"]) == kernel


@pytest.mark.parametrize(
    ("name", "sizes", "num_features"),
    [
        # For each of 128 features the last 4 inputs of the convolution, and 16 states.
        ("mamba", SCANS["mamba"], 2 * 128 * (4 + 16)),
        # The last 4 queries, keys and values, and a matrix for each of 4 heads; keys and values of 96 tokens.
        (
            "qwen3_next",
            {**FEW_HEADS, **GATED, "layer_types": ["linear_attention", "full_attention"], "head_dim": 32},
            4 * (2 * 2 * 16 + 4 * 8) + 4 * 16 * 8 + 96 * 2 * 2 * 32,
        ),
    ],
)
def test_cache_has_states_of_recurrent_layers(name, sizes, num_features) -> None:
    config = build_config("grpo", reward_funcs=["a.b:c"], bf16=False)
    model_config = AutoConfig.for_model(name, **sizes, pad_token_id=None)
    assert _count_row(config, model_config, Layout("single_gpu"), 96) == 4 * num_features


def test_layer_within_a_layer_is_not_counted_twice() -> None:
    sizes = {"n_mamba_heads": 8, "mamba_headdim": 16, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1}
    config = AutoConfig.for_model("zamba2", **FEW_HEADS, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert [type(layer).__name__ for layer in list_layers(model)] == ["Zamba2MambaDecoderLayer", "Zamba2HybridLayer"]


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_experts_match_those_of_real_tensors(dtype, is_frozen) -> None:
    """Weights in ``float32`` are the default of training, and their product is undefined for fake tensors.

    Products with frozen weights, as under an adapter, do not save their inputs.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=32, **sizes, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)

    def build() -> MixtralForCausalLM:
        model = MixtralForCausalLM._from_config(config, dtype=dtype, attn_implementation=CAUSAL)
        for layer in model.model.layers:
            layer.mlp.experts.requires_grad_(not is_frozen)
        add_loss_head(model)
        return model

    expected = count_activations(build(), 2, 16, 15).layers[1]
    with torch.device("meta"):
        model = build()
    with on_fakes(model, is_half=False):
        assert count_activations(model, 2, 16, 15).layers[1].total == pytest.approx(expected.total, rel=1e-3)


def test_checkpointing_modes_count_kept_and_recomputed_bytes() -> None:
    kept = Activations(100, (LayerBytes(50, 4, 20), LayerBytes(60, 4, 20))).extend("aaaaa")
    assert kept.count(Checkpointing()) == 100 + 50 + 4 * 60
    assert kept.count(Checkpointing(1)) == 100 + 5 * 4 + 60
    assert kept.count(Checkpointing(2)) == 100 + 3 * 4 + 2 * 60 + 60
    # The last layer, which is not recomputed, is freed before the third is recomputed.
    assert replace(kept, layers=kept.layers[:4]).count(Checkpointing(2)) == 100 + 2 * 4 + 2 * 60
    assert kept.count(Checkpointing(1, keeps_products=True)) == 100 + 5 * (4 + 20) + 60 - 20
    assert kept.count(Checkpointing(1, offloads=True)) == 100 + 60 + 4
    # One of the micro-batches is in its backward pass.
    assert kept.count(Checkpointing(1), in_flight=3) == 3 * (100 + 5 * 4) + 60
