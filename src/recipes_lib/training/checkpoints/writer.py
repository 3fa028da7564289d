"""The checkpoint writer thread, and the host copy that it writes from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from recipes_lib.hardware import read_free_memory

_MEMORY_SHARE: Final = 0.8
"""Of the free host memory that a copy may take."""


class CheckpointWriter:
    """One thread that does one job at a time; what it raises is raised where training can end by it."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Do a job beside training; the one before must be over (``wait``)."""
        assert self._thread is None, "one checkpoint is written at a time"
        # A daemon, so that a disk that does not answer cannot hold up a process that has to leave.
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint", daemon=True)
        self._thread.start()

    def raise_failure(self) -> None:
        """Raise what the last job raised, once; does not wait for it."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Wait for the job, and raise what it raised."""
        self.settle()
        self.raise_failure()

    def settle(self) -> BaseException | None:
        """Wait for the job, and return what it raised; for when something else is being raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._failure

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # The main thread decides what becomes of it.
            self._failure = error


class HostCopy:
    """A copy of what training changes, in host memory that is taken once and used again by every checkpoint.

    Source: torch's stager of asynchronous checkpoints (``torch.distributed.checkpoint.staging``), which keeps shared
    storages shared, so that the files are those of a synchronous save; ``tests/training/checkpoints/test_writer.py``.
    """

    def __init__(self) -> None:
        """Take no memory yet."""
        self._has_device = torch.cuda.is_available()
        # The inner class of DefaultStager, which in torch 2.11 and 2.12 closes it after the first copy: the memory is
        # not reused, and the second copy ends with ``KeyError: <class 'type'>`` (pytorch/torchtitan #3476).
        # DefaultStager itself will do when torch 2.13 is the lowest version.
        self._stager = StateDictStager(pin_memory=self._has_device)
        self._is_taken = False

    def explain_refusal(self, *states: Any) -> str | None:
        """Return why these states cannot be copied, ``None`` when they can: for want of memory, or of a plain tensor.

        Args:
            *states: Nested mappings and sequences with tensors in them.
        """
        tensors = {id(tensor): tensor for state in states for tensor in iterate_tensors(state)}.values()
        kinds = {type(tensor).__name__ for tensor in tensors} - {"Tensor", "Parameter", "Buffer"}
        if kinds:
            return f"states of the kind {min(kinds)} cannot be copied"
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        free = read_free_memory()
        if self._is_taken or num_bytes <= _MEMORY_SHARE * free:
            return None
        return f"a copy takes {num_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB of memory are free"

    def take(self, state: Mapping[str, Any], *, unchanging: Iterable[str] = ()) -> dict[str, Any]:
        """Return a copy of a state on the host; the copy before it is gone.

        Args:
            state: Nested mappings and sequences with tensors in them.
            unchanging: Names in ``state`` that are handed on as they are: nothing changes them.
        """
        self._is_taken = True
        shared = set(unchanging)
        changing = {name: value for name, value in state.items() if name not in shared}
        copied: Any = self._stager.stage(changing, non_blocking=self._has_device)
        if self._has_device:
            torch.accelerator.synchronize()
        return {name: state[name] if name in shared else copied[name] for name in state}


def iterate_tensors(state: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested mappings and sequences, in their order."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from iterate_tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from iterate_tensors(value)
