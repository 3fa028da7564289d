"""Shared prompts: one copy of a prompt for both answers of a pair; attention mask and verification."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig

from recipes_lib.errors import ConfigError
from recipes_lib.models.attention.kernels import choose_kernel
from recipes_lib.models.inference import evaluating, find_device, find_rounding_error, kernel_precision

TAKES_A_MASK: Final = ("sdpa", "eager")
"""Every ``attn_implementation`` that goes by whatever mask it is given."""

TAKES_BOUNDS: Final = ("varlen",)
"""Every one that goes by where each part of a pair begins."""

_COUNTS_PLACES: Final = {"gpt_neo"}
"""Models whose own masks, cut out by place and not by position, apply besides the one given."""

_Answer = tuple[int, int]
"""Number of the pair and of the branch."""

_CHANGES: Final[tuple[set[_Answer], ...]] = (
    {(0, 1), (1, 1)},
    {(0, 2), (1, 2)},
    {(0, 0), (0, 1), (0, 2)},
    {(1, 0), (1, 1), (1, 2)},
)
"""Parts of two pairs that are changed together: either kind of answer, either pair."""


def build_shared_prompt_mask(pair_ids: Tensor, branch_ids: Tensor, implementation: str) -> Tensor:
    """Attention mask of pairs: a token attends to earlier tokens of its own prompt and its own answer.

    Args:
        pair_ids: ``int64 (R, L)``: the pair of each token, -1 in padding.
        branch_ids: ``int64 (R, L)``: 0 in a prompt, which comes before its answers, 1 in the chosen answer, 2 in the
            rejected one, -1 in padding.
        implementation: ``sdpa`` or ``eager``.

    Returns:
        ``(R, 1, L, L)``, queries by keys, as ``attention_mask`` of the model. For ``sdpa`` ``bool``, True where a token
        may attend. For ``eager``, which adds its mask to the scores, ``float32``: 0 where it may, the lowest number
        where it may not. Every token attends to itself, padding to padding.

    Source: transformers' ``masking_utils._preprocess_mask_arguments`` passes a mask of four dimensions on as it is;
    ``tests/models/attention/test_shared_prompt.py``.
    """
    assert implementation in TAKES_A_MASK
    is_earlier = torch.ones(pair_ids.shape[1], pair_ids.shape[1], dtype=torch.bool, device=pair_ids.device).tril()
    is_same_pair = pair_ids[:, :, None] == pair_ids[:, None, :]
    is_on_the_way = (branch_ids[:, None, :] == 0) | (branch_ids[:, :, None] == branch_ids[:, None, :])
    mask = (is_earlier & is_same_pair & is_on_the_way)[:, None]
    if implementation == "sdpa":
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, torch.finfo(torch.float32).min)


def build_shared_prompt_bounds(lengths: Tensor) -> dict[str, Tensor | int]:
    """Sequence bounds of pairs, for kernels that use bounds instead of a mask.

    A prompt with its chosen answer is one part, which attends to itself. The rejected answer is the other part, which
    attends to the prompt, and then to itself.

    Args:
        lengths: ``int64 (P, 3)``: tokens of each prompt, chosen answer and rejected answer, all of which stand behind
            each other in one row.

    Returns:
        ``cu_seq_lens_q``, ``int32 (2P + 1,)``: where the parts begin and end in the row; ``cu_seq_lens_k``, the same in
        their keys laid end to end; ``max_length_q`` and ``max_length_k``, int; ``shared_prompt_index``, ``int64 (K,)``:
        the place in the row of each key.
    """
    prompts, chosen, rejected = lengths.unbind(dim=1)
    # Queries of the two parts of each pair, (2P,): prompt with chosen answer, rejected answer.
    parts = torch.stack([prompts + chosen, rejected], dim=1).flatten()
    keys = torch.stack([prompts + chosen, prompts + rejected], dim=1).flatten()
    # Number of each key in its own part: 0, 1, ... from the prompt on.
    places = torch.arange(int(keys.sum())) - (keys.cumsum(0) - keys).repeat_interleave(keys)
    starts = (lengths.sum(dim=1).cumsum(0) - lengths.sum(dim=1)).repeat_interleave(2).repeat_interleave(keys)
    # The chosen answer is between a prompt and its rejected answer.
    is_behind = places >= prompts.repeat_interleave(2).repeat_interleave(keys)
    skipped = torch.stack([torch.zeros_like(chosen), chosen], dim=1).flatten().repeat_interleave(keys)
    return {
        "cu_seq_lens_q": functional.pad(parts.cumsum(0), (1, 0)).int(),
        "cu_seq_lens_k": functional.pad(keys.cumsum(0), (1, 0)).int(),
        "max_length_q": int(parts.max()),
        "max_length_k": int(keys.max()),
        "shared_prompt_index": starts + places + skipped * is_behind,
    }


def supports_shared_prompt(config: PreTrainedConfig, implementation: str, *, max_length: int) -> str | None:
    """Return why a model does not support shared prompts, according to its configuration; else ``None``.

    Args:
        config: The model's configuration.
        implementation: The attention kernel.
        max_length: Tokens of the longest prompt with one answer.
    """
    config = config.get_text_config()
    if implementation not in (*TAKES_A_MASK, *TAKES_BOUNDS):
        return f"attn_implementation: {implementation} takes no mask, only where documents begin"
    try:
        # Reasons against packing are also reasons against shared prompts.
        choose_kernel(config, "eager", device=torch.device("cpu"), compute_dtype=torch.float32, packing=True)
    except ConfigError as error:
        return error.problems[0].found
    if implementation in TAKES_BOUNDS:
        return None
    if config.model_type in _COUNTS_PLACES:
        return f"a {config.model_type} model counts places in the row, where a rejected answer is behind the chosen one"
    # A four-dimensional mask replaces the model's own mask, and so its sliding window.
    layer_types = getattr(config, "layer_types", None)
    has_window = not layer_types or "sliding_attention" in layer_types
    window = getattr(config, "sliding_window", None) if has_window else None
    if window is not None and window < max_length:
        return f"a {config.model_type} model sees {window:,} tokens in some layers, and max_length is {max_length:,}"
    return None


def prove_shared_prompt(model: Any) -> str | None:
    """Return why a model does not support shared prompts, found by running it; ``None`` if the results are equal.

    Two pairs in one row must have the same hidden states as each prompt with each answer alone, and changing an answer
    must not change any other state. A few forward passes over thirty tokens; for sharded weights every process must
    call.

    Args:
        model: The model as it will be trained, for which ``supports_shared_prompt`` found nothing; mode and random
            state are left alone.

    Source: ``tests/models/attention/test_shared_prompt.py`` shows leaks found and equality proved.
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
            eps = find_rounding_error(alone[0, 1])
    except (RuntimeError, TypeError, ValueError) as error:
        return f"this model fails on a row with shared prompts: {error}"
    scale = max(states.abs().max().item() for states in alone.values())
    # As in prove_isolation: compared with rows alone, kernels and shapes may differ; otherwise only the changed part
    # does.
    for others, tolerance in ((alone, max(1e-4, 4 * eps)), *((others, 4 * eps) for others in beside_another)):
        difference = max((together[answer] - states).abs().max().item() for answer, states in others.items())
        if not difference <= scale * tolerance:
            return f"an answer does not keep its hidden states beside another: one moves by {difference:.2g}"
    return None


def _run_shared(model: Any, pairs: Sequence[Sequence[Tensor]]) -> dict[_Answer, Tensor]:
    """Hidden states ``(T, H)`` of each prompt with each of its answers, all in one row."""
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
    if implementation in TAKES_BOUNDS:
        apart = build_shared_prompt_bounds(lengths.view(-1, 3))
    else:
        apart = {"attention_mask": build_shared_prompt_mask((numbers // 3)[None], (numbers % 3)[None], implementation)}
    apart = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in apart.items()}
    states = _run(model, torch.cat(parts), position_ids=torch.cat(positions)[None].to(device), **apart)
    split = torch.split(states, lengths.tolist())
    return {
        (pair, branch): torch.cat([split[3 * pair], split[3 * pair + branch]])
        for pair in range(len(pairs))
        for branch in (1, 2)
    }


def _run_beside_another(
    model: Any, pairs: Sequence[Sequence[Tensor]], changed: Collection[_Answer]
) -> dict[_Answer, Tensor]:
    """Hidden states of the answers that must not attend to the ``changed`` parts, after the change."""
    others = [
        [part + 9 * ((pair, branch) in changed) for branch, part in enumerate(parts)]
        for pair, parts in enumerate(pairs)
    ]
    states = _run_shared(model, others)
    return {answer: states[answer] for answer in states if not {(answer[0], 0), answer} & set(changed)}


def _run(model: Any, ids: Tensor, **inputs: Tensor | int) -> Tensor:
    """Hidden states ``(T, H)`` after the final norm."""
    ids = ids.to(find_device(model)) % model.config.get_text_config().vocab_size
    outputs = model(input_ids=ids[None], use_cache=False, output_hidden_states=True, **inputs)
    states: Tensor = outputs.hidden_states[-1][0]
    return states
