"""Throughput checks of ``recipes prove``: pretraining, fine-tuning of 8B, generation engines, checkpoint pause."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from recipes_lib.config.loader import load_config
from recipes_lib.files import atomic_folder, read_record, replace_text
from recipes_lib.planning.compute import find_planned_model
from recipes_lib.planning.memory import plan_memory
from recipes_lib.planning.memory_plan import Layout
from recipes_lib.proving.bench import RUNS, SHAPE, Bench, Figures, WrongResultError
from recipes_lib.shipped import find_launch_file
from recipes_lib.training.checkpoints.saver import HostCopy, iterate_tensors
from recipes_lib.training.layouts.launch_environment import read_environment

_SIZES: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_SHAPE_OF_8B: Final = dict(zip(_SIZES, (4096, 14_336, 32, 32, 128_256), strict=True)) | {"num_key_value_heads": 8}


def measure_pretraining(shape: str, variant: str, bench: Bench) -> Figures:
    """Measure throughput, MFU and peak memory of pretraining by one of our variants or by transformers' trainer."""
    sizes, num_rows, length = RUNS["shapes"][shape]
    if bench.is_small:
        sizes, num_rows, length = (*SHAPE.values(), 320), 2, 32
    model = {"model_type": "llama", **dict(zip(_SIZES, sizes, strict=True)), "tie_word_embeddings": True}
    run = f"throughput-{shape}-{variant}"
    if variant in RUNS["peers"]:
        peer = {"model": model, "compile": RUNS["peers"][variant]}
        return _measure_peer(bench, run, f"throughput-{shape}-default", num_rows, length, peer)
    keys = {"per_device_train_batch_size": num_rows, "max_length": length, "model_config": json.dumps(model)}
    given = bench.set_up("pretrain", **keys, cross_document_attention="true", **RUNS["variants"][variant])
    # The launch file decides the precision of fp8.
    if variant == "fp8":
        by = ("-m", "accelerate.commands.launch", f"--config_file={find_launch_file('fp8')}")
        return _measure_ours(bench, "pretrain", run, by=by, **given)
    return _measure_ours(bench, "pretrain", run, bf16="true", **given)


def measure_finetuning(method: str, bench: Bench, *, by_trl: bool = False) -> Figures:
    """Measure throughput, MFU and peak memory of fine-tuning in the shape of 8B, ours or TRL's at its defaults."""
    num_rows, length = (2, 64) if bench.is_small else (2, 2048)
    model, rows = _write_large_inputs(bench, length)
    recipe, keys = RUNS["finetuning"][method]
    run = f"finetune-8B-{method}"
    if by_trl:
        peer = {"path": str(model), "adapter": recipe == "lora", "four_bit": "load_in_4bit" in keys}
        peer |= {"optim": keys.get("optim", "adamw_torch_fused"), "compile": "torch_compile" in keys}
        return _measure_peer(bench, f"{run}-trl", run, num_rows, length, peer)
    inputs = {"model_name_or_path": model, "dataset_name": rows, "max_length": length, **keys}
    given = bench.set_up(recipe, per_device_train_batch_size=num_rows, bf16="true", dtype="bfloat16", **inputs)
    figures = _measure_ours(bench, recipe, run, **given)
    # The final model of full fine-tuning takes 16 GB of the disk.
    for weights in bench.folder.glob(f"runs/{run}/*.safetensors"):
        weights.unlink()
    return figures


def _measure_ours(bench: Bench, recipe: str, run: str, *, by: Sequence[str] = (), **keys: Any) -> Figures:
    """Return the figures of a recipe's run, over the second half of its steps."""
    events = bench.train(recipe, run, by=by, **keys)[int(keys["max_steps"]) // 2 :]
    figures: dict[str, Any] = {
        "tokens_per_second": statistics.median(event["tokens_per_second"] for event in events),
        "mfu": statistics.median(event.get("mfu") or 0.0 for event in events),
        "memory_gb": max(event["memory_bytes"] for event in events) / 1e9,
        "planned_gb": plan_allocated(bench, recipe, **keys) / 1e9,
    }
    if bench.is_cuda:  # On a CPU, `memory_bytes` is that of the whole process.
        figures["memory_over_plan"] = figures["memory_gb"] / figures["planned_gb"]
    return figures


def _measure_peer(
    bench: Bench, run: str, ours: str, num_rows: int, length: int, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the figures of another trainer on full rows of random tokens, or that it is out of memory.

    Args:
        bench: Environment.
        run: Name of the run.
        ours: Check of our default settings, whose speed is compared with the trainer's if it has passed.
        num_rows: Rows of a micro-batch.
        length: Tokens of a row.
        given: As for ``train_by_peer``.
    """
    output = bench.folder / "runs" / run
    output.mkdir(parents=True, exist_ok=True)
    given = {**given, "rows": num_rows, "length": length, "steps": bench.num_steps, "cpu": not bench.is_cuda}
    command = ["-m", "recipes_lib.proving.scripts", json.dumps({**given, "output": str(output)})]
    log = output.with_suffix(".log")
    # Without a launcher, transformers' trainer would use all visible GPUs by nn.DataParallel.
    first_gpu = read_environment().get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    if bench.start(command, {"CUDA_VISIBLE_DEVICES": first_gpu}, log):
        if "OutOfMemoryError" in log.read_text(encoding="utf-8", errors="replace"):
            return {"tokens_per_second": "out of memory"}
        raise WrongResultError(f"the other trainer failed: {log}")
    figures = read_record(output / "peer.json")
    if ours in bench.passed:
        figures["ours_over_it"] = bench.passed[ours]["tokens_per_second"] / figures["tokens_per_second"]
    return figures


def _write_large_inputs(bench: Bench, length: int) -> tuple[Path, Path]:
    """Write a model in the shape of 8B with random weights, and chats of a full row each; return their paths.

    Raises:
        WrongResultError: The disk has too little free space.
    """
    inputs = bench.write_inputs()
    model, rows = inputs / "8B", inputs / "long_chats.jsonl"
    if not rows.exists():
        # The tokenizer has one token per byte, and the template adds about thirty.
        text = ("river stone light paper window garden " * (length // 38 + 1))[: length - 40]
        chats = [[{"role": "user", "content": f"{n:04}"}, {"role": "assistant", "content": text}] for n in range(128)]
        lines = [json.dumps({"messages": chat}) for chat in chats]
        replace_text(rows, "\n".join(lines) + "\n")
    if not model.is_dir():
        shape = {**SHAPE, "vocab_size": 320} if bench.is_small else _SHAPE_OF_8B
        free = shutil.disk_usage(inputs).free
        if not bench.is_small and free < 20e9:
            raise WrongResultError(f"the weights take 16 GB, and {free / 1e9:.0f} GB of the disk are free")
        tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
        ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        with torch.device(bench.device):
            config = LlamaConfig(**shape, **ids)
            built: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        # Atomic, because a run that is interrupted here resumes with what it finds.
        with atomic_folder(model) as folder:
            tokenizer.save_pretrained(folder)
            built.save_pretrained(folder)
    return model, rows


def plan_allocated(bench: Bench, recipe: str, **keys: Any) -> int:
    """Return the planned bytes that PyTorch allocates in a run, without CUDA context and fragmentation.

    Args:
        bench: Environment, whose GPU memory the plan is for; 80 GB without a GPU.
        recipe: Name of the recipe.
        **keys: As for ``Bench.train``.
    """
    flags = {**bench.name_inputs(recipe), "output_dir": bench.folder, **keys}
    config = load_config(recipe, [f"--{key}={value}" for key, value in flags.items()])
    # Training enables Liger's kernels by default if they are installed and supported.
    if "use_liger_kernel" not in keys and bench.is_cuda and find_spec("liger_kernel"):
        config = config.with_training({"use_liger_kernel": True})
    size = torch.cuda.get_device_properties(bench.device).total_memory if bench.is_cuda else 80e9
    return plan_memory(config, find_planned_model(config), Layout("single_gpu"), device_bytes=size).allocated


def _build_model(bench: Bench) -> Any:
    """Build a Llama in the shape of 124M with random weights, in bfloat16 on a GPU."""
    sizes = (*SHAPE.values(), 320) if bench.is_small else RUNS["shapes"]["124M"][0]
    shape: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True))
    config = LlamaConfig(**shape)
    dtype = torch.bfloat16 if bench.is_cuda else torch.float32
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(bench.device)  # type: ignore[no-untyped-call]


def measure_engine(keys: Mapping[str, Any], bench: Bench) -> Figures:
    """Measure a generation engine in GRPO on a policy of 124M: sampling, weight transfer, and the whole iteration."""
    count, length = (2, 12) if bench.is_small else (64, 256)
    model = bench.write_inputs() / "124M"
    if not model.is_dir():
        with atomic_folder(model) as folder:
            AutoTokenizer.from_pretrained(model.parent / "model").save_pretrained(folder)
            _build_model(bench).save_pretrained(folder)
    given = {**bench.set_up("grpo"), "model_name_or_path": model, "response_length": length, "max_steps": 8, **keys}
    given |= {"per_device_train_batch_size": count, "per_device_eval_batch_size": 4 * count}
    given |= {"bf16": str(bench.is_cuda).lower()}
    if bench.is_small and "use_transformers_continuous_batching" in keys:
        # By default its cache takes most of the memory of a GPU.
        given["transformers_continuous_batching_config"] = "{num_blocks: 64, page_size: 16, max_batch_tokens: 256}"
    events = bench.train("grpo", f"engine-{'-'.join(keys) or 'generate'}", **given)[1:]
    named = {"rollout/tokens_per_s": "tokens_per_second", "time/generate": "sampling_s", "time/sync": "sync_s"}
    figures = {name: statistics.median(event[key] for event in events) for key, name in named.items()}
    laps = [later["seconds"] - one["seconds"] for one, later in pairwise(events)]
    return {"answers": 4 * count, "tokens_an_answer": length, **figures, "iteration_s": statistics.median(laps)}


def measure_checkpoint_pause(bench: Bench) -> Figures:
    """Measure how long an asynchronous checkpoint of a 124M model blocks training: the copy to host memory."""
    model = _build_model(bench)
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    state, copy = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, HostCopy()
    num_bytes = sum(tensor.nbytes for tensor in iterate_tensors(state))
    # The warm-up copy allocates the host memory, as the dry run of a training run does.
    seconds = bench.measure_seconds(lambda: copy.take(state), 5)
    saved = bench.measure_seconds(lambda: torch.save(state, bench.folder / "state.pt"), 2)
    (bench.folder / "state.pt").unlink()
    return {"gigabytes": num_bytes / 1e9, "pause_ms": 1e3 * seconds, "torch_save_ms": 1e3 * saved}
