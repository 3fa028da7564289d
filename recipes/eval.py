"""Ask a model the questions of benchmarks: scores with standard errors, and every answer.

accelerate launch recipes/eval.py --config recipes/configs/gpt2-124m/eval.yaml

The same command resumes one that was killed. Each process asks its share of the questions.
"""

import sys

from recipes_lib.boundary import run_command
from recipes_lib.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
