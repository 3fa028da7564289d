"""Cost, energy and CO2 of a plan; calibration by records of finished runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.planning.runs import build_config
from tests.rows import write_rows

from recipes_lib.commands.planning.planned_hardware import UNLABELLED, Hardware, calibrate, format_rows, read_proof
from recipes_lib.config.schema import flatten_config
from recipes_lib.errors import ConfigError, DataError
from recipes_lib.planning.devices import Kind, choose_device
from recipes_lib.proving.results import PASSED, Row, add_row


def build(price: float | None = None, pue: float = 1.0, grid: float | None = None, gpu: str = "H100") -> Hardware:
    return Hardware(choose_device(gpu), 8, 0.5, "a test", None, price, pue, grid)


def test_bill_is_gpu_hours_times_price_and_power() -> None:
    assert build().compute_hours(8 * 989e12 * 0.5 * 3600) == 1
    rows = dict(build(2.5, 1.2, 400).describe_bill(10))
    assert rows["cost"].startswith("200.00, at 2.5 for a GPU hour")
    # 8 boards of 700 W for 10 hours are 56 kWh.
    assert rows["energy"] == "at most 67.2 kWh: 700 W a board, PUE 1.2; 26.9 kg of CO2"


@pytest.mark.parametrize(("gpu", "names"), [("H100", ["energy"]), ("GH200", [])])
def test_unknown_power_or_price_gives_no_row(gpu, names) -> None:
    assert [name for name, _ in build(gpu=gpu).describe_bill(10)] == names


def test_rows_are_wrapped_to_terminal_except_flags(monkeypatch) -> None:
    lines = format_rows([("time", "3 s"), ("", "more"), (UNLABELLED, "xx")])
    assert lines == ["time            3 s", "                more", "xx"]
    monkeypatch.setenv("COLUMNS", "60")
    lines = format_rows([("time", "word " * 40), ("keys", "--key value " * 10)])
    assert max(map(len, lines[:-1])) <= 60
    assert len(lines[-1]) > 60
    monkeypatch.setenv("COLUMNS", "300")
    assert 60 < max(map(len, format_rows([("time", "word " * 40)]))) <= 100


def write_run(folder: Path, *mfu: float | None, recipe: str = "sft", gpu: str = "NVIDIA H100 80GB HBM3", **keys: Any):
    """Write records of a finished run with these values of MFU."""
    config = build_config(recipe, output_dir=folder, **keys)
    record: dict[str, Any] = {"stage": recipe, "status": "done", "hardware": {"device": gpu}}
    record |= {"config": flatten_config(config), "provenance": dict(config.provenance)}
    if config.read("activation_checkpointing") == "auto":
        record["activation_checkpointing"] = "every layer (70.0 of 80.0 GB)"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(record, default=str))
    events = ({"kind": "train", "step": step, "mfu": value} for step, value in enumerate(mfu, 1))
    write_rows(folder / "metrics.jsonl", events)
    return folder


@pytest.mark.parametrize(
    ("keys", "kind", "factor"),
    [
        ({}, (False, False), 1),
        ({"torch_compile": True}, (True, False), 1),
        ({"activation_checkpointing": True}, (False, False), 4 / 3),
        ({"activation_checkpointing": "auto"}, (False, False), 4 / 3),
        ({"recipe": "lora", "activation_checkpointing": True, "load_in_4bit": True}, (False, True), 3 / 2 / 0.9),
    ],
)
def test_calibration_is_median_mfu_by_class_without_recomputation(tmp_path: Path, keys, kind, factor) -> None:
    """The first logged step, which compiles, is excluded."""
    folders = [write_run(tmp_path / str(mfu), 0.01, mfu, mfu + 0.01, mfu - 0.01, **keys) for mfu in (0.2, 0.3, 0.32)]
    measured = calibrate(folders, choose_device("H100"))
    assert measured.shares == {Kind(*kind): pytest.approx(0.3 * factor)}
    assert measured.source == "3 finished runs"


def test_all_unsuitable_runs_are_reported_together(tmp_path: Path) -> None:
    refused = [
        write_run(tmp_path / "other", 0.3, 0.3, gpu="NVIDIA A100-SXM4-80GB"),
        write_run(tmp_path / "cpu", 0.3, 0.3, gpu="Intel Xeon"),
        write_run(tmp_path / "unknown", None, None),
        write_run(tmp_path / "short", 0.3),
        write_run(tmp_path / "pairs", 0.3, 0.3, recipe="dpo", precompute_ref_log_probs=False),
        write_run(tmp_path / "base", 0.3, 0.3, kl_to_base=0.1),
        write_run(tmp_path / "idle", 0.0, 0.0),
        write_run(tmp_path / "wrong peak", 0.9, 0.9, activation_checkpointing=True),
    ]
    with pytest.raises(DataError) as caught:
        calibrate(refused, choose_device("H100"))
    found = {Path(problem.where).name: problem.found for problem in caught.value.problems}
    assert [*found] == [folder.name for folder in refused]
    assert found["other"] == "trained on 'NVIDIA A100-SXM4-80GB', and the plan is for 'H100'"
    assert "'Intel Xeon'" in found["cpu"]
    assert found["unknown"] == found["short"]
    assert "reference model" in found["pairs"]
    assert "base model" in found["base"]
    assert "MFU of 0," in found["idle"]
    assert "MFU of 1.2," in found["wrong peak"]


def test_proof_is_used_for_the_measured_gpu_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no throughput of 'A100-80GB'"):
        read_proof(tmp_path, choose_device("A100-80GB"))
    for check, share in {"124M-eager": 0.3, "1B-compiled": 0.4, "124M-compiled": 0.35, "1B-default": 0.5}.items():
        machine, name = "NVIDIA A100-SXM4-80GB, full sizes, torch 2", f"throughput-{check}"
        add_row(tmp_path, Row(machine, name, "", PASSED, 1.0, {"mfu": share}))
    # Small sizes, another GPU and damaged values replace no measurement.
    for machine, share in {
        "NVIDIA A100-SXM4-80GB, small sizes, torch 2": 0.0003,
        "NVIDIA H200, full sizes, torch 2": 0.6,
        "NVIDIA A100-SXM4-80GB, full sizes, torch 1": "high",
    }.items():
        check = "124M-eager" if machine.endswith("2") else "124M-compiled"
        add_row(tmp_path, Row(machine, f"throughput-{check}", "", PASSED, 1.0, {"mfu": share}))
    shares = read_proof(tmp_path, choose_device("A100-80GB")).shares
    assert shares == {Kind(compiles=False, uses_adapter=False): 0.3, Kind(compiles=True, uses_adapter=False): 0.4}
    with pytest.raises(ConfigError, match="has no throughput of 'H100'"):
        read_proof(tmp_path, choose_device("H100"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hardware": "H100"}, "`hardware` is"),
        ({"provenance": None}, "`provenance` is "),
        ({"stage": "stf"}, "is not a finished run"),
        ({"status": "running"}, "is not a finished run"),
    ],
)
def test_damaged_or_unfinished_record_raises(tmp_path: Path, changes, words) -> None:
    folder = write_run(tmp_path / "run", 0.3, 0.3)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | changes))
    with pytest.raises(DataError, match=words):
        calibrate([folder], choose_device("H100"))
