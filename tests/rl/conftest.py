"""Session-scoped policies and prompts of the keys task."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.rl import keys_task


@pytest.fixture(scope="session")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return the folder of the policy of a seed, which answers with either key; read-only."""

    @functools.cache
    def make(seed: int) -> Path:
        return keys_task.write_policy(tmp_path_factory.mktemp(f"policy_{seed}"), seed)

    return make


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a policy after 30 steps of fine-tuning, whose answers have different lengths; read-only."""
    return keys_task.write_policy(tmp_path_factory.mktemp("policy"), 0, num_steps=30)


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 prompts, more than any short run samples."""
    return keys_task.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", 300, seed=5)
