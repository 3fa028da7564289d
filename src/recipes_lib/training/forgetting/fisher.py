"""Diagonal Fisher information of a language model, and its files in the model folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from accelerate.utils import send_to_device
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recipes_lib.errors import ConfigError, DataError, Problem, list_first
from recipes_lib.files import atomic_file, read_record, remove_unfinished_weights, replace_record
from recipes_lib.losses.next_token import TokenSums, compute_cross_entropy, sample_targets
from recipes_lib.models.inference import find_device
from recipes_lib.training.collectives import get_rank, get_world_size, sum_tensor
from recipes_lib.training.monitoring.progress import TrainingProgress

FISHER_FILE: Final = "fisher.safetensors"
"""File of the diagonal: ``float32`` tensors by parameter name."""
RECORD_FILE: Final = "fisher.json"
"""File that records the weights, data and settings of the computation."""

Document = dict[str, Any]
Labels = Literal["sampled", "empirical"]


class Fisher(NamedTuple):
    """Diagonal Fisher information, in squared nats per target token.

    Attributes:
        diagonal: Tensors by parameter name, ``float32`` of the parameter's shape.
        num_documents: Number of documents.
        num_tokens: Number of their target tokens, over which the diagonal is a mean.
    """

    diagonal: dict[str, Tensor]
    num_documents: int
    num_tokens: int


def split_documents(rows: Iterable[Mapping[str, Any]]) -> Iterator[Document]:
    """Yield the documents of packed rows, each as a separate row; documents without a target are skipped.

    Args:
        rows: Packed rows with ``input_ids`` and ``loss_mask``, both ``(T,)``, and ``seq_lengths``, whose sum is T.
    """
    for row in rows:
        start = 0
        for length in np.asarray(row["seq_lengths"]).tolist():
            span = slice(start, start + length)
            start += length
            if row["loss_mask"][span][1:].any():
                yield {
                    "input_ids": row["input_ids"][span],
                    "loss_mask": row["loss_mask"][span],
                    "seq_lengths": np.array([length]),
                    "row_ids": np.zeros(0, np.int64),
                }


def compute_fisher(
    model: nn.Module,
    documents: Sequence[Document],
    collate: Callable[[Sequence[Document]], Mapping[str, Any]],
    *,
    labels: Labels,
    seed: int,
    progress: TrainingProgress,
) -> Fisher:
    """Return the mean over target tokens of the squared gradient of a document's log-likelihood.

    Gradients are squared per document, before summation: the square of a batch's mean gradient would be too small by
    the batch size. ``sampled`` draws each target from the model's prediction, given the actual text. Gradients of such
    targets are uncorrelated, so the squared gradient of a document is in expectation the sum over its tokens.
    ``empirical`` uses the targets of the text, which gives the Fisher information only if the model's distribution is
    correct. Documents are divided over the processes, which all get the result; every process must call.

    Args:
        model: Causal language model with a loss head; set to evaluation mode.
        documents: Documents of ``split_documents``.
        collate: Collator of documents.
        labels: Source of the targets, ``sampled`` or ``empirical``.
        seed: Seed of sampled targets, combined with the index of the document.
        progress: Progress display.

    Raises:
        DataError: Squared gradients overflow.

    Source: Kirkpatrick et al. 2017 (arXiv 1612.00796), Kunstner et al. 2019 (arXiv 1905.12558) on ``empirical``;
        ``tests/training/forgetting/test_fisher.py``.
    """
    model.eval()
    device = find_device(model)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    sums = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in named.items()}
    num_tokens = torch.zeros((), dtype=torch.int64)
    numbers = range(get_rank(), len(documents), get_world_size())
    for number in progress.track(numbers, "documents", len(numbers)):
        batch = collate([documents[number]])
        generator = None
        if labels == "sampled":
            # Seeded by document, so that the draws do not depend on the number of processes.
            mixed = np.random.SeedSequence([seed, number]).generate_state(1)
            generator = torch.Generator(device).manual_seed(int(mixed[0]))
        total = _score(model, batch, device, generator)
        # ``autograd.grad`` instead of ``backward``, which would accumulate gradients instead of their squares.
        gradients = torch.autograd.grad(total.nll_sum, list(named.values()), allow_unused=True)
        for name, gradient in zip(named, gradients, strict=True):
            if gradient is not None:
                sums[name].addcmul_(gradient.float(), gradient.float())
        num_tokens += int(total.num_targets)
    tokens = int(sum_tensor(num_tokens.to(device)))
    diagonal = {name: sum_tensor(value).div_(tokens) for name, value in sums.items()}
    if broken := [name for name, value in diagonal.items() if not value.isfinite().all()]:
        found = f"squared gradients of {len(broken)} weights are not finite: {list_first(broken)}"
        raise DataError(Problem("model_name_or_path", found, "compute in float32 (bf16: false, fp16: false)"))
    return Fisher(diagonal, len(documents), tokens)


def _score(
    model: nn.Module, batch: Mapping[str, Any], device: torch.device, generator: torch.Generator | None
) -> TokenSums:
    """Return the cross-entropy of a batch on its own targets, or on targets sampled with ``generator``."""
    inputs = send_to_device({name: batch[name] for name in batch.keys() - {"num_tokens", "row_ids", "labels"}}, device)
    successors = batch["labels"][:, 1:].to(device)
    is_target = successors >= 0

    def score(hidden: Tensor, weight: Tensor, **options: Any) -> TokenSums:
        states, targets = hidden[:, :-1][is_target], successors[is_target]
        if generator is not None:
            targets = sample_targets(states, weight, generator, **options)
        scored: TokenSums = compute_cross_entropy(states, weight, targets, **options)
        return scored

    sums: TokenSums = model(**inputs, head=score).result
    return sums


def take_documents(rows: Iterable[Mapping[str, Any]], num_documents: int) -> list[Document]:
    """Return the first documents with targets in packed rows.

    Raises:
        DataError: No document has a target.
    """
    documents = list(islice(split_documents(rows), num_documents))
    if not documents:
        raise DataError(Problem("dataset_name", "no document has a token to train on", "look at `recipes preview`"))
    return documents


def write_fisher(folder: Path, fisher: Fisher, **facts: Any) -> None:
    """Write both files, the record last, so that its existence marks a complete tensor file.

    Args:
        folder: Folder of the weights, or any folder if ``facts`` has a ``model_name_or_path``.
        fisher: Fisher information.
        **facts: JSON values for the record; ``weights`` is the hash of the model's weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD_FILE).unlink(missing_ok=True)
    remove_unfinished_weights(folder)
    with atomic_file(folder / FISHER_FILE) as path:
        save_file({name: value.cpu().contiguous() for name, value in fisher.diagonal.items()}, path)
    counts = {"num_documents": fisher.num_documents, "num_tokens": fisher.num_tokens}
    replace_record(folder / RECORD_FILE, {**facts, **counts})


def read_fisher(folder: Path, where: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the memory-mapped tensors and the record of a folder.

    Args:
        folder: Folder passed to ``write_fisher``.
        where: Configuration key that names the folder, for errors.

    Raises:
        ConfigError: The folder has no Fisher information.
        DataError: The record or the tensors cannot be read.
    """
    remedy = "run `recipes fisher --config F` with the recipe of the run that made the model"
    if not (folder / RECORD_FILE).is_file():
        found = f"{folder} has no Fisher information ({RECORD_FILE})"
        raise ConfigError(Problem(where, found, f"{remedy}, or write `ewc_fisher: identity`"))
    fields = {"weights": str, "model_name_or_path": str | None, "model_revision": str | None}
    record = read_record(folder / RECORD_FILE, fields, remedy=remedy)
    try:
        return load_file(folder / FISHER_FILE), record
    except (OSError, SafetensorError) as error:
        raise DataError(Problem(str(folder / FISHER_FILE), f"cannot be read: {error}", remedy)) from error
