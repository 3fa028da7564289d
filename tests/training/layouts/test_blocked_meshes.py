"""Rows about meshes are told with the others (``test_combinations.py`` trips each), and of nothing but meshes."""

from __future__ import annotations

from recipes_lib.training.layouts.compatibility import BLOCKED, OF_MESHES
from recipes_lib.training.layouts.launch_environment import Launch, Layout


def test_they_are_told_with_the_others() -> None:
    start = BLOCKED.index(OF_MESHES[0])
    assert BLOCKED[start : start + len(OF_MESHES)] == OF_MESHES


def test_without_a_mesh_none_applies() -> None:
    everything = {
        "fp16": True,
        "optim": "muon",
        "verify_steps": 1,
        "attn_implementation": "eager",
        "torch_compile": True,
    }
    for engine in ("", "FSDP", "DEEPSPEED"):
        plain = Launch(rank=0, local_rank=0, world_size=8, engine=engine, layout=Layout(recomputes=True))
        assert not [row for row in OF_MESHES if row.applies(everything, plain)]
