"""MemoryPlan: peaks of phases, chunks of logits by GPU size, and whether a plan fits."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, MambaConfig

from recipes_lib.losses.projection import Projection, choose_chunk_bytes
from recipes_lib.planning import memory_plan
from recipes_lib.planning.memory_plan import CONTEXT, FORMULAS, LOGITS, PHASES, RESERVE, Layout, MemoryPlan, shorten


@pytest.mark.parametrize(
    "config",
    [
        Gemma3TextConfig(num_hidden_layers=4, layer_types=["sliding_attention", *["full_attention"] * 3]),
        # Derives them from the number of layers.
        MambaConfig(num_hidden_layers=4),
        LlamaConfig(num_hidden_layers=4),
    ],
)
def test_shortened_model_has_first_layers(config) -> None:
    shortened = shorten(config, 2)
    assert shortened.num_hidden_layers == 2
    kinds = getattr(config, "layer_types", None)
    assert getattr(shortened, "layer_types", None) == (kinds and kinds[:2])


COMPONENTS = {"weights": 5, "cache": 3, "gradients": 1, "activations": 1}


def test_components_outside_phases_are_held_in_all() -> None:
    phases = {"sampling": ["cache", "absent"], "update": ["gradients", "activations"]}
    plan = MemoryPlan(Layout("ddp"), "", COMPONENTS, phases)
    assert plan.peaks == {"sampling": 8, "update": 7}
    assert plan.peak == 8
    assert MemoryPlan(Layout("ddp"), "", COMPONENTS, {}).peak == 10


@pytest.mark.parametrize("size", [16e9, 24e9, 80e9, 192e9])
def test_logit_chunk_is_that_of_training_on_same_gpu(size, monkeypatch) -> None:
    """Chunks grow with GPU memory: 1 GiB of logits on an H100."""
    vocabulary = 128_256
    monkeypatch.setattr("recipes_lib.losses.projection.find_chunk_bytes", lambda _: choose_chunk_bytes(size))
    chunk = Projection(torch.ones(1, 2), torch.ones(vocabulary, 2)).chunk_size
    plan = MemoryPlan(Layout("ddp"), "", {"weights": 5}, {}, 10**9, vocabulary)
    assert plan.place(size).components[LOGITS] == 6 * vocabulary * chunk
    assert (size >= 80e9) == (plan.place(size).components[LOGITS] > 1.6e9)
    # Fewer tokens than a chunk.
    assert MemoryPlan(Layout("ddp"), "", {}, {}, 7, vocabulary, 8).place(size).components[LOGITS] == 8 * vocabulary * 7


def test_fit_includes_cuda_context_and_fragmentation() -> None:
    plan = MemoryPlan(Layout("ddp"), "", {"weights": 60_000_000_000, CONTEXT: 1_000_000_000}, {}).place(80e9)
    assert plan.components[RESERVE] == 3_000_000_000
    assert plan.peak == 64_000_000_000
    assert plan.fits(64e9)
    assert not plan.fits(63.9e9)
    assert plan.place(24e9) == plan


def test_formulas_have_names_and_constants_of_components() -> None:
    names = {name for key, name in vars(memory_plan).items() if key.isupper() and isinstance(name, str)}
    for phases in PHASES.values():
        names |= {name.removeprefix("model, ").removeprefix("policy, ") for part in phases.values() for name in part}
    assert names - {"critic, gradients"} <= FORMULAS.keys()
    assert FORMULAS["logits of a batch"].startswith(f"{memory_plan.SAMPLING_BYTES} x")
    assert FORMULAS[RESERVE].startswith(f"{memory_plan._RESERVED:.0%}")
