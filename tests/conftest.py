"""Shared fixtures: an offline, single-threaded process; a tiny tokenizer and model, built once per session."""

from __future__ import annotations

import os
import sys
import tempfile

if "PYTEST_XDIST_WORKER" not in os.environ:
    # The caches of the user are neither read nor written. Workers have the folder of the process that starts them.
    os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="recipes-tests-")
if "gpu" not in sys.argv:
    # Results are those of the CPU, also on a machine with a GPU; `pytest -m gpu` runs the tests that need one.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
import itertools
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from accelerate.utils import memory
from tests.forked import shorten_measurements, spare_flushes
from tests.tiny import build_tokenizer, leave_ids_out, save_model
from transformers import PreTrainedTokenizerFast

from recipes_lib.stopping import STOP

torch.set_num_threads(1)
# The first backward pass starts a thread for each device, after which forks cannot run another. In CUDA builds of
# torch, the fake GPUs of a plan are devices, too.
torch.zeros(1, requires_grad=True).sum().backward()
spare_flushes()
shorten_measurements()
# Until the tests are collected, hardly anything is garbage, and traversing imported modules takes a fifth of the time.
gc.disable()

# The duration of an example depends on the load of the machine.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_unconfigure() -> None:
    """Remove the caches of this run."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put modules with multi-process tests at the beginning of each half of the tests.

    ``-n 2 --dist worksteal`` gives each worker one half, and an idle worker takes tests from the end of the other's. So
    only short tests are left at the end, and module fixtures of several launches are set up by one worker.
    """
    modules = [list(group) for _, group in itertools.groupby(items, lambda item: item.path)]
    is_heavy = [any(item.get_closest_marker("multiprocess") for item in module) for module in modules]
    heavy = list(itertools.compress(modules, is_heavy))
    light = [item for module, skip in zip(modules, is_heavy, strict=True) if not skip for item in module]
    first, second = (list(itertools.chain(*heavy[start::2])) for start in (0, 1))
    num_light = max(0, len(items) // 2 - len(first))
    items[:] = [*first, *light[:num_light], *second, *light[num_light:]]


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, and run no full one at the beginning and end of each training.

    Trainings are so short that the collections of accelerate take a tenth of their time; automatic ones suffice.
    """
    gc.freeze()
    # Encoding rows in this process ends with it, and it would return the imported modules to the collector.
    gc.unfreeze = lambda: None
    gc.enable()
    memory.gc = SimpleNamespace(collect=lambda: 0)


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Fail a test that leaves ``StopRequest.install`` in this process, which would end after a later test's signal."""
    STOP.reset()
    yield
    assert signal.set_wakeup_fd(-1) == -1, "run what installs signal handlers in another process"


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 512 entries that covers every byte, with a ChatML template; treat it as read-only."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def sparse_tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """``tiny_tokenizer`` with 512 tokens and the largest id 541; treat it as read-only."""
    return leave_ids_out(tiny_tokenizer, 30)


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ``tiny_tokenizer`` as ``AutoTokenizer`` loads it; treat it as read-only."""
    folder = tmp_path_factory.mktemp("tiny_tokenizer")
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model_dir(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a random two-layer Llama (fp32) and the tokenizer beside it; treat it as read-only."""
    return save_model(tmp_path_factory.mktemp("tiny_model"), tiny_tokenizer)


@pytest.fixture
def recipes(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command of ``recipes`` in this process, and return its output; with its errors, if ``code`` is not 0."""

    def recipes(*words: object, code: int = 0) -> str:
        from recipes_lib.cli import main

        capfd.readouterr()
        try:
            ended: object = main([*map(str, words)])
        except SystemExit as exit_:  # From argparse.
            ended = exit_.code
        output, errors = capfd.readouterr()
        assert ended == code, output + errors
        assert "Traceback" not in errors
        return output + errors if code else output

    return recipes


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], Path]:
    """Write programs (name -> script) to a folder that precedes all others in ``PATH``, and return it."""
    folder = tmp_path / "programs"

    def install(programs: Mapping[str, str]) -> Path:
        folder.mkdir(exist_ok=True)
        for name, script in programs.items():
            (folder / name).write_text(script)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return folder

    return install


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    """A fake Hub on loopback for this process and its children, with a write token."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils._http import default_client_factory
    from tests.publish.hub_server import open_hub

    with open_hub() as hub:
        # Large files use LFS: Xet has a protocol of its own, which the fake Hub does not implement.
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        for name, value in {**settings, "HF_TOKEN": "hf_" + "x" * 34}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        huggingface_hub.close_session()
        yield hub
    huggingface_hub.set_client_factory(default_client_factory)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Record sleeps between requests instead of sleeping: those of huggingface_hub (``upstream``) and ``ours``."""
    from huggingface_hub.utils import _http

    from recipes_lib.publish import access

    slept = SimpleNamespace(upstream=[], ours=[])
    for module, seconds in ((_http, slept.upstream), (access, slept.ours)):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=seconds.append, monotonic=time.monotonic))
    return slept
