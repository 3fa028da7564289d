"""Collators: from prepared rows to the tensors of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from recipes_lib.data.masking import IGNORE_INDEX

Layout = Literal["rows", "flat"]


def find_targets(row: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
    """Mask of the target tokens of a prepared row, ``bool (T,)``: never the first of a document."""
    lengths = np.asarray(row["seq_lengths"], np.int64)
    is_target = np.array(row["loss_mask"], np.bool_)
    # Nothing predicts it: the token before belongs to another document.
    is_target[np.cumsum(lengths) - lengths] = False
    return is_target


def build_bounds(boundaries: npt.NDArray[np.int64]) -> dict[str, torch.Tensor | int]:
    """Document boundaries of a row as kernels take them, from where each document begins, and the end of the last."""
    # The kernels of flash-attention take int32.
    bounds, longest = torch.from_numpy(boundaries.astype(np.int32)), int(np.diff(boundaries).max(initial=0))
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCollator:
    """Builds a batch in which documents are isolated by restarting positions.

    There is no ``attention_mask``: with one, transformers does not derive the documents from ``position_ids``. For the
    same reason the model must be called with ``use_cache=False``.

    Padding is a separate document at the end of a row, identified by length and never by id. Therefore ``pad_token_id``
    may equal the end-of-text token, which stays a target where it is one.

    Attributes:
        pad_token_id: Id written into padding.
        layout: ``rows`` keeps the rows apart, for sdpa and eager; ``flat`` lays all documents in one row, for kernels
            that take document boundaries.
        pad_to_multiple_of: The padded length is a multiple of this.

    Source: transformers ``masking_utils.find_packed_sequence_indices``; ``tests/data/packed/test_collators.py``.
    """

    pad_token_id: int
    layout: Layout = "rows"
    pad_to_multiple_of: int = 1

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Builds the batch.

        Args:
            rows: Each with ``input_ids (T,)``, ``loss_mask (T,)`` (True where the token is a target) and
                ``seq_lengths``, the documents' lengths, which sum to T; maybe ``row_ids``. Other columns are ignored.

        Returns:
            ``input_ids``, ``labels``, ``position_ids``: ``int64 (B, L)`` with L the longest row, rounded up; the first
            token of every document and all padding are ignored in ``labels``; ``token_mask``, ``bool (B, L)``, True for
            tokens that are not padding; ``num_tokens``, a scalar: padding not
            counted; ``row_ids``, an array of numpy, so that it stays where it is: those of all rows, which the model
            does not take. In the ``flat`` layout ``(1, L)`` with L
            the sum, rounded up, and besides ``cu_seq_lens_q`` and ``cu_seq_lens_k``, ``int32 (documents + 1,)``, and
            ``max_length_q`` and ``max_length_k``, int: the longest document; padding counts as a document.
        """
        numbers = {"row_ids": np.concatenate([row["row_ids"] for row in rows])} if "row_ids" in rows[0] else {}
        sizes = np.array([len(row["input_ids"]) for row in rows])
        if self.layout == "rows":
            return {**self._fill(rows, sizes), **numbers}
        batch = self._fill(rows, sizes.sum(keepdims=True))
        # Every document begins at position 0, padding too: with its boundary, no document sees padding.
        starts = np.flatnonzero(batch["position_ids"].numpy()[0] == 0)
        return {**batch, **numbers, **build_bounds(np.append(starts, batch["position_ids"].shape[1]))}

    def _fill(self, rows: Sequence[Mapping[str, Any]], sizes: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Lay out the tokens of all rows in lines of ``sizes`` tokens each."""
        joined = {name: np.concatenate([row[name] for row in rows]) for name in ("loss_mask", "seq_lengths")}
        # `uint32` on disk; torch's embeddings take int32 and int64 only.
        ids = np.concatenate([row["input_ids"] for row in rows]).astype(np.int64)
        lengths = joined["seq_lengths"].astype(np.int64)
        columns = np.arange(-(-sizes.max() // self.pad_to_multiple_of) * self.pad_to_multiple_of)
        is_real = columns < sizes[:, None]
        input_ids = np.full(is_real.shape, self.pad_token_id, np.int64)
        labels = np.full(is_real.shape, IGNORE_INDEX, np.int64)
        # Padding documents are no longer than the longest real one: a model may have no more positions than that.
        position_ids = (columns - sizes[:, None]) % max(1, lengths.max(initial=0))
        input_ids[is_real] = ids
        labels[is_real] = np.where(find_targets(joined), ids, IGNORE_INDEX)
        position_ids[is_real] = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return {
            "input_ids": torch.from_numpy(input_ids),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(position_ids),
            "token_mask": torch.from_numpy(is_real),
            "num_tokens": torch.tensor(len(ids)),
        }
