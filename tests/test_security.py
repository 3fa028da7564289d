"""No pickle, no code of others, no secret: what of that can be seen in the sources."""

from __future__ import annotations

import ast
import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.forked import ROOT
from tests.training.trajectories import make_packs, make_trainer

PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
ALLOWED = {
    # Writes the vocabulary that nanoGPT itself reads; the library never opens it.
    "benchmarks/characters.py": {"import pickle"},
}


def find_faults(source: str) -> Iterator[str]:
    """Yield what loads a pickle, or code, wherever it comes from."""
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


def test_no_source_loads_a_pickle_or_runs_code_of_others() -> None:
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
def test_a_planted_fault_is_found(source: str) -> None:
    assert list(find_faults(source))


@pytest.mark.parametrize(
    "source", ["torch.load(path, weights_only=True)", "np.load(path)", "f(trust_remote_code=config.trust_remote_code)"]
)
def test_what_is_safe_is_not(source: str) -> None:
    assert list(find_faults(source)) == []


class Malice:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._mark,)


def test_no_file_of_a_checkpoint_runs_code(tiny_model_dir: Path, tmp_path: Path) -> None:
    keys = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    make_trainer(tiny_model_dir, tmp_path / "run", make_packs(), **keys)[0].train()
    checkpoint, mark = tmp_path / "run" / "checkpoint-2", tmp_path / "mark"
    pickled = [path for path in checkpoint.iterdir() if path.suffix in {".pt", ".pth", ".bin", ".pkl"}]
    assert pickled
    for path in pickled:
        whole = path.read_bytes()
        path.write_bytes(pickle.dumps(Malice(mark)))
        trainer, _ = make_trainer(tiny_model_dir, tmp_path / "again", make_packs(), **keys)
        with contextlib.suppress(Exception):  # Refused, or never opened.
            trainer.train(resume_from_checkpoint=str(checkpoint))
        assert not mark.exists(), path.name
        path.write_bytes(whole)
    pickle.loads(pickle.dumps(Malice(mark)))
    assert mark.exists()
