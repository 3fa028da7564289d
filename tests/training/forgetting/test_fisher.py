"""Diagonal Fisher information, against a closed form and ``vmap(grad)``, for one and two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.forked import run_forked
from tests.training.trajectories import make_packs
from torch import distributed, nn
from torch.func import functional_call, grad, vmap
from transformers import AutoModelForCausalLM

from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.errors import ConfigError, DataError
from recipes_lib.models.heads.loss_head import HeadOutput, add_loss_head
from recipes_lib.training.forgetting.fisher import (
    compute_fisher,
    read_fisher,
    split_documents,
    take_documents,
    write_fisher,
)
from recipes_lib.training.monitoring.progress import build_progress

COLLATE = PackedCollator(pad_token_id=1)
QUIET = build_progress(is_main=False)


class SoftmaxRegression(nn.Module):
    """Softmax regression with classes as tokens: a document is a row number and the class of that row."""

    def __init__(self, features: torch.Tensor, weight: torch.Tensor) -> None:
        super().__init__()
        self.features = features
        self.weight = nn.Parameter(weight)

    def forward(self, input_ids: torch.Tensor, head: Any, **_: Any) -> HeadOutput:
        return HeadOutput(head(self.features[input_ids], self.weight), None)


def make_regression(seed: int = 0) -> tuple[SoftmaxRegression, torch.Tensor, torch.Tensor]:
    """Return a model whose class probabilities are multiples of 1/8, these eighths, and its features."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(12, 16, generator=generator, dtype=torch.float64)
    eighths = torch.tensor([[1, 2, 5], [4, 3, 1], [2, 2, 4], [6, 1, 1]]).repeat(3, 1)
    weight = torch.linalg.lstsq(features, (eighths / 8).double().log()).solution.T
    return SoftmaxRegression(features, weight.contiguous()), eighths, features


def make_document(*ids: int) -> dict[str, Any]:
    return {
        "input_ids": np.array(ids),
        "loss_mask": np.array([False] + [True] * (len(ids) - 1)),
        "seq_lengths": np.array([len(ids)]),
        "row_ids": np.zeros(0, np.int64),
    }


def test_fisher_of_softmax_regression_equals_closed_form() -> None:
    model, eighths, features = make_regression()
    # Each class as often as its probability, so that the empirical mean is the model's expectation.
    documents = [
        make_document(row, label) for row in range(12) for label in range(3) for _ in range(int(eighths[row, label]))
    ]
    fisher = compute_fisher(model, documents, COLLATE, labels="empirical", seed=0, progress=QUIET)
    p = (eighths / 8).double()
    closed = torch.einsum("nj,nc->cj", features**2, p * (1 - p)) / 12
    assert fisher.num_tokens == fisher.num_documents == 96
    torch.testing.assert_close(fisher.diagonal["weight"].double(), closed, rtol=1e-6, atol=1e-6)
    # The square of the mean gradient, a common mistake, is 0 here.
    assert closed.min() > 1e-4


def test_fisher_has_trained_weights_only_and_0_for_unused_ones() -> None:
    model, *_ = make_regression()
    model.frozen, model.unused = nn.Parameter(torch.ones(1), requires_grad=False), nn.Parameter(torch.ones(2))
    model.dropout = nn.Dropout(1.0)
    fisher = compute_fisher(model, [make_document(0, 1)], COLLATE, labels="empirical", seed=0, progress=QUIET)
    assert not model.dropout.training
    assert fisher.diagonal.keys() == {"weight", "unused"}
    assert fisher.diagonal["unused"].tolist() == [0, 0]


def test_overflow_of_squared_gradients_is_refused() -> None:
    model, *_ = make_regression()
    model.features = 1e20 * model.features
    with pytest.raises(DataError, match=r"squared gradients of 1 weights are not finite: weight"):
        compute_fisher(model, [make_document(0, 0)], COLLATE, labels="empirical", seed=0, progress=QUIET)


def test_sampled_labels_ignore_targets() -> None:
    model, eighths, features = make_regression()
    p = (eighths / 8).double()
    closed = torch.einsum("nj,nc->cj", features**2, p * (1 - p)) / 12
    # All targets are class 0, so that an empirical Fisher would be far off.
    documents = [make_document(row, 0) for _ in range(50) for row in range(12)]

    def compute(labels: Any, seed: int, num_documents: int = 24) -> torch.Tensor:
        fisher = compute_fisher(model, documents[:num_documents], COLLATE, labels=labels, seed=seed, progress=QUIET)
        return fisher.diagonal["weight"]

    assert ((compute("sampled", 0, 600).double() - closed).norm() / closed.norm()) < 0.1
    assert ((compute("empirical", 0).double() - closed).norm() / closed.norm()) > 0.3
    assert torch.equal(compute("sampled", 0), compute("sampled", 0))
    assert not torch.equal(compute("sampled", 0), compute("sampled", 1))


def test_fisher_of_transformer_equals_vmap_of_grad(tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="eager")
    ids = torch.randint(4, 512, (6, 12), generator=torch.Generator().manual_seed(0))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def compute_loss(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": row[None], "position_ids": torch.arange(12)[None], "use_cache": False}
        logits = functional_call(model, weights, kwargs=inputs).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum")

    gradients = vmap(grad(compute_loss), (None, 0))(parameters, ids)
    add_loss_head(model)
    documents = [make_document(*row) for row in ids.tolist()]
    fisher = compute_fisher(model, documents, COLLATE, labels="empirical", seed=0, progress=QUIET)
    assert fisher.num_tokens == 6 * 11
    for name, expected in gradients.items():
        torch.testing.assert_close(fisher.diagonal[name], (expected**2).sum(0) / 66, rtol=2e-4, atol=1e-8, msg=name)


def test_split_documents_unpacks_rows() -> None:
    packs = list(make_packs(5))
    packs[0]["loss_mask"][: packs[0]["seq_lengths"][0]] = False  # A document without a target.
    documents = list(split_documents(packs))
    unpacked = [ids for row in packs for ids in np.split(row["input_ids"], np.cumsum(row["seq_lengths"])[:-1])]
    masks = [mask for row in packs for mask in np.split(row["loss_mask"], np.cumsum(row["seq_lengths"])[:-1])]
    expected = [ids.tolist() for ids, mask in zip(unpacked, masks, strict=True) if mask[1:].any()]
    assert [document["input_ids"].tolist() for document in documents] == expected
    assert len(take_documents(packs, 3)) == 3
    with pytest.raises(DataError, match="no document"):
        take_documents([], 3)


@pytest.mark.multiprocess
def test_fisher_of_two_ranks_equals_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    run_forked("tests.training.forgetting.test_fisher", tiny_model_dir, tmp_path / "two")
    two, record = read_fisher(tmp_path / "two", "here")
    one = _compute(tiny_model_dir)
    assert (record["num_documents"], record["num_tokens"]) == (one.num_documents, one.num_tokens)
    for name, expected in one.diagonal.items():
        torch.testing.assert_close(two[name], expected, rtol=1e-5, atol=1e-9, msg=name)


def test_missing_or_damaged_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="recipes fisher"):
        read_fisher(tmp_path, "recipe.yaml:3")
    model, *_ = make_regression()
    fisher = compute_fisher(model, [make_document(0, 1)], COLLATE, labels="empirical", seed=0, progress=QUIET)
    (tmp_path / ".tmpVRU6HF").write_bytes(b"unfinished weights of a killed process")
    write_fisher(tmp_path, fisher, weights="0" * 64, model_name_or_path=None, model_revision=None)
    assert not list(tmp_path.glob(".*"))
    tensors, record = read_fisher(tmp_path, "here")
    assert torch.equal(tensors["weight"], fisher.diagonal["weight"])
    assert record == json.loads((tmp_path / "fisher.json").read_text())
    (tmp_path / "fisher.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be read"):
        read_fisher(tmp_path, "here")


def _compute(model_dir: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    add_loss_head(model)
    documents = take_documents(make_packs(), 11)
    return compute_fisher(model, documents, COLLATE, labels="sampled", seed=3, progress=QUIET)


def main() -> None:
    """Compute on one of two ranks; arguments: ``MODEL OUTPUT``."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    fisher = _compute(Path(sys.argv[1]))
    if distributed.get_rank() == 0:
        write_fisher(Path(sys.argv[2]), fisher, weights="", model_name_or_path=None, model_revision=None)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
