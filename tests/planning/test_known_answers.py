"""Published figures of known runs, compared with the planner and with the tables of ``pretraining_runs.md``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.forked import ROOT
from tests.planning.runs import build_config
from transformers import AutoConfig, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config

from recipes_lib.commands.planning.plan import Failures
from recipes_lib.config.command_flags import FLAGS
from recipes_lib.planning.compute import (
    compute_flops_per_token,
    compute_hours,
    compute_model_size,
    compute_training_flops,
)
from recipes_lib.planning.devices import Kind, choose_device
from recipes_lib.planning.memory import plan_memory
from recipes_lib.planning.memory_plan import Held, Layout, MemoryPlan
from recipes_lib.planning.scaling import PUBLISHED

PAGE = ROOT / "docs" / "pretraining_runs.md"
BESIROGLU, HOFFMANN = PUBLISHED.values()
SHARE = Kind(compiles=True, uses_adapter=False).published


class Answer(NamedTuple):
    """A published and the computed figure, with relative tolerance and source."""

    what: str
    published: float
    computed: float
    tolerance: float
    source: str


def compute_days(num_parameters: float, num_tokens: float, num_gpus: int, flops: float) -> float:
    """Return days at achieved FLOP/s, which count recomputation, unlike MFU."""
    mfu = flops / 312e12 * 6 / 8
    return compute_hours(compute_training_flops(num_parameters, num_tokens), num_gpus, 312e12, mfu) / 24


def list_answers(model_dir: Path) -> Iterator[Answer]:
    config = build_config("pretrain", model_name_or_path=model_dir, max_length=64, max_steps=4)
    shape, kinds = AutoConfig.from_pretrained(model_dir), ("weights", "gradients", "optimizer states")

    def count_gigabytes(num_parameters: float, num_processes: int, *shards: int, is_deepspeed: bool) -> float:
        """Return GB of model states, scaled from the bytes per parameter of a small model."""
        layout = Layout("", num_processes, Held(*shards), is_deepspeed=is_deepspeed)
        held = sum(plan_memory(config, shape, layout).components[f"model, {kind}"] for kind in kinds)
        return held / compute_model_size(shape).total * num_parameters / 1e9

    zero = "Rajbhandari et al. 2020, figure 1"
    for stage, (shards, gigabytes) in enumerate(
        {(1, 1, 1): 120, (1, 1, 64): 31.4, (1, 64, 64): 16.6, (64, 64, 64): 1.9}.items()
    ):
        held = count_gigabytes(7.5e9, 64, *shards, is_deepspeed=True)
        yield Answer(f"GB of states, 7.5B on 64 GPUs, ZeRO-{stage}", gigabytes, held, 0.015, zero)
    for shards, gigabytes in {(1, 1, 1): 1120, (8, 8, 8): 140}.items():
        held = count_gigabytes(70e9, 8, *shards, is_deepspeed=False)
        layout = "FSDP" if shards[0] > 1 else "DDP"
        yield Answer(f"GB of states, 70B on 8 GPUs, {layout}", gigabytes, held, 1e-3, "16 bytes a parameter")
    for name, size, tokens, flops, source in (
        ("GPT-3", 174.6e9, 300e9, 3.14e23, "Brown et al. 2020, table D.1"),
        ("Llama 3 405B", 405e9, 15.6e12, 3.8e25, "Grattafiori et al. 2024, section 3.2"),
        ("Chinchilla", 70e9, 1.4e12, 5.76e23, "Hoffmann et al. 2022, with Gopher's budget"),
        ("SmolLM2 1.7B", 1.71e9, 11e12, 1e23, "Allal et al. 2025, to one digit"),
    ):
        tolerance = {"Chinchilla": 0.03, "SmolLM2 1.7B": 0.5}.get(name, 3e-3)
        yield Answer(f"FLOPs of {name}", flops, compute_training_flops(size, tokens), tolerance, source)
    petaflop_days = compute_training_flops(174.6e9, 300e9) / (1e15 * 24 * 3600)
    yield Answer("PF-days of GPT-3", 3640, petaflop_days, 3e-3, "Brown et al. 2020, table D.1")
    megatron = "Narayanan et al. 2021, section 5.1"
    yield Answer("days of 175B, 1,024 A100", 34, compute_days(175e9, 300e9, 1024, 140e12), 0.012, megatron)
    yield Answer("days of 1T, 3,072 A100", 84, compute_days(1e12, 450e9, 3072, 163e12), 0.012, megatron)
    hours = FLAGS["planning"]["failure_hours"]["default"] / 16_384
    meta = "Grattafiori et al. 2024, section 3.3.4"
    yield Answer("hours between failures, Llama 3", 54 * 24 / 419, hours, 1e-3, meta)
    failures = Failures(hours * 3600, save_seconds=60, restart_seconds=300)
    goodput = failures.compute_goodput(failures.compute_interval())
    stalls = f"{meta}, more than 90 %; here saving in 60 s, restarting in 300 s"
    yield Answer("share of time in training, Llama 3", 0.9, goodput, 0.03, stalls)
    for law, name, best, loss in (
        (HOFFMANN, "Hoffmann et al. as printed", (32.2e9, 2.98e12), 1.9366),
        (BESIROGLU, "Besiroglu et al.", (72.2e9, 1.329e12), 1.9739),
    ):
        optimum = law.find_optimum(5.76e23)
        yield Answer("parameters for 5.76e23 FLOPs", best[0], optimum.num_parameters, 2e-3, name)
        yield Answer("tokens for 5.76e23 FLOPs", best[1], optimum.num_tokens, 2e-3, name)
        yield Answer("loss of 70B after 1.4T tokens", loss, law.compute_loss(70e9, 1.4e12), 3e-5, name)


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def build_llama(width: int, mlp: int, num_layers: int, heads: tuple[int, int], vocabulary: int) -> LlamaConfig:
    return LlamaConfig(vocab_size=vocabulary, **dict(zip(SIZES, (width, mlp, num_layers, *heads), strict=True)))


class PublishedRun(NamedTuple):
    """A published run: its GPU hours with their source, and the reason of the plan's deviation."""

    name: str
    model: PretrainedConfig
    length: int
    num_tokens: float
    gpu: str
    hours: float
    source: str
    why: str
    share: float = SHARE


CARD = "model card"
LLAMA_8B = build_llama(4096, 14336, 32, (32, 8), 128_256)
MISTRAL = build_llama(4096, 14336, 32, (32, 8), 32_000)
NANOCHAT = GPT2Config(vocab_size=65_536, n_positions=2048, n_embd=1280, n_layer=20, n_head=10)
"""A model with the same matrices, except for positions."""
RUNS = (
    PublishedRun("Llama 2 7B", build_llama(4096, 11008, 32, (32, 32), 32_000), 4096, 2e12, "A100-80GB", 184_320,
                 "Touvron et al. 2023, table 2", "the MFU is that of H100s, with half the bandwidth per FLOP/s"),
    PublishedRun("Llama 2 70B", build_llama(8192, 28672, 80, (64, 8), 32_000), 4096, 2e12, "A100-80GB", 1_720_320,
                 "Touvron et al. 2023, table 2", "as above"),
    PublishedRun("Llama 3 8B", LLAMA_8B, 8192, 15e12, "H100", 1_300_000, CARD,
                 "unknown: the card does not say what the hours include"),
    PublishedRun("Llama 3 70B", build_llama(8192, 28672, 80, (64, 8), 128_256), 8192, 15e12, "H100", 6_400_000, CARD,
                 "likely traffic between GPUs and failures, which the plan omits"),
    PublishedRun("SmolLM3 3B", build_llama(2048, 11008, 36, (16, 4), 128_256), 4096, 11.2e12, "H100", 384 * 24 * 24,
                 "announcement", "likely the same, and restarts"),
    PublishedRun("nanochat, depth 20", NANOCHAT, 2048, 11.22e9, "H100", 22.8,
                 "a log of 21,400 steps of 0.479 s on 8 GPUs", "one machine, FlashAttention-3, fully compiled"),
    PublishedRun("Zephyr 7B, SFT", MISTRAL, 2048, 139_428 * 2048, "H100", 12.46,
                 "alignment-handbook/zephyr-7b-sft-full, `train_results.json`",
                 "planned as it ran: eager, every layer recomputed; the GPU is not named, an A100 would be at 94 %",
                 Kind(compiles=False, uses_adapter=False).published * 3 / 4),
)  # fmt: skip


class PublishedSpeed(NamedTuple):
    """A published run: tokens per second and GPU, MFU, and their source."""

    name: str
    model: PretrainedConfig
    length: int
    gpu: str
    tokens: float
    share: float
    source: str


def build_mpt(width: int, num_layers: int, num_heads: int) -> GPT2Config:
    """Build a model with the matrices of MPT, which are those of GPT-2."""
    return GPT2Config(vocab_size=50_368, n_embd=width, n_layer=num_layers, n_head=num_heads)


TITAN = "torchtitan, table 3, at the MFU of 8 GPUs, table 1"
FOUNDRY = "llm-foundry, `scripts/train/benchmarking`"
SPEEDS = (
    PublishedSpeed("MPT 1B", build_mpt(2048, 24, 16), 2048, "H100", 45_455, 0.4182, FOUNDRY),
    PublishedSpeed("MPT 7B", build_mpt(4096, 32, 32), 2048, "H100", 10_643, 0.4644, FOUNDRY),
    PublishedSpeed("MPT 7B", build_mpt(4096, 32, 32), 65_536, "H100", 1_956, 0.2859, FOUNDRY),
    PublishedSpeed("MPT 30B", build_mpt(7168, 48, 56), 8192, "H100", 1_384, 0.2992, FOUNDRY),
    PublishedSpeed("MPT 70B", build_mpt(8192, 80, 64), 2048, "H100", 1_039, 0.4257, FOUNDRY),
    PublishedSpeed("MPT 7B", build_mpt(4096, 32, 32), 8192, "A100-80GB", 3_206, 0.5447, FOUNDRY),
    PublishedSpeed("MPT 13B", build_mpt(5120, 40, 40), 2048, "A100-80GB", 2_262, 0.5957, FOUNDRY),
    PublishedSpeed("OLMo 2 32B", build_llama(5120, 27_648, 64, (40, 8), 100_352), 4096, "H100", 1_800, 0.38,
                   "announcement, rounded"),
    PublishedSpeed("Llama 3.1 8B eager on 128", LLAMA_8B, 8192, "H100", 5_605, Kind(False, False).published, TITAN),
    PublishedSpeed("Llama 3.1 8B compiled on 128", LLAMA_8B, 8192, "H100", 6_514, SHARE, TITAN),
)  # fmt: skip


def build_qwen(width: int, mlp: int, num_layers: int, num_heads: int) -> Qwen2Config:
    """Build a model of the shapes of the first Qwen: no grouped queries, untied output projection."""
    sizes = dict(zip(SIZES, (width, mlp, num_layers, num_heads, num_heads), strict=True))
    return Qwen2Config(vocab_size=151_936, **sizes, tie_word_embeddings=False)


SHAPES = {
    "Qwen 1.8B": build_qwen(2048, 5504, 24, 16),
    "Qwen 7B": build_qwen(4096, 11_008, 32, 32),
    "Qwen 14B": build_qwen(5120, 13_696, 40, 40),
    "Qwen 72B": build_qwen(8192, 24_576, 80, 64),
    "LLaMA 65B": build_llama(8192, 22_016, 80, (64, 64), 32_000),
}
LENGTHS = (256, 512, 1024, 2048)
MEASURED = {
    ("Qwen 1.8B", "LoRA"): (6.7, 7.4, 8.4, 11.0),
    ("Qwen 1.8B", "QLoRA"): (5.8, 6.0, 6.6, 7.8),
    ("Qwen 7B", "LoRA"): (20.1, 20.4, 21.5, 23.8),
    ("Qwen 7B", "QLoRA"): (11.5, 11.5, 12.3, 13.9),
    ("Qwen 14B", "LoRA"): (34.6, 35.1, 35.3, 37.4),
    ("Qwen 14B", "QLoRA"): (18.7, 18.4, 18.9, 19.9),
    ("Qwen 72B", "QLoRA"): (61.4, 61.4, 62.9, 64.1),
}
"""GB on an A100 by size, method and tokens of a row; QwenLM/Qwen, README, "Profiling of Memory and Speed"."""


def plan_adapter(name: str, method: str, length: int) -> MemoryPlan:
    """Plan a run of ``MEASURED``: rank 64, one row per micro-batch, full activation checkpointing."""
    keys = {"lora_r": 64, "dtype": "bfloat16", "load_in_4bit": method == "QLoRA", "max_length": length}
    config = build_config("lora", per_device_train_batch_size=1, activation_checkpointing=True, **keys)
    return plan_memory(config, SHAPES[name], Layout("single_gpu"))


def count_gb(plan: MemoryPlan) -> float:
    return sum(plan.components.values()) / 1e9


def describe_run(run: PublishedRun) -> str:
    peak = choose_device(run.gpu).flops
    num_flops = compute_flops_per_token(run.model, run.length).total(run.num_tokens, run.num_tokens)
    ratio = compute_hours(num_flops, 1, peak, run.share) / run.hours
    tokens = f"{run.num_tokens / 1e12:.4g}T" if run.num_tokens > 1e12 else f"{run.num_tokens / 1e9:.4g}B"
    return (
        f"| {run.name}, {tokens} tokens | {run.hours:,} {run.gpu} | {ratio * run.hours:,.0f} | "
        f"{ratio:.2f} | {run.share * ratio:.0%} | {run.source} | {run.why} |"
    )


def test_published_figures_match_planner_and_page(tiny_model_dir: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for answer in list_answers(tiny_model_dir):
        assert answer.computed == pytest.approx(answer.published, rel=answer.tolerance), answer.what
        row = f"| {answer.what} | {answer.published:.4g} | {answer.computed:.4g} | {answer.source} |"
        assert row in page, row


@pytest.mark.parametrize("run", RUNS, ids=[run.name for run in RUNS])
def test_page_shows_planned_hours_of_published_runs(run: PublishedRun) -> None:
    row = describe_run(run)
    assert row in PAGE.read_text(encoding="utf-8"), row


@pytest.mark.parametrize("run", SPEEDS, ids=[f"{run.name} {run.length} {run.gpu}" for run in SPEEDS])
def test_tokens_per_second_match_published_mfu(run: PublishedSpeed) -> None:
    """FLOPs per token agree with those of other libraries, including attention over long rows."""
    flops = compute_flops_per_token(run.model, run.length).total(1, 1)
    planned = choose_device(run.gpu).flops * run.share / flops
    ratio = planned / run.tokens
    given = f"{run.name}, {run.length:,} | {run.gpu} | {run.share:.1%} | {run.tokens:,}"
    row = f"| {given} | {planned:,.0f} | {ratio:.2f} | {run.source} |"
    assert ratio == pytest.approx(1, rel=0.1), row
    assert row in PAGE.read_text(encoding="utf-8"), row


@pytest.mark.parametrize(
    ("name", "method"),
    [pytest.param(*run, marks=[pytest.mark.slow] if run[0] in ("Qwen 7B", "Qwen 14B") else []) for run in MEASURED],
)
def test_planned_memory_of_adapters_matches_measurements(name: str, method: str) -> None:
    measured, planned = MEASURED[name, method], [count_gb(plan_adapter(name, method, length)) for length in LENGTHS]
    cells = (f"{value:.1f} / {plan:.1f}" for value, plan in zip(measured, planned, strict=True))
    row = f"| {name}, {method} | {' | '.join(cells)} |"
    # Measured runs held full logits, a quarter of the smallest model's memory; the plan has chunks.
    assert planned == pytest.approx(measured, rel=0.27 if "1.8B" in name else 0.14)
    assert row in PAGE.read_text(encoding="utf-8"), row


def test_qlora_of_65b_fits_48_gb_as_published() -> None:
    """Dettmers et al. page the states of Adam to the host; the plan includes them."""
    plan = plan_adapter("LLaMA 65B", "QLoRA", 512)
    resident = count_gb(plan) - plan.components["model, optimizer states"] / 1e9
    assert resident < 48 < count_gb(plan)
    assert f"the plan is {count_gb(plan):.1f} GB, {resident:.1f} GB without" in PAGE.read_text(encoding="utf-8")
