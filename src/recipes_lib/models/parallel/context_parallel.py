"""Context parallelism: sequences split over ranks, attention over all tokens of a document (all-gather or Ulysses)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, distributed
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from recipes_lib.errors import ConfigError, Problem

_HEADS: Final = {"": "attention", "key-value ": "key_value"}


@dataclass(frozen=True, slots=True)
class ContextShare:
    """The processes that share rows, and this one among them.

    Attributes:
        group: They.
        rank: Index of this one.
        size: Their number.
        data_group: One of each such group, this one among them.
        by_heads: Whether each of them attends from all tokens of a row with some of the heads; otherwise from its own
            tokens with all of them.
    """

    group: distributed.ProcessGroup
    rank: int
    size: int
    data_group: distributed.ProcessGroup
    by_heads: bool


def verify_can_share_rows(config: PreTrainedConfig, num_processes: int, *, by_heads: bool) -> None:
    """Refuse a model that does not attend from each token to all before it in its document.

    Args:
        config: Of the model.
        num_processes: That share a row.
        by_heads: As ``ContextShare``.

    Raises:
        ConfigError: It has layers of another kind, or what is computed over a whole row besides.
        ConfigError: Its heads cannot be dealt out to the processes.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if getattr(text, "sliding_window", None) and not getattr(text, "layer_types", None):
        kinds.add("sliding_attention")
    reasons = [f"{kind} layers" for kind in sorted(kinds - {"full_attention"})]
    reasons += ["capped attention"] if getattr(text, "attn_logit_softcapping", None) is not None else []
    reasons += ["attention dropout"] if getattr(text, "attention_dropout", 0.0) else []
    # Its angles follow from the longest row, of which each process sees but a part.
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
    reasons += [f"{rope} rotary positions"] if rope in ("dynamic", "longrope") else []
    reasons += ["a balance of experts"] if getattr(text, "output_router_logits", False) else []
    remedy = "launch with accelerate_configs/fsdp2.yaml"
    if by_heads and not reasons:
        remedy = "write another `parallelism_config_sp_size`, or launch with accelerate_configs/fsdp2_cp.yaml"
        counts = {kind: getattr(text, f"num_{name}_heads", None) for kind, name in _HEADS.items()}
        # Fewer key-value heads than processes are repeated, if each then has one.
        reasons += [
            f"{count} {kind}heads for {num_processes} processes"
            for kind, count in counts.items()
            if count and count % num_processes and (not kind or num_processes % count)
        ]
    if reasons:
        found = f"a {config.model_type} model with {', '.join(reasons)} cannot share a row over processes"
        raise ConfigError(Problem("model_name_or_path", found, remedy))


def register_context(share: ContextShare) -> None:
    """Make ``attn_implementation="context"`` known to transformers: over rows that ``cut_batch`` cut, or as ``sdpa``.

    Keys and values are gathered from the processes that share a row, and their gradients summed and shared out. By
    heads the processes exchange tokens for heads before they attend, and back behind it.

    Source: https://arxiv.org/abs/2309.14509 (by heads); ``torch.nn.attention.varlen.varlen_attn``;
    ``tests/models/parallel/test_context_parallel.py``.
    """
    AttentionInterface.register("context", partial(_attend, share))
    AttentionMaskInterface.register("context", sdpa_mask)


class _Gather(torch.autograd.Function):
    """The tokens of all processes, one process behind the other; their gradients back, summed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, share: ContextShare) -> Tensor:
        ctx.share = share
        gathered = own.new_empty(share.size * len(own), *own.shape[1:])
        distributed.all_gather_into_tensor(gathered, own.contiguous(), group=share.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient.new_empty(len(gradient) // ctx.share.size, *gradient.shape[1:])
        distributed.reduce_scatter_tensor(own, gradient.contiguous(), group=ctx.share.group)
        return own, None


class _Exchange(torch.autograd.Function):
    """A part for each process, ``(processes, ...)``, for what they have for this one; gradients return the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, share: ContextShare) -> Tensor:
        ctx.share = share
        received = torch.empty_like(parts)
        distributed.all_to_all_single(received, parts, group=share.group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        returned = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        distributed.all_to_all_single(returned, gradient.contiguous(), group=ctx.share.group)
        return returned, None


def _attend(
    share: ContextShare,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention of this process's tokens, ``(B, heads, l, D)`` to ``(B, l, heads, D)``."""
    index: Tensor | None = settings.get("context_index")
    if index is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
        return output, None
    num_rows, num_tokens = query.shape[0], query.shape[2]
    # Norms leave queries and keys in float32 under autocast; values come straight from a projection.
    own, *others = [state.to(value.dtype).transpose(1, 2).flatten(0, 1) for state in (query, key, value)]
    attend = _attend_on_cuda if value.is_cuda else _attend_by_run
    if share.by_heads:
        queries, keys, values = (_take_heads(state, share)[index] for state in (own, *others))
        output = _take_tokens(attend(queries, keys, values, settings), index, share)
    else:
        keys, values = (_Gather.apply(state, share)[index] for state in others)  # type: ignore[no-untyped-call]
        output = attend(own, keys, values, settings)
    return output.view(num_rows, num_tokens, *output.shape[1:]), None


def _take_heads(state: Tensor, share: ContextShare) -> Tensor:
    """All tokens of the processes, one process behind the other, with this one's heads: ``(n * T, heads / n, D)``."""
    if state.shape[1] < share.size:
        state = state.repeat_interleave(share.size // state.shape[1], dim=1)
    num_tokens, num_heads, _ = state.shape
    parts = state.view(num_tokens, share.size, num_heads // share.size, -1).transpose(0, 1).contiguous()
    received: Tensor = _Exchange.apply(parts, share)  # type: ignore[no-untyped-call]
    return received.flatten(0, 1)


def _take_tokens(output: Tensor, index: Tensor, share: ContextShare) -> Tensor:
    """This process's tokens with all heads, of all in the order of ``index`` with some: ``(T, heads, D)``."""
    ordered = torch.empty_like(output).index_copy(0, index, output)
    parts = ordered.view(share.size, -1, *output.shape[1:])
    received: Tensor = _Exchange.apply(parts, share)  # type: ignore[no-untyped-call]
    return received.transpose(0, 1).flatten(1, 2)


def _attend_on_cuda(query: Tensor, key: Tensor, value: Tensor, settings: Mapping[str, Any]) -> Tensor:
    # Where there are more keys than queries, the last of both are the same token.
    output = varlen_attn(
        query,
        key,
        value,
        settings["cu_seq_lens_q"],
        settings["cu_seq_lens_k"],
        settings["max_length_q"],
        settings["max_length_k"],
        scale=settings.get("scaling"),
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output


def _attend_by_run(query: Tensor, key: Tensor, value: Tensor, settings: Mapping[str, Any]) -> Tensor:
    num_queries, num_keys = (settings[f"cu_seq_lens_{which}"].diff().tolist() for which in "qk")
    parts = zip(*map(torch.split, (query, key, value), (num_queries, num_keys, num_keys)), strict=True)
    outputs = []
    for own, keys, values in parts:
        before = len(keys) - len(own)
        whole = torch.ones(len(own), len(keys), dtype=torch.bool, device=own.device)
        mask = whole.tril(before) if before else None
        queries, keys, values = (state.transpose(0, 1)[None] for state in (own, keys, values))
        gqa = queries.shape[1] != keys.shape[1]
        output = functional.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=mask is None, scale=settings.get("scaling"), enable_gqa=gqa
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)
