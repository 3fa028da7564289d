"""Text generation: sampling from a policy with a preallocated KV cache, stop tokens, left-padded prompt batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.inference import find_device


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options, independent of the engine.

    Attributes:
        stop_ids: Tokens that end an answer.
        pad_id: Fills prompts on the left and answers on the right; never told from a token by its id.
        response_length: Longest answer.
        temperature: Divides the logits.
        beat: Called whenever there is progress: with ``generate`` at each token, with an engine at each step or part.
        num_tokens: Tokens that may be sampled, the first of the vocabulary; ``None``: all. Of ``generate`` alone.
    """

    stop_ids: Sequence[int]
    pad_id: int
    response_length: int
    temperature: float
    beat: Callable[[], None] = lambda: None
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Generated:
    """Answers to a batch of prompts, as returned by the engine.

    Attributes:
        response_ids: ``int64 (B, T)`` on the CPU; behind an answer's stop token anything may stand.
        engine_logps: Log-probability of each token by the engine, in nats and at the temperature; ``float32 (B, T)``.
    """

    response_ids: Tensor
    engine_logps: Tensor


class Generator(Protocol):
    """Interface of generation engines.

    Attributes:
        name: For the log.
        follows_seed: Which answer a prompt gets depends on its own uniforms alone: not on the others beside it, not on
            the number of processes, not on whether the run was stopped. Where it is False, uniforms are at most a seed.
        uses_policy: Whether it is the policy's own modules that answer, which must be whole on this process meanwhile.
        batch_size: Prompts that it is given at once; ``None`` gives it all, for it fills batches of its own.
    """

    name: str
    follows_seed: bool
    uses_policy: bool
    batch_size: int | None

    def load(self, policy: Any) -> None:
        """Load the current weights of the policy; every process that samples next must call."""
        ...

    def generate(self, policy: Any, prompts: Sequence[Sequence[int]], uniforms: Tensor) -> Generated:
        """Answer every prompt once.

        Args:
            policy: A causal language model in evaluation mode, with the weights that were loaded.
            prompts: Token ids.
            uniforms: Numbers of ``[0, 1)``, ``float64 (B, response_length)``: one for each token of an answer.
        """
        ...


class GenerateBackend:
    """transformers' ``generate``: any model, any device.

    Once half of the answers of a batch have ended, the others continue without them, with their rows of the KV cache.
    This limits the cost of one long answer in a batch.

    Source: ``GenerationMixin.generate``; answers as those of one plain call, and log-probabilities as those of the
    training graph, in ``tests/models/test_generation.py``.
    """

    name = "generate"
    follows_seed = True
    uses_policy = True

    def __init__(self, sampling: Sampling, *, batch_size: int, precision: Any) -> None:
        """Prepare sampling.

        Args:
            sampling: How.
            batch_size: Prompts of a batch.
            precision: Gives the context in which products are computed.
        """
        self.batch_size: int | None = batch_size
        self._sampling = sampling
        self._precision: Any = precision

    def load(self, policy: Any) -> None:
        """Do nothing: the policy itself samples."""

    def generate(self, policy: Any, prompts: Sequence[Sequence[int]], uniforms: Tensor) -> Generated:
        """Answer every prompt once, as one left-padded batch from which finished answers are removed."""
        device = find_device(policy)
        ids, mask = (part.to(device) for part in pad_left(prompts, self._sampling.pad_id))
        uniforms, rows = uniforms.to(device), torch.arange(len(prompts), device=device)
        length, done = self._sampling.response_length, 0
        response_ids = torch.full((len(prompts), length), self._sampling.pad_id, device=device)
        engine_logps = torch.zeros(len(prompts), length, device=device)
        cache = build_cache(policy, ids.shape[1] + length)
        while len(rows) and done < length:
            # A new call of generate for the rows that are left; with the same cache, so that no prompt is read again.
            half = HalfEnded(self._sampling.stop_ids, rows)
            sampler = SampleByUniforms(uniforms[rows, done:], self._sampling)
            sequences = self._continue(policy, ids, mask, length - done, sampler, cache, half)
            new = sequences[:, ids.shape[1] :]
            now = slice(done, done + new.shape[1])
            response_ids[rows, now], engine_logps[rows, now] = new, sampler.read_logps()
            done = now.stop
            # Without rows to select, one call has sampled everything.
            if cache is None:
                break
            rest = (~half.has_ended).nonzero().squeeze(1)
            ids, rows = sequences[rest], rows[rest]
            # 1 at tokens, 0 at the padding on the left.
            mask = torch.cat([mask[rest], torch.ones_like(new[rest])], dim=1)
            cache.batch_select_indices(rest)
        return Generated(response_ids[:, :done].cpu(), engine_logps[:, :done].cpu())

    def _continue(
        self, policy: Any, ids: Tensor, mask: Tensor, length: int, sampler: Any, cache: Any, half: HalfEnded
    ) -> Tensor:
        """Generate up to ``length`` tokens for each row, with a KV cache, until half of the rows have ended."""
        reuse = {} if cache is None else {"past_key_values": cache, "stopping_criteria": StoppingCriteriaList([half])}
        context: AbstractContextManager[Any] = self._precision()
        # Sequence lengths change with every token: layers compiled for training would be recompiled for each.
        with torch.no_grad(), context, torch.compiler.set_stance("force_eager"):
            sequences: Tensor = policy.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=build_plain_generation(self._sampling.stop_ids, self._sampling.pad_id, length),
                logits_processor=LogitsProcessorList([sampler]),
                # A sharded policy is gathered during generation, so that ranks with finished answers need not wait for
                # others.
                synced_gpus=False,
                **reuse,
            )
        return sequences


def set_stop_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, terminators: Iterable[int]
) -> list[int]:
    """Set the stop tokens of ``model.generate`` to all end tokens of training, and return those ids, sorted.

    Args:
        model: Its generation config keeps the stop tokens it had and gains the others; padding is the tokenizer's.
        tokenizer: Its EOS is a stop token.
        terminators: Ids of the last target of the training rows (the end-of-turn token of the chat template).

    Raises:
        ConfigError: transformers would not save the generation config that the model comes with, once it is changed.

    Source: transformers ``GenerationConfig.eos_token_id``; see ``tests/models/test_stop_tokens.py``.
    """
    stops = {*read_stop_ids(model), tokenizer.eos_token_id, *terminators} - {None}
    model.generation_config.eos_token_id = sorted(stops)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    _make_valid(model.generation_config)
    return sorted(stops)


def _make_valid(generation: GenerationConfig) -> None:
    """Set ``do_sample`` if settings such as ``temperature`` need it.

    transformers saves an inconsistent generation config only if it is unchanged since loading.
    """
    validate: Callable[..., None] = generation.validate
    try:
        validate(strict=True)
    except ValueError:
        generation.do_sample = True
        try:
            validate(strict=True)
        except ValueError as error:
            reasons = " ".join(str(error).partition("\nIf")[0].split())
            found = f"how the model generates could not be saved: {reasons}"
            remedy = "correct generation_config.json in a copy of the model, and name that"
            raise ConfigError(Problem("model_name_or_path", found, remedy)) from error


def read_stop_ids(model: PreTrainedModel) -> list[int]:
    """Return the stop tokens of ``model.generate``, as set by ``set_stop_tokens``."""
    configured = model.generation_config.eos_token_id
    had = configured if isinstance(configured, list) else [configured]
    return sorted({*had} - {None})


def build_plain_generation(stop_ids: Sequence[int], pad_id: int, max_new_tokens: int) -> GenerationConfig:
    """Return a configuration for greedy decoding, without the model's own sampling settings and penalties.

    Args:
        stop_ids: Tokens that end an answer; none ends it by length alone.
        pad_id: Stands behind answers that ended before others of the batch.
        max_new_tokens: Longest answer.
    """
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=pad_id,
        use_cache=True,
    )


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Left-pad prompts to ``input_ids`` and ``attention_mask``, both ``int64 (B, P)``."""
    longest = max(map(len, rows))
    input_ids = torch.tensor([[pad_id] * (longest - len(row)) + list(row) for row in rows])
    attention_mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return input_ids, attention_mask


def build_cache(model: Any, num_tokens: int) -> DynamicCache | None:
    """Build a KV cache for ``model.generate`` whose rows can be selected during generation.

    Args:
        model: A causal language model, or a PEFT model around it.
        num_tokens: Most tokens of a row, the prompt's among them.

    Returns:
        The cache; ``None`` for a model that keeps another state than keys and values of each token.
    """
    cache = DynamicCache(config=model.config)
    if not model._supports_default_dynamic_cache() or not all(
        isinstance(layer, DynamicLayer) for layer in cache.layers
    ):
        return None
    # Subclasses, such as that of sliding windows, keep their own rules of growth.
    cache.layers = [RoomyLayer(num_tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class RoomyLayer(DynamicLayer):
    """KV cache of a layer, preallocated: it writes the new token, where upstream copies the whole cache.

    Source: transformers' ``DynamicLayer``, equal in ``tests/models/generation/test_generation_cache.py``.
    """

    def __init__(self, num_tokens: int) -> None:
        """Preallocate ``num_tokens`` at the first update."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_tokens = num_tokens
        self._rooms: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append, and return all keys and values, ``(B, H, L, D)`` each; views of the buffer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        if not self._rooms or end > self._rooms[0].shape[2]:
            states = (key_states, value_states)
            self._rooms = [new.new_empty(*new.shape[:2], max(end, self._num_tokens), new.shape[-1]) for new in states]
            for room, held in zip(self._rooms, (self.keys, self.values), strict=True):
                if held is not None and begin:
                    room[:, :, :begin] = held
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[:, :, begin:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self._rooms)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in new buffers."""
        # A copy of the rows; it is moved into a new buffer by the next update, and the old one is freed.
        super().batch_select_indices(indices)
        self._rooms = []


class HalfEnded(StoppingCriteria):
    """Stops generation when half of its rows have ended; ``has_ended`` is ``bool (B,)``."""

    def __init__(self, stop_ids: Sequence[int], rows: Tensor) -> None:
        """Start with ``rows``, ``(B,)``, none of which has ended."""
        self.has_ended = torch.zeros_like(rows, dtype=torch.bool)
        self._stop_ids = torch.tensor(list(stop_ids), device=rows.device)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        """Return whether to stop, the same for every row."""
        self.has_ended |= torch.isin(input_ids[:, -1], self._stop_ids)
        # generate takes an answer for each row, (B,).
        return (2 * self.has_ended.sum() >= len(self.has_ended)).expand(len(self.has_ended))


class SampleByUniforms(LogitsProcessor):
    """Samples exactly by inverse transform sampling at given uniforms, and keeps the log-probability of each token.

    Therefore an answer depends neither on its batch nor on the number of processes, and full logits of an answer are
    never stored.
    """

    def __init__(self, uniforms: Tensor, sampling: Sampling) -> None:
        """Sample at ``uniforms``, ``float64 (B, T)``."""
        self._uniforms = uniforms
        self._sampling = sampling
        self._logps = uniforms.new_empty(uniforms.shape, dtype=torch.float32)
        self._num_done = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores of 0 for the sampled token and -inf for all others."""
        self._sampling.beat()
        logps = (scores[:, : self._sampling.num_tokens].float() / self._sampling.temperature).log_softmax(dim=-1)
        # In double precision: at the end of a large vocabulary, float32 cumulative sums are too coarse for rare tokens.
        cumulative = logps.double().exp_().cumsum_(dim=-1)
        # Relative to the last sum, which rounding keeps from being 1.
        at = self._uniforms[:, self._num_done, None] * cumulative[:, -1:]
        # right=True: the first sum above `at`, so that a token of probability 0 is never chosen. The clamp is for an
        # `at` that rounds to the whole sum.
        chosen = torch.searchsorted(cumulative, at, right=True).clamp(max=logps.shape[-1] - 1)
        # Into one tensor: on a host, a small one kept for each token would lie between the freed logits of the heap.
        self._logps[:, self._num_done] = logps.gather(1, chosen).squeeze(1)
        self._num_done += 1
        # generate takes the arg-max, and so the sampled token.
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    def read_logps(self) -> Tensor:
        """Log-probabilities of the sampled tokens, ``float32 (B, T)``."""
        return self._logps[:, : self._num_done]


def mask_answers(response_ids: Tensor, stop_ids: Collection[int]) -> tuple[Tensor, Tensor]:
    """Mask of answer tokens, and of answers that ended with a stop token.

    The first stop token belongs to the answer; tokens after it are padding. Padding is never identified by its id,
    which may be a stop token.

    Args:
        response_ids: ``int64 (B, T)``, generated tokens alone: a stop token of the prompt ends nothing.
        stop_ids: Every token that ends an answer.

    Returns:
        ``bool (B, T)`` mask and ``bool (B,)``, True where an answer ended before the limit.
    """
    is_stop = torch.isin(response_ids, torch.tensor(sorted(stop_ids), device=response_ids.device))
    # Exclusive sum: the first stop token itself has none before it.
    num_stops_before = is_stop.cumsum(dim=1) - is_stop.long()
    return num_stops_before == 0, is_stop.any(dim=1)


def join_answers(answers: Sequence[tuple[Sequence[int], Sequence[float]]], sampling: Sampling) -> Generated:
    """Combine answers from an engine, tokens and log-probabilities of each, into a batch.

    Raises:
        RuntimeError: An answer was cut short: it neither ends with a stop token nor has the full length.
    """
    stops = set(sampling.stop_ids)
    width = max(len(ids) for ids, _ in answers)
    response_ids = torch.full((len(answers), width), sampling.pad_id)
    engine_logps = torch.zeros(len(answers), width)
    for row, (ids, logps) in enumerate(answers):
        if len(ids) < sampling.response_length and not (ids and ids[-1] in stops):
            # Later tokens would count as part of the answer.
            raise RuntimeError(
                f"the engine ended an answer after {len(ids)} of {sampling.response_length} tokens without a stop token"
            )
        response_ids[row, : len(ids)] = torch.tensor(ids)
        engine_logps[row, : len(ids)] = torch.tensor(logps)
    return Generated(response_ids, engine_logps)


def read_continuation(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """Decode an answer as the continuation of its prompt, with the white space between them that decoders strip.

    Args:
        tokenizer: Of the policy.
        prompt: Token ids.
        answer: Token ids.
    """

    def read(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    # Decoded together: a tokenizer strips the space before the first token of a text.
    whole, start = read([*prompt, *answer]), read(prompt)
    return whole[len(start) :] if whole.startswith(start) else read(answer)
