"""Interleaved pipeline schedule on one process: losses, logits and gradients of the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.models.parallel.test_pipeline_parallel import POSITIONS, build_parts, build_whole, make_config
from torch import distributed
from torch.distributed.pipelining import PipelineStage
from torch.nn.utils import get_total_norm

from recipes_lib.errors import ConfigError
from recipes_lib.models.attention.kernels import verify_isolation
from recipes_lib.models.heads.loss_head import add_loss_head, verify_loss_head
from recipes_lib.training.layouts.pipeline_schedule import Pipeline, build_pipeline_groups


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Torch 2.11 connects neighbouring stages by messages, which gloo cannot send from a process to itself; no launch
    # has a pipeline of one process. Goes when torch 2.13 is the lowest version; 2.15 has no such method.
    monkeypatch.setattr(PipelineStage, "_get_init_p2p_neighbors_ops", lambda _: [], raising=False)
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    build_pipeline_groups.cache_clear()
    yield
    build_pipeline_groups.cache_clear()
    distributed.destroy_process_group()


def build_pipeline(*, is_tied: bool = False) -> tuple[Any, Any]:
    """Return the whole model, and a pipeline of two chunks of it on this process."""
    config = make_config("llama", tie_word_embeddings=is_tied)
    (part,) = build_parts(config, 1, 2)
    whole = build_whole(config)
    add_loss_head(whole)
    mesh = build_pipeline_groups(1)
    return whole, Pipeline(part, mesh, schedule="interleaved", autocast=contextlib.nullcontext)


def make_batches(num: int, num_rows: int = 2, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return batches with different numbers of targets."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for number in range(num):
        ids = torch.randint(0, 64, (num_rows, 12), generator=generator)
        labels = ids.clone()
        labels[:, : 1 + 2 * number] = -1
        batches.append({"input_ids": ids, "labels": labels, "position_ids": POSITIONS[:1].expand(num_rows, -1)})
    return batches


def assert_same_gradients(whole: Any, pipeline: Pipeline) -> None:
    found = dict(pipeline.model.named_parameters())
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=0, atol=1e-6)
        assert parameter.grad.any()


@pytest.mark.parametrize("is_tied", [False, True])
def test_gradients_equal_whole_model(is_tied: bool) -> None:
    whole, pipeline = build_pipeline(is_tied=is_tied)
    for num_batches, num_rows in ((3, 2), (3, 2), (2, 3)):
        batches = make_batches(num_batches, num_rows)
        whole.zero_grad()
        pipeline.zero_grad()
        outputs = [whole(**batch, loss_head=True) for batch in batches]
        num_targets = sum(int(output.num_targets) for output in outputs)
        (sum(output.nll_sum for output in outputs) / num_targets).backward()
        sums = pipeline.compute_gradients(batches, num_targets)
        pipeline.reduce_gradients()
        assert [found.nll_sum.item() for found in sums] == pytest.approx([out.nll_sum.item() for out in outputs])
        assert [int(found.num_targets) for found in sums] == [int(output.num_targets) for output in outputs]
        assert len({int(output.num_targets) for output in outputs}) == num_batches
        assert_same_gradients(whole, pipeline)
        gradients = [parameter.grad for parameter in whole.parameters()]
        own = [parameter.grad for parameter in pipeline.model.parameters() if parameter.grad is not None]
        torch.testing.assert_close(pipeline.measure_norm(own), get_total_norm(gradients), rtol=1e-6, atol=0)


def test_forward_equals_whole_model() -> None:
    whole, pipeline = build_pipeline()
    (batch,) = make_batches(1)
    expected, found = (model(**batch, loss_head=True) for model in (whole, pipeline))
    assert torch.equal(found.nll_sum, expected.nll_sum)
    assert torch.equal(found.num_correct, expected.num_correct)
    expected, found = (model(**batch, use_cache=False) for model in (whole, pipeline))
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)
    assert not found.logits.requires_grad


def test_pipeline_passes_start_checks() -> None:
    _, pipeline = build_pipeline()
    verify_isolation(pipeline, "rows")
    verify_loss_head(pipeline)


def test_leak_between_documents_in_one_chunk_is_detected() -> None:
    _, pipeline = build_pipeline()
    later = pipeline.chunks[1].model.base_model
    run = type(later).forward

    def forget(self: Any, *args: Any, position_ids: Any, **kwargs: Any) -> Any:
        return run(self, *args, position_ids=torch.arange(position_ids.shape[1])[None], **kwargs)

    later.forward = forget.__get__(later)
    with pytest.raises(ConfigError, match="does not keep its logits beside another"):
        verify_isolation(pipeline, "rows")


def test_single_process_has_no_copy_of_tied_embedding() -> None:
    _, pipeline = build_pipeline(is_tied=True)
    assert pipeline.tied_copy is None
