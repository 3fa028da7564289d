"""Train a small assistant from nothing, in a few minutes on a CPU, on the documentation of your own Python.

python recipes/demo.py [--output_dir demo]

Texts and chats are read from the sources of the standard library; a tokenizer and a random Llama of 2 million weights
are made for them; the ordinary recipe pretrains and fine-tunes it. Nothing is downloaded, nothing is prepared in
advance. The same command goes on where a stopped one left off.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.table import Table

from recipes_lib.boundary import run_command
from recipes_lib.demo.assets import save_start
from recipes_lib.demo.chats import build_chats
from recipes_lib.demo.corpus import load_modules, split_texts, standard_library
from recipes_lib.errors import EXIT_DONE, ConfigError, Problem

RECIPES = Path(__file__).resolve().parent
SEED = 0
SHOWN_ANSWERS = 10
# So small a model gains nothing from a third thread; and threads that spin while they wait stall shared cores.
THREADS = {"OMP_NUM_THREADS": str(min(2, os.cpu_count() or 1)), "OMP_WAIT_POLICY": "PASSIVE"}
FIGURES = {
    "eval_loss": ("held-out loss, nats a token", "{:.2f}"),
    "eval_stop_rate": ("answers that end by themselves", "{:.0%}"),
    "eval_exact_match": ("answers that are right word for word", "{:.0%}"),
}
TRY_IT = """from transformers import pipeline
ask = pipeline("text-generation", {model!r})
print(ask([{{"role": "user", "content": {question!r}}}])[0]["generated_text"][-1]["content"])"""


def main(output_dir: Path) -> int:
    """Run every stage as a user would, then show what was learned; return the exit code of the stage that failed."""
    console = Console(highlight=False, soft_wrap=True)
    started = time.perf_counter()

    def announce(title: str) -> None:
        console.print(f"\n[{time.perf_counter() - started:4.0f} s]  {title}", style="bold", markup=False)

    announce("1 of 4: texts and chats from your Python's standard library, a tokenizer, a random model")
    try:
        for line in write_start(output_dir):
            console.print(f"  {line}", markup=False)
    except OSError as error:
        raise ConfigError(
            Problem(str(output_dir), f"cannot be written: {error.strerror}", "name another --output_dir")
        ) from error
    for number, (stage, purpose) in enumerate(
        {"pretrain": "pretraining on the texts", "sft": "fine-tuning on the chats"}.items(), 2
    ):
        announce(f"{number} of 4: {purpose}, a minute or two")
        if (code := run_recipe(output_dir, stage, console)) != EXIT_DONE:
            return code
    announce("4 of 4: what it learned, measured on modules that it never saw")
    show_results(output_dir, console)
    return EXIT_DONE


def write_start(output_dir: Path) -> Iterator[str]:
    """Write the data and the random model, and say what was written."""
    modules = load_modules(standard_library())
    texts, chats = split_texts(modules, SEED), build_chats(modules, SEED)
    files: dict[str, list[Any]] = {
        "pretrain": [{"text": text} for text in texts.train],
        "pretrain_held_out": [{"text": text} for text in texts.held_out],
        "sft": chats.train,
        "sft_held_out": chats.held_out,
    }
    (output_dir / "data").mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        path = output_dir / "data" / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        yield f"{path}: {len(rows)} rows"
    num_weights = save_start(output_dir / "start", texts.train, SEED)
    yield f"{output_dir / 'start'}: {num_weights / 1e6:.1f} million random weights"


def run_recipe(output_dir: Path, stage: str, console: Console) -> int:
    """Run a stage in the folder that its configuration speaks of; return its exit code."""
    command = [sys.executable, str(RECIPES / "sft.py"), "--config", str(RECIPES / "configs" / "demo" / f"{stage}.yaml")]
    console.print(f"  cd {shlex.quote(str(output_dir))} && {shlex.join(command)}", markup=False, style="dim")
    return subprocess.run(command, cwd=output_dir, env=os.environ | THREADS, check=False).returncode


def show_results(output_dir: Path, console: Console) -> None:
    """Print figures and answers before and after, where the rest stands, and how to ask more."""
    table = Table("", "before", "after")
    for stage in ("pretrain", "sft"):
        evaluations = [line for line in read_lines(output_dir / stage / "metrics.jsonl") if "eval_loss" in line]
        for key, (meaning, form) in FIGURES.items():
            if key in evaluations[0]:
                table.add_row(f"{stage}: {meaning}", *(form.format(evaluations[end][key]) for end in (0, -1)))
    console.print(table)
    samples = read_lines(output_dir / "sft" / "samples.jsonl")
    first, last = ([line for line in samples if line["step"] == end["step"]] for end in (samples[0], samples[-1]))
    questions = [row["messages"][0]["content"] for row in read_lines(output_dir / "data" / "sft_held_out.jsonl")]
    for question, before, after in zip(questions[:SHOWN_ANSWERS], first, last, strict=False):
        console.print(f"\n  {question}", markup=False, style="bold")
        for label, answer in (
            ("before", before["completion"]),
            ("after", after["completion"]),
            ("documented", before["reference"]),
        ):
            console.print(
                f"    {label:12}{shorten(' '.join(answer.split()), 100, placeholder=' ...') or '(nothing)'}",
                markup=False,
            )
    trained = (output_dir / "sft").resolve()
    console.print("\n[bold]Where to look[/bold]")
    for stage in ("pretrain", "sft"):
        console.print(
            f"  {output_dir / stage / 'report.html'}   the curves and the answers as they came; metrics.jsonl and run.json beside it",
            markup=False,
        )
    console.print("\n[bold]Ask it yourself[/bold], in .venv/bin/python:")
    console.print(TRY_IT.format(model=str(trained), question=questions[0]), markup=False)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output_dir", type=Path, default=Path("demo"), help="where everything is written (default: demo)"
    )
    arguments = parser.parse_args()
    sys.exit(run_command(lambda: main(arguments.output_dir)))
