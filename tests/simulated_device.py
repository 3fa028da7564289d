"""Simulated accelerator: tensors of their own device, computed by CPU kernels, that cannot be mixed with CPU tensors.

It raises where a GPU does: for tensors of two devices in one operation, and for access by numpy. It does not simulate
kernels, speed or CUDA: ``torch.cuda`` stays unavailable.

``install`` lasts for the process; the environment variables ``SIMULATED`` select the device in accelerate and Trainer.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME: Final = "simulated"
SIMULATED: Final = {"ACCELERATE_TORCH_DEVICE": f"{NAME}:0"}
"""Environment variables that select the device."""
ATEN: Final = torch.ops.aten
# As on a GPU, these accept index tensors on the CPU; arithmetic accepts only CPU scalars.
INDEXED: Final = {ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_, ATEN._unsafe_index}
JOINING: Final = {ATEN.cat, ATEN.stack}
# torch implements these by resizing an empty tensor, and a wrapper tensor cannot be resized.
FACTORIES: Final = ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm")
_REGISTERED: list[torch.library.Library] = []
WAITING: Final = {
    ATEN._local_scalar_dense,
    ATEN.nonzero,
    ATEN.masked_select,
    ATEN.masked_scatter_backward,
    ATEN.unique_dim,
    ATEN._unique2,
    ATEN.equal,
}
"""Operations that synchronise the host with a GPU, besides copies to the host."""
FREE: Final = {
    *(ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.new_empty, ATEN.new_empty_strided),
    *(ATEN._unsafe_view, ATEN.lift_fresh, ATEN.set_, ATEN.is_same_size),
}
"""Operations without a kernel, besides views."""


@dataclasses.dataclass
class Work:
    """Counts of the work of the device.

    Attributes:
        kernels: Operations that launch at least one kernel on a GPU, by name.
        waits: Synchronisations of the host with the device, by source line.
        copies: Copies to the device from memory that is not pinned, by source line.
        is_counting: Whether work is counted.
    """

    kernels: Counter[str] = dataclasses.field(default_factory=Counter)
    waits: Counter[str] = dataclasses.field(default_factory=Counter)
    copies: Counter[str] = dataclasses.field(default_factory=Counter)
    is_counting: bool = True

    def add(self, func: Any, args: Sequence[Any]) -> None:
        """Count an operation that is not a copy."""
        if not self.is_counting:
            return
        packet = func.overloadpacket
        if not (_is_view(func) or packet in FREE):
            self.kernels[packet.__name__] += 1
        picks = _list_tensors(args[1:2]) if packet in INDEXED else []
        if packet in WAITING or any(pick.dtype == torch.bool for pick in picks):
            self.waits[_find_line()] += 1

    def add_copy(self, *, to_host: bool, is_awaited: bool) -> None:
        """Count a copy between host and device."""
        if self.is_counting and is_awaited:
            (self.waits if to_host else self.copies)[_find_line()] += 1


WORK: Final = Work()
"""Work of this process."""


@cache
def _is_view(func: Any) -> bool:
    """Return whether an operation returns a view of its argument."""
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


def _list_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments of an operation, of which some are lists, those of collectives of lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, list | tuple):
            found += _list_tensors(value)
        elif isinstance(value, Tensor):
            found.append(value)
    return found


def _apply(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to a value, or to the elements of nested lists; ``pytree`` took most of an operation's time."""
    if isinstance(value, list | tuple):
        return type(value)(_apply(function, item) for item in value)
    return function(value)


def _find_line() -> str:
    """Return the innermost source line outside torch and this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class SimulatedTensor(Tensor):
    """A tensor of the device; ``held`` is its data, a CPU tensor."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> SimulatedTensor:
        made: SimulatedTensor = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device(NAME, 0),
            requires_grad=held.requires_grad,
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"{NAME}({self.held!r})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return run(func, args, dict(kwargs or {}))

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy: copy it to the host first")

    __array__ = numpy

    def tolist(self) -> Any:
        WORK.add_copy(to_host=True, is_awaited=True)
        return self.held.detach().tolist()

    # Comparisons and serialisation use the memory of the CPU tensor.
    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def storage(self) -> Any:
        return self.held.storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.held.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedTensor:
        copy: Any = SimulatedTensor(self.held.detach().clone()).requires_grad_(self.requires_grad)
        copy._is_param = getattr(self, "_is_param", False)
        memo[id(self)] = copy
        return copy


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute an operation with at least one tensor of the device.

    Raises:
        RuntimeError: Another argument is on the CPU, and a GPU would reject it.
    """
    if func is ATEN._to_copy.default:
        return _copy(args[0], **kwargs)
    if func is ATEN.copy_.default:
        if not isinstance(args[0], SimulatedTensor) or not isinstance(args[1], SimulatedTensor):
            is_awaited = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            WORK.add_copy(to_host=not isinstance(args[0], SimulatedTensor), is_awaited=is_awaited)
        else:
            WORK.add(func, args)
        _hold(args[0]).copy_(_hold(args[1]))
        return args[0]
    if func is ATEN.record_stream.default:
        return None
    given = _list_tensors((*args, *kwargs.values()))
    placed = given
    if func.overloadpacket in INDEXED:
        placed = [value for value in (args[0], *args[2:3]) if isinstance(value, Tensor)]
    is_strict = func.overloadpacket in JOINING
    foreign = [value for value in placed if not isinstance(value, SimulatedTensor) and (value.dim() or is_strict)]
    if foreign:
        shapes = [tuple(value.shape) for value in foreign]
        raise RuntimeError(f"{func}: expected all tensors to be on {NAME}:0, and those of {shapes} are on the CPU")
    WORK.add(func, args)
    is_ours = True
    if kwargs.get("device") is not None:
        is_ours = torch.device(kwargs["device"]).type == NAME
        kwargs["device"] = torch.device("cpu")
    held = {name: _apply(_hold, value) for name, value in kwargs.items()}
    result = func(*(_apply(_hold, value) for value in args), **held)
    known = {id(value.held): value for value in given if isinstance(value, SimulatedTensor)}
    for value in known.values():
        assert value.size() == value.held.size(), f"{func} has resized what it was given"

    def present(value: Any) -> Any:
        if not isinstance(value, Tensor) or not is_ours:
            return value
        # An in-place operation returns its own argument.
        return known[id(value)] if id(value) in known else SimulatedTensor(value)

    return _apply(present, result)


def _hold(value: Any) -> Any:
    return value.held if isinstance(value, SimulatedTensor) else value


def _copy(value: Tensor, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
    copied: Tensor = ATEN._to_copy.default(_hold(value), **options)
    to_host = torch.device(device or value.device).type == "cpu"
    if to_host:
        WORK.add_copy(to_host=True, is_awaited=not non_blocking)
    else:
        WORK.add(ATEN._to_copy.default, (value,))
    return copied if to_host else SimulatedTensor(copied)


class Stream(torch.cpu.Stream):
    """A stream that executes synchronously."""

    def synchronize(self) -> None:
        """Return immediately."""


class DeviceModule:
    """The module ``torch.simulated``: that of ``torch.cpu``, with eight devices."""

    Stream = Stream

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 8

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def do_nothing(self, *_: Any) -> None:
        """Do nothing: for functions that have no meaning on this device."""

    set_device = manual_seed = manual_seed_all = set_rng_state = empty_cache = synchronize = do_nothing

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def pin_memory(tensor: Tensor, *_: Any) -> Tensor:
    """Return the tensor, after the copy that torch makes for a GPU: elements that share memory cannot be written.

    The tensor itself, because on a GPU a pinned one is not copied again, as FSDP2 relies on for offloaded weights.

    Source: ``_pin_memory`` of torch's ``aten/src/ATen/native/Memory.cpp``.
    """
    torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    return tensor


def install() -> None:
    """Register the device with torch in this process."""
    if _REGISTERED:
        return
    _setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule())
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Sequence[int], dtype: Any = None, *_: Any, **__: Any) -> Tensor:
        return SimulatedTensor(torch.empty(size, dtype=dtype, device="cpu"))

    def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: Any = None, *_: Any, **__: Any) -> Tensor:
        return SimulatedTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        to_host = not isinstance(target, SimulatedTensor)
        if to_host or not isinstance(source, SimulatedTensor):
            WORK.add_copy(to_host=to_host, is_awaited=not non_blocking)
        _hold(target).copy_(_hold(source))
        return target

    def build(operation: Any) -> Callable[..., Tensor]:
        return lambda *args, dtype=None, **_: SimulatedTensor(operation(*args, dtype=dtype, device=torch.device("cpu")))

    kernels = {"empty.memory_format": empty, "empty_strided": empty_strided, "_copy_from": copy_from}
    for name in FACTORIES:
        packet, _, overload = name.partition(".")
        kernels[name] = build(getattr(getattr(ATEN, packet), overload or "default"))
    for name, kernel in kernels.items():
        library.impl(name, kernel, "PrivateUse1")
    _REGISTERED.append(library)
    # ``Module.to`` must keep tied parameters tied.
    torch.__future__.set_swap_module_params_on_conversion(True)
    Tensor.pin_memory = pin_memory


COLLECTIVES: Final = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "send", "recv", "alltoall"),
    *("allgather", "allgather_coalesced", "reduce_scatter"),
    # Of torch 2.13.
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "reduce_scatter_single"),
    "reduce_scatter_single_coalesced",
    # Their former names.
    *("_allgather_base", "allgather_into_tensor_coalesced", "alltoall_base", "_reduce_scatter_base"),
    "reduce_scatter_tensor_coalesced",
)
"""Methods of ``ProcessGroup`` that send or receive tensors."""


def forbid_host_collectives() -> None:
    """Raise for CPU tensors in collectives of groups of the device, as NCCL does; objects may be sent as such."""
    from torch.distributed import ProcessGroup

    def guard(call: Callable[..., Any]) -> Callable[..., Any]:
        def verify(group: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            is_ours = any(device.type == NAME for device in group._device_types)
            if is_ours and not all(isinstance(tensor, SimulatedTensor) for tensor in tensors) and not _sends_objects():
                raise RuntimeError(f"{call.__name__}: expected tensors on {NAME}:0, and some are on the CPU")
            return call(group, *args, **kwargs)

        return verify

    for name in filter(partial(hasattr, ProcessGroup), COLLECTIVES):
        setattr(ProcessGroup, name, guard(getattr(ProcessGroup, name)))


def _sends_objects() -> bool:
    """Return whether the caller is a collective of objects, as ``all_gather_object`` and ``broadcast_object_list``."""
    names, frame = [], sys._getframe(2)
    while frame.f_back is not None and "/torch/distributed/" in frame.f_code.co_filename:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return any(name.endswith(("_object", "_object_list")) for name in names)


def is_chosen() -> bool:
    """Return whether the environment selects the device for this process."""
    return os.environ.get("ACCELERATE_TORCH_DEVICE") == SIMULATED["ACCELERATE_TORCH_DEVICE"]
