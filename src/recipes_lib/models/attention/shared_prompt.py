"""Shared prompts: one copy of a prompt for both answers of a pair; attention mask and verification."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig

from recipes_lib.models.attention.kernels import find_packing_problems
from recipes_lib.models.heads.loss_head import spell_mask
from recipes_lib.models.inference import (
    evaluating,
    find_device,
    find_rounding_error,
    kernel_precision,
    measure_rounding,
    unwrap_adapter,
)
from recipes_lib.models.structure import find_sliding_window

MASK_KERNELS: Final = ("sdpa", "eager")
"""Kernels that take a four-dimensional mask."""

BOUNDS_KERNELS: Final = ("varlen",)
"""Kernels that take the bounds of the parts of a pair."""

_COUNTS_PLACES: Final = {"gpt_neo"}
"""Model types that also apply a mask of their own, by index in the row rather than by position."""

_Answer = tuple[int, int]
"""Index of the pair and of the branch: 0 the prompt, 1 the chosen answer, 2 the rejected answer."""

_CHANGES: Final[tuple[set[_Answer], ...]] = (
    {(0, 1), (1, 1)},
    {(0, 2), (1, 2)},
    {(0, 0), (0, 1), (0, 2)},
    {(1, 0), (1, 1), (1, 2)},
)
"""Parts of two pairs that the verification changes together: one kind of answer, or a whole pair."""


def build_shared_prompt_mask(pair_ids: Tensor, branch_ids: Tensor) -> Tensor:
    """Build the attention mask of pairs: a token attends to earlier tokens of its prompt and of its answer.

    Args:
        pair_ids: Index of the pair of each token, -1 in padding; ``int64 (R, L)``.
        branch_ids: 0 in a prompt, which precedes its answers, 1 in the chosen answer, 2 in the rejected one, -1 in
            padding; ``int64 (R, L)``.

    Returns:
        ``bool (R, 1, L, L)``, queries by keys, True where a query attends to a key; for the model after ``spell_mask``.
        Every token attends to itself, padding to padding.

    Source: ``tests/models/attention/test_shared_prompt.py``.
    """
    is_earlier = torch.ones(pair_ids.shape[1], pair_ids.shape[1], dtype=torch.bool, device=pair_ids.device).tril()
    is_same_pair = pair_ids[:, :, None] == pair_ids[:, None, :]
    # A key is in the prompt, or in the same branch as the query: (R, L, L).
    is_own_branch = (branch_ids[:, None, :] == 0) | (branch_ids[:, :, None] == branch_ids[:, None, :])
    return (is_earlier & is_same_pair & is_own_branch)[:, None]


def build_shared_prompt_bounds(lengths: Tensor) -> dict[str, Tensor | int]:
    """Build the sequence bounds of pairs for variable-length kernels.

    The prompt with the chosen answer is one part, which attends to itself. The rejected answer is the other part, which
    attends to the prompt and to itself.

    Args:
        lengths: Tokens of each prompt, chosen answer and rejected answer, which are concatenated in one row;
            ``int64 (P, 3)``.

    Returns:
        ``cu_seq_lens_q``, ``int32 (2P + 1,)``, the bounds of the parts in the row; ``cu_seq_lens_k``, the bounds of
        their keys when concatenated; ``max_length_q`` and ``max_length_k``, int; ``shared_prompt_index``,
        ``int64 (K,)``, the index in the row of each key.
    """
    prompts, chosen, rejected = lengths.unbind(dim=1)
    # Numbers of queries and keys of the two parts of each pair, (2P,): prompt with chosen answer, rejected answer.
    parts = torch.stack([prompts + chosen, rejected], dim=1).flatten()
    keys = torch.stack([prompts + chosen, prompts + rejected], dim=1).flatten()
    # In the row, the chosen answer is between a prompt and its rejected answer, whose keys skip it.
    first, *ends = functional.pad(lengths.flatten().cumsum(0), (1, 0)).tolist()
    spans = list[tuple[int, int]]()
    for prompt_end, chosen_end, rejected_end in zip(ends[::3], ends[1::3], ends[2::3], strict=True):
        spans += (first, chosen_end), (first, prompt_end), (chosen_end, rejected_end)
        first = rejected_end
    return {
        "cu_seq_lens_q": functional.pad(parts.cumsum(0), (1, 0)).int(),
        "cu_seq_lens_k": functional.pad(keys.cumsum(0), (1, 0)).int(),
        "max_length_q": int(parts.max()),
        "max_length_k": int(keys.max()),
        "shared_prompt_index": torch.cat([torch.arange(*span) for span in spans]),
    }


def supports_shared_prompt(config: PreTrainedConfig, implementation: str, *, max_length: int) -> str | None:
    """Return why a model does not support shared prompts, according to its configuration; else ``None``.

    Args:
        config: Configuration of the model.
        implementation: Attention kernel.
        max_length: Maximum length of a prompt with one answer in tokens.
    """
    config = config.get_text_config()
    if implementation not in (*MASK_KERNELS, *BOUNDS_KERNELS):
        return f"attn_implementation: {implementation} takes no mask, only document bounds"
    # Layers that do not isolate packed documents do not isolate answers either.
    if problems := find_packing_problems(config):
        return problems[0].found
    if implementation in BOUNDS_KERNELS:
        return None
    if config.model_type in _COUNTS_PLACES:
        return f"a {config.model_type} model masks by index in the row, where a rejected answer follows the chosen one"
    # A four-dimensional mask replaces the model's own mask, and so its sliding window.
    layer_types = getattr(config, "layer_types", None)
    has_window = not layer_types or "sliding_attention" in layer_types
    window = find_sliding_window(config) if has_window else None
    if window is not None and window < max_length:
        return f"a {config.model_type} model sees {window:,} tokens in some layers, and max_length is {max_length:,}"
    return None


def prove_shared_prompt(model: Any) -> str | None:
    """Return why a model does not support shared prompts, according to forward passes; ``None`` if it does.

    Two pairs in one row must have the same hidden states as each prompt with each answer alone, and changing an answer
    must not change any other state. Costs a few forward passes over 30 tokens; with sharded weights, this is a
    collective that every process must enter.

    Args:
        model: Model as it will be trained, for which ``supports_shared_prompt`` returned ``None``; mode and random
            state are restored.

    Source: ``tests/models/attention/test_shared_prompt.py``, for models with and without leaks.
    """
    pairs = [
        [torch.arange(2, 8), torch.arange(20, 25), torch.arange(30, 37)],
        [torch.arange(40, 44), torch.arange(50, 53), torch.arange(11, 16)],
    ]
    try:
        with evaluating(model), kernel_precision(model, is_packed=True):
            together = _run_shared(model, pairs)
            alone = {
                (pair, branch): _run(model, torch.cat([parts[0], parts[branch]]))
                for pair, parts in enumerate(pairs)
                for branch in (1, 2)
            }
            beside_another = [_run_beside_another(model, pairs, changed) for changed in _CHANGES]
            rounding = measure_rounding(model, lambda: _run(model, torch.cat(pairs[0][:2])), alone[0, 1])
            eps = find_rounding_error(alone[0, 1])
    except (RuntimeError, TypeError, ValueError) as error:
        return f"this model fails on a row with shared prompts: {error}"
    scale = max(states.abs().max().item() for states in alone.values())
    # Kernels and shapes may differ from those of rows alone: that tolerance is larger.
    limits = ((alone, max(1e-4 * scale, rounding)), *((others, 4 * eps * scale) for others in beside_another))
    for others, allowed in limits:
        difference = max((together[answer] - states).abs().max().item() for answer, states in others.items())
        if not difference <= allowed:
            return f"an answer does not keep its hidden states beside another: one moves by {difference:.2g}"
    return None


def _run_shared(model: Any, pairs: Sequence[Sequence[Tensor]]) -> dict[_Answer, Tensor]:
    """Return the hidden states of each prompt with each of its answers, ``(T, D)``, from one row with all of them."""
    parts = [part for pair in pairs for part in pair]
    lengths = torch.tensor([len(part) for part in parts])
    numbers = torch.arange(len(parts)).repeat_interleave(lengths)
    # Both answers continue from the end of the prompt.
    positions = [
        first + torch.arange(len(part))
        for prompt, *answers in pairs
        for first, part in ((0, prompt), *((len(prompt), answer) for answer in answers))
    ]
    device, implementation = find_device(model), model.config.get_text_config()._attn_implementation
    if implementation in BOUNDS_KERNELS:
        apart = build_shared_prompt_bounds(lengths.view(-1, 3))
    else:
        mask = build_shared_prompt_mask((numbers // 3)[None], (numbers % 3)[None])
        apart = {"attention_mask": spell_mask(model, mask)}
    apart = send_to_device({**apart, "position_ids": torch.cat(positions)[None]}, device)
    states = _run(model, torch.cat(parts), **apart)
    split = torch.split(states, lengths.tolist())
    return {
        (pair, branch): torch.cat([split[3 * pair], split[3 * pair + branch]])
        for pair in range(len(pairs))
        for branch in (1, 2)
    }


def _run_beside_another(
    model: Any, pairs: Sequence[Sequence[Tensor]], changed: Collection[_Answer]
) -> dict[_Answer, Tensor]:
    """Return the hidden states of answers that do not attend to the ``changed`` parts, after the change."""
    others = [
        [part + 9 * ((pair, branch) in changed) for branch, part in enumerate(parts)]
        for pair, parts in enumerate(pairs)
    ]
    states = _run_shared(model, others)
    return {answer: states[answer] for answer in states if not {(answer[0], 0), answer} & set(changed)}


def _run(model: Any, ids: Tensor, **inputs: Tensor | int) -> Tensor:
    """Return the hidden states after the final norm, ``(T, D)``."""
    ids = ids.to(find_device(model)) % model.config.get_text_config().vocab_size
    # ``output_hidden_states`` would leave a hook in every layer, which breaks the graphs of compiled layers.
    states: Tensor = unwrap_adapter(model).base_model(input_ids=ids[None], use_cache=False, **inputs)[0]
    return states[0]
