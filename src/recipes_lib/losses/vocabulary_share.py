"""What processes that share the rows of an output embedding tell each other, so that none has all logits of a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, distributed


@dataclass(frozen=True, slots=True)
class VocabularyShare:
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
        largest = top.clone()
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, self.group)
        first = torch.where(top == largest, best + self.first, torch.iinfo(best.dtype).max)
        distributed.all_reduce(first, distributed.ReduceOp.MIN, self.group)
        return largest, first

    def add(self, *parts: Tensor) -> list[Tensor]:
        """The sums of some tensors of one shape and dtype over the processes."""
        together = torch.stack(parts)
        distributed.all_reduce(together, group=self.group)
        return list(together)
