"""Collator of preference pairs, whose two answers share one copy of the prompt or have one each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch

from recipes_lib.data.packed.collators import build_bounds
from recipes_lib.data.packed.packing import IntArray, choose_bins

PairLayout = Literal["shared", "shared_flat", "separate", "flat"]

PADDING: Final = -1
"""Value of ``pair_ids`` and ``branch_ids`` at padding."""

PAIR_FIGURES: Final = ("margin", "ref_chosen_logp", "ref_rejected_logp")
"""Columns with one number per pair, which the collator passes through."""

_PARTS: Final = ("prompt_ids", "chosen_ids", "rejected_ids")
_Parts = Sequence[IntArray]
_Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCollator:
    """Packs prepared pairs by best fit into as few rows as possible, each as long as the longest document.

    Layouts:

    - ``shared``: A document is a pair, ``prompt, chosen, rejected``; positions of both answers continue those of the
      prompt. An attention mask isolates the answers, which the model builds from ``pair_ids`` and ``branch_ids``.
    - ``shared_flat``: The same in one row, for variable-length kernels; built from ``part_lengths``.
    - ``separate``: A document is a prompt with one answer, isolated by restarting positions without a mask, as in
      ``PackedCollator``; for sdpa and eager attention.
    - ``flat``: The same in one row, for variable-length kernels.

    All layouts score the tokens of answers in the same way: ``predictors`` are the positions in the flattened batch
    whose hidden states predict them. The last position of a prompt predicts the first token of both answers.

    Attributes:
        pad_token_id: Token id of padding, which is identified by length and never by id, so it may be the EOS id.
        layout: Arrangement of prompts and answers.
        packing: Whether documents share rows; ``flat`` and ``shared_flat`` always have one row.

    Source: hidden states, scores and gradients equal those of each answer alone;
    ``tests/models/attention/test_shared_prompt.py``.
    """

    pad_token_id: int
    layout: PairLayout = "shared"
    packing: bool = True

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Build the batch of P pairs, with N answer tokens in total, in R rows of L tokens.

        Args:
            rows: Pairs with ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``, at least one token each; optionally
                ``row_id`` and the columns of ``PAIR_FIGURES``. Other columns are ignored.

        Returns:
            Tensors, ``int64`` unless stated otherwise:

            - ``input_ids`` and ``position_ids``, ``(R, L)``; positions of padding are 0.
            - ``token_mask``, ``bool (R, L)``: True at tokens that are not padding.
            - ``pair_ids`` and ``branch_ids``, ``(R, L)``, in the layout ``shared``: index of the pair in ``rows``; and
              0 in a prompt, 1 in a chosen and 2 in a rejected answer. Both are ``PADDING`` at padding.
            - ``part_lengths``, ``(P, 3)``, in the layout ``shared_flat``: number of tokens of each prompt, chosen
              answer and rejected answer.
            - the entries of ``build_bounds`` in the layout ``flat``.
            - ``predictors``, ``(N,)``: positions in the flattened batch, ``R * L``, that predict the answer tokens.
            - ``targets``, ``(N,)``: the answer tokens.
            - ``sequence_ids``, ``(N,)``, ascending: answer of each target, ``2 * pair`` for the chosen and
              ``2 * pair + 1`` for the rejected one.
            - ``last_positions``, ``(2P,)``: position of the last token of each answer in the flattened batch.
            - ``num_tokens``, a scalar: number of tokens without padding.
            - ``num_completion_tokens``, ``(2P,)``: number of tokens of each answer.
            - ``row_ids``, if ``rows`` have ``row_id``: a numpy array, so that it is not moved to the device.
            - the columns of ``PAIR_FIGURES`` that ``rows`` have, ``float32 (P,)``.
        """
        pairs = [[np.asarray(row[name], np.int64) for name in _PARTS] for row in rows]
        is_shared = self.layout in ("shared", "shared_flat")
        documents = pairs if is_shared else [[prompt, answer] for prompt, *answers in pairs for answer in answers]
        lengths = np.array([sum(map(len, parts)) for parts in documents])
        starts, shape = self._place(lengths)
        batch = _fill(documents, starts, shape, self.pad_token_id, has_branches=self.layout == "shared")
        if self.layout == "shared_flat":
            batch["part_lengths"] = np.array([[len(part) for part in parts] for parts in pairs])
        batch |= _find_predictors(pairs, starts, is_shared=is_shared)
        batch["num_tokens"] = np.array(lengths.sum())
        for name in PAIR_FIGURES:
            if name in rows[0]:
                batch[name] = np.array([row[name] for row in rows], np.float32)
        tensors: dict[str, Any] = {name: torch.from_numpy(values) for name, values in batch.items()}
        if "row_id" in rows[0]:
            tensors["row_ids"] = np.array([row["row_id"] for row in rows], np.int64)
        return tensors | (build_bounds(np.append(0, np.cumsum(lengths))) if self.layout == "flat" else {})

    def _place(self, lengths: IntArray) -> tuple[IntArray, tuple[int, int]]:
        """Return the start of each document in the flattened batch, and the shape ``(R, L)``."""
        if self.layout in ("flat", "shared_flat"):
            return np.cumsum(lengths) - lengths, (1, int(lengths.sum()))
        width = int(lengths.max())
        bins = choose_bins(lengths, width, packing=self.packing)
        # Tokens before each document over all bins, minus those before its bin, is its offset in the row.
        before = np.cumsum(lengths[bins.order]) - lengths[bins.order]
        bin_of = np.repeat(np.arange(len(bins)), np.diff(bins.offsets))
        starts = np.empty_like(lengths)
        starts[bins.order] = bin_of * width + before - before[bins.offsets[:-1]][bin_of]
        return starts, (len(bins), width)


def _fill(
    documents: Sequence[_Parts], starts: IntArray, shape: tuple[int, int], pad_token_id: int, *, has_branches: bool
) -> _Arrays:
    """Return ``input_ids``, ``position_ids`` and ``token_mask``, and with branches ``pair_ids`` and ``branch_ids``."""
    counts = np.array([[len(part) for part in parts] for parts in documents])
    lengths = counts.sum(axis=1)
    # For each token, its document, its place in it, and its part: 0 for the prompt, 1 and 2 for the answers.
    document = np.repeat(np.arange(len(documents)), lengths)
    place = np.arange(len(document)) - (np.cumsum(lengths) - lengths)[document]
    part = np.repeat(np.tile(np.arange(counts.shape[1]), len(documents)), counts.ravel())
    # Positions of the second answer continue those of the prompt, as those of the first do.
    positions = place - np.where(part == 2, counts[document, 1], 0)
    ids = np.concatenate([ids for parts in documents for ids in parts])
    columns = {"input_ids": (ids, pad_token_id), "position_ids": (positions, 0), "token_mask": (ids >= 0, False)}
    if has_branches:
        columns |= {"pair_ids": (document, PADDING), "branch_ids": (part, PADDING)}
    batch = {}
    for name, (values, padding) in columns.items():
        batch[name] = np.full(shape, padding, values.dtype)
        batch[name].reshape(-1)[starts[document] + place] = values
    return batch


def _find_predictors(pairs: Sequence[_Parts], starts: IntArray, *, is_shared: bool) -> _Arrays:
    """Return the entries of the batch that locate answer tokens, one answer after the other."""
    # (P,) each
    prompt, chosen, rejected = np.array([[len(part) for part in parts] for parts in pairs]).T
    lengths = np.column_stack([chosen, rejected]).ravel()
    if is_shared:
        # (2P,): chosen, rejected, chosen, ... Both follow the same prompt, the rejected answer after the chosen one.
        prompt_ends = np.repeat(starts + prompt - 1, 2)
        firsts = prompt_ends + 1 + np.column_stack([np.zeros_like(chosen), chosen]).ravel()
    else:
        prompt_ends = starts + np.repeat(prompt, 2) - 1
        firsts = prompt_ends + 1
    begins = np.cumsum(lengths) - lengths
    # Each token of an answer is predicted by the position before it. The first one is predicted by the end of the
    # prompt, which is not the position before it for a rejected answer that follows the chosen one.
    predictors = np.repeat(firsts - 1 - begins, lengths) + np.arange(lengths.sum())
    predictors[begins] = prompt_ends
    return {
        "predictors": predictors,
        "targets": np.concatenate([answer for _, *answers in pairs for answer in answers]),
        "sequence_ids": np.repeat(np.arange(len(lengths)), lengths),
        "last_positions": firsts + lengths - 1,
        "num_completion_tokens": lengths,
    }
