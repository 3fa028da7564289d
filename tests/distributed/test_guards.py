"""Guards on two ranks: rollbacks, stops before a bad update, and the rank of a hardware error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.distributed.cells import FULL_PRECISION
from tests.forked import ROOT, run_forked
from tests.test_accelerate_configs import read_environment
from tests.training import spiking

from recipes_lib.training.guards.step_guard import read_rollbacks

TWO = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
ONE = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
REMAINING = [row for row in range(180) if not 100 <= row < 116]
CHECKED = {"max_steps": 6, "save_strategy": "no", "guards": {"verify_steps": 2}}
# Back to step 25, from the spike of bad rows.
SPIKE = {"guards": {"max_rollbacks": 1}, "save_steps": 25}
CELLS: dict[str, dict[str, Any]] = {
    "spike": TWO | SPIKE,
    "without skipped rows": TWO | {"rows": REMAINING, "save_strategy": "no"},
    "sound": TWO | CHECKED,
    "nan loss": TWO | {"fault": "nan loss", "max_steps": 6, "save_strategy": "no"},
    "flipped bit": TWO | CHECKED | {"fault": "flipped bit"},
    "wrong product": TWO | CHECKED | {"fault": "wrong product"},
    "wrong gradients": TWO | CHECKED | {"fault": "wrong gradients"},
}
PLANTED = TWO | {"guards": {"max_rollbacks": 1}, "planted": 5, "max_steps": 8}
SHARDED: dict[str, dict[str, Any]] = {
    "to a checkpoint": PLANTED | {"save_steps": 3},
    "to the beginning": PLANTED | {"save_steps": 1000},
    # Of steps 4 to 7.
    "without skipped rows": TWO | {"rows": [*range(12), *range(28, 180)], "max_steps": 8, "save_strategy": "no"},
    "sound": CELLS["sound"],
    "nan gradient": TWO | {"fault": "nan gradient", "max_steps": 6},
}


@pytest.fixture(scope="module")
def reports(tiny_model_dir, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("guards")
    run_forked("tests.training.spiking", tiny_model_dir, output_dir, json.dumps(CELLS))
    return output_dir, json.loads((output_dir / "reports.json").read_text())


@pytest.fixture(scope="module")
def sharded(tiny_model_dir, tmp_path_factory):
    """Folder of the runs under FSDP2, and the reports of both ranks."""
    output_dir = tmp_path_factory.mktemp("sharded")
    file = str(ROOT / "accelerate_configs" / "fsdp2.yaml")
    variables = read_environment(file, "--num_processes=2", *FULL_PRECISION)
    run_forked("tests.training.spiking", tiny_model_dir, output_dir, json.dumps(SHARDED), variables=variables)
    return output_dir, json.loads((output_dir / "reports.json").read_text())


@pytest.mark.multiprocess
def test_rollback_is_exact_and_matches_one_process(reports, tiny_model_dir, tmp_path):
    output_dir, ranks = reports
    for report in ranks:
        assert report["spike"]["checksums"] == report["without skipped rows"]["checksums"]
    assert ranks[0]["spike"]["steps"][-6:] == ranks[0]["without skipped rows"]["steps"][-6:]
    one = spiking.run_cell(tiny_model_dir, tmp_path, ONE | SPIKE)
    assert read_rollbacks(tmp_path)[0].skipped == read_rollbacks(output_dir / "spike")[0].skipped
    for expected, got in zip(one["steps"], ranks[0]["spike"]["steps"], strict=True):
        assert got == pytest.approx(expected, rel=1e-3)


@pytest.mark.multiprocess
def test_rollback_of_sharded_weights_is_exact(sharded):
    output_dir, ranks = sharded
    for name, back_to in (("to a checkpoint", 3), ("to the beginning", 0)):
        for report in ranks:
            assert report[name]["checksums"] == report["without skipped rows"]["checksums"]
        (made,) = read_rollbacks(output_dir / name)
        assert (made.back_to, made.steps) == (back_to, (4, 7))
    assert (output_dir / "to a checkpoint" / "checkpoint-6" / "optimizer_shards").is_dir()


@pytest.mark.multiprocess
def test_gradients_of_shards_are_checked_before_clipping(sharded):
    for report in sharded[1]:
        assert report["sound"]["end"] == ""
        assert max(step["grad_norm"] for step in report["sound"]["steps"]) > 1  # They were clipped.
        # Named from the output to the input: clipping by a norm of NaN would have spread it to all layers.
        assert "on rank 0 the gradient of model.layers.0." in report["nan gradient"]["end"]


@pytest.mark.multiprocess
def test_nan_loss_on_one_rank_stops_all_before_update(reports):
    output_dir, ranks = reports
    ends = {report["nan loss"]["end"] for report in ranks}
    assert len(ends) == 1
    assert "step 4 was stopped before its update: the loss of micro-batch 1 of rank 1 is nan and 1 more" in ends.pop()
    assert ranks[0]["nan loss"]["checksums"] == ranks[1]["nan loss"]["checksums"]
    folder = output_dir / "nan loss" / "diverged" / "step-4"
    facts = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [fact["bad_micro_batches"] for fact in facts] == [[], [0, 1]]
    # Together, the ranks record the rows of the step.
    assert sorted(row for fact in facts for ids in fact["row_ids"] for row in ids) == [12, 13, 14, 15]


@pytest.mark.multiprocess
def test_first_step_of_three_ranks_is_reproduced(tiny_model_dir, tmp_path):
    """DDP orders its buckets by the first backward pass, and sums over three ranks depend on the order."""
    cells = {"sound": TWO | CHECKED | {"max_steps": 2, "guards": {"verify_steps": 1}}}
    run_forked("tests.training.spiking", tiny_model_dir, tmp_path, json.dumps(cells), num_processes=3)
    reports = json.loads((tmp_path / "reports.json").read_text())
    assert [report["sound"]["end"] for report in reports] == [""] * 3


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("flipped bit", "rank 1 differs in model.layers.1.mlp.up_proj.weight. "),
        ("wrong product", "rank 1 differs in the loss of micro-batch 2"),
        ("wrong gradients", "rank 1 differs in model.layers.0.mlp.down_proj.weight. "),
    ],
)
def test_hardware_error_names_its_rank(reports, cell, message):
    _, ranks = reports
    assert [report["sound"]["end"] for report in ranks] == ["", ""]
    for report in ranks:
        assert "step 4" in report[cell]["end"]
        assert message in report[cell]["end"]
        assert len(report[cell]["steps"]) == 3
