"""Rows of results: failed, skipped, resumed and foreign ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tests.proving.benches import GPU, build_bench, write_losses

from recipes_lib.proving.bench import Bench, Figures, WrongResultError
from recipes_lib.proving.checks import Check, compare_with_cpu
from recipes_lib.proving.results import (
    FAILED,
    PASSED,
    ROWS_FILE,
    SKIPPED,
    SMALL,
    add_row,
    format_row,
    read_rows,
    run_check,
    write_page,
)


def test_failed_recipe_gives_row_with_tail_of_log(tmp_path: Path) -> None:
    def fail(arguments: Sequence[str], variables: Mapping[str, str], output: Path) -> int:
        output.write_text("first\nCUDA error: an illegal memory access was encountered\n")
        return 1

    check = Check("numbers-sft", "", lambda bench: compare_with_cpu("sft", bench))
    row = run_check(check, build_bench(tmp_path, fail), 60)
    assert row.status == FAILED
    assert row.reason.count("illegal memory access") == 1


def test_reason_of_long_log_keeps_its_end(tmp_path: Path) -> None:
    def fail(_: Bench) -> Figures:
        raise WrongResultError("\n".join(["sft.py ended with 1", *["frame " * 20] * 12, "OutOfMemoryError: 80 GB"]))

    row = run_check(Check("x", "", fail), build_bench(tmp_path), 60)
    assert row.reason.startswith("WrongResultError: sft.py ended with 1\n")
    assert len(row.reason) < 500
    assert row.reason.endswith("OutOfMemoryError: 80 GB")
    assert "sft.py ended with 1 ... OutOfMemoryError: 80 GB" in format_row(row)


def test_cuda_error_of_an_earlier_check_does_not_end_a_separate_process(tmp_path, monkeypatch) -> None:
    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    bench = build_bench(tmp_path, write_losses(1.0, 1.0), GPU)
    row = run_check(Check("numbers-sft", "", lambda bench: compare_with_cpu("sft", bench)), bench, 60)
    assert row.status == PASSED, row.reason


def test_missing_requirements_and_time_skip_with_reason(tmp_path: Path) -> None:
    bench = build_bench(tmp_path, device=GPU)
    absent = Check("x", "", lambda _: {}, package="no_such_package")
    assert run_check(absent, bench, 60).reason == "no_such_package is not installed"
    assert run_check(Check("x", "", lambda _: {}), bench, 0).status == SKIPPED
    assert run_check(Check("x", "", lambda _: {}, min_gpus=1), build_bench(tmp_path), 60).reason == "there is no GPU"
    assert run_check(Check("x", "", lambda _: {}, min_gpus=2), bench, 60).reason == "needs 2 GPUs"


def test_malformed_rows_are_ignored(tmp_path: Path) -> None:
    bench = build_bench(tmp_path)
    add_row(tmp_path, run_check(Check("x", "", lambda _: {"gap": 0.5}), bench, 60))
    (good,) = read_rows(tmp_path, bench.describe().__eq__).values()
    assert not read_rows(tmp_path, "another GPU".__eq__)
    with (tmp_path / ROWS_FILE).open("a") as stream:
        for wrong in ({"check": []}, {"seconds": "soon"}, {"figures": [1]}, {"reason": None}):
            stream.write(json.dumps({**asdict(good), **wrong}) + "\n")
        stream.write('{"machine": "torn')
    assert read_rows(tmp_path) == {"x": good}
    page = tmp_path / "page.md"
    write_page(page, read_rows(tmp_path).values())
    assert "| x |  | passed |" in page.read_text()


def test_page_names_machine_whose_own_check_failed(tmp_path: Path) -> None:
    row = run_check(Check("environment", "", lambda _: {}), build_bench(tmp_path), 60)
    write_page(tmp_path / "page.md", [row])
    assert f"- machine: {row.machine}\n" in (tmp_path / "page.md").read_text()


def test_page_names_small_sizes(tmp_path: Path) -> None:
    """Throughput "of 8B" would otherwise pass for that of such a model."""
    row = run_check(Check("throughput-8B", "", lambda _: {}), bench := build_bench(tmp_path), 60)
    for is_small in (True, False):
        write_page(tmp_path / "page.md", [replace(row, machine=replace(bench, is_small=is_small).describe())])
        assert (SMALL in (tmp_path / "page.md").read_text()) == is_small
