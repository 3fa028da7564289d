"""``write_in_background``, whose errors the saver raises, and ``HostCopy``, a consistent snapshot."""

import threading

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from recipes_lib.training.checkpoints import saver as saver_module
from recipes_lib.training.checkpoints.saver import CheckpointSaver, HostCopy, iterate_tensors, write_in_background


def fail():
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("method", ["finish", "raise_failure"])
def test_job_exception_is_raised_once(method, tmp_path):
    lines = []
    saver = CheckpointSaver(TrainingArguments(output_dir=str(tmp_path), use_cpu=True), lines.append)
    saver._writing = write_in_background(fail)
    saver._writing.exception()
    with pytest.raises(OSError, match="No space left"):
        getattr(saver, method)()
    saver.settle()
    assert lines == []
    saver.finish()


def test_running_job_is_not_waited_for(tmp_path):
    release = threading.Event()
    saver = CheckpointSaver(TrainingArguments(output_dir=str(tmp_path), use_cpu=True), print)
    saver._writing = write_in_background(lambda: (release.wait(60), fail()))
    saver.raise_failure()
    release.set()
    with pytest.raises(OSError, match="No space left"):
        saver.finish()


def test_write_whose_wait_is_interrupted_is_waited_for_at_the_end(tmp_path, monkeypatch):
    said = []
    saver = CheckpointSaver(TrainingArguments(output_dir=str(tmp_path), use_cpu=True), said.append)
    saver._writing = write_in_background(fail)

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(saver_module, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        saver.finish()
    saver.settle()
    assert "could not be written" in said[-1]


def test_job_uses_the_gpu_of_its_process(monkeypatch):
    """A new thread has GPU 0 as its current device, on which torch's writer would open a context."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda at: chosen.append((threading.current_thread().name, at)))
    write_in_background(lambda: chosen.append("job")).result()
    assert chosen == [("checkpoint", 3), "job"]


@pytest.fixture
def model_and_optimizer():
    embedding, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "head": head, "norm": nn.BatchNorm1d(4)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step():
        model["head"](model["norm"](model["embedding"](torch.arange(8)))).square().sum().backward()
        optimizer.step()

    step()
    return model, optimizer, step


def test_host_copy_is_independent_of_later_steps(model_and_optimizer):
    model, optimizer, step = model_and_optimizer
    copy, states = HostCopy(), [model.state_dict(), optimizer.state_dict()]
    before = [[tensor.clone() for tensor in iterate_tensors(state)] for state in states]
    copied = [copy.take(state) for state in states]
    step()
    for expected, state, live in zip(before, copied, states, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(expected, iterate_tensors(state), strict=True))
        assert not all(torch.equal(one, other) for one, other in zip(expected, iterate_tensors(live), strict=True))
    assert copied[1]["param_groups"] == optimizer.state_dict()["param_groups"]


def test_host_copy_preserves_sharing_and_skips_unchanging(model_and_optimizer):
    model, _, _ = model_and_optimizer
    copied = HostCopy().take(model.state_dict(), unchanging=["norm.weight"])
    assert list(copied) == list(model.state_dict())
    assert copied["head.weight"].data_ptr() == copied["embedding.weight"].data_ptr()
    assert copied["head.weight"].data_ptr() != model["head"].weight.data_ptr()
    assert copied["norm.weight"].data_ptr() == model["norm"].weight.data_ptr()


def test_host_copy_reuses_memory(model_and_optimizer):
    model, _, step = model_and_optimizer
    copy = HostCopy()
    first = copy.take(model.state_dict())["head.weight"].data_ptr()
    step()
    again = copy.take(model.state_dict())
    assert again["head.weight"].data_ptr() == first
    assert torch.equal(again["head.weight"], model["head"].weight)


def test_host_copy_of_run_on_cpu_does_not_touch_gpu(model_and_optimizer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, _, _ = model_and_optimizer
    assert not HostCopy().take(model.state_dict())["head.weight"].is_pinned()


def test_host_copy_is_refused_without_memory(model_and_optimizer, monkeypatch):
    model, optimizer, _ = model_and_optimizer
    states = list(model.parameters()), optimizer.state_dict()
    needed = sum(tensor.nbytes for state in states for tensor in iterate_tensors(state))
    monkeypatch.setattr(saver_module, "read_free_memory", lambda: needed)
    assert "B of memory are free" in HostCopy().explain_refusal(*states)
    monkeypatch.setattr(saver_module, "read_free_memory", lambda: 2 * needed)
    assert HostCopy().explain_refusal(*states) is None
    assert "B of memory are free" in HostCopy().explain_refusal(*states, num_copies=2)


def test_host_copy_is_refused_for_tensor_subclass():
    class Subclass(torch.Tensor):
        pass

    assert "Subclass" in HostCopy().explain_refusal({"a": [torch.zeros(2).as_subclass(Subclass)]})
