"""Collator of packed rows: from prepared rows to the tensors of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch

Layout = Literal["rows", "flat"]

IGNORE_INDEX: Final = -100
"""Label of positions without a target; the default ``ignore_index`` of PyTorch's cross-entropy."""


def find_targets(row: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
    """Return the mask of target tokens of a prepared row, ``bool (T,)``; False at the first token of a document."""
    lengths = np.asarray(row["seq_lengths"], np.int64)
    is_target = np.array(row["loss_mask"], np.bool_)
    # The token before it belongs to another document, and must not predict it.
    is_target[np.cumsum(lengths) - lengths] = False
    return is_target


def build_bounds(boundaries: npt.NDArray[np.int64]) -> dict[str, torch.Tensor | int]:
    """Return the arguments of variable-length attention kernels for the documents of a row.

    Args:
        boundaries: Start of each document and end of the last one, ``int64 (documents + 1,)``.

    Returns:
        ``cu_seq_lens_q`` and ``cu_seq_lens_k``, ``int32 (documents + 1,)``; ``max_length_q`` and ``max_length_k``, int.
    """
    # flash-attention requires int32.
    bounds, longest = torch.from_numpy(boundaries.astype(np.int32)), int(np.diff(boundaries).max(initial=0))
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCollator:
    """Builds a batch of packed rows, in which documents are isolated by restarting ``position_ids``.

    The batch has no ``attention_mask``: with one, transformers does not derive the documents from ``position_ids``. For
    the same reason, the model must be called with ``use_cache=False``.

    Padding is a separate document at the end of a row. It is identified by length and never by id, so ``pad_token_id``
    may equal the EOS id, which stays a target in documents.

    Attributes:
        pad_token_id: Token id of padding.
        layout: ``rows`` for one batch row per pack, for sdpa and eager attention; ``flat`` for all documents in one
            row, for variable-length kernels.

    Source: transformers ``masking_utils.find_packed_sequence_indices``; ``tests/data/packed/test_collators.py``.
    """

    pad_token_id: int
    layout: Layout = "rows"

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Build the batch of B packs.

        Args:
            rows: Packs with ``input_ids (T,)``, ``loss_mask (T,)``, True at targets, and ``seq_lengths``, the lengths
                of the documents, which sum to T; optionally ``row_ids``. Other columns are ignored.

        Returns:
            Tensors of shape ``(B, L)``, L being the length of the longest pack; in the ``flat`` layout of shape
            ``(1, L)``, L being the sum of the lengths:

            - ``input_ids`` and ``position_ids``, ``int64``.
            - ``labels``, ``int64``: ``IGNORE_INDEX`` at tokens that are not targets, at the first token of every
              document, and at padding.
            - ``token_mask``, ``bool``: True at tokens that are not padding.

            Also ``num_tokens``, an ``int64`` scalar, the number of tokens without padding; and ``row_ids`` of all
            documents, a numpy array, so that it is not moved to the device. The ``flat`` layout, which has no padding,
            has the entries of ``build_bounds``.
        """
        numbers = {"row_ids": np.concatenate([row["row_ids"] for row in rows])} if "row_ids" in rows[0] else {}
        sizes = np.array([len(row["input_ids"]) for row in rows])
        if self.layout == "rows":
            return {**self._fill(rows, sizes), **numbers}
        batch = self._fill(rows, sizes.sum(keepdims=True))
        starts = np.flatnonzero(batch["position_ids"].numpy()[0] == 0)
        return {**batch, **numbers, **build_bounds(np.append(starts, batch["position_ids"].shape[1]))}

    def _fill(self, rows: Sequence[Mapping[str, Any]], sizes: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Write the tokens of all packs into batch rows of ``sizes`` tokens each, ``int64 (B,)``."""
        joined = {name: np.concatenate([row[name] for row in rows]) for name in ("loss_mask", "seq_lengths")}
        # uint32 in the prepared set; torch's embedding accepts only int32 and int64.
        ids = np.concatenate([row["input_ids"] for row in rows]).astype(np.int64)
        lengths = joined["seq_lengths"].astype(np.int64)
        columns = np.arange(sizes.max())
        is_real = columns < sizes[:, None]
        input_ids = np.full(is_real.shape, self.pad_token_id, np.int64)
        labels = np.full(is_real.shape, IGNORE_INDEX, np.int64)
        # Positions of padding restart at the length of the longest document: a model may have no more positions.
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
