"""Evaluation on two ranks, compared with one process: held-out metrics, named datasets, benchmarks, token counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.distributed import sharding
from tests.distributed.cells import FULL_PRECISION, assert_same_run, build_jobs
from tests.evaluation.conftest import write_tasks
from tests.faults import recipe_runs
from tests.forked import FORKING, limit_forked
from tests.rows import read_rows
from torch import distributed
from torch.multiprocessing import start_processes
from transformers import AutoModelForCausalLM

from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.training.evaluation.held_out import EvaluateLoss
from recipes_lib.training.monitoring.metrics import StepCounter
from recipes_lib.training.monitoring.progress import TrainingProgress

# Seven rows of unequal length: two ranks with batches of two have uneven shares and a last batch of one.
ROWS = [
    {
        "input_ids": [(7 * place + number) % 500 + 4 for place in range(length)],
        "loss_mask": [place % 3 != 0 for place in range(length)],
        "seq_lengths": [length],
    }
    for number, length in enumerate([9, 4, 17, 6, 30, 5, 12])
]


def evaluate(model_dir: Path, batch_size: int) -> tuple[dict[str, float], int]:
    """Return the metrics, and the number of forward passes of this rank."""
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
    limit_forked()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    evaluations = [evaluate(model_dir, batch_size) for batch_size in (2, 3)]
    counter = StepCounter()
    counter.add(10 + rank, torch.tensor(3 * (rank + 1)), 2**53 + rank)
    counter.synchronise()
    report = {"evaluations": evaluations, "totals": counter.totals._asdict()}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    distributed.destroy_process_group()


@pytest.mark.multiprocess
def test_two_processes_report_metrics_of_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    expected, _ = evaluate(tiny_model_dir, 1)

    start_processes(run_process, (tmp_path, tiny_model_dir), nprocs=2, start_method=FORKING.get_start_method())

    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for report in reports:
        assert [figures for figures, _ in report["evaluations"]] == [pytest.approx(expected, rel=1e-5)] * 2
        assert report["totals"] == {"num_tokens": 21, "num_targets": 9, "num_correct": 2**54 + 1}
    # With sharded weights, a rank with fewer forward passes would block the other one forever.
    assert [passes for _, passes in reports[0]["evaluations"]] == [passes for _, passes in reports[1]["evaluations"]]


@pytest.mark.multiprocess
@pytest.mark.parametrize("recipe", ["sft", pytest.param("distill", marks=pytest.mark.slow)])
def test_named_datasets_and_benchmarks_match_one_process(inputs: Path, tmp_path: Path, recipe: str) -> None:
    tasks = write_tasks(tmp_path)
    recipe_runs.write_chats(tmp_path / "web.jsonl", range(200, 207))
    named = {"eval_datasets": json.dumps({"web": str(tmp_path / "web.jsonl")})}
    benchmarks = {
        "eval_tasks": '["local_choice", "local_written"]',
        "eval_tasks_include_path": json.dumps([str(tasks)]),
    }
    cells = {
        "sft": ("sft", 4, named | benchmarks | {"eval_tasks_steps": 3}),
        "distill": ("distill", 4, named | {"test_split_size": "null"}),
    }
    cells = {recipe: cells[recipe]}
    one = sharding.run_jobs(build_jobs(inputs, cells, 1), tmp_path / "one")
    two = sharding.run_jobs(build_jobs(inputs, cells, 2), tmp_path / "two", "cpu_ddp", *FULL_PRECISION)
    assert {*one["codes"].values(), *two["codes"].values()} == {0}, (one, two)
    assert_same_run(tmp_path / "one" / recipe, tmp_path / "two" / recipe)
    events = read_rows(tmp_path / "two" / recipe / "metrics.jsonl")
    assert any("eval_web_loss" in event for event in events)
    for name in () if recipe == "distill" else ("eval_local_choice_acc", "eval_local_written_exact_match"):
        assert [event["step"] for event in events if name in event] == [0, 3]
