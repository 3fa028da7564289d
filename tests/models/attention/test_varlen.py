"""The ``varlen`` kernel against ``sdpa``: packed documents, padded batches, generation and synchronisation."""

from __future__ import annotations

import copy
import inspect
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from tests.parity.test_loss_head import SHAPE
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
    modeling_flash_attention_utils,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from recipes_lib.models.attention import varlen
from recipes_lib.models.attention.varlen import attend_documents, register_varlen, takes_empty_mask
from recipes_lib.models.heads.loss_head import add_loss_head


def make_pair(sliding: bool = False) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same random model on ``sdpa`` and on ``varlen``."""
    register_varlen()
    config = MistralConfig(**SHAPE, sliding_window=3) if sliding else LlamaConfig(**SHAPE)
    models = []
    for kernel in ("sdpa", "varlen"):
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=kernel).eval())
        for layer in models[-1].model.layers:
            layer.self_attn.scaling = 0.3  # Gemma's is not that of the head dimension either.
    return models[0], models[1]


def make_packed_batch() -> dict[str, torch.Tensor | int]:
    bounds = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 7, "max_length_k": 7}
    positions = torch.cat([torch.arange(5), torch.arange(1), torch.arange(7)])[None]
    return {"input_ids": torch.arange(3, 16)[None], "position_ids": positions, **lengths}


@pytest.mark.parametrize("sliding", [False, True])
def test_varlen_gradients_equal_sdpa_on_packed_row(sliding: bool) -> None:
    gradients = []
    for model in make_pair(sliding):
        model(**make_packed_batch(), use_cache=False).logits.logsumexp(-1).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def test_varlen_builds_no_mask_and_calls_sdpa_per_document(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = make_pair()
    seen = []

    def recording(query: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        seen.append((query.shape[2], kwargs.get("is_causal"), [arg for arg in args[2:] if arg is not None]))
        return plain(query, *args, **kwargs)

    plain = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", recording)
    model(**make_packed_batch(), use_cache=False)
    assert seen == [(length, True, []) for _ in range(2) for length in (5, 1, 7)]


def test_varlen_requires_cu_seq_lens_on_packed_row() -> None:
    _, model = make_pair()
    batch = {name: value for name, value in make_packed_batch().items() if name in ("input_ids", "position_ids")}
    with pytest.raises(ValueError, match="needs cu_seq_lens_q"):
        model(**batch, use_cache=False)


def test_varlen_isolates_documents_in_several_rows() -> None:
    batch = {name: value for name, value in make_packed_batch().items() if name in ("input_ids", "position_ids")}
    two_rows = {name: value.repeat(2, 1) for name, value in batch.items()}
    expected, ours = (model(**two_rows, use_cache=False).logits for model in make_pair())
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    "changed",
    [
        {"batch_size": 2},
        {"q_length": 1},
        {"attention_mask": torch.ones(1, 3, dtype=torch.bool)},
        {"use_vmap": True},
        {"allow_is_causal_skip": True},
    ],
)
def test_only_packed_row_without_mask_has_empty_mask(changed: dict[str, Any]) -> None:
    register_varlen()
    packed = {"batch_size": 1, "q_length": 3, "kv_length": 3, "allow_is_causal_skip": False, "device": "cpu"}
    assert ALL_MASK_ATTENTION_FUNCTIONS["varlen"](**packed).numel() == 0
    mask = ALL_MASK_ATTENTION_FUNCTIONS["varlen"](**packed | changed)
    assert mask is None or mask.numel()


@pytest.mark.parametrize("sliding", [False, True])
def test_varlen_equals_sdpa_on_padded_batch_and_generation(sliding: bool) -> None:
    sdpa, varlen = make_pair(sliding)
    input_ids = torch.arange(3, 15).view(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    expected, ours = (model(input_ids=input_ids, attention_mask=mask).logits for model in (sdpa, varlen))
    torch.testing.assert_close(ours[mask.bool()], expected[mask.bool()])
    limits = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(varlen.generate(input_ids, **limits), sdpa.generate(input_ids, **limits))
    plain = [model(input_ids=input_ids).logits for model in (sdpa, varlen)]
    assert torch.equal(*plain)


@pytest.mark.parametrize("setting", ["dropout", "softcap", "s_aux", "position_bias"])
def test_varlen_refuses_dropout_and_other_scores(setting: str) -> None:
    register_varlen()
    states = torch.randn(3, 1, 2, 5, 4).unbind()
    bounds = {"cu_seq_lens_q": torch.tensor([0, 5]), setting: 0.1}
    with pytest.raises(ValueError, match="has no dropout"):
        ALL_ATTENTION_FUNCTIONS["varlen"](torch.nn.Module(), *states, None, **bounds)


class CudaTensor(torch.Tensor):
    """Tensor on the CPU that claims to be on a GPU."""

    is_cuda = True


def attend_on_cuda(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, **_) -> torch.Tensor:
    """``varlen_attn`` with the requirements of the CUDA kernel, computed in float64 from its documentation."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert (max_q, max_k) == (cu_seq_q.diff().max(), cu_seq_k.diff().max())
    outputs = []
    bounds = (cu_seq_q, cu_seq_k, cu_seq_k)
    documents = [x.double().tensor_split(b[1:-1].long()) for x, b in zip((query, key, value), bounds, strict=True)]
    for q, k, v in zip(*documents, strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = scale * torch.einsum("qhd,khd->hqk", q, k)
        # Aligned at the last query and key: (left, right) neighbours, -1 for all.
        distance = torch.arange(len(k))[None] - torch.arange(len(q))[:, None] - (len(k) - len(q))
        left, right = window_size
        hidden = (distance > right) | ((distance < -left) & (left >= 0))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(outputs).to(query.dtype)


@pytest.mark.parametrize("dims", [(8, 8), (24, 16), (10, 10)])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("num_more_keys", [0, 2])
def test_cuda_kernel_arguments_give_result_of_cpu(monkeypatch, dims, window, num_kv_heads, num_more_keys) -> None:
    # ``create_autospec`` raises for arguments that the function of this torch version does not take.
    monkeypatch.setattr(varlen, "varlen_attn", create_autospec(varlen_attn, side_effect=attend_on_cuda))
    batch = make_packed_batch()
    batch["cu_seq_lens_k"] = batch["cu_seq_lens_k"] + num_more_keys * torch.arange(4, dtype=torch.int32)
    batch["max_length_k"] += num_more_keys
    num_keys = 13 + 3 * num_more_keys
    shapes = [(13, 4, dims[0]), (num_keys, num_kv_heads, dims[0]), (num_keys, num_kv_heads, dims[1])]
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(shape, generator=generator) for shape in shapes]
    expected = attend_documents(*states, batch | {"sliding_window": window})
    found = attend_documents(*(state.as_subclass(CudaTensor) for state in states), batch | {"sliding_window": window})
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)
    options = varlen.varlen_attn.call_args.kwargs
    # Without the flag, torch refuses grouped queries.
    assert ("enable_gqa" in options) == ("enable_gqa" in inspect.signature(varlen_attn).parameters)
    assert options.get("enable_gqa", num_kv_heads == 2) == (num_kv_heads == 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sliding", [False, True])
def test_varlen_equals_sdpa_on_cuda(sliding: bool) -> None:
    batch = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in make_packed_batch().items()
    }
    with torch.autocast("cuda", dtype=torch.bfloat16):
        expected, ours = (model.cuda()(**batch, use_cache=False).logits.float() for model in make_pair(sliding))
    torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


class SyncCounter(TorchDispatchMode):
    """Counts operations that synchronise the host with a GPU."""

    num = 0

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += operator in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_flash_attention_forward_has_no_synchronisation_and_no_mask(implementation, monkeypatch) -> None:
    """The kernel is a stand-in for a CPU; its arguments are those of transformers."""
    model, _ = make_pair()
    batch = make_packed_batch()
    batch["labels"] = batch["input_ids"]
    add_loss_head(model)
    expected = model(**batch, loss_head=True).nll_sum
    calls = []

    def attend_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False
    ) -> torch.Tensor:
        calls.append((max_seqlen_q, max_seqlen_k, causal))
        lengths = {"cu_seq_lens_q": cu_seqlens_q, "cu_seq_lens_k": cu_seqlens_k}
        with torch.utils._python_dispatch._disable_current_modes():
            return attend_documents(q, k, v, {**lengths, "scaling": softmax_scale})

    monkeypatch.setattr(
        modeling_flash_attention_utils,
        "_lazy_imports",
        lambda *_, **__: (attend_varlen, attend_varlen, None, None, None),
    )
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    model.config._attn_implementation_internal = implementation
    with SyncCounter() as counter:
        found = model(**batch, loss_head=True, target_positions=torch.arange(12)).nll_sum
    assert calls == [(7, 7, True)] * SHAPE["num_hidden_layers"]
    assert counter.num == 0
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("kernel", "kind", "saves_syncs"),
    [
        *((kernel, kind, True) for kernel in ("sdpa", "eager", "varlen") for kind in (LlamaConfig, Qwen3Config)),
        *((kernel, MistralConfig, False) for kernel in ("sdpa", "eager", "varlen")),
        *((kernel, DogeConfig, False) for kernel in ("sdpa", "eager")),
    ],
)
def test_one_document_a_row_keeps_logps_and_avoids_synchronisation(kernel, kind, saves_syncs) -> None:
    """Layers with a sliding window or a mask of their own still build their masks."""
    register_varlen()
    torch.manual_seed(0)
    window = {"sliding_window": 3} if kind is MistralConfig else {}
    model = AutoModelForCausalLM.from_config(kind(**SHAPE, **window, attn_implementation=kernel)).train()
    add_loss_head(model)
    ids = torch.arange(24).view(2, 12) % SHAPE["vocab_size"]
    batch = {"input_ids": ids, "position_ids": torch.arange(12).expand(2, -1)}
    picked = {"predictors": torch.tensor([0, 3, 13, 20]), "targets": torch.tensor([5, 6, 7, 8]), "token_logps": True}
    with SyncCounter() as before:
        expected = model(**batch, **picked).logps
    with SyncCounter() as now:
        found = model(**batch, **picked, one_document_a_row=True).logps
    torch.testing.assert_close(found, expected)
    if kernel == "sdpa":
        assert (now.num == 0 < before.num) is saves_syncs


@pytest.mark.parametrize("name", ["attention_mask", None])
def test_only_empty_mask_is_dropped_as_positional_and_keyword_argument(name: str | None) -> None:
    states = torch.randn(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0)).unbind()
    module, empty = torch.nn.Module().eval(), torch.empty(1, 1, 0, 0, dtype=torch.bool)
    assert takes_empty_mask("sdpa", is_flat=False)
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    found, _ = attend(module, *states, **{name: empty}) if name else attend(module, *states, empty)
    expected = functional.scaled_dot_product_attention(*states, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    mask = torch.ones(5, 5, dtype=torch.bool).triu()
    found, _ = attend(module, *states, **{name: mask}) if name else attend(module, *states, mask)
    torch.testing.assert_close(found, functional.scaled_dot_product_attention(*states, mask).transpose(1, 2))


def test_empty_mask_is_for_kernels_that_know_bounds_and_wraps_them_once() -> None:
    flat = {kernel: takes_empty_mask(kernel) for kernel in ("varlen", "sdpa", "eager", "flash_attention_2")}
    assert flat == {"varlen": True, "sdpa": False, "eager": False, "flash_attention_2": True}
    assert not takes_empty_mask("varlen", is_flat=False)
    wrapped = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    takes_empty_mask("flash_attention_2")
    assert ALL_ATTENTION_FUNCTIONS["flash_attention_2"] is wrapped
