"""What was published of known runs, beside what the planner computes; both tables are in the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.forked import ROOT
from transformers import AutoConfig, GPT2Config, LlamaConfig, PretrainedConfig

from recipes_lib.config.loader import load_config
from recipes_lib.planning.compute import (
    compute_flops_per_token,
    compute_hours,
    compute_model_size,
    compute_training_flops,
)
from recipes_lib.planning.devices import Kind, choose_device
from recipes_lib.planning.failures import GPU_HOURS_BETWEEN_FAILURES, Failures
from recipes_lib.planning.memory import plan_memory
from recipes_lib.planning.memory_plan import Held, Layout
from recipes_lib.planning.scaling import PUBLISHED

PAGE = ROOT / "docs" / "pretraining_runs.md"
BESIROGLU, HOFFMANN = PUBLISHED.values()
SHARE = Kind(compiles=True, uses_adapter=False).published


class Answer(NamedTuple):
    """A published figure, the same one computed, the relative tolerance, and the source."""

    what: str
    published: float
    computed: float
    tolerance: float
    source: str


def compute_days(num_parameters: float, num_tokens: float, num_gpus: int, flops: float) -> float:
    """Days at achieved FLOP/s, which count a second forward pass where MFU does not."""
    mfu = flops / 312e12 * 6 / 8
    return compute_hours(compute_training_flops(num_parameters, num_tokens), num_gpus, 312e12, mfu) / 24


def list_answers(model_dir: Path) -> Iterator[Answer]:
    keys = {"model_name_or_path": model_dir, "dataset_name": "a/b", "output_dir": "out", "max_length": 64}
    config = load_config("pretrain", [f"--{key}={value}" for key, value in {**keys, "max_steps": 4}.items()])
    shape, kinds = AutoConfig.from_pretrained(model_dir), ("weights", "gradients", "optimizer states")

    def count_gigabytes(num_parameters: float, num_processes: int, *shards: int, is_deepspeed: bool) -> float:
        """States of a model of this size, by the bytes of a parameter of a small one."""
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
    ):
        yield Answer(f"operations of {name}", flops, compute_training_flops(size, tokens), 3e-3, source)
    petaflop_days = compute_training_flops(174.6e9, 300e9) / (1e15 * 24 * 3600)
    yield Answer("PF-days of GPT-3", 3640, petaflop_days, 3e-3, "Brown et al. 2020, table D.1")
    megatron = "Narayanan et al. 2021, section 5.1"
    yield Answer("days of 175B, 1,024 A100", 34, compute_days(175e9, 300e9, 1024, 140e12), 0.012, megatron)
    yield Answer("days of 1T, 3,072 A100", 84, compute_days(1e12, 450e9, 3072, 163e12), 0.012, megatron)
    hours = GPU_HOURS_BETWEEN_FAILURES / 16_384
    meta = "Grattafiori et al. 2024, section 3.3.4"
    yield Answer("hours between failures, Llama 3", 54 * 24 / 419, hours, 1e-3, meta)
    failures = Failures(hours * 3600, save_seconds=60, restart_seconds=300)
    goodput = failures.compute_goodput(failures.compute_interval())
    stalls = f"{meta}, more than 90 %; saving in 60 s, restarting in 300 s"
    yield Answer("share of the time that trains, Llama 3", 0.9, goodput, 0.03, stalls)
    for law, name, best, loss in (
        (HOFFMANN, "Hoffmann et al. as printed", (32.2e9, 2.98e12), 1.9366),
        (BESIROGLU, "Besiroglu et al.", (72.2e9, 1.329e12), 1.9739),
    ):
        optimum = law.find_optimum(5.76e23)
        yield Answer("parameters for 5.76e23 operations", best[0], optimum.num_parameters, 2e-3, name)
        yield Answer("tokens for 5.76e23 operations", best[1], optimum.num_tokens, 2e-3, name)
        yield Answer("loss of 70B after 1.4T tokens", loss, law.compute_loss(70e9, 1.4e12), 3e-5, name)


def build_llama(width: int, mlp: int, num_layers: int, heads: tuple[int, int], vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=num_layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
    )


class PublishedRun(NamedTuple):
    """A run: model, context, tokens, GPU, its reported GPU hours, their source, and why the plan misses them."""

    name: str
    model: PretrainedConfig
    length: int
    num_tokens: float
    gpu: str
    hours: float
    source: str
    why: str


CARD = "model card"
NANOCHAT = GPT2Config(vocab_size=65_536, n_positions=2048, n_embd=1280, n_layer=20, n_head=10)
"""Of the same matrices, but for positions."""
RUNS = (
    PublishedRun("Llama 2 7B", build_llama(4096, 11008, 32, (32, 32), 32_000), 4096, 2e12, "A100-80GB", 184_320,
                 "Touvron et al. 2023, table 2", "the share is of H100s, of half the bandwidth a FLOP/s"),
    PublishedRun("Llama 2 70B", build_llama(8192, 28672, 80, (64, 8), 32_000), 4096, 2e12, "A100-80GB", 1_720_320,
                 "Touvron et al. 2023, table 2", "as above"),
    PublishedRun("Llama 3 8B", build_llama(4096, 14336, 32, (32, 8), 128_256), 8192, 15e12, "H100", 1_300_000, CARD,
                 "not explained: the card does not say what the hours include"),
    PublishedRun("Llama 3 70B", build_llama(8192, 28672, 80, (64, 8), 128_256), 8192, 15e12, "H100", 6_400_000, CARD,
                 "likely traffic between GPUs and failures, which these hours leave out"),
    PublishedRun("SmolLM3 3B", build_llama(2048, 11008, 36, (16, 4), 128_256), 4096, 11.2e12, "H100", 384 * 24 * 24,
                 "announcement", "likely the same, and restarts"),
    PublishedRun("nanochat, depth 20", NANOCHAT, 2048, 11.22e9, "H100", 22.8,
                 "a log of 21,400 steps of 0.479 s on 8 GPUs", "one machine, FlashAttention-3, a model compiled whole"),
)  # fmt: skip


def describe_run(run: PublishedRun) -> str:
    peak = choose_device(run.gpu).flops
    num_flops = compute_flops_per_token(run.model, run.length).total(run.num_tokens, run.num_tokens)
    ratio = compute_hours(num_flops, 1, peak, SHARE) / run.hours
    tokens = f"{run.num_tokens / 1e12:g}T" if run.num_tokens > 1e12 else f"{run.num_tokens / 1e9:g}B"
    return (
        f"| {run.name}, {tokens} tokens | {run.hours:,} {run.gpu} | {ratio * run.hours:,.0f} | "
        f"{ratio:.2f} | {SHARE * ratio:.0%} | {run.source} | {run.why} |"
    )


def test_the_planner_computes_what_was_published_and_the_page_shows_it(tiny_model_dir: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for answer in list_answers(tiny_model_dir):
        assert answer.computed == pytest.approx(answer.published, rel=answer.tolerance), answer.what
        row = f"| {answer.what} | {answer.published:.4g} | {answer.computed:.4g} | {answer.source} |"
        assert row in page, row


@pytest.mark.parametrize("run", RUNS, ids=[run.name for run in RUNS])
def test_hours_of_published_runs_are_on_the_page_with_what_the_plan_misses(run: PublishedRun) -> None:
    row = describe_run(run)
    assert row in PAGE.read_text(encoding="utf-8"), row
