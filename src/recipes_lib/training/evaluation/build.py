"""Builds the observer of a run: evaluation hooks, samples, token counts, throughput and progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.chat.encoder import compute_token_byte_lengths
from recipes_lib.data.packed.training_data import TrainingData
from recipes_lib.data.pairs.preference_sets import PairData
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.hardware import measure_matmul_flops
from recipes_lib.models.heads.scoring import read_positions
from recipes_lib.models.parallel.context_parallel import ContextParallelGroup
from recipes_lib.models.parallel.tensor_parallel import find_data_group
from recipes_lib.models.parallel.zero3 import zero3_init_disabled
from recipes_lib.planning.compute import TokenFlops, compute_flops_per_token
from recipes_lib.planning.devices import peak_flops
from recipes_lib.training.evaluation.held_out import EvaluateLoss, EvaluatePairs
from recipes_lib.training.evaluation.samples import SAMPLES_FILE, GenerateSamples, build_prompts
from recipes_lib.training.evaluation.task_scores import build_task_scores
from recipes_lib.training.evaluation.user_metrics import load_callbacks, load_metrics
from recipes_lib.training.guards.expected_curve import build_expected_curve
from recipes_lib.training.layouts.context_rows import shard_batch
from recipes_lib.training.layouts.pipeline_schedule import build_pipeline_groups
from recipes_lib.training.monitoring.callbacks import EarlyStopping, EvaluationHook, MetricsCallback, Observer
from recipes_lib.training.monitoring.metrics import METRICS_FILE, MetricsWriter, StepCounter, ThroughputMeter
from recipes_lib.training.monitoring.progress import build_progress
from recipes_lib.training.trainers.arguments import get_compute_dtype
from recipes_lib.training.trainers.pair_batches import PairScores
from recipes_lib.training.trainers.pretraining_rows import PretrainingRows

logger = logging.getLogger(__name__)


def build_observer(
    config: RecipeConfig,
    data: TrainingData | PairData | PretrainingRows,
    args: TrainingArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]],
    score_pairs: Callable[[nn.Module, Any], PairScores] | None = None,
    context: ContextParallelGroup | None = None,
) -> Observer:
    """Build the observer of a run; every process must call, the main one writes files and shows progress.

    Args:
        config: Run configuration: evaluation and guard keys.
        data: Data with the held-out rows; without any, only ``sample_prompts`` are answered.
        args: Training arguments, after the process group is initialised.
        model: Model to train.
        tokenizer: Tokenizer of the model.
        collate: Collator of held-out rows.
        score_pairs: Scorer of a batch of pairs; ``None`` if rows are not pairs.
        context: Context parallel group of this process; ``None`` without context parallelism.

    Raises:
        ConfigError: A metric or callback cannot be loaded, metrics are set but no prompt has a reference, or a
            prompt is too long.
    """
    keys, part = config.evaluation, getattr(model, "part", None)
    is_main, row_group = args.process_index == 0, find_data_group(model)
    # Tensor parallel ranks count the same tokens, so counts are summed over data-parallel ranks only. In a pipeline,
    # one rank of the last stage counts, and the others add 0.
    counting_group = row_group if part is None else None
    if part is not None:
        row_group = build_pipeline_groups(part.num_stages, part.tensor_size).replicas.get_group()
    output_dir, progress = Path(str(args.output_dir)), build_progress(is_main=is_main)
    for warning in data.warnings if is_main else ():
        logger.warning(warning)
    hooks: list[EvaluationHook] = []
    options: dict[str, Any] = {
        "batch_size": args.per_device_eval_batch_size,
        "progress": progress,
        "held_out": data.held_out,
        "named": tuple(config.data.eval_datasets or ()),
    }
    if score_pairs is not None and data.held_out:
        hooks.append(EvaluatePairs(collate=collate, score=score_pairs, **options))
    elif data.held_out:
        hooks.append(
            EvaluateLoss(
                collate=collate if context is None else _shard_sequence(collate, context),
                byte_lengths=count_text_bytes(tokenizer),
                # Context parallel ranks take the same rows, and each has a part of their sums. Tensor parallel ranks
                # take the same rows too, but each has the whole sums.
                group=row_group if context is None else context.data_group,
                sums_group=row_group,
                **options,
            )
        )
    # Reward models do not generate, and of a pipeline-parallel model no process holds all layers.
    can_answer = model.can_generate() and part is None
    examples, positions = data.iterate_examples(), read_positions(model.config)
    system = config.chat.system_prompt
    prompts = build_prompts(keys, examples, tokenizer, positions, progress.say, system) if can_answer else []
    metrics = load_metrics(keys.metrics or [])
    if metrics and all(prompt.reference is None for prompt in prompts):
        remedy = "name held-out data whose prompts leave room for sample_max_new_tokens, and leave sample_prompts unset"
        raise ConfigError(Problem("metrics", "no sample prompt has a reference to score an answer against", remedy))
    if prompts:
        samples = MetricsWriter(output_dir / SAMPLES_FILE, is_main=is_main)
        hooks.append(GenerateSamples(prompts, tokenizer, samples, keys.sample_max_new_tokens, metrics))
    task_scores = build_task_scores(keys, tokenizer, positions, args.per_device_eval_batch_size)
    hooks += task_scores
    counter = StepCounter()
    meter = ThroughputMeter(counter, flops=_count_flops(model, data.typical_length), peak_flops=_sum_peak_flops(args))
    writer = MetricsWriter(output_dir / METRICS_FILE, is_main=is_main)
    callbacks = [
        *task_scores,  # First: they make evaluations due, to which MetricsCallback reacts.
        MetricsCallback(counter, meter, writer, progress, counting_group),
        EarlyStopping(keys.early_stopping_patience, keys.early_stopping_threshold, writer, progress),
        *build_expected_curve(config, writer, progress),
    ]
    return Observer(counter, hooks, callbacks, progress, config.guards, load_callbacks(keys.callbacks or []))


def _shard_sequence(
    collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]], context: ContextParallelGroup
) -> Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]:
    return lambda rows: shard_batch(collate(rows), context.rank, context.size, by_heads=context.by_heads)


def _count_flops(model: Any, length: int) -> TokenFlops | None:
    """Return the FLOPs per token; ``None`` for an unknown architecture, which may raise any error and still trains."""
    # The FLOPs are counted on a separate model without weights, which ZeRO-3 must not shard.
    with zero3_init_disabled(), suppress(Exception):
        return compute_flops_per_token(model.config, length, is_frozen=hasattr(model, "peft_config"))
    return None


def _sum_peak_flops(args: TrainingArguments) -> float | None:
    """Return the peak FLOP/s of all processes' devices, assuming that they are alike; ``None`` if unknown."""
    if args.device.type == "cpu":
        # Measured at the same time on all processes, since those of one machine share its cores.
        return measure_matmul_flops(get_compute_dtype(args)) * int(args.world_size)
    if args.device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(args.device), get_compute_dtype(args))
    return None if peak is None else peak * args.world_size


def count_text_bytes(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor | None:
    """Return the UTF-8 bytes of each token's text, ``int64 (V,)``, 0 for special tokens; ``None`` if unknown."""
    lengths = compute_token_byte_lengths(tokenizer)
    if lengths is None:
        return None
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    lengths[sorted(special | set(tokenizer.all_special_ids))] = 0
    return torch.from_numpy(lengths)
