"""``recipes distill-store``: compute the top-k log-probabilities of a teacher once, for any number of runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.loader import load_for_command
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.quantities import format_bytes

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from recipes_lib.distillation.teacher_store import ComputeTop, RecordFormat

NUM_CHECKED: Final = 16
"""Number of rows that are recomputed to verify the store."""
ALLOWED: Final = {"float32": 0.02, "float16": 0.1, "bfloat16": 0.1}
"""Dtype of ``get_rounding_dtype`` -> allowed error of stored log-probabilities, in nats per target."""


def main(argv: Sequence[str]) -> None:
    """Run the command: write the store of a distillation run, or verify an existing one.

    Raises:
        ConfigError: The configuration has no ``teacher_top_k``, or the teacher cannot be loaded.
        DataError: The disk is full, or the store differs from recomputed probabilities.
    """
    options, overrides = CommandParser("distill-store").parse_known_args(argv)
    config = load_for_command("distill", overrides, options.config)
    if config.distillation.teacher_top_k is None:
        where = str(config.path or "command line, without --config")
        remedy = "write `teacher_top_k: 64`, with which the run reads the store"
        raise ConfigError(Problem(where, "`teacher_top_k`, the number of tokens to store, is missing", remedy))
    from recipes_lib.data.packed.collators import PackedCollator
    from recipes_lib.data.packed.training_data import load_training_data
    from recipes_lib.distillation import teacher_store
    from recipes_lib.models.attention.kernels import choose_attention
    from recipes_lib.models.loading import load_tokenizer
    from recipes_lib.training.layouts.launch_environment import read_launch
    from recipes_lib.training.trainers.arguments import build_training_arguments, get_rounding_dtype
    from recipes_lib.training.trainers.trained_model import load_verified_config

    tokenizer = load_tokenizer(config.model, config.tokens)
    vocabulary = teacher_store.map_teacher_vocabulary(config, tokenizer)
    data = load_training_data(config, tokenizer)
    identity = teacher_store.identify_store(config, vocabulary, data.record)
    args = build_training_arguments(config, read_launch(), has_eval=False)
    model_config = load_verified_config(config, tokenizer, data.longest, vocabulary)
    attention = choose_attention(config.model, model_config, args, packing=config.tokens.packing, flattens=True)
    teacher: Any = teacher_store.load_teacher(config, attention, args, vocabulary)
    teacher.to(args.device)
    collate = PackedCollator(pad_token_id=tokenizer.pad_token_id, layout=attention.layout)
    compute = build_compute(config, identity.format, teacher, collate, args)

    def print_progress(num_done: int) -> None:
        sys.stdout.write(f"{num_done:,} of {len(data.train):,} rows\n")
        sys.stdout.flush()

    batch_size = args.per_device_eval_batch_size
    found = teacher_store.write_store(identity, data.train, compute, batch_size=batch_size, tell=print_progress)
    stored = teacher_store.read_store(identity, data.train)
    allowed = ALLOWED[str(get_rounding_dtype(teacher, args)).removeprefix("torch.")]
    difference = teacher_store.compare_with_teacher(identity, stored, compute, num_rows=NUM_CHECKED, allowed=allowed)
    size = identity.format.dtype.itemsize
    num_targets = int(stored.counts.sum())
    sys.stdout.write(
        f"{num_targets:,} targets of {size} bytes, {format_bytes(num_targets * size)}; {identity.format.k} tokens of "
        f"{identity.format.num_tokens:,} each\ndifference to recomputed {difference:.1e} nats\npath {found.path}\n"
    )


def build_compute(
    config: RecipeConfig, record: RecordFormat, teacher: Any, collate: Any, args: TrainingArguments
) -> ComputeTop:
    """Return the function that computes top-k log-probabilities of the teacher, in the precision of the run."""
    from accelerate.utils import send_to_device

    from recipes_lib.distillation.teacher_store import ask_teacher, read_targets
    from recipes_lib.training.trainers.arguments import build_autocast

    autocast = build_autocast(args)

    def compute(rows: Sequence[Any]) -> Any:
        # Keys for the trainer, which the model does not accept.
        batch = {name: value for name, value in collate(list(rows)).items() if name not in ("num_tokens", "row_ids")}
        inputs = send_to_device(batch, args.device)
        labels = inputs.pop("labels")
        with autocast():
            temperature = config.distillation.distillation_temperature
            top = ask_teacher(teacher, inputs, labels, k=record.k, temperature=temperature)
        return top, read_targets(labels)

    return compute
