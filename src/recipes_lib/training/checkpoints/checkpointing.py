"""Trainer mixin for asynchronous, hash-verified checkpoints with a dry run at step 1, and for resuming from them."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy

from recipes_lib.files import inherit_read_permission
from recipes_lib.models.inference import temporarily
from recipes_lib.planning.schedule import compute_warmup_steps
from recipes_lib.training.checkpoints.manifest import STAGING, find_damage
from recipes_lib.training.checkpoints.model_layout import choose_layout
from recipes_lib.training.checkpoints.resume import seed_process
from recipes_lib.training.checkpoints.saver import CheckpointSaver, Staged, Task, count_bytes, write_state
from recipes_lib.training.checkpoints.sharded import Trained
from recipes_lib.training.collectives import compute_on_main
from recipes_lib.training.guards.preemption import read_evaluation, stop_if_agreed
from recipes_lib.training.layouts.fsdp import sharding
from recipes_lib.training.layouts.launch_environment import Launch, read_launch
from recipes_lib.training.monitoring.callbacks import Observer


class _ReadSteps(TrainerCallback):
    """Reads ``logging_steps``, ``eval_steps`` and ``save_steps``, and aligns the last two if both are fractions.

    A resumed run may have others than its checkpoint, whose values upstream would keep. And upstream rounds each
    fraction up separately: of 25 steps, 0.1 becomes 3 and 0.2 becomes 5. The best evaluation could then fall on a step
    that is not saved.
    """

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        state.compute_steps(args, state.max_steps)  # type: ignore[no-untyped-call]
        if args.load_best_model_at_end and args.eval_steps and args.eval_steps < 1:
            state.save_steps = int(state.eval_steps) * round(args.save_steps / args.eval_steps)


class CheckpointingTrainer(Trainer):
    """Upstream's trainer with the checkpoints of ``CheckpointSaver``.

    Upstream writes all small files. Weights and optimizer states (with FSDP2, the shards of each process) are copied to
    host memory and written by a background thread. With DeepSpeed, upstream writes them while training waits
    (``docs/decisions/0007-asynchronous-checkpoints.md``).

    Source: ``tests/training/checkpoints/test_checkpointing.py``, ``tests/distributed/test_sharded.py``.
    """

    observer: Observer
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer

    def __init__(self, **options: Any) -> None:
        """Initialise upstream's trainer and the saver.

        Args:
            **options: Arguments of ``transformers.Trainer``; ``args`` may have an attribute ``save_keep_steps``.
        """
        args: TrainingArguments = options["args"]
        # transformers 5.23 can save only the model if it was loaded with a tensor parallel plan, and refuses to train
        # without save_only_model. Our layout saves the optimizer as well.
        args.save_only_model = getattr(options["model"], "is_distributed_loading_by_transformers", False)
        super().__init__(**options)
        args.save_only_model = False
        self.add_callback(_ReadSteps)
        self.layout = choose_layout(self)
        self._saver = CheckpointSaver(self.args, self._tell, engine=self.layout.engine, data_size=self.launch.data_size)
        self._has_dry_run = False
        self._sharding = ExitStack()  # Open from ``train`` to ``create_scheduler``, between which upstream shards.
        self._best_before: tuple[float | None, int | None] = None, None
        self._staging: Path | None = None  # Set only while a checkpoint is staged; the overrides below depend on it.
        self._tasks: list[Task] = []

    @cached_property
    def launch(self) -> Launch:
        """Launch of this process; a property, because upstream's constructor already needs it."""
        return read_launch()

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, and wait for the writer thread on any exit."""
        checkpoint = None if resume_from_checkpoint is None else str(resume_from_checkpoint)
        self._sharding.enter_context(sharding(self.accelerator, self.model))
        try:
            return super().train(checkpoint, *args, **kwargs)
        finally:
            # The writer is a daemon thread, which the interpreter kills at exit.
            self._saver.settle()

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the scheduler, with our warm-up; upstream's first call after it has sharded the model."""
        self._sharding.close()
        warmup_steps = compute_warmup_steps(self.args.warmup_steps, num_training_steps)
        with temporarily(self.args, warmup_steps=warmup_steps):
            return super().create_scheduler(num_training_steps, optimizer)

    def stops_at_end(self) -> bool:
        """Return whether the run is resumed at its end, and stop it: upstream would make one more step."""
        if self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            return False
        self.control.should_training_stop = True
        return True

    def finish_saving(self) -> None:
        """Wait until the current checkpoint is written and renamed; raise its errors."""
        self._saver.finish()

    def list_protected_steps(self) -> set[int]:
        """Return the steps whose checkpoints are exempt from ``save_total_limit``: the best one."""
        best = self.state.best_global_step
        return set() if best is None else {best}

    @property
    def _best_checkpoint(self) -> Path:
        return Path(str(self.args.output_dir)) / f"checkpoint-{self.state.best_global_step}"

    # transformers 5.23 has no callback between the first optimizer step and its logging, evaluation and saving.
    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any, model: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        """Raise the error of a failed write; make the dry run after the first update, when optimizer states exist."""
        self._saver.raise_failure()
        is_due = not (self._initial_global_step or self._has_dry_run) and self._has_updated()
        if is_due and self.args.save_strategy != SaveStrategy.NO:
            self._has_dry_run = True
            self._dry_run(model)
        with self.best_is_saved():
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kwargs)

    @contextmanager
    def best_is_saved(self) -> Iterator[None]:
        """Accept an evaluation in this context as the best one only at a step that ``save_steps`` saves.

        transformers 5.23 also accepts evaluations between two saves. Their weights are lost, and at the end the weights
        of an earlier best checkpoint are loaded, or none.
        """
        self._best_before = self.state.best_metric, self.state.best_global_step
        yield
        self._disregard_unsaved()

    def _disregard_unsaved(self) -> None:
        state = self.state
        is_saved = state.global_step >= state.max_steps or state.global_step % max(state.save_steps, 1) == 0
        is_new = state.best_global_step == state.global_step
        if self.args.save_strategy == SaveStrategy.STEPS and is_new and not is_saved:
            state.best_metric, state.best_global_step = self._best_before

    def run_pending_evaluation(self) -> None:
        """Run the evaluation that a preemption or a kill interrupted, if any, as upstream does after a step."""
        if read_evaluation(self.args, self.state)[1]:
            with self.best_is_saved():
                self._determine_best_metric(self._evaluate(None, None), None)

    # Old checkpoints are deleted once the new one is verified, and averaged weights of a schedule-free optimizer are
    # saved: transformers 5.23 does neither, and writes synchronously.
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Stage a checkpoint, with the averaged weights of a schedule-free optimizer, then write and publish it."""
        self.show_averaged_weights()
        self._saver.save(self._stage(model, STAGING), keep=self.list_protected_steps())

    def show_averaged_weights(self) -> None:
        """Switch a schedule-free optimizer to its averaged weights; ``training_step`` switches back."""
        if self.optimizer is not None and hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def _dry_run(self, model: nn.Module) -> None:
        """Save and delete one checkpoint, and compare it with the live state.

        Raises:
            ConfigError: The disk is too small (``CheckpointSaver.dry_run``).
            BrokenSaveError: The saved state differs from the live one, or a process failed.
        """

        def stage(folder: str) -> Staged:
            # When saving, upstream exports callback states into the trainer state. They are restored, so that later
            # checkpoints are identical to those of a run without a dry run.
            with temporarily(self.state, stateful_callbacks=copy.deepcopy(self.state.stateful_callbacks)):
                staged = self._stage(model, folder)
            compare = partial(self.layout.compare, staged.folder, self.model, self._read_trained())

            def verify() -> None:
                staged.verify()
                compare()

            return replace(staged, verify=verify)

        num_epochs = self.state.num_train_epochs
        self._saver.dry_run(
            stage,
            lambda: count_bytes(self._list_trained(), self.optimizer.state_dict()),
            num_steps=self.state.max_steps,
            # Upstream's value for a stream, whose number of epochs is unknown.
            num_epochs=None if num_epochs == sys.maxsize else num_epochs,
            model_bytes=count_bytes(self._list_trained()),
            num_protected=len(self.list_protected_steps()),
        )

    def _stage(self, model: nn.Module, folder: str) -> Staged:
        """Stage a checkpoint with upstream's code in ``folder``; ``_tasks`` collects the large files still to write."""
        self._disregard_unsaved()  # Stop requests and the start of a decay also save, between two ``save_steps``.
        step = self.state.global_step
        staged = self._saver.open(step, folder)
        self._tasks = []
        # transformers 5.23 takes a minute to write the log of a million steps, while training waits.
        without_log = temporarily(self.state, log_history=[])
        # DeepSpeed's weights too are saved under the model's own parameter names, which ``recipes export`` expects.
        with_own_names = temporarily(self.model, _weight_conversions=[])
        with temporarily(self, _staging=staged.parent), without_log, with_own_names, self._deleting_nothing():
            Trainer._save_checkpoint(self, model, None)
        if self.state.best_global_step == step or self._best_checkpoint.is_dir():
            # Upstream builds this path from the folder that it writes to, which is the staging folder here.
            self.state.best_model_checkpoint = str(self._best_checkpoint)
        if self.args.should_save:
            # Written again, with the log and the corrected path; without indentation, json's fast encoder writes it.
            (staged / TRAINER_STATE_NAME).write_text(json.dumps(vars(self.state), sort_keys=True), encoding="utf-8")
            # A pickle that resuming does not read; run.json records the same arguments.
            (staged / "training_args.bin").unlink(missing_ok=True)
        # After this barrier the random states of all processes are in the folder.
        self.accelerator.wait_for_everyone()
        tasks, self._tasks = self._tasks, []
        verify = partial(self.layout.build_verification(self.model), staged)
        return Staged(staged, step, tasks, verify)

    def _deleting_nothing(self) -> AbstractContextManager[None]:
        """Disable upstream's deletion of old checkpoints; ``rotate`` deletes them once the new one is verified."""
        return temporarily(self.args, save_total_limit=None)

    def _has_updated(self) -> bool:
        """Return whether the last step updated the weights, so that the optimizer has any states that it will have."""
        # ``checkpoint-0`` is before the first step, and fp16's loss scaler skips the updates of first steps.
        return self.state.global_step > 0 and not self.accelerator.optimizer_step_was_skipped

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the layout's files into a checkpoint; outside of one, save the gathered model on the main process."""
        if self._staging is not None:
            # Decided for model and optimizer together, at the model, which upstream saves first.
            writes = self.layout.writes_copies and (self.layout.is_shared or self._saver.is_main)
            if writes and self._has_updated():
                # ``optimizer.state`` instead of ``state_dict()``, which gathers sharded states.
                states: Any = (self._list_trained(), dict(self.optimizer.state))
                self._saver.decide_to_copy(states)
            folder = Path(str(output_dir))
            tasks = self.layout.save_model(folder, self.model, self.processing_class, self._saver)
            if tasks is not None:
                self._tasks += tasks
                return
        elif (whole := self.layout.gather(self.model)) is not None:
            # Otherwise ``save_pretrained`` would gather the shards of tensor parallelism again.
            with temporarily(self.model.config, distributed_config=None):
                self._save(output_dir, whole)
            return
        super().save_model(output_dir, _internal_call)

    # transformers 5.23 lists the folder on every process, while the main process may already have renamed it.
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save weights on the main process, tied weights once."""
        if self.args.should_save:
            state = None if state_dict is None else self.layout.drop_copies(self.model, state_dict)
            super()._save(output_dir, state)
            for file in Path(str(output_dir)).glob("*.safetensors"):
                inherit_read_permission(file)

    # transformers 5.23 writes the optimizer synchronously; ours are written by the thread, sharded states as shards.
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Copy the optimizer states for the writer thread, and write the scheduler."""
        folder = Path(output_dir)
        tasks = self.layout.save_optimizer(folder, self._read_trained(), self._saver)
        if tasks is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self._tasks += tasks
        if self.args.should_save:
            # Written synchronously: it is a few hundred bytes.
            assert self.lr_scheduler is not None
            write_state(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)

    # transformers 5.23 reads neither our shards nor an unsharded checkpoint into a sharded model.
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load sharded or unsharded weights at any world size, into a sharded or unsharded model."""
        by_upstream = partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        self.load_weights(Path(resume_from_checkpoint), by_upstream)

    # transformers 5.23 does not read our shards, as in ``_load_from_checkpoint``.
    def _load_best_model(self) -> None:
        self.load_weights(Path(str(self.state.best_model_checkpoint)), super()._load_best_model)

    def load_weights(self, checkpoint: Path, by_upstream: Callable[[], object]) -> None:
        """Load the weights of a checkpoint; every process must call.

        Args:
            checkpoint: Checkpoint folder.
            by_upstream: Upstream's method, called if the layout does not load the weights itself.
        """
        if not self.layout.load_model(checkpoint, self.model):
            by_upstream()

    # transformers 5.23 does not read our shards, as in ``_load_from_checkpoint``.
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the states of optimizer and learning rate scheduler, sharded or unsharded."""
        assert checkpoint is not None, "only called on resume"
        folder = Path(checkpoint)
        if not self.layout.load_optimizer(folder, self.model, self._read_trained(), self._build_optimizer):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.lr_scheduler is not None
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))

    # transformers 5.23 fails if a run that was begun in fp16 is resumed in another precision.
    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load the state of fp16's loss scaler, if this run has one."""
        if self.accelerator.scaler is not None:
            super()._load_scaler(checkpoint)

    def name_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters by the names under which a checkpoint stores their optimizer states."""
        return dict(self.model.named_parameters())

    # transformers 5.23 chooses the checkpoint folder here; ours is a staging folder until the checkpoint is complete.
    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    # transformers 5.23 loads the best model and deletes checkpoints here, although one may still be being written.
    def _finalize_training(self, *args: Any) -> Any:
        """Wait for the last checkpoint, which may be the best one, before upstream loads the best one; delete none."""
        self.run_pending_evaluation()  # A run that is resumed after its last epoch begins no other one.
        self.finish_saving()
        # The main process renames the folder; the other ranks may open it only after this barrier.
        self.accelerator.wait_for_everyone()
        # Before the best weights replace those of the last step, which `save_strategy: best` may not have saved.
        stop_if_agreed()
        if self.args.load_best_model_at_end and self.state.best_global_step is not None:
            # By the step: transformers 5.23 forgets the path if output_dir was moved since it was saved.
            # transformers 5.23 only warns if the folder is gone, and would export the last weights as the best ones.
            # With hashes: the export is compared only with what is loaded here. Loading is collective: rank 0 decides.
            fault = compute_on_main(partial(find_damage, self._best_checkpoint))
            if fault is not None:
                self._tell(f"the best weights, {self._best_checkpoint.name}, cannot be loaded: {fault}")
            self.state.best_model_checkpoint = None if fault else str(self._best_checkpoint)
        with self._deleting_nothing():
            return super()._finalize_training(*args)  # type: ignore[no-untyped-call]

    # transformers 5.23 keeps the initial seed, the same on all ranks, if the checkpoint has no random state of a rank.
    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random states of this process; without stored ones derive them from seed, step and rank."""
        rank = self.args.process_index
        name = "rng_state.pth" if self.args.world_size == 1 else f"rng_state_{rank}.pth"
        # The rank is hashed in: with the same seed on all ranks, all would draw the same dropout masks.
        assert checkpoint is not None, "only called on resume"
        if not Path(checkpoint, name).is_file():
            seed_process(self.args.seed, self.state.global_step, rank)
        else:
            super()._load_rng_state(checkpoint)

    def _build_optimizer(self, model: Any) -> torch.optim.Optimizer:
        """Build an optimizer for another model with this run's settings."""
        # ``create_optimizer`` returns the existing optimizer if the trainer has one.
        with temporarily(self, optimizer=None):
            return self.create_optimizer(model)

    def _read_trained(self) -> Trained:
        return Trained(self.name_parameters(), self.optimizer)

    def _list_trained(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.model.parameters() if tensor.requires_grad]

    def _tell(self, line: str) -> None:
        self.observer.progress.say(line)
