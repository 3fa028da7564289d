"""Chunked output projection against the dense one: gradients, dtypes and memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.losses.test_token_logps import NUM_TOKENS, VOCABULARY, WIDTH, dense_logps, make_inputs
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from recipes_lib.losses.next_token import compute_cross_entropy, compute_token_logps
from recipes_lib.losses.projection import (
    CHUNK_BYTES,
    MIN_CHUNK_TOKENS,
    Projection,
    ProjectionGradients,
    find_chunk_bytes,
)


def sum_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return compute_cross_entropy(hidden, weight, targets, **options).nll_sum


def sum_logps(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return compute_token_logps(hidden, weight, targets, **options).logps.sum()


@pytest.mark.parametrize("compute", [sum_cross_entropy, sum_logps])
def test_weight_gradient_is_accumulated_in_float32(compute: Callable[..., Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, WIDTH, generator=generator).bfloat16()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, VOCABULARY, (512,), generator=generator)
    chunked, whole = (
        torch.autograd.grad(compute(hidden, weight, targets, chunk_size=size), weight)[0] for size in (1, 512)
    )
    torch.testing.assert_close(chunked, whole, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("compute", [sum_cross_entropy, sum_logps])
def test_tied_weight_gets_gradients_of_both_uses(compute: Callable[..., Tensor]) -> None:
    _, weight, _, targets = make_inputs()
    weight.requires_grad_()
    hidden = functional.embedding(torch.arange(NUM_TOKENS), weight)
    expected = dense_logps(hidden, weight, targets).sum()
    ours = compute(hidden, weight, targets, chunk_size=5)
    (gradient,) = torch.autograd.grad(ours if compute is sum_logps else -ours, weight, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, weight)[0])


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("with_frozen_weight", [False, True])
@pytest.mark.parametrize("compute", [sum_cross_entropy, sum_logps, partial(sum_logps, with_statistics=True)])
def test_projection_allocates_at_most_one_chunk_of_logits(compute, with_frozen_weight) -> None:
    chunk_size, vocabulary = 8, 1000
    hidden = torch.randn(64, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=not with_frozen_weight)
    targets = torch.randint(0, vocabulary, (64,))
    with LargestTensor() as largest:
        compute(hidden, weight, targets, softcap=3.0, chunk_size=chunk_size).backward()
    assert largest.numel == chunk_size * vocabulary
    with LargestTensor() as dense:
        dense_logps(hidden, weight, targets)
    assert dense.numel == 64 * vocabulary, "control: dense logits are measured"


class RoundedScalars(TorchDispatchMode):
    """Products as on CUDA, whose kernels read a scalar tensor in the dtype of the other operand (a CPU's do not)."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket is torch.ops.aten.mul_ and args[1].ndim == 0:
            args = (args[0], args[1].to(args[0].dtype))
        return function(*args, **(kwargs or {}))


def test_upstream_gradient_is_not_rounded_to_half_precision() -> None:
    hidden, weight, _, targets = make_inputs(torch.bfloat16)
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    plain = torch.autograd.grad(sum_cross_entropy(*inputs, targets), inputs)
    with RoundedScalars():
        scaled = torch.autograd.grad(sum_cross_entropy(*inputs, targets) / 1021, inputs)
    for part, whole in zip(scaled, plain, strict=True):
        # bfloat16 has 1/1021 as 1/1024: all gradients would be smaller by 0.3 %.
        torch.testing.assert_close(part.float().norm() * 1021, whole.float().norm(), rtol=1e-3, atol=0)


def test_chunks_share_one_buffer() -> None:
    hidden, weight, *_ = make_inputs(torch.bfloat16)
    projection = Projection(hidden, weight, chunk_size=8)
    chunks = list(projection.iterate(hidden, weight, None))
    assert [len(chunk.logits) for chunk in chunks] == [8, 8, 7]
    assert len({chunk.logits.data_ptr() for chunk in chunks}) == len({chunk.narrow.data_ptr() for chunk in chunks}) == 1
    assert {(chunk.logits.dtype, chunk.narrow.dtype) for chunk in chunks} == {(torch.float32, torch.bfloat16)}


def test_logits_of_half_precision_on_cuda_are_not_rounded_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(left: Tensor, right: Tensor, out_dtype: torch.dtype | None = None, *, out: Tensor) -> Tensor:
        assert out_dtype in (None, out.dtype), "as CUDA requires"
        return out.copy_(left.float() @ right.float())

    hidden, weight, *_ = make_inputs(torch.bfloat16)
    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    chunks = Projection(hidden, weight, chunk_size=8).iterate(hidden, weight, None)
    logits = torch.cat([chunk.logits.clone() for chunk in chunks])
    torch.testing.assert_close(logits, hidden.float() @ weight.float().t())


def test_gradients_have_dtype_of_parameters() -> None:
    hidden, weight, bias, _ = make_inputs(torch.float32)
    inputs = (hidden, weight.bfloat16(), bias.half())
    projection = Projection(*inputs[:2])
    gradients = ProjectionGradients(projection, *inputs, needed=[True] * 3).finish()
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("vocabulary", "expected"), [(2**17, CHUNK_BYTES // 2**19), (2**20, MIN_CHUNK_TOKENS)])
def test_default_chunk_size_is_bounded(vocabulary: int, expected: int) -> None:
    weight = torch.empty(vocabulary, 1)
    assert Projection(weight, weight).chunk_size == expected


@pytest.mark.parametrize(("gigabytes", "megabytes"), [(4, 128), (24, 384), (80, 1024), (192, 1024)])
def test_chunk_size_grows_with_gpu_memory(monkeypatch: pytest.MonkeyPatch, gigabytes: int, megabytes: int) -> None:
    memory = SimpleNamespace(total_memory=gigabytes * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    assert find_chunk_bytes(torch.device("cuda")) == megabytes * 2**20
    assert find_chunk_bytes(torch.device("cpu")) == CHUNK_BYTES


def test_projection_dtype_is_autocast_or_narrower_operand() -> None:
    narrow, wide = torch.empty(1, 1, dtype=torch.bfloat16), torch.empty(1, 1)

    def dtype_for(hidden: Tensor, weight: Tensor) -> torch.dtype:
        return Projection(hidden, weight).dtype

    assert dtype_for(wide, wide) == torch.float32
    assert dtype_for(narrow, wide) == dtype_for(wide, narrow) == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.float16):
        assert dtype_for(wide, wide) == dtype_for(narrow, wide) == torch.float16
