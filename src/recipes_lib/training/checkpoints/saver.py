"""Checkpoint saving: staged, copied to host, written by a thread, reopened, hashed, renamed atomically; the dry run."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import PartialState
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import TrainingArguments
from transformers.trainer_pt_utils import safe_globals

from recipes_lib.hardware import read_free_memory
from recipes_lib.models.saved_weights import BrokenSaveError
from recipes_lib.planning.disk import DiskPlan, plan_disk, verify_disk
from recipes_lib.quantities import format_count
from recipes_lib.training.checkpoints.manifest import (
    DRY_RUN,
    STAGING,
    find_wrong_size,
    flush_files,
    publish,
    rotate,
    write_complete,
)
from recipes_lib.training.checkpoints.resume import BATCH_KEYS, GENERATION_KEY
from recipes_lib.training.collectives import gather_objects, new_host_group
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.layouts.fsdp import get_local
from recipes_lib.training.run import RECORDED, read_run_record

_MEMORY_SHARE: Final = 0.8
"""Largest share of the free host memory that a copy may take."""


class CheckpointWriter:
    """Writer thread for one job at a time; its exceptions are raised in the training thread."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Do a job in a background thread; the one before must be over (``wait``)."""
        assert self._thread is None, "one checkpoint is written at a time"
        # A daemon, so that a disk that does not answer cannot hold up a process that has to leave.
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint", daemon=True)
        self._thread.start()

    def raise_failure(self) -> None:
        """Raise the exception of the last job, once, without waiting."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Wait for the job, and raise its exception."""
        self.settle()
        self.raise_failure()

    def settle(self) -> BaseException | None:
        """Wait for the job, and return its exception; for use while another one is raised."""
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
    """Host copy of the changing tensors, in memory that is allocated once and reused by every checkpoint.

    Source: torch's stager of asynchronous checkpoints (``torch.distributed.checkpoint.staging``), which keeps shared
    storages shared, so that the files are those of a synchronous save; ``tests/training/checkpoints/test_writer.py``.
    """

    def __init__(self) -> None:
        """Allocate no memory yet."""
        self._has_device = torch.cuda.is_available()
        # The inner class of DefaultStager, which in torch 2.11 and 2.12 closes it after the first copy: the memory is
        # not reused, and the second copy ends with ``KeyError: <class 'type'>`` (pytorch/torchtitan #3476).
        # DefaultStager itself will do when torch 2.13 is the lowest version.
        self._stager = StateDictStager(pin_memory=self._has_device)
        self._is_taken = False

    def explain_refusal(self, *states: Any, num_copies: int = 1) -> str | None:
        """Return why these states cannot be copied, such as missing memory; ``None`` if they can.

        Args:
            *states: Nested mappings and sequences with tensors in them; of those in shards this process's are copied.
            num_copies: Processes of this machine that copy as much each.
        """
        # By identity, since tied weights are copied once.
        tensors = {id(tensor): tensor for state in states for tensor in iterate_tensors(state)}.values()
        shards = [get_local(tensor) for tensor in tensors]
        kinds = {type(tensor).__name__ for tensor in shards} - {"Tensor", "Parameter", "Buffer"}
        if kinds:
            return f"states of the kind {min(kinds)} cannot be copied"
        num_bytes = num_copies * sum(tensor.nbytes for tensor in shards)
        free = read_free_memory()
        # After the first copy its memory is held, and no longer among what is free.
        if self._is_taken or num_bytes <= _MEMORY_SHARE * free:
            return None
        return f"a copy takes {num_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB of memory are free"

    def take(self, state: Mapping[str, Any], *, unchanging: Iterable[str] = ()) -> dict[str, Any]:
        """Return a copy of a state on the host; the copy before it is gone.

        Args:
            state: Nested mappings and sequences with tensors in them.
            unchanging: Names in ``state`` that are not copied: nothing changes them.
        """
        self._is_taken = True
        shared = set(unchanging)
        changing = {name: value for name, value in state.items() if name not in shared}
        copied: Any = self._stager.stage(changing, non_blocking=self._has_device)
        if self._has_device:
            # Copies were asynchronous; the next optimizer step would overwrite tensors that are still being read.
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


def is_adapter(model: nn.Module) -> bool:
    """Return whether a model is under an adapter, which alone is saved then."""
    return hasattr(model, "peft_config")


def list_frozen(model: nn.Module) -> list[str]:
    """Return the names of the parameters that training does not change, each name of one that is tied."""
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, tensor in named if not tensor.requires_grad]


def compare_weights(file: Path, live: Mapping[str, torch.Tensor]) -> None:
    """Hold saved weights against those that are trained, to the bit.

    Raises:
        BrokenSaveError: A tensor differs.
    """
    differing = [name for name, saved in load_file(file).items() if not torch.equal(saved, live[name].cpu())]
    if differing:
        raise BrokenSaveError(f"{file}: {', '.join(differing)} differ from what is trained")


def compare_state(file: Path, live: Any = None) -> None:
    """Read a state as a later start would, and hold its tensors against those of the live one, if it is given.

    Raises:
        BrokenSaveError: A tensor differs, or the file cannot be read without running code.
    """
    try:
        # numpy's random state is allowed by name, as upstream does when it loads it; torchao allows its own kinds.
        with safe_globals():  # type: ignore[no-untyped-call]
            saved = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # Whatever it is, a later start could not read it either.
        raise BrokenSaveError(f"{file} cannot be read back: {error}") from error
    if live is None:
        return
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]] = zip(iterate_tensors(saved), iterate_tensors(live), strict=True)
    if not all(_is_equal(one, other.cpu()) for one, other in pairs):
        raise BrokenSaveError(f"{file}: a state differs from the optimizer's")


def _is_equal(one: Tensor, other: Tensor) -> bool:
    if not is_traceable_wrapper_subclass(one):
        return torch.equal(one, other)
    # Of fewer bits, which cannot be compared as they are: codes and scales.
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in one.__tensor_flatten__()[0])


def count_bytes(*states: Any) -> int:
    """Return the bytes of all tensors in some states; what is shared is counted once."""
    tensors = {id(tensor): tensor for state in states for tensor in iterate_tensors(state)}
    return sum(tensor.nbytes for tensor in tensors.values())


def describe_dry_run(size: int, seconds: float, plan: DiskPlan) -> str:
    """Return what a dry run showed, in one line: bytes of a checkpoint, seconds, and what the run will take."""
    return (
        f"checkpoints: {_format_bytes(size)} each, written and opened again in {seconds:.1f} s; up to "
        f"{plan.num_checkpoints} of them and the model take {_format_bytes(plan.total_bytes)} of "
        f"{_format_bytes(plan.free_bytes)} free"
    )


def _format_bytes(size: int) -> str:
    return f"{format_count(size).replace('B', 'G')}B"


Task = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Staged:
    """A staged checkpoint.

    Attributes:
        folder: Its own, under a name that is never resumed.
        step: Optimizer steps made before it.
        tasks: They write the files that are not there yet, from copies if training continues meanwhile.
        verify: Opens the files again that this process wrote.
        is_shared: Whether all processes write it; otherwise the main one alone has it.
    """

    folder: Path
    step: int
    tasks: Sequence[Task]
    verify: Task
    is_shared: bool = False


class CheckpointSaver:
    """Saves the checkpoints of a run, whatever is trained; what is in them is said by who stages them.

    Attributes:
        is_main: Whether this process writes what all of them hold.
        group: Of the processes that write a shared checkpoint asynchronously; ``None``: the default one.

    Source: ``tests/training/checkpoints/test_saver.py``, ``tests/training/checkpoints/test_checkpointing.py``.
    """

    def __init__(
        self, args: TrainingArguments, say: Callable[[str], None], *, engine: str = "", data_size: int = 0
    ) -> None:
        """Create a saver without a checkpoint.

        Args:
            args: What is kept, and where; may have a ``save_keep_steps``.
            say: Tells of what is neither a figure nor an error.
            engine: ``FSDP``, ``DEEPSPEED`` or empty, as a launch names it.
            data_size: Groups of processes that take rows of their own; 0 is every process.
        """
        self._data_size = data_size
        self.is_main = bool(args.should_save)
        self._args, self._say, self._engine = args, say, engine
        self._output_dir = Path(str(args.output_dir))
        self._keep_every: int | None = getattr(args, "save_keep_steps", None)
        self._writer = CheckpointWriter()
        self._copy = HostCopy()
        self._copies: bool | None = None  # Known when there are states to be copied.
        self.group: distributed.ProcessGroup | None = None
        self._record: dict[str, Any] = {}

    def open(self, step: int, folder: str = STAGING) -> Path:
        """Return the staging folder of a checkpoint, after the previous one is finished; every process must call.

        Raises:
            FileNotFoundError: The output directory is gone; one made anew would hold a part of the run alone.
        """
        # First: the memory of the host copy, and the staging folder, are those of the one before.
        self.finish()
        WATCHDOG.enter("saving")
        staged = self._output_dir / folder / f"checkpoint-{step}"
        if self.is_main:
            if not self._output_dir.is_dir():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._output_dir))
            shutil.rmtree(staged.parent, ignore_errors=True)
        # Others write into the folder only when what a killed process had left there is gone.
        PartialState().wait_for_everyone()
        return staged

    def decide_to_copy(self, read_states: Callable[[], Sequence[Any]], *, is_shared: bool = False) -> None:
        """Decide with the first checkpoint whether there is memory for a copy, and log if there is not.

        Args:
            read_states: Gives all that training changes; called once.
            is_shared: Whether every process copies its shards, and calls; otherwise the main one alone does.
        """
        if self._copies is not None:
            return
        machine = platform.node()
        # By host name, because ranks of several machines share nothing but the disk.
        num_copies = gather_objects(machine).count(machine) if is_shared else 1
        refusal = self._copy.explain_refusal(*read_states(), num_copies=num_copies)
        if is_shared:
            # All decide alike: a shared save is collective, in a group of its own if it is asynchronous.
            refusal = next(filter(None, gather_objects(refusal)), None)
            # Of its own, because the collective calls of two threads in one group would be matched by chance.
            self.group = None if refusal else new_host_group()
        self._copies = refusal is None
        if refusal:
            self._say(f"training waits while a checkpoint is written: {refusal}")

    def take(self, state: Mapping[str, Any], *, unchanging: Iterable[str] = ()) -> Mapping[str, Any]:
        """Return the state that a task writes: a copy, or the state itself if training waits.

        Args:
            state: Nested mappings and sequences with tensors in them.
            unchanging: Names in ``state`` that nothing changes.
        """
        return self._copy.take(state, unchanging=unchanging) if self._copies else state

    def save(self, staged: Staged, keep: Collection[int] = ()) -> None:
        """Write, verify, hash and rename a checkpoint, then delete older ones. Every process must call.

        Args:
            staged: From all processes.
            keep: Steps whose checkpoints stay.

        Raises:
            BrokenSaveError: Another process could not do its part of it.
        """
        limit = self._args.save_total_limit

        def finish() -> None:
            publish(staged.folder)
            # One that somebody has mounted, or that is another user's, costs room and not the run.
            if kept := rotate(self._output_dir, limit, keep, self._keep_every):
                self._say(f"older checkpoints could not be deleted: {', '.join(kept)}")

        self._write(staged, then=finish)

    def dry_run(
        self,
        stage: Callable[[str], Staged],
        count: Callable[[], int],
        *,
        num_steps: int,
        model_bytes: int,
        num_besides: int = 0,
    ) -> None:
        """Save once, and remove it, as a dry run; every process must call.

        Args:
            stage: Puts a checkpoint together in the folder that it is given; its verification also compares it with
                what is trained.
            count: Gives the bytes of what is trained, before any is written.
            num_steps: Optimizer steps of the run.
            model_bytes: Of the final model.
            num_besides: Checkpoints of certain steps that stay besides.

        Raises:
            ConfigError: The disk cannot hold what the run will keep.
            BrokenSaveError: What was saved is not what is trained; or as ``save``.
        """
        began = time.perf_counter()
        # ``checkpoint-0``, for rollbacks, may still be being written.
        self.finish()
        plan: Callable[[int], DiskPlan] = partial(
            plan_disk,
            model_bytes=model_bytes,
            num_steps=num_steps,
            training=self._args.to_dict(),  # type: ignore[no-untyped-call]
            keep_every=self._keep_every,
            num_besides=num_besides,
        )
        if self.is_main:
            verify_disk(plan(count()), str(self._output_dir))
        staged = stage(DRY_RUN)
        self._write(staged, then=lambda: None)
        # Waits, because it is compared with weights that the next step changes.
        self.finish()
        if not self.is_main:
            return
        size = sum(path.stat().st_size for path in staged.folder.rglob("*") if path.is_file())
        # A network file system keeps a name for what is still mapped into memory; the next start removes what is left.
        shutil.rmtree(staged.folder.parent, ignore_errors=True)
        self._say(describe_dry_run(size, time.perf_counter() - began, plan(size)))
        verify_disk(plan(size), str(self._output_dir))

    def finish(self) -> None:
        """Wait until the checkpoint that is being written has its name; raise what went wrong with it."""
        self._writer.wait()

    def raise_failure(self) -> None:
        """Raise the error of the last checkpoint, without waiting for it; the main process ends the others."""
        if self.is_main:
            self._writer.raise_failure()

    def settle(self) -> None:
        """Finish writing when a run ends by another error, which takes precedence."""
        if (failure := self._writer.settle()) is not None:
            self._say(f"the last checkpoint could not be written: {failure}")

    def _write(self, staged: Staged, then: Task) -> None:
        """Write what is left of a checkpoint, open it again, write its manifest: asynchronously if there is a copy."""
        if not (staged.is_shared or self.is_main):
            return
        facts = self._describe_run(staged.step) if self.is_main else {}
        # No task writes these: what deletes the folder meanwhile takes them along, and tasks would make it anew.
        written = [path for path in staged.folder.rglob("*") if path.is_file()] if self.is_main else []

        def job() -> None:
            if staged.is_shared:
                self._complete_together(staged, written, facts)
            else:
                for task in staged.tasks:
                    task()
                staged.verify()
                _complete(staged.folder, written, facts)
            if self.is_main:
                then()

        if self.group if staged.is_shared else self._copies:
            self._writer.submit(job)
        else:
            job()

    def _complete_together(self, staged: Staged, written: Sequence[Path], facts: Mapping[str, Any]) -> None:
        """Each process verifies what it wrote, in parallel; the main one writes the manifest from all results.

        No process waits for more than the largest share, nor for ever where another one fails.
        """

        def do_own_share() -> dict[str, Any]:
            for task in staged.tasks:
                task()
            staged.verify()
            return flush_files(staged.folder, self._args.process_index, self._args.world_size)

        def complete() -> None:
            if self.is_main:
                _complete(staged.folder, written, facts, files)
                if (wrong := find_wrong_size(staged.folder)) is not None:
                    remedy = "put output_dir on storage that all machines share"
                    raise BrokenSaveError(f"{staged.folder}: {wrong}, which another process wrote; {remedy}")

        # Two rounds: the manifest is written when all files are on the disk, and renamed when it is known to be right.
        files = {name: file for share in self._do_together(do_own_share) for name, file in share.items()}
        self._do_together(complete)

    def _do_together(self, do: Task) -> list[Any]:
        """Run a job on every process, and return all results; raise on all if one failed.

        Raises:
            BrokenSaveError: Another process failed.
        """
        got, failure = None, None
        try:
            got = do()
        except Exception as error:  # It is raised when the others know.
            failure = error
        told = gather_objects((got, failure and f"{type(failure).__name__}: {failure}"), self.group)
        if failure is not None:
            raise failure
        failures = [f"process {rank}: {words}" for rank, (_, words) in enumerate(told) if words]
        if failures:
            raise BrokenSaveError("a checkpoint could not be saved: " + "; ".join(failures))
        return [theirs for theirs, _ in told]

    def _describe_run(self, step: int) -> dict[str, Any]:
        """Return additional fields of the manifest."""
        # That of the first save: where somebody deletes the file, the run is known by its checkpoints alone.
        self._record = record = self._record or read_run_record(self._output_dir)
        return {
            "step": step,
            "world_size": self._args.world_size,
            "data_size": self._data_size or self._args.world_size,
            **{key: getattr(self._args, key) for key in (*BATCH_KEYS, GENERATION_KEY) if hasattr(self._args, key)},
            "engine": self._engine,
            **{key: record.get(key) for key in ("config_fingerprint", "versions")},
            # By which the run is resumed where its own record is lost.
            "run": {key: record[key] for key in RECORDED if key in record},
        }


def _complete(
    folder: Path, written: Sequence[Path], facts: Mapping[str, Any], files: Mapping[str, Any] | None = None
) -> None:
    """As ``write_complete``, if the files that were there before the tasks still are.

    Raises:
        FileNotFoundError: One of them is gone.
    """
    if gone := [path for path in written if not path.exists()]:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(gone[0]))
    write_complete(folder, files, **facts)


def write_state(state: Any, path: Path) -> None:
    """Write an optimizer's or a schedule's state, tensors and numbers alone."""
    # Given a path, torch says of a full disk no more than that something is wrong with a stream.
    with path.open("wb") as file:
        torch.save(state, file)
