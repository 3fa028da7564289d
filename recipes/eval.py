"""Evaluate a model on benchmarks of lm-eval: scores with standard errors, and all answers.

accelerate launch recipes/eval.py --config recipes/configs/gpt2-124m/eval.yaml

The same command resumes an evaluation that was killed. Questions are divided over the ranks.
"""

import sys

from recipes_lib.boundary import run_command
from recipes_lib.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
