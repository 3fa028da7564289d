"""Keys and values of a generation in room that is there from the start, of which rows can be given up."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def build_cache(model: Any, num_tokens: int) -> DynamicCache | None:
    """A cache for ``model.generate`` whose rows can be selected while answers are sampled.

    Args:
        model: A causal language model, or a PEFT model around it.
        num_tokens: Most tokens of a row, the prompt's among them.

    Returns:
        The cache; ``None`` for a model that keeps another state than keys and values of each token.
    """
    cache = DynamicCache(config=model.config)
    if not model._supports_default_dynamic_cache() or not all(
        isinstance(layer, DynamicLayer) for layer in cache.layers
    ):
        return None
    cache.layers = [RoomyLayer(num_tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class RoomyLayer(DynamicLayer):
    """A layer's cache that writes the new token, where upstream's copies all that there were.

    Source: transformers' ``DynamicLayer``, with which it is held equal in ``tests/models/test_generation_cache.py``.
    """

    def __init__(self, num_tokens: int) -> None:
        """Make room for ``num_tokens`` at the first update."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_tokens = num_tokens
        self._rooms: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append, and return all keys and values, ``(B, H, L, D)`` each; views of the room."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        if not self._rooms or end > self._rooms[0].shape[2]:
            states = (key_states, value_states)
            self._rooms = [new.new_empty(*new.shape[:2], max(end, self._num_tokens), new.shape[-1]) for new in states]
            for room, held in zip(self._rooms, (self.keys, self.values), strict=True):
                if held is not None and begin:
                    room[:, :, :begin] = held
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[:, :, begin:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self._rooms)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in room of their own."""
        super().batch_select_indices(indices)
        self._rooms = []
