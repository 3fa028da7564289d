"""RLOO: answers to one prompt are held against each other, without a critic, by TRL's trainer.

accelerate launch --config_file accelerate_configs/ddp.yaml recipes/rloo.py --config F
python recipes/rloo.py --config mine.yaml --beta 0.01      # on one process

`--help` lists every key, `--print-config` shows their values and where each comes from. The same command goes on where
a stopped run left off. The method is written out in recipes/grpo.py: only what an answer is held against differs.
"""

import sys

from recipes_lib.boundary import parse_or_exit, run_command

if __name__ == "__main__":
    CONFIG = parse_or_exit("rloo", sys.argv[1:])  # A wrong key is answered at once: torch is imported below.

from grpo import main

if __name__ == "__main__":
    sys.exit(run_command(lambda: main(CONFIG)))
