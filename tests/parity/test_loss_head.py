"""The loss head against each architecture's own loss in transformers: values and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.tiny import sizes
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DogeConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    GraniteMoeConfig,
    HyperCLOVAXConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    RecurrentGemmaConfig,
    xLSTMConfig,
)

from recipes_lib.models.heads.loss_head import add_loss_head, verify_loss_head

SHAPE: dict[str, Any] = {
    **sizes(32, 2, 4, vocab_size=61, intermediate_size=48, num_key_value_heads=2, head_dim=8),
    **{"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
WITHOUT_HEAD_DIM = {key: value for key, value in SHAPE.items() if key != "head_dim"}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.3,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama_tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE),
    "gemma2": Gemma2Config(**SHAPE, final_logit_softcapping=0.5, sliding_window=4, attn_implementation="eager"),
    "gemma3": Gemma3TextConfig(**SHAPE, final_logit_softcapping=0.7, sliding_window=4),
    "gpt2": GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "mixtral": MixtralConfig(**SHAPE, **EXPERTS),
    "phimoe": PhimoeConfig(**WITHOUT_HEAD_DIM, **EXPERTS),
    "granitemoe": GraniteMoeConfig(**WITHOUT_HEAD_DIM, **EXPERTS, logits_scaling=4.0),
    "cohere": CohereConfig(**WITHOUT_HEAD_DIM, logit_scale=0.25),
    "granite": GraniteConfig(**SHAPE, logits_scaling=4.0, embedding_multiplier=2.0),
    "hyperclovax": HyperCLOVAXConfig(**SHAPE, logits_scaling=0.25),
    "falcon_h1": FalconH1Config(
        **SHAPE, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, lm_head_multiplier=0.25
    ),
    "phi_with_bias": PhiConfig(**SHAPE),
    "gpt_neox": GPTNeoXConfig(**WITHOUT_HEAD_DIM, attention_dropout=0.0, hidden_dropout=0.0),
    # Dense layers, though the configuration requests a loss of experts.
    "doge": DogeConfig(**WITHOUT_HEAD_DIM, output_router_logits=True, router_aux_loss_coef=0.3),
    "recurrent_gemma": RecurrentGemmaConfig(**SHAPE, lru_width=32, attention_window_size=4, logits_soft_cap=0.5),
    "xlstm": xLSTMConfig(vocab_size=61, hidden_size=32, num_heads=4, num_hidden_layers=2, output_logit_soft_cap=0.5),
    # Its backbone is not at ``base_model_prefix``.
    "llama4": Llama4TextConfig(**SHAPE, intermediate_size_mlp=64, num_local_experts=2),
}


def make_model(name: str) -> PreTrainedModel:
    """A random model whose logits are far from uniform, so that a missing factor is detected."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def make_batch(length: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(3, 61, (2, length), generator=generator)
    labels = input_ids.clone()
    labels[:, :3] = labels[1, -2:] = -100
    return {"input_ids": input_ids, "labels": labels}


def gradients_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


# Of 17 tokens, the backbone reads the first 16, except in models with an auxiliary loss over all tokens.
@pytest.mark.parametrize(
    ("name", "length"), [*((name, 12) for name in CONFIGS), *((name, 17) for name in ("llama", "gemma2", "mixtral"))]
)
def test_loss_and_gradients_equal_transformers(name: str, length: int) -> None:
    model, batch = make_model(name), make_batch(length)
    torch.manual_seed(1)  # Phi's router samples the experts.
    own = model(**batch, use_cache=False)
    expected = gradients_of(own.loss, model)
    verify_against = own.loss.detach()

    add_loss_head(model)
    torch.manual_seed(1)
    sums = model(**batch, loss_head=True)
    loss = sums.nll_sum / sums.num_targets
    if sums.aux_loss is not None:
        torch.testing.assert_close(sums.aux_loss, own.aux_loss, rtol=1e-5, atol=1e-5)
        loss = loss + model.config.router_aux_loss_coef * sums.aux_loss
    torch.testing.assert_close(loss.detach(), verify_against, rtol=1e-5, atol=1e-5)
    ours = gradients_of(loss, model)
    assert ours.keys() == expected.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(
            ours[parameter], gradient, rtol=1e-5, atol=1e-5, msg=lambda text, p=parameter: f"{p}: {text}"
        )
    predicted = own.logits[:, :-1].argmax(-1)
    assert sums.num_correct.item() == (predicted == batch["labels"][:, 1:]).sum()


@pytest.mark.parametrize("length", [12, 17])
def test_target_positions_give_equal_loss(length: int) -> None:
    model, batch = make_model("llama"), make_batch(length)
    add_loss_head(model)
    places = (batch["labels"][:, 1:].flatten() >= 0).nonzero().squeeze(1)
    expected, found = model(**batch, loss_head=True), model(**batch, target_positions=places, loss_head=True)
    torch.testing.assert_close(found.nll_sum, expected.nll_sum, rtol=1e-5, atol=1e-5)
    assert (found.num_targets, found.num_correct) == (expected.num_targets, expected.num_correct)


@pytest.mark.parametrize("name", CONFIGS)
def test_verify_loss_head_accepts_every_supported_architecture(name: str) -> None:
    model = make_model(name).train()
    add_loss_head(model)
    verify_loss_head(model)
    assert model.training


def test_aux_loss_only_with_output_router_logits() -> None:
    config = copy.deepcopy(CONFIGS["mixtral"])
    config.output_router_logits = False
    model = AutoModelForCausalLM.from_config(config)
    add_loss_head(model)
    assert model(**make_batch(), loss_head=True).aux_loss is None


def test_loss_sums_equal_trl_fused_head() -> None:
    from trl.trainer.utils import add_fused_lm_head

    model, batch = make_model("gemma3"), make_batch()
    add_fused_lm_head(model, outputs=("log_probs", "is_top1"))
    theirs = model(**batch, fused_lm_head=True)
    add_loss_head(model)
    ours = model(**batch, loss_head=True)
    torch.testing.assert_close(ours.nll_sum, -theirs.log_probs.sum(), rtol=1e-5, atol=1e-5)
    assert ours.num_correct.item() == theirs.is_top1.sum().item()
    torch.testing.assert_close(model(**batch, fused_lm_head=True).loss, theirs.loss, rtol=0, atol=0)
