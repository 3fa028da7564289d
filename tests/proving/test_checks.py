"""Checks of ``recipes prove`` on a CPU, with real runs, and with wrong results of fakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.proving.benches import FAST, GPU, build_bench, read_flags, write_losses
from tests.rows import write_rows

from recipes_lib.proving import checks
from recipes_lib.proving.bench import WrongResultError
from recipes_lib.proving.checks import compare_with_cpu, compare_with_one_gpu, count_synchronisations, list_checks
from recipes_lib.proving.results import PASSED, run_check


@pytest.mark.parametrize(
    "name",
    [
        "numbers-sft",
        "numbers-grpo",
        "resume",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("numbers-dpo", "numbers-ppo", "numbers-rloo", "engine-batching")
        ),
    ],
)
def test_check_passes_on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (check,) = (check for check in list_checks() if check.name == name)
    row = run_check(check, build_bench(tmp_path), 600)
    assert (row.status, row.reason) == (PASSED, "")
    assert all(value > 0 for figure, value in row.figures.items() if not figure.startswith("gap"))


def test_checks_without_processes_pass_on_cpu_or_need_gpu(tmp_path: Path) -> None:
    rows = [run_check(check, build_bench(tmp_path), 600) for check in list_checks() if check.name.startswith(FAST)]
    assert {row.check for row in rows if row.status == PASSED} >= {"attention-varlen", "layers-compile", "loss-head"}
    assert {row.reason for row in rows} == {"", "there is no GPU", "needs 2 GPUs"}


def test_losses_different_from_cpu_raise(tmp_path: Path) -> None:
    assert compare_with_cpu("sft", build_bench(tmp_path, write_losses(2.0, 2.0001)))["gap_fp32"] == pytest.approx(5e-5)
    for wrong in (2.001, float("nan")):
        with pytest.raises(WrongResultError, match=r"loss in fp32 is .* off the CPU's"):
            compare_with_cpu("sft", build_bench(tmp_path, write_losses(2.0, wrong)))
    with pytest.raises(WrongResultError, match="0 steps were logged, and 1 on the CPU"):
        checks.measure_gap([{"step": 1, "loss": 2.0}], [])


@pytest.mark.parametrize(
    ("is_logged", "per_micro_batch", "wrong"), [(1, 0, None), (1, 1, "one of 3 has 5"), (0, 0, "one of 3 has 0")]
)
def test_synchronisations_per_micro_batch_or_missing_log_raise(tmp_path, is_logged, per_micro_batch, wrong) -> None:
    def warn(arguments: Sequence[str], variables: Mapping[str, str], output: Path) -> int:
        flags = read_flags(arguments)
        num_steps, num_batches = int(flags["max_steps"]), int(flags["gradient_accumulation_steps"])
        waits = 7 + num_steps * (2 + per_micro_batch * num_batches)
        output.write_text("warning: called a synchronizing CUDA operation\n" * waits * is_logged)
        return 0

    bench = build_bench(tmp_path, warn, GPU)
    if wrong is None:
        assert count_synchronisations("sft", bench) == {"synchronisations_a_step": 2.0}
        return
    with pytest.raises(WrongResultError, match=wrong):
        count_synchronisations("sft", bench)


@pytest.mark.parametrize(("found", "is_right"), [(2.0001, True), (2.001, False)])
def test_several_gpus_have_batch_size_and_losses_of_one(tmp_path: Path, found: float, is_right: bool) -> None:
    batches, precisions = {}, set[tuple[str | None, str]]()

    def train(arguments: Sequence[str], variables: Mapping[str, str], output: Path) -> int:
        flags = read_flags(arguments)
        count = int(flags.get("num_processes", 1))
        precisions.add((flags.get("mixed_precision"), flags["bf16"]))
        batches[count] = count * int(flags["per_device_train_batch_size"]) * int(flags["gradient_accumulation_steps"])
        event = {"kind": "train", "step": 1, "loss": 2.0 if count == 1 else found, "tokens_per_second": 10 * count}
        write_rows(Path(flags["output_dir"]) / "metrics.jsonl", [event])
        return 0

    bench = replace(build_bench(tmp_path, train, GPU), num_gpus=4)
    if is_right:
        assert compare_with_one_gpu("fsdp2", bench)["speed_of_all"] == 40
        assert batches == {1: 4, 4: 4}
        assert precisions == {(None, "false"), ("no", "false")}
        # Context-parallel ranks read the same row, and refuse float32.
        precisions.clear()
        compare_with_one_gpu("fsdp2_cp", bench)
        assert batches == {1: 1, 4: 4}
        assert precisions == {(None, "true"), ("bf16", "true")}
        return
    with pytest.raises(WrongResultError, match="losses of 4 GPUs are"):
        compare_with_one_gpu("fsdp2", bench)
