"""LoRA and QLoRA: fine-tune low-rank adapters on chats, completions or text.

accelerate launch --config_file accelerate_configs/ddp.yaml recipes/lora.py --config recipes/configs/llama3-8b/lora.yaml
python recipes/lora.py --config recipes/configs/llama3-8b/lora_4bit.yaml --lora_r 64      # QLoRA, on one process

`--help` lists every key, `--print-config` shows their values and where each comes from. The same command resumes
a stopped run. `recipes merge --adapter DIR --output DIR` merges the adapter into its base model. The code is that of
recipes/sft.py.
"""

import sys
from pathlib import Path

from recipes_lib.boundary import parse_or_exit, run_command

if __name__ == "__main__":
    CONFIG = parse_or_exit("lora", sys.argv[1:])  # Before torch is imported: errors appear at once.

# Also as a module: `python -m recipes.lora`.
sys.path.insert(0, str(Path(__file__).parent))
from sft import main

if __name__ == "__main__":
    sys.exit(run_command(lambda: main(CONFIG)))
