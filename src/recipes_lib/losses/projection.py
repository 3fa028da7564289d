"""Chunked projection of hidden states to logits and back, shared by all vocabulary losses; vocabulary-parallel too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 128 * 2**20
"""Default size of the ``float32`` logits that exist at any one time, on a CPU."""
CUDA_CHUNK_BYTES = 2**30
"""Upper limit on a GPU, where larger chunks mean fewer kernels and fewer passes over the gradient of the weight."""
_MEMORY_FRACTION = 64
"""Chunks take one part in this many of a GPU's memory, up to ``CUDA_CHUNK_BYTES``."""
TEACHER_PART = 4
"""Divisor of the chunk size in losses that read a teacher's logits: at their peak, seven to eleven tensors of the size
of a chunk exist, in other losses one or two."""
MIN_CHUNK_TOKENS = 128
"""Lower limit: matrix products of smaller chunks would be bound by reading the weight."""


class Chunk(NamedTuple):
    """Logits of ``n`` consecutive hidden states; the next chunk reuses the buffers.

    Attributes:
        rows: Slice of the hidden states.
        inputs: Hidden states of the chunk in the dtype of matrix products, ``(n, D)``.
        logits: Logits in ``float32`` at least, ``(n, V)``; the consumer may overwrite them.
        narrow: Buffer for the logits in the dtype of matrix products, ``(n, V)``; the same memory as ``logits`` if both
            have one dtype.
        slope: Derivative of the soft cap at each logit, ``(n, V)``; ``None`` without a soft cap.
    """

    rows: slice
    inputs: Tensor
    logits: Tensor
    narrow: Tensor
    slope: Tensor | None


class Projection:
    """Chunked projection ``softcap * tanh(logit_scale * (hidden @ matrix.T + bias) / softcap)``.

    Attributes:
        dtype: Dtype of matrix products: autocast's, otherwise the narrower of the operands'.
        wide: Dtype of everything else: ``float32`` at least.
        logit_scale: Factor on the logits, applied before the soft cap.
        softcap: Bound of the absolute value of the logits; ``None`` without a soft cap.
        chunk_size: Tokens whose logits exist at any one time.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, *, part: int = 1, **transform: Unpack[LogitTransform]) -> None:
        """Choose dtypes and chunk size.

        Args:
            hidden: Hidden states, ``(..., D)``.
            weight: Output embedding, ``(V, D)``.
            part: Divisor of the default chunk size, such as ``TEACHER_PART``.
            **transform: From hidden states to logits.
        """
        device = hidden.device.type
        # ``torch.mm`` takes operands of one dtype.
        narrower = min(hidden.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
        self.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else narrower
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.logit_scale, self.softcap = transform.get("logit_scale", 1.0), transform.get("softcap")
        default_size = count_chunk_tokens(len(weight), find_chunk_bytes(hidden.device) // part)
        self.chunk_size = transform.get("chunk_size") or default_size

    def iterate(self, hidden: Tensor, matrix: Tensor, bias: Tensor | None) -> Iterator[Chunk]:
        """Yield the logits of ``hidden`` chunk by chunk; the caller disables autocast.

        Args:
            hidden: Hidden states in any dtype, ``(N, D)``.
            matrix: Output embedding in ``dtype``, ``(V, D)``.
            bias: Bias in any dtype, ``(V,)``.
        """
        # One buffer for all chunks: on a CPU, page faults in newly allocated memory take as long as the arithmetic.
        shape = (min(self.chunk_size, len(hidden)), len(matrix))
        wide_buffer = hidden.new_empty(shape, dtype=self.wide)
        buffer = wide_buffer if self.dtype == self.wide else hidden.new_empty(shape, dtype=self.dtype)
        for start in range(0, len(hidden), self.chunk_size):
            rows = slice(start, start + self.chunk_size)
            inputs = hidden[rows].to(self.dtype)
            narrow, logits = buffer[: len(inputs)], wide_buffer[: len(inputs)]
            # (n, D) @ (D, V) -> (n, V); ``t`` is a view, so the weight is not copied.
            if narrow.dtype == logits.dtype:
                torch.mm(inputs, matrix.t(), out=logits)
            elif narrow.is_cuda:
                # Rounded to bfloat16, logits from 16 to 32 would be multiples of 0.125.
                torch.mm(inputs, matrix.t(), out_dtype=logits.dtype, out=logits)
            else:
                # A CPU has no product with another dtype than its operands.
                logits.copy_(torch.mm(inputs, matrix.t(), out=narrow))
            yield Chunk(rows, inputs, logits, narrow, self._apply_transform(logits, bias))

    def _apply_transform(self, logits: Tensor, bias: Tensor | None) -> Tensor | None:
        """Apply bias, scale and soft cap in place; return the derivative of the soft cap."""
        if bias is not None:
            logits.add_(bias)
        if self.logit_scale != 1.0:
            logits.mul_(self.logit_scale)
        if self.softcap is None:
            return None
        # d/dx c tanh(x / c) = 1 - tanh(x / c)^2, computed before the next line overwrites the hyperbolic tangent.
        logits.div_(self.softcap).tanh_()
        slope = 1 - logits.square()
        logits.mul_(self.softcap)
        return slope


class LogitTransform(TypedDict, total=False):
    """Options of the projection ``softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)``."""

    bias: Tensor | None
    """Bias of the output projection, ``(V,)``; default: none."""
    logit_scale: float
    """Factor on the logits, applied before the soft cap; default: 1."""
    softcap: float | None
    """Bound of the absolute value of the logits; default: none."""
    chunk_size: int | None
    """Tokens whose logits exist at any one time. Default: as many as have ``CHUNK_BYTES`` of logits, on a GPU up to
    ``CUDA_CHUNK_BYTES``, divided by ``TEACHER_PART`` where a teacher's logits exist beside them."""


def find_chunk_bytes(device: torch.device) -> int:
    """Return the default size of a chunk of ``float32`` logits on a device, in bytes."""
    if device.type != "cuda":
        return CHUNK_BYTES
    return choose_chunk_bytes(torch.cuda.get_device_properties(device).total_memory)


def choose_chunk_bytes(device_bytes: float) -> int:
    """Return the default size of a chunk of ``float32`` logits on a GPU with ``device_bytes`` of memory, in bytes."""
    return min(CUDA_CHUNK_BYTES, max(CHUNK_BYTES, int(device_bytes) // _MEMORY_FRACTION))


def count_chunk_tokens(vocabulary: int, chunk_bytes: int) -> int:
    """Return the number of tokens whose ``float32`` logits take ``chunk_bytes``, at least ``MIN_CHUNK_TOKENS``."""
    return max(MIN_CHUNK_TOKENS, chunk_bytes // (4 * vocabulary))


class ProjectionGradients:
    """Gradients of hidden states, weight and bias, accumulated over chunks; ``None`` for tensors that need none.

    Gradients of weight and bias, which are sums over chunks, are accumulated in ``float32`` at least.
    """

    def __init__(
        self, projection: Projection, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> None:
        """Allocate the gradients.

        Args:
            projection: Projection that yields the chunks.
            hidden: Hidden states, ``(N, D)``; the gradient has their dtype, since each row is in one chunk only.
            weight: Output embedding, ``(V, D)``.
            bias: Bias, ``(V,)``.
            needed: Whether ``hidden``, ``weight`` and ``bias`` need a gradient.
        """
        self._projection = projection
        self._is_first = True
        self._dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        # Without rows there is no chunk, and the gradient is 0; otherwise the first chunk overwrites it (``add``).
        build = torch.empty_like if len(hidden) else torch.zeros_like
        self._hidden = torch.empty_like(hidden) if needed[0] else None
        self._weight = build(weight, dtype=projection.wide) if needed[1] else None
        self._bias = torch.zeros_like(bias, dtype=projection.wide) if bias is not None and needed[2] else None

    def add(self, chunk: Chunk, matrix: Tensor) -> None:
        """Add the gradients of a chunk, and overwrite its buffers.

        Args:
            chunk: ``logits`` holds the gradient of the loss with respect to the logits, ``(n, V)``.
            matrix: Output embedding in the dtype of matrix products, ``(V, D)``.
        """
        wide, narrow, scale = chunk.logits, chunk.narrow, self._projection.logit_scale
        # Backward through soft cap and scale, in the reverse order of ``Projection._apply_transform``.
        if chunk.slope is not None:
            wide.mul_(chunk.slope)
        if scale != 1.0:
            wide.mul_(scale)
        # In float32 both are the same buffer.
        if narrow.data_ptr() != wide.data_ptr():
            narrow.copy_(wide)
        # (n, V) @ (V, D) -> (n, D), into its rows of the result where dtypes allow it.
        if self._hidden is not None and self._hidden.dtype == narrow.dtype:
            torch.mm(narrow, matrix, out=self._hidden[chunk.rows])
        elif self._hidden is not None:
            self._hidden[chunk.rows] = narrow @ matrix
        if (total := self._weight) is not None:
            # With beta = 0, the uninitialised memory is ignored, NaN included.
            factor = 0 if self._is_first else 1
            # (V, n) @ (n, D) -> (V, D), accumulated in float32: a sum over chunks in half precision would lose
            # small terms. CUDA takes half-precision operands with a float32 output; a CPU does not.
            if total.is_cuda and narrow.dtype != total.dtype:
                torch.addmm(total, narrow.t(), chunk.inputs, beta=factor, out_dtype=total.dtype, out=total)
            else:
                total.addmm_(wide.t(), chunk.inputs.to(total.dtype), beta=factor)
        self._is_first = False
        if self._bias is not None:
            self._bias += wide.sum(dim=0)

    def finish(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias, each in the dtype of its tensor."""
        sums = zip((self._hidden, self._weight, self._bias), self._dtypes, strict=True)
        return tuple(None if total is None else total.to(dtype) for total, dtype in sums)


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Contiguous shard of the vocabulary on this rank; its methods are collectives that all ranks must enter.

    Attributes:
        group: Tensor-parallel group over which the vocabulary is sharded.
        first: Token id of the first row of the shard.

    Source: ``tests/distributed/test_parallel.py``.
    """

    group: distributed.ProcessGroup
    first: int

    def find_top(self, top: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit of each row over the whole vocabulary, and its token id, ``(n, 1)`` each.

        Args:
            top: Largest logit of the shard, ``(n, 1)``.
            best: Index of that logit in the shard, ``int64 (n, 1)``.
        """
        # A copy, because the reduction is in place and the local maximum is compared with its result.
        largest = top.clone()
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, self.group)
        # Ties go to the lowest id, as for arg-max on one rank; ranks without the maximum contribute a larger number.
        first = torch.where(top == largest, best + self.first, torch.iinfo(best.dtype).max)
        distributed.all_reduce(first, distributed.ReduceOp.MIN, self.group)
        return largest, first

    def add(self, *parts: Tensor) -> list[Tensor]:
        """Return the sum of each tensor over the ranks; all have one shape and dtype."""
        # One all-reduce for all of them: latency dominates at these sizes.
        together = torch.stack(parts)
        distributed.all_reduce(together, group=self.group)
        return list(together)


Compute = Callable[[Iterator[Chunk], Callable[[Chunk], None] | None], Sequence[Tensor]]
"""Function from the chunks to sums over them, of which the first is a loss. For its gradient, it replaces the logits of
each chunk by their gradient, and calls its second argument with the chunk, unless that is ``None``."""


class ChunkedSum(torch.autograd.Function):
    """Sums over chunks; the gradients of the first one are computed in the forward pass, while a chunk's logits exist.

    Backward scales them in place, and can therefore run only once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        projection: Projection,
        is_grad_enabled: bool,
        compute: Compute,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, ...]:
        """Return the sums.

        Args:
            ctx: Context of autograd.
            hidden: Last hidden states, ``(N, D)``.
            weight: Output embedding, ``(V, D)``, or its rows on this rank.
            bias: Bias of the projection, ``(V,)``.
            projection: From hidden states to logits.
            is_grad_enabled: Grad mode of the caller: it is always off in here, and ``needs_input_grad`` does not
                reflect it.
            compute: Computes the sums.
            shard: Rows of the embedding on this rank, under tensor parallelism.
        """
        needed = [is_grad_enabled and is_needed for is_needed in ctx.needs_input_grad[:3]]
        gradients = ProjectionGradients(projection, hidden, weight, bias, needed)
        matrix = weight.to(projection.dtype)
        # ``Projection`` has chosen the dtype of the products; autocast would cast the float32 operations too.
        with torch.autocast(hidden.device.type, enabled=False):
            add = partial(gradients.add, matrix=matrix) if any(needed) else None
            loss, *figures = compute(projection.iterate(hidden, matrix, bias), add)
        of_hidden, *of_weights = gradients.finish()
        # Every rank multiplied by its rows of the embedding: the gradient of ``hidden`` is the sum over ranks, that of
        # the weight stays sharded like the weight.
        if shard is not None and of_hidden is not None:
            (of_hidden,) = shard.add(of_hidden)
        ctx.save_for_backward(of_hidden, *of_weights)
        ctx.mark_non_differentiable(*figures)
        return loss, *figures

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias."""
        # In place: a second (V, D) tensor would be allocated when activation memory is at its peak. If backward runs
        # again, autograd detects the modified saved tensors and raises. As a vector of one element: CUDA rounds a
        # scalar to the dtype of the gradient, and in bfloat16 all gradients would be off by up to 0.4 %.
        factor = upstream[None]
        scaled = (None if gradient is None else gradient.mul_(factor) for gradient in ctx.saved_tensors)
        return (*scaled, None, None, None, None)
