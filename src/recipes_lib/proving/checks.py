"""Checks of ``recipes prove``, the most important first: each returns figures or raises an error."""

from __future__ import annotations

import importlib
import json
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.integrations.liger import apply_liger_kernel

from recipes_lib.config.loader import load_config
from recipes_lib.config.paths import find_launch_file
from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.environment import read_versions
from recipes_lib.files import atomic_folder, read_record, replace_text
from recipes_lib.losses.next_token import compute_cross_entropy
from recipes_lib.models.activation_checkpointing import enable_checkpointing
from recipes_lib.models.attention.kernels import FLASH_IS_INSTALLED, choose_kernel
from recipes_lib.models.attention.varlen import register_varlen
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.planning.compute import find_planned_model
from recipes_lib.planning.memory import plan_memory
from recipes_lib.planning.memory_plan import Layout
from recipes_lib.proving.bench import RUNS, Bench, Event, Figures, WrongResultError, name_device
from recipes_lib.training.checkpoints.saver import HostCopy, iterate_tensors
from recipes_lib.training.layouts.launch_environment import read_environment
from recipes_lib.training.optim.compilation import compile_layers, preserve_architecture


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: Unique name, by which a later run finds its result.
        what: Description for the report.
        run: Computes the figures; raises ``WrongResultError`` if they are wrong.
        package: Module of an optional package that it needs, or a FlashAttention's ``attn_implementation``; its kernels
            require a GPU. Empty without one.
        min_gpus: Required number of GPUs.
    """

    name: str
    what: str
    run: Callable[[Bench], Figures]
    package: str = ""
    min_gpus: int = 0

    def find_obstacle(self, bench: Bench) -> str:
        """Return the missing requirement of the check, if any."""
        if bench.num_gpus < (least := max(self.min_gpus, int(bool(self.package)))):
            return f"needs {least} GPUs" if least > 1 else "there is no GPU"
        name = self.package
        is_installed = FLASH_IS_INSTALLED[name]() if name in FLASH_IS_INSTALLED else not name or find_spec(name)
        return "" if is_installed else f"{name} is not installed"


def measure_environment(bench: Bench) -> Figures:
    """Return versions, the device, and its throughput in matrix products (TFLOP/s) and copies (GB/s)."""
    size, dtype = (512, torch.float32) if bench.is_small else (8192, torch.bfloat16)
    matrix = torch.randn(size, size, device=bench.device, dtype=dtype)
    seconds = bench.measure_seconds(lambda: matrix @ matrix)
    copied = torch.empty((2**22 if bench.is_small else 2**30) // 4, device=bench.device)
    copy_seconds = bench.measure_seconds(lambda: copied.clone())
    driver = {"driver": _read_driver(), "cuda": torch.version.cuda} if bench.is_cuda else {}
    # A product has 2 n^3 FLOPs; a copy reads and writes 4 bytes per element.
    peak = {"matmul_tflops": 2e-12 * size**3 / seconds, "copy_gb_per_second": 2e-9 * 4 * copied.numel() / copy_seconds}
    return {"device": name_device(), **driver, **read_versions(), **peak}


def _read_driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def compare_with_cpu(recipe: str, bench: Bench) -> Figures:
    """Compare the losses of a recipe on the device, in ``float32`` and bfloat16, with the CPU in ``float32``.

    Of reinforcement learning it compares the gradient norms of two iterations, because losses are near 0, and only in
    ``float32``, because in bfloat16 other answers are sampled.
    """
    is_rl = "reward_funcs" in RUNS["keys"][recipe]
    figure, more = ("grad_norm", {"max_steps": 8}) if is_rl else ("loss", {})
    # Adam divides small gradients by their own size, which amplifies their rounding.
    allowed = {"fp32": 1e-2} if is_rl else {"fp32": 1e-4, "bf16": 5e-2}

    def train(name: str) -> list[Event]:
        keys = bench.set_up(recipe, bf16=str(name == "bf16").lower(), **more)
        return bench.train(recipe, f"{recipe}-{name}", on_device=name != "cpu", **keys)

    names = ("cpu", *allowed)
    runs = dict(zip(names, bench.map_runs(train, names), strict=True))
    gaps = {name: measure_gap(runs["cpu"], runs[name], figure) for name in allowed}
    for name, gap in gaps.items():
        if not gap <= allowed[name]:
            raise WrongResultError(f"{figure} in {name} is {gap:.1e} off the CPU's; {allowed[name]:.0e} is allowed")
    last = {f"last_{figure}": runs["fp32"][-1][figure]}
    return {"steps": len(runs["cpu"]), **last, **{f"gap_{name}": gap for name, gap in gaps.items()}}


def measure_gap(expected: Sequence[Event], found: Sequence[Event], figure: str = "loss") -> float:
    """Return the largest relative difference of a figure between two runs.

    Raises:
        WrongResultError: The runs logged different steps, or none.
    """
    if [event["step"] for event in expected] != [event["step"] for event in found] or not expected:
        raise WrongResultError(f"{len(found)} steps were logged, and {len(expected)} on the CPU")
    pairs = [(one[figure], other[figure]) for one, other in zip(expected, found, strict=True)]
    return float(max(abs(one - other) / max(abs(one), 1e-6) for one, other in pairs))


def resume_exactly(bench: Bench) -> Figures:
    """Compare the losses of a run resumed halfway, as after a kill, with those of an uninterrupted run.

    They are equal on a CPU; kernels of a GPU may add in another order in each run.
    """
    keys = {**bench.set_up("sft", bf16="false"), "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = bench.train("sft", "resume-whole", **keys)
    source, target = (bench.folder / "runs" / name for name in ("resume-whole", "resume-cut"))
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source / "checkpoint-2", target / "checkpoint-2")
    # The record of a run that was killed; a run resumes only in the output directory that its record names.
    record = read_record(source / "run.json")
    record["config"]["output_dir"] = str(target)
    (target / "run.json").write_text(json.dumps(record | {"status": "running"}), encoding="utf-8")
    resumed = bench.train("sft", "resume-cut", resumes=True, **keys)
    if not (gap := measure_gap(whole[2:], resumed)) <= (allowed := 1e-5 if bench.is_cuda else 0.0):
        raise WrongResultError(f"resumed losses are {gap:.1e} off those of the run itself; {allowed:.0e} is allowed")
    return {"steps": len(resumed), "gap": gap}


_MAX_SYNCHRONISATIONS: Final = 2
"""Allowed host synchronisations of a step: for the number of targets, and for loss and gradient norm of the guard."""
_LENGTHS: Final = ((5, 9, 3), (8, 8), (17,))
_SCALE: Final = 60
"""Factor on these lengths on a GPU, so that kernels run over several tiles."""


def build_model(bench: Bench, attention: str, **shape: Any) -> Any:
    """Build a small Llama with a loss head on the device, with equal weights in each call, in training mode."""
    torch.manual_seed(0)
    width = 128 if bench.is_small else 512  # Head dimension 32 or, as in real models, 128.
    config = LlamaConfig(
        **{"vocab_size": 256, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, **shape},
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)  # type: ignore[no-untyped-call]
    add_loss_head(model)
    return model.to(bench.device).train()


def compute_packed(model: Any, bench: Bench, *, is_flat: bool) -> list[Tensor]:
    """Return the losses of packed rows, and the gradients of their sum, in ``float32``."""
    losses = []
    model.zero_grad()
    scale = 1 if bench.is_small else _SCALE
    collate = PackedCollator(pad_token_id=0, layout="flat" if is_flat else "rows")
    for lengths in ([scale * length for length in row] for row in _LENGTHS):
        ids = np.arange(sum(lengths)) * 7 % 256
        batch = collate([{"input_ids": ids, "loss_mask": ids >= 0, "seq_lengths": lengths}])
        del batch["num_tokens"]
        inputs = send_to_device(batch, bench.device)
        with torch.autocast(bench.device.type, bench.dtype, enabled=bench.is_cuda):
            loss = model(**inputs, loss_head=True).nll_sum
        loss.backward()
        losses.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [tensor.float() for tensor in (torch.stack(losses), *gradients)]


def _compare(expected: Sequence[Tensor], found: Sequence[Tensor], bench: Bench, what: str) -> Figures:
    pairs = zip(expected, found, strict=True)
    gap = max(float((one - other).norm() / one.norm().clamp_min(1e-6)) for one, other in pairs)
    if not gap <= (allowed := 2e-2 if bench.is_cuda else 1e-5):
        raise WrongResultError(f"{what}: loss or gradients are {gap:.1e} off; {allowed:.0e} is allowed")
    return {"gap": gap}


def compare_attention(kernel: str, bench: Bench) -> Figures:
    """Compare loss and gradients of packed rows by an attention kernel with those by sdpa with a mask."""
    expected = compute_packed(build_model(bench, "sdpa"), bench, is_flat=False)
    choice = choose_kernel(LlamaConfig(), kernel, device=bench.device, compute_dtype=bench.dtype, packing=True)
    model = build_model(bench, choice.implementation)
    return _compare(expected, compute_packed(model, bench, is_flat=choice.layout == "flat"), bench, kernel)


def compare_layers(change: Callable[[Any], Any], bench: Bench) -> Figures:
    """Compare loss and gradients of packed rows before and after ``change`` compiles, recomputes or replaces layers."""
    register_varlen()
    model = build_model(bench, "varlen")
    expected = compute_packed(model, bench, is_flat=True)
    # Liger replaces functions for all models of the process, also for those that later checks plan without memory.
    with preserve_architecture(model):
        change(model)
        found = compute_packed(model, bench, is_flat=True)
    return _compare(expected, found, bench, "layers")


def _compile(model: Any) -> None:
    compile_layers(model, {} if next(model.parameters()).is_cuda else {"backend": "aot_eager"})


def _use_liger(model: Any) -> None:
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})  # type: ignore[no-untyped-call]


def compare_loss_head(bench: Bench) -> Figures:
    """Compare the chunked loss with full logits, torch's and Liger's: values, gradients and time by vocabulary size."""
    figures: dict[str, Any] = {}
    num_tokens, width = (64, 32) if bench.is_small else (8192, 4096)
    for vocabulary in (512, 1024) if bench.is_small else (32_000, 128_256, 262_144):
        torch.manual_seed(0)
        inputs = hidden, weight = [
            # Both factors have variance width^-1/2, so that logits, sums over the width, have variance 1.
            torch.randn(rows, width, device=bench.device, dtype=bench.dtype).mul_(width**-0.25).requires_grad_()
            for rows in (num_tokens, vocabulary)
        ]
        targets = torch.randint(vocabulary, (num_tokens,), device=bench.device)
        found: dict[str, list[Tensor]] = {}
        for name, compute in _list_heads(hidden, weight, targets, bench).items():
            differentiate = partial(_differentiate, compute, inputs)
            try:
                found[name] = [compute().detach().float(), *(gradient.float() for gradient in differentiate())]
                figures[f"{name}_{vocabulary}_ms"] = 1e3 * bench.measure_seconds(differentiate, 3)
            except torch.OutOfMemoryError:
                figures[f"{name}_{vocabulary}"] = "out of memory"
        if {"chunked", "dense"} <= found.keys():
            gap = _compare(found["dense"], found["chunked"], bench, f"vocabulary {vocabulary}")["gap"]
            figures[f"gap_{vocabulary}"] = gap
    return figures


def _differentiate(compute: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.autograd.grad(compute(), inputs)


def _list_heads(hidden: Tensor, weight: Tensor, targets: Tensor, bench: Bench) -> Mapping[str, Callable[[], Tensor]]:
    """Return our loss, that of full logits, torch's chunked one, since torch 2.13, and Liger's, which needs a GPU."""
    positions = torch.arange(len(targets), device=bench.device)
    heads: dict[str, Callable[[], Tensor]] = {
        "chunked": lambda: compute_cross_entropy(hidden, weight, targets, positions=positions).nll_sum,
        "dense": lambda: functional.cross_entropy((hidden @ weight.t()).float(), targets, reduction="sum"),
    }
    if hasattr(functional, "linear_cross_entropy"):
        compute: Any = functional.linear_cross_entropy
        options = nn.LinearCrossEntropyOptions()
        heads["torch"] = lambda: compute(hidden, weight, targets, reduction="sum", options=options)
    if bench.is_cuda and find_spec("liger_kernel"):
        liger: Any = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
        heads["liger"] = lambda: liger(reduction="sum")(weight, hidden, targets)
    return heads


def compare_with_one_gpu(launch_file: str, bench: Bench) -> Figures:
    """Compare losses of SFT on all GPUs with those of one GPU with the same global batch size.

    In ``float32``, but for context parallelism, whose attention kernel has none on GPUs.
    """
    count = bench.num_gpus
    shares_rows = launch_file == "fsdp2_cp"
    precision, allowed = ("bf16", 5e-2) if shares_rows else ("no", 1e-4)
    keys = {**bench.set_up("sft", bf16=str(shares_rows).lower()), "per_device_train_batch_size": 1}
    # Context-parallel ranks read the same rows, so that the global batch size does not grow with them.
    num_readers = 1 if shares_rows else count
    alone = bench.train("sft", f"{launch_file}-alone", **{**keys, "gradient_accumulation_steps": num_readers})
    launcher = ("-m", "accelerate.commands.launch", f"--config_file={find_launch_file(launch_file)}")
    by = [*launcher, f"--num_processes={count}", f"--mixed_precision={precision}"]
    if shares_rows:
        by += [f"--parallelism_config_cp_size={count}", "--parallelism_config_dp_shard_size=1"]
    together = bench.train("sft", f"{launch_file}-together", by=by, **{**keys, "gradient_accumulation_steps": 1})
    if not (gap := measure_gap(alone, together)) <= allowed:
        raise WrongResultError(f"losses of {count} GPUs are {gap:.1e} off those of one; {allowed:.0e} is allowed")
    speeds = [statistics.median(event["tokens_per_second"] for event in events) for events in (alone, together)]
    return {"gpus": count, "gap": gap, "speed_of_one": speeds[0], "speed_of_all": speeds[1]}


def count_synchronisations(recipe: str, bench: Bench) -> Figures:
    """Count host synchronisations per step, from the warnings of ``torch.cuda.set_sync_debug_mode``."""

    def count(job: tuple[int, int]) -> int:
        num_micro_batches, num_steps = job
        keys = {**bench.set_up(recipe), "gradient_accumulation_steps": num_micro_batches, "max_steps": num_steps}
        name = f"synchronisations-{recipe}-{num_micro_batches}-{num_steps}"
        watched = ("-W", "always", "-m", "recipes_lib.proving.scripts")
        output = bench.run(recipe, name, by=watched, **{**keys, "logging_steps": 1000})
        log = output.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
        return log.count("called a synchronizing CUDA operation")

    # Differences of runs of two and six steps, because both have the same one-time synchronisations.
    short, long, short_of_3, long_of_3 = bench.map_runs(count, product((1, 3), (2, 6)))
    few, many = (long - short) / 4, (long_of_3 - short_of_3) / 4
    # Every step has one, the guard's: without any, the warnings are lost.
    if not few >= 1 or many > few or many > _MAX_SYNCHRONISATIONS:
        found = f"a step of 1 micro-batch has {few:g} host synchronisations, one of 3 has {many:g}"
        raise WrongResultError(f"{found}; 1 to {_MAX_SYNCHRONISATIONS} are allowed")
    return {"synchronisations_a_step": many}


def measure_pretraining(shape: str, variant: str, bench: Bench) -> Figures:
    """Measure throughput, MFU and peak memory of pretraining by one of our variants or by transformers' trainer."""
    num_rows, length = (2, 32) if bench.is_small else RUNS["shapes"][shape]
    model = {"model_type": "llama", **bench.choose_shape(shape), "tie_word_embeddings": True}
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
        free = shutil.disk_usage(inputs).free
        if not bench.is_small and free < 20e9:
            raise WrongResultError(f"the weights take 16 GB, and {free / 1e9:.0f} GB of the disk are free")
        tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
        ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        with torch.device(bench.device):
            config = LlamaConfig(**bench.choose_shape("8B"), **ids)
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


def _build_124m(bench: Bench) -> Any:
    """Build a Llama in the shape of 124M with random weights, in bfloat16 on a GPU."""
    config = LlamaConfig(**bench.choose_shape("124M"))
    return AutoModelForCausalLM.from_config(config, dtype=bench.dtype).to(bench.device)  # type: ignore[no-untyped-call]


def measure_engine(keys: Mapping[str, Any], bench: Bench) -> Figures:
    """Measure a generation engine in GRPO on a policy of 124M: sampling, weight transfer, and the whole iteration."""
    count, length = (2, 12) if bench.is_small else (64, 256)
    model = bench.write_inputs() / "124M"
    if not model.is_dir():
        with atomic_folder(model) as folder:
            AutoTokenizer.from_pretrained(model.parent / "model").save_pretrained(folder)
            _build_124m(bench).save_pretrained(folder)
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
    model = _build_124m(bench)
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


_ORDER: Final = (
    *("environment", "attention", "loss-head", "layers", "numbers-sft", "numbers-pretrain", "numbers-dpo"),
    *("throughput-1B-default", "throughput-1B-transformers", "finetune-8B-lora", "numbers-grpo", "gpus", "resume"),
    *("throughput-1B", "finetune-8B", "engine", "synchronisations", "checkpoint", "numbers", "throughput"),
)
"""Prefixes of checks, the most telling first.

On one H200: 8 minutes to the end of ``finetune-8B-lora``, about 28 for all.
"""


def list_checks() -> Iterable[Check]:
    """Return every check, the most important first."""
    return sorted(
        _list_unordered(), key=lambda check: next(n for n, p in enumerate(_ORDER) if check.name.startswith(p))
    )


def _list_unordered() -> Iterator[Check]:
    yield Check("environment", "versions, device, matrix products, copies", measure_environment)
    for recipe in RUNS["keys"]:
        yield Check(f"numbers-{recipe}", f"losses of {recipe} on CPU and device", partial(compare_with_cpu, recipe))
    for kernel in ("varlen", "flash_attention_2", "flash_attention_3", "flash_attention_4"):
        compare, package = partial(compare_attention, kernel), kernel if kernel in FLASH_IS_INSTALLED else ""
        yield Check(f"attention-{kernel}", f"{kernel} = sdpa on packed rows", compare, package)
    yield Check("loss-head", "chunked loss = dense loss; time of both", compare_loss_head)
    for name, change, package in (
        ("compile", _compile, ""),
        ("save-matmuls", lambda model: enable_checkpointing(model, {"save_matmuls": True}), ""),
        ("liger", _use_liger, "liger_kernel"),
    ):
        yield Check(f"layers-{name}", f"{name} changes nothing", partial(compare_layers, change), package)
    yield Check("resume", "a resumed run = an uninterrupted one", resume_exactly)
    for shape, name in product(RUNS["shapes"], (*RUNS["variants"], *RUNS["peers"])):
        pretrain, what = partial(measure_pretraining, shape, name), f"pretraining of {shape}, {name}: tokens a second"
        # Compiling takes half a minute on a CPU.
        min_gpus = int(name not in ("default", "transformers"))
        yield Check(f"throughput-{shape}-{name}", what, pretrain, "torchao" if name == "fp8" else "", min_gpus)
    for method in RUNS["finetuning"]:
        needs, what = "bitsandbytes" if method == "qlora" else "", f"{method} fine-tuning of 8B"
        for suffix, trainer in (("", ""), ("-trl", " by TRL")):
            measure = partial(measure_finetuning, method, by_trl=bool(trainer))
            name, min_gpus = f"finetune-8B-{method}{suffix}", int(method.endswith("compiled"))
            yield Check(name, f"{what}{trainer}: tokens a second", measure, needs, min_gpus)
    batching, vllm = {"use_transformers_continuous_batching": "true"}, {"use_vllm": "true"}
    for engine, keys, needs in (("generate", {}, ""), ("batching", batching, ""), ("vllm", vllm, "vllm")):
        yield Check(f"engine-{engine}", f"GRPO by {engine}: tokens a second", partial(measure_engine, keys), needs)
    yield Check("checkpoint", "pause of an asynchronous checkpoint", measure_checkpoint_pause)
    for launch_file in ("ddp", "fsdp2", "fsdp2_cp"):
        compare_gpus = partial(compare_with_one_gpu, launch_file)
        what = f"losses of all GPUs by {launch_file} = those of one"
        yield Check(f"gpus-{launch_file}", what, compare_gpus, min_gpus=2)
    for recipe in ("sft", "pretrain", "dpo", "reward", "distill"):
        count = partial(count_synchronisations, recipe)
        yield Check(f"synchronisations-{recipe}", f"host synchronisations of {recipe}", count, min_gpus=1)
