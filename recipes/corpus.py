"""Build a clean corpus from raw text: extraction, language, quality, PII, decontamination, deduplication.

python recipes/corpus.py --config recipes/configs/gpt2-124m/corpus.yaml

The same command resumes a run that was killed. After a change of the configuration only dependent steps run again.
"""

import sys

from recipes_lib.boundary import run_command
from recipes_lib.commands.clean import main

if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
