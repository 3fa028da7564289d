"""Memory and time of a step under each kind of activation checkpointing.

A Llama of 8 layers of width 512 in bf16 autocast, 4 rows of 512 tokens, forward and backward, on the CPU.

python benchmarks/activation_checkpointing.py [--rounds 3] [--output build/activation_checkpointing.json]
"""

from __future__ import annotations

import json
from typing import Any

import torch
from harness import build_parser, compare, run_script, spread, write_results
from loss_head import measure_steps

MODES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "every second layer": {"every_n_layers": 2},
    "selective (save_matmuls)": {"save_matmuls": True},
    "every layer": {},
}
NUM_STEPS = 4


def measure(mode: str) -> dict[str, float]:
    """Return the peak memory that a step adds in GB, the seconds of the fastest step, and the loss."""
    from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

    from recipes_lib.models.activation_checkpointing import enable_checkpointing
    from recipes_lib.models.heads.loss_head import add_loss_head

    set_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    add_loss_head(model)
    options = MODES[mode]
    if options is not None:
        enable_checkpointing(model, options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(0, 2048, (4, 512))

    def step() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            sums = model(input_ids=ids, labels=ids, loss_head=True)
        (loss := sums.nll_sum / sums.num_targets).backward()
        return loss

    return measure_steps(step, NUM_STEPS)


def main() -> None:
    """Measure each mode in its own process."""
    parser = build_parser(__doc__, rounds=3)
    parser.add_argument("--measure", choices=MODES)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    results = run_script(MODES, options.rounds)
    table = [["checkpointing", "extra peak GB", "memory / none", "seconds", "time / none", "loss"]]
    for name, rounds in results.items():
        memory = [spread(rounds, "extra_gb"), compare(results, "extra_gb", "none", name)]
        times = [spread(rounds, "seconds"), compare(results, "seconds", "none", name)]
        table.append([name, *memory, *times, f"{rounds[0]['loss']:.5f}"])
    write_results(options.output, "Activation checkpointing", table, results)


if __name__ == "__main__":
    main()
