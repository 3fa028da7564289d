"""Chunks of logits are the slices of all logits, and gradients through them are torch's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from recipes_lib.losses.projection import (
    CHUNK_BYTES,
    MIN_CHUNK_TOKENS,
    ProjectionGradients,
    build_projection,
    find_chunk_bytes,
)

NUM_TOKENS, WIDTH, VOCABULARY = 11, 5, 31
OPTIONS = [{}, {"logit_scale": 0.3}, {"softcap": 2.5}, {"logit_scale": 1.7, "softcap": 1.5}]


def make_inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def dense_logits(hidden: Tensor, weight: Tensor, bias: Tensor, options: dict[str, float]) -> Tensor:
    logits = (hidden @ weight.t() + bias) * options.get("logit_scale", 1.0)
    cap = options.get("softcap")
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("chunk_size", [1, 4, 11, 100])
@pytest.mark.parametrize("options", OPTIONS)
def test_chunks_are_slices_of_the_logits_and_their_gradients_those_of_torch(
    options: dict[str, float], chunk_size: int
) -> None:
    hidden, weight, bias = inputs = make_inputs()
    outer = torch.randn(NUM_TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    projection = build_projection(
        hidden,
        weight,
        logit_scale=options.get("logit_scale", 1.0),
        softcap=options.get("softcap"),
        chunk_size=chunk_size,
    )
    gradients = ProjectionGradients(projection, *inputs, needed=[True] * 3)
    expected_logits = dense_logits(*inputs, options)
    seen = []
    for chunk in projection.iterate(hidden, weight, bias):
        torch.testing.assert_close(chunk.logits, expected_logits[chunk.rows])
        seen += range(NUM_TOKENS)[chunk.rows]
        chunk.logits.copy_(outer[chunk.rows])
        gradients.add(chunk, weight)
    assert seen == list(range(NUM_TOKENS))

    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    expected = torch.autograd.grad((dense_logits(*leaves, options) * outer).sum(), leaves)
    torch.testing.assert_close(gradients.finish(), expected)


def test_chunks_share_one_buffer() -> None:
    hidden, weight, _ = make_inputs(torch.bfloat16)
    projection = build_projection(hidden, weight, logit_scale=1.0, softcap=None, chunk_size=4)
    chunks = list(projection.iterate(hidden, weight, None))
    assert [len(chunk.logits) for chunk in chunks] == [4, 4, 3]
    assert len({chunk.logits.data_ptr() for chunk in chunks}) == len({chunk.narrow.data_ptr() for chunk in chunks}) == 1
    assert {(chunk.logits.dtype, chunk.narrow.dtype) for chunk in chunks} == {(torch.float32, torch.bfloat16)}


def test_what_needs_no_gradient_gets_none() -> None:
    inputs = make_inputs()
    projection = build_projection(*inputs[:2], logit_scale=1.0, softcap=None, chunk_size=4)
    for needed in ([True, False, False], [False, True, False], [False, False, True]):
        gradients = ProjectionGradients(projection, *inputs, needed=needed).finish()
        assert [gradient is not None for gradient in gradients] == needed


def test_gradients_have_the_dtypes_of_what_they_belong_to() -> None:
    hidden, weight, bias = make_inputs(torch.float32)
    inputs = (hidden, weight.bfloat16(), bias.half())
    projection = build_projection(*inputs[:2], logit_scale=1.0, softcap=None, chunk_size=4)
    gradients = ProjectionGradients(projection, *inputs, needed=[True] * 3).finish()
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("vocabulary", "expected"), [(2**17, CHUNK_BYTES // 2**19), (2**20, MIN_CHUNK_TOKENS)])
def test_the_default_chunk_has_a_bounded_size(vocabulary: int, expected: int) -> None:
    weight = torch.empty(vocabulary, 1)
    assert build_projection(weight, weight, logit_scale=1.0, softcap=None, chunk_size=None).chunk_size == expected


@pytest.mark.parametrize(("gigabytes", "megabytes"), [(4, 128), (24, 384), (80, 1024), (192, 1024)])
def test_a_gpu_has_larger_chunks_as_far_as_its_memory_goes(
    monkeypatch: pytest.MonkeyPatch, gigabytes: int, megabytes: int
) -> None:
    memory = SimpleNamespace(total_memory=gigabytes * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    assert find_chunk_bytes(torch.device("cuda")) == megabytes * 2**20
    assert find_chunk_bytes(torch.device("cpu")) == CHUNK_BYTES


def test_autocast_decides_the_dtype_and_else_the_narrower_operand() -> None:
    narrow, wide = torch.empty(1, 1, dtype=torch.bfloat16), torch.empty(1, 1)

    def dtype_for(hidden: Tensor, weight: Tensor) -> torch.dtype:
        return build_projection(hidden, weight, logit_scale=1.0, softcap=None, chunk_size=None).dtype

    assert dtype_for(wide, wide) == torch.float32
    assert dtype_for(narrow, wide) == dtype_for(wide, narrow) == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.float16):
        assert dtype_for(wide, wide) == dtype_for(narrow, wide) == torch.float16
