"""Generate training rows with a model: instructions, answers or texts, filtered and graded, with provenance.

python recipes/synthesize.py --config recipes/configs/qwen2.5-0.5b/synthesize.yaml

The same command resumes a run that was killed.
"""

import sys

from recipes_lib.boundary import run_command
from recipes_lib.commands.generated.synthesize import main

if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
