"""How every stage saves and resumes: beside training, sealed, rehearsed at the first step, kept by our rules."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.planning.disk import DiskPlan, plan_disk, verify_disk
from recipes_lib.training.checkpoint_writer import CheckpointWriter, HostCopy
from recipes_lib.training.checkpoints import REHEARSAL, STAGING, publish, rotate, write_complete
from recipes_lib.training.observer import Observer
from recipes_lib.training.rehearsal import (
    compare_with_live,
    count_bytes,
    describe_rehearsal,
    is_adapter,
    read_expected,
    verify_saved,
)
from recipes_lib.training.resumption import BATCH_KEYS, seed_process
from recipes_lib.training.run import read_run_record
from recipes_lib.training.watchdog import WATCHDOG

Task = Callable[[], object]


class CheckpointingTrainer(Trainer):
    """Upstream's trainer with checkpoints that are whole or not there, and that training does not wait for.

    Upstream writes every small file. Weights and optimizer states, where each process holds all of them, are copied to
    host memory and written by a thread; sharded ones are written by upstream while training waits
    (``docs/decisions/0007-asynchronous-checkpoints.md``).

    Source: ``tests/training/test_checkpointing.py``.
    """

    observer: Observer
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer

    def __init__(self, **options: Any) -> None:
        """Set upstream's trainer up.

        Args:
            **options: As upstream's trainer; ``args`` may have a ``save_keep_steps``.
        """
        super().__init__(**options)
        self._keep_every: int | None = getattr(self.args, "save_keep_steps", None)
        self._writer = CheckpointWriter()
        self._copy = HostCopy()
        self._copies: bool | None = None  # Known when there are states to be copied.
        self._is_rehearsed = False
        self._staging: Path | None = None  # Only while a checkpoint is put together.
        self._tasks: list[Task] = []
        self._own_tokenizer: Any = None

    @property
    def is_replicated(self) -> bool:
        """True where every process holds the whole model and all states of its optimizer."""
        is_sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        return not is_sharded and not getattr(self, "is_distributed_loading_by_transformers", False)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from the checkpoint that the main process names, and leave none half-written, however it ends.

        Raises:
            ConfigError: A process cannot see that checkpoint, or has planned another batch.
        """
        agreed = self._agree(resume_from_checkpoint)
        try:
            return super().train(agreed, *args, **kwargs)
        finally:
            # Only after another error is one left here.
            if (failure := self._writer.settle()) is not None:
                self.observer.progress.say(f"the last checkpoint could not be written: {failure}")

    def finish_saving(self) -> None:
        """Wait until the checkpoint that is being written has its name; raise what went wrong with it."""
        self._writer.wait()

    def kept_steps(self) -> set[int]:
        """Return the steps whose checkpoints are never deleted: that of the best one."""
        best = self.state.best_model_checkpoint
        return set() if best is None else {int(best.rpartition("-")[2])}

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any, model: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        """Stop a run whose last checkpoint could not be written; rehearse the first one when its states exist."""
        self._writer.raise_failure()
        if self.state.global_step == 1 and self.args.save_strategy != SaveStrategy.NO and not self._is_rehearsed:
            self._is_rehearsed = True
            self._rehearse(model)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Put a checkpoint together and have it written, opened again, sealed and named; then older ones may go."""
        self.finish_saving()
        output_dir = Path(str(self.args.output_dir))
        staged = self._stage(model, STAGING)
        if self.args.should_save:
            limit, keep = self.args.save_total_limit, self.kept_steps()

            def finish() -> None:
                publish(staged)
                rotate(output_dir, limit, keep, self._keep_every)

            self._write(staged, then=finish)
        if self.args.push_to_hub:
            self.finish_saving()
            self._push_from_checkpoint(str(output_dir / staged.name))

    def _rehearse(self, model: nn.Module) -> None:
        """Do all that saving takes once, hold the result against the live model, and leave nothing behind.

        Raises:
            ConfigError: The disk cannot hold what the run will keep.
            BrokenSaveError: What was saved is not what is trained.
        """
        began = time.perf_counter()
        # The very beginning may still be on its way to the disk, to be gone back to.
        self.finish_saving()
        if self.args.should_save:
            needed = count_bytes(self._list_trained(), self.optimizer.state_dict())
            verify_disk(self._plan_disk(needed), str(self.args.output_dir))
        stored = copy.deepcopy(self.state.stateful_callbacks)
        staged = self._stage(model, REHEARSAL)
        self.state.stateful_callbacks = stored
        if not self.args.should_save:
            return
        self._write(staged, then=lambda: None)
        self.finish_saving()
        if self.is_replicated:
            compare_with_live(staged, self.model, self.optimizer)
        size = sum(path.stat().st_size for path in staged.rglob("*") if path.is_file())
        shutil.rmtree(staged.parent)
        plan = self._plan_disk(size)
        self.observer.progress.say(describe_rehearsal(size, time.perf_counter() - began, plan))
        verify_disk(plan, str(self.args.output_dir))

    def _stage(self, model: nn.Module, folder: str) -> Path:
        """Have upstream write a checkpoint under another name, but for what is left in ``_tasks``."""
        WATCHDOG.enter("saving")
        output_dir, step = Path(str(self.args.output_dir)), self.state.global_step
        staged = output_dir / folder / f"checkpoint-{step}"
        if self.args.should_save:
            shutil.rmtree(staged.parent, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        before = self.args.save_total_limit, self.args.push_to_hub
        # Upstream would delete and upload while this one is not known to be whole.
        self.args.save_total_limit, self.args.push_to_hub = None, False
        self._staging, self._tasks = staged.parent, []
        try:
            Trainer._save_checkpoint(self, model, None)
        finally:
            self._staging = None
            self.args.save_total_limit, self.args.push_to_hub = before
        # Upstream looks for the best one where it writes.
        best = output_dir / f"checkpoint-{self.state.best_global_step}"
        if self.state.best_global_step == step or best.is_dir():
            self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            self.state.save_to_json(str(staged / TRAINER_STATE_NAME))
        # The random states of all processes are there.
        self.accelerator.wait_for_everyone()
        return staged

    def _write(self, staged: Path, then: Task) -> None:
        """Write what is left of a checkpoint, open it again and seal it: beside training where there is a copy."""
        tasks, expected = self._tasks, read_expected(self.model, is_replicated=self.is_replicated)
        record = read_run_record(Path(str(self.args.output_dir)))
        facts = {
            "step": self.state.global_step,
            "world_size": self.args.world_size,
            **{key: getattr(self.args, key) for key in BATCH_KEYS},
            "engine": "FSDP" if self.is_fsdp_enabled else "DEEPSPEED" if self.is_deepspeed_enabled else "",
            **{key: record.get(key) for key in ("config_fingerprint", "versions")},
        }

        def job() -> None:
            for task in tasks:
                task()
            # A pickle, which nothing reads; run.json says more.
            (staged / "training_args.bin").unlink(missing_ok=True)
            verify_saved(staged, expected, is_replicated=self.is_replicated)
            write_complete(staged, **facts)
            then()

        self._tasks = []
        if self._copies:
            self._writer.submit(job)
        else:
            job()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Leave the weights to the thread while a checkpoint is put together; otherwise do as upstream."""
        if self._staging is None or not self.is_replicated:
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            folder = Path(str(output_dir))
            folder.mkdir(parents=True, exist_ok=True)  # Another process may have its random state there.
            state = self.model.state_dict()
            if self._decide_to_copy(state):
                named = self.model.named_parameters(remove_duplicate=False)
                frozen = [name for name, tensor in named if not tensor.requires_grad]
                state = self._copy.take(state, unchanging=frozen)
            self._tasks.append(partial(self._write_model, folder, state))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Leave the optimizer's states to the thread, where each process holds all of them."""
        if not self.is_replicated:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            assert self.lr_scheduler is not None
            state: Any = self.optimizer.state_dict()
            if self._copies:
                state = self._copy.take(state)
            self._tasks.append(partial(_save_state, state, Path(output_dir) / OPTIMIZER_NAME))
            _save_state(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _write_model(self, folder: Path, state: dict[str, Any]) -> None:
        # By the names that upstream will load into the model: by those of publication it would skip experts in
        # silence. Whether embeddings were resized would be asked of the Hub.
        options: Any = {"save_embedding_layers": False} if is_adapter(self.model) else {"save_original_format": False}
        self.model.save_pretrained(folder, state_dict=state, **options)
        # A tokenizer cannot be written by one thread while another pads with it.
        self._own_tokenizer.save_pretrained(folder)

    def _decide_to_copy(self, state: dict[str, Any]) -> bool:
        """Decide with the first checkpoint whether there is memory for a copy, and tell if there is not."""
        if self._copies is None:
            self._own_tokenizer = copy.deepcopy(self.processing_class)
            refusal = self._copy.explain_refusal(self._list_trained(), self.optimizer.state_dict())
            self._copies = refusal is None
            if refusal:
                self.observer.progress.say(f"training waits while a checkpoint is written: {refusal}")
        return self._copies

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _finalize_training(self, *args: Any) -> Any:
        """Wait for the last checkpoint, which may be the best one, and let upstream delete none."""
        self.finish_saving()
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args)  # type: ignore[no-untyped-call]
        finally:
            self.args.save_total_limit = limit

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set the random states that were stored for this process; without any, those of the seed, step and rank."""
        rank = self.args.process_index
        name = "rng_state.pth" if self.args.world_size == 1 else f"rng_state_{rank}.pth"
        if checkpoint is not None and not (Path(checkpoint) / name).is_file():
            seed_process(self.args.seed, self.state.global_step, rank)
        else:
            super()._load_rng_state(checkpoint)

    def _agree(self, resume_from: str | Path | None) -> str | None:
        """Return the checkpoint of the main process."""
        accumulation = self.args.gradient_accumulation_steps
        chosen = [None if resume_from is None else str(resume_from), accumulation]
        if self.args.world_size > 1:
            broadcast_object_list(chosen)
        name = f"process {self.args.process_index}"
        if chosen[1] != accumulation:
            found = f"has planned {accumulation} micro-batches a step and the main process {chosen[1]}"
            raise ConfigError(Problem(name, found, "run the same command again"))
        if chosen[0] is not None and not Path(str(chosen[0])).is_dir():
            found = f"does not see {chosen[0]}, from which the main process goes on"
            raise ConfigError(Problem(name, found, "put output_dir on storage that all machines share"))
        return None if chosen[0] is None else str(chosen[0])

    def _list_trained(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.model.parameters() if tensor.requires_grad]

    def _plan_disk(self, checkpoint_bytes: int) -> DiskPlan:
        return plan_disk(
            checkpoint_bytes,
            count_bytes(self._list_trained()),
            self.state.max_steps,
            self.args.to_dict(),  # type: ignore[no-untyped-call]
            keep_every=self._keep_every,
            num_besides=len(self.kept_steps()),
        )


def _save_state(state: Any, path: Path) -> None:
    # Given a path, torch says of a full disk no more than that something is wrong with a stream.
    with path.open("wb") as file:
        torch.save(state, file)
