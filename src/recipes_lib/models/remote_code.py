"""Remote code of a model: found, and allowed only at a pinned commit or from a local folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from transformers.dynamic_module_utils import get_relative_imports
from transformers.utils.hub import cached_file

from recipes_lib.config.schema import ModelConfig
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.files import read_record

_NAMES_CODE: Final = ("config.json", "tokenizer_config.json")
"""Files with an ``auto_map``, which says what class of what module is loaded."""


def verify_remote_code(config: ModelConfig) -> None:
    """Hold code of the Hub to a commit that was named, and so could be read.

    Raises:
        ConfigError: With ``trust_remote_code`` a repository is named without its commit; or a repository or folder
            names code of another repository, of which transformers would run whatever the Hub has that day.
    """
    if not config.trust_remote_code:
        return
    repositories = [(str(config.model_name_or_path), "model_revision", config.model_revision)]
    if config.tokenizer_name_or_path is not None or config.tokenizer_revision is not None:
        name = config.tokenizer_name_or_path or str(config.model_name_or_path)
        repositories.append((name, "tokenizer_revision", config.tokenizer_revision))
    for name, key, revision in repositories:
        is_commit = re.fullmatch(r"[0-9a-f]{40}", revision or "") is not None
        if not is_commit and not Path(name).is_dir():
            found = f"the code of {name} would run, in whatever version the Hub has"
            remedy = f"set {key} to the 40-digit commit that you have read"
            raise ConfigError(Problem("trust_remote_code", found, remedy))
        for other in sorted(set(_list_owners(name, revision)) - {name}):
            found = f"{name} has code of another repository run, {other}, in whatever version the Hub has"
            remedy = f"put the code that you have read into a copy of {name}, and drop `{other}--` from its `auto_map`"
            raise ConfigError(Problem("trust_remote_code", found, remedy))


def list_code(folder: Path) -> set[str]:
    """Return the files at the top of a folder with the code that its configurations name, and what that imports."""
    references = [one for file in _NAMES_CODE for one in _list_references(folder / file) if "--" not in one]
    waiting = {f"{reference.split('.')[0]}.py" for reference in references}
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found and (folder / name).is_file():
            found.add(name)
            waiting |= {f"{module}.py" for module in get_relative_imports(folder / name)}
    return found


def _list_owners(name: str, revision: str | None) -> Iterator[str]:
    """The repositories whose code a repository or folder names."""
    for file in _NAMES_CODE:
        try:
            path = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError):
            continue  # Whoever loads it next fails as well, and says of what.
        for reference in _list_references(Path(path)) if path else ():
            if "--" in reference:
                yield reference.split("--")[0]


def _list_references(path: Path) -> Iterator[str]:
    """The classes that a configuration names; none where it cannot be read."""
    try:
        content = read_record(path)
    except DataError:
        return  # Whoever loads it next fails as well, and says of what.
    yield from _iterate_leaves(content.get("auto_map"))


def _iterate_leaves(value: Any) -> Iterator[str]:
    """The strings in a mapping or list; the classes of a tokenizer are two, the slow one and the fast one."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _iterate_leaves(one)
