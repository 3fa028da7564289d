"""Chats about this Python's own library, which takes seconds to read."""

from __future__ import annotations

import pytest

from recipes_lib.demo.stdlib_texts import Chat, Split, build_chats, load_modules, standard_library


@pytest.fixture(scope="session")
def chats() -> Split[Chat]:
    return build_chats(load_modules(standard_library()), seed=0)
