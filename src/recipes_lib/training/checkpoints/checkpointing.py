"""Checkpoints of the trainers: asynchronous, hash-verified, with a dry run at step 1; resume."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy

from recipes_lib.files import let_readers_of_folder_read
from recipes_lib.models.parallel.tensor_parallel import saving_unsharded, was_sharded_on_loading
from recipes_lib.training.checkpoints.manifest import STAGING, find_wrong_size
from recipes_lib.training.checkpoints.model_layout import choose_layout
from recipes_lib.training.checkpoints.resume import seed_process
from recipes_lib.training.checkpoints.saver import CheckpointSaver, Staged, Task, count_bytes, write_state
from recipes_lib.training.collectives import broadcast_object
from recipes_lib.training.layouts.launch_environment import Launch, read_launch
from recipes_lib.training.monitoring.callbacks import Observer


class _SaveEvaluatedSteps(TrainerCallback):
    """Saves at evaluated steps, where both are shares of the run: upstream rounds each share up by itself.

    Of 25 steps a tenth is 3 and a fifth 5, and a best model among evaluations that are not saved would be lost.
    """

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if args.load_best_model_at_end and args.eval_steps and args.eval_steps < 1:
            state.save_steps = int(state.eval_steps) * round(args.save_steps / args.eval_steps)


class CheckpointingTrainer(Trainer):
    """Upstream's trainer with the checkpoints of ``CheckpointSaver``.

    Upstream writes every small file. Weights and optimizer states, of FSDP2 each process's shards, are copied to host
    memory and written by a thread; DeepSpeed's are written by upstream, while training waits
    (``docs/decisions/0007-asynchronous-checkpoints.md``).

    Source: ``tests/training/checkpoints/test_checkpointing.py``, ``tests/distributed/test_sharded.py``.
    """

    observer: Observer
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer

    def __init__(self, **options: Any) -> None:
        """Set upstream's trainer up.

        Args:
            **options: As upstream's trainer; ``args`` may have a ``save_keep_steps``.
        """
        args: TrainingArguments = options["args"]
        saves_less = args.save_only_model
        # Of what was sharded on loading upstream saves the model alone, and refuses to train without being told to.
        args.save_only_model = saves_less or was_sharded_on_loading(options["model"])
        super().__init__(**options)
        args.save_only_model = saves_less
        self.add_callback(_SaveEvaluatedSteps)
        self.layout = choose_layout(self)
        self._saver = CheckpointSaver(self.args, self._tell, engine=self.layout.engine, data_size=self.launch.data_size)
        self._has_dry_run = False
        self._best_before: tuple[float | None, int | None] = None, None
        self._staging: Path | None = None  # Only while a checkpoint is put together: overrides below look at it.
        self._tasks: list[Task] = []

    @cached_property
    def launch(self) -> Launch:
        """How this process was launched; upstream builds a trainer from its own arguments alone."""
        return read_launch()

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; finish or remove an incomplete checkpoint on any exit."""
        checkpoint = None if resume_from_checkpoint is None else str(resume_from_checkpoint)
        try:
            return super().train(checkpoint, *args, **kwargs)
        finally:
            # The writer is a daemon thread, which the end of the process would cut off.
            self._saver.settle()

    def stops_at_end(self) -> bool:
        """Stop a run that is resumed at its end: upstream would make one more step."""
        if self.state.global_step < self.state.max_steps:
            return False
        self.control.should_training_stop = True
        return True

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written; raise its errors."""
        self._saver.finish()

    def kept_steps(self) -> set[int]:
        """Return the steps whose checkpoints are never deleted: that of the best one."""
        best = self.state.best_model_checkpoint
        return set() if best is None else {int(best.rpartition("-")[2])}

    @property
    def _best_checkpoint(self) -> Path:
        return Path(str(self.args.output_dir)) / f"checkpoint-{self.state.best_global_step}"

    # transformers 5.23 has no callback after the first update and before what follows a step.
    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any, model: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        """Raise if the last checkpoint failed; dry run once the optimizer states exist."""
        self._saver.raise_failure()
        if self.state.global_step == 1 and self.args.save_strategy != SaveStrategy.NO and not self._has_dry_run:
            self._has_dry_run = True
            self._dry_run(model)
        with self.best_is_saved():
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kwargs)

    @contextmanager
    def best_is_saved(self) -> Iterator[None]:
        """Let an evaluation inside be the best only at a step that ``save_steps`` saves.

        transformers 5.23 takes any evaluation for the best, also one between saves; its weights are lost, and at the
        end those of an earlier best are loaded, or none.
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

    # transformers 5.23 writes while training waits, and deletes old checkpoints before the new one is verified.
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Stage a checkpoint and save it."""
        self._saver.save(self._stage(model, STAGING), keep=self.kept_steps())

    def _dry_run(self, model: nn.Module) -> None:
        """Save once as a dry run.

        Raises:
            ConfigError: As ``CheckpointSaver.dry_run``.
            BrokenSaveError: As there.
        """

        def stage(folder: str) -> Staged:
            # Upstream exports the state of its callbacks into that of the trainer when it saves; a later checkpoint of
            # this run would differ from that of one without a dry run.
            stored = copy.deepcopy(self.state.stateful_callbacks)
            staged = self._stage(model, folder)
            self.state.stateful_callbacks = stored
            compare = partial(self.layout.compare, staged.folder, self.model, self.name_parameters(), self.optimizer)

            def verify() -> None:
                staged.verify()
                compare()

            return replace(staged, verify=verify)

        self._saver.dry_run(
            stage,
            lambda: count_bytes(self._list_trained(), self.optimizer.state_dict()),
            num_steps=self.state.max_steps,
            model_bytes=count_bytes(self._list_trained()),
            num_besides=len(self.kept_steps()),
        )

    def _stage(self, model: nn.Module, folder: str) -> Staged:
        """Stage a checkpoint by upstream's code under another name; large files are left to ``_tasks``."""
        self._disregard_unsaved()  # Besides ``save_steps``, a stop request or a decay saves.
        step = self.state.global_step
        staged = self._saver.open(step, folder)
        self._staging, self._tasks = staged.parent, []
        try:
            with self._deleting_nothing():
                Trainer._save_checkpoint(self, model, None)
        finally:
            self._staging = None
        if self.state.best_global_step == step or self._best_checkpoint.is_dir():
            # Upstream looks for the best one where it writes.
            self.state.best_model_checkpoint = str(self._best_checkpoint)
        if self.args.should_save:
            # Once more: upstream has written it before the line above.
            self.state.save_to_json(str(staged / TRAINER_STATE_NAME))
            # A pickle, which nothing reads; run.json says more.
            (staged / "training_args.bin").unlink(missing_ok=True)
        # The random states of all processes are there.
        self.accelerator.wait_for_everyone()
        tasks, self._tasks = self._tasks, []
        verify = partial(self.layout.build_verification(self.model), staged)
        return Staged(staged, step, tasks, verify, is_shared=self.layout.is_shared)

    @contextmanager
    def _deleting_nothing(self) -> Iterator[None]:
        """Keep upstream from deleting old checkpoints: ``rotate`` does, once the new one is known to be whole."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            yield
        finally:
            self.args.save_total_limit = limit

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save into a checkpoint as the layout does; elsewhere the main process saves the whole model."""
        if self._staging is not None:
            if self.layout.writes_copies and (self.layout.is_shared or self._saver.is_main):
                # With the model, which upstream saves first: both are copied, or both are written while training waits.
                # Of an optimizer in shards the ``state_dict`` would gather.
                states: Any = (self._list_trained(), dict(self.optimizer.state))
                self._saver.decide_to_copy(lambda: states, is_shared=self.layout.is_shared)
            folder = Path(str(output_dir))
            tasks = self.layout.save_model(folder, self.model, self.processing_class, self._saver)
            if tasks is not None:
                self._tasks += tasks
                return
        elif (whole := self.layout.gather(self.model)) is not None:
            with saving_unsharded(self.model):
                self._save(output_dir, whole)
            return
        super().save_model(output_dir, _internal_call)

    # transformers 5.23 looks into the folder on every process, from which the main one may have moved the model.
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Have the main process save weights, those that are tied once."""
        if self.args.should_save:
            state = None if state_dict is None else self.layout.drop_copies(self.model, state_dict)
            super()._save(output_dir, state)
            for file in Path(str(output_dir)).glob("*.safetensors"):
                let_readers_of_folder_read(file)

    # transformers 5.23 writes the optimizer at once; ours is left to the thread, or goes into shards for any layout.
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Leave the optimizer states to the writer thread if they are replicated."""
        folder = Path(output_dir)
        tasks = self.layout.save_optimizer(folder, self.name_parameters(), self.optimizer, self._saver)
        if tasks is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self._tasks += tasks
        if self.args.should_save:
            # Small, so that it is written at once.
            assert self.lr_scheduler is not None
            write_state(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)

    # transformers 5.23 reads neither our shards nor a whole model into shards.
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Read weights; in shards or whole, they go into any number of processes, sharded or not."""
        by_upstream = partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        self.load_weights(Path(resume_from_checkpoint), by_upstream)

    # transformers 5.23: as for ``_load_from_checkpoint``.
    def _load_best_model(self) -> None:
        self.load_weights(Path(str(self.state.best_model_checkpoint)), super()._load_best_model)

    def load_weights(self, checkpoint: Path, by_upstream: Callable[[], object]) -> None:
        """Read the weights of a checkpoint, by upstream where the layout leaves it to that; every process must call."""
        if not self.layout.load_model(checkpoint, self.model):
            by_upstream()

    # transformers 5.23: as for ``_load_from_checkpoint``.
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load optimizer, schedule and loss scaler states, sharded or whole."""
        if checkpoint is None:
            return
        folder, parameters = Path(checkpoint), self.name_parameters()
        if not self.layout.load_optimizer(folder, self.model, parameters, self.optimizer, self._build_optimizer):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.lr_scheduler is not None
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))

    def name_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return what the optimizer may train, by the names under which a checkpoint keeps its states."""
        return dict(self.model.named_parameters())

    # transformers 5.23 names the folder of a checkpoint here; it gets its name when it is whole.
    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    # transformers 5.23 loads the best model and deletes checkpoints here, whether or not one is still being written.
    def _finalize_training(self, *args: Any) -> Any:
        """Wait for the last checkpoint, which may be the best one, and let upstream delete none."""
        self.finish_saving()
        # The main process renames the folder; the others look for it behind the barrier.
        self.accelerator.wait_for_everyone()
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            # transformers 5.23 only warns of one that is gone, and the last weights would pass for the best ones. All
            # processes load it or none: one alone would wait for the others.
            fault = broadcast_object(find_wrong_size(self._best_checkpoint))
            if fault is not None:
                self._tell(f"the best weights, {self._best_checkpoint.name}, cannot be loaded: {fault}")
            # The folder of a run that was resumed may have had another path when it was saved.
            self.state.best_model_checkpoint = None if fault else str(self._best_checkpoint)
        with self._deleting_nothing():
            return super()._finalize_training(*args)  # type: ignore[no-untyped-call]

    # transformers 5.23 resumes with fresh random states on processes that the checkpoint knows nothing of.
    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random states of this process; without stored ones derive them from seed, step and rank."""
        rank = self.args.process_index
        name = "rng_state.pth" if self.args.world_size == 1 else f"rng_state_{rank}.pth"
        # Resumed with another number of processes. All with the seed alone would draw the same dropout masks.
        if checkpoint is not None and not (Path(checkpoint) / name).is_file():
            seed_process(self.args.seed, self.state.global_step, rank)
        else:
            super()._load_rng_state(checkpoint)

    def _build_optimizer(self, model: Any) -> torch.optim.Optimizer:
        """The optimizer of another model, in place of none."""
        # ``create_optimizer`` builds one only where the trainer has none.
        own, self.optimizer = self.optimizer, None  # type: ignore[assignment]
        try:
            return self.create_optimizer(model)
        finally:
            self.optimizer = own

    def _list_trained(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.model.parameters() if tensor.requires_grad]

    def _tell(self, line: str) -> None:
        self.observer.progress.say(line)
