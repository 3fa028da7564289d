"""Generation of answers to chats by a local model, with any generation engine and one seed per answer."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedTokenizerBase

from recipes_lib.config.schema import ModelConfig, TokensConfig
from recipes_lib.config.tokenization import find_prefix
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.evaluation.endpoint import THINKS, Chat, Reply
from recipes_lib.files import hash_file
from recipes_lib.models.adapters.lora import load_adapter
from recipes_lib.models.adapters.saved import find_base
from recipes_lib.models.attention.kernels import choose_kernel
from recipes_lib.models.generation import (
    GenerateBackend,
    Generator,
    Sampling,
    mask_answers,
    read_continuation,
    read_stop_ids,
    sample_answers,
)
from recipes_lib.models.heads.scoring import encode_answers, read_positions
from recipes_lib.models.inference import compute_probe_logits
from recipes_lib.models.loading import find_commit, load_causal_lm, load_model_config, load_tokenizer

GREEDY: Final = 1e-5
"""Temperature that makes sampling greedy: dividing by it separates logits by more than softmax can represent."""
MAX_ENGINE_LENGTH: Final = 32_768
"""Longest sequence, in tokens, for which an engine reserves memory."""


@dataclass(frozen=True)
class LocalModel:
    """A local model that answers chats in batches; implements ``Answerer``.

    Attributes:
        generator: Generation engine.
        policy: The model; ``None`` if the generator has its own copy of the weights.
        tokenizer: The model's tokenizer.
        sampling: Stop tokens, answer length and temperature.
        seed: Seed that, together with the number of an answer, determines the random numbers of its tokens.
        positions: Context length in tokens, of prompt and answer together.
        identity: Name, dtype and hashes of the model, which ``describe`` includes.
    """

    generator: Generator
    policy: Any
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    seed: int
    positions: float
    identity: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """Return the settings that determine the answers, as JSON values."""
        return {
            **self.identity,
            "engine": self.generator.name,
            "max_new_tokens": self.sampling.response_length,
            "temperature": self.sampling.temperature,
            "stop_ids": list(self.sampling.stop_ids),
            "seed": self.seed,
        }

    def answer(self, chats: Sequence[Chat], numbers: Sequence[int]) -> list[Reply]:
        """Answer each chat once, in the model's chat template; without one, a chat of one turn is a plain prompt.

        A chat that the template refuses, or that leaves no room for an answer, gets a reply with ``error``.

        Raises:
            ConfigError: The model has no chat template, and a chat has several turns.
        """
        length, prompts, replies = self.sampling.response_length, dict[int, list[int]](), list[Reply]()
        for at, chat in enumerate(chats):
            # An error of its own reply only: one row must not end a run of thousands.
            try:
                prompt = encode_chat(self.tokenizer, chat)
                error = f"{len(prompt):,} tokens leave no room for {length:,}"
                if len(prompt) + length <= self.positions:
                    prompts[at] = prompt
            except DataError as refusal:
                error = refusal.problems[0].found
            replies.append(Reply("", is_finished=False, error=error))
        answers = self.write(list(prompts.values()), [numbers[at] for at in prompts])
        for at, answer in zip(prompts, answers, strict=True):
            replies[at] = replace(answer, text=answer.text.strip())
        return replies

    def write(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[Reply]:
        """Answer prompts, given as token ids that include the generation prompt, in order.

        Args:
            prompts: Token ids of each prompt.
            numbers: Number of each answer; with ``seed``, it determines the answer.
        """
        seeds = [(self.seed, number) for number in numbers]
        output = sample_answers(self.generator, self.policy, prompts, seeds, self.sampling)
        # masks: True up to and including the stop token, (B, T); ended: whether there is one, (B,)
        masks, ended = mask_answers(output.response_ids, self.sampling.stop_ids)
        replies = []
        for prompt, ids, mask, has_ended in zip(prompts, output.response_ids, masks, ended.tolist(), strict=True):
            text = read_continuation(self.tokenizer, prompt, ids[mask].tolist())
            if str(self.tokenizer.decode(list(prompt[-16:]))).rstrip().endswith(THINKS):
                # Written by the template: without it, reasoning that the length limit has cut would be the answer.
                text = f"{THINKS}\n{text}"
            replies.append(Reply(text, has_ended, len(prompt), int(mask.sum())))
        return replies


def encode_chat(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> list[int]:
    """Return the token ids of a chat with the generation prompt; without a chat template, of the text of its only turn.

    Raises:
        ConfigError: The tokenizer has no chat template, and the chat has several turns.
        DataError: The chat template refuses the chat, such as its system message.
    """
    if tokenizer.chat_template is None:
        if len(chat) > 1:
            remedy = "name an instruction-tuned model, or prompts of one turn"
            raise ConfigError(Problem("chat_template", "the model has no chat template for several turns", remedy))
        # Without special tokens after the text: an end of text would be before the answer.
        bare, whole = (tokenizer(chat[0]["content"], add_special_tokens=adds)["input_ids"] for adds in (False, True))
        return [*find_prefix(bare, whole), *bare]
    # In two steps: the template writes the special tokens, so that encoding must not add a second BOS.
    try:
        rendered = tokenizer.apply_chat_template(list(map(dict, chat)), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # A template is a program, which can raise anything.
        remedy = "write prompts that it accepts, or name another model"
        raise DataError(Problem("chat_template", f"the chat template fails: {error}", remedy)) from error
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
    """Load a model, or an adapter on its base model, for generating answers.

    Args:
        named: Folder or Hub id, revision and dtype of the model or adapter.
        max_new_tokens: Longest answer, in tokens.
        temperature: Sampling temperature; 0 is greedy decoding.
        seed: Seed of sampling.
        batch_size: Prompts per batch.
        use_cpu: Do not use a GPU.
        start: Function that starts an engine with its own copy of the weights, given the sampling settings and the
            longest sequence in tokens. Default: transformers' ``generate``.

    Raises:
        ConfigError: The model cannot be loaded, or is an adapter and ``start`` is given.
        DataError: The model's logits are NaN.
    """
    # Weights come from the base that an adapter names; the tokenizer is the one saved with the adapter.
    base, adapter = find_base(named)
    tokenizer = load_tokenizer(named, TokensConfig())
    settings, generation = load_model_config(base)
    device = torch.device("cuda" if torch.cuda.is_available() and not use_cpu else "cpu")
    identity = {
        "model": str(named.model_name_or_path),
        "dtype": named.dtype,
        "weights": identify_weights(named, base),
        "chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16],
    }
    model: Any = None
    if start is None:
        model = load_causal_lm(base, choose_kernel(settings, device=device).implementation)
        if adapter is not None:
            model = load_adapter(model, str(adapter), key="model_name_or_path")
        model = model.to(device).eval()
        # Sampling from NaN logits would silently select some token.
        if compute_probe_logits(model).isnan().any():
            found, remedy = "its logits are not finite", "name an earlier checkpoint, or another `dtype`"
            raise DataError(Problem("model_name_or_path", found, remedy))
    elif adapter is not None:
        remedy = "merge it by `recipes merge`, or answer with transformers"
        raise ConfigError(Problem("engine", "this engine does not support adapters", remedy))
    stop_ids = sorted({*read_stop_ids(generation), *_find_terminators(tokenizer), tokenizer.eos_token_id} - {None})
    # Padding is masked by position (`mask_answers`), so that any id will do for a tokenizer without a padding token.
    sampling = Sampling(stop_ids, tokenizer.pad_token_id or 0, max_new_tokens, max(temperature, GREEDY))
    positions = read_positions(settings)
    generator: Generator = GenerateBackend(sampling, batch_size=batch_size, precision=contextlib.nullcontext)
    if start is not None:
        positions = min(positions, MAX_ENGINE_LENGTH)
        generator = start(sampling, int(positions))
    return LocalModel(generator, model, tokenizer, sampling, seed, positions, identity)


def identify_weights(*places: ModelConfig) -> list[Any]:
    """Return for each distinct model the SHA-256 of its weight files, or for a model of the Hub its commit."""
    identities: list[Any] = []
    for name, revision in dict.fromkeys((str(place.model_name_or_path), place.model_revision) for place in places):
        # By content, not modification time: a copied folder gives the same answers, a retrained one does not.
        hashes = {file.name: hash_file(file) for file in sorted(Path(name).glob("*.safetensors"))}
        identities.append(hashes or find_commit(name, revision))
    return identities


def _find_terminators(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the id of the token that ends an assistant turn in the chat template; empty without a template."""
    if tokenizer.chat_template is None:
        return set()
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    # A template does not declare this token: it is the last one of a rendered chat.
    return {encode_answers(tokenizer, [chat])[0][-1]}
