"""RLOO: REINFORCE with a leave-one-out baseline, the mean reward of a prompt's other answers.

accelerate launch --config_file accelerate_configs/ddp.yaml recipes/rloo.py --config F
python recipes/rloo.py --config mine.yaml --beta 0.01      # on one process

`--help` lists every key, `--print-config` shows their values and where each comes from. The same command resumes
a stopped run. The code is that of recipes/grpo.py: only the baseline differs.
"""

import sys
from pathlib import Path

from recipes_lib.boundary import parse_or_exit, run_command

if __name__ == "__main__":
    CONFIG = parse_or_exit("rloo", sys.argv[1:])  # Before torch is imported: errors appear at once.

# Also as a module: `python -m recipes.rloo`.
sys.path.insert(0, str(Path(__file__).parent))
from grpo import main

if __name__ == "__main__":
    sys.exit(run_command(lambda: main(CONFIG)))
