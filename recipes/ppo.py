"""PPO: proximal policy optimisation on the rewards of sampled answers, with a critic and a KL penalty.

accelerate launch --config_file accelerate_configs/ddp.yaml recipes/ppo.py --config F
python recipes/ppo.py --config recipes/configs/llama3-8b/ppo.yaml --kl_coef 0.1      # the same on one process

`--help` lists every key, `--print-config` shows their values and where each comes from. The same command resumes
a stopped run. The code is that of recipes/grpo.py: a critic replaces the mean reward as the baseline.
"""

import sys
from pathlib import Path

from recipes_lib.boundary import parse_or_exit, run_command

if __name__ == "__main__":
    CONFIG = parse_or_exit("ppo", sys.argv[1:])  # Before torch is imported: errors appear at once.

# Also as a module: `python -m recipes.ppo`.
sys.path.insert(0, str(Path(__file__).parent))
from grpo import main

if __name__ == "__main__":
    sys.exit(run_command(lambda: main(CONFIG)))
