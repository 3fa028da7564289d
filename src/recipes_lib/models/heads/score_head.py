"""Reward models: a backbone with a scalar head, applied at the last token of an answer."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from recipes_lib.config.schema import ModelConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.heads.loss_head import _run_backbone, spell_mask
from recipes_lib.models.inference import unwrap_adapter
from recipes_lib.models.loading import load_model_config, load_pretrained
from recipes_lib.models.parallel.zero3 import gathered_for_writing
from recipes_lib.models.saved_weights import verify_checkpoint
from recipes_lib.models.structure import verify_causal

HEAD: Final = "score"
"""Name of the head in transformers' decoders for sequence classification; also in ``modules_to_save`` of an adapter."""
_OUTPUT_PROJECTION: Final = ("lm_head.weight", "lm_head.bias", "embed_out.weight")
"""Weights of the output projection in causal language model checkpoints, ignored here; the last is GPT-NeoX's."""


class ScoreOutput(NamedTuple):
    """Scores of the answers in a batch.

    Attributes:
        scores: Unnormalised scores, ``float32 (S,)``, differentiable.
        aux_loss: Load-balancing loss, as in ``HeadOutput``.
    """

    scores: Tensor
    aux_loss: Tensor | None


def load_reward_model(
    config: ModelConfig, attn_implementation: str, *, seed: int | None, quantization: BitsAndBytesConfig | None = None
) -> PreTrainedModel:
    """Load a model in training mode with one score per sequence, in the dtype of the master weights.

    A checkpoint's head is kept. For a causal language model, the head is initialised from ``N(0, 1 / (d + 1))``, so
    that the first scores have a variance near 1 for any hidden size ``d``.

    Args:
        config: Name, revision and dtype of the model.
        attn_implementation: Attention kernel from ``choose_attention``.
        seed: Seed of a new head, which is the same on every process; ``None`` if the checkpoint must contain one.
        quantization: Quantisation of the backbone, as for ``load_causal_lm``; the head is never quantised.

    Raises:
        ConfigError: As ``load_causal_lm``; or the checkpoint has no head and ``seed`` is ``None``. An encoder such as
            ModernBERT is not supported: its score is not that of the last token.

    Source: Stiennon et al. 2020 (initialisation, as kept by Huang et al. 2024);
        ``tests/models/heads/test_score_head.py``.
    """
    options = _list_options(needs_head=seed is None)
    model, missing = load_pretrained(
        AutoModelForSequenceClassification, config, attn_implementation, quantization, **options
    )
    if missing:
        assert seed is not None
        head = _find_head(model)
        if head.weight.is_meta:
            # With FSDP's memory-efficient loading, only local rank 0 has weights; FSDP2 broadcasts them later.
            head.to_empty(device=model.device)
        with torch.no_grad(), gathered_for_writing(head.weight):
            # A generator on the CPU gives the same weights on every process and device.
            weight = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed))
            head.weight.copy_(weight / math.sqrt(head.in_features + 1))
    return model


def verify_reward_checkpoint(config: ModelConfig, *, needs_head: bool) -> None:
    """Verify the tensors of a local checkpoint by ``verify_checkpoint``; with ``needs_head``, the head is one of them.

    Raises:
        ConfigError: As ``verify_checkpoint`` and ``verify_causal``.
    """
    verify_causal("model_name_or_path", load_model_config(config)[0])
    verify_checkpoint(config, AutoModelForSequenceClassification, **_list_options(needs_head=needs_head))


def _list_options(*, needs_head: bool) -> dict[str, Any]:
    may_lack = [] if needs_head else [f"{HEAD}.weight"]
    return {"may_lack": may_lack, "may_hold": _OUTPUT_PROJECTION, "num_labels": 1}


def set_pad_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, terminators: Iterable[int]) -> None:
    """Set the padding token so that transformers' forward pass reads the score at the same token as training.

    It reads the score at the last token other than ``config.pad_token_id``, whatever the attention mask. A padding
    token that also ends answers would shift this position back by one.

    Args:
        model: Reward model, with or without a PEFT wrapper.
        tokenizer: Tokenizer from ``load_tokenizer``, saved with the model.
        terminators: Ids of the tokens that end answers, as in ``set_stop_tokens``.

    Raises:
        ConfigError: The padding token also ends answers, as in tokenizers that have no padding token of their own.

    Source: transformers' ``GenericForSequenceClassification.forward``; ``tests/models/heads/test_score_head.py``.
    """
    ends = {tokenizer.eos_token_id, *terminators}
    # load_tokenizer falls back to the EOS token, which is caught here.
    if tokenizer.pad_token_id in ends:
        found = f"{tokenizer.pad_token!r} pads and ends answers, so transformers would read the score before the end"
        raise ConfigError(Problem("pad_token", found, _advise_pad_token(tokenizer, ends)))
    config = unwrap_adapter(model).config
    # Both, because multimodal models read it from their text configuration.
    config.pad_token_id = config.get_text_config().pad_token_id = tokenizer.pad_token_id


def add_score_head(model: PreTrainedModel) -> None:
    """Extend the forward pass of ``model`` by a call that returns a ``ScoreOutput``; call it before adding adapters.

    ``model(input_ids=..., position_ids=..., last_positions=...)`` scores the answers of a batch. ``last_positions`` are
    ``int64 (S,)`` indices into the flattened ``(R * L)`` positions, of the last token of each answer.
    ``attention_mask`` is ``bool (R, 1, L, L)``, ``True`` where a query (third axis) attends to a key (fourth), the
    diagonal included; without it, documents are separated by ``position_ids``, and padding is at the ends of rows.

    Calls without ``last_positions`` are unchanged. The head is applied in ``float32``, also under autocast, since the
    difference of two scores has fewer significant digits than either, and only at ``last_positions``.

    Raises:
        ConfigError: The model has no head ``score`` that is an ``nn.Linear`` with one output.

    Source: transformers' ``GenericForSequenceClassification.forward``; ``tests/models/heads/test_score_head.py``.
    """
    head = _find_head(model)
    original_forward = cast(types.MethodType, model.forward).__func__

    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, last_positions: Tensor | None = None, **kwargs: Any) -> Any:
        if last_positions is None:
            return original_forward(self, *args, **kwargs)
        return _compute_scores(self, *args, last_positions=last_positions, **kwargs)

    # On the instance: ``nn.Module.__call__`` runs it inside the module's hooks, and PEFT copies it with the module.
    vars(model)["forward"] = types.MethodType(forward, model)
    vars(head)["forward"] = types.MethodType(_project, head)


def _find_head(model: Any) -> nn.Linear:
    head = getattr(model, HEAD, None)
    if isinstance(head, nn.Linear) and head.out_features == 1 and head.weight.is_floating_point():
        return head
    found = f"{type(model).__name__} has no head `{HEAD}` that is an nn.Linear with one output"
    remedy = "choose a causal language model; an adapter comes after the head"
    raise ConfigError(Problem("model_name_or_path", found, remedy))


def _compute_scores(
    model: Any, *, last_positions: Tensor, attention_mask: Tensor | None = None, **inputs: Any
) -> ScoreOutput:
    if attention_mask is not None:
        inputs["attention_mask"] = spell_mask(model, attention_mask)
    # PEFT's wrapper passes all of its arguments, None for those not given, and the backbone does not accept them all.
    inputs = {name: value for name, value in inputs.items() if value is not None}
    hidden, aux_loss = _run_backbone(model, inputs)
    # Through a call of the head: its hooks gather the weight (FSDP2, ZeRO-3), and PEFT substitutes the trained copy.
    (scores,) = getattr(model, HEAD)(hidden.flatten(0, 1).index_select(0, last_positions), in_float32=True)
    return ScoreOutput(scores, aux_loss)


def _project(head: nn.Linear, hidden: Tensor, in_float32: bool = False) -> Any:
    """``forward`` of the head; with ``in_float32``, scores ``(S,)`` in a tuple, which hooks do not cast to bfloat16."""
    if not in_float32:
        return type(head).forward(head, hidden)
    bias = None if head.bias is None else head.bias.float()
    with torch.autocast(hidden.device.type, enabled=False):
        # clone: FSDP2 attaches its backward hooks to the output, and an in-place write to a view would drop them.
        return (nn.functional.linear(hidden.float(), head.weight.float(), bias).squeeze(-1).clone(),)


def _advise_pad_token(tokenizer: PreTrainedTokenizerBase, ends: set[int]) -> str:
    template = str(tokenizer.chat_template or "")
    special = {str(token): at for at, token in tokenizer.added_tokens_decoder.items() if token.special}
    unused = [
        token for token, at in special.items() if at not in {*ends, tokenizer.bos_token_id} and token not in template
    ]
    if unused:
        names = sorted(unused, key=lambda token: ("pad" not in token, special[token]))[:3]
        return f"set pad_token to a special token that occurs in no text, such as {' or '.join(names)}"
    return (
        "add one: tokenizer.add_special_tokens({'pad_token': '<|pad|>'}), "
        "model.resize_token_embeddings(len(tokenizer)), save both, and name that folder"
    )
