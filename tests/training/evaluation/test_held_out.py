"""Held-out metrics: token means of the whole set for any batch size and world size, in constant memory."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from recipes_lib.data.packed.collators import IGNORE_INDEX, PackedCollator
from recipes_lib.errors import DataError
from recipes_lib.losses.next_token import TokenSums
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.training.evaluation import held_out
from recipes_lib.training.evaluation.build import count_text_bytes
from recipes_lib.training.evaluation.held_out import EvaluateLoss, share_rows
from recipes_lib.training.monitoring.progress import TrainingProgress

COLLATE = PackedCollator(pad_token_id=1)
TEXTS = ["the baker opens the shop", "snow", "seven days in a week, and then the 🦊 sleeps in the sun", "a", "rivers"]


def build_rows(tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    rows = []
    for number, text in enumerate(TEXTS):
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        mask = [place >= number % 3 for place in range(len(ids))]
        rows.append({"input_ids": ids, "loss_mask": mask, "seq_lengths": [len(ids)]})
    return rows


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> nn.Module:
    loaded = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    add_loss_head(loaded)
    return loaded


def evaluate(model: nn.Module, rows: list[dict[str, Any]], batch_size: int, **options: Any) -> dict[str, float]:
    defaults = {"batch_size": batch_size, "collate": COLLATE, "progress": TrainingProgress()}
    return EvaluateLoss(held_out={"rows": rows}, **defaults | options)(model, 0)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_metrics_equal_row_by_row_log_softmax(model, tiny_tokenizer, batch_size) -> None:
    rows = build_rows(tiny_tokenizer)
    nll, num_targets, num_correct, num_bytes = 0.0, 0, 0, 0
    for row, text in zip(rows, TEXTS, strict=True):
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            logps = model(input_ids=ids).logits.double().log_softmax(-1)[0, :-1]
        chosen = [place for place in range(1, ids.shape[1]) if row["loss_mask"][place]]
        nll -= sum(logps[place - 1, ids[0, place]].item() for place in chosen)
        num_targets += len(chosen)
        num_correct += sum(int(logps[place - 1].argmax() == ids[0, place]) for place in chosen)
        untrained = tiny_tokenizer.decode(ids[0, : chosen[0]])
        num_bytes += len(text.encode()) - len(untrained.encode())

    figures = evaluate(model, rows, batch_size, byte_lengths=count_text_bytes(tiny_tokenizer))

    assert figures["num_target_tokens"] == num_targets
    assert figures["loss"] == pytest.approx(nll / num_targets, rel=1e-6)
    assert figures["perplexity"] == pytest.approx(math.exp(nll / num_targets), rel=1e-5)
    assert figures["token_accuracy"] == pytest.approx(num_correct / num_targets)
    assert figures["bits_per_byte"] == pytest.approx(nll / math.log(2) / num_bytes, rel=1e-6)


class UniformModel(nn.Module):
    """Model with the same loss, ``nats``, for every token."""

    def __init__(self, nats: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.nats = nats

    def forward(self, labels: torch.Tensor, **_: Any) -> Any:
        num_targets = labels.ne(IGNORE_INDEX).sum()
        return TokenSums(self.nats * num_targets, num_targets, torch.tensor(0))


def test_uniform_model_has_known_bits_per_byte_and_perplexity(tiny_tokenizer) -> None:
    row = {"input_ids": [1, *tiny_tokenizer.encode("days")], "loss_mask": None, "seq_lengths": None}
    num_tokens = len(row["input_ids"]) - 1
    row |= {"loss_mask": [True] * (num_tokens + 1), "seq_lengths": [num_tokens + 1]}

    figures = evaluate(UniformModel(math.log(512)), [row], 1, byte_lengths=count_text_bytes(tiny_tokenizer))

    assert figures["bits_per_byte"] == pytest.approx(num_tokens * 9 / 4)
    assert figures["perplexity"] == pytest.approx(512)


def test_set_without_targets_is_rejected() -> None:
    row = {"input_ids": [5, 6], "loss_mask": [True, True], "seq_lengths": [2]}
    figures = evaluate(UniformModel(1e4), [row], 1)
    assert figures["perplexity"] == math.inf
    assert "bits_per_byte" not in figures  # Without byte lengths.
    with pytest.raises(DataError, match="no token is a target"):
        evaluate(UniformModel(1.0), [row | {"loss_mask": [True, False]}], 1)
    with pytest.raises(DataError, match="holds no row"):
        evaluate(UniformModel(1.0), [], 1)


class RowsThatCountMemory:
    """Rows that are built when read, and record the number of live tensor elements near the end."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_alive = 0

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if index >= self.num_rows:
            raise IndexError(index)
        if index != self.num_rows - 8:  # Counting takes a quarter of a second.
            return self.build_row()
        alive = (found for found in gc.get_objects() if type(found) is torch.Tensor)
        self.num_alive = sum(tensor.numel() for tensor in alive)
        return self.build_row()

    def build_row(self) -> Mapping[str, Any]:
        ids = torch.arange(32) % 50 + 4
        return {"input_ids": ids.numpy(), "loss_mask": [True] * 32, "seq_lengths": [32]}


def test_memory_is_independent_of_number_of_rows(model: nn.Module) -> None:
    gc.collect()
    gc.disable()
    try:
        counts = []
        for num_rows in (16, 64):
            rows = RowsThatCountMemory(num_rows)
            hook = EvaluateLoss(held_out={"rows": rows}, batch_size=2, collate=COLLATE, progress=TrainingProgress())
            hook(model, 0)
            counts.append(rows.num_alive)
    finally:
        gc.enable()

    assert counts[1] == counts[0] > 0


def test_several_sets_are_scored_separately_and_together(model, tiny_tokenizer) -> None:
    rows = build_rows(tiny_tokenizer)
    byte_lengths = torch.arange(512)
    options: dict[str, Any] = {"batch_size": 2, "collate": COLLATE, "progress": TrainingProgress()}
    options["byte_lengths"] = byte_lengths
    parts = {"code": rows[:1], "prose": rows[1:]}
    figures = EvaluateLoss(held_out=parts, **options)(model, 0)
    alone = {name: evaluate(model, part, 2, byte_lengths=byte_lengths) for name, part in parts.items()}
    together = evaluate(model, rows, 2, byte_lengths=byte_lengths)
    for name in ("loss", "perplexity", "bits_per_byte", "token_accuracy", "num_target_tokens"):
        assert figures[name] == pytest.approx(together[name])
    for name, part in alone.items():
        for figure in ("loss", "perplexity", "bits_per_byte", "token_accuracy"):
            assert figures[f"{name}_{figure}"] == pytest.approx(part[figure])
    assert not [key for key in together if key.startswith("rows_")]
    # Sets of `eval_datasets` do not count in the unprefixed metrics, unless there are no others.
    beside = EvaluateLoss(held_out=parts, named=("code",), **options)(model, 0)
    assert beside["loss"] == pytest.approx(alone["prose"]["loss"])
    assert beside["code_loss"] == pytest.approx(alone["code"]["loss"])
    assert "prose_loss" not in beside
    only = EvaluateLoss(held_out=parts, named=("code", "prose"), **options)(model, 0)
    assert only["loss"] == pytest.approx(together["loss"])
    assert only["prose_loss"] == pytest.approx(alone["prose"]["loss"])


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 20])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_share_rows_counts_every_row_once(monkeypatch, world_size, num_rows, batch_size):
    monkeypatch.setattr(held_out, "get_world_size", lambda group: world_size)
    counted, rounds = [], set()
    for rank in range(world_size):
        monkeypatch.setattr(held_out, "get_rank", lambda group, rank=rank: rank)
        shares = list(share_rows(num_rows, batch_size, TrainingProgress(), "evaluate"))
        rounds.add(len(shares))
        assert all(0 < len(rows) <= batch_size for rows, _ in shares)
        counted += [row for rows, is_counted in shares if is_counted for row in rows]
    assert (counted if world_size == 1 else sorted(counted)) == list(range(num_rows))
    assert rounds == {math.ceil(num_rows / (batch_size * world_size))}
