"""Checkpoints of the trainers: asynchronous, hash-verified, with a dry run at step 1; resume."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy

from recipes_lib.models.parallel.pipeline_parallel import build_whole_on_meta
from recipes_lib.models.parallel.tensor_parallel import saving_unsharded, was_sharded_on_loading
from recipes_lib.training.checkpoints.manifest import STAGING
from recipes_lib.training.checkpoints.resume import seed_process
from recipes_lib.training.checkpoints.saver import (
    CheckpointSaver,
    Staged,
    Task,
    compare_with_live,
    count_bytes,
    is_adapter,
    read_expected,
    verify_saved,
    write_state,
)
from recipes_lib.training.checkpoints.sharded import (
    MODEL_SHARDS,
    OPTIMIZER_SHARDS,
    compare_own_shards,
    gather_trained_state,
    load_model_shards,
    load_optimizer_shards,
    load_whole_model,
    load_whole_optimizer,
    read_trained_shapes,
    save_model_shards,
    save_optimizer_shards,
    verify_shards,
)
from recipes_lib.training.layouts.fsdp import has_shards
from recipes_lib.training.monitoring.callbacks import Observer


class CheckpointingTrainer(Trainer):
    """Upstream's trainer with the checkpoints of ``CheckpointSaver``.

    Upstream writes every small file. Weights and optimizer states, where each process holds all of them, are copied to
    host memory and written by a thread; under FSDP2 every process writes its own shards, and DeepSpeed's are written by
    upstream, while training waits (``docs/decisions/0007-asynchronous-checkpoints.md``).

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
        engine = "FSDP" if self.is_in_shards else "DEEPSPEED" if self.is_deepspeed_enabled else ""
        self._saver = CheckpointSaver(self.args, self._tell, engine=engine)
        self._has_dry_run = False
        self._staging: Path | None = None  # Only while a checkpoint is put together.
        self._tasks: list[Task] = []
        self._own_tokenizer: Any = None

    @property
    def is_in_stages(self) -> bool:
        """True where each process holds a part of the layers."""
        return hasattr(self.model, "part")

    @property
    def is_in_shards(self) -> bool:
        """True where tensors are torch's ``DTensor``: sharded by accelerate, on loading, or in stages."""
        return bool(self.is_fsdp_enabled or has_shards(self.model))

    @property
    def writes_shards(self) -> bool:
        """True where every process writes what it alone holds: of tensors, and in stages."""
        return self.is_in_shards or self.is_in_stages

    @property
    def is_replicated(self) -> bool:
        """True where every process holds the whole model and all states of its optimizer."""
        return not (self.is_deepspeed_enabled or self.writes_shards)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, and leave no checkpoint half-written, however it ends."""
        checkpoint = None if resume_from_checkpoint is None else str(resume_from_checkpoint)
        try:
            return super().train(checkpoint, *args, **kwargs)
        finally:
            self._saver.settle()

    def stops_at_end(self) -> bool:
        """Stop where all steps are made: upstream would make one more of a run that goes on at its very end."""
        if self.state.global_step < self.state.max_steps:
            return False
        self.control.should_training_stop = True
        return True

    def finish_saving(self) -> None:
        """Wait until the checkpoint that is being written has its name; raise what went wrong with it."""
        self._saver.finish()

    def kept_steps(self) -> set[int]:
        """Return the steps whose checkpoints are never deleted: that of the best one."""
        best = self.state.best_model_checkpoint
        return set() if best is None else {int(best.rpartition("-")[2])}

    # transformers 5.23 has no callback after the first update and before what follows a step.
    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any, model: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        """Stop a run whose last checkpoint could not be written; dry-run the first one when its states exist."""
        self._saver.raise_failure()
        if self.state.global_step == 1 and self.args.save_strategy != SaveStrategy.NO and not self._has_dry_run:
            self._has_dry_run = True
            self._dry_run(model)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kwargs)

    # transformers 5.23 writes while training waits, and deletes old checkpoints before the new one is verified.
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Put a checkpoint together and have it saved."""
        self._saver.save(self._stage(model, STAGING), keep=self.kept_steps())

    def _dry_run(self, model: nn.Module) -> None:
        """Do all that saving takes once.

        Raises:
            ConfigError: As ``CheckpointSaver.dry_run``.
            BrokenSaveError: As there.
        """

        def stage(folder: str) -> Staged:
            stored = copy.deepcopy(self.state.stateful_callbacks)
            staged = self._stage(model, folder)
            self.state.stateful_callbacks = stored
            if self.writes_shards:
                compare_own_shards(staged.folder, self.model, self.optimizer)
                self.accelerator.wait_for_everyone()
            return staged

        def compare(checkpoint: Path) -> None:
            if self.is_replicated:
                compare_with_live(checkpoint, self.model, self.optimizer)

        self._saver.dry_run(
            stage,
            compare,
            lambda: count_bytes(self._list_trained(), self.optimizer.state_dict()),
            num_steps=self.state.max_steps,
            model_bytes=count_bytes(self._list_trained()),
            num_besides=len(self.kept_steps()),
        )

    def _stage(self, model: nn.Module, folder: str) -> Staged:
        """Have upstream write a checkpoint under another name, but for what is left in ``_tasks``."""
        output_dir, step = Path(str(self.args.output_dir)), self.state.global_step
        staged = self._saver.open(step, folder)
        # Upstream would delete while this one is not known to be whole.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        self._staging, self._tasks = staged.parent, []
        try:
            Trainer._save_checkpoint(self, model, None)
        finally:
            self._staging = None
            self.args.save_total_limit = limit
        # Upstream looks for the best one where it writes.
        best = output_dir / f"checkpoint-{self.state.best_global_step}"
        if self.state.best_global_step == step or best.is_dir():
            self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            self.state.save_to_json(str(staged / TRAINER_STATE_NAME))
        # The random states of all processes are there.
        self.accelerator.wait_for_everyone()
        tasks, self._tasks = self._tasks, []
        expected = read_expected(self.model, is_replicated=self.is_replicated) if self.args.should_save else {}
        shapes = read_trained_shapes(self.model) if self.writes_shards else {}

        def verify() -> None:
            if self.writes_shards:
                verify_shards(staged, shapes)
            if self.args.should_save:
                # A pickle, which nothing reads; run.json says more.
                (staged / "training_args.bin").unlink(missing_ok=True)
                verify_saved(staged, expected, is_replicated=self.is_replicated)

        return Staged(staged, step, tasks, verify, is_shared=not self.is_replicated)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Under FSDP2 every process writes its shards into a checkpoint; elsewhere the main process the whole model."""
        if not self.writes_shards:
            super().save_model(output_dir, _internal_call)
        elif self._staging is None:
            whole = gather_trained_state(self.model)
            with saving_unsharded(self.model):
                self._save(output_dir, whole)
        else:
            if self.args.should_save:
                configs = self.model.peft_config.values() if is_adapter(self.model) else [self.model.config]
                model: Any = self.model
                base = model.get_base_model() if is_adapter(model) else model
                # As upstream's save_pretrained has it; FSDP2 puts its own word before the name of the class.
                base.config.architectures = [type(base).__name__.removeprefix("FSDP")]
                answers = [base.generation_config] if base.can_generate() else []
                for part in (*configs, *answers, self.processing_class):
                    part.save_pretrained(output_dir)
            save_model_shards(Path(str(output_dir)), self.model)

    # transformers 5.23 writes the weights at once; they are left to the writer thread.
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Leave the weights to the thread while a checkpoint is put together; otherwise do as upstream."""
        if not self.args.should_save:
            # Upstream's would look into the folder, from which the main process may have taken the model by then.
            return
        if self.is_deepspeed_enabled and state_dict is not None:
            # ZeRO-1 and 2 hand over a copy under each name of a tied tensor.
            tied = getattr(self.model, "all_tied_weights_keys", {})
            state_dict = {name: tensor for name, tensor in state_dict.items() if name not in tied}
        if self._staging is None or not self.is_replicated:
            super()._save(output_dir, state_dict)
        else:
            folder = Path(str(output_dir))
            folder.mkdir(parents=True, exist_ok=True)  # Another process may have its random state there.
            if self._own_tokenizer is None:
                # A tokenizer cannot be written by one thread while another pads with it.
                self._own_tokenizer = copy.deepcopy(self.processing_class)
            named = self.model.named_parameters(remove_duplicate=False)
            frozen = [name for name, tensor in named if not tensor.requires_grad]
            self._saver.decide_to_copy(lambda: (self._list_trained(), self.optimizer.state_dict()))
            state = self._saver.take(self.model.state_dict(), unchanging=frozen)
            self._tasks.append(partial(self._write_model, folder, state))

    # transformers 5.23 writes the optimizer at once; ours is left to the thread, or goes into shards for any layout.
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Leave the optimizer's states to the thread, where each process holds all of them."""
        if not (self.is_replicated or self.writes_shards):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        if self.writes_shards:
            save_optimizer_shards(Path(output_dir), self.model, self.optimizer)
        elif self.args.should_save:
            state = self._saver.take(self.optimizer.state_dict())
            self._tasks.append(partial(write_state, state, Path(output_dir) / OPTIMIZER_NAME))
        if self.args.should_save:
            assert self.lr_scheduler is not None
            write_state(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    # transformers 5.23 reads neither our shards nor a whole model into shards.
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Read weights; in shards or whole, they go into any number of processes, sharded or not."""
        if not self._load_across(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    # transformers 5.23: as for ``_load_from_checkpoint``.
    def _load_best_model(self) -> None:
        if not self._load_across(Path(str(self.state.best_model_checkpoint))):
            super()._load_best_model()

    def _load_across(self, folder: Path) -> bool:
        """Read what upstream could not; return whether it was that."""
        if (folder / MODEL_SHARDS).is_dir():
            load_model_shards(folder, self.model)
            return True
        if self.writes_shards:
            load_whole_model(folder, self.model)
        return self.writes_shards

    # transformers 5.23: as for ``_load_from_checkpoint``.
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Read what the update remembers, from whichever form it has."""
        folder = None if checkpoint is None else Path(checkpoint)
        if folder is not None and (folder / OPTIMIZER_SHARDS).is_dir():
            load_optimizer_shards(folder, self.model, self.optimizer)
        elif folder is not None and self.writes_shards:
            load_whole_optimizer(folder / OPTIMIZER_NAME, self.optimizer, self._list_whole_groups())
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.lr_scheduler is not None
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))

    def _write_model(self, folder: Path, state: Mapping[str, Any]) -> None:
        # By the names that upstream will load into the model: by those of publication it would skip experts in
        # silence. Whether embeddings were resized would be asked of the Hub.
        options: Any = {"save_embedding_layers": False} if is_adapter(self.model) else {"save_original_format": False}
        self.model.save_pretrained(folder, state_dict=dict(state), **options)
        self._own_tokenizer.save_pretrained(folder)

    # transformers 5.23 names the folder of a checkpoint here; it gets its name when it is whole.
    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    # transformers 5.23 loads the best model and deletes checkpoints here, whether or not one is still being written.
    def _finalize_training(self, *args: Any) -> Any:
        """Wait for the last checkpoint, which may be the best one, and let upstream delete none."""
        self.finish_saving()
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args)  # type: ignore[no-untyped-call]
        finally:
            self.args.save_total_limit = limit

    # transformers 5.23 resumes with fresh random states on processes that the checkpoint knows nothing of.
    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set the random states that were stored for this process; without any, those of the seed, step and rank."""
        rank = self.args.process_index
        name = "rng_state.pth" if self.args.world_size == 1 else f"rng_state_{rank}.pth"
        if checkpoint is not None and not (Path(checkpoint) / name).is_file():
            seed_process(self.args.seed, self.state.global_step, rank)
        else:
            super()._load_rng_state(checkpoint)

    def _list_whole_groups(self) -> list[list[nn.Parameter | None]]:
        """The parameters of each group as the optimizer of the whole model numbers them; ``None``: not here."""
        if not self.is_in_stages:
            return [group["params"] for group in self.optimizer.param_groups]
        whole, own = build_whole_on_meta(self.model), dict(self.model.named_parameters())
        names = {id(parameter): name for name, parameter in whole.named_parameters()}
        # Whatever builds an optimizer groups by what a model says of its parameters.
        mine, self.optimizer = self.optimizer, None  # type: ignore[assignment]
        groups = self.create_optimizer(whole).param_groups
        self.optimizer = mine
        return [[own.get(names[id(parameter)]) for parameter in group["params"]] for group in groups]

    def _list_trained(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.model.parameters() if tensor.requires_grad]

    def _tell(self, line: str) -> None:
        self.observer.progress.say(line)
