"""Rollout collection: sampling, scoring, and log-probabilities of policy, reference and critic."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainingArguments, set_seed

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.prompts import PromptRow
from recipes_lib.models.generation import Generated, Sampling, mask_answers, read_continuation
from recipes_lib.rl.engines.engine import build_generator
from recipes_lib.rl.models import ActorCritic, beat_between, held_whole
from recipes_lib.rl.rewards import Rewards, verify_positions
from recipes_lib.rl.rollout import (
    Rollout,
    Sequences,
    compute_response_logps,
    compute_response_values,
    lay_out,
)
from recipes_lib.rl.rollout_schedule import Stream
from recipes_lib.training.collectives import barrier
from recipes_lib.training.guards.preemption import LeftError, leave_if_asked, stop_if_agreed
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.monitoring.progress import TrainingProgress
from recipes_lib.training.trainers.arguments import build_autocast

OFF_POLICY_SHARE: Final = "rollout/off_policy_share"
"""Share of the answers of an iteration that earlier weights than those before it have sampled."""


class AsyncSampler:
    """Asynchronous sampling: a thread requests answers from a separate engine during other work; one batch at a time.

    Source: ``tests/rl/test_collect.py``.
    """

    def __init__(self) -> None:
        """Start without a request."""
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._asked: Future[Generated] | None = None

    def ask(self, generate: Callable[[], Generated]) -> None:
        """Start sampling."""
        self._asked = self._pool.submit(generate)

    def wait(self) -> None:
        """Wait until the engine is idle, so that its weights can be replaced."""
        if self._asked is not None:
            self._asked.exception()

    def take(self) -> Generated | None:
        """Return the answers when they are complete; ``None`` without a request. Every process must call.

        Raises:
            ConfigError: The engine failed.
            PreemptedError: A process received a stop request.
        """
        asked, self._asked, answers = self._asked, None, None
        if asked is not None:
            # Ranks that leave on a stop request meet here the ranks that have their answers: the next collective is
            # joint.
            with suppress(LeftError):
                answers = asked.result()
            stop_if_agreed()
        return answers

    def close(self) -> None:
        """Accept no more requests, without waiting."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Collector:
    """Collects answers on one process: sampling, scoring, log-probabilities and values.

    Attributes:
        models: Policy, critic, reference.
        generator: Samples the answers.
        rewards: Score them.
        tokenizer: Of the policy.
        args: Rows that are read at once, the device of the models, and the seed, which with the number of an answer
            decides which it is.
        precision: Gives the context in which products are computed.
        ahead: Samples the next answers while some are learnt from; ``None`` where weights and answers take turns.
    """

    def __init__(
        self,
        config: RecipeConfig,
        args: TrainingArguments,
        models: ActorCritic,
        rewards: Rewards,
        tokenizer: PreTrainedTokenizerBase,
        progress: TrainingProgress,
        max_length: int,
    ) -> None:
        """Build the engine.

        Args:
            config: What samples, how long an answer is, and the temperature.
            args: How many rows are sampled or read at once, the seed, the device and the precision.
            models: Of the run.
            rewards: Score the answers.
            tokenizer: Of the policy.
            progress: What the terminal shows.
            max_length: Tokens of the longest prompt with its longest answer.

        Raises:
            ConfigError: As ``build_generator`` and ``verify_positions``.
        """
        self.models, self.rewards, self.tokenizer, self.args, self._progress = (
            models,
            rewards,
            tokenizer,
            args,
            progress,
        )
        if rewards.model is not None:
            own = rewards.model
            if warning := verify_positions(own.model.config, own.tokenizer, tokenizer, max_length):
                progress.say(warning)
        # FSDP2 gathers weights in the compute dtype.
        self.precision: Callable[[], Any] = nullcontext if models.is_sharded else build_autocast(args)
        self._sampling = Sampling(
            stop_ids=models.stop_ids,
            pad_id=0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            response_length=config.rewards.response_length,
            temperature=config.rewards.temperature,
            beat=leave_if_asked,
        )
        self.generator = build_generator(config, args, self._sampling, precision=self.precision, max_length=max_length)
        self.ahead = AsyncSampler() if config.engine.max_staleness else None

    def collect(
        self,
        prompts: Sequence[PromptRow],
        numbers: Sequence[int],
        *,
        is_loaded: bool = False,
        following: tuple[Sequence[PromptRow], Sequence[int]] | None = None,
    ) -> tuple[Rollout, dict[str, float]]:
        """Sample answers to prompts, score them, and compute the log-probabilities and values that the updates need.

        Args:
            prompts: At least one.
            numbers: The number in the run of each answer.
            is_loaded: Whether the engine has the policy's weights.
            following: Prompts and numbers of the answers that are asked for next, where ``ahead`` samples them.

        Returns:
            The answers, and the seconds that handing the weights on, sampling, scoring and reading took.

        Raises:
            ConfigError: As ``Rewards.score``.
            LeftError: This process received a stop request.
            PreemptedError: One was, and models are sharded.
        """
        self.models.set_training(training=False)
        loading = time.perf_counter()
        early = None if self.ahead is None else self.ahead.take()
        if not is_loaded:
            self._load()
        # A shared engine has the new weights only once the sending rank has finished.
        barrier()
        began = time.perf_counter()
        rollout = self._sample(list(prompts), numbers, early)
        if self.ahead is not None and following is not None:
            asked, theirs = following
            self.ahead.ask(lambda: self._generate(None, asked, theirs))
        sampled = time.perf_counter()
        rollout, _ = self._score(rollout, numbers[0])
        scored = time.perf_counter()
        rollout = self._read(rollout)
        read = time.perf_counter()
        seconds = {
            "sync": began - loading,
            "generate": sampled - began,
            "score": scored - sampled,
            "old_ref_value": read - scored,
        }
        share = {} if self.ahead is None else {OFF_POLICY_SHARE: float(early is not None)}
        return rollout, {f"time/{name}": value for name, value in seconds.items()} | share

    def close(self) -> None:
        """Stop asynchronous sampling."""
        if self.ahead is not None:
            self.ahead.close()

    def answer(self, prompts: Sequence[PromptRow], numbers: Sequence[int]) -> tuple[Rollout, list[str]]:
        """Sample and score answers; return them as tokens, and as texts without special tokens.

        Args:
            prompts: At least one.
            numbers: As for ``collect``: the same ones show what has changed in a policy.

        Raises:
            ConfigError: As for ``collect``.
            LeftError: As there.
            PreemptedError: As there.
        """
        self.models.set_training(training=False)
        self._load()
        return self._score(self._sample(list(prompts), numbers), numbers[0])

    def _load(self) -> None:
        if self.ahead is not None:
            self.ahead.wait()
        with self.models.as_policy() as policy:
            self.generator.load(policy)

    def _generate(self, policy: Any, prompts: Sequence[PromptRow], numbers: Sequence[int]) -> Generated:
        uniforms = torch.from_numpy(np.stack([self._draw(number) for number in numbers]))
        return self.generator.generate(policy, [prompt.input_ids for prompt in prompts], uniforms)

    def _sample(self, prompts: list[PromptRow], numbers: Sequence[int], early: Generated | None = None) -> Rollout:
        WATCHDOG.enter("sampling answers")
        # Batches have prompts of similar length, which reduces padding; answers do not depend on the order.
        order = list(range(len(prompts)))
        # Answers that were sampled ahead are in the order in which they were asked for.
        if early is None:
            order.sort(key=lambda row: len(prompts[row].input_ids))
        size = self.generator.batch_size or len(order)
        chunks = [order[start : start + size] for start in range(0, len(order), size)]
        ids = torch.zeros(len(prompts), self._sampling.response_length, dtype=torch.int64)
        logps = torch.zeros(ids.shape)
        with self.models.as_policy() as policy, held_whole(policy, is_needed=self.generator.uses_policy):
            for rows in self._progress.track(chunks, "sampling answers", len(chunks)):
                asked, theirs = [prompts[row] for row in rows], [numbers[row] for row in rows]
                answered = self._generate(policy, asked, theirs) if early is None else early
                width = answered.response_ids.shape[1]
                # A batch is shorter than the limit only if all its answers ended; tokens after the end are masked.
                ids[rows, :width], logps[rows, :width] = answered.response_ids, answered.engine_logps
        mask, finished = mask_answers(ids, self._sampling.stop_ids)
        none = torch.zeros(len(prompts))
        unscored = torch.zeros(len(prompts), dtype=torch.bool)
        by_token = torch.zeros_like(logps)
        everything = Rollout(
            prompts=prompts,
            numbers=torch.tensor(numbers),
            response_ids=torch.where(mask, ids, 0),
            mask=mask,
            finished=finished,
            scored=unscored,
            scores=none,
            rewards=none[:, None],
            engine_logps=torch.where(mask, logps, 0.0),
            logps=by_token,
            ref_logps=by_token,
            values=by_token,
        )
        return everything.take(range(len(prompts)))

    def _draw(self, number: int) -> Any:
        # A stream for each answer, whichever process samples it and whatever was drawn before.
        return np.random.default_rng([self.args.seed, Stream.ANSWER, number]).random(self._sampling.response_length)

    def _score(self, rollout: Rollout, number: int) -> tuple[Rollout, list[str]]:
        WATCHDOG.enter("scoring answers")
        # Rewards that use global random generators must give the same values as in a run without interruption. The seed
        # is set here, because a library may also draw numbers when it is loaded at its first use.
        set_seed((self.args.seed + 7919 * number) % 2**32)
        answers = [ids[mask].tolist() for ids, mask in zip(rollout.response_ids, rollout.mask, strict=True)]
        texts = read_answers(self.tokenizer, rollout.prompts, answers)
        own = None if self.rewards.model is None else self.rewards.model.model
        # Whole on every process, because each scores answers of its own, in batches of other shapes.
        with held_whole(own if self.models.reward is None else self.models.policy):
            scores = self.rewards.score(rollout.prompts, texts, answers, rollout.finished.tolist())
        known: dict[str, Any] = {
            "scored": torch.tensor([total is not None for total in scores.total]),
            "scores": torch.tensor([0.0 if total is None else total for total in scores.total]),
            "rewards": torch.tensor([[math.nan if s is None else s for s in part] for part in scores.parts.values()]).T,
        }
        return dataclasses.replace(rollout, **known), texts

    def _read(self, rollout: Rollout) -> Rollout:
        WATCHDOG.enter("reading answers")

        def logps(model: Any, sequences: Sequences) -> Tensor:
            return compute_response_logps(model, sequences, temperature=self._sampling.temperature)[0]

        with self.models.as_policy() as policy:
            old = self._map(rollout, lambda sequences: logps(policy, sequences))
        ref, values = old, torch.zeros_like(old)
        if self.models.has_reference:
            with self.models.as_reference() as reference:
                ref = self._map(rollout, lambda sequences: logps(reference, sequences))
        if self.models.critic is not None:
            with self.models.as_critic() as critic:
                values = self._map(rollout, lambda sequences: compute_response_values(critic, sequences))
        return dataclasses.replace(rollout, logps=old, ref_logps=ref, values=values)

    def _map(self, rollout: Rollout, compute: Callable[[Sequences], Tensor]) -> Tensor:
        """Apply ``compute`` to all answers, ``float32 (B, T)``, without gradients."""
        result = torch.zeros(rollout.mask.shape)
        with torch.no_grad(), self.precision():
            for rows in rollout.cut(self.args.per_device_eval_batch_size):
                beat_between(self.models.policy)
                # (rows, T of the longest of them); what is behind it stays 0.
                part = compute(lay_out(rollout.take(rows), self.args.device))
                result[rows, : part.shape[1]] = part.float().cpu()
        return result


def read_answers(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[PromptRow], answers: Sequence[list[int]]
) -> list[str]:
    """Texts of answers without special tokens; after a plain prompt, decoded as its continuation."""
    return [
        read_continuation(tokenizer, prompt.input_ids, ids)
        if isinstance(prompt.content, str)
        else str(tokenizer.decode(ids, skip_special_tokens=True))
        for prompt, ids in zip(prompts, answers, strict=True)
    ]
