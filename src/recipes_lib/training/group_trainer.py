"""RLOO and GRPO: TRL's trainers, with prompts, rewards, evaluation, checkpoints and exit codes as in other stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import trl
from datasets import Dataset
from torch import nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes_lib.data.prompts import PromptRow
from recipes_lib.models.quantization import keeping_precision
from recipes_lib.training.guards import StepInputs
from recipes_lib.training.preemption import stop_if_agreed
from recipes_lib.training.recipe_trainer import RecipeTrainer
from recipes_lib.training.reward_guard import RewardGuard
from recipes_lib.training.watchdog import WATCHDOG

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
        self.add_callback(_GoOn(self))

    def count_terms(self, batch: Any) -> torch.Tensor:
        """Return the number of answers."""
        return torch.tensor(len(batch))

    def leave_out(self, batch: Any) -> Any:
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
            super().log(logs, start_time)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """Take the prompts in groups, as TRL does."""
        sampler: Sampler[int] | None = super(RecipeTrainer, self)._get_train_sampler(train_dataset)
        return sampler

    def _tokenize_prompts(self, prompts: Sequence[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """Return the tokens of numbered prompts, which are answered next; there are no images."""
        WATCHDOG.enter("sampling groups of answers")
        return [self._prompts[int(number)].input_ids for number in prompts], None, {}

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

    def _send_telemetry(self) -> None:
        """Report nothing to anyone."""


class _GoOn(TrainerCallback):
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
