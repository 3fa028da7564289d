"""The pretraining trainer under pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from recipes_lib.training.layouts.launch_environment import Launch, read_launch
from recipes_lib.training.layouts.pipeline import Pipeline, build_stage_mesh
from recipes_lib.training.trainers.arguments import build_autocast, get_compute_dtype
from recipes_lib.training.trainers.next_token_trainer import PretrainTrainer
from recipes_lib.training.trainers.recipe_trainer import Batch


def choose_trainer(launch: Launch) -> type[PretrainTrainer]:
    """Return the trainer of a launch: of whole models, or of pipeline-parallel models."""
    return PretrainTrainer if launch.part is None else PipelineTrainer


class PipelineTrainer(PretrainTrainer):
    """``PretrainTrainer`` of a model that several processes hold together.

    All micro-batches of an optimizer step go through the stages by one schedule, in the first of the calls that
    upstream makes for them. The loss is known where the last chunk is: there it is counted, and to all others it is 0.

    Source: ``tests/distributed/test_pipeline.py``, ``docs/decisions/0015-pipeline.md``.
    """

    model_wrapped: Any

    def __init__(self, *, model: Any, **kwargs: Any) -> None:
        """Connect the stages.

        Args:
            model: This process's part.
            **kwargs: As ``PretrainTrainer``.
        """
        launch, args = read_launch(), kwargs["args"]
        layout = launch.layout
        self._mesh = build_stage_mesh(layout.stages, launch.tensor_size)
        self.pipeline = Pipeline(model, self._mesh, schedule=layout.schedule, autocast=build_autocast(args))
        if launch.engine == "FSDP":
            # Before upstream looks for what is sharded.
            self.pipeline.shard(get_compute_dtype(args))
        super().__init__(model=model, **kwargs)
        self.model_wrapped = self.pipeline
        self._shares: Sequence[torch.Tensor] = ()
        self.observer.progress.say(
            _describe(self.pipeline, layout.schedule, num_batches=self.args.gradient_accumulation_steps)
        )

    def add_loss_head(self) -> None:
        """Leave it to the last chunk, which alone can project."""

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor | None]:
        """Take the micro-batches of a step, whose terms every stage has counted.

        Raises:
            PreemptedError: As ``RecipeTrainer``.
            DivergedError: As there.
        """
        batches, num_terms = super().get_batch_samples(epoch_iterator, num_batches, device)
        if num_terms is not None:
            num_terms = self.guard.inputs.num_terms = num_terms // (self.launch.layout.stages * self.launch.tensor_size)
        return batches, num_terms

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Return this process's share of a micro-batch's loss; the first call of a step runs them all."""
        losses = self.guard.inputs.losses
        if not losses:
            self._shares = self._run_step()
        losses.append(self._shares[len(losses)])
        return losses[-1]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the loss of a batch outside of training; every stage gets the same."""
        del inputs["num_tokens"]
        outputs = model(**inputs, loss_head=True)
        num_targets = outputs.num_targets if num_items_in_batch is None else num_items_in_batch
        loss = outputs.nll_sum * (self._mesh.replicas.size() / num_targets)
        return (loss, outputs) if return_outputs else loss

    def _run_step(self) -> Sequence[torch.Tensor]:
        """Leave the gradients of a step; return the shares of its micro-batches in the loss."""
        self.pipeline.train()
        inputs = self.guard.inputs
        batches: list[Any] = [self._prepare_inputs(dict(batch)) for batch in inputs.batches]
        num_tokens = [batch.pop("num_tokens") for batch in batches]
        assert inputs.num_terms is not None
        sums = self.pipeline.compute_gradients(batches, inputs.num_terms)
        self.pipeline.reduce_gradients()
        # Tensor-parallel ranks have the same loss: one of them counts it.
        if not sums or self.launch.tensor_rank:
            return [torch.zeros((), device=self.args.device) for _ in batches]
        for tokens, found in zip(num_tokens, sums, strict=True):
            self.observer.counter.add(tokens, found.num_targets, found.num_correct)
        scale = self.accelerator.num_processes / inputs.num_terms
        return [found.nll_sum.detach() * scale for found in sums]

    def measure_norm(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm over all stages."""
        return self.pipeline.measure_norm(tensors)

    def list_counted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Leave out the copy of a tied embedding, which the first stage counts."""
        return [parameter for parameter in parameters if parameter is not self.pipeline.tied_copy]

    def get_evaluation_model(self) -> nn.Module:
        """Return the whole model."""
        return self.pipeline

    # transformers 5.23 knows no pipeline parallelism, and would wrap a pipeline stage in DDP.
    def _wrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Keep accelerate from averaging over all processes what each holds alone."""
        return self.pipeline


def _describe(pipeline: Pipeline, schedule: str, *, num_batches: int) -> str:
    part = pipeline.part
    bubble = (part.num_stages - 1) / (num_batches * part.num_chunks)
    chunks = f" of {part.num_chunks} chunks each" if part.num_chunks > 1 else ""
    return (
        f"pipeline: {part.num_stages} stages{chunks} by {schedule}, {num_batches} micro-batches a step; the bubble "
        f"adds {bubble:.0%} of compute time. Samples are not written, since no process has the whole model"
    )
