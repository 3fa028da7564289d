"""Policies of the keys task, fine-tuned once a session, and its prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.rl import keys_task


@pytest.fixture(scope="session")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Folder of the policy of a seed, which answers with either key; treat it as read-only."""

    @functools.cache
    def make(seed: int) -> Path:
        return keys_task.write_policy(tmp_path_factory.mktemp(f"policy_{seed}"), seed)

    return make


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has seen the task for a moment: its answers are of different lengths."""
    return keys_task.write_policy(tmp_path_factory.mktemp("policy"), 0, num_steps=30)


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More prompts than any short run asks."""
    return keys_task.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", 300, seed=5)
