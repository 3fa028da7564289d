"""The objective that every next-token stage shares: the mean negative log-likelihood of its targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recipes_lib.data.masking import IGNORE_INDEX
from recipes_lib.models.heads import add_loss_head
from recipes_lib.training.recipe_trainer import Batch, RecipeTrainer


class NextTokenTrainer(RecipeTrainer):
    """``RecipeTrainer`` with the next-token objective, computed in the model's own output projection.

    A stage derives from it and from the upstream trainer of its kind, in this order.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Put the loss head on the model and set the trainer up.

        Args:
            **kwargs: As ``RecipeTrainer``; ``model`` is a causal language model, ``data_collator`` makes ``input_ids``,
                ``labels`` and ``position_ids``, and the first token of each document is never a target.
        """
        super().__init__(**kwargs)
        self.add_loss_head()

    def add_loss_head(self) -> None:
        """Let the model return its loss without logits."""
        add_loss_head(self.model)

    def count_terms(self, batch: Batch) -> torch.Tensor:
        """Return the number of targets."""
        labels: torch.Tensor = batch["labels"]
        return labels.ne(IGNORE_INDEX).sum()

    def leave_out(self, batch: Batch) -> Batch:
        """Return the batch without targets."""
        none = {"labels": torch.full_like(batch["labels"], IGNORE_INDEX)}
        return {**batch, **none, "num_tokens": torch.zeros_like(batch["num_tokens"])}

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return this process's share of the step's mean negative log-likelihood, in nats per target."""
        num_tokens = inputs.pop("num_tokens")
        outputs = model(**inputs, loss_head=True)
        num_targets = outputs.num_targets if num_items_in_batch is None else num_items_in_batch
        # Gradients are averaged over processes, while num_targets counts all of them.
        loss = outputs.nll_sum * (self.accelerator.num_processes / num_targets)
        if outputs.aux_loss is not None:
            loss = loss + self.weigh_aux_loss(outputs.aux_loss, num_tokens)
        self.observer.counter.add(num_tokens, outputs.num_targets, outputs.num_correct)
        return (loss, outputs) if return_outputs else loss
