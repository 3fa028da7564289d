"""Pipeline parallelism: process groups, torch's schedules over the stages of a model, and the pretraining trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup, pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from recipes_lib.losses.next_token import TokenSums
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.models.inference import find_device
from recipes_lib.models.parallel.pipeline_parallel import AbsentModule, build_pipeline_mesh, split_into_chunks
from recipes_lib.models.parallel.pipeline_part import PipelinePart
from recipes_lib.training.collectives import broadcast_object, get_rank, get_world_size
from recipes_lib.training.layouts.fsdp import compute_total_norm, get_local, has_shards, reshard, shard_chunk
from recipes_lib.training.layouts.launch_environment import Launch
from recipes_lib.training.trainers.arguments import build_autocast, get_compute_dtype
from recipes_lib.training.trainers.next_token_trainer import PretrainTrainer
from recipes_lib.training.trainers.recipe_trainer import Batch, BatchLoss


@dataclass(frozen=True, slots=True, eq=False)
class PipelineGroups:
    """Process groups of this rank.

    Attributes:
        pipeline: Ranks of the same pipeline, in stage order.
        replicas: Ranks with the same weights and other rows, as a one-dimensional slice of the device mesh.
        ends: First and last rank of the pipeline, which have copies of tied embeddings; ranks between are not members.
    """

    pipeline: ProcessGroup
    replicas: DeviceMesh
    ends: ProcessGroup


@functools.cache
def build_pipeline_groups(num_stages: int, tensor_size: int = 1) -> PipelineGroups:
    """Build the groups of this rank; all ranks must call, with equal arguments.

    Args:
        num_stages: Number of pipeline stages; divides the world size.
        tensor_size: Tensor-parallel ranks of each stage.
    """
    mesh, num_pipelines = build_pipeline_mesh(num_stages, tensor_size), get_world_size() // num_stages
    last = num_pipelines * (num_stages - 1)
    # ``new_group`` is collective over the world: every rank creates the groups of all pipelines.
    ends = [distributed.new_group(sorted({first, last + first})) for first in range(num_pipelines)]
    return PipelineGroups(mesh.get_group("pp"), mesh["fsdp"], ends[get_rank() % num_pipelines])


_SCHEDULES: Final[Mapping[str, Any]] = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
}
_LOSS_INPUTS: Final = ("labels", "target_positions", "loss_head")
"""Inputs of the last chunk only."""


class Chunk(nn.Module):
    """Adapts a chunk to torch's schedules: hidden states come from the previous chunk, other inputs from the batch.

    Every stage loads the batch, so positions and document boundaries are never sent.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        is_first: bool,
        is_last: bool,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Run ``model``, a chunk of ``split_into_chunks``, under ``autocast``."""
        super().__init__()
        self.model = model
        self.is_first, self.is_last = is_first, is_last
        self.batches: Sequence[Batch] = ()
        self.results: list[Any] = []
        self._autocast = autocast
        self._dtype = model.dtype
        if is_last:
            add_loss_head(model)

    def forward(self, states: Tensor | None = None, *, at: Tensor) -> Tensor:
        """Return the hidden states after this chunk, ``(B, L, D)``, or the summed loss of the last chunk.

        Args:
            states: Hidden states of the previous chunk, ``(B, L, D)``; ``None`` for the first chunk.
            at: Index of the micro-batch, ``int64 (1,)``.
        """
        inputs = dict(self.batches[int(at)])
        if not self.is_first:
            del inputs["input_ids"]
            inputs["inputs_embeds"] = states
        with self._autocast():
            if self.is_last:
                self.results.append(self.model(**inputs, use_cache=False))
                # Without targets there is no loss, only logits, whose gradients are never used.
                loss: Tensor = getattr(self.results[-1], "nll_sum", torch.zeros(()))
                return loss
            inputs = {name: value for name, value in inputs.items() if name not in _LOSS_INPUTS}
            hidden: Tensor = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        # The next stage receives into a buffer of this dtype; autocast may return another one.
        return hidden.to(self._dtype)


class Pipeline(nn.Module):
    """Model distributed over pipeline stages; outputs and gradients equal those of the whole model.

    Source: torch ``torch.distributed.pipelining``; ``tests/training/layouts/test_pipeline_schedule.py``,
    ``tests/distributed/test_pipeline.py``.
    """

    def __init__(
        self, model: Any, mesh: PipelineGroups, *, schedule: str, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Wrap the chunks of this rank; all ranks must call.

        Args:
            model: This rank's part of the model, from ``build_pipeline_stage_class``, on its device.
            mesh: Process groups of this rank.
            schedule: One of ``SCHEDULES`` of ``training/layouts/launch_environment.py``.
            autocast: Factory of the context of forward passes.
        """
        super().__init__()
        self.model, self.config = model, model.config
        self.part: PipelinePart = model.part
        last = self.part.total_chunks - 1
        numbered = zip(self.part.chunks, split_into_chunks(model), strict=True)
        self.chunks: Any = nn.ModuleList(
            Chunk(chunk, is_first=number == 0, is_last=number == last, autocast=autocast) for number, chunk in numbered
        )
        self._mesh, self._schedule = mesh, schedule
        self._dtype = model.dtype  # Of hidden states. Read once: FSDP2 changes the dtype of gathered weights.
        self._built: tuple[Any, Any] | None = None  # Key (micro-batches, shape) and the schedule built for it.
        self._scale: Tensor | float = 1.0

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """The last stage's copy of a tied embedding; ``None`` on other stages and for untied models."""
        is_copy = self.part.is_last and not self.part.is_first and self.model.is_tied
        return self.model.get_input_embeddings().weight if is_copy else None

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding; on other stages than the first a placeholder, or a tied copy that is not called."""
        embedding: nn.Module = self.model.get_input_embeddings()
        return embedding

    def shard(self, compute_dtype: torch.dtype) -> None:
        """Shard this stage over its replicas, layer by layer; must precede the optimizer.

        Args:
            compute_dtype: Dtype of matrix products.
        """
        for chunk in self.chunks:
            layers = [layer for layer in chunk.model.base_model.layers if not isinstance(layer, AbsentModule)]
            shard_chunk(chunk, layers, self._mesh.replicas, compute_dtype)

    @torch.no_grad()
    def forward(self, **inputs: Any) -> Any:
        """Return the output of the whole model for a batch, on every rank of the pipeline; all ranks must call.

        Args:
            **inputs: Inputs of a model with a loss head, the same on all stages.

        Returns:
            ``TokenSums`` with ``loss_head=True``, else ``loss`` and ``logits``.
        """
        inputs.pop("use_cache", None)
        results = self._run_with([inputs], self._run_forward)
        reshard(self)
        output = _to_host(results[0]) if results else {}
        output = broadcast_object(output, self._mesh.pipeline, source=self.part.num_stages - 1)
        kind: Any = TokenSums if inputs.get("loss_head") else CausalLMOutput
        device = inputs["input_ids"].device
        return kind(**{name: value.to(device) for name, value in output.items()})

    def compute_gradients(self, batches: Sequence[Batch], num_targets: Tensor | int) -> Sequence[Any]:
        """Run all micro-batches of a step forward and backward, and accumulate gradients.

        Gradients are those of this pipeline's rows; call ``reduce_gradients`` next.

        Args:
            batches: Micro-batches of one shape, without ``num_tokens``.
            num_targets: Divisor of the summed loss: targets of the step over all pipelines.

        Returns:
            ``TokenSums`` of each micro-batch on the rank of the last chunk; empty on other ranks.
        """
        # The loss function of torch's schedules takes one micro-batch: it returns its share of the step's mean.
        self._scale = 1 / num_targets
        return self._run_with([{**batch, "loss_head": True} for batch in batches], self._run_schedule)

    def reduce_gradients(self) -> None:
        """Sum gradients over replicas, and those of tied embeddings over first and last stage; all ranks must call."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        # FSDP2 has already reduced gradients of sharded parameters.
        if self._mesh.replicas.size() > 1 and not has_shards(self.model):
            for gradient in gradients:
                distributed.all_reduce(gradient, group=self._mesh.replicas.get_group())
        is_end = self.part.is_first or self.part.is_last
        if self.part.num_stages > 1 and is_end and self.model.is_tied:
            gradient = self.model.get_input_embeddings().weight.grad
            # Both copies are sharded alike, so local shards correspond.
            distributed.all_reduce(get_local(gradient), group=self._mesh.ends)

    def measure_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the norm over all stages of each rank's ``tensors``, which exclude copies; all ranks must call."""
        # Stages have different weights: squared norms add up.
        squares = compute_total_norm(tensors).square().to(self._device)
        distributed.all_reduce(squares, group=self._mesh.pipeline)
        return squares.sqrt()

    def _run_with(self, batches: Sequence[Batch], run: Callable[[Sequence[Batch]], None]) -> Sequence[Any]:
        """Call ``run`` with ``batches`` set on all chunks; return outputs of the last chunk, empty on other ranks."""
        for chunk in self.chunks:
            chunk.batches, chunk.results = batches, []
        run(batches)
        results: Sequence[Any] = self.chunks[-1].results
        for chunk in self.chunks:
            chunk.batches, chunk.results = (), []
        return results

    def _run_forward(self, batches: Sequence[Batch]) -> None:
        """Run one batch forward, chunk by chunk over the stages."""
        size, shape = self.part.num_stages, batches[0]["input_ids"].shape
        states = None
        for number, chunk in zip(self.part.chunks, self.chunks, strict=True):
            if not chunk.is_first and size > 1:
                states = torch.empty(*shape, self.config.hidden_size, dtype=self._dtype, device=self._device)
                distributed.recv(states, group=self._mesh.pipeline, group_src=(number - 1) % size)
            states = chunk(states, at=torch.zeros(1, dtype=torch.int64))
            if not chunk.is_last and size > 1:
                distributed.send(states.contiguous(), group=self._mesh.pipeline, group_dst=(number + 1) % size)

    def _run_schedule(self, batches: Sequence[Batch]) -> None:
        key = (len(batches), batches[0]["input_ids"].shape)
        if self._built is None or self._built[0] != key:
            self._built = (key, self._build_schedule(*key))
        numbers = torch.arange(len(batches))
        target = {"target": numbers} if self.chunks[-1].is_last else {}
        self._built[1].step(at=numbers, return_outputs=False, **target)

    def _build_schedule(self, num_batches: int, shape: torch.Size) -> Any:
        # Given shapes of inputs and outputs, torch does not run the model to infer them.
        options: dict[str, Any] = {"dtype": self._dtype, "device": "meta", "requires_grad": True}
        states, loss = torch.empty(*shape, self.config.hidden_size, **options), torch.empty((), **options)
        stages = [
            PipelineStage(
                chunk,
                number,
                self.part.total_chunks,
                self._device,
                input_args=() if chunk.is_first else (states,),
                output_args=(loss if chunk.is_last else states,),
                group=self._mesh.pipeline,
            )
            for number, chunk in zip(self.part.chunks, self.chunks, strict=True)
        ]
        return _SCHEDULES[self._schedule](
            stages[0] if len(stages) == 1 else stages,
            num_batches,
            loss_fn=lambda nll_sum, _: nll_sum * self._scale,
            # By default, torch divides gradients by the number of micro-batches; the losses are shares already.
            scale_grads=False,
        )

    @property
    def _device(self) -> torch.device:
        return find_device(self.model)


def _to_host(output: Any) -> dict[str, Tensor]:
    names = ("nll_sum", "num_targets", "num_correct", "loss", "logits")
    return {name: value.cpu() for name in names if (value := getattr(output, name, None)) is not None}


def choose_trainer(launch: Launch) -> type[PretrainTrainer]:
    """Return the trainer class of a launch: for whole models, or for pipeline parallelism."""
    return PretrainTrainer if launch.part is None else PipelineTrainer


class PipelineTrainer(PretrainTrainer):
    """``PretrainTrainer`` for pipeline parallelism.

    All micro-batches of an optimizer step run in one schedule, during the first of upstream's ``training_step`` calls.
    Only the rank of the last chunk has the loss; on other ranks it is 0.

    Source: ``tests/distributed/test_pipeline.py``, ``docs/decisions/0015-pipeline.md``.
    """

    model_wrapped: Any

    def __init__(self, *, model: Any, **kwargs: Any) -> None:
        """Build the pipeline and initialise the trainer.

        Args:
            model: This rank's part of the model.
            **kwargs: As ``PretrainTrainer``.
        """
        launch, args = self.launch, kwargs["args"]
        layout = launch.layout
        self._mesh = build_pipeline_groups(layout.pipeline_stages, launch.tensor_size)
        self.pipeline = Pipeline(model, self._mesh, schedule=layout.schedule, autocast=build_autocast(args))
        if launch.engine == "FSDP":
            # Before ``super().__init__``, which verifies that the model is sharded.
            self.pipeline.shard(get_compute_dtype(args))
        super().__init__(model=model, **kwargs)
        self.model_wrapped = self.pipeline
        self._shares: Sequence[torch.Tensor] = ()
        self.observer.progress.say(
            _describe(self.pipeline, layout.schedule, num_batches=self.args.gradient_accumulation_steps)
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor | None]:
        """Take the micro-batches of a step, and correct the number of targets.

        Raises:
            PreemptedError: As ``RecipeTrainer``.
            DivergedError: As ``RecipeTrainer``.
        """
        batches, num_terms = super().get_batch_samples(epoch_iterator, num_batches, device)
        if num_terms is not None:
            # The superclass sums over all ranks, but all ranks of a pipeline count the same rows.
            num_terms = self.guard.inputs.num_terms = num_terms // (
                self.launch.layout.pipeline_stages * self.launch.tensor_size
            )
        return batches, num_terms

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Return this rank's share of a micro-batch's loss; the first call of a step computes all of them."""
        # Upstream calls once per micro-batch, and the schedule needs all micro-batches at once.
        losses = self.guard.inputs.losses
        if not losses:
            self._shares = self._run_step()
        losses.append(self._shares[len(losses)])
        return losses[-1]

    def score_batch(self, model: nn.Module, inputs: Batch) -> BatchLoss:
        """Return the loss of a batch in evaluation, an equal share on each rank of the pipeline."""
        outputs = model(**inputs, loss_head=True)
        share = outputs.nll_sum * (self._mesh.replicas.size() / self.accelerator.num_processes)
        return BatchLoss(share, outputs.num_targets, outputs.num_targets, outputs.num_correct, None)

    def _run_step(self) -> Sequence[torch.Tensor]:
        """Compute the gradients of a step; return the loss share of each micro-batch."""
        self.pipeline.train()
        inputs = self.guard.inputs
        batches: list[Any] = [self._prepare_inputs(dict(batch)) for batch in inputs.batches]
        num_tokens = [batch.pop("num_tokens") for batch in batches]
        assert inputs.num_terms is not None
        outputs = self.pipeline.compute_gradients(batches, inputs.num_terms)
        self.pipeline.reduce_gradients()
        # Tensor-parallel ranks compute the same loss: only rank 0 of a group counts it.
        if not outputs or self.launch.rank % self.launch.tensor_size:
            return [torch.zeros((), device=self.args.device) for _ in batches]
        for tokens, output in zip(num_tokens, outputs, strict=True):
            self.observer.counter.add(tokens, output.num_targets, output.num_correct)
        # The guard averages losses over all ranks, most of which return 0.
        scale = self.accelerator.num_processes / inputs.num_terms
        return [output.nll_sum.detach() * scale for output in outputs]

    def measure_norm(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the joint norm over all stages; all ranks must call."""
        return self.pipeline.measure_norm(tensors)

    def list_counted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Exclude the copy of a tied embedding, which the first stage counts."""
        return [parameter for parameter in parameters if parameter is not self.pipeline.tied_copy]

    def get_evaluation_model(self) -> nn.Module:
        """Return the pipeline, which evaluates over all stages."""
        return self.pipeline

    # transformers 5.23 does not know pipeline parallelism, and would wrap a pipeline stage in DDP.
    def _wrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Return the pipeline instead of a DDP module, which would average gradients of different stages."""
        return self.pipeline


def _describe(pipeline: Pipeline, schedule: str, *, num_batches: int) -> str:
    part = pipeline.part
    bubble = (part.num_stages - 1) / (num_batches * part.num_chunks)
    chunks = f" of {part.num_chunks} chunks each" if part.num_chunks > 1 else ""
    return (
        f"pipeline: {part.num_stages} stages{chunks} by {schedule}, {num_batches} micro-batches a step; the bubble "
        f"adds {bubble:.0%} of compute time. Samples are not written, because no process has the whole model"
    )
