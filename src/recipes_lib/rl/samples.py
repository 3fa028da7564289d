"""What a policy answers to the same few prompts as training goes on, and what the answers are worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recipes_lib.data.prompts import PromptData, PromptRow
from recipes_lib.rl.collect import Collector
from recipes_lib.rl.monitor import Figures, average_rewards
from recipes_lib.training.hooks.samples import Sample


@dataclass(frozen=True, slots=True)
class ScoredSamples:
    """Answers fixed prompts, always at the same random numbers, so that what changes is the policy.

    Attributes:
        collector: Answers and scores.
        prompts: At least one.
        write: Takes the step, an answer and what it is worth, ``None`` where no reward says that.
    """

    collector: Collector
    prompts: Sequence[PromptRow]
    write: Callable[[int, Sample, float | None], None]

    def answer(self, step: int) -> Figures:
        """Write the answers after ``step`` optimizer steps, and return ``reward``, ``stop_rate`` and the mean length.

        Rewards are there as ``average_rewards`` has them.
        """
        answers, texts = self.collector.answer(self.prompts, range(len(self.prompts)))
        for at, (row, text) in enumerate(zip(self.prompts, texts, strict=True)):
            sample = Sample(
                prompt=str(self.collector.tokenizer.decode(row.input_ids)),
                completion=text,
                reference=None,
                stopped=bool(answers.finished[at]),
                num_tokens=int(answers.lengths[at]),
            )
            self.write(step, sample, float(answers.scores[at]) if answers.scored[at] else None)
        return {
            **average_rewards("reward", answers, self.collector.rewards.names),
            "stop_rate": float(answers.finished.float().mean()),
            "mean_sample_tokens": float(answers.lengths.float().mean()),
        }


def choose_samples(prompts: PromptData, count: int) -> list[PromptRow]:
    """The first ``count`` prompts, held-out ones where there are any."""
    return list(prompts.eval or prompts.train)[:count]
