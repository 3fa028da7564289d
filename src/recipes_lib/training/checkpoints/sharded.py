"""Sharded checkpoints of FSDP2: every rank writes its shards as safetensors; any world size reads them."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recipes_lib.errors import list_first
from recipes_lib.files import read_json
from recipes_lib.models.adapters.lora import read_adapter_state
from recipes_lib.models.inference import find_device
from recipes_lib.models.saved_weights import BrokenSaveError
from recipes_lib.training.checkpoints.manifest import find_writer
from recipes_lib.training.checkpoints.saver import CheckpointSaver, Task, is_adapter
from recipes_lib.training.collectives import Group, gather_objects, get_rank, is_distributed
from recipes_lib.training.layouts.fsdp import get_local, get_whole, reshard

MODEL_SHARDS: Final = "model_shards"
OPTIMIZER_SHARDS: Final = "optimizer_shards"
_GROUPS: Final = "param_groups.json"
_SEPARATOR: Final = " of "
"""Stands between the name of an optimizer's state and that of the parameter it belongs to."""


def read_trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint of a sharded model holds: of a model under an adapter what is trained, else all.

    Tied tensors are there once; those that are sharded are ``DTensor``.
    """
    reshard(model)
    if is_adapter(model):
        return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    # Backwards, so that of two names it is the first that stays, as in ``named_parameters``.
    unique = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    return dict(unique.values())


def gather_trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole of what ``read_trained_state`` names, on the host of the main process; elsewhere nothing.

    Each process has all tensors, some, or shards of some. Tensor by tensor, so that no device holds more than one whole
    tensor besides its own; every process must call.
    """
    tensors = read_trained_state(model)
    held = gather_objects({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    device, rank = find_device(model), get_rank()
    whole: dict[str, Tensor] = {}
    # Backwards, so that of several processes that have one the first is the owner.
    owners = {name: owner for owner, names in reversed([*enumerate(held)]) for name in names}
    for name, owner in owners.items():
        shape, dtype = held[owner][name]
        # All that hold a part of it gather it.
        tensor = (
            get_whole(tensors[name].detach()) if name in tensors else torch.empty(shape, dtype=dtype, device=device)
        )
        # In the order of ``owners``, which all have alike: sends and receives meet without a tag.
        if rank == owner != 0:
            distributed.send(tensor.contiguous(), dst=0)
        elif rank == 0:
            if owner != 0:
                distributed.recv(tensor, src=owner)
            whole[name] = tensor.cpu()
    return whole


def copy_model_shards(
    folder: Path, weights: Mapping[str, Tensor], saver: CheckpointSaver, unchanging: Iterable[str] = ()
) -> Task:
    """Copy weights and return what writes their shards under ``folder``; every process must call both.

    Args:
        folder: Of the checkpoint.
        weights: By name, as ``read_trained_state`` returns them.
        saver: Copies.
        unchanging: Names of those that nothing changes.
    """
    state = _copy(weights, saver, unchanging)
    return lambda: write_shards(folder / MODEL_SHARDS, state, saver.group)


def load_model_shards(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Read weights in place, from shards of as many processes as may be; every process must call."""
    _load(folder / MODEL_SHARDS, weights)


def load_whole_model(folder: Path, model: Any) -> None:
    """Read weights that one process wrote whole into a model that is sharded; each process reads what it holds of them.

    Args:
        folder: Of the checkpoint, with the safetensors file of a model or of an adapter.
        model: Sharded, as it is trained.
    """
    reshard(model)
    _load(folder, read_adapter_state(model) if is_adapter(model) else read_trained_state(model))


def read_whole_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, written in shards or whole, on the host and there once.

    Args:
        folder: Of the checkpoint; that it is undamaged is known.
    """
    source = folder / MODEL_SHARDS if (folder / MODEL_SHARDS).is_dir() else folder
    weights = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in _read_described(source).items()
    }
    _load(source, weights)
    return weights


def copy_optimizer_shards(
    folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, saver: CheckpointSaver
) -> Task:
    """Copy an optimizer's states and return what writes their shards; its groups, alike on all processes, become JSON.

    Args:
        folder: Of the checkpoint.
        parameters: What the optimizer trains, by the names that its states get.
        optimizer: After a step.
        saver: Copies.
    """
    states = _copy(_read_states(parameters, optimizer), saver)
    groups = [_describe_group(group) for group in optimizer.param_groups]

    def write() -> None:
        write_shards(folder / OPTIMIZER_SHARDS, states, saver.group)
        if get_rank() == 0:
            (folder / OPTIMIZER_SHARDS / _GROUPS).write_text(json.dumps(groups, indent=1), encoding="utf-8")

    return write


def load_optimizer_shards(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    is_part: bool = False,
) -> None:
    """Load optimizer states at any world size; every process must call.

    Args:
        folder: Of the checkpoint.
        parameters: By name; of a model that is sharded, as it is trained.
        optimizer: Over them, in the groups that the saved one had; it need not have made a step.
        is_part: Whether the states of other parameters are another process's.
    """
    source = folder / OPTIMIZER_SHARDS
    states: dict[str, Tensor] = {}
    for full_name, tensor in _read_described(source).items():
        if (name := full_name.partition(_SEPARATOR)[2]) not in parameters and is_part:
            continue
        parameter, dtype = parameters[name].detach(), tensor.properties.dtype
        # What has the shape of its parameter is sharded like it; a step number is whole everywhere.
        is_alike = tensor.size == parameter.shape
        states[full_name] = (
            torch.zeros_like(parameter, dtype=dtype) if is_alike else torch.zeros(tensor.size, dtype=dtype)
        )
    _load(source, states)
    by_parameter: dict[Tensor, dict[str, Tensor]] = {}
    for full_name, value in states.items():
        key, _, name = full_name.partition(_SEPARATOR)
        by_parameter.setdefault(parameters[name], {})[key] = value
    _restore(optimizer, by_parameter, read_json(source / _GROUPS))


def load_whole_optimizer(
    file: Path, optimizer: torch.optim.Optimizer, whole: Sequence[Sequence[nn.Parameter | None]]
) -> None:
    """Read an optimizer's states that one process wrote whole; each process keeps its shards of them.

    The file is mapped, not read: host memory holds one whole state at a time.

    Args:
        file: ``optimizer.pt`` of upstream.
        optimizer: Over parameters, whole or sharded, or of a part of a model, in the groups that the saved one had.
        whole: The parameters of each group of the saved one, in its order; ``None`` for those of another process.
    """
    # ``weights_only``: an untrusted checkpoint runs no code.
    saved = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    by_parameter: dict[Tensor, dict[str, Tensor]] = {}
    for group, then in zip(whole, saved["param_groups"], strict=True):
        for parameter, number in zip(group, then["params"], strict=True):
            if parameter is None:
                continue
            # What has been frozen or never stepped has none.
            states = saved["state"].get(number, {})
            by_parameter[parameter] = {
                key: shard_like(_widen(value), parameter) if isinstance(value, Tensor) else value
                for key, value in states.items()
            }
    _restore(optimizer, by_parameter, [_describe_group(group) for group in saved["param_groups"]])


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return of a whole tensor what this process holds of the parameter that it belongs to; of a number, all."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value.clone()
    # Without a source every process takes its part of what it has itself.
    shards = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return shards.clone()


def verify_shards(folder: Path, shapes: Mapping[str, torch.Size]) -> None:
    """Open saved weights again: each process those that it wrote, the first one of the others what they say they hold.

    Args:
        folder: Of the checkpoint.
        shapes: Whole shape of each tensor that must be there.

    Raises:
        BrokenSaveError: A tensor is missing, not whole or not finite; or a file cannot be opened.
    """
    rank, found, faults = get_rank(), dict.fromkeys(shapes, 0), []
    # What another process wrote has left the memory of this machine, and would come over the network.
    for file in _list_files(folder / MODEL_SHARDS, None if rank == 0 else rank):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                    found[name] = found.get(name, 0) + math.prod(tensors.get_slice(name).get_shape())
                    if find_writer(file.name) == rank and not tensors.get_tensor(name).isfinite().all():
                        faults.append(f"{name} is not finite")
        except SafetensorError as error:
            faults.append(f"{file.name} cannot be opened again ({error})")
    # The elements of all shards of a tensor, from the headers of all files: fewer than the whole has if one is gone.
    if rank == 0:
        faults += [f"{name} is not whole" for name, shape in shapes.items() if found[name] != shape.numel()]
    if faults:
        raise BrokenSaveError(f"{folder / MODEL_SHARDS}: {list_first(faults)}")


def compare_own_shards(
    folder: Path,
    weights: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Compare the shards that this process has written with the live ones, bit by bit.

    Args:
        folder: Of the checkpoint.
        weights: As for ``copy_model_shards``, unchanged since.
        parameters: As for ``copy_optimizer_shards``.
        optimizer: Its optimizer, unchanged since.

    Raises:
        BrokenSaveError: A tensor differs.
    """
    live = {MODEL_SHARDS: weights, OPTIMIZER_SHARDS: _read_states(parameters, optimizer)}
    for name, tensors in live.items():
        for file, key, saved in _iterate(folder / name, rank=get_rank()):
            tensor = tensors[key].detach()
            if not torch.equal(saved, get_local(tensor).cpu()):
                raise BrokenSaveError(f"{file}: {key} differs from what is trained")


def _read_states(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    return {
        f"{key}{_SEPARATOR}{names[parameter]}": _widen(torch.as_tensor(value))
        for parameter, states in optimizer.state.items()
        for key, value in states.items()
        if value is not None
    }


def _widen(state: Tensor) -> Tensor:
    """A state of torchao's (0.18) 8-bit and 4-bit optimizers in float32, any other as it is.

    Shards of any number of processes are cut from it. Quantised again it has the same codes and scales: the number of
    the largest magnitude in a block is its scale, also where its code, the lowest, stands for a little less than -1.
    """
    local: Any = get_local(state)
    if not is_traceable_wrapper_subclass(local):
        return state
    names, context = local.__tensor_flatten__()
    parts = {name: getattr(local, name) for name in names}
    values = parts["qmap"]
    parts["qmap"] = torch.where(values == values.min(), -values.max(), values) if values.min() < 0 else values
    kind: Any = type(local)
    wide: Tensor = kind.__tensor_unflatten__(parts, context).dequantize(torch.float32)
    if isinstance(state, DTensor):
        wrap: Any = partial(DTensor, requires_grad=False)
        wide = wrap(wide, state._spec)
    return wide


def _narrow(optimizer: Any, parameter: Tensor, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The states of a parameter as its optimizer keeps them; torchao's (0.18) quantises only what it made itself."""
    build = getattr(optimizer, "_new_buffer", None)
    if build is None:
        return dict(states)
    narrow = {key: build(parameter.detach(), signed=key == "exp_avg") for key in states.keys() - {"step"}}
    for key, state in narrow.items():
        state.copy_(states[key])
    return {**states, **narrow}


def _copy(tensors: Mapping[str, Tensor], saver: CheckpointSaver, unchanging: Iterable[str] = ()) -> dict[str, Tensor]:
    """Copies of what this process holds, sharded as the tensors are."""
    local = {name: get_local(tensor).detach() for name, tensor in tensors.items()}
    copied = saver.take(local, unchanging=unchanging)
    # ``DTensor.from_local`` would bring the copy back to the device of the mesh.
    wrap: Any = partial(DTensor, requires_grad=False)
    return {
        name: wrap(copied[name], tensor._spec) if isinstance(tensor, DTensor) else copied[name]
        for name, tensor in tensors.items()
    }


def write_shards(folder: Path, tensors: Mapping[str, Tensor], group: Group = None) -> None:
    """Write the shards of tensors; every process must call.

    Args:
        folder: Of these tensors alone.
        tensors: By name; of a ``DTensor`` each process writes what it holds.
        group: Of the threads that write asynchronously; ``None``: the default one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _told_of_processes() as options:
        detached = {name: tensor.detach() for name, tensor in tensors.items()}
        save(detached, storage_writer=writer, process_group=group, **options)


def _load(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill ``tensors`` in place."""
    reader = HuggingFaceStorageReader(str(folder))
    with _told_of_processes() as options:
        load({name: tensor.detach() for name, tensor in tensors.items()}, storage_reader=reader, **options)


def _read_described(folder: Path) -> dict[str, Any]:
    """Whole size and dtype of each tensor, from the headers of the files alone."""
    described: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return described


@contextmanager
def _told_of_processes() -> Iterator[dict[str, bool]]:
    """Tell torch that one process is meant where there is one, and keep it from wondering about that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield {"no_dist": not is_distributed()}


def _iterate(folder: Path, rank: int) -> Iterator[tuple[Path, str, Tensor]]:
    """The files of one process with the names and the contents of their tensors."""
    for file in _list_files(folder, rank):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                yield file, name, tensors.get_tensor(name)


def _list_files(folder: Path, rank: int | None) -> list[Path]:
    """The files of one process, or of all."""
    return sorted(file for file in folder.glob("*.safetensors") if rank in (None, find_writer(file.name)))


def _describe_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.item() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }


def _restore_group(now: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A group's values as they were saved; JSON has no tuples, and no tensors, as which some keep the learning rate."""
    restored = {key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()}
    tensors = {key: torch.as_tensor(restored[key]).to(old) for key, old in now.items() if isinstance(old, Tensor)}
    return {**now, **restored, **tensors}


def _restore(
    optimizer: torch.optim.Optimizer,
    by_parameter: Mapping[Tensor, Mapping[str, Tensor]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Give an optimizer the states of its parameters, and the values of its groups but for what is in them."""
    # ``load_state_dict`` knows parameters by their numbers, which count through all groups.
    packed = optimizer.state_dict()["param_groups"]
    numbers = {
        parameter: number
        for group, described in zip(optimizer.param_groups, packed, strict=True)
        for parameter, number in zip(group["params"], described["params"], strict=True)
    }
    inner = getattr(optimizer, "optimizer", optimizer)  # Of accelerate.
    state = {numbers[one]: _narrow(inner, one, states) for one, states in by_parameter.items() if states}
    restored = [_restore_group(now, then) for now, then in zip(packed, groups, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": restored})
