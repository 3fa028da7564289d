"""What ``recipes check`` looks at in a run of RLOO or GRPO: as PPO's, but for how the steps are counted."""

from __future__ import annotations

from typing import Any

from recipes_lib.inspection.base import Inspection, Say
from recipes_lib.inspection.ppo import PPOInspection


class GroupInspection(PPOInspection):
    """Prompts as the policy will be asked, every reward imported, and answers in groups."""

    def __init__(self, *args: Any) -> None:
        """Take what ``Inspection`` takes."""
        super().__init__(*args)
        self.num_learners = 1  # There is no critic.

    def look_at_kernels(self, say: Say) -> None:
        """The device, the precision and the attention kernel; what PPO's models take is another sum."""
        Inspection.look_at_kernels(self, say)

    def look_at_steps(self, say: Say) -> None:
        """Answers at a time, optimizer steps, and the rates.

        Raises:
            ConfigError: As ``plan_groups``.
        """
        from recipes_lib.planning.groups import plan_groups

        if self._data is None:
            return
        plan = plan_groups(len(self._data.train), self.config, self.launch.world_size)
        steps = plan.steps
        self.num_steps = steps.num_steps
        say(
            f"{plan.answers_per_generation:,} answers to {plan.prompts_per_generation:,} prompts at a time, "
            f"{steps.rows_per_step:,} a step: {steps.num_steps:,} steps, {steps.num_epochs:.3g} epochs"
        )
        self.say_rates(say, steps.num_warmup_steps)
