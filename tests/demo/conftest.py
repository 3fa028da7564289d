"""A part of the standard library of this Python, and chats about it, built once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes_lib.demo import stdlib_texts
from recipes_lib.demo.stdlib_texts import LIBRARY, Chat, Split, build_chats, load_modules


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with links to the modules from ``abc`` to ``enum``: the whole library takes seconds to parse."""
    folder = tmp_path_factory.mktemp("library")
    for path in LIBRARY.glob("[a-e]*.py"):
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="session")
def chats(library: Path) -> Split[Chat]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stdlib_texts, "MIN_CHARACTERS", 1)
        return build_chats(load_modules(library), seed=0)
