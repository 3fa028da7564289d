"""Memory and time of one training step at a vocabulary of 131,072: our loss head, TRL's fused head, plain logits.

python benchmarks/loss_head.py [--rounds 3] [--output build/loss_head.json]
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import build_parser, compare, run_interleaved, spread, write_results

VOCABULARY, WIDTH, TOKENS = 131072, 256, 2048
HEADS = ("ours", "TRL", "transformers")
STEPS = 2


def main() -> None:
    """Measure each head in each precision, in its own process."""
    parser = build_parser(__doc__, rounds=3)
    parser.add_argument("--measure", nargs=2, metavar=("HEAD", "PRECISION"))
    options = parser.parse_args()
    if options.measure:
        head, precision = options.measure
        print(json.dumps(measure(head, bf16=precision == "bf16")))
        return
    variants = {f"{head} {precision}": (head, precision) for precision in ("fp32", "bf16") for head in HEADS}
    results = run_interleaved(
        {name: [sys.executable, __file__, "--measure", *variant] for name, variant in variants.items()}, options.rounds
    )
    table = [["head", "extra peak GB", "seconds", "memory / ours", "time / ours", "loss", "gradient norm"]]
    for name, (_, precision) in variants.items():
        ours = f"ours {precision}"
        ratios = [compare(results, figure, ours, name) for figure in ("extra_gb", "seconds")]
        last = results[name][-1]
        measured = [spread(results[name], "extra_gb"), spread(results[name], "seconds")]
        table.append([name, *measured, *ratios, f"{last['loss']:.5f}", f"{last['gradient_norm']:.5f}"])
    title = f"Step of a 2-layer Llama, {TOKENS} tokens, width {WIDTH}, vocabulary {VOCABULARY} (min / median / max)"
    write_results(options.output, title, table, results)


def measure(head: str, *, bf16: bool) -> dict[str, float]:
    """Return the peak memory that the first step adds, without prior gradients, and the seconds of the fastest step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, tie_word_embeddings=True, **shape))
    add_head(model, head)
    ids = torch.randint(0, VOCABULARY, (4, TOKENS // 4))

    def step() -> Any:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = compute_loss(model, head, ids)
        loss.backward()
        return loss

    found = measure_steps(step, STEPS)
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    return {**found, "gradient_norm": norm.item()}


def measure_steps(step: Callable[[], Any], number: int) -> dict[str, float]:
    """Return the peak memory that the first step adds in GB, the seconds of the fastest step, and the last loss."""
    peaks, seconds = [], []
    for _ in range(number):
        Path("/proc/self/clear_refs").write_text("5")  # Resets the peak (VmHWM) to the current RSS.
        before, start = resident_gb("VmRSS"), time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - start)
        peaks.append(resident_gb("VmHWM") - before)
    return {"extra_gb": peaks[0], "seconds": min(seconds), "loss": float(loss)}


def add_head(model: Any, head: str) -> None:
    """Patch the model with a library's loss head."""
    if head == "ours":
        from recipes_lib.models.heads.loss_head import add_loss_head

        add_loss_head(model)
    elif head == "TRL":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))  # As TRL's SFT trainer calls it.


def compute_loss(model: Any, head: str, ids: Any) -> Any:
    """Return the mean loss of the batch from a head."""
    if head == "ours":
        sums = model(input_ids=ids, labels=ids, loss_head=True)
        return sums.nll_sum / sums.num_targets
    return model(input_ids=ids, labels=ids, use_cache=False, **({"fused_lm_head": True} if head == "TRL" else {})).loss


def resident_gb(field: str) -> float:
    """Return a field of ``/proc/self/status`` in GB; Linux only."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) / 1e6  # type: ignore[index]


if __name__ == "__main__":
    main()
