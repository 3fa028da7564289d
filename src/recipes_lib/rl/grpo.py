"""RLOO and GRPO over TRL's trainers, with the prompts, rewards, evaluation and checkpoints of PPO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
import trl
from datasets import Dataset
from torch import nn
from torch.utils.data import Sampler
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.prompts import PromptData, PromptRow
from recipes_lib.models.attention.kernels import choose_attention
from recipes_lib.models.generation import set_stop_tokens
from recipes_lib.models.inference import preserve_training_state
from recipes_lib.models.loading import load_model_config
from recipes_lib.models.quantization import keeping_precision
from recipes_lib.rl.collect import Collector, read_answers
from recipes_lib.rl.engines.engine import build_collector, hold_policy
from recipes_lib.rl.monitor import ScoredSamples, choose_samples
from recipes_lib.rl.ppo_math import penalise_missing_end
from recipes_lib.rl.rewards import RewardGuard, Rewards
from recipes_lib.training.evaluation.samples import SAMPLES_FILE, Sample
from recipes_lib.training.guards.preemption import stop_if_agreed
from recipes_lib.training.guards.step_facts import StepInputs
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.layouts.launch_environment import Launch
from recipes_lib.training.monitoring.callbacks import MetricsCallback, Observer
from recipes_lib.training.monitoring.metrics import METRICS_FILE, MetricsWriter, StepCounter, ThroughputMeter
from recipes_lib.training.monitoring.progress import TrainingProgress, build_progress
from recipes_lib.training.trainers.recipe_trainer import RecipeTrainer
from recipes_lib.training.trainers.trained_model import load_policy

_STATE_KEY: Final = "recipes_lib_rewards"
"""Under which what the guard of rewards has seen travels in a checkpoint's ``trainer_state.json``."""

Score = Callable[[Sequence[PromptRow], Sequence[list[int]], Callable[[str, float], None]], list[float | None]]
"""Prompts, the tokens of answers, and what logs a figure -> what each answer is worth; ``None``: not known."""


class GroupTrainer(RecipeTrainer):
    """What RLOO and GRPO share: the objective is TRL's, the run around it that of ``RecipeTrainer``.

    TRL is given the number of each prompt instead of the prompt, and asks for its tokens here: so a policy is asked in
    all stages with the very same ones.
    """

    has_own_objective = False
    # TRL's, which is next in line behind the methods that this library puts before it.
    loss_is_scaled_for_ga: bool
    num_generations: int

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        prompts: Sequence[PromptRow],
        score: Score,
        reward_guard: RewardGuard,
        **options: Any,
    ) -> None:
        """Set TRL's trainer up.

        Args:
            model: The policy, perhaps under a fresh adapter.
            prompts: What is asked.
            score: What answers are worth.
            reward_guard: Judges that.
            **options: As ``RecipeTrainer``.
        """
        self._prompts = prompts
        self.reward_guard = reward_guard

        def reward(*, prompts: Sequence[str], completion_ids: Sequence[list[int]], **given: Any) -> list[float | None]:
            rows = [self._prompts[int(number)] for number in prompts]
            WATCHDOG.enter("scoring answers")
            scores = score(rows, completion_ids, given["log_metric"])
            WATCHDOG.enter("a step from new answers")
            return scores

        numbers = Dataset.from_dict({"prompt": [str(number) for number in range(len(prompts))]})
        # Upstream asks for held-out rows where something is evaluated, which is the hooks' affair.
        with keeping_precision(model):
            super().__init__(model=model, train_dataset=numbers, eval_dataset=numbers, reward_funcs=[reward], **options)
        if "ref" in getattr(model, "peft_config", {}):
            # A copy of the fresh adapter: without any, the model is the same reference.
            self.model.delete_adapter("ref")
        self.add_callback(_RestoreOnResume(self))

    def count_terms(self, batch: Any) -> torch.Tensor:
        """Return the number of answers."""
        return torch.tensor(len(batch))

    def mask_batch(self, batch: Any) -> Any:
        """Return the batch: TRL's sampler makes whole rounds, so that none is repeated."""
        return batch

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """Take the prompts of one optimizer step; their answers are not known yet, nor what they are worth.

        Raises:
            PreemptedError: A process was asked to stop; the step is not begun.
        """
        stop_if_agreed()
        if self.stops_at_end():
            return [], None
        self.guard.inputs = StepInputs()
        return [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)], None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Sample if it is time to, then run forward and backward."""
        loss: torch.Tensor = super(RecipeTrainer, self).training_step(model, inputs, num_items_in_batch)
        self.guard.inputs.losses.append(loss)
        return loss

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Any:
        """Return TRL's loss, and count what it is of."""
        num_targets = inputs["completion_mask"].sum()
        self.observer.counter.add(inputs["prompt_mask"].sum() + num_targets, num_targets)
        return super().compute_loss(model, inputs, *args, **options)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: what a step costs is not known before it is sampled."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Let TRL add its figures to those of a training step."""
        if "loss" in logs:
            super(RecipeTrainer, self).log(logs, start_time)
        else:
            Trainer.log(self, logs, start_time)

    # trl 1.16 repeats each prompt for its group in a sampler of its own, which ``RecipeTrainer`` replaces.
    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """Take the prompts in groups, as TRL does."""
        sampler: Sampler[int] | None = super(RecipeTrainer, self)._get_train_sampler(train_dataset)
        return sampler

    # trl 1.16 renders prompts itself, without our template keys and a row's tools.
    def _tokenize_prompts(self, prompts: Sequence[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """Return the tokens of numbered prompts, which are answered next; there are no images."""
        WATCHDOG.enter("sampling groups of answers")
        return [self._prompts[int(number)].input_ids for number in prompts], None, {}

    # trl 1.16 has no callback between the rewards and the advantages.
    def _calculate_rewards(self, *given: Any) -> torch.Tensor:
        """Return the rewards of all processes, once something can be learnt from them.

        Raises:
            DivergedError: As ``RewardGuard``.
        """
        rewards: torch.Tensor = super()._calculate_rewards(*given)  # type: ignore[misc]
        self.reward_guard.judge(rewards.view(-1, self.num_generations), step=self.state.global_step + 1)
        stored: Any = self.state.stateful_callbacks
        stored[_STATE_KEY] = self.reward_guard.export()
        return rewards

    # trl 1.16 reports every run unless an environment variable forbids it.
    def _send_telemetry(self) -> None:
        """Report nothing to anyone."""


class _RestoreOnResume(TrainerCallback):
    """Tells TRL after a resumption which part of its answers is due: it counts from the start of the process.

    And the guard of rewards what it had seen.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer._step = state.global_step * args.gradient_accumulation_steps
        stored: Any = state.stateful_callbacks
        self._trainer.reward_guard.restore(stored.get(_STATE_KEY, {}))


class RLOOTrainer(GroupTrainer, trl.RLOOTrainer):  # type: ignore[misc]
    """TRL's RLOO."""

    loss_is_scaled_for_ga = trl.RLOOTrainer.loss_is_scaled_for_ga


class GRPOTrainer(GroupTrainer, trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPO."""

    loss_is_scaled_for_ga = trl.GRPOTrainer.loss_is_scaled_for_ga


TRAINERS: Mapping[str, type[GroupTrainer]] = {"rloo": RLOOTrainer, "grpo": GRPOTrainer}
"""Stage -> its trainer."""


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
