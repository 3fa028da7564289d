"""Causal language models that return loss or token log-probabilities without full-batch logits."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils.generic import ModelOutput

from recipes_lib.errors import ConfigError, Problem, list_first
from recipes_lib.losses.distillation import (
    DistillationSums,
    DistillationTargets,
    Objective,
    TeacherHead,
    TopLogps,
    compute_distillation,
)
from recipes_lib.losses.next_token import TokenLogps, TokenSums, compute_cross_entropy, compute_token_logps
from recipes_lib.models.attention.varlen import takes_empty_mask
from recipes_lib.models.inference import evaluating, find_device, find_rounding_error, kernel_precision, unwrap_adapter
from recipes_lib.models.parallel.tensor_parallel import find_vocabulary_shard, project_vocabulary_parallel


@dataclass
class LossHeadOutput(ModelOutput):
    """Sums over the targets of a batch.

    Attributes:
        nll_sum: Negative log-likelihood in nats; ``float32`` scalar, differentiable.
        num_targets: Targets in the batch; ``int64`` scalar.
        num_correct: Targets that are the arg-max of their logits; ``int64`` scalar.
        aux_loss: Load-balancing loss of a mixture of experts, before ``router_aux_loss_coef``; ``None`` unless the
            model's configuration sets ``output_router_logits``.
    """

    nll_sum: Tensor | None = None
    num_targets: Tensor | None = None
    num_correct: Tensor | None = None
    aux_loss: Tensor | None = None


@dataclass
class TokenLogpsOutput(ModelOutput):
    """Log-probabilities and statistics of the target tokens of a batch.

    Attributes:
        logps: ``log p(target)`` in nats; ``float32 (N,)``, differentiable.
        is_top: Whether the target is the arg-max of its logits; ``bool (N,)``.
        log_sum_sq_probs: ``log sum_v p(v)^2``; ``float32 (N,)``, without gradient; ``None`` unless asked for.
        entropy: Of the distribution that the target is taken from, in nats; as ``log_sum_sq_probs``.
        aux_loss: As in ``LossHeadOutput``.
    """

    logps: Tensor | None = None
    is_top: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    entropy: Tensor | None = None
    aux_loss: Tensor | None = None


class HeadOutput(NamedTuple):
    """Hidden states at some positions of a batch, or what a function of all of them and the output embedding returned.

    Attributes:
        result: The states, ``(N, D)``, differentiable; or what it returned.
        aux_loss: As in ``LossHeadOutput``.
    """

    result: Any
    aux_loss: Tensor | None


def add_loss_head(model: PreTrainedModel) -> None:
    """Let ``model`` return a loss, log-probabilities, states or what a function makes of them, on demand.

    With any of the forms below, ``one_document_a_row=True`` says that no row holds several documents, padded at its end
    at most: nothing is looked for in the positions. ``token_mask``, ``bool (B, L)``, is ``True`` for real tokens:
    padding does not count in the load-balancing loss of a mixture of experts. Nothing else needs it, since no document
    attends to padding.

    ``model(input_ids=..., position_ids=..., labels=..., loss_head=True)`` sums the loss over a batch: ``labels`` are
    ``int64 (B, L)``, unshifted, negative where there is no target. With ``targets`` beside them, ``int64 (B, L)``, each
    hidden state is scored on the one at its own place, as under context parallelism (``shard_batch``). With
    ``target_positions``, ``int64 (N,)``, where those that count stand among the flattened ``targets``, or without these
    among ``labels[:, 1:]``, the host does not wait until the device has found them.

    ``model(input_ids=..., position_ids=..., predictors=..., targets=..., token_logps=True)`` gives the log-probability
    of each of ``N`` tokens. ``predictors`` are ``int64 (N,)`` indices into the flattened ``(B * L)`` positions,
    ``targets`` the ``int64 (N,)`` tokens that the hidden states there predict; several targets may share a predictor,
    as the first tokens of two answers do. ``attention_mask`` is ``bool (B, 1, L, L)``, ``True`` where a query (third
    axis) sees a key (fourth), every token itself among them; without it ``position_ids`` tell documents apart.
    ``with_statistics=True`` adds what ``compute_token_logps`` has to be asked for; ``temperature`` divides the logits.

    ``model(input_ids=..., position_ids=..., states_at=...)`` returns a ``HeadOutput`` of the last hidden states at
    ``int64 (N,)`` indices into the flattened positions, for a head that is not the model's own.

    ``model(input_ids=..., position_ids=..., head=function)`` returns a ``HeadOutput`` of ``function(hidden, weight,
    bias=..., logit_scale=..., softcap=...)``, called on the last hidden states, ``(B, L, D)``.

    Without any of them the model is what it was, so generation is unchanged. A PEFT wrapper may come before or after;
    before, where it trains tied embeddings whole.

    All are computed inside the output projection's own call, so that whatever shards its weight (FSDP2, ZeRO-3)
    gathers it, and reduces its gradient, by the same hooks as for ordinary logits.

    Raises:
        ConfigError: The model has no output projection that is a plain ``nn.Linear``.

    Source: the model's own ``forward``; ``tests/parity/test_loss_head.py``.
    """
    model = unwrap_adapter(model)
    projections = _find_projections(model)
    for projection in projections:
        if not isinstance(projection, nn.Linear) or not projection.weight.is_floating_point():
            kind = type(projection).__name__
            found = f"{type(model).__name__} projects to the vocabulary by {kind}, not by nn.Linear"
            remedy = "choose a causal language model with an lm_head that is neither quantised nor under an adapter"
            raise ConfigError(Problem("model_name_or_path", found, remedy))
    # The function and not the bound method, which would call the original from within a deep copy.
    original_forward = cast(types.MethodType, model.forward).__func__

    # generate() validates its arguments against the signature of the class's forward.
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
            return HeadOutput(hidden.flatten(0, 1)[states_at], aux_loss)
        if head is not None:
            hidden, aux_loss = _run_backbone(self, kwargs)
            return HeadOutput(_score(self, head, hidden), aux_loss)
        return original_forward(self, *args, **kwargs)

    # Modules call an instance's forward inside their hooks, and PEFT copies it with the module.
    vars(model)["forward"] = types.MethodType(forward, model)
    for projection in projections:
        vars(projection)["forward"] = types.MethodType(_project_or_score, projection)


def verify_loss_head(model: Any) -> None:
    """Compare the loss head with the model's own loss on eight tokens, and verify that the model is causal.

    Args:
        model: What ``add_loss_head`` was given; when its weights are sharded every process must call.

    Raises:
        ConfigError: The model's own loss is not finite; a token changes the logits of those before it; or the losses
            differ: between backbone and logits the model does something that is unknown here.
    """
    config = unwrap_adapter(model).config.get_text_config()
    # Any eight tokens that the vocabulary has.
    input_ids = torch.arange(1, 9, device=find_device(model))[None] % config.vocab_size
    with evaluating(model), kernel_precision(model):
        own = model(input_ids=input_ids, labels=input_ids, use_cache=False)
        sums = model(input_ids=input_ids, labels=input_ids, loss_head=True)
        changed = torch.cat([input_ids[:, :-1], input_ids[:, :1]], dim=1)
        ahead = model(input_ids=changed, use_cache=False).logits
        # Scales of 8-bit products and groups of an expert's tokens depend on all tokens: one moves others by rounding.
        is_exact = find_rounding_error(own.logits) < 1e-6 and not getattr(unwrap_adapter(model), "is_quantized", False)
        rounding = (1e-4 if is_exact else 0.1) * own.logits.abs().max()
    ours = sums.nll_sum / sums.num_targets
    if sums.aux_loss is not None:
        ours = ours + config.router_aux_loss_coef * sums.aux_loss
    if not own.loss.isfinite():  # NaN is close to nothing, and would be told as a difference.
        raise ConfigError(Problem("model_name_or_path", *_explain_loss(model, float(own.loss))))
    # In half precision, the model's own loss rounds its logits.
    tolerance = 1e-5 if own.logits.dtype == torch.float32 else 1e-2
    if not torch.isclose(ours, own.loss.float(), rtol=tolerance, atol=tolerance):
        found = f"on the same tokens this model's own loss is {own.loss:.6f} and its chunked loss is {ours:.6f}"
        remedy = "its architecture changes the logits in a way that is not supported; choose another model"
        raise ConfigError(Problem("model_name_or_path", found, remedy))
    # An encoder would learn to copy the token that it is to predict, at a loss near 0.
    if ((own.logits - ahead)[:, :-1].abs().max() > rounding).item():
        found = "this model is not causal: a token changes the logits of those before it"
        raise ConfigError(Problem("model_name_or_path", found, "choose a causal language model"))


def _explain_loss(model: Any, loss: float) -> tuple[str, str]:
    """Return why a model's own loss is not finite, and the remedy."""
    broken = [name for name, value in model.named_parameters() if not value.detach().isfinite().all()]
    if broken:
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
    """Run both models on a batch and sum the objective over its targets.

    The student runs inside the call of the teacher's output projection, so that FSDP2 or ZeRO-3 gathers the weights of
    both while the logits of a chunk are computed. Nothing of the teacher is kept for the backward pass.

    Args:
        student: A model with a loss head, as it is trained.
        teacher: A frozen one, with at most the student's vocabulary.
        inputs: ``input_ids`` and what else both models take.
        labels: ``int64 (B, L)``, unshifted, negative where there is no target.
        objective: The loss.
        positions: Of the targets among the flattened ``labels[:, 1:]``, ``int64 (N,)``; ``None``: the host waits until
            the device has found them.

    Returns:
        ``result`` is a ``DistillationSums``.

    Source: ``tests/distillation/test_distillation.py``.
    """
    positions = find_targets(labels) if positions is None else positions
    outputs: list[HeadOutput] = []

    def lend(hidden: Tensor, weight: Tensor, **options: Any) -> None:
        head = TeacherHead(pick_predictors(hidden, positions), weight, **options)
        # Not returned through the teacher, whose hooks would wait for its backward pass.
        outputs.append(score_beside_record(student, head, inputs, labels, objective, positions))

    teacher(**inputs, head=lend)
    return outputs[0]


def score_beside_record(
    student: Any,
    teacher: TeacherHead | TopLogps,
    inputs: Mapping[str, Any],
    labels: Tensor,
    objective: Objective,
    positions: Tensor | None = None,
) -> HeadOutput:
    """As ``score_beside_teacher``, with stored teacher log-probabilities of the targets, row by row."""
    chosen = find_targets(labels) if positions is None else positions
    supervision = DistillationTargets(labels[:, 1:].flatten()[chosen], teacher, objective)

    def score(hidden: Tensor, weight: Tensor, **options: Any) -> DistillationSums:
        sums: DistillationSums = compute_distillation(pick_predictors(hidden, chosen), weight, supervision, **options)
        return sums

    output: HeadOutput = student(**inputs, head=score)
    return output


def find_targets(labels: Tensor) -> Tensor:
    """Return the indices of targets in the flattened ``labels[:, 1:]``, ``int64 (N,)``; synchronises with the GPU."""
    return (labels[:, 1:] >= 0).flatten().nonzero().squeeze(1)


def pick_predictors(hidden: Tensor, positions: Tensor) -> Tensor:
    """Return the hidden states that predict the targets, ``(N, D)``.

    Args:
        hidden: Of whole rows, ``(B, L, D)``.
        positions: From ``find_targets``.
    """
    # Positions of full rows, which have one position more than they have successors.
    return hidden.flatten(0, 1)[positions + positions // (hidden.shape[1] - 1)]


def _find_projections(model: Any) -> list[Any]:
    """The output projection; if PEFT trains it fully, the original and each copy.

    PEFT's wrapper passes all arguments to the active copy or, while adapters are disabled, to the original.
    """
    projection = model.get_output_embeddings()
    copies = getattr(projection, "modules_to_save", None)
    return [projection] if copies is None else [projection.original_module, *copies.values()]


def _logit_transform(config: PreTrainedConfig) -> dict[str, Any]:
    """Transform between projection and softmax: scale factor of Cohere and Granite, soft cap of Gemma."""
    scale = getattr(config, "logit_scale", None)
    return {
        "logit_scale": (1.0 if scale is None else scale) / getattr(config, "logits_scaling", 1.0),
        "softcap": getattr(config, "final_logit_softcapping", None),
    }


def _project_or_score(
    projection: nn.Linear, hidden: Tensor, score: Callable[..., Any] | None = None, *args: Any, **options: Any
) -> Any:
    """``forward`` of the output projection: logits, or ``score`` of hidden states and weight."""
    weight: Any = projection.weight
    bias: Any = projection.bias
    if isinstance(weight, DTensor):
        # Vocabulary-parallel projection.
        if score is None:
            return project_vocabulary_parallel(hidden, weight, bias)
        if score is compute_cross_entropy:
            options["share"] = find_vocabulary_shard(weight)
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
) -> LossHeadOutput:
    # A mask or a cache would disable the isolation of packed documents, which is derived from positions. Padding is at
    # the end of a row, where causal attention ignores it.
    if attention_mask is not None:
        raise ValueError("the loss head takes no attention_mask: position_ids tell documents apart")
    if targets is not None:
        # Context parallelism. A four-dimensional mask is used unchanged, and this attention needs none.
        inputs["attention_mask"] = _build_empty_mask(labels.device)
        hidden, aux_loss = _run_backbone(model, inputs)
        sums: TokenSums = _score(model, compute_cross_entropy, hidden, targets, positions=target_positions)
        return LossHeadOutput(sums.nll_sum, sums.num_targets, sums.num_correct, aux_loss)
    num_predictors = labels.shape[1] - 1
    if _can_cut(model, num_predictors, inputs):
        inputs = {name: part[:, :num_predictors] for name, part in inputs.items() if name != "use_cache"}
    hidden, aux_loss = _run_backbone(model, inputs)
    successors = labels[:, 1:]
    if target_positions is None:
        hidden = hidden[:, :num_predictors]
    elif hidden.shape[1] > num_predictors:
        # Indexed from full rows: the backward pass of a slice would allocate and copy another tensor.
        successors = labels.roll(-1, 1)
        if len(labels) > 1:
            target_positions = target_positions + target_positions // num_predictors
    sums = _score(model, compute_cross_entropy, hidden, successors, positions=target_positions)
    return LossHeadOutput(sums.nll_sum, sums.num_targets, sums.num_correct, aux_loss)


def _build_empty_mask(device: torch.device) -> Tensor:
    """Empty four-dimensional mask, which transformers uses unchanged; the attention kernel knows the documents.

    Without it, transformers would search the positions for packed documents, which synchronises with the host, and
    under torch.compile it would build a T x T mask.
    """
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)


def _can_cut(model: Any, num_predictors: int, inputs: Mapping[str, Any]) -> bool:
    """Whether rows are computed without their last token, which predicts nothing.

    Kernels are slower for lengths that are one above or below a round number. Document boundaries and the
    load-balancing loss count all tokens.
    """
    is_round = num_predictors > 0 and num_predictors % 8 == 0
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
    **inputs: Any,
) -> TokenLogpsOutput:
    if attention_mask is not None:
        inputs["attention_mask"] = _spell_mask(model, attention_mask)
    hidden, aux_loss = _run_backbone(model, inputs)
    # (B, L, D) to (N, D): nothing else is projected to the vocabulary.
    chosen = hidden.flatten(0, 1)[predictors]
    options = {"with_statistics": with_statistics, "temperature": temperature}
    scored: TokenLogps = _score(model, compute_token_logps, chosen, targets, **options)
    return TokenLogpsOutput(*scored, aux_loss)


def _spell_mask(model: Any, visible: Tensor) -> Tensor:
    """Convert a mask to the form of the attention kernel; the model uses a four-dimensional one unchanged.

    Raises:
        ValueError: The mask has another form, or the kernel or a sliding window would not be what it says.
    """
    config = model.config.get_text_config()
    if visible.ndim != 4 or visible.dtype != torch.bool:
        raise ValueError(f"attention_mask is bool (B, 1, L, L) here, not {visible.dtype} {tuple(visible.shape)}")
    window = getattr(config, "sliding_window", None)
    # 0 in Qwen2 MoE: no window.
    if window and visible.shape[-1] > window:
        raise ValueError(f"an attention_mask of {visible.shape[-1]} tokens would undo the sliding window of {window}")
    if config._attn_implementation == "sdpa":
        return visible
    if config._attn_implementation == "eager":
        hidden_score = torch.finfo(model.dtype).min
        return torch.zeros_like(visible, dtype=model.dtype).masked_fill(~visible, hidden_score)
    raise ValueError(f"{config._attn_implementation} takes no attention_mask; use sdpa or eager")


def _has_router_loss(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False))


def _is_causal(model: Any) -> bool:
    """Whether every layer of a model has full causal attention, dispatched by transformers."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    is_whole = kinds == {"full_attention"} and not getattr(config, "sliding_window", None)
    return is_whole and model._supports_attention_backend and not getattr(model, "_is_stateful", False)


def _run_backbone(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Last hidden states, ``(B, L, D)``, and the load-balancing loss if the model has one."""
    # A cache would switch off the isolation of packed documents.
    inputs["use_cache"] = False
    config = model.config.get_text_config()
    is_flat, is_alone = "cu_seq_lens_q" in inputs, inputs.pop("one_document_a_row", False) and _is_causal(model)
    is_free = (is_flat or is_alone) and inputs.get("attention_mask") is None
    if is_free and takes_empty_mask(config._attn_implementation, is_flat=is_flat):
        inputs["attention_mask"] = _build_empty_mask(inputs["input_ids"].device)
    token_mask = inputs.pop("token_mask", None)
    if _has_router_loss(model):
        inputs["output_router_logits"] = True
    # Llama 4's `base_model_prefix` names no module of it (transformers 5.23), and `base_model` is then the model.
    outputs = (model.model if model.base_model is model else model.base_model)(**inputs)
    aux_loss = None
    # No router logits: every layer is dense, or the model has no load-balancing loss in spite of its configuration.
    if _has_router_loss(model) and getattr(outputs, "router_logits", None):
        # Configurations have several names for the number of experts; models have one, or read it from there.
        counts = model if hasattr(model, "num_experts") else config
        num_experts = getattr(counts, "num_experts", None) or config.num_local_experts
        aux_loss = cast(
            Tensor,
            load_balancing_loss_func(
                outputs.router_logits, num_experts, counts.num_experts_per_tok, attention_mask=token_mask
            ),
        )
    return outputs.last_hidden_state, aux_loss


def _score(
    model: Any,
    score: Callable[..., Any],
    hidden: Tensor,
    *args: Tensor,
    temperature: float = 1.0,
    **options: Any,
) -> Any:
    """Call ``score`` through the output projection, with the transform before the softmax."""
    # The soft cap bounds logits before the temperature divides them, so the cap is divided too.
    transform = {
        name: None if value is None else value / temperature
        for name, value in _logit_transform(model.config.get_text_config()).items()
    }
    return model.get_output_embeddings()(hidden, score, *args, **transform, **options)
