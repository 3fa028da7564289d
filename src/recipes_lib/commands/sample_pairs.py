"""``recipes sample-pairs``: let a policy answer prompts several times, and keep the best and the worst of each."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recipes_lib.config.loader import load_for_command
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem

if TYPE_CHECKING:
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


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: A flag or the configuration is wrong, or the file is of other pairs.
        DataError: The prompts cannot be read.
    """
    parser = argparse.ArgumentParser(prog="recipes sample-pairs", description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="file of the pairs, JSON Lines")
    parser.add_argument("--num_answers", type=int, default=4, help="answers to each prompt (default: 4)")
    parser.add_argument("--config", metavar="F", help="a recipe of PPO; further --key value flags override it")
    options, overrides = parser.parse_known_args(argv)
    if options.num_answers < 2:
        raise ConfigError(Problem("--num_answers", f"a pair takes two answers, not {options.num_answers}"))
    config = load_for_command("ppo", overrides, options.config)
    sys.stdout.write(f"{options.output}: {write_pairs(config, options.output, options.num_answers)}\n")


def write_pairs(config: RecipeConfig, output: Path, num_answers: int) -> str:
    """Write the pairs of a policy to a file, or those that are missing there, and return what it holds, in a line.

    Args:
        config: A recipe of PPO: its model is the policy; prompts, rewards and sampling are as there.
        output: The file.
        num_answers: To each prompt.

    Raises:
        ConfigError: As ``load_policy``, ``load_rewards`` and ``RowFile``.
        DataError: As ``load_prompt_data``.
    """
    from transformers.utils.logging import disable_progress_bar

    from recipes_lib.commands.sample_pairs import PairCounts, sample_pairs
    from recipes_lib.data.prompts import load_prompt_data
    from recipes_lib.data.row_file import RowFile
    from recipes_lib.data.store import compute_key
    from recipes_lib.models.attention.kernels import choose_attention
    from recipes_lib.models.generation import set_stop_tokens
    from recipes_lib.models.loading import load_model_config, load_tokenizer
    from recipes_lib.rl.engines.engine import build_collector, hold_policy
    from recipes_lib.rl.rewards import load_rewards
    from recipes_lib.training.layouts.launch_environment import read_launch
    from recipes_lib.training.monitoring.progress import build_progress
    from recipes_lib.training.trainers.arguments import build_training_arguments
    from recipes_lib.training.trainers.trained_model import load_policy

    disable_progress_bar()  # type: ignore[no-untyped-call]
    launch = read_launch()
    tokenizer = load_tokenizer(config.model, config.tokens)
    prompts = load_prompt_data(config, tokenizer)
    args = build_training_arguments(config, launch, has_eval=False)
    rewards = load_rewards(config.rewards, device=str(args.device))
    attention = choose_attention(config.model, load_model_config(config.model)[0], args, packing=False)
    policy = load_policy(config, attention.implementation, args, launch)
    stop_ids = set_stop_tokens(policy, tokenizer, prompts.terminators)
    models = hold_policy(policy.to(args.device), stop_ids)
    progress = build_progress(is_main=True)
    collector = build_collector(config, args, models, rewards, tokenizer, progress, lambda: None, prompts.max_length)
    facts = {"prompts": prompts.record["fingerprint"], "num_answers": num_answers, "stop_ids": stop_ids}
    tokens = [prompt.input_ids for prompt in prompts.train]
    key = compute_key({**facts, "tokens": tokens, **describe_sampling(config, collector)})
    file = RowFile(output, key, PairCounts(), what="pairs of another policy, other prompts, rewards or settings")
    file.write(sample_pairs(collector, prompts.train, num_answers, file.counts))
    return file.counts.describe()


def describe_sampling(config: RecipeConfig, collector: Collector) -> dict[str, Any]:
    """Return what decides answers and scores besides the prompts, as JSON values."""
    from recipes_lib.models.heads.scoring import read_reward_statistics
    from recipes_lib.training.trainers.arguments import resolve_precision
    from recipes_lib.training.trainers.reference import hash_weights

    rewards = collector.rewards
    model = None
    if rewards.model is not None:
        model = [hash_weights(rewards.model.model), read_reward_statistics(rewards.model.model)]
    return {
        "policy": hash_weights(collector.models.policy),
        "reward_model": model,
        "functions": {name: _read_source(function) for name, function in rewards.functions.items()},
        "weights": list(rewards.weights),
        "response_length": config.rewards.response_length,
        "temperature": config.rewards.temperature,
        "seed": collector.seed,
        "precision": resolve_precision(config),
    }


def _read_source(function: Any) -> str:
    """The text of the file that a function is in; its name where it has none."""
    try:
        return inspect.getsource(inspect.getmodule(function) or function)
    except (OSError, TypeError):
        return repr(function)
