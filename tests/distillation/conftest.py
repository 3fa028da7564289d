"""Fixtures shared by the tests of distillation."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.training.students import save_student


@pytest.fixture(scope="session")
def student_dir(tiny_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student of half the width and depth of the tiny model; treat it as read-only."""
    return save_student(tmp_path_factory.mktemp("student"), tiny_tokenizer_dir)
