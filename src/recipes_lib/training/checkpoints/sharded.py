"""Sharded checkpoints of FSDP2: every rank writes its shards as safetensors; any world size reads them."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recipes_lib.errors import list_first
from recipes_lib.files import read_json
from recipes_lib.models.inference import find_device
from recipes_lib.models.model_files import MODEL_SHARDS, POLICY
from recipes_lib.models.saved_weights import BrokenSaveError
from recipes_lib.training.checkpoints.manifest import find_writer
from recipes_lib.training.checkpoints.saver import CheckpointSaver, Task, is_adapter
from recipes_lib.training.collectives import Group, gather_objects, get_rank, is_distributed
from recipes_lib.training.layouts.fsdp import get_full_tensor, get_local, reshard

OPTIMIZER_SHARDS: Final = "optimizer_shards"
_GROUPS: Final = "param_groups.json"
_SEPARATOR: Final = " of "
"""Separator in names of stored optimizer states, such as ``exp_avg of model.norm.weight``."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Trained parameters, by the names under which a checkpoint stores their states, and their optimizer."""

    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer


def read_trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint of a sharded model holds: all, or of a PEFT model the trainable ones.

    Tied tensors are included once; sharded tensors are ``DTensor``.
    """
    reshard(model)
    if is_adapter(model):
        return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    # Reversed, so that the first of several names of a tied tensor wins, as in ``named_parameters``.
    unique = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    return dict(unique.values())


def gather_trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the unsharded tensors of ``read_trained_state`` in host memory of rank 0; every process must call.

    Other ranks get an empty dict. Ranks may hold different tensors (pipeline stages), replicated or sharded. Gathering
    is done one tensor at a time, so that a device holds at most one unsharded tensor besides its own.
    """
    tensors = read_trained_state(model)
    descriptions = gather_objects({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    device, rank = find_device(model), get_rank()
    whole: dict[str, Tensor] = {}
    # Reversed, so that the lowest rank that holds a tensor is its owner.
    owners = {name: owner for owner, names in reversed([*enumerate(descriptions)]) for name in names}
    for name, owner in owners.items():
        shape, dtype = descriptions[owner][name]
        # Collective over the ranks that hold a shard of this tensor; the others allocate a receive buffer.
        tensor = (
            get_full_tensor(tensors[name].detach())
            if name in tensors
            else torch.empty(shape, dtype=dtype, device=device)
        )
        # ``owners`` has the same order on all ranks, so sends and receives match without tags.
        if rank == owner != 0:
            distributed.send(tensor.contiguous(), dst=0)
        elif rank == 0:
            if owner != 0:
                distributed.recv(tensor, src=owner)
            whole[name] = tensor.cpu()
    if whole and is_adapter(model):
        # PEFT looks for the trained copy of tied embeddings under each of its names.
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        every = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
        whole |= {name: whole[one] for name, one in every.items() if one in whole}
    return whole


def copy_model_shards(
    folder: Path, weights: Mapping[str, Tensor], saver: CheckpointSaver, unchanging: Iterable[str] = ()
) -> Task:
    """Copy the local shards of weights, and return a task that writes them; every process must call and run it.

    Args:
        folder: Checkpoint folder.
        weights: Result of ``read_trained_state``.
        saver: Saver that copies tensors to host memory.
        unchanging: Names of constant tensors, which are not copied.
    """
    state = _copy(weights, saver, unchanging)
    return lambda: write_shards(folder / MODEL_SHARDS, state, saver.group)


def read_whole_weights(folder: Path) -> dict[str, Tensor]:
    """Return the unsharded weights of a checkpoint, of RL the policy's, sharded or not, in host memory.

    Args:
        folder: Checkpoint folder, already verified.
    """
    if (policy := folder / f"{POLICY}.safetensors").is_file():
        return load_file(policy)
    folder = folder / POLICY if (folder / POLICY).is_dir() else folder
    source = folder / MODEL_SHARDS if (folder / MODEL_SHARDS).is_dir() else folder
    weights = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in _read_described(source).items()
    }
    load_tensors(source, weights)
    return weights


def copy_optimizer_shards(folder: Path, trained: Trained, saver: CheckpointSaver) -> Task:
    """Copy the local shards of optimizer states, and return a task that writes them; every process must call and run.

    Parameter groups are the same on all ranks; rank 0 writes them as JSON.

    Args:
        folder: Checkpoint folder.
        trained: Parameters and optimizer after at least one step.
        saver: Saver that copies tensors to host memory.
    """
    states = _copy(_read_states(trained), saver)
    groups = [_describe_group(group) for group in trained.optimizer.param_groups]

    def write() -> None:
        write_shards(folder / OPTIMIZER_SHARDS, states, saver.group)
        if get_rank() == 0:
            (folder / OPTIMIZER_SHARDS / _GROUPS).write_text(json.dumps(groups, indent=1), encoding="utf-8")

    return write


def load_optimizer_shards(folder: Path, trained: Trained, *, is_part: bool = False) -> None:
    """Load optimizer states at any world size; every process must call.

    Args:
        folder: Checkpoint folder.
        trained: Parameters, sharded or not, and an optimizer with the saved one's groups; it may have no states yet.
        is_part: Whether to ignore states of parameters that other pipeline stages hold.
    """
    source, parameters = folder / OPTIMIZER_SHARDS, trained.parameters
    # Not quantised yet, they would take more memory than the GPU has left (``_widen``).
    place = "cpu" if _find_quantiser(trained.optimizer) else None
    states: dict[str, Tensor] = {}
    by_parameter: dict[Tensor, dict[str, Tensor]] = {}
    for full_name, tensor in _read_described(source).items():
        key, _, name = full_name.partition(_SEPARATOR)
        if name not in parameters and is_part:
            continue
        parameter, dtype = parameters[name].detach(), tensor.properties.dtype
        # States of the parameter's shape are sharded like it; others, such as the step, are replicated.
        is_alike = tensor.size == parameter.shape
        alike = {"dtype": dtype, "device": place}
        value = torch.zeros_like(parameter, **alike) if is_alike else torch.zeros(tensor.size, dtype=dtype)
        states[full_name] = by_parameter.setdefault(parameters[name], {})[key] = value
    load_tensors(source, states)
    _restore(trained.optimizer, by_parameter, read_json(source / _GROUPS))


def load_whole_optimizer(
    file: Path, optimizer: torch.optim.Optimizer, whole: Sequence[Sequence[nn.Parameter | None]]
) -> None:
    """Load an unsharded ``optimizer.pt``; each process keeps the shards of its parameters.

    The file is memory-mapped, so host memory holds one unsharded state at a time.

    Args:
        file: ``optimizer.pt`` in the format of ``torch.save(optimizer.state_dict())``.
        optimizer: Optimizer of replicated or sharded parameters, or of one pipeline stage, with the saved one's groups.
        whole: Parameters of each saved group in its order; ``None`` for a parameter that this process does not hold.
    """
    # ``weights_only``: a checkpoint may be untrusted, and a pickle could run code.
    saved = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    by_parameter: dict[Tensor, dict[str, Tensor]] = {}
    for group, then in zip(whole, saved["param_groups"], strict=True):
        for parameter, number in zip(group, then["params"], strict=True):
            if parameter is None:
                continue
            # Parameters that never had a gradient have no state.
            states = saved["state"].get(number, {})
            by_parameter[parameter] = {
                key: shard_like(_widen(value), parameter) if isinstance(value, Tensor) else value
                for key, value in states.items()
            }
    _restore(optimizer, by_parameter, [_describe_group(group) for group in saved["param_groups"]])


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return this process's shard of an unsharded tensor, placed as ``parameter``; tensors of another shape unchanged.

    Returns a copy. A scalar, such as a step number, has another shape than its parameter and stays replicated.
    """
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value.clone()
    # ``src_data_rank=None``: no communication; every rank cuts its shard from its own copy.
    shards = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return shards.clone()


def verify_shards(folder: Path, shapes: Mapping[str, torch.Size]) -> None:
    """Reopen saved shards: each rank reads the tensors it wrote; rank 0 also reads the headers of all other files.

    Args:
        folder: Checkpoint folder.
        shapes: Unsharded shape of each tensor that must exist.

    Raises:
        BrokenSaveError: A tensor is missing, incomplete or not finite, or a file cannot be opened.
    """
    rank, found, faults = get_rank(), dict.fromkeys(shapes, 0), []
    # Own files only: they are still in the page cache, while those of other machines would be read over the network.
    for file in _list_files(folder / MODEL_SHARDS, None if rank == 0 else rank):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                    found[name] = found.get(name, 0) + math.prod(tensors.get_slice(name).get_shape())
                    if find_writer(file.name) == rank and not tensors.get_tensor(name).isfinite().all():
                        faults.append(f"{name} is not finite")
        except SafetensorError as error:
            faults.append(f"{file.name} cannot be opened again ({error})")
    # The shards of a tensor must sum to its number of elements.
    if rank == 0:
        faults += [f"{name} is incomplete" for name, shape in shapes.items() if found[name] != shape.numel()]
    if faults:
        raise BrokenSaveError(f"{folder / MODEL_SHARDS}: {list_first(faults)}")


def compare_own_shards(folder: Path, weights: Mapping[str, Tensor], trained: Trained) -> None:
    """Compare the shards that this process wrote with the live ones, bit for bit.

    Args:
        folder: Checkpoint folder.
        weights: Weights passed to ``copy_model_shards``, unchanged since.
        trained: Passed to ``copy_optimizer_shards``, unchanged since.

    Raises:
        BrokenSaveError: A tensor differs.
    """
    live = {MODEL_SHARDS: weights, OPTIMIZER_SHARDS: _read_states(trained)}
    for name, tensors in live.items():
        for file in _list_files(folder / name, get_rank()):
            with safe_open(file, framework="pt") as saved:
                for key in saved.keys():  # noqa: SIM118 (safe_open is not a mapping)
                    if not torch.equal(saved.get_tensor(key), get_local(tensors[key].detach()).cpu()):
                        raise BrokenSaveError(f"{file}: {key} differs from the tensor in memory")


def _read_states(trained: Trained) -> dict[str, Tensor]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in trained.parameters.items()}
    return {
        f"{key}{_SEPARATOR}{names[parameter]}": _widen(torch.as_tensor(value))
        for parameter, states in trained.optimizer.state.items()
        for key, value in states.items()
        if value is not None
    }


def _widen(state: Tensor) -> Tensor:
    """Dequantise a state of torchao's (0.18) 8-bit and 4-bit optimizers to float32; return other states unchanged.

    Blocks of codes cannot be resharded, float32 values can. Quantising the result gives the same codes and scales: a
    block's scale is its largest magnitude. For a negative maximum that needs a correction, since the lowest code of a
    signed map stands for slightly more than -1; it is read as minus the highest, -1.
    """
    local: Any = get_local(state)
    if not is_traceable_wrapper_subclass(local):
        return state
    names, context = local.__tensor_flatten__()
    parts = {name: getattr(local, name) for name in names}
    values = parts["qmap"]
    parts["qmap"] = torch.where(values == values.min(), -values.max(), values) if values.min() < 0 else values
    kind: Any = type(local)
    # To the host at once: together, the states in float32 would take 8 bytes of GPU memory per parameter.
    return _wrap(kind.__tensor_unflatten__(parts, context).dequantize(torch.float32).cpu(), state)


def _find_quantiser(optimizer: Any) -> Any:
    """Return the method by which one of torchao's (0.18) optimizers creates quantised states; ``None`` for others."""
    return getattr(getattr(optimizer, "optimizer", optimizer), "_new_buffer", None)  # Of an ``AcceleratedOptimizer``.


def _narrow(optimizer: Any, parameter: Tensor, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Requantise the states of a parameter if its optimizer quantises them."""
    build = _find_quantiser(optimizer)
    if build is None:
        return dict(states)
    narrow = {key: build(parameter.detach(), signed=key == "exp_avg") for key in states.keys() - {"step"}}
    for key, state in narrow.items():
        local = get_local(state)
        local.copy_(get_local(states[key]).to(local.device))
    return {**states, **narrow}


def _copy(tensors: Mapping[str, Tensor], saver: CheckpointSaver, unchanging: Iterable[str] = ()) -> dict[str, Tensor]:
    """Return host copies of the local shards, wrapped as ``DTensor`` of the same placements."""
    local = {name: get_local(tensor).detach() for name, tensor in tensors.items()}
    copied = saver.take(local, unchanging=unchanging)
    return {name: _wrap(copied[name], tensor) for name, tensor in tensors.items()}


def _wrap(local: Tensor, like: Tensor) -> Tensor:
    """Return a local shard as ``DTensor`` of the same placements as ``like``, if that is one."""
    # The constructor, because ``DTensor.from_local`` moves the shard to the device of the mesh.
    wrap: Any = partial(DTensor, requires_grad=False)
    return wrap(local, like._spec) if isinstance(like, DTensor) else local


def write_shards(folder: Path, tensors: Mapping[str, Tensor], group: Group = None) -> None:
    """Write tensors as safetensors shards; every process must call.

    Args:
        folder: Folder for these files only.
        tensors: Tensors by name; of a ``DTensor`` each process writes its shard.
        group: Process group of the writer threads; ``None``: the default group.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _distributed_options() as options:
        detached = {name: tensor.detach() for name, tensor in tensors.items()}
        save(detached, storage_writer=writer, process_group=group, **options)


def load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill ``tensors`` in place from safetensors files, whole or in shards of any world size; every process must call.

    Each process reads only its shards.
    """
    reader = HuggingFaceStorageReader(str(folder))
    with _distributed_options() as options:
        load({name: tensor.detach() for name, tensor in tensors.items()}, storage_reader=reader, **options)


def _read_described(folder: Path) -> dict[str, Any]:
    """Return unsharded size and dtype of each tensor from the file headers."""
    described: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return described


@contextmanager
def _distributed_options() -> Iterator[dict[str, bool]]:
    """Yield ``no_dist`` for torch's save and load functions, and silence their warning in a single process.

    Raises:
        RuntimeError: They failed on a process, which the message names with the reason.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield {"no_dist": not is_distributed()}
        except CheckpointException as error:  # It is no ``Exception``, and all ranks raise it.
            rank, (failure, _) = min(error.failures.items())
            raise RuntimeError(f"process {rank}: {type(failure).__name__}: {failure}") from error


def _list_files(folder: Path, rank: int | None) -> list[Path]:
    """Return the safetensors files of one rank; of all ranks for ``None``."""
    return sorted(file for file in folder.glob("*.safetensors") if rank in (None, find_writer(file.name)))


def _describe_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.item() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }


def _restore_group(now: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Merge saved values into a parameter group, with the types that JSON does not have.

    Lists become tuples (betas), and numbers become tensors where the optimizer has a tensor (the learning rate).
    """
    restored = {key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()}
    tensors = {key: torch.as_tensor(restored[key]).to(old) for key, old in now.items() if isinstance(old, Tensor)}
    return {**now, **restored, **tensors}


def _restore(
    optimizer: torch.optim.Optimizer,
    by_parameter: Mapping[Tensor, Mapping[str, Tensor]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Set the states of an optimizer's parameters, and the options of its parameter groups."""
    # ``load_state_dict`` identifies parameters by an index that counts through all groups.
    packed = optimizer.state_dict()["param_groups"]
    numbers = {
        parameter: number
        for group, described in zip(optimizer.param_groups, packed, strict=True)
        for parameter, number in zip(group["params"], described["params"], strict=True)
    }
    state = {numbers[one]: _narrow(optimizer, one, states) for one, states in by_parameter.items() if states}
    restored = [_restore_group(now, then) for now, then in zip(packed, groups, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": restored})
