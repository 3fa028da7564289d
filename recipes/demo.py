"""Train a small assistant from nothing, in a few minutes on a CPU, on the documentation of your own Python.

python recipes/demo.py [--output_dir demo]

Texts and chats are read from the sources of the standard library; a tokenizer and a random Llama of a million weights
are made for them; the ordinary recipes pretrain and fine-tune it, and make of it an adapter, a reward model, a model
that prefers right answers, one that has learnt from its own, and the teacher of a smaller one. Nothing is downloaded,
nothing was prepared in advance.
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
    parser.add_argument("--output_dir", type=Path, default=Path("demo"), help="where everything is written (./demo)")
    sys.exit(run_command(lambda: main(parser.parse_args())))
