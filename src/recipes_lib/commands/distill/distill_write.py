"""``recipes distill-write``: let a teacher answer prompts, and keep its answers as rows to fine-tune a student on."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recipes_lib.config.loader import load_for_command
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem

if TYPE_CHECKING:
    from recipes_lib.data.prompts import PromptRow

THINKS: Final = "<think>"
ENDS_THINKING: Final = "</think>"
"""What stands around reasoning, in the answers of every model that is known to mark it."""


@dataclass(slots=True)
class AnswerCounts:
    """How far a set of answers is.

    Attributes:
        num_prompts: Prompts that were answered.
        num_rows: Those whose answer is kept.
        num_unfinished: Answers that ran into the limit.
        num_empty: Answers that say nothing.
        num_reasoned: Kept answers that began with reasoning.
        num_bytes: Of the file.
    """

    num_prompts: int = 0
    num_rows: int = 0
    num_unfinished: int = 0
    num_empty: int = 0
    num_reasoned: int = 0
    num_bytes: int = 0

    def describe(self) -> str:
        """Return the counts in a line."""
        return (
            f"{self.num_rows:,} answers to {self.num_prompts:,} prompts, {self.num_reasoned:,} with reasoning; "
            f"left out: {self.num_unfinished:,} that ran into the limit, {self.num_empty:,} that say nothing"
        )


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: A flag or the configuration is wrong, or the file is of other answers.
        DataError: The prompts cannot be read.
    """
    parser = argparse.ArgumentParser(prog="recipes distill-write", description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="file of the rows, JSON Lines")
    told = "what becomes of <think> ... </think> (default: keep)"
    parser.add_argument("--reasoning", choices=("keep", "drop"), default="keep", help=told)
    parser.add_argument("--config", metavar="F", help="a recipe of distillation; further --key value flags override it")
    options, overrides = parser.parse_known_args(argv)
    config = load_for_command("distill", overrides, options.config)
    sys.stdout.write(f"{options.output}: {write_answers(config, options.output, reasoning=options.reasoning)}\n")


def write_answers(config: RecipeConfig, output: Path, *, reasoning: str) -> str:
    """Write a teacher's answers to a file, or those that are missing there, and return what it holds, in a line.

    Args:
        config: A recipe of distillation: its teacher answers, in its own template, the prompts of its dataset.
        output: The file.
        reasoning: ``keep`` or ``drop``.

    Raises:
        ConfigError: The teacher cannot be loaded; there is a mixture; as ``RowFile``.
        DataError: As ``load_prompt_data``.
    """
    from recipes_lib.data.prompts import load_prompt_data
    from recipes_lib.data.row_file import RowFile
    from recipes_lib.data.store import compute_key
    from recipes_lib.distillation.teacher_store import identify_teacher
    from recipes_lib.models.attention.kernels import choose_attention
    from recipes_lib.models.generation import set_stop_tokens
    from recipes_lib.models.loading import load_causal_lm, load_model_config, load_tokenizer
    from recipes_lib.training.layouts.launch_environment import read_launch
    from recipes_lib.training.trainers.arguments import build_training_arguments

    if config.data.dataset_mixture:
        where = config.provenance.get("dataset_mixture", "dataset_mixture")
        raise ConfigError(Problem(where, "prompts come from one dataset", "join the files, and write `dataset_name`"))
    config = take_teacher(config)
    tokenizer = load_tokenizer(config.model, config.tokens)
    prompts = load_prompt_data(config, tokenizer)
    args = build_training_arguments(config, read_launch(), has_eval=False)
    attention = choose_attention(config.model, load_model_config(config.model)[0], args, packing=False)
    teacher: Any = load_causal_lm(config.model, attention.implementation)
    teacher.to(args.device)
    stop_ids = set_stop_tokens(teacher, tokenizer, prompts.terminators)
    facts = {
        "teacher": {"name": config.model.model_name_or_path, **identify_teacher(config)},
        "dataset": {"name": config.data.dataset_name, "fingerprint": prompts.record["fingerprint"]},
        "response_length": config.rewards.response_length,
        "temperature": config.distillation.sampling_temperature,
        "seed": args.seed,
        "reasoning": reasoning,
    }
    asked = [prompt.input_ids for prompt in prompts.train]
    key = compute_key({**facts, "stop_ids": stop_ids, "prompts": asked})
    what = "answers of another teacher, to other prompts, or otherwise sampled"
    file = RowFile(output, key, AnswerCounts(), what=what, facts=facts)
    file.write(answer(config, args, teacher, tokenizer, prompts.train, file.counts, reasoning=reasoning))
    return file.counts.describe()


def take_teacher(config: RecipeConfig) -> RecipeConfig:
    """Return the run with its teacher for its model, by its own tokenizer and template."""
    from recipes_lib.models.loading import choose_teacher

    tokens = dataclasses.replace(config.tokens, chat_template_path=None, eos_token=None, pad_token=None)
    return dataclasses.replace(config, model=choose_teacher(config), tokens=tokens)


def answer(
    config: RecipeConfig,
    args: Any,
    teacher: Any,
    tokenizer: Any,
    prompts: Sequence[PromptRow],
    counts: AnswerCounts,
    *,
    reasoning: str,
) -> Iterator[list[dict[str, Any]]]:
    """Yield rows, batch by batch, and count on.

    Which answer a prompt gets depends on its place among them and the seed. Those that are counted already are left
    out; a batch is counted when it is yielded.

    Args:
        config: Length and temperature of answers.
        args: Batch size, seed, device and precision.
        teacher: On the device, with its stop tokens.
        tokenizer: Of the teacher.
        prompts: All of them.
        counts: Of what is done.
        reasoning: ``keep`` or ``drop``.
    """
    import numpy as np
    import torch

    from recipes_lib.models.generation import GenerateBackend, Sampling, mask_answers, read_continuation, read_stop_ids
    from recipes_lib.training.trainers.arguments import build_autocast

    stop_ids, size = read_stop_ids(teacher), args.per_device_eval_batch_size
    length = config.rewards.response_length
    sampling = Sampling(stop_ids, 0, length, config.distillation.sampling_temperature)
    backend = GenerateBackend(sampling, batch_size=size, precision=build_autocast(args))
    for start in range(counts.num_prompts, len(prompts), size):
        batch = prompts[start : start + size]
        uniforms = np.stack([np.random.default_rng([args.seed, start + at]).random(length) for at in range(len(batch))])
        given = backend.generate(teacher, [prompt.input_ids for prompt in batch], torch.from_numpy(uniforms))
        masks, finished = mask_answers(given.response_ids, stop_ids)
        rows = []
        for prompt, ids, mask, has_ended in zip(batch, given.response_ids, masks, finished.tolist(), strict=True):
            text = read_continuation(tokenizer, prompt.input_ids, ids[mask].tolist())
            thought, said = split_reasoning(text)
            counts.num_unfinished += not has_ended
            counts.num_empty += has_ended and not said.strip()
            if has_ended and said.strip():
                rows.append(lay_out(prompt, said if thought is None else join(thought, said, reasoning)))
                counts.num_reasoned += thought is not None
        counts.num_prompts += len(batch)
        counts.num_rows += len(rows)
        yield rows


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Return what an answer thinks, ``None`` where it does not, and what it says.

    Some templates open the reasoning in the prompt, so that only its end stands in the answer.
    """
    before, mark, after = text.partition(ENDS_THINKING)
    return (before.replace(THINKS, "", 1).strip(), after.strip()) if mark else (None, text)


def join(thought: str, said: str, reasoning: str) -> str:
    """Return an answer with or without its reasoning, as templates that know reasoning write it."""
    return f"{THINKS}\n{thought}\n{ENDS_THINKING}\n\n{said}" if reasoning == "keep" and thought else said


def lay_out(prompt: PromptRow, text: str) -> dict[str, Any]:
    """Return a row of fine-tuning: a chat, or a text and how it goes on."""
    if isinstance(prompt.content, str):
        return {"prompt": prompt.content, "completion": text}
    tools = {"tools": prompt.columns["tools"]} if prompt.columns.get("tools") else {}
    return {"messages": [*prompt.content, {"role": "assistant", "content": text.strip()}], **tools}
