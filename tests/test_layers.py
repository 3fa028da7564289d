"""Import rules: between packages of the library, of third-party packages, and of recipes; also inside functions.

Each rule is a function from sources to violations; planted violations show that it can fail.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Mapping

import pytest
from tests.forked import ROOT

LIBRARY = "recipes_lib"

FOUNDATION = {"environment", "errors", "files", "hardware", "processes", "quantities", "sandbox", "stopping"}
ROOMS = {
    "config",
    "corpus",
    "data",
    "models",
    "losses",
    "planning",
    "training",
    "distillation",
    "rl",
    "evaluation",
    "pipelines",
    "publish",
    "report",
}
MAY_IMPORT: Mapping[str, set[str]] = {
    # Leaves.
    "": {"api"},
    "api": {"boundary", "commands", "config", "errors", "report", "stopping", "training"},
    "errors": set(),
    "files": {"errors"},
    "environment": {"errors", "processes"},
    "hardware": set(),
    "quantities": set(),
    "processes": {"errors", "files"},
    "sandbox": {"errors"},
    "stopping": {"errors", "processes"},
    "losses": set(),
    "config": {"errors"},
    # Packages; data and models do not import each other.
    "data": {"config", "environment", "errors", "files", "processes"},
    "models": {"config", "environment", "errors", "files", "losses"},
    "planning": {"config", "errors", "losses", "models", "quantities"},
    "training": {"config", "data", "evaluation", "losses", "models", "planning"} | FOUNDATION,
    "distillation": {"config", "data", "losses", "models", "planning", "training"} | FOUNDATION,
    "rl": {"config", "data", "evaluation", "losses", "models", "planning", "training"} | FOUNDATION,
    "corpus": {"config", "data", "environment", "errors", "files", "processes", "quantities", "report"},
    "pipelines": {"config", "data", "errors", "files"},
    "evaluation": {"config", "environment", "errors", "files", "models", "processes", "sandbox", "stopping"},
    "report": {"config", "errors", "models", "files", "quantities"},
    "publish": {
        *("config", "environment", "errors", "files", "models", "planning", "processes", "quantities", "report"),
        "training",
    },
    "demo": {"config", "errors", "files", "models", "pipelines", "report"},
    "proving": {"config", "data", "environment", "files", "losses", "models", "planning", "training"},
    # Commands may import every package.
    "boundary": {"config", "errors", "processes", "stopping"},
    "cli": {"", "boundary", "errors"},
    "inspection": ROOMS | FOUNDATION,
    "commands": ROOMS | FOUNDATION | {"cli", "demo", "inspection", "proving"},
}
"""Package or top-level module -> packages and modules that it may import; '' is ``recipes_lib`` itself."""

FENCES: Mapping[str, tuple[str, ...]] = {
    "peft": ("models/adapters/", "publish/", "proving/scripts.py"),
    "datasets": ("data/sources/", "data/packed/", "data/store.py", "training/", "proving/scripts.py"),
    "trl": ("training/", "distillation/", "rl/", "proving/scripts.py"),
    "vllm": ("rl/engines/",),
    "evaluate": ("training/evaluation/",),
    "matplotlib": ("report/",),
    **dict.fromkeys(("datatrove", "fasttext", "ftfy", "loguru", "trafilatura", "warcio"), ("corpus/",)),
    "lm_eval": ("evaluation/",),
}
"""Third-party package -> path prefixes in the library that may import it."""

FREE_OF_TORCH = (
    *("__init__.py", "api.py", "boundary.py", "cli.py", "environment.py", "errors.py", "processes.py", "stopping.py"),
    "config/",
)
"""Modules that ``--help`` and configuration errors import, which must not import torch."""
SLOW_TO_IMPORT = {"torch", "transformers", "trl", "accelerate", "peft", "datasets", "evaluate"}

MAX_MAIN_LINES = 40
SHARED_MAINS = {("rloo.py", "grpo"), ("lora.py", "sft")}
"""(recipe, recipe whose main function it imports): the recipe in the configuration distinguishes them."""


@functools.cache
def imported_modules(source: str) -> list[tuple[int, str]]:
    """Return ``(line, dotted name)`` of every import, also inside functions and ``TYPE_CHECKING`` blocks."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def room_of(path: str) -> str:
    """Return the package or top-level module of a path inside the library: ``data/chat.py`` -> ``data``."""
    first = path.split("/", maxsplit=1)[0].removesuffix(".py")
    return "" if first == "__init__" else first


def room_of_name(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and not parts[1].startswith("__") else ""


def find_forbidden_imports(path: str, source: str) -> list[str]:
    room = room_of(path)
    if room not in MAY_IMPORT:
        return [f"{path}: {room!r} is not a known package; add it with its allowed imports to tests/test_layers.py"]
    allowed = MAY_IMPORT[room] | {room, ""}
    return [
        f"{path}:{line}: {room or LIBRARY} may not import {name}"
        for line, name in imported_modules(source)
        if name.split(".")[0] == LIBRARY and room_of_name(name) not in allowed
    ]


def find_fence_breaches(path: str, source: str) -> list[str]:
    return [
        f"{path}:{line}: {name.split('.')[0]} may only be imported in {', '.join(FENCES[name.split('.')[0]])}"
        for line, name in imported_modules(source)
        if name.split(".")[0] in FENCES and not path.startswith(FENCES[name.split(".")[0]])
    ]


def find_slow_imports(path: str, source: str) -> list[str]:
    if not path.startswith(FREE_OF_TORCH):
        return []
    return [
        f"{path}:{line}: {name} must not be imported by --help and configuration errors"
        for line, name in imported_modules(source)
        if name.split(".")[0] in SLOW_TO_IMPORT
    ]


def find_recipe_faults(path: str, source: str) -> list[str]:
    """Return violations of a recipe: imports besides the library and the standard library, a long ``main``."""
    faults = [
        f"{path}:{line}: a recipe imports {LIBRARY} and the standard library only, not {name}"
        for line, name in imported_modules(source)
        if (room := name.split(".")[0]) not in {LIBRARY, *sys.stdlib_module_names} and (path, room) not in SHARED_MAINS
    ]
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > MAX_MAIN_LINES:
                faults.append(f"{path}:{node.lineno}: main has {length} lines, at most {MAX_MAIN_LINES}")
    return faults


def read_library() -> dict[str, str]:
    folder = ROOT / "src" / LIBRARY
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.py"))}


def read_recipes() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((ROOT / "recipes").glob("*.py"))}


def test_library_sources_are_found() -> None:
    assert {"errors.py", "config/schema.py", "data/packed/collators.py", "losses/next_token.py"} <= set(read_library())


@pytest.mark.parametrize("rule", [find_forbidden_imports, find_fence_breaches, find_slow_imports])
def test_library_keeps_import_rules(rule) -> None:
    assert [fault for path, source in read_library().items() for fault in rule(path, source)] == []


def test_recipes_keep_import_rules() -> None:
    assert [fault for path, source in read_recipes().items() for fault in find_recipe_faults(path, source)] == []


PLANTED = {
    find_forbidden_imports: [
        ("data/chat.py", "from recipes_lib.models.loading import load_tokenizer"),
        ("data/chat.py", "import recipes_lib.models.loading"),
        ("data/chat.py", "from recipes_lib import models"),
        ("data/chat.py", "def f():\n    from recipes_lib.training import run"),
        ("data/chat.py", "if TYPE_CHECKING:\n    from recipes_lib.models.heads.loss_head import Head"),
        ("models/heads.py", "from recipes_lib.data.packed.collators import IGNORE_INDEX"),
        ("losses/dpo.py", "from recipes_lib.errors import ConfigError"),
        ("config/loader.py", "from recipes_lib.data.sources.rows import Row"),
        ("planning/schedule.py", "from recipes_lib.training.run import Run"),
        ("report/html.py", "from recipes_lib.training.monitoring.metrics import read"),
        ("cli.py", "def f():\n    from recipes_lib.commands.check import main"),
        ("check.py", "from recipes_lib.commands.doctor import main"),
        ("commands/check.py", "import recipes_lib.unknown"),
        ("errors.py", "from recipes_lib.config.schema import DataConfig"),
        ("newroom/thing.py", "import os"),
    ],
    find_fence_breaches: [
        ("training/sft.py", "def f():\n    import peft"),
        ("models/loading.py", "from peft import LoraConfig"),
        ("data/chat.py", "from datasets import Dataset"),
        ("models/heads.py", "from trl import SFTTrainer"),
    ],
    find_slow_imports: [(path, "def f():\n    import torch.nn as nn") for path in ("cli.py", "config/loader.py")],
    find_recipe_faults: [
        ("pretrain.py", source)
        for source in ("import sft", "from dpo import main", "import torch", "from transformers import Trainer")
    ],
}
ALLOWED = {
    find_forbidden_imports: [
        ("data/chat.py", "from recipes_lib.data.packed.collators import IGNORE_INDEX"),
        ("training/sft.py", "from recipes_lib.losses import next_token"),
        ("commands/check.py", "from recipes_lib import __version__"),
        ("cli.py", "from recipes_lib import __version__"),
    ],
    find_fence_breaches: [("models/adapters/lora.py", "import peft")],
    find_slow_imports: [("models/heads.py", "import torch")],
    find_recipe_faults: [("lora.py", "import sys\nfrom recipes_lib.training.run import Run")],
}


@pytest.mark.parametrize(
    ("find", "path", "source", "num_faults"),
    [
        (find, *case, num_faults)
        for num_faults, cases in ((1, PLANTED), (0, ALLOWED))
        for find, planted in cases.items()
        for case in planted
    ],
)
def test_planted_imports_are_found(find, path, source, num_faults) -> None:
    assert len(find(path, source)) == num_faults


@pytest.mark.parametrize(("num_lines", "num_faults"), [(40, 0), (41, 1)])
def test_find_recipe_faults_limits_length_of_main(num_lines: int, num_faults: int) -> None:
    source = "def main():\n" + "    pass\n" * (num_lines - 1)
    assert len(find_recipe_faults("sft.py", source)) == num_faults
