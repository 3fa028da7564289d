"""Simulated device: accepts and rejects the operations that a GPU does, with the results of the CPU."""

import operator

import pytest
import torch
from tests import simulated_device
from tests.forked import run_forked
from torch import distributed

from recipes_lib.training.layouts.context_rows import shard_batch

REJECTED = {
    "arithmetic": lambda ours, host: ours + host,
    "concatenation": lambda ours, host: torch.cat([ours, host]),
    "stack of scalars": lambda ours, host: torch.stack([ours[0], host[0]]),
    "index into a CPU tensor": lambda ours, host: host[(ours > 0).long()],
    "numpy": lambda ours, _: ours.numpy(),
    "in-place operation on a CPU tensor": lambda ours, host: host.add_(ours),
    "layer on the CPU": lambda ours, _: torch.nn.Linear(3, 2)(ours),
}
ACCEPTED = {
    "Python number": lambda ours, _: ours + 2,
    "CPU scalar": lambda ours, host: ours * host[0],
    "CPU index": lambda ours, host: ours[host.long()],
    "copy to the device": lambda ours, host: ours + host.to(ours.device),
    "copy to the CPU": lambda ours, host: ours.cpu() + host,
    "copy_ from the CPU": lambda ours, host: ours.clone().copy_(host),
    "layer on the device": lambda ours, _: torch.nn.Linear(3, 2).to(ours.device)(ours).sum() * 0 + ours,
}


def test_simulated_device_accepts_and_rejects_as_a_gpu() -> None:
    run_forked("tests.test_simulated_device", num_processes=None)


def main() -> None:
    """Run every case in this process, in which the device stays registered."""
    simulated_device.install()
    host = torch.tensor([1.0, 2.0, 0.0])
    ours = host.to(simulated_device.NAME)
    for name, compute in REJECTED.items():
        with pytest.raises((RuntimeError, TypeError), match=f"{simulated_device.NAME}:0"):
            raise AssertionError(f"{name} returned {compute(ours, host)}")
    for name, compute in ACCEPTED.items():
        assert torch.equal(compute(ours, host).cpu(), compute(host, host)), name

    # Collectives take tensors of the device and objects, but no CPU tensors.
    store = {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
    distributed.init_process_group(f"cpu:gloo,{simulated_device.NAME}:gloo", **store)
    simulated_device.forbid_host_collectives()
    distributed.all_reduce(ours)
    distributed.broadcast_object_list(["object"])
    distributed.all_reduce(host, group=distributed.new_group(backend="gloo"))
    with pytest.raises(RuntimeError, match=f"allreduce: expected tensors on {simulated_device.NAME}:0"):
        distributed.all_reduce(host)
    distributed.destroy_process_group()

    # Context parallelism slices a batch on the device as one on the CPU.
    rows = {name: torch.arange(8).view(1, 8) for name in ("input_ids", "position_ids", "labels")}
    rows["num_tokens"] = torch.tensor(8)
    moved = {name: tensor.to(simulated_device.NAME) for name, tensor in rows.items()}
    for rank in range(2):
        one, other = (shard_batch(batch, rank, 2, by_heads=False) for batch in (rows, moved))
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, msg=name)

    # Training matches the CPU, and tied parameters stay tied when the model is moved.
    learnt = []
    for device in ("cpu", simulated_device.NAME):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight = model[0].weight
        model.to(device)
        assert operator.is_(model[0].weight, model[1].weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model(host.to(device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        learnt.append([parameter.detach().cpu() for parameter in model.parameters()])
    for one, other in zip(*learnt, strict=True):
        torch.testing.assert_close(one, other)


if __name__ == "__main__":
    main()
