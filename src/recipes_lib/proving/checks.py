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
from itertools import product
from typing import Any, Final

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations.liger import apply_liger_kernel

from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.environment import read_versions
from recipes_lib.files import read_record
from recipes_lib.losses.next_token import compute_cross_entropy
from recipes_lib.models.activation_checkpointing import enable_checkpointing
from recipes_lib.models.attention.kernels import FLASH_IS_INSTALLED, choose_kernel
from recipes_lib.models.attention.varlen import register_varlen
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.proving.bench import RUNS, Bench, Event, Figures, WrongResultError, name_device
from recipes_lib.proving.throughput import (
    measure_checkpoint_pause,
    measure_engine,
    measure_finetuning,
    measure_pretraining,
)
from recipes_lib.shipped import find_launch_file
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
    dtype = torch.bfloat16 if bench.is_cuda else torch.float32
    losses = []
    model.zero_grad()
    scale = 1 if bench.is_small else _SCALE
    collate = PackedCollator(pad_token_id=0, layout="flat" if is_flat else "rows")
    for lengths in ([scale * length for length in row] for row in _LENGTHS):
        ids = np.arange(sum(lengths)) * 7 % 256
        batch = collate([{"input_ids": ids, "loss_mask": ids >= 0, "seq_lengths": lengths}])
        del batch["num_tokens"]
        inputs = send_to_device(batch, bench.device)
        with torch.autocast(bench.device.type, dtype, enabled=bench.is_cuda):
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
    dtype = torch.bfloat16 if bench.is_cuda else torch.float32
    choice = choose_kernel(LlamaConfig(), kernel, device=bench.device, compute_dtype=dtype, packing=True)
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
    dtype = torch.bfloat16 if bench.is_cuda else torch.float32
    for vocabulary in (512, 1024) if bench.is_small else (32_000, 128_256, 262_144):
        torch.manual_seed(0)
        inputs = hidden, weight = [
            # Both factors have variance width^-1/2, so that logits, sums over the width, have variance 1.
            torch.randn(rows, width, device=bench.device, dtype=dtype).mul_(width**-0.25).requires_grad_()
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
