"""Build the observer of a run: evaluation hooks, samples, token counts, throughput and progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.chat.encoder import compute_token_byte_lengths
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.hardware import measure_matmul_flops
from recipes_lib.models.heads.scoring import read_positions
from recipes_lib.models.parallel.context_parallel import ContextParallelGroup
from recipes_lib.models.parallel.tensor_parallel import find_data_group
from recipes_lib.models.parallel.zero3 import zero3_init_disabled
from recipes_lib.planning.compute import TokenFlops, compute_flops_per_token
from recipes_lib.planning.devices import peak_flops
from recipes_lib.training.evaluation.held_out import EvaluateLoss, EvaluatePairs, Rows
from recipes_lib.training.evaluation.samples import SAMPLES_FILE, Example, GenerateSamples, build_prompts
from recipes_lib.training.evaluation.task_scores import build_task_scores
from recipes_lib.training.evaluation.user_metrics import load_metrics
from recipes_lib.training.layouts.context_rows import shard_batch
from recipes_lib.training.layouts.pipeline_schedule import build_pipeline_groups
from recipes_lib.training.monitoring.callbacks import EarlyStopping, EvaluationHook, MetricsCallback, Observer
from recipes_lib.training.monitoring.metrics import METRICS_FILE, MetricsWriter, StepCounter, ThroughputMeter
from recipes_lib.training.monitoring.progress import build_progress
from recipes_lib.training.trainers.arguments import get_compute_dtype
from recipes_lib.training.trainers.pair_batches import PairScores

logger = logging.getLogger(__name__)


class ObservedData(Protocol):
    """Protocol of a run's data for its observer."""

    @property
    def held_out(self) -> Mapping[str, Rows]:
        """Held-out rows by name."""
        ...

    @property
    def typical_length(self) -> int:
        """Tokens that attend to each other."""
        ...

    @property
    def warnings(self) -> Sequence[str]:
        """Warnings about the data, one sentence each."""
        ...

    def iterate_examples(self) -> Iterator[Example]:
        """Yield held-out documents, from which the samples take their prompts."""
        ...


def build_observer(
    config: RecipeConfig,
    data: ObservedData,
    args: TrainingArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]],
    score_pairs: Callable[[nn.Module, Any], PairScores] | None = None,
    context: ContextParallelGroup | None = None,
) -> Observer:
    """Build the observer of a run, on every process; only the main one writes and displays.

    Args:
        config: What the hooks and the guards do.
        data: Its held-out rows are scored; without them only prompts of the user's own are answered.
        args: Of the trainer; the process group exists.
        model: The model that will be trained.
        tokenizer: Its tokenizer.
        collate: Rows to a batch.
        score_pairs: Scores a batch of pairs; ``None`` where rows are not pairs.
        context: The processes that share rows with this one.

    Raises:
        ConfigError: A metric cannot be loaded, or no prompt has a reference that it could be scored against; or as
            ``build_prompts``.
    """
    part = getattr(model, "part", None)
    is_main, row_group = args.process_index == 0, find_data_group(model)
    # Under tensor parallelism each rank counts the same tokens; in a pipeline one of the last stage counts alone.
    counting_group = row_group if part is None else None
    if part is not None:
        row_group = build_pipeline_groups(part.num_stages, part.tensor_size).replicas.get_group()
    output_dir, progress = Path(str(args.output_dir)), build_progress(is_main=is_main)
    for warning in data.warnings if is_main else ():
        logger.warning(warning)
    hooks: list[EvaluationHook] = []
    given: dict[str, Any] = {
        "batch_size": args.per_device_eval_batch_size,
        "progress": progress,
        "held_out": data.held_out,
        "named": tuple(config.data.eval_datasets or ()),
    }
    if score_pairs is not None and data.held_out:
        hooks.append(EvaluatePairs(collate=collate, score=score_pairs, **given))
    elif data.held_out:
        hooks.append(
            EvaluateLoss(
                collate=collate if context is None else _cut_after(collate, context),
                byte_lengths=count_text_bytes(tokenizer),
                # Of a row that is shared each process has a part of the sums; of one that all compute, all of them.
                group=row_group if context is None else context.data_group,
                sums_group=row_group,
                **given,
            )
        )
    # A reward model answers nothing, and of a pipeline-parallel model no process has enough.
    can_answer = model.can_generate() and part is None
    examples, positions = data.iterate_examples(), read_positions(model.config)
    prompts = build_prompts(config.evaluation, examples, tokenizer, positions, progress.say) if can_answer else []
    metrics = load_metrics(config.evaluation.metrics or [])
    if metrics and all(prompt.reference is None for prompt in prompts):
        remedy = "name held-out data whose prompts leave room for sample_max_new_tokens, and leave sample_prompts unset"
        raise ConfigError(Problem("metrics", "no sample prompt has a reference to score an answer against", remedy))
    if prompts:
        samples = MetricsWriter(output_dir / SAMPLES_FILE, is_main=is_main)
        hooks.append(GenerateSamples(prompts, tokenizer, samples, config.evaluation.sample_max_new_tokens, metrics))
    keys = config.evaluation
    task_scores = build_task_scores(keys, tokenizer, positions, args.per_device_eval_batch_size)
    hooks += task_scores
    counter = StepCounter()
    meter = ThroughputMeter(counter, flops=_count_flops(model, data.typical_length), peak_flops=_sum_peak_flops(args))
    writer = MetricsWriter(output_dir / METRICS_FILE, is_main=is_main)
    callbacks = [
        *task_scores,  # First: the others act where an evaluation is due.
        MetricsCallback(counter, meter, writer, progress, counting_group),
        EarlyStopping(keys.early_stopping_patience, keys.early_stopping_threshold, writer, progress),
    ]
    return Observer(counter, hooks, callbacks, progress, config.guards)


def _cut_after(
    collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]], share: ContextParallelGroup
) -> Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]:
    return lambda rows: shard_batch(collate(rows), share.rank, share.size, by_heads=share.by_heads)


def _count_flops(model: Any, length: int) -> TokenFlops:
    # A separate model, without weights that ZeRO-3 could shard.
    with zero3_init_disabled():
        return compute_flops_per_token(model.config, length, is_frozen=hasattr(model, "peft_config"))


def _sum_peak_flops(args: TrainingArguments) -> float | None:
    """Return the peak of all processes' devices together, in FLOP/s, as if they were like this one's."""
    if args.device.type == "cpu":
        # Processes on one machine share its cores; each measures what it gets while the others measure too.
        return measure_matmul_flops(get_compute_dtype(args)) * int(args.world_size)
    if args.device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(args.device), get_compute_dtype(args))
    return None if peak is None else peak * args.world_size


def count_text_bytes(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor | None:
    """Return the bytes of text of each id, ``int64 (V,)``: 0 for special tokens; ``None`` where they are not known."""
    lengths = compute_token_byte_lengths(tokenizer)
    if lengths is None:
        return None
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    lengths[sorted(special | set(tokenizer.all_special_ids))] = 0
    return torch.from_numpy(lengths)
