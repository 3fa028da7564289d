"""Dispatch mode that measures the bytes of live tensor storages."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of storages that operators read or return, from the first use until each is freed.

    Temporaries inside an operator are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, output)):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        # PyTorch keeps one Python object per storage while it lives; ``_cdata`` is its address.
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.num_bytes += storage.nbytes()
            self.peak = max(self.peak, self.num_bytes)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.num_bytes -= self._sizes.pop(key)
