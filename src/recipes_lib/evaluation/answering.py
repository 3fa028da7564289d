"""Answers of a model on this machine to chats, by any generation engine, one seed for each answer."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from recipes_lib.config.schema import ModelConfig, TokensConfig
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.evaluation.endpoint import Chat, Reply
from recipes_lib.files import hash_file
from recipes_lib.models.adapters.lora import load_adapter
from recipes_lib.models.adapters.saved import find_adapter, read_base
from recipes_lib.models.attention.kernels import choose_kernel
from recipes_lib.models.generation import (
    GenerateBackend,
    Generator,
    Sampling,
    mask_answers,
    read_continuation,
    set_stop_tokens,
)
from recipes_lib.models.heads.scoring import encode_answers, read_positions
from recipes_lib.models.loading import find_commit, load_causal_lm, load_model_config, load_tokenizer

GREEDY: Final = 1e-5
"""Temperature below which sampling is greedy: what differs by more than a rounding error has no other chance."""
MAX_ENGINE_LENGTH: Final = 32_768
"""Longest sequence of an engine that reserves memory for it."""


@dataclass(frozen=True, slots=True)
class Written:
    """An answer as text.

    Attributes:
        text: Without special tokens.
        has_ended: Whether a stop token ended it.
        num_tokens: The stop token included.
    """

    text: str
    has_ended: bool
    num_tokens: int


@dataclass(frozen=True)
class LocalModel:
    """A model that answers on this machine, in batches.

    Attributes:
        generator: Samples the tokens.
        policy: What it samples from; ``None`` where the generator holds the weights.
        tokenizer: Of the model.
        sampling: Stop tokens, length and temperature.
        batch_size: Prompts given to the generator at a time.
        seed: With the number of an answer, decides which it is, if the generator follows seeds.
        positions: Of the model, prompt and answer together.
        identity: What ``describe`` returns besides.
    """

    generator: Generator
    policy: Any
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    batch_size: int
    seed: int
    positions: float
    identity: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """Return what determines the answers."""
        return {
            **self.identity,
            "engine": self.generator.name,
            "max_new_tokens": self.sampling.response_length,
            "temperature": self.sampling.temperature,
            "stop_ids": list(self.sampling.stop_ids),
            "seed": self.seed,
        }

    def answer(self, chats: Sequence[Chat], numbers: Sequence[int]) -> list[Reply]:
        """Answer each chat once, in the model's template; without one, a chat of one turn is a plain prompt.

        Raises:
            ConfigError: The model has no chat template, and a chat has several turns.
        """
        prompts = [encode_chat(self.tokenizer, chat) for chat in chats]
        length = self.sampling.response_length
        # A prompt without room is the error of its own reply: one long row does not end a run of thousands.
        fitting = [at for at, prompt in enumerate(prompts) if len(prompt) + length <= self.positions]
        replies = [
            Reply("", is_finished=False, error=f"{len(prompt):,} tokens leave no room for {length:,}")
            for prompt in prompts
        ]
        written = self.write([prompts[at] for at in fitting], [numbers[at] for at in fitting])
        for at, found in zip(fitting, written, strict=True):
            replies[at] = Reply(found.text.strip(), found.has_ended, len(prompts[at]), found.num_tokens)
        return replies

    def write(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[Written]:
        """Answer prompts of token ids, the generation prompt included."""
        written = []
        for start in range(0, len(prompts), self.batch_size):
            part = slice(start, start + self.batch_size)
            written += self._write_batch(prompts[part], numbers[part])
        return written

    def _write_batch(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[Written]:
        length = self.sampling.response_length
        # One generator for each answer: its draws do not depend on the batch that it falls into.
        uniforms = np.stack([np.random.default_rng([self.seed, number]).random(length) for number in numbers])
        given = self.generator.generate(self.policy, prompts, torch.from_numpy(uniforms))
        masks, ended = mask_answers(given.response_ids, self.sampling.stop_ids)
        return [
            Written(read_continuation(self.tokenizer, prompt, ids[mask].tolist()), has_ended, int(mask.sum()))
            for prompt, ids, mask, has_ended in zip(prompts, given.response_ids, masks, ended.tolist(), strict=True)
        ]


def encode_chat(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> list[int]:
    """Return the tokens of a chat with the generation prompt; of one turn without a template, those of its text.

    Raises:
        ConfigError: There is no template, and there are several turns.
    """
    if tokenizer.chat_template is None:
        if len(chat) > 1:
            remedy = "name an instruction-tuned model, or prompts of one turn"
            raise ConfigError(Problem("chat_template", "the model has no chat template for several turns", remedy))
        plain: list[int] = tokenizer(chat[0]["content"])["input_ids"]
        return plain
    messages = [dict(message) for message in chat]
    # Rendered as text first: the template writes its special tokens, and encoding must not add a second BOS.
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def load_local_model(
    named: ModelConfig,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch_size: int,
    use_cpu: bool = False,
    start: Callable[[Sampling, int], Generator] | None = None,
) -> LocalModel:
    """Load a model, or an adapter on its base, that answers.

    Args:
        named: Folder or Hub id, revision and dtype.
        max_new_tokens: Longest answer.
        temperature: 0 is greedy.
        seed: Of sampling.
        batch_size: Prompts of a batch.
        use_cpu: Do not use a GPU.
        start: Starts an engine with its own weights, for sequences of so many tokens; unset, transformers'
            ``generate``.

    Raises:
        ConfigError: It cannot be loaded, or is an adapter and an engine was named.
        DataError: Its logits are NaN.
    """
    adapter = find_adapter(str(named.model_name_or_path), named.model_revision)
    base = named if adapter is None else replace(named, **read_base(adapter)._asdict())
    tokenizer = load_tokenizer(named, TokensConfig())
    settings, _ = load_model_config(base)
    device = torch.device("cuda" if torch.cuda.is_available() and not use_cpu else "cpu")
    kernel = choose_kernel(settings, None, device=device, compute_dtype=torch.float32, packing=False)
    identity = {
        "model": str(named.model_name_or_path),
        "dtype": named.dtype,
        "weights": identify_weights(named, base),
        "chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16],
    }
    model: Any = None
    if start is None:
        model = load_causal_lm(base, kernel.implementation)
        stop_ids = set_stop_tokens(model, tokenizer, _find_terminators(tokenizer))
        if adapter is not None:
            model = load_adapter(model, str(adapter))
        model = model.to(device).eval()
        _verify_logits(model, settings.get_text_config().vocab_size)
    elif adapter is not None:
        remedy = "merge it by `recipes merge`, or answer with transformers"
        raise ConfigError(Problem("engine", "an adapter has no weights of its own", remedy))
    else:
        # Without weights there is no generation configuration to read stop tokens from; the tokenizer has to do.
        stop_ids = sorted({*_find_terminators(tokenizer), tokenizer.eos_token_id} - {None})
    sampling = Sampling(stop_ids, tokenizer.pad_token_id or 0, max_new_tokens, max(temperature, GREEDY))
    positions = read_positions(settings)
    generator: Generator = GenerateBackend(sampling, batch_size=batch_size, precision=contextlib.nullcontext)
    if start is not None:
        positions = min(positions, MAX_ENGINE_LENGTH)
        generator = start(sampling, int(positions))
    return LocalModel(generator, model, tokenizer, sampling, batch_size, seed, positions, identity)


@torch.no_grad()
def _verify_logits(model: Any, vocab_size: int) -> None:
    """Raise for NaN on eight tokens: sampling would take some token of NaN logits without a word.

    Raises:
        DataError: There is NaN.
    """
    logits = model(input_ids=torch.arange(1, 9, device=model.device)[None] % vocab_size).logits
    if logits.isnan().any():
        found, remedy = "its logits are not finite", "name an earlier checkpoint, or another `dtype`"
        raise DataError(Problem("model_name_or_path", found, remedy))


def identify_weights(*places: ModelConfig) -> list[Any]:
    """Hashes of the weights of a folder, the commit of a model of the Hub; of several models in order."""
    found: list[Any] = []
    for place in dict.fromkeys((str(place.model_name_or_path), place.model_revision) for place in places):
        folder = Path(place[0])
        is_here = folder.is_dir()
        # By content and not by time: a copied folder gives the same answers, a retrained one others.
        hashes = {file.name: hash_file(file) for file in sorted(folder.glob("*.safetensors"))} if is_here else {}
        found.append(hashes or find_commit(*place))
    return found


def _find_terminators(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The token that ends a turn in the template."""
    if tokenizer.chat_template is None:
        return set()
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    # No template says which token ends a turn: one is rendered, and its last token taken.
    return {encode_answers(tokenizer, [chat])[0][-1]}
