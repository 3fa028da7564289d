"""Chats about the standard library of this Python, built once per session: parsing takes seconds."""

from __future__ import annotations

import pytest

from recipes_lib.demo.stdlib_texts import Chat, Split, build_chats, load_modules, standard_library


@pytest.fixture(scope="session")
def chats() -> Split[Chat]:
    return build_chats(load_modules(standard_library()), seed=0)
