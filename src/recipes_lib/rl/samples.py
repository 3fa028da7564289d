"""What a policy answers to the same few prompts as training goes on, and what the answers are worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recipes_lib.data.prompts import PromptData, PromptRow
from recipes_lib.rl.collect import Collector
from recipes_lib.training.hooks.samples import Sample

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class ScoredSamples:
    """Answers fixed prompts, always at the same random numbers, so that what changes is the policy.

    Attributes:
        collector: Answers and scores.
        prompts: At least one.
        write: Takes the step, an answer and what it is worth.
    """

    collector: Collector
    prompts: Sequence[PromptRow]
    write: Callable[[int, Sample, float], None]

    def answer(self, step: int) -> Figures:
        """Write the answers after ``step`` optimizer steps, and return ``reward``, ``stop_rate`` and the mean length.

        Where there are several rewards, each is there as ``reward/<name>`` besides.
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
            self.write(step, sample, float(answers.scores[at]))
        names, means = self.collector.rewards.names, answers.rewards.mean(dim=0).tolist()
        return {
            "reward": float(answers.scores.mean()),
            **({f"reward/{n}": mean for n, mean in zip(names, means, strict=True)} if len(names) > 1 else {}),
            "stop_rate": float(answers.finished.float().mean()),
            "mean_sample_tokens": float(answers.lengths.float().mean()),
        }


def choose_samples(prompts: PromptData, count: int) -> list[PromptRow]:
    """The first ``count`` prompts, held-out ones where there are any."""
    return list(prompts.eval or prompts.train)[:count]
