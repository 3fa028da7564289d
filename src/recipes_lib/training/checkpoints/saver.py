"""Checkpoint saving: staged, written, reopened, hashed, renamed atomically; in a thread where possible."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import TrainingArguments

from recipes_lib.models.saved_weights import BrokenSaveError
from recipes_lib.planning.disk import DiskPlan, plan_disk, verify_disk
from recipes_lib.training.checkpoints.dry_run import describe_dry_run
from recipes_lib.training.checkpoints.manifest import (
    REHEARSAL,
    STAGING,
    find_wrong_size,
    flush_files,
    publish,
    rotate,
    write_complete,
)
from recipes_lib.training.checkpoints.resume import BATCH_KEYS, GENERATION_KEY
from recipes_lib.training.checkpoints.writer import CheckpointWriter, HostCopy
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.run import RECORDED, read_run_record

Task = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Staged:
    """A checkpoint that is put together.

    Attributes:
        folder: Its own, under a name that is never resumed.
        step: Optimizer steps made before it.
        tasks: They write the files that are not there yet, from copies where training goes on meanwhile.
        verify: Opens the files again that this process wrote.
        is_shared: Whether all processes wrote it; otherwise the main one alone has it.
    """

    folder: Path
    step: int
    tasks: Sequence[Task]
    verify: Task
    is_shared: bool = False


class CheckpointSaver:
    """Saves the checkpoints of a run, whatever is trained; what is in them is said by who stages them.

    Source: ``tests/training/checkpoints/test_saver.py``, ``tests/training/checkpoints/test_checkpointing.py``.
    """

    def __init__(self, args: TrainingArguments, say: Callable[[str], None], *, engine: str = "") -> None:
        """Save nothing yet.

        Args:
            args: What is kept, and where; may have a ``save_keep_steps``.
            say: Tells of what is neither a figure nor an error.
            engine: ``FSDP``, ``DEEPSPEED`` or empty, as a launch names it.
        """
        self._args, self._say, self._engine = args, say, engine
        self._output_dir = Path(str(args.output_dir))
        self._keep_every: int | None = getattr(args, "save_keep_steps", None)
        self._writer = CheckpointWriter()
        self._copy = HostCopy()
        self._copies: bool | None = None  # Known when there are states to be copied.

    @property
    def is_main(self) -> bool:
        """Whether this process writes what all of them hold."""
        return bool(self._args.should_save)

    def open(self, step: int, folder: str = STAGING) -> Path:
        """Return where a checkpoint is put together, when the one before has its name; every process must call.

        Raises:
            FileNotFoundError: The output directory is gone; one made anew would hold a part of the run alone.
        """
        self.finish()
        WATCHDOG.enter("saving")
        staged = self._output_dir / folder / f"checkpoint-{step}"
        if self._args.should_save:
            if not self._output_dir.is_dir():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._output_dir))
            shutil.rmtree(staged.parent, ignore_errors=True)
        PartialState().wait_for_everyone()
        return staged

    def decide_to_copy(self, read_states: Callable[[], Sequence[Any]]) -> None:
        """Decide with the first checkpoint whether there is memory for a copy, and tell if there is not.

        Args:
            read_states: Gives all that training changes; called once.
        """
        if self._copies is None:
            refusal = self._copy.explain_refusal(*read_states())
            self._copies = refusal is None
            if refusal:
                self._say(f"training waits while a checkpoint is written: {refusal}")

    def take(self, state: Mapping[str, Any], *, unchanging: Iterable[str] = ()) -> Mapping[str, Any]:
        """Return what a task may write from: a copy, or the state itself where training waits.

        Args:
            state: Nested mappings and sequences with tensors in them.
            unchanging: Names in ``state`` that nothing changes.
        """
        return self._copy.take(state, unchanging=unchanging) if self._copies else state

    def save(self, staged: Staged, keep: Collection[int] = ()) -> None:
        """Have a checkpoint written, opened again, sealed and named; then older ones may go. Every process must call.

        Args:
            staged: From all processes.
            keep: Steps whose checkpoints stay.

        Raises:
            BrokenSaveError: Another process could not do its part of it.
        """
        limit = self._args.save_total_limit

        def finish() -> None:
            publish(staged.folder)
            rotate(self._output_dir, limit, keep, self._keep_every)

        self._write(staged, then=finish)

    def dry_run(
        self,
        stage: Callable[[str], Staged],
        compare: Callable[[Path], None],
        count: Callable[[], int],
        *,
        num_steps: int,
        model_bytes: int,
        num_besides: int = 0,
    ) -> None:
        """Do all that saving takes once, hold it against what is trained, and leave nothing behind; every process must.

        Args:
            stage: Puts a checkpoint together in the folder that it is given.
            compare: Raises if a checkpoint is not what is trained.
            count: Gives the bytes of what is trained, before any is written.
            num_steps: Optimizer steps of the run.
            model_bytes: Of the final model.
            num_besides: Checkpoints of certain steps that stay besides.

        Raises:
            ConfigError: The disk cannot hold what the run will keep.
            BrokenSaveError: What was saved is not what is trained; or as ``save``.
        """
        began = time.perf_counter()
        # The very beginning may still be on its way to the disk, to be gone back to.
        self.finish()
        plan: Callable[[int], DiskPlan] = partial(
            plan_disk,
            model_bytes=model_bytes,
            num_steps=num_steps,
            training=self._args.to_dict(),  # type: ignore[no-untyped-call]
            keep_every=self._keep_every,
            num_besides=num_besides,
        )
        if self._args.should_save:
            verify_disk(plan(count()), str(self._output_dir))
        staged = stage(REHEARSAL)
        self._write(staged, then=lambda: None)
        self.finish()
        if not self._args.should_save:
            return
        compare(staged.folder)
        size = sum(path.stat().st_size for path in staged.folder.rglob("*") if path.is_file())
        shutil.rmtree(staged.folder.parent)
        self._say(describe_dry_run(size, time.perf_counter() - began, plan(size)))
        verify_disk(plan(size), str(self._output_dir))

    def finish(self) -> None:
        """Wait until the checkpoint that is being written has its name; raise what went wrong with it."""
        self._writer.wait()

    def raise_failure(self) -> None:
        """Raise what went wrong with the last checkpoint, without waiting for it."""
        self._writer.raise_failure()

    def settle(self) -> None:
        """Leave none half-written when a run ends by another error, which matters more than one of writing."""
        if (failure := self._writer.settle()) is not None:
            self._say(f"the last checkpoint could not be written: {failure}")

    def _write(self, staged: Staged, then: Task) -> None:
        """Write what is left of a checkpoint, open it again and seal it: beside training where there is a copy."""
        if staged.is_shared:
            self._seal_together(staged)
            if self.is_main:
                then()
            return

        def job() -> None:
            for task in staged.tasks:
                task()
            staged.verify()
            write_complete(staged.folder, **facts)
            then()

        if self.is_main:
            facts = self._describe_run(staged.step)
            if self._copies:
                self._writer.submit(job)
            else:
                job()

    def _seal_together(self, staged: Staged) -> None:
        """Have each process read what it wrote, at once; the main one seals what all of them found.

        No process waits for more than the largest share, nor for ever where another one fails.
        """

        def do_own_share() -> dict[str, Any]:
            for task in staged.tasks:
                task()
            staged.verify()
            return flush_files(staged.folder, self._args.process_index, self._args.world_size)

        def seal() -> None:
            if self.is_main:
                write_complete(staged.folder, files, **self._describe_run(staged.step))
                if (wrong := find_wrong_size(staged.folder)) is not None:
                    remedy = "put output_dir on storage that all machines share"
                    raise BrokenSaveError(f"{staged.folder}: {wrong}, which another process wrote; {remedy}")

        files = {name: file for share in self._do_together(do_own_share) for name, file in share.items()}
        self._do_together(seal)

    def _do_together(self, do: Task) -> list[Any]:
        """Return what each process got; where one failed, all end.

        Raises:
            BrokenSaveError: Another process failed.
        """
        got, failure = None, None
        try:
            got = do()
        except Exception as error:  # It is raised when the others know.
            failure = error
        told = gather_object([(got, failure and f"{type(failure).__name__}: {failure}")])
        if failure is not None:
            raise failure
        failures = [f"process {rank}: {words}" for rank, (_, words) in enumerate(told) if words]
        if failures:
            raise BrokenSaveError("a checkpoint could not be saved: " + "; ".join(failures))
        return [theirs for theirs, _ in told]

    def _describe_run(self, step: int) -> dict[str, Any]:
        """What the seal says besides."""
        record = read_run_record(self._output_dir)
        return {
            "step": step,
            "world_size": self._args.world_size,
            "data_size": read_launch().data_size,
            **{key: getattr(self._args, key) for key in (*BATCH_KEYS, GENERATION_KEY) if hasattr(self._args, key)},
            "engine": self._engine,
            **{key: record.get(key) for key in ("config_fingerprint", "versions")},
            # By which the run is resumed where its own record is lost.
            "run": {key: record[key] for key in RECORDED if key in record},
        }


def write_state(state: Any, path: Path) -> None:
    """Write an optimizer's or a schedule's state, tensors and numbers alone."""
    # Given a path, torch says of a full disk no more than that something is wrong with a stream.
    with path.open("wb") as file:
        torch.save(state, file)
