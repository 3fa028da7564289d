"""GPU table: names of drivers, vendors and users, link rates, and expected MFU."""

from __future__ import annotations

import pytest
import torch
from tests.planning.runs import build_config

from recipes_lib.errors import ConfigError
from recipes_lib.planning.devices import (
    _DEVICES,
    Kind,
    Measured,
    choose_device,
    find_device,
    find_efficiency,
    peak_flops,
    verify_peak,
)


def test_peak_is_known_for_16_bit_products_only() -> None:
    assert peak_flops("Tesla T4", torch.float16) == 65e12
    assert peak_flops("Tesla T4", torch.bfloat16) is None
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989e12
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.float32) is None
    assert peak_flops("48GB", torch.bfloat16) is None


@pytest.mark.parametrize(
    "name",
    [
        *("Intel(R) Xeon(R) Platinum", "AMD EPYC 9B14", "Abacus", "0GB", "", "a2-ultragpu-8g"),
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "GeForce RTX 4090 Mobile", "H100 MIG 1g.10gb"),
    ],
)
def test_other_names_are_no_known_gpu(name: str) -> None:
    assert find_device(name) is None
    assert peak_flops(name, torch.bfloat16) is None


@pytest.mark.parametrize(
    ("name", "training", "dtype", "expected"),
    [
        ("H100", {}, "float32", 989e12),
        ("H100", {"bf16": False}, "bfloat16", 989e12),
        ("V100-16GB", {"fp16": True}, "float32", 125e12),
        ("V100-16GB", {}, "float32", "'V100-16GB' in bfloat16 is not known\n.*`bf16: false` and `fp16: true`"),
        ("H100", {"bf16": False}, "float32", "'H100' in float32 is not known\n.*bf16: true"),
        ("Abacus", {}, "float32", "'Abacus' is not known\n.*nvidia-smi"),
        ("48GB", {}, "float32", "of '48GB' in bfloat16 is not known\n.*nvidia-smi"),
    ],
)
def test_peak_of_run_is_that_of_its_compute_dtype(name, training, dtype, expected) -> None:
    config = build_config(dtype=dtype, **training)
    if isinstance(expected, float):
        verify_peak(device := choose_device(name), config)
        assert device.flops == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            verify_peak(choose_device(name), config)


@pytest.mark.parametrize(
    ("name", "gigabytes", "teraflops", "bandwidth", "link", "watts"),
    [
        # Similar names have different figures; `...` where another row checks them.
        ("NVIDIA H100 80GB HBM3", 80, 989, 3350, 450, 700),
        ("NVIDIA H100 PCIe", 80, 756, 2000, 64, 350),
        ("NVIDIA H100 NVL", 94, 835, 3900, 300, 400),
        ("H100NVL", 94, ..., ..., ..., ...),
        ("H100 SXM", 80, 989, ..., ..., ...),
        ("NVIDIA_H100_80GB", 80, 989, ..., ..., ...),
        ("nvidia-h100-mega-80gb", 80, 989, ..., ..., ...),
        ("NVIDIA H200", 141, 989, ..., ..., 700),
        ("NVIDIA H20", 96, 148, ..., ..., ...),
        ("NVIDIA A100-SXM4-80GB", 80, 312, 2039, 300, 400),
        ("NVIDIA A100-SXM4-40GB", 40, 312, 1555, 300, 400),
        ("NVIDIA A100 80GB PCIe", 80, 312, 1935, 32, 300),
        ("NVIDIA A100-PCIE-40GB", 40, 312, 1555, 32, 250),
        ("A100-80", 80, ..., 2039, 300, 400),
        ("a100-40", 40, ..., 1555, 300, 400),
        ("H100-PCIE-80GB", 80, 756, 2000, 64, 350),
        ("NVIDIA H100 80GB PCIe", 80, 756, 2000, 64, 350),
        ("NVIDIA-H100-NVL", 94, 835, ..., 300, 400),
        ("rtx-6000-ada", 48, 364.2, ..., ..., ...),
        ("A100 SXM4 80GB", 80, ..., 2039, 300, 400),
        ("NVIDIA A100-SXM-64GB", 64, ..., ..., ..., ...),
        ("NVIDIA A10G", 24, 70, ..., ..., ...),
        ("NVIDIA A10", 24, 125, ..., ..., ...),
        ("NVIDIA L40S", 48, 362, ..., ..., 350),
        ("NVIDIA L4", 24, 121, ..., ..., 72),
        ("Tesla T4", 16, ..., ..., ..., ...),
        ("V100 32", 32, ..., ..., ..., ...),
        ("V100 32G", 32, ..., ..., ..., ...),
        ("RTX 4090", 24, 165.2, ..., ..., 450),
        ("NVIDIA GeForce RTX 4090 D", 24, 147, ..., ..., 425),
        ("NVIDIA GeForce RTX 3090 Ti", 24, 80, 1008, ..., ...),
        ("4090", 24, ..., ..., ..., ...),
        ("rtx 4090", 24, ..., ..., ..., ...),
        ("rtx5090", 32, ..., ..., ..., ...),
        ("NVIDIA GeForce RTX 3090", 24, ..., ..., ..., ...),
        ("RTX PRO 6000", 96, ..., ..., ..., ...),
        ("NVIDIA RTX 6000 Ada Generation", 48, ..., ..., ..., ...),
        ("A6000", 48, ..., ..., ..., ...),
        ("GH200", 96, ..., ..., ..., None),
        ("NVIDIA GH200 480GB", 96, ..., ..., ..., ...),
        ("NVIDIA GH200 144G HBM3e", 144, ..., ..., ..., ...),
        ("GH200 144GB", 144, ..., ..., ..., ...),
        ("NVIDIA B200", 180, ..., ..., ..., ...),
        ("NVIDIA B300 SXM6 AC", 270, ..., ..., ..., ...),
        ("AMD Instinct MI250X", 64, ..., 1638, 50, 280),
        ("48 GB", 48, 0, 0, 0, None),
    ],
)
def test_device_figures_by_name(name, gigabytes, teraflops, bandwidth, link, watts) -> None:
    found = choose_device(name)
    figures = zip(
        (found.memory, found.flops / 1e3, found.bandwidth, found.link),
        (gigabytes, teraflops, bandwidth, link),
        strict=True,
    )
    assert all(figure == expected * 1e9 for figure, expected in figures if expected is not ...)
    assert watts in (found.watts, ...)


def test_every_row_of_table_is_found_by_name_and_has_source() -> None:
    for name, row in _DEVICES.items():
        assert row["source"], name
        found = choose_device(name)
        assert (found.flops, found.memory, found.bandwidth) == pytest.approx(
            (row["flops"] * 1e12, row["memory"] * 1e9, row["bandwidth"] * 1e9)
        ), name


@pytest.mark.parametrize(
    ("name", "ranks", "gigabytes"),
    [
        # A switch, links to each GPU, and a bridge of two GPUs with PCIe beyond.
        ("H100", 2, 450),
        ("H100", 8, 450),
        ("MI300X", 2, 64),
        ("MI300X", 8, 7 * 64),
        ("H100 NVL", 2, 300),
        ("H100 NVL", 8, 64),
        ("RTX 4090", 2, 32),
        ("MI300X", 1, 64),
    ],
)
def test_rate_between_gpus_depends_on_links_and_ranks(name, ranks, gigabytes) -> None:
    assert choose_device(name).find_rate(ranks) == gigabytes * 1e9


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("409", "did you mean .*`RTX 4090`"),
        ("H10", "H100"),
        ("MI30X", "MI300X"),
        ("A100", "one of several\n.*`A100-PCIe-80GB` or `A100-PCIe-40GB` or `A100-80GB` or `A100-40GB`"),
        ("NVIDIA A100-SXM4", "one of several\n.*`A100-80GB` or `A100-40GB`"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "not known\n.* a size such as 80GB"),
        ("Tesla V100", "one of several\n.*`V100-32GB` or `V100-16GB`"),
        ("RTX 6000", "one of several\n.*`RTX PRO 6000` or `RTX 6000 Ada`"),
        ("Abacus", "nvidia-smi -L"),
        (" ", "nvidia-smi -L"),
    ],
)
def test_unknown_or_ambiguous_name_error_suggests_names(name, words) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_device(name)


def test_short_name_reports_assumed_board() -> None:
    assert choose_device("h100").assumed.startswith("SXM")
    assert choose_device("A100-80GB").assumed == "SXM"
    assert not choose_device("NVIDIA H100 80GB HBM3").assumed


def test_efficiency_is_published_mfu_less_recomputation() -> None:
    """torchtitan publishes 33 % and 39 %; recomputation adds one pass to three, or to two with an adapter."""
    eager, source = find_efficiency(build_config())
    compiled, _ = find_efficiency(build_config(torch_compile=True))
    assert (eager, compiled) == pytest.approx((0.338, 0.391), abs=0.002)
    assert "torchtitan" in source
    whole, half = (
        find_efficiency(build_config(activation_checkpointing=True, activation_checkpointing_kwargs=options))[0]
        for options in ("{}", "{every_n_layers: 2}")
    )
    assert (whole, half) == pytest.approx((eager * 3 / 4, eager * 3 / 3.5), abs=1e-3)
    kept = build_config(activation_checkpointing=True, activation_checkpointing_kwargs="{save_matmuls: true}")
    assert find_efficiency(kept)[0] == eager
    adapter = build_config("lora", activation_checkpointing=True, load_in_4bit=True)
    assert find_efficiency(adapter)[0] == pytest.approx(eager * 2 / 3 * 0.9, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.2),
        ({"activation_checkpointing": True}, 0.2 * 3 / 4),
        # Without compiled measurements, by the published ratio of 6,667 to 5,762 tokens per second.
        ({"torch_compile": True}, 0.2 * 6667 / 5762),
        ({"recipe": "lora"}, 0.1),
        ({"recipe": "lora", "activation_checkpointing": True}, 0.1 * 2 / 3),
    ],
)
def test_measured_mfu_replaces_published_by_class(changes, expected) -> None:
    shares = {Kind(compiles=False, uses_adapter=False): 0.2, Kind(compiles=False, uses_adapter=True): 0.1}
    assert find_efficiency(build_config(**changes), Measured(shares, "a test"))[0] == pytest.approx(expected, abs=5e-4)


def test_small_measured_mfu_is_not_rounded_to_zero() -> None:
    """A run of a tiny model has such an MFU, by which times are divided."""
    measured = Measured({Kind(compiles=False, uses_adapter=False): 0.000321}, "a test")
    assert find_efficiency(build_config(), measured)[0] == pytest.approx(0.000321)
