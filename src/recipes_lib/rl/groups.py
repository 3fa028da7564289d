"""The run around RLOO and GRPO: the same prompts, rewards and samples as PPO's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.prompts import PromptData, PromptRow
from recipes_lib.models.attention import choose_attention
from recipes_lib.models.generation import set_stop_tokens
from recipes_lib.models.loading import load_model_config
from recipes_lib.rl.answering import build_collector, hold_policy
from recipes_lib.rl.collect import Collector, read_answers
from recipes_lib.rl.ppo_math import penalise_missing_end
from recipes_lib.rl.rewards import Rewards
from recipes_lib.rl.samples import ScoredSamples, choose_samples
from recipes_lib.training.callbacks import MetricsCallback
from recipes_lib.training.group_trainer import TRAINERS, GroupTrainer, Score
from recipes_lib.training.hooks.samples import SAMPLES_FILE, Sample
from recipes_lib.training.hooks.training_state import preserve_training_state
from recipes_lib.training.launch import Launch
from recipes_lib.training.metrics import METRICS_FILE, MetricsWriter, StepCounter, ThroughputMeter
from recipes_lib.training.observer import Observer
from recipes_lib.training.policy import load_policy
from recipes_lib.training.progress import TrainingProgress, build_progress
from recipes_lib.training.reward_guard import RewardGuard
from recipes_lib.training.watchdog import WATCHDOG


def build_group_trainer(
    config: RecipeConfig,
    args: TrainingArguments,
    launch: Launch,
    rewards: Rewards,
    prompts: PromptData,
    tokenizer: PreTrainedTokenizerBase,
) -> GroupTrainer:
    """Load the policy, and put TRL's trainer of ``config.stage`` around it.

    Raises:
        ConfigError: As ``load_policy`` and ``choose_attention``.
    """
    attention = choose_attention(config.model, load_model_config(config.model)[0], args, packing=False)
    policy = load_policy(config, attention.implementation, args, launch)
    stop_ids = set_stop_tokens(policy, tokenizer, prompts.terminators)
    progress = build_progress(is_main=launch.is_main)
    output_dir = Path(str(args.output_dir))

    models = hold_policy(policy, stop_ids)
    collector = build_collector(config, args, models, rewards, tokenizer, progress, WATCHDOG.beat, prompts.max_length)
    asked = choose_samples(prompts, config.evaluation.num_sample_prompts)
    writer = MetricsWriter(output_dir / SAMPLES_FILE, is_main=launch.is_main)
    hooks = [AnswerPrompts(collector, asked, writer)] if asked else []
    return TRAINERS[config.stage](
        model=policy,
        args=args,
        prompts=prompts.train,
        reward_guard=RewardGuard(config.rewards.max_zero_std_rollouts, progress.say),
        score=build_score(rewards, tokenizer, stop_ids, config.rewards.missing_eos_penalty or 0.0),
        processing_class=tokenizer,
        adapter=config.adapter,
        observer=_build_observer(config, hooks, output_dir, progress, is_main=launch.is_main),
    )


def build_score(rewards: Rewards, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], penalty: float) -> Score:
    """What answers are worth to the policy: the weighted rewards, less ``penalty`` where one ran into the limit.

    TRL leaves answers of which no reward says anything out of their group. The rewards are logged under PPO's names, so
    that the runs can be laid over each other.
    """

    def score(
        prompts: Sequence[PromptRow], ids: Sequence[list[int]], log: Callable[[str, float], None]
    ) -> list[float | None]:
        texts = read_answers(tokenizer, prompts, ids)
        ended = [answer[-1] in stop_ids for answer in ids]
        scores, finished = rewards.score(prompts, texts, ids, ended), torch.tensor(ended)
        figures = {"objective/score": scores.total}
        if len(scores.parts) > 1:
            figures |= {f"objective/score/{name}": part for name, part in scores.parts.items()}
        for name, values in figures.items():
            known = [value for value in values if value is not None]
            if known:
                log(name, sum(known) / len(known))
        log("objective/finish_rate", float(finished.float().mean()))
        log("objective/length", sum(map(len, ids)) / len(ids))
        totals = torch.tensor([0.0 if total is None else total for total in scores.total])
        penalised: list[float] = penalise_missing_end(totals, finished, penalty).tolist()
        return [None if total is None else worth for total, worth in zip(scores.total, penalised, strict=True)]

    return score


class AnswerPrompts:
    """Answers a few fixed prompts at each evaluation; model and random states are left as they were."""

    def __init__(self, collector: Collector, prompts: Sequence[PromptRow], writer: MetricsWriter) -> None:
        """Answer ``prompts`` by ``collector`` into ``writer``, that of ``samples.jsonl``."""
        self._samples = ScoredSamples(collector, prompts, self._write)
        self._writer = writer
        self._is_first = True

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return the figures of ``ScoredSamples.answer``."""
        if self._is_first:
            # Steps that a killed process had reached before its last checkpoint are made again.
            self._writer.rewind(step - 1)
            self._is_first = False
        with preserve_training_state(model):
            return self._samples.answer(step)

    def _write(self, step: int, sample: Sample, reward: float | None) -> None:
        self._writer.write({"step": step, **asdict(sample), "reward": reward})


def _build_observer(
    config: RecipeConfig,
    hooks: Sequence[AnswerPrompts],
    output_dir: Path,
    progress: TrainingProgress,
    *,
    is_main: bool,
) -> Observer:
    counter = StepCounter()
    writer = MetricsWriter(output_dir / METRICS_FILE, is_main=is_main)
    watching = MetricsCallback(counter, ThroughputMeter(counter, counts_correct=False), writer, progress)
    return Observer(counter, hooks, [watching], progress, config.guards)
