"""Code in the repositories of models: which files it is in, and the commit at which it may run."""

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
"""Files with an ``auto_map``, which maps auto classes to classes of the repository's own modules."""


def verify_remote_code(config: ModelConfig) -> None:
    """Require a pinned commit for code from the Hub, so that it can be reviewed.

    Raises:
        ConfigError: With ``trust_remote_code``, a repository has no pinned commit; or its ``auto_map`` refers to
            another repository, whose latest commit transformers would run.
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
            found = f"the code of {name} would run at an unpinned version"
            remedy = f"set {key} to the 40-digit commit that you have reviewed"
            raise ConfigError(Problem("trust_remote_code", found, remedy))
        for other in sorted(set(_list_owners(name, revision)) - {name}):
            found = f"{name} runs code of another repository, {other}, at an unpinned version"
            remedy = f"put the reviewed code into a copy of {name}, and remove `{other}--` from its `auto_map`"
            raise ConfigError(Problem("trust_remote_code", found, remedy))


def list_code(folder: Path) -> set[str]:
    """Return the code files of a folder that its configurations refer to, with their relative imports."""
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
    """Yield the other repositories whose code a repository or folder refers to."""
    for file in _NAMES_CODE:
        try:
            path = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError):
            continue  # Loading reports the reason.
        for reference in _list_references(Path(path)) if path else ():
            if "--" in reference:
                yield reference.split("--")[0]


def _list_references(path: Path) -> Iterator[str]:
    """Yield the code references of a configuration, such as ``modeling.Model``; none if it is unreadable."""
    try:
        content = read_record(path)
    except DataError:
        return  # Loading reports the reason.
    yield from _iterate_leaves(content.get("auto_map"))


def _iterate_leaves(value: Any) -> Iterator[str]:
    """Yield the strings of a nested mapping or list; ``AutoTokenizer`` maps to a list of a slow and a fast class."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _iterate_leaves(one)
