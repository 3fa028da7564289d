"""Two processes report what one does: held-out figures and token counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.forked import FORKING
from torch import distributed
from torch.multiprocessing import start_processes
from transformers import AutoModelForCausalLM

from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.training.evaluation.held_out import EvaluateLoss
from recipes_lib.training.monitoring.metrics import StepCounter
from recipes_lib.training.monitoring.progress import TrainingProgress

# Seven rows of unequal length: two processes with batches of two need uneven shares, and a last batch of one.
ROWS = [
    {
        "input_ids": [(7 * place + number) % 500 + 4 for place in range(length)],
        "loss_mask": [place % 3 != 0 for place in range(length)],
        "seq_lengths": [length],
    }
    for number, length in enumerate([9, 4, 17, 6, 30, 5, 12])
]


def evaluate(model_dir: Path, batch_size: int) -> tuple[dict[str, float], int]:
    """Return the figures and how many forward passes this process made."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    add_loss_head(model)
    num_forwards = 0

    def count(*_: object) -> None:
        nonlocal num_forwards
        num_forwards += 1

    model.register_forward_hook(count)
    hook = EvaluateLoss(
        held_out={"rows": ROWS},
        batch_size=batch_size,
        collate=PackedCollator(pad_token_id=1),
        progress=TrainingProgress(),
        byte_lengths=torch.arange(512),
    )
    figures = hook(model, 0)
    figures.pop("seconds")
    return figures, num_forwards


def run_process(rank: int, folder: Path, model_dir: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    evaluations = [evaluate(model_dir, batch_size) for batch_size in (2, 3)]
    counter = StepCounter()
    counter.add(10 + rank, torch.tensor(3 * (rank + 1)), 2**53 + rank)
    counter.synchronise()
    report = {"evaluations": evaluations, "totals": counter.totals()}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    distributed.destroy_process_group()


@pytest.mark.multiprocess
def test_two_processes_report_what_one_does(tiny_model_dir: Path, tmp_path: Path) -> None:
    expected, _ = evaluate(tiny_model_dir, 1)

    start_processes(run_process, (tmp_path, tiny_model_dir), nprocs=2, start_method=FORKING.get_start_method())

    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for report in reports:
        assert [figures for figures, _ in report["evaluations"]] == [pytest.approx(expected, rel=1e-5)] * 2
        assert report["totals"] == {"num_tokens": 21, "num_targets": 9, "num_correct": 2**54 + 1}
    # Under sharded weights a process that made fewer passes would leave the other waiting for ever.
    assert [passes for _, passes in reports[0]["evaluations"]] == [passes for _, passes in reports[1]["evaluations"]]
