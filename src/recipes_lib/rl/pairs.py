"""Pairs of a policy's own answers, labelled by the rewards: what the next round of preference training learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from recipes_lib.data.prompts import PromptRow
from recipes_lib.rl.collect import Collector


class Answered(NamedTuple):
    """An answer: its text without special tokens, its worth, and whether it may stand in a pair.

    That takes a worth that is known, something that it says, and an end of its own.
    """

    text: str
    score: float
    usable: bool


@dataclass(slots=True)
class PairCounts:
    """How far a set of pairs is.

    Attributes:
        num_prompts: Prompts that were answered.
        num_pairs: Those that gave a pair.
        num_alike: Those whose answers are worth the same, or are the same.
        num_unfinished: Those with fewer than two answers that may stand in a pair.
        score_sum: Of all answers whose worth is known.
        num_answers: Those, of all prompts.
        num_bytes: Of the file, as of these prompts.
    """

    num_prompts: int = 0
    num_pairs: int = 0
    num_alike: int = 0
    num_unfinished: int = 0
    score_sum: float = 0.0
    num_answers: int = 0
    num_bytes: int = 0

    def describe(self) -> str:
        """Return the counts in a line."""
        mean = self.score_sum / max(self.num_answers, 1)
        return (
            f"{self.num_prompts:,} prompts, {self.num_pairs:,} pairs; {self.num_alike:,} have answers worth the same, "
            f"{self.num_unfinished:,} fewer than two that end and are scored; mean score {mean:.4g}"
        )


def choose_pair(answers: Sequence[Answered]) -> tuple[Answered, Answered] | None:
    """The best and the worst of the answers that may be a pair; ``None`` where they are alike in worth or in words.

    Those that ran into the limit do not take part: as rows they would end where nobody ended them. Of answers that are
    worth the same the first counts.
    """
    usable = [answer for answer in answers if answer.usable]
    if len(usable) < 2:
        return None
    best, worst = (choose(usable, key=lambda answer: answer.score) for choose in (max, min))
    return (best, worst) if best.score > worst.score and best.text != worst.text else None


def sample_pairs(
    collector: Collector, prompts: Sequence[PromptRow], num_answers: int, counts: PairCounts
) -> Iterator[list[dict[str, Any]]]:
    """Yield rows of the ``preference`` layout, batch by batch, and count on.

    Args:
        collector: Answers and scores.
        prompts: All of them; those that are counted already are left out. Which answers a prompt gets depends on its
            place among them and the seed.
        num_answers: To each prompt, at least two.
        counts: Of what is done; a batch is counted when it is yielded.
    """
    size = max(1, collector.batch_size // num_answers)
    for start in range(counts.num_prompts, len(prompts), size):
        batch = prompts[start : start + size]
        asked = [prompt for prompt in batch for _ in range(num_answers)]
        first = start * num_answers
        answers, texts = collector.answer(asked, range(first, first + len(asked)))
        known = zip(texts, answers.scores.tolist(), (answers.finished & answers.scored).tolist(), strict=True)
        # An answer that says nothing is none to learn from, and neither is one of which no reward says anything.
        answered = [Answered(text, score, usable and bool(text.strip())) for text, score, usable in known]
        rows = []
        for at, prompt in enumerate(batch):
            of_prompt = answered[at * num_answers : (at + 1) * num_answers]
            pair = choose_pair(of_prompt)
            counts.num_unfinished += sum(answer.usable for answer in of_prompt) < 2
            counts.num_alike += pair is None and sum(answer.usable for answer in of_prompt) > 1
            if pair is not None:
                rows.append(_build_row(prompt, *pair))
        counts.num_prompts += len(batch)
        counts.num_pairs += len(rows)
        counts.num_answers += int(answers.scored.sum())
        counts.score_sum += sum(answer.score for answer in answered)
        yield rows


def _build_row(prompt: PromptRow, best: Answered, worst: Answered) -> dict[str, Any]:
    def lay_out(text: str) -> Any:
        return text if isinstance(prompt.content, str) else [{"role": "assistant", "content": text}]

    return {
        "prompt": prompt.content,
        "chosen": lay_out(best.text),
        "rejected": lay_out(worst.text),
        "score_chosen": best.score,
        "score_rejected": worst.score,
    }
