"""Scaling law fitted to twelve small runs, and its prediction of a run with ten times their FLOPs before training it.

Data: sources of the Python standard library, one document per file; every 100th file is held out. Llamas with a
vocabulary of 512 tokens, rows of 128 tokens, 1,024 tokens per step, each run with a complete schedule for its length.
Uses the commands `recipes tokenizer`, `recipes scale sweep` and `recipes run`. After an interruption, the same command
resumes.

OMP_NUM_THREADS=1 python benchmarks/scaling_study.py [--output build/scaling]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, Final

import yaml
from harness import describe_machine, write_results

HELD_OUT_EVERY: Final = 100
VOCAB_SIZE: Final = 512
DEPTHS: Final = (3, 4, 5)
RATIOS: Final = (2, 3, 4, 5)
TARGET: Final = (7, 8)
RECIPE: Final[dict[str, Any]] = {
    "model_config": {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "max_position_embeddings": 128,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
    },
    "max_length": 128,
    "per_device_train_batch_size": 8,
    "min_lr_ratio": 0.0,
    "seed": 0,
    "bf16": True,
    "eval_strategy": "steps",
    "eval_steps": 0.5,
    "logging_steps": 10,
    "save_strategy": "no",
    "num_sample_prompts": 0,
    "max_steps": 1000,
}
"""Base recipe of the sweep, which replaces sizes, length and learning rate."""


def write_texts(folder: Path) -> None:
    """Write ``train.jsonl`` and ``held_out.jsonl``, once; each source file is a document."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    for name in ("train", "held_out"):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for number, path in enumerate(paths):
                text = path.read_text(encoding="utf-8", errors="replace")
                if text.strip() and (number % HELD_OUT_EVERY == 0) == (name == "held_out"):
                    file.write(json.dumps({"text": text}) + "\n")


def run_command(*words: object) -> None:
    """Run a ``recipes`` command; exit with its code if it fails."""
    command = [sys.executable, "-m", "recipes_lib.cli", *map(str, words)]
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)


def main() -> None:
    """Run the study, and print prediction and result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/scaling"))
    folder: Path = parser.parse_args().output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    sweep, recipe = folder / "sweep", folder / "pretrain.yaml"
    if not (sweep / "pipeline.yaml").exists():
        write_texts(folder)
        run_command(
            "tokenizer", folder / "train.jsonl", "--vocab_size", VOCAB_SIZE, "--output_dir", folder / "tokenizer"
        )
        paths = {
            "tokenizer_name_or_path": folder / "tokenizer",
            "dataset_name": folder / "train.jsonl",
            "dataset_test_split": folder / "held_out.jsonl",
            "output_dir": folder / "unused",
        }
        recipe.write_text(yaml.safe_dump(RECIPE | {name: str(path) for name, path in paths.items()}), encoding="utf-8")
        sizes = ["--head_dim", 16, "--depths", *DEPTHS, "--ratios", *RATIOS, "--target", *TARGET]
        run_command("scale", "sweep", "--config", recipe, "--output", sweep, *sizes)
    start = time.perf_counter()
    run_command("run", sweep / "pipeline.yaml")
    runs = sweep / "runs"
    law, found = (json.loads((runs / f"{name}.json").read_text()) for name in ("scaling", "compared"))
    low, high = found["interval"]
    table = [
        ["parameters", "tokens", "operations", "predicted, nats a token", "90 % interval", "measured", "error"],
        [
            f"{found['num_parameters']:,.0f}",
            f"{found['num_tokens']:,.0f}",
            f"{found['num_parameters'] * found['num_tokens'] * 6:.3g}",
            f"{found['predicted']:.4f}",
            f"{low:.4f} to {high:.4f}",
            f"{found['measured']:.4f}",
            f"{found['error']:+.2%}",
        ],
    ]
    title = f"Law of {len(law['runs'])} runs up to {law['max_flops']:.3g} operations: {law['law']}"
    write_results(folder / "study.json", title, table, {"law": law, "compared": found})
    print(f"{time.perf_counter() - start:,.0f} s on {describe_machine()}")


if __name__ == "__main__":
    main()
