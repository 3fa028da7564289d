"""Everything that watches a run and changes nothing: counters, metrics, progress and evaluation hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from recipes_lib.config.schema import EvaluationConfig
from recipes_lib.planning.compute import compute_flops_per_token, peak_flops
from recipes_lib.training.arguments import get_compute_dtype
from recipes_lib.training.callbacks import MetricsCallback
from recipes_lib.training.hooks.evaluation import EvaluateLoss
from recipes_lib.training.hooks.prompts import build_prompts
from recipes_lib.training.hooks.samples import SAMPLES_FILE, GenerateSamples
from recipes_lib.training.hooks.token_bytes import compute_token_byte_lengths
from recipes_lib.training.hooks.user_metrics import load_metrics
from recipes_lib.training.metrics import METRICS_FILE, MetricsWriter, StepCounter, ThroughputMeter
from recipes_lib.training.progress import build_progress


class EvaluationHook(Protocol):
    """Something measured beside training; it must leave model, mode and random states as it found them."""

    def __call__(self, model: nn.Module, step: int) -> Mapping[str, float]:
        """Return named figures of the model after ``step`` optimizer steps."""
        ...


@dataclass(frozen=True, slots=True)
class Observer:
    """What a trainer is watched by.

    Attributes:
        counter: Tokens trained on; the trainer adds to it.
        hooks: What an evaluation runs, in order.
        callbacks: Upstream's callbacks.
    """

    counter: StepCounter
    hooks: Sequence[EvaluationHook]
    callbacks: Sequence[TrainerCallback]


def build_observer(
    config: EvaluationConfig,
    *,
    args: TrainingArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    eval_dataset: Dataset | None,
    collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]],
    document_length: int,
) -> Observer:
    """Build what watches a run: on every process, though only the main one writes and shows.

    Args:
        config: What the hooks do.
        args: Of the trainer; the process group exists.
        model: The model that will be trained.
        tokenizer: Its tokenizer.
        eval_dataset: Held-out packs; without them nothing is scored, and only prompts of the user's own are answered.
        collate: Packs to a batch.
        document_length: Tokens of a typical document, for the attention's share of the FLOPs.

    Raises:
        ConfigError: A metric cannot be loaded.
    """
    is_main = args.process_index == 0
    output_dir = Path(str(args.output_dir))
    progress = build_progress(is_main=is_main)
    hooks: list[EvaluationHook] = []
    if eval_dataset is not None:
        hooks.append(
            EvaluateLoss(
                eval_dataset,
                batch_size=args.per_device_eval_batch_size,
                collate=collate,
                progress=progress,
                byte_lengths=compute_token_byte_lengths(tokenizer),
            )
        )
    prompts = build_prompts(config, eval_dataset, tokenizer)
    metrics = load_metrics(config.metrics or [])
    if prompts:
        samples = MetricsWriter(output_dir / SAMPLES_FILE, is_main=is_main)
        hooks.append(
            GenerateSamples(prompts, tokenizer, samples, max_new_tokens=config.sample_max_new_tokens, metrics=metrics)
        )
    counter = StepCounter()
    meter = ThroughputMeter(
        counter,
        flops=compute_flops_per_token(model.config, document_length),
        peak_flops=_sum_peak_flops(args),
    )
    writer = MetricsWriter(output_dir / METRICS_FILE, is_main=is_main)
    return Observer(counter, hooks, [MetricsCallback(counter, meter, writer, progress)])


def _sum_peak_flops(args: TrainingArguments) -> float | None:
    """Return the peak of all processes' devices together, in FLOP/s, as if they were like this one's."""
    if args.device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(args.device), get_compute_dtype(args))
    return None if peak is None else peak * args.world_size
