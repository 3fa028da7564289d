"""Text generation: sampling from a policy with a preallocated KV cache, stop tokens, left-padded prompt batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
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
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.utils import ALL_CACHE_NAMES

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.models.inference import find_device, unwrap_adapter
from recipes_lib.models.structure import reads_padding

_SELECTABLE: Final = {DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer}
"""Cache layers whose whole state follows ``batch_select_indices``. Subclasses may have more: Falcon-H1's convolution
states and DeepSeek V4's compressed keys would keep the rows of ended answers."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options, independent of the engine.

    Attributes:
        stop_ids: Token ids that end an answer.
        pad_id: Token id that pads prompts on the left and answers on the right; padding is never identified by it.
        response_length: Maximum length of an answer in tokens.
        temperature: Divisor of the logits.
        beat: Progress callback: per token with ``generate``, per step or part with other engines. It may raise.
        num_tokens: Number of token ids that may be sampled, from 0; ``None`` for all. Only ``generate`` supports it.
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
        response_ids: Token ids on the CPU, ``int64 (B, T)``; arbitrary after the first stop token of an answer.
        engine_logps: Log-probability of each token according to the engine, at the temperature, in nats;
            ``float32 (B, T)``.
    """

    response_ids: Tensor
    engine_logps: Tensor


class Generator(Protocol):
    """Interface of generation engines; the defaults are those of an engine of its own, which is given the weights.

    Attributes:
        name: Name for the log.
        follows_seed: Whether an answer depends only on its prompt and its uniforms, not on its batch, the number of
            processes or interruptions. Otherwise, uniforms are used as a seed at most.
        uses_policy: Whether it runs the modules of the policy, which must then be unsharded on this process.
        batch_size: Prompts per call; ``None`` for engines that batch by themselves and take all prompts at once.
    """

    name: str
    follows_seed: bool = False
    uses_policy: bool = False
    batch_size: int | None = None

    def load(self, policy: Any) -> None:
        """Load the current weights of the policy; a collective that every sampling process must enter."""

    def generate(self, policy: Any, prompts: Sequence[Sequence[int]], uniforms: Tensor) -> Generated:
        """Answer every prompt once.

        Args:
            policy: Causal language model in evaluation mode, with the loaded weights.
            prompts: Token ids of each prompt.
            uniforms: Random numbers in ``[0, 1)``, one per token of an answer; ``float64 (B, response_length)``.
        """


class GenerateBackend(Generator):
    """Generation with transformers' ``generate``, for any model and device.

    When half of the answers of a batch have ended, generation continues with the other rows of the batch and of the KV
    cache. This limits the cost of one long answer in a batch.

    Source: ``GenerationMixin.generate``; answers equal those of a single call, and log-probabilities those of the
    training graph, in ``tests/models/test_generation.py``.
    """

    name = "generate"
    follows_seed = True
    uses_policy = True

    def __init__(self, sampling: Sampling, *, batch_size: int, precision: Any) -> None:
        """Prepare sampling.

        Args:
            sampling: Sampling options.
            batch_size: Prompts per batch.
            precision: Factory of the autocast context.
        """
        self.batch_size = batch_size
        self._sampling = sampling
        self._precision: Any = precision

    def load(self, policy: Any) -> None:
        """Do nothing: the policy itself samples."""

    def generate(self, policy: Any, prompts: Sequence[Sequence[int]], uniforms: Tensor) -> Generated:
        """Answer every prompt once, as one left-padded batch from which finished answers are removed.

        Models that read padding answer each prompt alone.
        """
        if len(prompts) > 1 and reads_padding(policy.config.get_text_config()):
            parts = [self.generate(policy, [prompt], uniforms[row : row + 1]) for row, prompt in enumerate(prompts)]
            response_ids = pad_sequence([part.response_ids[0] for part in parts], True, self._sampling.pad_id)
            return Generated(response_ids, pad_sequence([part.engine_logps[0] for part in parts], True))
        device = find_device(policy)
        ids, mask = (part.to(device) for part in pad_left(prompts, self._sampling.pad_id))
        # MPS has no float64.
        uniforms = uniforms.to(device, torch.float32 if device.type == "mps" else torch.float64)
        rows = torch.arange(len(prompts), device=device)
        length, done = self._sampling.response_length, 0
        # In the order of the prompts; `rows` are the indices of the answers that have not ended.
        response_ids = torch.full((len(prompts), length), self._sampling.pad_id, device=device)
        engine_logps = torch.zeros(len(prompts), length, device=device)
        cache = build_cache(policy, ids.shape[1] + length)
        while len(rows) and done < length:
            # A new call of generate for the remaining rows, with the same cache, so that prompts are not recomputed.
            half = StopWhenHalfEnded(self._sampling.stop_ids, rows)
            sampler = SampleByUniforms(uniforms[rows, done:], self._sampling)
            options = build_plain_generation(self._sampling.stop_ids, self._sampling.pad_id, length - done)
            # Named `past_key_values` in transformers 5.23, `cache` in later versions.
            reuse = {ALL_CACHE_NAMES[0]: cache, "stopping_criteria": StoppingCriteriaList([half])}
            # Eager: layers compiled for training would be recompiled for the length of every token.
            with torch.no_grad(), self._precision(), torch.compiler.set_stance("force_eager"):
                sequences: Tensor = policy.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    generation_config=options,
                    logits_processor=LogitsProcessorList([sampler]),
                    # The policy is gathered, so that forward passes are no collectives, and ranks need not wait for
                    # each other.
                    synced_gpus=False,
                    **(reuse if cache is not None else {}),
                )
            new = sequences[:, ids.shape[1] :]
            now = slice(done, done + new.shape[1])
            response_ids[rows, now], engine_logps[rows, now] = new, sampler.read_logps()
            done = now.stop
            # Without a cache whose rows can be selected, a single call generates all tokens.
            if cache is None:
                break
            rest = (~half.has_ended).nonzero().squeeze(1)
            ids, rows = sequences[rest], rows[rest]
            # (rows, prompt + generated): 1 at tokens, 0 at the left padding.
            mask = torch.cat([mask[rest], torch.ones_like(new[rest])], dim=1)
            cache.batch_select_indices(rest)
        return Generated(response_ids[:, :done].cpu(), engine_logps[:, :done].cpu())


def set_stop_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, terminators: Iterable[int]
) -> list[int]:
    """Add all end tokens of training to the stop tokens of ``model.generate``; return the stop tokens, sorted.

    Args:
        model: Model whose generation config is changed; its existing stop tokens are kept.
        tokenizer: Tokenizer, whose EOS token is a stop token and whose padding token is set.
        terminators: Token ids that end the training rows, such as the end-of-turn token of the chat template.

    Raises:
        ConfigError: The generation config of the model is invalid, so that transformers would refuse to save it.

    Source: transformers ``GenerationConfig.eos_token_id``; see ``tests/models/test_stop_tokens.py``.
    """
    # A tokenizer may have no EOS token; set_stop_tokens keeps what there is.
    stops = {*read_stop_ids(model.generation_config), tokenizer.eos_token_id, *terminators} - {None}
    model.generation_config.eos_token_id = sorted(stops)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    _make_valid(model.generation_config)
    return sorted(stops)


def _make_valid(generation: GenerationConfig) -> None:
    """Set ``do_sample`` if settings such as ``temperature`` need it.

    transformers refuses to save an inconsistent generation config, except one that is unchanged since loading.
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
            found = f"the generation config of the model is invalid and could not be saved: {reasons}"
            remedy = "correct generation_config.json in a copy of the model, and name that"
            raise ConfigError(Problem("model_name_or_path", found, remedy)) from error


def read_stop_ids(generation: GenerationConfig) -> list[int]:
    """Return the stop tokens of a generation config, such as that of a model, as set by ``set_stop_tokens``."""
    configured = generation.eos_token_id
    # Checkpoints also have null, -1 or strings there, by which generate never stops.
    token_ids = configured if isinstance(configured, list) else [configured]
    return sorted({token_id for token_id in token_ids if isinstance(token_id, int) and token_id >= 0})


class _PlainGeneration(GenerationConfig):
    """Generation config that ignores ``model.generation_config``.

    transformers fills unset values from it, such as ``suppress_tokens`` or ``min_new_tokens``, for which no value means
    "off".
    """

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **values: Any) -> Any:
        """As ``GenerationConfig``, except for the values of the model."""
        # Only _prepare_generation_config of transformers 5.23 allows custom entries: for the model's values.
        if allow_custom_entries:
            return {}
        return super().update(defaults_only, **values)  # type: ignore[no-untyped-call]


def build_plain_generation(stop_ids: Sequence[int], pad_id: int, max_new_tokens: int) -> GenerationConfig:
    """Return a configuration for greedy decoding, without the sampling settings and penalties of a model.

    Args:
        stop_ids: Token ids that end an answer; if empty, only its length does.
        pad_id: Token id that pads answers that end before others of the batch.
        max_new_tokens: Maximum length of an answer in tokens.
    """
    return _PlainGeneration(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=pad_id,
        use_cache=True,
    )


def sample_answers(
    generator: Generator,
    policy: Any,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
    sampling: Sampling,
    track: Callable[[list[list[int]], str, int], Iterable[list[int]]] = lambda batches, *_: batches,
) -> Generated:
    """Sample one answer per prompt, in batches of the engine's size.

    Each answer has random numbers by its own seed, and so depends neither on its batch, nor on the process that samples
    it, nor on earlier draws.

    Args:
        generator: Engine, with the weights of the policy loaded.
        policy: As for ``Generator.generate``.
        prompts: Token ids of each prompt.
        seeds: Seed of each answer.
        sampling: Sampling options of the engine.
        track: Iterates over batches of rows and shows progress, given a label and their number.

    Returns:
        Answers in the order of ``prompts``, ``(B, response_length)``, 0 after the longest answer of a batch.
    """
    # Prompts of similar length need less padding.
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    size = generator.batch_size or max(1, len(order))
    ids = torch.zeros(len(prompts), sampling.response_length, dtype=torch.int64)
    logps = torch.zeros(ids.shape)
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    for rows in track(batches, "sampling answers", len(batches)):
        streams = [np.random.default_rng(seeds[row]) for row in rows]
        uniforms = torch.from_numpy(np.stack([stream.random(sampling.response_length) for stream in streams]))
        answers = generator.generate(policy, [prompts[row] for row in rows], uniforms)
        # A batch is shorter than the limit only if all its answers ended; tokens after the end are masked.
        width = answers.response_ids.shape[1]
        ids[rows, :width], logps[rows, :width] = answers.response_ids, answers.engine_logps
    return Generated(ids, logps)


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Left-pad prompts; return ``input_ids`` and ``attention_mask`` (1 at tokens), both ``int64 (B, P)``."""
    ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
    masks = map(torch.ones_like, ids)
    return pad_sequence(ids, True, pad_id, "left"), pad_sequence([*masks], True, 0, "left")


def build_cache(model: Any, num_tokens: int) -> DynamicCache | None:
    """Build a KV cache for ``model.generate`` whose rows can be selected during generation.

    Args:
        model: Causal language model, with or without a PEFT wrapper.
        num_tokens: Maximum length of a row in tokens, including the prompt.

    Returns:
        The cache; ``None`` for a model whose state is not keys and values per token, such as a state-space model.
    """
    cache = DynamicCache(config=model.config)
    # OpenAI GPT takes no cache.
    takes_cache = ALL_CACHE_NAMES[0] in inspect.signature(unwrap_adapter(model).forward).parameters
    is_known = takes_cache and model._supports_default_dynamic_cache()
    if not is_known or not {type(layer) for layer in cache.layers} <= _SELECTABLE:
        return None
    # Others than DynamicLayer also discard tokens, or have keys of an indexer, and are kept.
    cache.layers = [PreallocatedLayer(num_tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class PreallocatedLayer(DynamicLayer):
    """Preallocated KV cache of a layer, which appends in place; ``DynamicLayer`` copies the cache for every token.

    Source: transformers' ``DynamicLayer``, equal in ``tests/models/test_generation_cache.py``.
    """

    def __init__(self, num_tokens: int) -> None:
        """Preallocate ``num_tokens`` at the first update."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_tokens = num_tokens
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all of them, ``(B, H, L, D)`` each, as views of the buffers."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        # Allocated at the first update, after selection of rows, and if a prompt is longer than expected.
        if not self._buffers or end > self._buffers[0].shape[2]:
            states = (key_states, value_states)
            self._buffers = [new.new_empty(*new.shape[:2], max(end, self._num_tokens), new.shape[-1]) for new in states]
            for buffer, old in zip(self._buffers, (self.keys, self.values), strict=True):
                if old is not None and begin:
                    buffer[:, :, :begin] = old
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, begin:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        # Upstream copies the rows; the next update moves them to new buffers, and the old ones are freed here.
        super().batch_select_indices(indices)
        self._buffers = []


class StopWhenHalfEnded(StoppingCriteria):
    """Stopping criterion that ends generation when half of the rows have ended.

    Attributes:
        has_ended: True for rows with a stop token, ``bool (B,)``.
    """

    def __init__(self, stop_ids: Sequence[int], rows: Tensor) -> None:
        """Initialise for the batch ``rows``, ``(B,)``, on its device."""
        self.has_ended = torch.zeros_like(rows, dtype=torch.bool)
        self._stop_ids = torch.tensor(list(stop_ids), device=rows.device)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        """Return whether to stop, ``bool (B,)``, equal for all rows."""
        # generate continues rows with padding after their stop token, so the result is accumulated.
        self.has_ended |= torch.isin(input_ids[:, -1], self._stop_ids)
        # generate would continue other rows of a mixed result; all equal, it returns.
        return (2 * self.has_ended.sum() >= len(self.has_ended)).expand(len(self.has_ended))


class SampleByUniforms(LogitsProcessor):
    """Logits processor that samples by inverse transform at given uniforms, and records log-probabilities of tokens.

    An answer then depends neither on its batch nor on the number of processes, and no logits are stored.
    """

    def __init__(self, uniforms: Tensor, sampling: Sampling) -> None:
        """Initialise with the ``uniforms`` of each token, ``float64 (B, T)`` in ``[0, 1)``, on MPS ``float32``."""
        self._uniforms = uniforms
        self._sampling = sampling
        self._logps = uniforms.new_empty(uniforms.shape, dtype=torch.float32)
        self._num_done = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores of 0 for the sampled token and -inf for all others."""
        self._sampling.beat()
        logps = (scores[:, : self._sampling.num_tokens].float() / self._sampling.temperature).log_softmax(dim=-1)
        # In units of 2^-52: near 1, the spacing of float32 exceeds the probability of rare tokens. As integers, because
        # torch refuses sums of floats on CUDA under `full_determinism`.
        cumulative = logps.to(self._uniforms.dtype, copy=True).exp_().mul_(2**52).long().cumsum_(dim=-1)
        # Scaled by the last sum, which is not exactly 1 after rounding.
        at = (self._uniforms[:, self._num_done, None] * cumulative[:, -1:]).long()
        # right=True selects the first sum above `at`, so that no token of probability 0 is sampled. The clamp covers an
        # `at` that rounds to the last sum.
        chosen = torch.searchsorted(cumulative, at, right=True).clamp(max=logps.shape[-1] - 1)
        # Into one tensor: on a CPU, one small tensor per token would fragment the heap between the freed logits.
        self._logps[:, self._num_done] = logps.gather(1, chosen).squeeze(1)
        self._num_done += 1
        # Greedy decoding takes the arg-max, which is the sampled token.
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    def read_logps(self) -> Tensor:
        """Return the log-probabilities of the sampled tokens in nats, ``float32 (B, T)``."""
        return self._logps[:, : self._num_done]


def mask_answers(response_ids: Tensor, stop_ids: Collection[int]) -> tuple[Tensor, Tensor]:
    """Return the mask of answer tokens, and which answers ended with a stop token.

    The first stop token belongs to the answer; tokens after it are padding. Padding is never identified by its id,
    which may be a stop token.

    Args:
        response_ids: Generated token ids without the prompt, ``int64 (B, T)``.
        stop_ids: Token ids that end an answer.

    Returns:
        Mask, ``bool (B, T)``, True at answer tokens; and ``bool (B,)``, True for answers with a stop token.
    """
    is_stop = torch.isin(response_ids, torch.tensor(sorted(stop_ids), device=response_ids.device))
    # Exclusive cumulative sum: the first stop token has no stop token before it.
    num_stops_before = is_stop.cumsum(dim=1) - is_stop.long()
    return num_stops_before == 0, is_stop.any(dim=1)


def join_answers(answers: Sequence[tuple[Sequence[int], Sequence[float]]], sampling: Sampling) -> Generated:
    """Combine the answers of an engine into a padded batch.

    Args:
        answers: Token ids and log-probabilities of each answer.
        sampling: Sampling options.

    Raises:
        RuntimeError: An answer neither ends with a stop token nor has the full length.
    """
    stops = set(sampling.stop_ids)
    for ids, _ in answers:
        if len(ids) < sampling.response_length and not (ids and ids[-1] in stops):
            # The padding after it would count as part of the answer (``mask_answers``).
            raise RuntimeError(
                f"the engine ended an answer after {len(ids)} of {sampling.response_length} tokens without a stop token"
            )
    response_ids = pad_sequence([torch.tensor(ids) for ids, _ in answers], True, sampling.pad_id)
    engine_logps = [torch.tensor(logps, dtype=torch.float32) for _, logps in answers]
    return Generated(response_ids, pad_sequence(engine_logps, True))


def read_continuation(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """Decode an answer as the continuation of its prompt, including white space between them.

    Args:
        tokenizer: Tokenizer of the policy.
        prompt: Token ids of the prompt.
        answer: Token ids of the answer.
    """

    def read(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    # Decoded together, because SentencePiece decoders strip the space before the first token of a text.
    whole, start = read([*prompt, *answer]), read(prompt)
    return whole[len(start) :] if whole.startswith(start) else read(answer)
