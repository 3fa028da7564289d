"""Base trainer of all recipes: transformers' ``Trainer`` with one loss normaliser per step, fixed row order, guards."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Sampler
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, TrainingArguments

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.data.sources.replay_dataset import EpochOrder, Order
from recipes_lib.data.sources.splits import IntArray
from recipes_lib.data.tokens.dataset import RowSkips
from recipes_lib.errors import ConfigError, DivergedError, PreemptedError, Problem
from recipes_lib.models.activation_checkpointing import enable_checkpointing
from recipes_lib.models.attention.kernels import explain_choice
from recipes_lib.models.inference import temporarily, unwrap_adapter
from recipes_lib.models.parallel.tensor_parallel import count_tensor_parallel_ranks
from recipes_lib.models.parallel.zero3 import remove_gather_hooks
from recipes_lib.planning.schedule import StepPlan, compute_steps
from recipes_lib.stopping import STOP
from recipes_lib.training.checkpoints.checkpointing import CheckpointingTrainer
from recipes_lib.training.forgetting.weight_penalty import WeightPenalty
from recipes_lib.training.guards.preemption import LastStep, build_preemption, record_evaluation, stop_if_agreed
from recipes_lib.training.guards.start_checks import AdapterChecks, StartChecks
from recipes_lib.training.guards.step_facts import ROW_IDS, StepInputs
from recipes_lib.training.guards.step_guard import StepGuard, find_skips
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.layouts.context_rows import shard_batch
from recipes_lib.training.layouts.fsdp import clip_gradients, compute_total_norm, has_shards, reshard, set_precision
from recipes_lib.training.layouts.launch_environment import Launch, verify_engine
from recipes_lib.training.monitoring.callbacks import Observer, TermMetrics, name_metric, tolerate_tracker_failures
from recipes_lib.training.monitoring.metrics import StepCounter
from recipes_lib.training.optim.compilation import Compilation, match_kernels, preserve_architecture
from recipes_lib.training.optim.optimizers import get_decay_names, split_loraplus_groups
from recipes_lib.training.trainers.arguments import get_compute_dtype, verify_fp8_layers

Batch = dict[str, Any]


class BatchLoss(NamedTuple):
    """Loss of a micro-batch and its counts; all are scalars.

    Attributes:
        loss_sum: Loss summed over the terms of the objective, differentiable.
        num_terms: Number of terms.
        num_targets: Predicted tokens, ``int64``.
        num_correct: Predicted tokens that are the model's argmax, ``int64``.
        aux_loss: Load-balancing loss, before ``router_aux_loss_coef``; ``None`` in a dense model.
        figures: Further sums over the terms, whose means are logged.
    """

    loss_sum: torch.Tensor
    num_terms: torch.Tensor | int
    num_targets: torch.Tensor | int
    num_correct: torch.Tensor | int
    aux_loss: torch.Tensor | None
    figures: Mapping[str, torch.Tensor] | None = None


class RecipeTrainer(CheckpointingTrainer):
    """transformers' ``Trainer`` with the evaluation, the guards and the checkpoints of this library.

    A subclass defines the terms of its objective (``count_terms``) and their summed loss (``score_batch``), which is
    divided by their number over all ranks and micro-batches of an optimizer step. It depends neither on gradient
    accumulation (``tests/training/trainers/test_pair_trainer.py``) nor on the world size
    (``tests/distributed/test_resumption.py``).
    """

    # compute_loss divides by the global number of terms: upstream must not divide by gradient_accumulation_steps.
    loss_is_scaled_for_ga = True
    decay_embeddings = True
    router_aux_loss_coef = 0.0
    balances_experts = False
    """Whether a mixture of experts is trained with its load-balancing loss by default, as in TRL's SFT."""
    compares_rows = False
    """Whether the loss compares rows of a micro-batch with each other, and so depends on gradient accumulation."""
    model: PreTrainedModel
    last_evaluated_step = -1
    _last_evaluation: tuple[int, dict[str, float]] = (-1, {})
    is_evaluating = False
    _is_last_repeated = False
    _num_parameters: int | None = None

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        args: TrainingArguments,
        observer: Observer,
        adapter: AdapterConfig | None = None,
        order: Order | None = None,
        penalty: WeightPenalty | None = None,
        **options: Any,
    ) -> None:
        """Initialise upstream's trainer over rows of tokens.

        Args:
            model: The model to train, not yet wrapped by accelerate.
            args: From ``build_training_arguments``.
            observer: Evaluation hooks, guards, metrics and progress of the run.
            adapter: Configuration of the model's adapter, if it has one; checks verify that exactly its weights train.
            order: Order of rows with replay; ``None``: upstream's order.
            penalty: Penalty on the distance of weights from their reference (EWC).
            **options: Arguments of upstream's trainer: ``train_dataset``; ``eval_dataset``, which only the hooks of
                ``observer`` read; ``data_collator``, which builds the batches of ``score_batch``; and
                ``processing_class``, the tokenizer, saved with every checkpoint.
        """
        self.observer = observer
        self.order, self.penalty = order, penalty
        self.adapter = adapter or AdapterConfig()
        say = observer.progress.say
        super().__init__(model=model, args=args, **options)
        verify_engine(
            self.launch,
            self.accelerator.distributed_type,
            tensor_size=count_tensor_parallel_ranks(self.model),
            is_in_shards=has_shards(self.model),
        )
        set_precision(self.accelerator, self.model)
        self.remove_callback(PrinterCallback)
        tolerate_tracker_failures(self.callback_handler, args, say)
        self.figures = TermMetrics()
        self.add_figures(*observer.user_callbacks, self.figures, *observer.callbacks)
        self._last_step = LastStep(self)
        if self.adapter.use_peft:
            self.add_callback(AdapterChecks(self.adapter, say=say))
        self.add_callback(self._last_step)
        attention = getattr(model.config.get_text_config(), "_attn_implementation", "")
        say(f"attention: {explain_choice(attention, model.config, args.device, get_compute_dtype(args))}")
        if args.mixed_precision == "fp8":
            verify_fp8_layers(self.model)
        coefficient = getattr(args, "router_aux_loss_coef", None)
        by_default = self.balances_experts
        self.router_aux_loss_coef = configure_router_loss(model, coefficient, self.launch, by_default=by_default)
        self.add_callback(StartChecks(self, has_adapter=self.adapter.use_peft))
        self.guard = StepGuard(self, observer.guards)
        if penalty is not None:
            penalty.prepare(self.accelerator, self.model)
            self.add_figures(penalty)
        # Last callback: ``checkpoint-0`` then holds exactly the state before the first step.
        self.add_callback(self.guard)

    def add_figures(self, *callbacks: TrainerCallback) -> None:
        """Insert callbacks that add metrics to the logs of a step or request a save, before those inserted earlier."""
        # Callbacks run in order. The first, upstream's, decides what is due. These must precede the observer's, which
        # write metrics and sum counts for a checkpoint, and the trackers.
        self.callback_handler.callbacks[1:1] = callbacks

    @abstractmethod
    def count_terms(self, batch: Batch) -> torch.Tensor:
        """Return the number of terms of a micro-batch in the objective; ``int64`` scalar."""

    @abstractmethod
    def score_batch(self, model: nn.Module, inputs: Batch) -> BatchLoss:
        """Return the loss of a micro-batch, given without ``num_tokens``, in a ``dict`` of its own."""

    @abstractmethod
    def mask_batch(self, batch: Batch) -> Batch:
        """Return a copy of a batch without loss terms, which takes part in the collectives of a step only."""

    def list_frozen(self) -> list[Any]:
        """Return the frozen models that compute beside the trained one: a reference, a base or a teacher."""
        return []

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters with ``weight_decay``."""
        return get_decay_names(model, decay_embeddings=self.decay_embeddings)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Build the optimizer of ``optim``, with LoRA+ learning rates for an adapter's B matrices."""
        # A verification forward pass may have left weights gathered; the optimizer must hold the shards.
        reshard(self.model)
        is_new, ratio = self.optimizer is None, self.adapter.loraplus_lr_ratio
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if is_new and ratio is not None:
            split_loraplus_groups(optimizer, self.model if model is None else model, ratio)
        return optimizer

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, and evaluate at the end unless the last step was evaluated or the best weights were loaded.

        Raises:
            PreemptedError: A process has a stop request; a checkpoint of the last finished step is complete.
        """
        if self.args.activation_checkpointing:
            options: Any = self.args.activation_checkpointing_kwargs
            enable_checkpointing(self.model, options)
            # Otherwise upstream's train() enables it again, without ``save_matmuls``, which it does not know.
            self.args.activation_checkpointing = False
        compilation = getattr(self.args, "compilation", None)
        if compilation is not None:
            self.add_callback(Compilation(self.model, compilation, self.observer.progress))
        # Used by forward passes before training; DeepSpeed's engine, which upstream's train() builds, adds its own.
        remove_gather_hooks(self.model)
        watching = WATCHDOG.watching(Path(str(self.args.output_dir)), is_main=self.args.process_index == 0)
        with STOP.deferred(), watching, preserve_architecture(self.model):
            match_kernels(self.list_frozen(), self.model, self.args)
            try:
                output = self.guard.train(super().train, resume_from_checkpoint)
                self.show_averaged_weights()
                has_best = self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None
                # With load_best_model_at_end, the loaded weights were evaluated when they were saved.
                if self.observer.hooks and self.last_evaluated_step != self.state.global_step and not has_best:
                    self.evaluate()
                # A stop request during the last save: all ranks must agree, or one would exit alone.
                stop_if_agreed()
            except PreemptedError as request:
                # All ranks raise the same error at the same step, so they save together.
                raise self._last_step.save(request) from None
            finally:
                self.observer.progress.stop()
        return output

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor | None]:
        """Take the micro-batches of one optimizer step and count their terms over all processes.

        Raises:
            PreemptedError: A process has a stop request; the step does not begin.
            DivergedError: No micro-batch of any rank has a term.
        """
        if self.stops_at_end():
            return [], None
        batches = list(self.take_batches(islice(epoch_iterator, num_batches)))
        if not batches:
            return [], None
        row_ids = [batch.pop(ROW_IDS, None) for batch in batches]
        if self.launch.context_size > 1:
            rank, size, by_heads = self.launch.context_rank, self.launch.context_size, self.launch.shares_by_heads
            batches = [shard_batch(batch, rank, size, by_heads=by_heads) for batch in batches]
        # Counts are on the host or on the device, depending on where the loader put the labels.
        num_terms = torch.stack([self.count_terms(batch) for batch in batches]).sum()
        num_tokens = torch.stack([batch["num_tokens"] for batch in batches]).sum()
        parts = [num_terms, num_tokens, torch.tensor(STOP.reason is not None)]
        # int64 (3,): all three share a single all-reduce. A blocking copy to the device would synchronise with it.
        counts = torch.stack([part.to(device, non_blocking=True) for part in parts])
        counts = self.accelerator.reduce(counts, reduction="sum")
        # The only host synchronisation before the step: all ranks stop together, and none divides by zero terms.
        total, _, num_stop_requests = counts.tolist()
        if num_stop_requests:
            raise build_preemption()
        if total == 0:
            raise DivergedError(
                f"step {self.state.global_step + 1} holds no token to train on; "
                "`recipes check` shows the share of supervised tokens of every row"
            )
        self.guard.inputs = StepInputs(batches, row_ids, counts[0], num_tokens=counts[1])
        return batches, counts[0]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Return a micro-batch's contribution to the mean loss of the step, scaled for DDP's mean over ranks.

        A load-balancing loss is a mean over tokens, weighted here by the micro-batch's share of the step's tokens:
        placeholders and repeated batches weigh 0, a short last batch less than the others.

        Args:
            model: The trained model, wrapped or not.
            inputs: The micro-batch.
            return_outputs: Not used; of upstream's signature.
            num_items_in_batch: Terms of the step, over all ranks and micro-batches; ``None`` outside of a step, where
                the divisor is the number of terms of the micro-batch.
        """
        batch = dict(inputs)
        num_tokens = batch.pop("num_tokens")
        scored = self.score_batch(model, batch)
        self.observer.counter.add(num_tokens, scored.num_targets, scored.num_correct)
        if scored.figures:
            self.figures.add(scored.figures, scored.num_terms)
        # DDP and FSDP average gradients over ranks, while the divisors below are sums over ranks.
        num_processes = self.accelerator.num_processes
        # Both are tensors on the device while training: the division does not synchronise.
        divisor = scored.num_terms if num_items_in_batch is None else num_items_in_batch
        loss: torch.Tensor = scored.loss_sum * (num_processes / divisor)
        if scored.aux_loss is None:
            return loss
        total = self.guard.inputs.num_tokens
        share = 1.0 if total is None else num_tokens.to(total.device) * (num_processes / total)
        return loss + self.router_aux_loss_coef * scored.aux_loss * share

    def take_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the micro-batches of a step; terms of a repeated one, which pads the epoch, are masked."""
        for batch in batches:
            # Needs no communication: the number of batches of each rank follows from the number of rows.
            is_repeated = self._is_last_repeated and self.accelerator.gradient_state.end_of_dataloader
            yield self.mask_batch(batch) if is_repeated else batch

    def floating_point_ops(self, inputs: Batch) -> int:
        """Return this process's share of upstream's ``6 * tokens * parameters``, with the parameters counted once."""
        # Upstream calls this for every micro-batch and traverses all parameters each time.
        if self._num_parameters is None:
            self._num_parameters = self.model.num_parameters(exclude_embeddings=True)
        return 6 * int(inputs["input_ids"].numel()) * self._num_parameters // self.launch.tensor_size

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run forward and backward; skip the empty placeholders of a batch-size ramp."""
        if inputs["input_ids"].numel() == 0:
            loss = torch.zeros((), device=self.args.device)
        else:
            loss = super().training_step(model, inputs, num_items_in_batch)
        # Stays on the device: the guard transfers all losses of a step at once.
        self.guard.inputs.losses.append(loss)
        return loss

    @contextlib.contextmanager
    def uncounted_pass(self) -> Iterator[None]:
        """Context in which forward and backward passes do not count as training."""
        # Losses of the pass are appended to a separate list; a load-balancing loss keeps the weight of the real step.
        inputs = StepInputs(num_tokens=self.guard.inputs.num_tokens)
        with temporarily(self, **self.build_stand_ins()), temporarily(self.guard, inputs=inputs):
            yield

    def build_stand_ins(self) -> dict[str, Any]:
        """Return temporary values of the attributes that accumulate over steps, for an uncounted pass."""
        return {"observer": replace(self.observer, counter=StepCounter()), "figures": TermMetrics()}

    def verify_first_loss(self, loss: float) -> None:
        """Compare the loss of the first step, before any update, with its expected value; nothing by default."""

    def find_rows(self, step: int) -> tuple[int, int]:
        """Return the half-open range of rows of the run that step ``step`` (from 0) takes over all ranks."""
        num_rows, plan = self._find_order().rows_per_epoch, self._plan_steps()
        epoch, index = divmod(step, plan.steps_per_epoch)
        # As upstream, the remaining rows of an epoch form a smaller last step.
        stop = num_rows if index + 1 == plan.steps_per_epoch else (index + 1) * plan.rows_per_step
        return epoch * num_rows + index * plan.rows_per_step, epoch * num_rows + stop

    def _plan_steps(self) -> StepPlan:
        return compute_steps(self._find_order().rows_per_epoch, vars(self.args), self.launch.data_size)

    def _find_order(self) -> Order:
        """Return the row order of the run: that of replay if configured, else upstream's."""
        if self.order is not None:
            return self.order
        rows: Any = self.train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return EpochOrder(len(rows), None if self.args.train_sampling_strategy == "sequential" else seed)

    # transformers 5.23 shuffles inside its sampler, which cannot skip rows, and accepts no other sampler.
    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        """Return the sampler of ``build_sampler``; upstream asks for none of a stream."""
        return self.build_sampler()

    def build_sampler(self) -> Sampler[int]:
        """Build the sampler of rows in order, without those skipped by rollbacks."""
        steps_per_epoch = self._plan_steps().steps_per_epoch
        return RunSampler(
            self._find_order(),
            skips=find_skips(self.guard.rollbacks),
            read_epoch=lambda: self.state.global_step // steps_per_epoch,
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Build upstream's loader, with batches distributed over data-parallel ranks instead of processes."""
        loader: DataLoader[Any] = super().get_train_dataloader()
        shard = loader.batch_sampler
        if isinstance(shard, BatchSamplerShard):
            self._is_last_repeated = shard_evenly(shard, self.launch.data_size, self.launch.data_rank)
        return loader

    # transformers 5.23 casts float tensors to bf16 under DeepSpeed: stored log-probabilities would be off by a nat.
    def _prepare_input(self, data: Any) -> Any:
        """Return a batch on the device, in its own dtypes."""
        return send_to_device(data, self.args.device)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the rows of an optimizer step over all data-parallel ranks."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.launch.data_size)

    # transformers 5.23 has no callback between norm and clipping, which spreads a NaN norm to all gradients.
    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip the gradients by their global norm and return the norm; the guard decides before clipping.

        Raises:
            DivergedError: As ``StepGuard.check_step``.
        """
        self._add_penalty()
        if self.is_deepspeed_enabled:
            return super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        with_gradient = [parameter for parameter in model.parameters() if parameter.grad is not None]
        norm = self._compute_grad_norm(with_gradient)
        self.guard.check_step(norm)
        # accelerate's clipping would compute the norm again, over parameters that another rank counts too.
        clip_gradients(with_gradient, self.args.max_grad_norm, norm)
        return norm

    # Without clipping, transformers 5.23 computes the norm here, the last call before the update.
    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the global gradient norm; without clipping, compute it and let the guard decide.

        Raises:
            DivergedError: As ``StepGuard.check_step``.
        """
        if grad_norm is None:
            self._add_penalty()
        if self.is_deepspeed_enabled:
            return self.guard.check_step(super()._get_grad_norm(model, grad_norm=grad_norm))  # type: ignore[no-untyped-call]
        return self.guard.check_step(self._compute_grad_norm(model.parameters())) if grad_norm is None else grad_norm

    def _add_penalty(self) -> None:
        """Add the gradient of the weight penalty, multiplied by the loss scale: gradients are unscaled later."""
        if self.penalty is not None:
            scaler: Any = self.accelerator.scaler
            self.penalty.add_gradients(1.0 if scaler is None else scaler.get_scale())

    def _compute_grad_norm(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        # The guard compares norms over steps, so under fp16 they must not contain the loss scale.
        self.accelerator.unscale_gradients()
        counted = self.list_counted(parameters)
        return self.measure_norm([parameter.grad for parameter in counted if parameter.grad is not None])

    def measure_norm(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the joint norm of parameters or gradients over all ranks that hold parts of them; all must call."""
        return compute_total_norm(tensors)

    def list_counted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that this rank counts in a norm: a replicated one is counted on one rank."""
        return list(parameters)

    def get_evaluation_model(self) -> nn.Module:
        """Return the model to evaluate, in the compute dtype of training."""
        if self.is_in_train:
            return self.model_wrapped
        prepared: nn.Module = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        return prepared

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """Run every evaluation hook on the current weights and return the metrics, each named ``eval_...``.

        Raises:
            ConfigError: The metrics do not contain ``metric_for_best_model``.
        """
        step, metrics = self._last_evaluation
        if self.is_in_train and step == self.last_evaluated_step == self.state.global_step:
            # Upstream evaluates twice if a multiple of eval_steps coincides with the end of an epoch.
            self.control.should_evaluate = False
            return metrics
        metrics = {}
        self.is_evaluating = True
        WATCHDOG.enter("an evaluation")
        self.show_averaged_weights()
        model = self.get_evaluation_model()
        for hook in self.observer.hooks:
            figures = hook(model, self.state.global_step)
            metrics |= {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        best = name_metric(self.args)
        if self.args.metric_for_best_model and best not in metrics:
            found = f"the evaluation of step {self.state.global_step} has no `{best}`, but {', '.join(sorted(metrics))}"
            remedy = "name one of them; benchmarks have scores at every evaluation where eval_tasks_steps is left out"
            raise ConfigError(Problem("metric_for_best_model", found, remedy))
        self.is_evaluating, self.last_evaluated_step = False, self.state.global_step
        self._last_evaluation = (self.last_evaluated_step, metrics)
        record_evaluation(self.state, self.last_evaluated_step, is_owed=False)
        WATCHDOG.enter("the work after an evaluation")
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def configure_router_loss(
    model: PreTrainedModel, coefficient: float | None, launch: Launch, *, by_default: bool
) -> float:
    """Enable or disable the load-balancing loss of a mixture of experts; return its coefficient.

    Args:
        model: The model; the coefficient is saved in its configuration.
        coefficient: ``router_aux_loss_coef``; ``None``: the value of the model's configuration.
        launch: Launch layout of the run.
        by_default: Whether a nonzero coefficient of the model enables the loss; otherwise its
            ``output_router_logits`` decides.

    Raises:
        ConfigError: A coefficient is set for a dense model; or the loss is enabled under context or pipeline
            parallelism, where a rank has a part of the tokens or layers that it averages over.

    Source: ``trl.SFTTrainer.__init__`` (trl 1.16); ``tests/parity/test_experts.py``.
    """
    base: Any = unwrap_adapter(model)
    config = base.config.get_text_config()
    if coefficient and not hasattr(config, "output_router_logits"):
        found = f"{type(base).__name__} is no mixture of experts that returns its router logits"
        raise ConfigError(Problem("router_aux_loss_coef", found, "delete the line"))
    name = "aux_loss_coef" if config.model_type == "jetmoe" else "router_aux_loss_coef"
    chosen = float(getattr(config, name, None) or 0.0) if coefficient is None else coefficient
    if hasattr(config, "output_router_logits") and (by_default or coefficient is not None):
        setattr(config, name, chosen)
        # Not by ``output_router_logits``, which would be saved: with it, transformers fails to continue padded prompts.
        base.has_router_loss = chosen != 0.0
        if base.has_router_loss and (launch.context_size > 1 or launch.part):
            found = "context and pipeline parallelism do not support the load-balancing loss of experts"
            remedy = "write router_aux_loss_coef: 0, or launch with accelerate_configs/fsdp2.yaml"
            raise ConfigError(Problem("router_aux_loss_coef", found, remedy))
    return chosen


class RunSampler(Sampler[int]):
    """Sampler of the row indices of an epoch, the same on every rank; accelerate shards the batches.

    A skipped row is replaced by the next one in the order, at the end of an epoch by the first of the next epoch.

    Source: ``tests/training/trainers/test_run_sampler.py``.
    """

    def __init__(self, order: Order, *, skips: RowSkips, read_epoch: Callable[[], int]) -> None:
        """Sample rows in ``order`` without ``skips``; ``read_epoch`` returns the epoch (from 0) at its start."""
        self._order = order
        self._skips = skips
        self._read_epoch = read_epoch

    def __len__(self) -> int:
        return self._order.rows_per_epoch

    def __iter__(self) -> Iterator[int]:
        # One integer at a time: a list of them takes 40 bytes a row, on every process.
        yield from map(int, self.read_rows())

    def read_rows(self) -> IntArray:
        """Return the rows of the epoch, ``int64 (len(self),)``."""
        # Positions are counted over the whole run: a skip shifts all later rows, across the epoch's end too.
        first = self._read_epoch() * len(self)
        return self._order.locate(self._skips.locate(np.arange(first, first + len(self))))


class RankBatches(BatchSampler):
    """Every ``data_size``-th batch of an epoch, from ``data_rank`` on; the last batch replaces those beyond it."""

    def __init__(self, batches: BatchSampler, data_size: int, data_rank: int) -> None:
        """Take ``batches`` round-robin, as many on each rank; ``drop_last`` drops an incomplete round."""
        super().__init__(batches.sampler, batches.batch_size, batches.drop_last)
        num_batches, num_dropped = len(batches), data_size - 1 if batches.drop_last else 0
        self._numbers = range(data_rank, num_batches + data_rank - num_dropped, data_size)
        self._last = num_batches - 1
        self.is_last_repeated = len(self) > 0 and self._numbers[-1] > self._last

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[list[int]]:
        # Slices, for a resume takes all batches before its first one: those of other ranks are never built.
        sampler: Any = self.sampler
        rows = sampler.read_rows() if isinstance(sampler, RunSampler) else range(len(sampler))
        for number in self._numbers:
            first = min(number, self._last) * self.batch_size
            yield list(map(int, rows[first : first + self.batch_size]))


def shard_evenly(shard: BatchSamplerShard, data_size: int, data_rank: int) -> bool:
    """Distribute the batches of an epoch round-robin over data-parallel ranks, the same number to each; in place.

    accelerate would pad the last batches with the first rows of the epoch, which would then count twice, and would give
    the ranks of one tensor- or context-parallel group different batches.

    Args:
        shard: accelerate's sampler over all batches.
        data_size: Number of data-parallel ranks.
        data_rank: Data-parallel rank of this process.

    Returns:
        Whether the last batch of this rank is a repeated one, whose terms must not count.

    Source: ``tests/training/trainers/test_run_sampler.py``.
    """
    batches = RankBatches(shard.batch_sampler, data_size, data_rank)
    shard.batch_sampler, shard.even_batches = batches, False
    shard.num_processes, shard.process_index = 1, 0
    return batches.is_last_repeated
