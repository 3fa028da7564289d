"""Context-parallel attention, with threads as ranks, against one rank that has the whole row."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.distributed.threads import run_together
from tests.training.layouts.test_context_rows import ROWS, build_batch
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import sdpa_mask

from recipes_lib.errors import ConfigError
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.models.parallel.context_parallel import (
    ContextParallelGroup,
    _attend,
    register_context_parallel,
    verify_context_parallel,
)
from recipes_lib.training.layouts.context_rows import shard_batch

SIZES = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def build_model(attention: str, model_type: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | HEADS | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    add_loss_head(model)
    return model.train()


def compute(model: Any, batch: dict[str, Any]) -> tuple[float, int, list[torch.Tensor]]:
    sums = model(**{name: value for name, value in batch.items() if name != "num_tokens"}, loss_head=True)
    sums.nll_sum.backward()
    return float(sums.nll_sum.detach()), int(sums.num_targets), [tensor.grad for tensor in model.parameters()]


def build_group(rank: int, size: int, *, by_heads: bool) -> ContextParallelGroup:
    group: Any = None
    return ContextParallelGroup(group, rank, size, group, by_heads)


@pytest.mark.parametrize(
    ("size", "by_heads", "changes"),
    [
        (2, False, {}),
        *((2, by_heads, {"model_type": "mistral", "sliding_window": 3}) for by_heads in (False, True)),
        (3, False, {}),
        # Key-value heads divided over two ranks, replicated on two and on four, and multi-head attention on three.
        (2, True, {}),
        (2, True, {"num_key_value_heads": 1}),
        (4, True, {}),
        (3, True, {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 24}),
    ],
)
def test_context_parallel_loss_and_gradients_equal_one_rank(size, by_heads, changes, monkeypatch) -> None:
    """Packed documents are isolated, and sharded documents attend to keys of other ranks."""
    batch = build_batch(*ROWS)
    models = []
    for rank in range(size):
        share = build_group(rank, size, by_heads=by_heads)
        AttentionInterface.register(f"context{rank}", partial(_attend, share))
        AttentionMaskInterface.register(f"context{rank}", sdpa_mask)
        own = shard_batch(batch, rank, size, by_heads=by_heads)
        models.append((build_model(f"context{rank}", **changes), own))
    loss, num_targets, gradients = compute(build_model("sdpa", **changes), batch)
    parts = run_together([partial(compute, *each) for each in models], monkeypatch)
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-6)
    assert sum(part[1] for part in parts) == num_targets
    for whole, *shares in zip(gradients, *(part[2] for part in parts), strict=True):
        torch.testing.assert_close(torch.stack(shares).sum(dim=0), whole, rtol=1e-4, atol=1e-5)


def test_unsharded_batch_attends_as_sdpa() -> None:
    register_context_parallel(build_group(0, 2, by_heads=False))
    batch = {name: build_batch(*ROWS)[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        own, plain = (build_model(name)(**batch, use_cache=False).logits for name in ("context", "sdpa"))
    torch.testing.assert_close(own, plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("model_type", "changes", "why"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "conv layers"),
        # A mask of its own, capped scores, sinks, and code of its own.
        *((model_type, {}, "attention other than by sdpa") for model_type in ("doge", "gemma2", "gpt_oss", "bloom")),
        ("llama", {"attention_dropout": 0.1}, "attention dropout"),
        ("gpt2", {}, "attention dropout"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic rotary"),
        ("mixtral", {"output_router_logits": True, "sliding_window": None}, "a load-balancing loss of experts"),
    ],
)
def test_models_that_need_the_whole_row_are_refused(model_type: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        verify_context_parallel(AutoConfig.for_model(model_type, **SIZES, **HEADS, **changes), 2, by_heads=False)


@pytest.mark.parametrize(
    ("heads", "why"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 8}, "8 heads for 3 processes, 8 key-value heads"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 24},
            "with 4 key-value heads for 3 processes",
        ),
    ],
)
def test_indivisible_head_counts_are_refused(heads: dict[str, int], why: str) -> None:
    config = AutoConfig.for_model("llama", **SIZES | heads)
    with pytest.raises(ConfigError, match=why) as refused:
        verify_context_parallel(config, 3, by_heads=True)
    assert "fsdp2_cp" in str(refused.value)
    verify_context_parallel(config, 3, by_heads=False)
    verify_context_parallel(config, 4, by_heads=True)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((model_type, HEADS) for model_type in ("llama", "qwen3", "qwen2", "smollm3")),
        ("gpt2", {"num_attention_heads": 4, "attn_pdrop": 0.0}),
        ("gemma3_text", {**HEADS, "sliding_window": 8}),
    ],
)
@pytest.mark.parametrize("by_heads", [False, True])
def test_supported_models_are_accepted(model_type: str, changes: dict[str, Any], by_heads: bool) -> None:
    verify_context_parallel(AutoConfig.for_model(model_type, **SIZES, **changes), 4, by_heads=by_heads)
