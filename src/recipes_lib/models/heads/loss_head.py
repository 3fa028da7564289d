"""Loss heads: causal language models that return loss or token log-probabilities without full-batch logits."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Unpack, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from recipes_lib.errors import ConfigError, Problem, list_first
from recipes_lib.losses.distillation import (
    DistillationSums,
    DistillationTargets,
    Objective,
    TeacherHead,
    TopLogps,
    compute_distillation,
)
from recipes_lib.losses.next_token import (
    TokenLogps,
    TokenSums,
    compute_cross_entropy,
    compute_token_logps,
    index_targets,
)
from recipes_lib.losses.projection import LogitTransform
from recipes_lib.models.attention.varlen import takes_empty_mask
from recipes_lib.models.inference import evaluating, find_device, find_rounding_error, kernel_precision, unwrap_adapter
from recipes_lib.models.parallel.tensor_parallel import find_vocabulary_shard, project_vocabulary_parallel
from recipes_lib.models.structure import find_logit_scale, find_sliding_window, find_softcap, reads_mask


class HeadOutput(NamedTuple):
    """Result of ``states_at`` or ``head`` (``add_loss_head``).

    Attributes:
        result: Hidden states, ``(N, D)``, differentiable; or the return value of ``head``.
        aux_loss: Load-balancing loss of a mixture of experts, before ``router_aux_loss_coef``; ``None`` unless the
            model's ``has_router_loss`` is set, or without that attribute ``output_router_logits`` of its configuration.
    """

    result: Any
    aux_loss: Tensor | None


def add_loss_head(model: PreTrainedModel) -> None:
    """Extend the forward pass of ``model`` by calls that return a loss, log-probabilities or hidden states.

    - ``model(input_ids=..., position_ids=..., labels=..., loss_head=True)`` returns a ``TokenSums``. ``labels``
      are ``int64 (B, L)``, unshifted, negative where there is no target. With ``targets``, ``int64 (B, L)``, each
      hidden state is scored on the target at its own position, as under context parallelism (``shard_batch``).
      ``target_positions``, ``int64 (N,)``, are the indices of targets in the flattened ``targets``, otherwise in the
      flattened ``labels[:, 1:]``; with them the host does not wait for the device to find them.
    - ``model(input_ids=..., position_ids=..., predictors=..., targets=..., token_logps=True)`` returns a
      ``TokenLogps``. ``predictors`` are ``int64 (N,)`` indices into the flattened ``(B * L)`` positions,
      ``targets`` the ``int64 (N,)`` token ids predicted there; several targets may share a predictor, such as the first
      tokens of two answers. ``attention_mask`` is ``bool (B, 1, L, L)``, ``True`` where a query (third axis) attends to
      a key (fourth), the diagonal included; without it, documents are separated by ``position_ids``.
      ``with_statistics=True`` adds the statistics of ``compute_token_logps``; ``temperature`` divides the logits.
    - ``model(input_ids=..., position_ids=..., states_at=...)`` returns a ``HeadOutput`` of the last hidden states at
      ``int64 (N,)`` indices into the flattened positions, for an external head.
    - ``model(input_ids=..., position_ids=..., head=function)`` returns a ``HeadOutput`` of ``function(hidden, weight,
      bias=..., logit_scale=..., softcap=...)``, called with the last hidden states, ``(B, L, D)``.

    All of them take ``one_document_a_row=True`` for rows of a single document, padded at the end at most, for which
    transformers need not search the positions for documents, and ``token_mask``, ``bool (B, L)``, ``True`` for real
    tokens, which excludes padding from the load-balancing loss of a mixture of experts. Nothing else needs a mask,
    since no document attends to padding.

    Other calls, and so generation, are unchanged, but without the load-balancing loss of a mixture of experts. A PEFT
    wrapper may be added before or after; before, if it trains tied embeddings fully.

    The results are computed inside the forward call of the output projection, so that FSDP2 and ZeRO-3 gather its
    weight and reduce its gradient by the same hooks as for logits.

    Raises:
        ConfigError: The output projection does not compute as ``nn.Linear``, or its weights are quantised.

    Source: the model's own ``forward``; ``tests/parity/test_loss_head.py``.
    """
    model = unwrap_adapter(model)
    projections = _find_projections(model)
    for projection in projections:
        # A subclass may compute more, such as Dory's learned scale of each logit, which is 1 in a new model.
        is_linear = getattr(type(projection), "forward", None) is nn.Linear.forward
        if not (is_linear and projection.weight.is_floating_point()):
            kind = f"{type(projection).__module__.partition('.')[0]}.{type(projection).__name__}"
            found = f"{type(model).__name__} projects to the vocabulary by {kind}, not by nn.Linear"
            remedy = "choose a causal language model with an lm_head that is neither quantised nor under an adapter"
            raise ConfigError(Problem("model_name_or_path", found, remedy))
    # The function rather than the bound method, so that a deep copy of the model calls its own forward.
    original_forward = cast(types.MethodType, model.forward).__func__

    # ``wraps``: generate() validates its arguments against the signature of forward.
    @functools.wraps(type(model).forward)
    def forward(
        self: PreTrainedModel,
        *args: Any,
        loss_head: bool = False,
        token_logps: bool = False,
        states_at: Tensor | None = None,
        head: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        if loss_head:
            return _compute_sums(self, *args, **kwargs)
        if token_logps:
            return _compute_logps(self, *args, **kwargs)
        if states_at is not None:
            hidden, aux_loss = _run_backbone(self, kwargs)
            return HeadOutput(hidden.flatten(0, 1).index_select(0, states_at), aux_loss)
        if head is not None:
            hidden, aux_loss = _run_backbone(self, kwargs)
            return HeadOutput(_score(self, head, hidden), aux_loss)
        return original_forward(self, *args, **{**_without_router_logits(self), **kwargs})

    # On the instance: ``nn.Module.__call__`` runs it inside the module's hooks, and PEFT copies it with the module.
    vars(model)["forward"] = types.MethodType(forward, model)
    for projection in projections:
        vars(projection)["forward"] = types.MethodType(_project_or_score, projection)


def verify_loss_head(model: Any) -> None:
    """Compare the loss head with the model's own loss on eight tokens, and verify that the model is causal.

    Args:
        model: Model with a loss head; with sharded weights, this is a collective that every process must enter.

    Raises:
        ConfigError: The model's own loss is not finite, or differs from that of the loss head, because the model
            transforms hidden states or logits in an unsupported way; or logits depend on later tokens.
    """
    base = unwrap_adapter(model)
    # Modulo the vocabulary size, for tiny test models.
    input_ids = torch.arange(1, 9, device=find_device(model))[None] % base.config.get_text_config().vocab_size
    with evaluating(model), kernel_precision(model):
        own = model(input_ids=input_ids, labels=input_ids, use_cache=False)
        # The last token is replaced: logits of a causal model before it must not change.
        changed = torch.cat([input_ids[:, :-1], input_ids[:, :1]], dim=1)
        ahead = model(input_ids=changed, use_cache=False).logits
        # The scales of 8-bit products and the batches of experts depend on all tokens, so that changing the last token
        # changes the rounding of earlier logits.
        is_exact = find_rounding_error(own.logits) < 1e-6 and not getattr(base, "is_quantized", False)
        rounding = (1e-4 if is_exact else 0.1) * own.logits.abs().max()
    if not own.loss.isfinite():  # Otherwise reported as a difference, since NaN is close to nothing.
        raise ConfigError(Problem("model_name_or_path", *_explain_loss(model, float(own.loss))))
    # A bidirectional model would learn to copy the next token from its input, with a loss near 0.
    if ((own.logits - ahead)[:, :-1].abs().max() > rounding).item():
        found = "this model is not causal: a token changes the logits of those before it"
        raise ConfigError(Problem("model_name_or_path", found, "choose a causal language model"))
    # After the others: experts that are not causal (Doge) have no load-balancing loss of this form.
    with evaluating(model), kernel_precision(model):
        sums = model(input_ids=input_ids, labels=input_ids, loss_head=True)
    ours = sums.nll_sum / sums.num_targets
    # In half precision, the model's own loss is computed from rounded logits.
    tolerance = 1e-5 if own.logits.dtype == torch.float32 else 1e-2
    if not torch.isclose(ours, own.loss.float(), rtol=tolerance, atol=tolerance):
        found = f"on the same tokens this model's own loss is {own.loss:.6f} and its chunked loss is {ours:.6f}"
        remedy = "its architecture transforms hidden states or logits in an unsupported way; choose another model"
        raise ConfigError(Problem("model_name_or_path", found, remedy))


def _explain_loss(model: Any, loss: float) -> tuple[str, str]:
    """Return why a model's own loss is not finite, and the remedy."""
    if broken := [name for name, value in model.named_parameters() if not value.detach().isfinite().all()]:
        return f"weights are NaN or infinite: {list_first(broken)}", "name an earlier checkpoint, or another model"
    return f"its loss on eight tokens is {loss}, though its weights are finite", "load it with another `dtype`"


def score_beside_teacher(
    student: Any,
    teacher: Any,
    inputs: Mapping[str, Any],
    labels: Tensor,
    objective: Objective,
    positions: Tensor | None = None,
) -> HeadOutput:
    """Run student and teacher on a batch and sum the distillation objective over its targets.

    The student runs inside the call of the teacher's output projection, so that FSDP2 or ZeRO-3 has gathered the output
    embeddings of both while the logits of a chunk are computed. No tensor of the teacher is saved for backward.

    Args:
        student: Model with a loss head.
        teacher: Frozen model with a loss head, whose vocabulary is that of the student without padding rows.
        inputs: ``input_ids``, ``position_ids`` and other arguments of both models.
        labels: Unshifted labels, ``int64 (B, L)``; negative where there is no target.
        objective: Distillation objective.
        positions: Indices of the targets in the flattened ``labels[:, 1:]``, ``int64 (N,)``. Default: they are
            searched, for which the host waits for the device.

    Returns:
        Output with a ``DistillationSums`` as ``result``.

    Source: ``tests/distillation/test_distillation.py``.
    """
    positions = index_targets(labels[:, 1:]) if positions is None else positions
    outputs: list[HeadOutput] = []

    def run_student(hidden: Tensor, weight: Tensor, **options: Unpack[LogitTransform]) -> None:
        head = TeacherHead(pick_predictors(hidden, positions), weight, options)
        # Not returned through the teacher: FSDP2 would register backward hooks on differentiable outputs.
        outputs.append(score_beside_record(student, head, inputs, labels, objective, positions))

    teacher(**inputs, head=run_student)
    return outputs[0]


def score_beside_record(
    student: Any,
    teacher: TeacherHead | TopLogps | Tensor,
    inputs: Mapping[str, Any],
    labels: Tensor,
    objective: Objective,
    positions: Tensor,
) -> HeadOutput:
    """As ``score_beside_teacher``, with given outputs of the teacher at the targets, row by row.

    A tensor has the hidden states of a teacher whose output embedding is the student's, ``(N, D)``.
    """

    def score(hidden: Tensor, weight: Tensor, **options: Unpack[LogitTransform]) -> DistillationSums:
        outputs = TeacherHead(teacher, weight.detach(), options) if isinstance(teacher, Tensor) else teacher
        supervision = DistillationTargets(labels[:, 1:].flatten()[positions], outputs, objective)
        predictors = pick_predictors(hidden, positions)
        sums: DistillationSums = compute_distillation(predictors, weight, supervision, **options)
        return sums

    output: HeadOutput = student(**inputs, head=score)
    return output


def pick_predictors(hidden: Tensor, positions: Tensor) -> Tensor:
    """Return the hidden states that predict the targets, ``(N, D)``.

    Args:
        hidden: Hidden states of whole rows, ``(B, L, D)``.
        positions: Indices of the targets in the flattened ``labels[:, 1:]``, ``int64 (N,)``.
    """
    # From indices into (B, L - 1) to indices into (B, L): one more per preceding row.
    return hidden.flatten(0, 1).index_select(0, positions + positions // (hidden.shape[1] - 1))


def _find_projections(model: Any) -> list[Any]:
    """Return the output projection; if PEFT trains it fully, the original and each copy.

    PEFT's wrapper passes all arguments to the active copy or, with disabled adapters, to the original.
    """
    projection = model.get_output_embeddings()
    copies = getattr(projection, "modules_to_save", None)
    return [projection] if copies is None else [projection.original_module, *copies.values()]


def _project_or_score(
    projection: nn.Linear, hidden: Tensor, score: Callable[..., Any] | None = None, *args: Any, **options: Any
) -> Any:
    """``forward`` of the output projection: logits, or the result of ``score(hidden, weight, ...)``."""
    weight: Any = projection.weight
    bias: Any = projection.bias
    if isinstance(weight, DTensor):
        # Tensor parallelism: the rows of the weight, (V / ranks, D), are sharded. Cross-entropy reduces over shards;
        # other functions get the gathered weight.
        if score is None:
            return project_vocabulary_parallel(hidden, weight, bias)
        if score is compute_cross_entropy:
            options["shard"] = find_vocabulary_shard(weight)
            weight, bias = (None if part is None else part.to_local() for part in (weight, bias))
        else:
            weight, bias = (None if part is None else part.full_tensor() for part in (weight, bias))
    elif score is None:
        return type(projection).forward(projection, hidden)
    return score(hidden, weight, *args, bias=bias, **options)


def _compute_sums(
    model: Any,
    *,
    labels: Tensor,
    targets: Tensor | None = None,
    target_positions: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **inputs: Any,
) -> TokenSums:
    # With a mask or a cache, transformers does not derive the isolation of packed documents from position_ids. Padding
    # needs no mask: it is at the end of a row, where causal attention does not reach it.
    if attention_mask is not None:
        raise ValueError("the loss head takes no attention_mask: position_ids separate documents")
    num_predictors = labels.shape[1] - 1
    if targets is not None:
        # Context parallelism: its attention takes cu_seq_lens, and the empty mask keeps transformers from building one.
        inputs["attention_mask"] = _build_empty_mask(labels.device)
    elif _can_cut(model, num_predictors, inputs):
        inputs = {name: part[:, :num_predictors] for name, part in inputs.items() if name != "use_cache"}
    hidden, aux_loss = _run_backbone(model, inputs)
    if targets is None:
        targets = labels[:, 1:]
        if target_positions is None:
            hidden = hidden[:, :num_predictors]
        elif hidden.shape[1] > num_predictors:
            # Index into full rows (B, L, D): the backward pass of the slice [:, :-1] would copy the gradient.
            targets = labels.roll(-1, 1)
            if len(labels) > 1:
                target_positions = target_positions + target_positions // num_predictors
    sums: TokenSums = _score(model, compute_cross_entropy, hidden, targets, positions=target_positions)
    return sums._replace(aux_loss=aux_loss)


def _build_empty_mask(device: torch.device) -> Tensor:
    """Build an empty four-dimensional mask, which transformers passes to the attention kernel unchanged.

    Without it, transformers searches position_ids for packed documents, which synchronises with the host, and under
    torch.compile builds a T x T mask. The kernel gets the document boundaries separately.
    """
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)


def _can_cut(model: Any, num_predictors: int, inputs: Mapping[str, Any]) -> bool:
    """Return whether to omit the last token of each row, which predicts nothing.

    Kernels are slower at lengths that are not multiples of 8. Not with document boundaries or a load-balancing loss,
    which include the last token.
    """
    is_round = num_predictors > 0 and num_predictors % 8 == 0
    # Other inputs may have no dimension of length L to cut.
    known = {"input_ids", "position_ids", "token_mask", "use_cache"}
    return is_round and inputs.keys() <= known and not _has_router_loss(model)


def _compute_logps(
    model: Any,
    *,
    predictors: Tensor,
    targets: Tensor,
    attention_mask: Tensor | None = None,
    with_statistics: bool = False,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    **inputs: Any,
) -> TokenLogps:
    if attention_mask is not None:
        inputs["attention_mask"] = spell_mask(model, attention_mask)
    hidden, aux_loss = _run_backbone(model, inputs)
    # (B, L, D) to (N, D): only the predictors are projected to the vocabulary.
    chosen = hidden.flatten(0, 1).index_select(0, predictors)
    options: Any = {"with_statistics": with_statistics, "temperature": temperature, "chunk_size": chunk_size}
    scored: TokenLogps = _score(model, compute_token_logps, chosen, targets, **options)
    return scored._replace(aux_loss=aux_loss)


def spell_mask(model: Any, visible: Tensor) -> Tensor:
    """Convert a mask to the format of the attention kernel, to which transformers passes it unchanged.

    It replaces the model's own mask, and so a sliding window: no visible key may be further back than the window.

    Args:
        model: Model with ``sdpa`` or ``eager`` attention.
        visible: ``bool (B, 1, L, L)``, True where a query attends to a key.

    Raises:
        ValueError: The mask has another shape or dtype, or the kernel takes none.

    Source: transformers' ``masking_utils._preprocess_mask_arguments``, which keeps a four-dimensional mask.
    """
    kernel = model.config.get_text_config()._attn_implementation
    if visible.ndim != 4 or visible.dtype != torch.bool:
        raise ValueError(f"attention_mask must be bool (B, 1, L, L), not {visible.dtype} {tuple(visible.shape)}")
    if kernel == "sdpa":
        return visible
    if kernel == "eager":
        # Eager attention adds the mask to the scores; -inf would give NaN for fully masked rows.
        return torch.zeros_like(visible, dtype=model.dtype).masked_fill_(~visible, torch.finfo(model.dtype).min)
    raise ValueError(f"{kernel} takes no attention_mask; use sdpa or eager")


def _has_router_loss(model: Any) -> bool:
    """Return whether to compute the load-balancing loss: as set for training, otherwise by the configuration."""
    by_config = getattr(model.config.get_text_config(), "output_router_logits", False)
    return bool(getattr(model, "has_router_loss", by_config))


def _without_router_logits(model: Any) -> dict[str, bool]:
    """Return the argument of the model's own forward pass by which it computes no load-balancing loss.

    transformers would compute it in generation too, and fails after padded prompts, since its mask covers all tokens
    and the router logits those of one step. It would also weight it by the coefficient of the checkpoint.
    """
    return {"output_router_logits": False} if hasattr(model.config.get_text_config(), "output_router_logits") else {}


def _is_causal(model: Any) -> bool:
    """Return whether every layer has full causal attention, dispatched by transformers' attention interface."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    is_whole = kinds == {"full_attention"} and find_sliding_window(config) is None and not reads_mask(config)
    return is_whole and model._supports_attention_backend and not getattr(model, "_is_stateful", False)


def _run_backbone(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return the last hidden states, ``(B, L, D)``, and the load-balancing loss if the model has one."""
    # With a cache, transformers does not isolate packed documents.
    inputs["use_cache"] = False
    config = model.config.get_text_config()
    is_flat, is_alone = "cu_seq_lens_q" in inputs, inputs.pop("one_document_a_row", False) and _is_causal(model)
    # Documents are known from their bounds, or there is one per row: no need to search the positions for them.
    is_free = (is_flat or is_alone) and inputs.get("attention_mask") is None
    if is_free and takes_empty_mask(config._attn_implementation, is_flat=is_flat):
        inputs["attention_mask"] = _build_empty_mask(inputs["input_ids"].device)
    # Not an argument of the backbone.
    token_mask = inputs.pop("token_mask", None)
    if _has_router_loss(model):
        inputs["output_router_logits"] = True
    # The base_model_prefix of Llama 4 names no module (transformers 5.23), so that `base_model` is the model itself.
    outputs = (model.model if model.base_model is model else model.base_model)(**inputs)
    aux_loss = None
    # There are no router logits if every layer is dense, or if the model ignores output_router_logits.
    if _has_router_loss(model) and getattr(outputs, "router_logits", None):
        # Of the logits, not of the configuration: LongCat and ZAYA also choose among experts without weights.
        num_experts = outputs.router_logits[0].shape[-1]
        top_k = getattr(model, "num_experts_per_tok", None) or config.num_experts_per_tok
        aux_loss = cast(
            Tensor, load_balancing_loss_func(outputs.router_logits, num_experts, top_k, attention_mask=token_mask)
        )
    return outputs.last_hidden_state, aux_loss


def _score(
    model: Any, score: Callable[..., Any], hidden: Tensor, *args: Tensor, temperature: float = 1.0, **options: Any
) -> Any:
    """Call ``score`` inside the output projection, with the model's transform of logits and a temperature."""
    config = model.config.get_text_config()
    scale, softcap = find_logit_scale(config), find_softcap(config)
    # c tanh(s x / c) / T = (c / T) tanh((s / T) x / (c / T)): scale and cap are divided alike.
    options |= {"logit_scale": scale / temperature, "softcap": None if softcap is None else softcap / temperature}
    return model.get_output_embeddings()(hidden, score, *args, **options)
