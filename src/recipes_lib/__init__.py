"""Recipes for training a language model from raw text to a published assistant.

>>> from recipes_lib import check, load_run, train
>>> run = train("sft", config="sft.yaml", learning_rate=1e-5)
>>> run.path, run.metrics[-1]["eval_loss"]
"""

import importlib
from typing import Any

__all__ = ["__version__", "check", "load_run", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazy (PEP 562), so that importing the package for `recipes --help` loads no YAML and no torch. Type checkers read
    # __init__.pyi.
    if name in ("check", "load_run", "train"):
        return getattr(importlib.import_module("recipes_lib.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
