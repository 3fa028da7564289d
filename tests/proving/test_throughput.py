"""Throughput checks on a CPU, in small sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.proving.benches import build_bench, write_losses
from tests.rows import write_rows

from recipes_lib.proving import checks
from recipes_lib.proving.bench import RUNS, WrongResultError
from recipes_lib.proving.checks import measure_engine, measure_finetuning, measure_pretraining

SPEED = {"tokens_per_second": 3.0}


def test_pretraining_plans_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    figures = measure_pretraining("124M", "default", build_bench(tmp_path))
    # At least weights, gradients and states of 82,000 parameters, and far less than a CUDA context.
    assert 16 * 82_000 < 1e9 * figures["planned_gb"] < 100e6


@pytest.mark.parametrize("variant", [*RUNS["variants"], *RUNS["peers"]])
def test_variant_of_pretraining_has_its_keys_and_launcher(tmp_path: Path, variant: str) -> None:
    seen = []

    def record(arguments: Sequence[str], variables: Mapping[str, str], output: Path) -> int:
        seen.append(" ".join(arguments))
        write_rows(output.with_suffix("") / "peer.json", [{"tokens_per_second": 2.0}])
        return write_losses(2.0, 2.0)(arguments, variables, output) if "-m recipes_lib" not in seen[0] else 0

    bench = replace(build_bench(tmp_path, record), passed={"throughput-1B-default": SPEED})
    figures = measure_pretraining("1B", variant, bench)
    if variant in RUNS["peers"]:
        assert figures["ours_over_it"] == 1.5
        assert f'"compile": {str(RUNS["peers"][variant]).lower()}' in seen[0]
        return
    assert figures["tokens_per_second"] == 1.0
    assert all(f"--{key}={value}" in seen[0] for key, value in RUNS["variants"][variant].items())
    assert ("fp8.yaml" in seen[0]) == ("--bf16=true" not in seen[0]) == (variant == "fp8")


@pytest.mark.slow  # The default tier runs TRL's trainer in test_scripts, and our recipe in test_checks.
@pytest.mark.parametrize("method", RUNS["finetuning"])
def test_finetuning_is_compared_with_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.chdir(tmp_path)
    bench = build_bench(tmp_path)
    bench.passed[f"finetune-8B-{method}"] = ours = measure_finetuning(method, bench)
    theirs = measure_finetuning(method, bench, by_trl=True)
    assert theirs["ours_over_it"] == ours["tokens_per_second"] / theirs["tokens_per_second"]
    assert ours["planned_gb"] > 0


def test_engine_is_measured_in_grpo_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    figures = measure_engine({}, build_bench(tmp_path))
    assert figures["tokens_per_second"] > 0
    assert figures["iteration_s"] > figures["sampling_s"] > 0


def test_interrupted_model_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "config.json").touch()
            raise KeyboardInterrupt

    bench = build_bench(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checks.AutoModelForCausalLM, "from_config", lambda *_, **__: Interrupted())
        with pytest.raises(KeyboardInterrupt):
            checks._write_large_inputs(bench, 64)
    model, _ = checks._write_large_inputs(bench, 64)
    assert (model / "model.safetensors").exists()


@pytest.mark.parametrize(("visible", "first"), [(None, "0"), ("3,5", "3"), ("GPU-8932f937", "GPU-8932f937")])
def test_peer_sees_first_gpu_only(tmp_path, monkeypatch, visible, first) -> None:
    """With several visible GPUs, transformers' trainer would use ``nn.DataParallel`` and a larger batch."""
    seen = []

    def record(arguments: Sequence[str], variables: Mapping[str, str], output: Path) -> int:
        seen.append(variables["CUDA_VISIBLE_DEVICES"])
        write_rows(output.with_suffix("") / "peer.json", [{"tokens_per_second": 1.0}])
        return 0

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    checks._measure_peer(build_bench(tmp_path, record), "run", "ours", 2, 8, {})
    assert seen == [first]


@pytest.mark.parametrize("log", ["", "torch.OutOfMemoryError: CUDA out of memory", "ValueError: no"])
def test_peer_out_of_memory_is_reported_and_other_failures_raise(tmp_path, monkeypatch, log) -> None:
    def fail(arguments: Sequence[str], variables: Mapping[str, str], output: Path) -> int:
        if arguments[0] != "-m":
            (output.with_suffix("") / "model.safetensors").touch()
            return write_losses(2.0, 2.0)(arguments, variables, output)
        assert not list(output.parent.glob("*/*.safetensors")), "the disk may be too small for both"
        output.write_text(log)
        write_rows(output.with_suffix("") / "peer.json", [{"tokens_per_second": 4.0}])
        return int(log != "")

    monkeypatch.chdir(tmp_path)
    bench = build_bench(tmp_path, fail)
    # `write_losses` records one token per second.
    bench.passed["finetune-8B-lora"] = measure_finetuning("lora", bench)
    if not log:
        assert measure_finetuning("lora", bench, by_trl=True)["ours_over_it"] == 0.25
    elif "OutOfMemory" in log:
        assert measure_finetuning("lora", bench, by_trl=True) == {"tokens_per_second": "out of memory"}
    else:
        with pytest.raises(WrongResultError, match=r"the other trainer failed: .*finetune-8B-lora-trl.log"):
            measure_finetuning("lora", bench, by_trl=True)
