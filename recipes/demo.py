"""Train a small assistant from nothing, in a few minutes on a CPU, on the documentation of your own Python.

python recipes/demo.py [--output_dir demo]

Texts and chats are read from the standard library's sources; a tokenizer and a small Llama are made from the texts; the
ordinary recipe pretrains and fine-tunes it. Nothing is downloaded. The same command goes on where a stopped one left off.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recipes_lib.boundary import run_command
from recipes_lib.demo.assets import save_assets
from recipes_lib.demo.chats import build_chats
from recipes_lib.demo.corpus import collect_texts, load_modules, standard_library
from recipes_lib.errors import EXIT_DONE, ConfigError, Problem

RECIPES = Path(__file__).resolve().parent
SEED = 0
# A model this small gains nothing from more threads, and threads that wait actively ruin shared cores.
THREADS = {"OMP_NUM_THREADS": str(min(2, os.cpu_count() or 1)), "OMP_WAIT_POLICY": "PASSIVE"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
SHOWN_ANSWERS = 6


def main(output_dir: Path) -> int:
    """Run every stage as a user would, then show what was learned."""
    console = Console(highlight=False)
    started = time.perf_counter()

    def announce(number: int, title: str) -> None:
        console.print(f"\n[bold]{number}/4  {title}[/bold]   ({time.perf_counter() - started:.0f} s)")

    announce(1, "Texts, chats, a tokenizer and a random model, from the sources of this Python's standard library")
    for line in write_start(output_dir):
        console.print(f"     {line}")
    for number, stage, title in ((2, "pretrain", "Pretraining on the texts"), (3, "sft", "Fine-tuning on the chats")):
        announce(number, title)
        code = run_recipe(stage, output_dir, console)
        if code != EXIT_DONE:
            return code
    announce(4, "What was learned, on modules that no stage was trained on")
    show_results(output_dir, console)
    return EXIT_DONE


def write_start(output_dir: Path) -> Iterable[str]:
    """Write the data and the random model; say what there is."""
    modules = load_modules(standard_library())
    texts = {held_out: collect_texts(modules, held_out=held_out) for held_out in (False, True)}
    chats = build_chats(modules)
    rows = {
        "pretrain": [{"text": text} for text in texts[False]],
        "pretrain_held_out": [{"text": text} for text in texts[True]],
        "sft": chats.train,
        "sft_held_out": chats.held_out,
    }
    (output_dir / "data").mkdir(parents=True, exist_ok=True)
    for name, lines in rows.items():
        with (output_dir / "data" / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        yield f"data/{name}.jsonl: {len(lines)} rows"
    num_weights = save_assets(output_dir / "start", texts[False], SEED)
    yield f"start/: a Llama of {num_weights / 1e6:.1f} million random weights and its tokenizer"
