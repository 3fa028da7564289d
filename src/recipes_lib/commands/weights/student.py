"""``recipes student``: initialise a student from some layers of its teacher, with its embeddings and output head."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Final

from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.schema import ModelConfig, TokensConfig
from recipes_lib.errors import ConfigError, Problem, reported_at
from recipes_lib.files import atomic_folder

RECORD_FILE: Final = "student.json"


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: A flag is wrong, or the teacher cannot be loaded or pruned; then nothing is written.
    """
    options = _parse(argv)
    from recipes_lib.models.loading import load_causal_lm, load_model_config, load_tokenizer
    from recipes_lib.models.structure import map_layers, prune_layers, verify_copy

    teacher = ModelConfig(model_name_or_path=options.teacher, model_revision=options.revision, dtype="auto")
    with reported_at("--teacher"):
        tokenizer = load_tokenizer(teacher, TokensConfig())
        teacher_config, _ = load_model_config(teacher)
    count = teacher_config.get_text_config().num_hidden_layers
    if options.layers is None and not 1 <= options.num_layers <= count:
        found = f"{options.num_layers} layers are requested, and the teacher has {count}"
        raise ConfigError(Problem("--num_layers", found, f"write a number from 1 to {count}"))
    layers = options.layers or list(map_layers(options.num_layers, count))
    with atomic_folder(options.output) as student:
        model = load_causal_lm(teacher, "eager")
        num_before = model.num_parameters()
        prune_layers(model, layers)
        model.config.use_cache = True
        model.save_pretrained(student)
        tokenizer.save_pretrained(student)
        again = load_causal_lm(ModelConfig(model_name_or_path=str(student), dtype="auto"), "eager")
        verify_copy(again, model, options.output)
        record = {"teacher": options.teacher, "teacher_revision": options.revision, "layers": layers, "of": count}
        (student / RECORD_FILE).write_text(json.dumps(record, indent=1), encoding="utf-8")
    sys.stdout.write(
        f"layers       {', '.join(map(str, layers))} of {count}\n"
        f"parameters   {model.num_parameters():,} of {num_before:,}\n"
        f"written to {options.output}; distil it by `model_name_or_path: {options.output}`\n"
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("student")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--num_layers", type=int, metavar="K", help="number of layers, evenly spaced, with the last")
    which.add_argument("--layers", type=int, nargs="+", metavar="N", help="indices of the layers, from 1")
    return parser.parse_args(argv)
