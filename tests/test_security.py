"""Security rules of the sources: no pickles and no remote code.

That checkpoints cannot run code is tested in ``tests/training/checkpoints/test_checkpointing.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tests.forked import ROOT

PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
ALLOWED = {
    # Writes the vocabulary file that nanoGPT reads; the library never opens it.
    "benchmarks/characters.py": {"import pickle"}
}


def find_faults(source: str) -> Iterator[str]:
    """Yield imports and calls that load pickles or run code from a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"import {name}" for name in names if name.split(".")[0] in PICKLES)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called == "torch.load" and keywords.get("weights_only") != "True":
            yield "torch.load without weights_only=True"
        if keywords.get("weights_only") == "False" or keywords.get("allow_pickle") == "True":
            yield "a pickle is allowed"
        if keywords.get("trust_remote_code") == "True":
            yield "trust_remote_code=True"
        if called in ("eval", "exec"):
            yield called


def read_sources() -> dict[str, str]:
    folders = ("src", "recipes", "benchmarks")
    files = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


def test_sources_load_no_pickle_and_no_remote_code() -> None:
    found = {path: set(find_faults(source)) - ALLOWED.get(path, set()) for path, source in read_sources().items()}
    assert {path: faults for path, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "eval(text)",
    ],
)
def test_planted_fault_is_found(source: str) -> None:
    assert list(find_faults(source))


@pytest.mark.parametrize(
    "source", ["torch.load(path, weights_only=True)", "np.load(path)", "f(trust_remote_code=config.trust_remote_code)"]
)
def test_safe_call_is_accepted(source: str) -> None:
    assert list(find_faults(source)) == []
