"""Checkpoint saving: stage, copy to host memory, write in a thread, reopen, hash, rename atomically; the dry run."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
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
from torch.utils._pytree import tree_leaves
from transformers import TrainingArguments
from transformers.trainer_pt_utils import safe_globals

from recipes_lib.files import explain_write_errors, find_record
from recipes_lib.hardware import read_free_memory
from recipes_lib.models.saved_weights import BrokenSaveError
from recipes_lib.planning.disk import DiskPlan, plan_disk, verify_disk
from recipes_lib.processes import explain_lost_connection
from recipes_lib.quantities import format_bytes
from recipes_lib.training.checkpoints import manifest
from recipes_lib.training.collectives import gather_objects, new_host_group
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.layouts.fsdp import get_local
from recipes_lib.training.run import RECORDED, RUN_FILE

_MEMORY_SHARE: Final = 0.8
"""Largest fraction of the free host memory that a copy may take."""


def write_in_background(job: Callable[[], None]) -> Future[None]:
    """Run a job in a daemon thread, on the GPU of this one; return its future, which raises the job's exception."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    writing: Future[None] = Future()

    def run() -> None:
        try:
            if device is not None:
                # A new thread uses GPU 0, where torch's writer would allocate a CUDA context for every process.
                torch.cuda.set_device(device)
            job()
        except BaseException as error:
            writing.set_exception(error)
        else:
            writing.set_result(None)

    # A daemon thread, so that a hanging disk cannot block the exit of the process.
    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return writing


class HostCopy:
    """Copy of the trainable tensors in host memory, which is allocated once and reused by every checkpoint.

    Source: the stager of ``torch.distributed.checkpoint.staging``. It preserves storage sharing, so that the files are
    identical to those of a synchronous save; ``tests/training/checkpoints/test_writer.py``.
    """

    def __init__(self) -> None:
        """Create the stager without allocating memory."""
        # Not ``is_available``: a run on the CPU would pin memory, and so open a context on a GPU that others may use.
        self._has_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        # Not the public DefaultStager: in torch 2.11 and 2.12 it closes this inner class after the first copy, so the
        # memory is not reused and the second copy fails with ``KeyError: <class 'type'>`` (pytorch/torchtitan #3476).
        # Use DefaultStager once torch 2.13 is the lowest supported version.
        self._stager = StateDictStager(pin_memory=self._has_device)

    @staticmethod
    def explain_refusal(*states: Any, num_copies: int = 1) -> str | None:
        """Return why these states cannot be copied, such as a lack of memory; ``None`` if they can.

        Args:
            *states: Nested mappings and sequences of tensors; of a ``DTensor`` only the local shard is copied.
            num_copies: Number of processes on this machine that make a copy of this size.
        """
        shards = [get_local(tensor) for tensor in list_tensors(*states)]
        kinds = {type(tensor).__name__ for tensor in shards} - {"Tensor", "Parameter", "Buffer"}
        if kinds:
            return f"states of type {min(kinds)} cannot be copied"
        num_bytes = num_copies * sum(tensor.nbytes for tensor in shards)
        free = read_free_memory()
        if num_bytes <= _MEMORY_SHARE * free:
            return None
        return f"a copy takes {format_bytes(num_bytes)} and {format_bytes(free)} of memory are free"

    def take(self, state: Mapping[str, Any], *, unchanging: Iterable[str] = ()) -> dict[str, Any]:
        """Return a copy of a state in host memory, which overwrites the previous copy.

        Args:
            state: Nested mappings and sequences of tensors.
            unchanging: Top-level names in ``state`` of constant tensors, which are returned without a copy.
        """
        shared = set(unchanging)
        changing = {name: value for name, value in state.items() if name not in shared}
        copied: Any = self._stager.stage(changing, non_blocking=self._has_device)
        if self._has_device:
            # The copies are asynchronous, and the next optimizer step overwrites their sources.
            torch.accelerator.synchronize()
        return {name: state[name] if name in shared else copied[name] for name in state}


def iterate_tensors(state: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested dictionaries and sequences, in order."""
    return (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


def list_tensors(*states: Any) -> list[Tensor]:
    """Return the tensors in nested states, each tensor object once, as tied weights are copied once."""
    return list({id(tensor): tensor for tensor in iterate_tensors(states)}.values())


def is_adapter(model: nn.Module) -> bool:
    """Return whether a model is a PEFT model, of which only the adapter is saved."""
    return hasattr(model, "peft_config")


def list_frozen(model: nn.Module) -> list[str]:
    """Return the names of all frozen parameters, including every name of a tied one."""
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, tensor in named if not tensor.requires_grad]


def compare_weights(file: Path, live: Mapping[str, torch.Tensor]) -> None:
    """Compare a safetensors file with the live weights, bit for bit.

    Raises:
        BrokenSaveError: A tensor differs.
    """
    differing = [name for name, saved in load_file(file).items() if not torch.equal(saved, live[name].cpu())]
    if differing:
        raise BrokenSaveError(f"{file}: {', '.join(differing)} differ from the weights in memory")


def compare_state(file: Path, live: Any = None) -> None:
    """Load a state file as resuming does, and compare its tensors with ``live`` bit for bit.

    Args:
        file: File written by ``torch.save``.
        live: State dict in memory; ``None``: only test that the file can be loaded.

    Raises:
        BrokenSaveError: A tensor differs, or the file cannot be loaded with ``weights_only``.
    """
    try:
        # Allows numpy's random state, as upstream does when it loads one; torchao registers its own classes.
        with safe_globals():  # type: ignore[no-untyped-call]
            saved = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # Any error here would also make resuming fail.
        raise BrokenSaveError(f"{file} cannot be read back: {error}") from error
    if live is None:
        return
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]] = zip(iterate_tensors(saved), iterate_tensors(live), strict=True)
    if not all(_is_equal(one, other.cpu()) for one, other in pairs):
        raise BrokenSaveError(f"{file}: a state differs from the optimizer state in memory")


def _is_equal(one: Tensor, other: Tensor) -> bool:
    if not is_traceable_wrapper_subclass(one):
        return torch.equal(one, other)
    # Quantised states (torchao) have no elementwise comparison: compare their codes and scales.
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in one.__tensor_flatten__()[0])


def count_bytes(*states: Any) -> int:
    """Return the total bytes of all tensors in nested states, each tensor object counted once."""
    return sum(tensor.nbytes for tensor in list_tensors(*states))


def describe_dry_run(size: int, seconds: float, plan: DiskPlan) -> str:
    """Return the log line of a dry run: size of a checkpoint, seconds to write it, and disk space of the whole run."""
    return (
        f"checkpoints: {format_bytes(size)} each, written and opened again in {seconds:.1f} s; up to "
        f"{plan.num_checkpoints} of them and the model take {format_bytes(plan.total_bytes)} of "
        f"{format_bytes(plan.free_bytes)} free"
    )


Task = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Staged:
    """A staged checkpoint.

    Attributes:
        folder: Staging folder of the checkpoint.
        step: Number of finished optimizer steps.
        tasks: Functions that write the remaining files, from host copies if training continues in the meantime.
        verify: Function that reopens the files that this process wrote.
    """

    folder: Path
    step: int
    tasks: Sequence[Task]
    verify: Task


class CheckpointSaver:
    """Writes, verifies, publishes and rotates the checkpoints of a run; the caller stages their content.

    Attributes:
        is_main: Whether this process writes replicated files and the manifest.
        group: Process group for collectives of the writer threads; ``None``: the default group.

    Source: ``tests/training/checkpoints/test_saver.py``, ``tests/training/checkpoints/test_checkpointing.py``.
    """

    def __init__(
        self, args: TrainingArguments, say: Callable[[str], None], *, engine: str = "", data_size: int = 0
    ) -> None:
        """Create a saver.

        Args:
            args: Training arguments: output directory, retention; may have an attribute ``save_keep_steps``.
            say: Logger for messages to the user.
            engine: Sharding engine, under which every process writes its shards: ``FSDP`` or ``DEEPSPEED``; empty: only
                the main process writes.
            data_size: Number of data-parallel ranks; 0: the world size.
        """
        self._data_size = data_size
        self.is_main = bool(args.should_save)
        self._args, self._say, self._engine = args, say, engine
        self._output_dir = Path(str(args.output_dir))
        self._keep_every: int | None = getattr(args, "save_keep_steps", None)
        self._writing: Future[None] | None = None  # Of the current checkpoint, until its result is read.
        self._copy = HostCopy()
        self._copies: bool | None = None  # Decided with the first checkpoint, when the states exist.
        self.group: distributed.ProcessGroup | None = None
        self._record: dict[str, Any] = {}

    def open(self, step: int, folder: str = manifest.STAGING) -> Path:
        """Return the staging folder of a checkpoint, after the previous one is finished; every process must call.

        Args:
            step: Number of finished optimizer steps.
            folder: Folder of staged checkpoints in the output directory.

        Raises:
            FileNotFoundError: The output directory was deleted. It is not created again, because the result would hold
                only a part of the run.
        """
        # First, because the previous checkpoint uses the same host memory and staging folder.
        self.finish()
        WATCHDOG.enter("saving")
        staged = self._output_dir / folder / f"checkpoint-{step}"
        if self.is_main:
            if not self._output_dir.is_dir():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._output_dir))
            shutil.rmtree(staged.parent, ignore_errors=True)
        # Other ranks may write into the folder only after leftovers of a killed process are removed.
        PartialState().wait_for_everyone()
        return staged

    def decide_to_copy(self, states: Any) -> None:
        """Decide, once per run, whether host memory suffices for asynchronous saving; log if it does not.

        Every process that writes must call.

        Args:
            states: All states that training changes: nested mappings and sequences of tensors.
        """
        if self._copies is not None:
            return
        machine = platform.node()
        # Processes with the same host name share the memory of one machine.
        num_copies = gather_objects(machine).count(machine) if self._engine else 1
        refusal = self._copy.explain_refusal(states, num_copies=num_copies)
        if self._engine:
            # All ranks must decide alike, because a shared save makes collective calls.
            refusal = next(filter(None, gather_objects(refusal)), None)
            # A separate process group: collectives of the training and the writer thread in one group would be matched
            # in arbitrary order.
            self.group = None if refusal else new_host_group()
        self._copies = refusal is None
        if refusal:
            self._say(f"training waits while a checkpoint is written: {refusal}")

    def take(self, state: Mapping[str, Any], *, unchanging: Iterable[str] = ()) -> Mapping[str, Any]:
        """Return the state for a task to write: a host copy, or ``state`` itself if training waits.

        Args:
            state: Nested mappings and sequences of tensors.
            unchanging: Top-level names in ``state`` of constant tensors, which are not copied.
        """
        return self._copy.take(state, unchanging=unchanging) if self._copies else state

    def save(self, staged: Staged, keep: Collection[int] = ()) -> None:
        """Write, verify, hash and rename a checkpoint, then delete older ones; every process must call.

        Args:
            staged: Staged checkpoint, the same step on all processes.
            keep: Steps whose checkpoints are exempt from deletion.

        Raises:
            BrokenSaveError: Saving failed on another process.
        """
        limit = self._args.save_total_limit

        def finish() -> None:
            manifest.publish(staged.folder)
            # A checkpoint that cannot be deleted, such as a mount point or another user's folder, must not end the run.
            if failures := manifest.rotate(self._output_dir, limit, keep, self._keep_every):
                self._say(f"older checkpoints could not be deleted: {', '.join(failures)}")

        self._write(staged, then=finish)

    def dry_run(self, stage: Callable[[str], Staged], count: Callable[[], int], **facts: Any) -> None:
        """Save a checkpoint, verify it, measure it and delete it; every process must call.

        Args:
            stage: Stages a checkpoint in the given folder; its ``verify`` also compares files with the live state.
            count: Returns the expected bytes of a checkpoint, before one is written.
            **facts: Arguments of ``plan_disk`` about the run: ``num_steps``, ``num_epochs``, ``model_bytes`` and
                ``num_protected``.

        Raises:
            ConfigError: The disk cannot hold the checkpoints that the run will keep, or cannot rename folders.
            BrokenSaveError: A saved state differs from the live one, or saving failed on another process.
        """
        began = time.perf_counter()
        # ``checkpoint-0``, the target of rollbacks, may still be in the writer thread.
        self.finish()
        facts |= {"training": self._args.to_dict(), "keep_every": self._keep_every}  # type: ignore[no-untyped-call]
        plan: Callable[[int], DiskPlan] = partial(plan_disk, **facts)
        if self.is_main:
            verify_disk(plan(count()), str(self._output_dir))
        staged = stage(manifest.DRY_RUN)
        self._write(staged, then=lambda: None)
        # Waits, because the files are compared with live weights, which the next step changes.
        self.finish()
        PartialState().wait_for_everyone()  # The main process has written the manifest.
        if not self.is_main:
            return
        size = sum(path.stat().st_size for path in staged.folder.rglob("*") if path.is_file())
        # Publishing renames a folder, which some network mounts (S3, FUSE) cannot: find out before the first save.
        with explain_write_errors(self._output_dir, "choose another output_dir", "cannot rename a folder in it"):
            staged.folder.rename(staged.folder.with_name("renamed"))
        # Errors are ignored: NFS keeps ``.nfs*`` names of files that are still mapped. The next start removes the rest.
        shutil.rmtree(staged.folder.parent, ignore_errors=True)
        self._say(describe_dry_run(size, time.perf_counter() - began, plan(size)))
        verify_disk(plan(size), str(self._output_dir))

    def finish(self) -> None:
        """Wait until the current checkpoint is published; raise its error, once."""
        if self._writing is not None:
            wait([self._writing])  # After an interrupt here, ``settle`` waits again.
            writing, self._writing = self._writing, None
            writing.result()

    def raise_failure(self) -> None:
        """Raise the error of a finished write on the main process, whose exit ends the others; do not wait."""
        if self.is_main and self._writing is not None and self._writing.done():
            self.finish()

    def settle(self) -> None:
        """Wait for the writer when a run ends; log its error instead of raising, as another error may be under way.

        If that is of a rank that does not answer, a writer of shards would wait for that rank without a limit.
        """
        error = sys.exception()
        if self._engine and error is not None and explain_lost_connection(error) is not None:
            return
        if self._writing is not None and (failure := self._writing.exception()) is not None:
            self._say(f"the last checkpoint could not be written: {failure}")

    def _write(self, staged: Staged, then: Task) -> None:
        """Write the remaining files, verify them and write the manifest; in the thread if there is a host copy.

        Each process writes and verifies its files in parallel; the main process writes the manifest from all results.
        """
        if not (self._engine or self.is_main):
            return
        facts = self._describe_run(staged.step) if self.is_main else {}
        # Files that exist before the tasks run. If the folder is deleted now, tasks create it again without them, which
        # ``complete`` detects.
        written = [path for path in staged.folder.rglob("*") if path.is_file()] if self.is_main else []

        def complete(files: Mapping[str, Any]) -> None:
            if gone := [path for path in written if not path.exists()]:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(gone[0]))
            if self.is_main:
                manifest.write_complete(staged.folder, files, **facts)
                if (wrong := manifest.find_wrong_size(staged.folder)) is not None:
                    remedy = "put output_dir on storage that all machines share"
                    raise BrokenSaveError(f"{staged.folder}: {wrong}, which another process wrote; {remedy}")

        def job() -> None:
            # Two rounds: the manifest is written after all files are flushed, and verified before the rename.
            shares = self._do_together(partial(self._write_share, staged))
            self._do_together(partial(complete, {name: file for share in shares for name, file in share.items()}))
            if self.is_main:
                then()

        if self._copies:
            self._writing = write_in_background(job)
        else:
            job()

    def _write_share(self, staged: Staged) -> dict[str, Any]:
        """Write and verify the remaining files of this process, flush them, and return their sizes and hashes."""
        for task in staged.tasks:
            task()
        staged.verify()
        # A main process that writes alone also flushes the random states of the others.
        share = (self._args.process_index, self._args.world_size) if self._engine else (0, 1)
        return manifest.flush_files(staged.folder, *share)

    def _do_together(self, do: Task) -> list[Any]:
        """Run a job on every process that writes, and return the results by rank; raise on all of them if one failed.

        Raises:
            BrokenSaveError: The job failed on another process.
        """
        result, failure = None, None
        try:
            result = do()
        except Exception as error:  # Raised after the collective call, which the other ranks wait in.
            failure = error
        outcome = result, failure and f"{type(failure).__name__}: {failure}"
        outcomes = gather_objects(outcome, self.group) if self._engine else [outcome]
        if failure is not None:
            raise failure
        failures = [f"process {rank}: {message}" for rank, (_, message) in enumerate(outcomes) if message]
        if failures:
            raise BrokenSaveError("a checkpoint could not be saved: " + "; ".join(failures))
        return [result for result, _ in outcomes]

    def _describe_run(self, step: int) -> dict[str, Any]:
        """Return the fields of the manifest besides the files."""
        # Cached from the first save, so that later manifests describe the run even if run.json is deleted.
        self._record = record = self._record or find_record(self._output_dir / RUN_FILE)
        return {
            "step": step,
            "world_size": self._args.world_size,
            "data_size": self._data_size or self._args.world_size,
            **{
                key: getattr(self._args, key)
                for key in (*manifest.BATCH_KEYS, manifest.GENERATION_KEY)
                if hasattr(self._args, key)
            },
            "engine": self._engine,
            "versions": record.get("versions"),
            # Lets a run resume if its run.json is lost.
            "run": {key: record[key] for key in RECORDED if key in record},
        }


def write_state(state: Any, path: Path) -> None:
    """Write the state dict of an optimizer or a scheduler with ``torch.save``."""
    # An open file instead of a path: for a path torch reports a full disk as "unexpected pos" instead of an OSError.
    with path.open("wb") as file:
        torch.save(state, file)
