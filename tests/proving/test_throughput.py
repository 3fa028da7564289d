"""Throughput checks on a CPU, in small sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.proving.benches import build_bench, write_losses
from tests.rows import write_rows

from recipes_lib.proving import throughput
from recipes_lib.proving.bench import WrongResultError
from recipes_lib.proving.throughput import FINETUNING, measure_engine, measure_finetuning, measure_pretraining


def test_pretraining_plans_memory_and_compares_with_faster_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Compiling takes half a minute on a CPU.
    monkeypatch.setattr(throughput, "_VARIANTS", {"default": {"torch_compile": "false"}})
    figures = measure_pretraining("124M", build_bench(tmp_path))
    # At least weights, gradients and states of 82,000 parameters, and far less than a CUDA context.
    assert 16 * 82_000 < 1e9 * figures["default_planned_gb"] < 100e6
    fast = {"default_tokens_per_second": 6.0, "transformers_tokens_per_second": 2.0}
    fast |= {"transformers_compiled_tokens_per_second": 3.0, "eager_tokens_per_second": 9.0}
    assert throughput._compare_with_peer(fast, "transformers") == {"ratio_to_transformers": 2.0}


@pytest.mark.slow  # The default tier runs TRL's trainer in test_scripts, and our recipe in test_checks.
@pytest.mark.parametrize("method", FINETUNING)
def test_finetuning_is_compared_with_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.chdir(tmp_path)
    figures = measure_finetuning(method, build_bench(tmp_path))
    assert figures["ratio_to_trl"] == figures["ours_tokens_per_second"] / figures["trl_tokens_per_second"]
    assert figures["ours_planned_gb"] > 0


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
        patch.setattr(throughput.AutoModelForCausalLM, "from_config", lambda *_, **__: Interrupted())
        with pytest.raises(KeyboardInterrupt):
            throughput._write_large_inputs(bench, 64)
    model, _ = throughput._write_large_inputs(bench, 64)
    assert (model / "model.safetensors").exists()


@pytest.mark.parametrize(("visible", "first"), [(None, "0"), ("3,5", "3"), ("GPU-8932f937", "GPU-8932f937")])
def test_peer_sees_first_gpu_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, first: str
) -> None:
    """With several visible GPUs, transformers' trainer would use ``nn.DataParallel`` and a larger batch."""
    seen = []

    def record(arguments: Sequence[str], variables: Mapping[str, str], output: Path) -> int:
        seen.append(variables["CUDA_VISIBLE_DEVICES"])
        write_rows(output.with_suffix("") / "peer.json", [{"tokens_per_second": 1.0}])
        return 0

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    throughput._measure_peer(build_bench(tmp_path, record), "trl", "run", 2, 8, {})
    assert seen == [first]


@pytest.mark.parametrize("log", ["", "torch.OutOfMemoryError: CUDA out of memory", "ValueError: no"])
def test_peer_out_of_memory_is_reported_and_other_failures_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str
) -> None:
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
    if not log:
        # `write_losses` records one token per second.
        assert measure_finetuning("lora", bench)["ratio_to_trl"] == 0.25
        return
    if "OutOfMemory" in log:
        figures = measure_finetuning("lora", bench)
        assert figures["trl_tokens_per_second"] == "out of memory"
        assert "ratio_to_trl" not in figures
        return
    with pytest.raises(WrongResultError, match=r"trl's trainer failed: .*finetune-8B-lora-trl.log"):
        measure_finetuning("lora", bench)
