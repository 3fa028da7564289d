"""Make a clean corpus of raw text: extraction, language, quality, PII, decontamination, deduplication.

python recipes/corpus.py --config recipes/configs/gpt2-124m/corpus.yaml

The same command resumes one that was killed, and redoes only what depends on what was changed.
"""

import sys

from recipes_lib.boundary import run_command
from recipes_lib.commands.clean import main

if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
