"""Comparison script of throughput checks: trainers of transformers and TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes_lib.proving.scripts import main

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("peer", ["transformers", "trl"])
def test_peer_writes_throughput_and_memory(tmp_path: Path, tiny_model_dir: Path, peer: str) -> None:
    keys: dict[str, Any] = {"model": {"model_type": "llama", "vocab_size": 64, **SIZES}}
    if peer == "trl":
        keys = {"path": str(tiny_model_dir), "adapter": True, "four_bit": False, "optim": "adamw_torch"}
    keys |= {"rows": 2, "length": 16, "steps": 3, "compile": False, "cpu": True, "output": str(tmp_path)}
    main([json.dumps(keys)])
    found = json.loads((tmp_path / "peer.json").read_text())
    assert found["tokens_per_second"] > 0
    # PyTorch counts no memory of a CPU, and 0 would look like a measurement.
    assert ("memory_gb" in found) == torch.cuda.is_available()
