"""Comparison script of throughput checks: transformers' trainer."""

from __future__ import annotations

import json
from pathlib import Path

from recipes_lib.proving.scripts import main


def test_peer_writes_throughput_and_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    given = {"model": {"model_type": "llama", "vocab_size": 64, **sizes}, "rows": 2, "length": 16, "steps": 3}
    main([json.dumps({**given, "compile": False, "cpu": True, "output": str(tmp_path)})])
    found = json.loads((tmp_path / "peer.json").read_text())
    assert found["tokens_per_second"] > 0
    assert found.keys() == {"tokens_per_second", "memory_gb"}
