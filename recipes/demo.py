"""Demo: train a small assistant from random weights on the docstrings of this Python, in minutes on a CPU.

python recipes/demo.py [--output_dir demo]

Texts and chats come from the sources of the standard library. A tokenizer is trained, then a Llama of a million
parameters by the ordinary recipes: pretraining, fine-tuning, LoRA, reward model, DPO, PPO and distillation. Nothing is
downloaded.
The same command resumes a stopped run.
"""

import argparse
import sys
from pathlib import Path

from recipes_lib.boundary import run_command


def main(arguments: argparse.Namespace) -> int:
    """Run the demo; return its exit code."""
    from recipes_lib.demo.walkthrough import run_demo  # `--help` needs no torch.

    return run_demo(Path(__file__).resolve().parent, arguments.output_dir)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output_dir", type=Path, default=Path("demo"), help="directory of all outputs (default: ./demo)"
    )
    sys.exit(run_command(lambda: main(parser.parse_args())))
