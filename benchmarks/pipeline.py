"""Measured pipeline bubble compared with the formula (p - 1) / (m v) for p stages, m micro-batches and v chunks.

Layers sleep instead of computing, 10 ms forward and 20 ms backward, so that processes do not compete for cores. The
measurement therefore shows only the schedule and the local communication. It does not show unequal layers of a real
model, or the latency of a network.

python benchmarks/pipeline.py [--rounds 3] [--output build/pipeline.json]
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any, Final

import torch
from harness import build_parser, run_interleaved, spread, write_results
from torch import Tensor, distributed, nn
from transformers import LlamaConfig

from recipes_lib.models.parallel.pipeline_parallel import PipelinePart, build_pipeline_stage_class
from recipes_lib.training.layouts.pipeline_schedule import Pipeline, build_pipeline_groups

LAYERS: Final = 16
FORWARD_SECONDS: Final = 0.01
BACKWARD_SECONDS: Final = 0.02
CHUNKS: Final = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
VARIANTS: Final = [(schedule, p, m) for schedule in CHUNKS for p, m in ((2, 2), (2, 4), (2, 8), (4, 4), (4, 16))]


class _Wait(torch.autograd.Function):
    """Identity function that sleeps in forward and backward."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        """Wait and return ``states``."""
        time.sleep(FORWARD_SECONDS)
        return states.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Wait twice as long and return the gradient."""
        time.sleep(BACKWARD_SECONDS)
        return gradients[0]


class WaitingLayer(nn.Module):
    """Layer that sleeps and returns its input unchanged."""

    def __init__(self) -> None:
        """Hold a parameter, by which a stage knows its device."""
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return ``states``."""
        result: Tensor = _Wait.apply(states)
        return result


def main() -> None:
    """Measure every schedule."""
    options = build_parser(__doc__, rounds=3).parse_args()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    names = {f"{schedule}, p {p}, m {m}": (schedule, p, m) for schedule, p, m in VARIANTS}
    results = run_interleaved(
        {
            name: [*launcher, str(p), __file__, "--measure", schedule, str(m)]
            for name, (schedule, p, m) in names.items()
        },
        options.rounds,
    )
    table = [["schedule", "stages p", "chunks v", "micro-batches m", "(p - 1) / (m v)", "idle / working"]]
    for name, (schedule, p, m) in names.items():
        expected = (p - 1) / (m * CHUNKS[schedule])
        table.append(
            [schedule, str(p), str(CHUNKS[schedule]), str(m), f"{expected:.2f}", spread(results[name], "bubble")]
        )
    title = f"The bubble of a pipeline: {LAYERS} layers that wait, processes over gloo; min / median / max"
    write_results(options.output, title, table, results)


def measure(schedule: str, num_batches: int) -> dict[str, float]:
    """Return the ``bubble``: idle seconds of a process over working seconds, in the best step."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    num_stages = distributed.get_world_size()
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=LAYERS, num_attention_heads=2
    )
    config._attn_implementation = "sdpa"
    part = PipelinePart(distributed.get_rank(), num_stages, CHUNKS[schedule])
    model: Any = build_pipeline_stage_class(config, part)._from_config(config)
    for layers in part.share_layers(LAYERS):
        for number in layers:
            model.base_model.layers[number] = WaitingLayer()
    pipeline = Pipeline(model, build_pipeline_groups(num_stages), schedule=schedule, autocast=contextlib.nullcontext)
    ids = torch.arange(8).view(1, 8)
    batches = [{"input_ids": ids, "labels": ids, "position_ids": ids}] * num_batches
    times = []
    for _ in range(4):  # The first one connects the processes.
        distributed.barrier()
        began = time.perf_counter()
        pipeline.compute_gradients(batches, 7 * num_batches)
        distributed.barrier()
        times.append(time.perf_counter() - began)
    work = num_batches * LAYERS / num_stages * (FORWARD_SECONDS + BACKWARD_SECONDS)
    return {"bubble": min(times[1:]) / work - 1, "seconds": min(times[1:]), "work_seconds": work}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        figures = measure(sys.argv[2], int(sys.argv[3]))
        if os.environ["RANK"] == "0":
            sys.stdout.write(json.dumps(figures) + "\n")
        distributed.destroy_process_group()
    else:
        main()
