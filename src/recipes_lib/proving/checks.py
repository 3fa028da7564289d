"""Checks of ``recipes prove``, the most important first: each returns figures or raises an error."""

from __future__ import annotations

import importlib
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations.liger import apply_liger_kernel

from recipes_lib.config.loader import load_config
from recipes_lib.data.masking import IGNORE_INDEX
from recipes_lib.environment import read_versions
from recipes_lib.files import read_record
from recipes_lib.losses.next_token import compute_cross_entropy
from recipes_lib.models.activation_checkpointing import read_selective
from recipes_lib.models.attention.kernels import choose_kernel
from recipes_lib.models.attention.varlen import register_varlen
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.planning.compute import find_planned_model
from recipes_lib.planning.memory import plan_memory
from recipes_lib.planning.memory_plan import Layout
from recipes_lib.proving.bench import SHAPE, Bench, Event, WrongResultError, name_device
from recipes_lib.training.optim.compilation import compile_layers

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table.

    Attributes:
        name: Its key in the rows that a later run resumes from.
        what: What it shows, for a reader.
        run: Computes the figures; raises ``WrongResultError`` where they are wrong.
        package: That it needs besides those of the project, whose kernels run on GPUs alone.
        min_gpus: Without which it means nothing.
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
        return f"{self.package} is not installed" if self.package and not find_spec(self.package) else ""


def look_at_environment(bench: Bench) -> Figures:
    """Versions, the device, and its throughput in matrix products (FLOP/s) and copies (bytes/s)."""
    size, dtype = (512, torch.float32) if bench.is_small else (8192, torch.bfloat16)
    matrix = torch.randn(size, size, device=bench.device, dtype=dtype)
    seconds = measure_seconds(lambda: matrix @ matrix, bench)
    copied = torch.empty((2**22 if bench.is_small else 2**30) // 4, device=bench.device)
    copy_seconds = measure_seconds(lambda: copied.clone(), bench)
    driver = {"driver": _read_driver(), "cuda": torch.version.cuda} if bench.is_cuda else {}
    peak = {"matmul_tflops": 2e-12 * size**3 / seconds, "copy_gb_per_second": 2e-9 * 4 * copied.numel() / copy_seconds}
    return {"device": name_device(), **driver, **read_versions(), **peak}


def _read_driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def measure_seconds(compute: Callable[[], Any], bench: Bench, repeats: int = 10) -> float:
    """Return the median time of a call in seconds, with device synchronisation."""
    times = []
    for _ in range(3 + repeats):
        began = time.perf_counter()
        compute()
        if bench.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


_OF_RECIPE: Final[Mapping[str, Mapping[str, Any]]] = {
    "pretrain": {"max_length": 128, "test_split_size": 0.05},
    "sft": {"max_length": 128, "test_split_size": 16},
    "lora": {"max_length": 128, "test_split_size": 16, "lora_r": 8},
    "dpo": {"max_length": 256, "test_split_size": 16, "precompute_ref_log_probs": "false"},
    "reward": {"max_length": 256, "test_split_size": 16},
    "distill": {"max_length": 128, "test_split_size": 16},
}
_SMALL_MODEL: Final = json.dumps({"model_type": "llama", **SHAPE})
_QUIET: Final = {"eval_strategy": "no", "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-3, "seed": 3}


def _set_up(bench: Bench, recipe: str, **keys: Any) -> dict[str, Any]:
    num_steps = 3 if bench.is_small else 20
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": num_steps}
    of_model = {"model_config": _SMALL_MODEL} if recipe == "pretrain" else {}
    quiet = _QUIET if recipe == "reward" else {**_QUIET, "num_sample_prompts": 0}
    return {**quiet, **batch, **_OF_RECIPE[recipe], **of_model, **keys}


def compare_with_cpu(recipe: str, bench: Bench) -> Figures:
    """Losses of a recipe on the device in ``float32`` and bfloat16, compared with the CPU in ``float32``."""
    runs = {
        name: bench.train(recipe, f"{recipe}-{name}", on_device=name != "cpu", **_set_up(bench, recipe, bf16=precision))
        for name, precision in (("cpu", "false"), ("fp32", "false"), ("bf16", "true"))
    }
    gaps = {name: measure_gap(runs["cpu"], runs[name]) for name in ("fp32", "bf16")}
    for name, allowed in (("fp32", 1e-4), ("bf16", 5e-2)):
        if not gaps[name] <= allowed:
            raise WrongResultError(f"losses in {name} are {gaps[name]:.1e} off the CPU's; {allowed:.0e} is allowed")
    named = {f"gap_{name}": gap for name, gap in gaps.items()}
    return {"steps": len(runs["cpu"]), "last_loss": runs["fp32"][-1]["loss"], **named}


def measure_gap(expected: Sequence[Event], found: Sequence[Event]) -> float:
    """Return the largest relative difference of the losses of two runs with the same steps.

    Raises:
        WrongResultError: They do not.
    """
    if [event["step"] for event in expected] != [event["step"] for event in found] or not expected:
        raise WrongResultError(f"{len(found)} steps were logged, and {len(expected)} on the CPU")
    pairs = [(one["loss"], other["loss"]) for one, other in zip(expected, found, strict=True)]
    return float(max(abs(one - other) / max(abs(one), 1e-6) for one, other in pairs))


def resume_exactly(bench: Bench) -> Figures:
    """Compare a run resumed from half of its steps, as after a kill, with an uninterrupted one: equal losses."""
    keys = {**_set_up(bench, "sft"), "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = bench.train("sft", "resume-whole", **keys)
    source, target = (bench.folder / "runs" / name for name in ("resume-whole", "resume-cut"))
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source / "checkpoint-2", target / "checkpoint-2")
    record = read_record(source / "run.json")
    record["config"]["output_dir"] = str(target)
    (target / "run.json").write_text(json.dumps(record | {"status": "running"}), encoding="utf-8")
    resumed = bench.train("sft", "resume-cut", resumes=True, **keys)
    if gap := measure_gap(whole[2:], resumed):
        raise WrongResultError(f"resumed losses are {gap:.1e} off those of the run itself")
    return {"steps": len(resumed), "gap": gap}


_ALLOWED: Final = 2
"""Host synchronisations of a step: for the number of terms, and for what the guard judges."""
_LENGTHS: Final = ((5, 9, 3), (8, 8), (17,))
_SCALE: Final = 60
"""On a GPU documents are longer by it, so that kernels run over several tiles."""


def build_model(bench: Bench, attention: str, **shape: Any) -> Any:
    """Build a small Llama with a loss head on the device, always with the same weights, in training mode."""
    torch.manual_seed(0)
    width = 128 if bench.is_small else 512  # Head dimension 32 or, as in real models, 128.
    config = LlamaConfig(
        **{"vocab_size": 256, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, **shape},
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: Any = (
        AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=attention
        )
        .to(bench.device)
        .train()
    )
    add_loss_head(model)
    return model


def compute_packed(model: Any, bench: Bench, *, is_flat: bool) -> list[Tensor]:
    """Return the loss of packed rows, and its gradients, in ``float32`` on the host."""
    dtype = torch.bfloat16 if bench.is_cuda else torch.float32
    losses = []
    model.zero_grad()
    scale = 1 if bench.is_small else _SCALE
    for lengths in ([scale * length for length in row] for row in _LENGTHS):
        ids = torch.arange(sum(lengths), device=bench.device)[None] * 7 % 256
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(bench.device)
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "position_ids": positions,
            "labels": ids.masked_fill(positions == 0, IGNORE_INDEX),
        }
        if is_flat:
            bounds = torch.tensor([0, *lengths], device=bench.device).cumsum(0, dtype=torch.int32)
            inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            inputs |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        with torch.autocast(bench.device.type, dtype, enabled=bench.is_cuda):
            loss = model(**inputs, loss_head=True).nll_sum
        loss.backward()
        losses.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [tensor.float().cpu() for tensor in (torch.stack(losses), *gradients)]


def _compare(expected: Sequence[Tensor], found: Sequence[Tensor], bench: Bench, what: str) -> Figures:
    pairs = zip(expected, found, strict=True)
    gap = max(float((one - other).norm() / one.norm().clamp_min(1e-6)) for one, other in pairs)
    if not gap <= (allowed := 2e-2 if bench.is_cuda else 1e-5):
        raise WrongResultError(f"{what}: loss or gradients are {gap:.1e} off; {allowed:.0e} is allowed")
    return {"gap": gap}


def compare_attention(kernel: str, bench: Bench) -> Figures:
    """Compare loss and gradients of packed rows of an attention kernel with those of sdpa with a mask."""
    expected = compute_packed(build_model(bench, "sdpa"), bench, is_flat=False)
    dtype = torch.bfloat16 if bench.is_cuda else torch.float32
    choice = choose_kernel(LlamaConfig(), kernel, device=bench.device, compute_dtype=dtype, packing=True)
    model = build_model(bench, choice.implementation)
    return _compare(expected, compute_packed(model, bench, is_flat=choice.layout == "flat"), bench, kernel)


def compare_layers(change: Callable[[Any], Any], bench: Bench) -> Figures:
    """Compare loss and gradients of packed rows with compiled, recomputed or replaced layers."""
    register_varlen()
    model = build_model(bench, "varlen")
    expected = compute_packed(model, bench, is_flat=True)
    change(model)
    return _compare(expected, compute_packed(model, bench, is_flat=True), bench, "layers")


def _compile(model: Any) -> None:
    compile_layers(model, {} if next(model.parameters()).is_cuda else {"backend": "aot_eager"})


def _recompute(model: Any) -> None:
    model.activation_checkpointing_enable(**(read_selective({"save_matmuls": True}) or {}))


def _use_liger(model: Any) -> None:
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})  # type: ignore[no-untyped-call]


def compare_loss_head(bench: Bench) -> Figures:
    """Compare the chunked loss with full logits, torch's and Liger's: values, gradients, time; three vocabularies."""
    figures: dict[str, Any] = {}
    num_tokens, width = (64, 32) if bench.is_small else (8192, 4096)
    dtype = torch.bfloat16 if bench.is_cuda else torch.float32
    for vocabulary in (512, 1024) if bench.is_small else (32_000, 128_256, 262_144):
        torch.manual_seed(0)
        hidden, weight = (
            torch.randn(rows, width, device=bench.device, dtype=dtype).mul_(width**-0.25).requires_grad_()
            for rows in (num_tokens, vocabulary)
        )
        targets = torch.randint(vocabulary, (num_tokens,), device=bench.device)
        positions = torch.arange(num_tokens, device=bench.device)
        ways: dict[str, Callable[[], Tensor]] = {
            "chunked": lambda h=hidden, w=weight, t=targets, p=positions: (  # type: ignore[misc]
                compute_cross_entropy(h, w, t, positions=p).nll_sum
            ),
            "dense": lambda h=hidden, w=weight, t=targets: functional.cross_entropy(  # type: ignore[misc]
                (h @ w.t()).float(), t, reduction="sum"
            ),
            **_list_other_heads(hidden, weight, targets, bench),
        }
        found: dict[str, list[Tensor]] = {}
        for name, compute in ways.items():
            try:
                found[name] = [compute().detach(), *torch.autograd.grad(compute(), (hidden, weight))]
                seconds = measure_seconds(lambda c=compute, i=(hidden, weight): torch.autograd.grad(c(), i), bench, 3)  # type: ignore[misc]
            except torch.OutOfMemoryError:
                figures[f"{name}_{vocabulary}"] = "out of memory"
                continue
            figures[f"{name}_{vocabulary}_ms"] = 1e3 * seconds
        if {"chunked", "dense"} <= found.keys():
            expected, ours = ([tensor.float().cpu() for tensor in found[name]] for name in ("dense", "chunked"))
            figures[f"gap_{vocabulary}"] = _compare(expected, ours, bench, f"vocabulary {vocabulary}")["gap"]
    return figures


def _list_other_heads(
    hidden: Tensor, weight: Tensor, targets: Tensor, bench: Bench
) -> Mapping[str, Callable[[], Tensor]]:
    """Torch's own chunked loss, since torch 2.13, and Liger's, whose kernels need a GPU."""
    ways: dict[str, Callable[[], Tensor]] = {}
    if hasattr(functional, "linear_cross_entropy"):
        compute: Any = functional.linear_cross_entropy
        options = nn.LinearCrossEntropyOptions()
        ways["torch"] = lambda: compute(hidden, weight, targets, reduction="sum", options=options)
    if bench.is_cuda and find_spec("liger_kernel"):
        liger: Any = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
        ways["liger"] = lambda: liger(reduction="sum")(weight, hidden, targets)
    return ways


def measure_decoding(bench: Bench) -> Figures:
    """Measure tokens per second of greedy ``generate`` with a KV cache by batch size, in the shape of 124M."""
    width, mlp, layers, _, vocabulary = (*SHAPE.values(), 320) if bench.is_small else _SHAPES["124M"][0]
    shape = {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers, "vocab_size": vocabulary}
    dtype = torch.bfloat16 if bench.is_cuda else torch.float32
    model = build_model(bench, "sdpa", **shape).to(dtype).eval()
    length, figures = (8, {}) if bench.is_small else (128, dict[str, Any]())
    for num_rows in (1, 2) if bench.is_small else (1, 32, 256):
        prompt = torch.full((num_rows, 16), 5, device=bench.device)
        options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0}
        seconds = measure_seconds(lambda p=prompt, o=options: model.generate(p, **o), bench, 2)  # type: ignore[misc]
        figures[f"rows_{num_rows}_tokens_per_second"] = num_rows * length / seconds
    return figures


def compare_with_one_gpu(launch_file: str, bench: Bench) -> Figures:
    """Compare losses of SFT on all GPUs in ``float32`` with those of one GPU with the same global batch size."""
    count = bench.num_gpus
    keys = {**_set_up(bench, "sft", bf16="false"), "per_device_train_batch_size": 1}
    alone = bench.train("sft", f"{launch_file}-alone", **{**keys, "gradient_accumulation_steps": count})
    launcher = ("-m", "accelerate.commands.launch", f"--config_file=accelerate_configs/{launch_file}.yaml")
    by = (*launcher, f"--num_processes={count}", "--mixed_precision=no")
    together = bench.train("sft", f"{launch_file}-together", by=by, **{**keys, "gradient_accumulation_steps": 1})
    if not (gap := measure_gap(alone, together)) <= 1e-4:
        raise WrongResultError(f"losses of {count} GPUs are {gap:.1e} off those of one; 1e-04 is allowed")
    speeds = [statistics.median(event["tokens_per_second"] for event in events) for events in (alone, together)]
    return {"gpus": count, "gap": gap, "speed_of_one": speeds[0], "speed_of_all": speeds[1]}


def count_synchronisations(recipe: str, bench: Bench) -> Figures:
    """Count host synchronisations per step, by the warnings of torch's synchronisation debugger."""
    few, many = (_count_in_a_step(bench, recipe, count) for count in (1, 3))
    if many > few or many > _ALLOWED:
        found = (
            f"a step of 1 micro-batch has {few:g} host synchronisations, one of 3 has {many:g}; {_ALLOWED} are allowed"
        )
        raise WrongResultError(found)
    return {"synchronisations_a_step": many}


def _count_in_a_step(bench: Bench, recipe: str, num_micro_batches: int) -> float:
    keys = {**_set_up(bench, recipe), "gradient_accumulation_steps": num_micro_batches, "logging_steps": 1000}
    watched = ("-W", "always", "-m", "recipes_lib.proving.scripts")
    counts = []
    # One-time synchronisations of a run are in both counts.
    for num_steps in (2, 6):
        name = f"synchronisations-{recipe}-{num_micro_batches}-{num_steps}"
        output = bench.run(recipe, name, by=watched, **{**keys, "max_steps": num_steps})
        told = output.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
        counts.append(told.count("called a synchronizing CUDA operation"))
        # The process makes one on purpose: if it is not in the log, warnings were lost.
        if not counts[-1]:
            raise WrongResultError(f"the synchronisation made on purpose is not in {output.with_suffix('.log')}")
    return (counts[1] - counts[0]) / 4


_SHAPES: Final[Mapping[str, tuple[tuple[int, ...], int, int]]] = {
    # Name -> hidden size, MLP size, layers, heads, vocabulary; rows per micro-batch; tokens per row.
    "124M": ((768, 2048, 12, 12, 50_304), 16, 1024),
    "1B": ((2048, 8192, 16, 32, 32_000), 4, 2048),
}
_SIZES: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "eager": {"torch_compile": "false", "use_liger_kernel": "false"},
    "compiled": {"torch_compile": "true", "use_liger_kernel": "false"},
    "default": {},
}


def measure_throughput(shape: str, bench: Bench) -> Figures:
    """Measure throughput, MFU and peak memory of pretraining, each of our variants against transformers' trainer."""
    sizes, num_rows, length = _SHAPES[shape]
    if bench.is_small:
        sizes, num_rows, length = (*SHAPE.values(), 320), 2, 32
    named = dict(zip(_SIZES, sizes, strict=True))
    model = json.dumps({"model_type": "llama", **named, "tie_word_embeddings": True})
    num_steps = 3 if bench.is_small else 20
    batch = {"per_device_train_batch_size": num_rows, "gradient_accumulation_steps": 2, "max_steps": num_steps}
    common = {**_set_up(bench, "pretrain"), **batch, "max_length": length, "model_config": model}
    common |= {"bf16": "true", "cross_document_attention": "true"}
    figures: dict[str, Any] = {}
    for name, variant in _VARIANTS.items():
        if bench.is_small and name != "default":
            continue
        events = bench.train("pretrain", f"throughput-{shape}-{name}", **common, **variant)[num_steps // 2 :]
        figures[f"{name}_tokens_per_second"] = statistics.median(event["tokens_per_second"] for event in events)
        figures[f"{name}_mfu"] = statistics.median(event.get("mfu", 0.0) for event in events)
        figures[f"{name}_memory_gb"] = max(event["memory_bytes"] for event in events) / 1e9
        figures[f"{name}_planned_gb"] = plan_allocated(bench, "pretrain", **common, **variant) / 1e9
        if bench.is_cuda:  # On a CPU the memory is that of the whole process.
            figures[f"{name}_memory_over_plan"] = figures[f"{name}_memory_gb"] / figures[f"{name}_planned_gb"]
    for name, compiles in (("transformers", False), ("transformers_compiled", True)):
        if compiles and bench.is_small:
            continue
        output = bench.folder / "runs" / f"throughput-{shape}-{name}"
        output.mkdir(parents=True, exist_ok=True)
        given = {"model": json.loads(model), "rows": num_rows, "length": length, "steps": num_steps}
        given |= {"compile": compiles, "cpu": not bench.is_cuda, "output": str(output)}
        if bench.launch(["-m", "recipes_lib.proving.scripts", json.dumps(given)], {}, output.with_suffix(".log")):
            raise WrongResultError(f"transformers' trainer failed: {output.with_suffix('.log')}")
        figures |= {f"{name}_{key}": value for key, value in read_record(output / "peer.json").items()}
    figures["ratio_to_transformers"] = figures["default_tokens_per_second"] / max(
        value for key, value in figures.items() if key.startswith("transformers") and key.endswith("per_second")
    )
    return figures


def plan_allocated(bench: Bench, recipe: str, **keys: Any) -> int:
    """Return the planned PyTorch allocation of a run, without CUDA context and reserve.

    Args:
        bench: Where it runs; of a CPU those of a GPU with 80 GB.
        recipe: The run's.
        **keys: As for ``Bench.train``.
    """
    flags = {**bench.name_inputs(recipe), "output_dir": bench.folder, **keys}
    config = load_config(recipe, [f"--{key}={value}" for key, value in flags.items()])
    # Liger's kernels are on by default if they are supported.
    if "use_liger_kernel" not in keys and bench.is_cuda and find_spec("liger_kernel"):
        config = replace(config, training={**config.training, "use_liger_kernel": True})
    size = torch.cuda.get_device_properties(bench.device).total_memory if bench.is_cuda else 80e9
    return plan_memory(config, find_planned_model(config), Layout("single_gpu"), device_bytes=size).allocated


def list_checks() -> Iterable[Check]:
    """Yield every check, the most important first."""
    yield Check("environment", "versions, device, matrix products, copies", look_at_environment)
    for recipe in _OF_RECIPE:
        yield Check(f"numbers-{recipe}", f"losses of {recipe} on CPU and device", partial(compare_with_cpu, recipe))
    for kernel, package in {
        "varlen": "",
        "flash_attention_2": "flash_attn",
        "flash_attention_3": "flash_attn_3",
    }.items():
        compare = partial(compare_attention, kernel)
        yield Check(f"attention-{kernel}", f"{kernel} = sdpa on packed rows", compare, package)
    yield Check("loss-head", "chunked loss = dense loss; time of both", compare_loss_head)
    for name, change, package in (
        ("compile", _compile, ""),
        ("save-matmuls", _recompute, ""),
        ("liger", _use_liger, "liger_kernel"),
    ):
        yield Check(f"layers-{name}", f"{name} changes nothing", partial(compare_layers, change), package)
    yield Check("resume", "a resumed run = an uninterrupted one", resume_exactly)
    for shape in _SHAPES:
        yield Check(f"throughput-{shape}", f"{shape}: tokens a second", partial(measure_throughput, shape))
    yield Check("decoding", "tokens a second of generate", measure_decoding)
    for launch_file in ("ddp", "fsdp2"):
        compare_gpus = partial(compare_with_one_gpu, launch_file)
        told = f"losses of all GPUs by {launch_file} = those of one"
        yield Check(f"gpus-{launch_file}", told, compare_gpus, min_gpus=2)
    for recipe in ("sft", "pretrain", "dpo", "reward"):
        count = partial(count_synchronisations, recipe)
        yield Check(f"synchronisations-{recipe}", f"host synchronisations of {recipe}", count, min_gpus=1)
