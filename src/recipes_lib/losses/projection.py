"""Chunked projection of hidden states to logits and back, shared by all vocabulary losses; vocabulary-parallel too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, distributed

CHUNK_BYTES = 128 * 2**20
"""Default size of the ``float32`` logits that exist at any one time, on a CPU."""
CUDA_CHUNK_BYTES = 2**30
"""The most on a GPU: fewer kernels, and the gradient of the weight is read and written less often."""
_SHARE_OF_GPU = 64
"""A GPU of less than 64 GiB has chunks of this part of its memory."""
TEACHER_PART = 4
"""Divides the chunks of a loss that reads a teacher's logits: it holds seven to eleven tensors of their size, others
one or two."""
MIN_CHUNK_TOKENS = 128
"""A smaller chunk would read the whole weight for too little arithmetic."""


class Chunk(NamedTuple):
    """The logits of some rows; the buffers are those of the next chunk too.

    Attributes:
        rows: Which of the hidden states.
        inputs: Those hidden states in the dtype of matrix products, ``(n, D)``.
        logits: ``(n, V)`` in ``float32`` at least; the consumer may overwrite them.
        narrow: Memory of their shape in the dtype of matrix products; it may be ``logits`` itself.
        slope: Derivative of the cap at each logit, ``(n, V)``; ``None`` without a cap.
    """

    rows: slice
    inputs: Tensor
    logits: Tensor
    narrow: Tensor
    slope: Tensor | None


@dataclass(frozen=True, slots=True)
class Projection:
    """How hidden states become logits: ``softcap * tanh(logit_scale * (hidden @ matrix.T + bias) / softcap)``.

    Attributes:
        dtype: Of matrix products.
        logit_scale: Factor on the logits, before the cap.
        softcap: Bound of the logits.
        chunk_size: Tokens whose logits exist at any one time.
    """

    dtype: torch.dtype
    logit_scale: float
    softcap: float | None
    chunk_size: int

    @property
    def wide(self) -> torch.dtype:
        """The dtype of all that is no matrix product: ``float32`` at least."""
        return torch.promote_types(self.dtype, torch.float32)

    def iterate(self, hidden: Tensor, matrix: Tensor, bias: Tensor | None) -> Iterator[Chunk]:
        """Yield the logits of ``hidden``, ``(N, D)``, chunk by chunk; autocast must be off.

        Args:
            hidden: In any dtype.
            matrix: The output embedding in ``dtype``, ``(V, D)``.
            bias: ``(V,)``, in any dtype.
        """
        # One buffer for all chunks: fresh memory of this size costs the operating system as much as the arithmetic.
        shape = (min(self.chunk_size, len(hidden)), len(matrix))
        wide_buffer = hidden.new_empty(shape, dtype=self.wide)
        buffer = wide_buffer if self.dtype == self.wide else hidden.new_empty(shape, dtype=self.dtype)
        for start in range(0, len(hidden), self.chunk_size):
            rows = slice(start, start + self.chunk_size)
            inputs = hidden[rows].to(self.dtype)
            narrow, logits = buffer[: len(inputs)], wide_buffer[: len(inputs)]
            # (n, D) by (D, V); the view that ``t`` gives is not copied.
            torch.mm(inputs, matrix.t(), out=narrow)
            slope = self._finish(logits if narrow.dtype == logits.dtype else logits.copy_(narrow), bias)
            yield Chunk(rows, inputs, logits, narrow, slope)

    def _finish(self, logits: Tensor, bias: Tensor | None) -> Tensor | None:
        """Apply bias, scale and cap in place; return the cap's derivative."""
        if bias is not None:
            logits.add_(bias)
        if self.logit_scale != 1.0:
            logits.mul_(self.logit_scale)
        if self.softcap is None:
            return None
        # d/dx c tanh(x / c) = 1 - tanh(x / c)^2, kept here while the hyperbolic tangent is there.
        logits.div_(self.softcap).tanh_()
        slope = 1 - logits.square()
        logits.mul_(self.softcap)
        return slope


class LogitTransform(TypedDict, total=False):
    """How hidden states become logits, ``softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)``."""

    bias: Tensor | None
    """``(V,)``."""
    logit_scale: float
    """Factor on the logits, before the cap; 1 unless given."""
    softcap: float | None
    """Bound of the logits."""
    chunk_size: int | None
    """Tokens whose logits exist at any one time; unless given as many as have ``CHUNK_BYTES`` of logits, on a GPU
    up to ``CUDA_CHUNK_BYTES``, and of two models a ``TEACHER_PART`` of that."""


def build_projection(
    hidden: Tensor, weight: Tensor, *, part: int = 1, **transform: Unpack[LogitTransform]
) -> Projection:
    """Settle dtype and chunk size: autocast's dtype or the narrower of the operands'; a ``part`` of ``CHUNK_BYTES``."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        # ``torch.mm`` takes operands of one dtype.
        dtype = min(hidden.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
    default_size = count_chunk_tokens(len(weight), find_chunk_bytes(hidden.device) // part)
    scale, softcap = transform.get("logit_scale", 1.0), transform.get("softcap")
    return Projection(dtype, scale, softcap, transform.get("chunk_size") or default_size)


def find_chunk_bytes(device: torch.device) -> int:
    """Return the bytes of ``float32`` logits that exist at any one time on a device, unless a size is given."""
    if device.type != "cuda":
        return CHUNK_BYTES
    return choose_chunk_bytes(torch.cuda.get_device_properties(device).total_memory)


def choose_chunk_bytes(device_bytes: float) -> int:
    """Return what ``find_chunk_bytes`` does of a GPU with so much memory."""
    return min(CUDA_CHUNK_BYTES, max(CHUNK_BYTES, int(device_bytes) // _SHARE_OF_GPU))


def count_chunk_tokens(vocabulary: int, chunk_bytes: int) -> int:
    """Return how many tokens have ``float32`` logits of so many bytes."""
    return max(MIN_CHUNK_TOKENS, chunk_bytes // (4 * vocabulary))


class ProjectionGradients:
    """Gradients of hidden states, weight and bias as sums over chunks; ``None`` for what needs none.

    The sums over chunks, those of weight and bias, are kept in ``float32`` at least.
    """

    def __init__(
        self, projection: Projection, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> None:
        """Start at zero.

        Args:
            projection: What made the logits.
            hidden: ``(N, D)``; its gradient has its dtype from the start, for each row is in one chunk only.
            weight: ``(V, D)``.
            bias: ``(V,)``.
            needed: Whether ``hidden``, ``weight`` and ``bias`` need a gradient.
        """
        self._projection = projection
        self._is_first = True
        self._dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        # Every row of hidden states is in some chunk; the others, sums over chunks, start at 0 where there is none.
        build = torch.empty_like if len(hidden) else torch.zeros_like
        self._hidden = torch.empty_like(hidden) if needed[0] else None
        self._weight = build(weight, dtype=projection.wide) if needed[1] else None
        self._bias = torch.zeros_like(bias, dtype=projection.wide) if bias is not None and needed[2] else None

    def add(self, chunk: Chunk, matrix: Tensor) -> None:
        """Add a chunk whose ``logits`` now hold the gradient of the loss with respect to them, and overwrite them."""
        wide, narrow, scale = chunk.logits, chunk.narrow, self._projection.logit_scale
        # Backwards through cap and scale, in the opposite order of ``Projection._finish``.
        if chunk.slope is not None:
            wide.mul_(chunk.slope)
        if scale != 1.0:
            wide.mul_(scale)
        # In float32 both are one buffer.
        if narrow.data_ptr() != wide.data_ptr():
            narrow.copy_(wide)
        if self._hidden is not None and self._hidden.dtype == narrow.dtype:
            torch.mm(narrow, matrix, out=self._hidden[chunk.rows])
        elif self._hidden is not None:
            self._hidden[chunk.rows] = narrow @ matrix
        if (total := self._weight) is not None:
            # With a factor of 0 what was there before counts for nothing, whatever it is.
            factor = 0 if self._is_first else 1
            # ``wide.t() @ inputs``, without rounding it to the matrix product's dtype first.
            if total.is_cuda and narrow.dtype != total.dtype:
                torch.addmm(total, narrow.t(), chunk.inputs, beta=factor, out_dtype=total.dtype, out=total)
            else:
                total.addmm_(wide.t(), chunk.inputs.to(total.dtype), beta=factor)
        self._is_first = False
        if self._bias is not None:
            self._bias += wide.sum(dim=0)

    def finish(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias in the dtypes of what they belong to."""
        sums = zip((self._hidden, self._weight, self._bias), self._dtypes, strict=True)
        return tuple(None if total is None else total.to(dtype) for total, dtype in sums)


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The tokens of the vocabulary whose logits this process computes; all processes of the group call all methods.

    Attributes:
        group: The processes that have the others.
        first: Id of the first of them; they are in a row.

    Source: ``tests/distributed/test_tensor.py``.
    """

    group: distributed.ProcessGroup
    first: int

    def find_top(self, top: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        """Largest logit of each row over the whole vocabulary, and the id of the first token that has it.

        Args:
            top: Largest of this process, ``(n, 1)``.
            best: Where it stands among this process's tokens, ``int64 (n, 1)``.
        """
        # The reduction is in place, and the process's own is compared with it.
        largest = top.clone()
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, self.group)
        # Of equal logits the first id counts, as for arg-max in one process: the others say a number above all ids.
        first = torch.where(top == largest, best + self.first, torch.iinfo(best.dtype).max)
        distributed.all_reduce(first, distributed.ReduceOp.MIN, self.group)
        return largest, first

    def add(self, *parts: Tensor) -> list[Tensor]:
        """The sums of some tensors of one shape and dtype over the processes."""
        # One collective call for all of them.
        together = torch.stack(parts)
        distributed.all_reduce(together, group=self.group)
        return list(together)
