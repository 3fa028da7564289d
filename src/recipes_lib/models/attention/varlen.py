"""Variable-length attention over packed documents, with torch's flash attention kernel."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_VARLEN_TAKES_ENABLE_GQA: Final = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether ``varlen_attn`` takes a flag for grouped queries. That of torch 2.11 does not, and its kernel groups them by
itself; remove the flag of this module once a later torch is the lowest supported version."""


def register_varlen() -> None:
    """Register ``attn_implementation="varlen"`` with transformers.

    A batch of one row with ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k`` is computed per
    document; on a CPU, where torch has no such kernel, with one sdpa call per document. With ``shared_prompt_index``
    (``build_shared_prompt_bounds``), the documents are the parts of pairs, and an answer also attends to its prompt.
    Everything else, such as padded batches and generation, is computed by ``sdpa``.

    Source: ``torch.nn.attention.varlen.varlen_attn``; ``tests/models/attention/test_varlen.py``.
    """
    AttentionInterface.register("varlen", _varlen_attention)
    AttentionMaskInterface.register("varlen", _varlen_mask)


def takes_empty_mask(implementation: str, *, is_flat: bool = True) -> bool:
    """Return whether an attention kernel treats an empty mask as causal attention within each document.

    With a four-dimensional mask, transformers does not search the positions for documents, which would synchronise host
    and device in each forward pass. Kernels that would not ignore the mask are wrapped to drop it.

    Args:
        implementation: Attention kernel.
        is_flat: Whether document bounds are passed with the row; otherwise, each row is one document.

    Source: transformers ``masking_utils._preprocess_mask_arguments``; ``tests/models/attention/test_varlen.py``.
    """
    if implementation == "varlen":
        return is_flat
    if "flash" not in implementation and (is_flat or implementation != "sdpa"):
        return False
    attend = ALL_ATTENTION_FUNCTIONS[implementation]
    if not getattr(attend, "drops_empty_mask", False):
        # A named parameter, because some models, such as Doge, pass the mask by keyword.
        @functools.wraps(attend)
        def attend_without(
            module: torch.nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            **settings: Any,
        ) -> Any:
            mask = None if attention_mask is not None and not attention_mask.numel() else attention_mask
            return attend(module, query, key, value, mask, **settings)

        attend_without.drops_empty_mask = True  # type: ignore[attr-defined]
        AttentionInterface.register(implementation, attend_without)
    return True


def _varlen_mask(
    *, batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **settings: Any
) -> Tensor | None:
    """Return the mask of sdpa; for a packed row an empty mask, since its bounds are passed separately."""
    # transformers disables the is_causal shortcut when it has found several documents in the positions.
    is_packed = not settings.get("allow_is_causal_skip", True) and not settings.get("use_vmap", False)
    if attention_mask is None and is_packed and batch_size == 1 and q_length == kv_length:
        return torch.empty(0, dtype=torch.bool, device=settings["device"])
    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **settings
    )


def _varlen_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Causal attention within each document of a row, ``(1, heads, T, D)`` to ``(1, T, heads, D)``; otherwise sdpa."""
    if settings.get("cu_seq_lens_q") is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise ValueError("attn_implementation: varlen needs cu_seq_lens_q for a row of several documents")
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    # Under autocast, norms leave queries and keys in float32; values have the projection's dtype.
    states = (query.to(value.dtype), key.to(value.dtype), value)
    # (1, heads, T, D) to (T, heads, D). squeeze: the backward pass of an index would allocate and copy a tensor.
    query, key, value = (state.squeeze(0).transpose(0, 1) for state in states)
    if (index := settings.get("shared_prompt_index")) is not None:
        # ``index_select``: its backward is ``index_add``, that of ``key[index]`` sorts first, in every layer.
        key, value = (state.index_select(0, index) for state in (key, value))
    return attend_documents(query, key, value, settings)[None], None


def attend_documents(query: Tensor, key: Tensor, value: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Causal attention within each packed document; ``(T, heads, D)``, as ``query``.

    If a document has more keys than queries, its queries are its last tokens.

    Args:
        query: Queries of concatenated documents, ``(T, heads, D)``.
        key: Keys, ``(S, key-value heads, D)``.
        value: Values, ``(S, key-value heads, D)``.
        settings: ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``; optionally ``scaling``
            and ``sliding_window``, the number of keys that a query attends to, including its own position.

    Raises:
        ValueError: There is dropout, a soft cap, sinks or a position bias, which the kernel does not have.

    Source: ``torch.nn.attention.varlen.varlen_attn``; on a CPU, where torch has none, one sdpa call per document.
    """
    if settings.get("dropout") or any(settings.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise ValueError("attn_implementation: varlen has no dropout, softcap, sinks or position bias")
    window: int | None = settings.get("sliding_window")
    scale = query.shape[-1] ** -0.5 if settings.get("scaling") is None else settings["scaling"]
    options: dict[str, Any] = {"scale": scale}
    is_grouped = query.shape[1] != key.shape[1]
    if query.is_cuda:
        bounds = (settings[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
        if _VARLEN_TAKES_ENABLE_GQA:
            options["enable_gqa"] = is_grouped
        # (left, right) numbers of keys beside the query's own position; -1 is unlimited.
        reach = (-1 if window is None else window - 1, 0)
        width = value.shape[-1]
        query, key, value = _pad_heads(query, key, value)
        output = varlen_attn(query, key, value, *bounds, window_size=reach, **options)
        assert isinstance(output, Tensor)
        return output[..., :width]
    num_queries, num_keys = (settings[f"cu_seq_lens_{which}"].diff().tolist() for which in "qk")
    outputs = []
    for parts in zip(*map(torch.split, (query, key, value), (num_queries, num_keys, num_keys)), strict=True):
        own, keys, values = (part.transpose(0, 1)[None] for part in parts)
        length, before, mask = own.shape[2], keys.shape[2] - own.shape[2], None
        # is_causal aligns the first query with the first key: correct only for equal numbers.
        if before or (window is not None and window < length):
            # True where query i attends to key j: j <= i + before, and j > i + before - window.
            mask = torch.ones(length, before + length, dtype=torch.bool, device=own.device).tril(before)
            mask = mask if window is None else mask.triu(1 + before - window)
        output = functional.scaled_dot_product_attention(
            own, keys, values, mask, is_causal=mask is None, enable_gqa=is_grouped, **options
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def _pad_heads(*states: Tensor) -> list[Tensor]:
    """Pad queries, keys and values with zeros to one head dimension, a multiple of 8, as the CUDA kernel requires.

    Zeros change neither the products of queries and keys nor the other dimensions of the output.
    """
    dim = max(state.shape[-1] for state in states)
    dim += -dim % 8
    return [state if state.shape[-1] == dim else functional.pad(state, (0, dim - state.shape[-1])) for state in states]
