"""Sharded checkpoints of one process; those of several are tested in ``tests/distributed/test_sharded.py``."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import AutoModelForCausalLM, TrainingArguments

from recipes_lib.errors import explain_refusal
from recipes_lib.models.model_files import MODEL_SHARDS
from recipes_lib.models.saved_weights import BrokenSaveError, read_shapes
from recipes_lib.training.checkpoints.saver import CheckpointSaver
from recipes_lib.training.checkpoints.sharded import (
    Trained,
    compare_own_shards,
    copy_model_shards,
    copy_optimizer_shards,
    gather_trained_state,
    load_optimizer_shards,
    load_tensors,
    read_trained_state,
    verify_shards,
)


def build(model_dir: Path, learning_rate: float = 1e-3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.lm_head.weight = model.model.embed_tokens.weight
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=learning_rate)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    input_ids = torch.randint(0, 500, (2, 16), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(input_ids=input_ids, labels=input_ids).loss.backward()
    optimizer.step()


def describe(model, optimizer):
    return Trained(dict(model.named_parameters()), optimizer)


@pytest.fixture
def saved(tiny_model_dir, tmp_path):
    model, optimizer = build(tiny_model_dir)
    step(model, optimizer, 0)
    saver = CheckpointSaver(TrainingArguments(output_dir=str(tmp_path), use_cpu=True), print)
    copy_model_shards(tmp_path, read_trained_state(model), saver)()
    copy_optimizer_shards(tmp_path, describe(model, optimizer), saver)()
    return model, optimizer, tmp_path


def test_shards_restore_model_and_optimizer_bit_identically(saved, tiny_model_dir):
    model, optimizer, folder = saved
    other, its_optimizer = build(tiny_model_dir, learning_rate=5.0)
    load_tensors(folder / MODEL_SHARDS, read_trained_state(other))
    load_optimizer_shards(folder, describe(other, its_optimizer))
    for one in ((model, optimizer), (other, its_optimizer)):
        step(*one, 1)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert [group["betas"] for group in its_optimizer.param_groups] == [(0.9, 0.999)] * 2
    assert [group["lr"] for group in its_optimizer.param_groups] == [1e-3] * 2
    assert [group["weight_decay"] for group in its_optimizer.param_groups] == [1e-2, 0.0]


def test_trained_state_omits_tied_copies_and_frozen_base(saved):
    model, _, _ = saved
    assert read_trained_state(model).keys() == read_shapes(model).keys()
    assert gather_trained_state(model).keys() == model.state_dict().keys() - {"lm_head.weight"}
    model.requires_grad_(False)
    model.peft_config = {}
    model.model.norm.requires_grad_(True)
    assert read_trained_state(model).keys() == gather_trained_state(model).keys() == {"model.norm.weight"}


def test_unchanged_shards_pass_verification(saved):
    model, optimizer, folder = saved
    verify_shards(folder, read_shapes(model))
    compare_own_shards(folder, read_trained_state(model), describe(model, optimizer))


def test_full_disk_of_shards_is_explained(saved, monkeypatch):
    model, _, folder = saved
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", Mock(side_effect=full))
    saver = CheckpointSaver(TrainingArguments(output_dir=str(folder), use_cpu=True), print)
    with pytest.raises(RuntimeError, match="process 0: OSError") as raised:
        copy_model_shards(folder, read_trained_state(model), saver)()
    refusal = explain_refusal(raised.value)
    assert refusal is not None
    assert refusal.found.startswith("the disk is full: ")


@pytest.mark.parametrize("which", ["weight", "state"])
def test_compare_own_shards_detects_flipped_bit(saved, which):
    model, optimizer, folder = saved
    weight = model.model.norm.weight
    value = weight.detach() if which == "weight" else optimizer.state[weight]["exp_avg_sq"]
    value.view(torch.int32)[3] ^= 1
    with pytest.raises(BrokenSaveError, match=r"model\.norm\.weight differs from the tensor in memory"):
        compare_own_shards(folder, read_trained_state(model), describe(model, optimizer))


def test_verify_shards_names_missing_and_non_finite_tensors(saved):
    model, _, folder = saved
    (file,) = (folder / "model_shards").iterdir()
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, file)
    with pytest.raises(BrokenSaveError, match=r"up_proj\.weight is not finite, model\.norm\.weight is incomplete"):
        verify_shards(folder, read_shapes(model))


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "AdamW4bit"])
def test_quantised_optimizer_states_are_restored_bit_identically(tmp_path, optimizer):
    """Also blocks whose largest magnitude is negative, which torchao's lowest code overshoots (see ``_widen``)."""
    optim = pytest.importorskip("torchao.optim")
    torch.manual_seed(0)
    parameters = {"wide": nn.Parameter(torch.randn(64, 128)), "narrow": nn.Parameter(torch.randn(7))}
    one, other = (getattr(optim, optimizer)(parameters.values(), lr=1e-3) for _ in range(2))
    for parameter in parameters.values():
        moments = {key: one._new_buffer(parameter, key == "exp_avg") for key in ("exp_avg", "exp_avg_sq")}
        for key, moment in moments.items():
            values = torch.randn(parameter.shape)
            moment.copy_(values if key == "exp_avg" else values.square())
        one.state[parameter] = {"step": torch.tensor(3.0), **moments}
    args = TrainingArguments(output_dir=str(tmp_path), report_to=[])
    copy_optimizer_shards(tmp_path, Trained(parameters, one), CheckpointSaver(args, print))()
    load_optimizer_shards(tmp_path, Trained(parameters, other))
    pairs = [
        (getattr(before, name), getattr(other.state[parameter][key], name))
        for parameter in parameters.values()
        for key, before in one.state[parameter].items()
        if is_traceable_wrapper_subclass(before)
        for name in ("codes", "scale", "qmap")
    ]
    assert len(pairs) == 6
    assert all(torch.equal(before, after) for before, after in pairs)
    assert torch.equal(one.state[parameters["narrow"]]["exp_avg"], other.state[parameters["narrow"]]["exp_avg"])
    assert isinstance(other.param_groups[0]["lr"], torch.Tensor)


class OnDevice(torch.Tensor):
    """Float32 values that ``cpu`` copies, as from a GPU."""

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


class Quantised(torch.Tensor):
    """Quantised state, as torchao's, that remembers what it was dequantised to on its device."""

    made: ClassVar[list[StorageWeakRef]] = []

    def __tensor_flatten__(self):
        return ["qmap"], self

    @staticmethod
    def __tensor_unflatten__(parts, state):
        return state

    def dequantize(self, dtype):
        values = torch.ones(4, dtype=dtype).as_subclass(OnDevice)
        self.made.append(StorageWeakRef(values.untyped_storage()))
        return values


class Quantising(torch.optim.SGD):
    """Optimizer that creates the buffers of its states on another device than that of its parameters."""

    def _new_buffer(self, parameter, signed):
        self.defaults.setdefault("made", []).append(torch.zeros(parameter.shape))
        return self.defaults["made"][-1]


def test_quantised_states_are_not_in_float32_on_the_device_together(tmp_path):
    parameters = {name: nn.Parameter(torch.zeros(4)) for name in "abc"}
    optimizer = torch.optim.SGD(parameters.values())
    for parameter in parameters.values():
        state = torch.zeros(4, dtype=torch.uint8).as_subclass(Quantised)
        state.qmap = torch.ones(2)
        optimizer.state[parameter] = {"exp_avg_sq": state}
    saver = CheckpointSaver(TrainingArguments(output_dir=str(tmp_path), use_cpu=True), print)
    write = copy_optimizer_shards(tmp_path, Trained(parameters, optimizer), saver)
    assert len(Quantised.made) == 3
    assert all(made.expired() for made in Quantised.made)
    write()
    (file,) = (tmp_path / "optimizer_shards").glob("*.safetensors")
    assert all(torch.equal(values, torch.ones(4)) for values in load_file(file).values())
    on_device = {name: nn.Parameter(torch.zeros(4, device="meta")) for name in "abc"}
    resumed = Quantising(on_device.values())
    load_optimizer_shards(tmp_path, Trained(on_device, resumed))
    assert torch.equal(torch.stack(resumed.defaults["made"]), torch.ones(3, 4))
