"""Context parallelism: sequences sharded over ranks, attention over full documents.

Two variants: all-gather of keys and values (every rank attends from its own tokens with all heads), and Ulysses
(all-to-all: every rank attends from all tokens with a share of the heads). Norms, MLPs and the loss see hidden states
of the local tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, distributed
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.attention.varlen import attend_documents
from recipes_lib.models.structure import has_attention_dropout, is_replaceable_sdpa

_HEADS: Final = {"": "attention", "key-value ": "key_value"}


@dataclass(frozen=True, slots=True)
class ContextParallelGroup:
    """Process groups of context parallelism of this rank.

    Attributes:
        group: Context-parallel group: the ranks that hold shards of the same sequences.
        rank: Index of this rank in ``group``, from 0.
        size: Ranks in ``group``.
        data_group: Data-parallel group: one rank of each context-parallel group, this rank among them.
        by_heads: Ulysses (all tokens, a share of the heads); otherwise all-gather (local tokens, all heads).
    """

    group: distributed.ProcessGroup
    rank: int
    size: int
    data_group: distributed.ProcessGroup
    by_heads: bool


def verify_context_parallel(config: PreTrainedConfig, num_processes: int, *, by_heads: bool) -> None:
    """Raise for a model that context parallelism does not support: anything but causal attention.

    Args:
        config: Configuration of the model.
        num_processes: Size of a context-parallel group.
        by_heads: Whether the variant is Ulysses (``ContextParallelGroup``).

    Raises:
        ConfigError: The model has layers without attention, attention other than by sdpa, attention dropout, rotary
            positions that depend on the sequence length, or a load-balancing loss over whole sequences.
        ConfigError: Ulysses: the number of heads is no multiple of ``num_processes``.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    reasons = [f"{kind} layers" for kind in sorted(kinds - {"full_attention", "sliding_attention"})]
    # Attention by the model's own code would be confined to the tokens of this rank.
    reasons += [] if is_replaceable_sdpa(config) else ["attention other than by sdpa"]
    reasons += ["attention dropout"] if has_attention_dropout(text) else []
    # Angles depend on the sequence length, of which each rank sees only its shard.
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
    reasons += [f"{rope} rotary positions"] if rope in ("dynamic", "longrope") else []
    reasons += ["a load-balancing loss of experts"] if getattr(text, "output_router_logits", False) else []
    remedy = "launch with accelerate_configs/fsdp2.yaml"
    if by_heads and not reasons:
        remedy = "write another `parallelism_config_sp_size`, or launch with accelerate_configs/fsdp2_cp.yaml"
        counts = {kind: getattr(text, f"num_{name}_heads", None) for kind, name in _HEADS.items()}
        # Key-value heads are repeated where there are fewer than ranks and their number divides the ranks.
        reasons += [
            f"{count} {kind}heads for {num_processes} processes"
            for kind, count in counts.items()
            if count and count % num_processes and (not kind or num_processes % count)
        ]
    if reasons:
        found = f"context parallelism does not support a {config.model_type} model with {', '.join(reasons)}"
        raise ConfigError(Problem("model_name_or_path", found, remedy))


def register_context_parallel(context: ContextParallelGroup) -> None:
    """Register the context-parallel kernel with transformers, as ``attn_implementation="context"``.

    Batches of ``shard_batch`` carry ``context_index`` and are attended to across ranks; there is no attention mask,
    ``cu_seq_lens_*`` delimit the documents. Any other batch is computed by ``sdpa`` with its attention mask.
    All-gather variant: keys and values are all-gathered, their gradients reduce-scattered. Ulysses: an all-to-all
    exchanges tokens for heads before attention, and a second one reverts it.

    Source: https://arxiv.org/abs/2309.14509 (by heads); ``torch.nn.attention.varlen.varlen_attn``;
    ``tests/models/parallel/test_context_parallel.py``.
    """
    AttentionInterface.register("context", partial(_attend, context))
    AttentionMaskInterface.register("context", sdpa_mask)


class _Gather(torch.autograd.Function):
    """All-gather of ``(T, ...)`` to ``(ranks * T, ...)``, in rank order; backward reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, context: ContextParallelGroup) -> Tensor:
        ctx.context = context
        gathered = own.new_empty(context.size * len(own), *own.shape[1:])
        distributed.all_gather_into_tensor(gathered, own.contiguous(), group=context.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient.new_empty(len(gradient) // ctx.context.size, *gradient.shape[1:])
        distributed.reduce_scatter_tensor(own, gradient.contiguous(), group=ctx.context.group)
        return own, None


class _Exchange(torch.autograd.Function):
    """All-to-all over the first dimension, ``(ranks, ...)``; backward is the same all-to-all of the gradients."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, context: ContextParallelGroup) -> Tensor:
        ctx.context = context
        received = torch.empty_like(parts)
        distributed.all_to_all_single(received, parts, group=context.group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        returned = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        distributed.all_to_all_single(returned, gradient.contiguous(), group=ctx.context.group)
        return returned, None


def _attend(
    context: ContextParallelGroup,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention of the local tokens, ``(B, heads, l, D)`` to ``(B, l, heads, D)``."""
    index: Tensor | None = settings.get("context_index")
    if index is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    num_rows, num_tokens = query.shape[0], query.shape[2]
    # Under autocast, norms leave queries and keys in float32; values have the projection's dtype.
    # (B, heads, l, D) to (B * l, heads, D).
    own, *others = [state.to(value.dtype).transpose(1, 2).flatten(0, 1) for state in (query, key, value)]
    # `index` reorders tokens from rank order to document order, which cu_seq_lens refer to.
    if context.by_heads:
        queries, keys, values = (_take_heads(state, context).index_select(0, index) for state in (own, *others))
        output = _take_tokens(attend_documents(queries, keys, values, settings), index, context)
    else:
        gathered = [_Gather.apply(state, context) for state in others]  # type: ignore[no-untyped-call]
        keys, values = (state.index_select(0, index) for state in gathered)
        output = attend_documents(own, keys, values, settings)
    return output.view(num_rows, num_tokens, *output.shape[1:]), None


def _take_heads(state: Tensor, context: ContextParallelGroup) -> Tensor:
    """Return the heads of this rank at the tokens of all ranks, in rank order: ``(ranks * T, heads / ranks, D)``."""
    # With fewer key-value heads than ranks, each head is replicated on several ranks.
    if state.shape[1] < context.size:
        state = state.repeat_interleave(context.size // state.shape[1], dim=1)
    num_tokens, num_heads, _ = state.shape
    # (ranks, T, heads / ranks, D): the first dimension is exchanged.
    parts = state.view(num_tokens, context.size, num_heads // context.size, -1).transpose(0, 1).contiguous()
    received: Tensor = _Exchange.apply(parts, context)  # type: ignore[no-untyped-call]
    return received.flatten(0, 1)


def _take_tokens(output: Tensor, index: Tensor, context: ContextParallelGroup) -> Tensor:
    """Return all heads of the local tokens, ``(T, heads, D)``, from local heads of all tokens in ``index`` order."""
    # From the order of documents back to rank order.
    ordered = torch.empty_like(output).index_copy(0, index, output)
    parts = ordered.view(context.size, -1, *output.shape[1:])
    received: Tensor = _Exchange.apply(parts, context)  # type: ignore[no-untyped-call]
    return received.transpose(0, 1).flatten(1, 2)
