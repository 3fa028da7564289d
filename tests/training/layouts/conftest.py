"""Environment of the tests of launches."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_variable_of_an_earlier_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's plugin for FSDP sets this variable in its own process."""
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING", raising=False)
