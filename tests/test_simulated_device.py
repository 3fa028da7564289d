"""The simulated device takes what a GPU takes, refuses what a GPU refuses, and computes what the CPU computes."""

import operator

import pytest
import torch
from tests import simulated_device
from tests.forked import run_forked

from recipes_lib.training.layouts.context_rows import shard_batch

REFUSED = {
    "arithmetic": lambda ours, host: ours + host,
    "a list of tensors": lambda ours, host: torch.cat([ours, host]),
    "scalars in a list": lambda ours, host: torch.stack([ours[0], host[0]]),
    "an index into the host's": lambda ours, host: host[(ours > 0).long()],
    "numpy": lambda ours, _: ours.numpy(),
    "in place": lambda ours, host: host.add_(ours),
    "a layer": lambda ours, _: torch.nn.Linear(3, 2)(ours),
}
TAKEN = {
    "a number": lambda ours, _: ours + 2,
    "a scalar of the host": lambda ours, host: ours * host[0],
    "an index of the host": lambda ours, host: ours[host.long()],
    "a copy there": lambda ours, host: ours + host.to(ours.device),
    "a copy back": lambda ours, host: ours.cpu() + host,
    "copied over": lambda ours, host: ours.clone().copy_(host),
    "a layer": lambda ours, _: torch.nn.Linear(3, 2).to(ours.device)(ours).sum() * 0 + ours,
}


def test_it_takes_and_refuses_what_a_gpu_does() -> None:
    run_forked("tests.test_simulated_device", num_processes=None)


def main() -> None:
    """Try every case in this process, which has the device from then on."""
    simulated_device.install()
    host = torch.tensor([1.0, 2.0, 0.0])
    ours = host.to(simulated_device.NAME)
    for name, compute in REFUSED.items():
        with pytest.raises((RuntimeError, TypeError), match=f"{simulated_device.NAME}:0"):
            raise AssertionError(f"{name} gave {compute(ours, host)}")
    for name, compute in TAKEN.items():
        assert torch.equal(compute(ours, host).cpu(), compute(host, host)), name

    # A batch that the loader has brought there is cut all the same.
    rows = {name: torch.arange(8).view(1, 8) for name in ("input_ids", "position_ids", "labels")}
    rows["num_tokens"] = torch.tensor(8)
    moved = {name: tensor.to(simulated_device.NAME) for name, tensor in rows.items()}
    for rank in range(2):
        one, other = (shard_batch(batch, rank, 2, by_heads=False) for batch in (rows, moved))
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, msg=name)

    # A layer learns as it does on the CPU, and what is tied stays so when it is moved.
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
