"""Unbiased stochastic rounding to bfloat16, and AdamW on bfloat16 weights, compared with torch."""

import math

import pytest
import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR

from recipes_lib.training.optim.optimizers import StochasticAdamW, round_stochastically

DRAWS = 20_000


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("value", [1.001, -1.001, 3.14159, -2.5e-7, 6.1e8, 1 + 2**-9, -(1 + 2**-16)])
def test_mean_of_stochastic_rounding_equals_value(value):
    values = torch.full((DRAWS,), value, dtype=torch.float32)
    rounded = round_stochastically(values, generator())
    assert rounded.dtype == torch.bfloat16
    lower, upper = sorted(set(rounded.tolist()))
    assert lower < values[0].item() < upper
    assert torch.nextafter(torch.tensor(lower).bfloat16(), torch.tensor(math.inf).bfloat16()).item() == upper
    share = (values[0].double().item() - lower) / (upper - lower)
    standard_error = (upper - lower) * math.sqrt(share * (1 - share) / DRAWS)
    assert abs(rounded.double().mean().item() - values[0].double().item()) < 4 * standard_error


def test_representable_values_are_not_rounded():
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-126, -(2.0**127), math.inf, -math.inf]).repeat(100_000)
    assert torch.equal(round_stochastically(values, generator()).float(), values)


def make_weights(value=1.0, size=4096, dtype=torch.bfloat16):
    return torch.nn.Parameter(torch.full((size,), value, dtype=dtype))


def take_steps(weights, optimizer, num_steps, gradient=1.0):
    for _ in range(num_steps):
        weights.grad = torch.full_like(weights, gradient)
        optimizer.step()


def test_small_updates_accumulate_in_bfloat16():
    """400 updates of 1e-5 on weights of 1, where one ulp of bfloat16 is 390 updates: torch's AdamW rounds all away."""
    ours, theirs = make_weights(), make_weights()
    take_steps(theirs, torch.optim.AdamW([theirs], lr=1e-5, weight_decay=0.0), 400)
    assert torch.equal(theirs, make_weights())
    take_steps(ours, StochasticAdamW([ours], lr=1e-5), 400)
    # In each step, a weight decreases by 2 ** -8 with probability 1e-5 * 2 ** 8: a sum of Bernoulli variables.
    deviation = math.sqrt(400 * 1e-5 * 2**-8)
    assert 1 - ours.double().mean().item() == pytest.approx(400e-5, abs=4 * deviation / math.sqrt(ours.numel()))


def test_float32_weights_equal_torch_adamw():
    ours, theirs = (torch.nn.Parameter(torch.randn(6, 5, generator=generator())) for _ in range(2))
    keys = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    pair = [(ours, StochasticAdamW([ours], **keys)), (theirs, torch.optim.AdamW([theirs], **keys))]
    for weights, optimizer in pair:
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(5):
            weights.grad = torch.randn(6, 5, generator=generator(step))
            optimizer.step()
            scheduler.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_weight_decay_per_group():
    decaying, kept = make_weights(dtype=torch.float32), make_weights(dtype=torch.float32)
    optimizer = StochasticAdamW([{"params": [decaying], "weight_decay": 0.5}, {"params": [kept]}], lr=0.1)
    for weights in (decaying, kept):
        weights.grad = torch.zeros_like(weights)
    optimizer.step()
    assert decaying[0].item() == pytest.approx(0.95)
    assert kept[0].item() == 1


def test_replicas_stay_equal_under_different_global_seeds():
    replicas = [make_weights(), make_weights()]
    for number, weights in enumerate(replicas):
        torch.manual_seed(number)
        take_steps(weights, StochasticAdamW([weights], lr=1e-3), 3)
    assert torch.equal(*replicas)


def test_rounding_noise_differs_between_parameters_and_steps():
    parameters = [make_weights(), make_weights()]
    optimizer = StochasticAdamW(parameters, lr=1e-3)
    moves = []
    for _ in range(2):
        before = [weights.detach().clone() for weights in parameters]
        for weights in parameters:
            weights.grad = torch.ones_like(weights)
        optimizer.step()
        moves += [(old != new).tolist() for old, new in zip(before, parameters, strict=True)]
    assert all(first != second for i, first in enumerate(moves) for second in moves[:i])


def test_state_dict_resumes_bit_identically_with_float32_moments(tmp_path):
    whole, resumed = make_weights(), make_weights()
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(StochasticAdamW([whole], lr=1e-3))
    take_steps(whole, optimizer, 3, gradient=1 / 3)
    torch.save({"weights": whole, "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    take_steps(whole, optimizer, 3)
    resumed.data.copy_(saved["weights"])
    optimizer = accelerator.prepare(StochasticAdamW([resumed], lr=0.5))
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.state[resumed]["exp_avg_sq"].dtype == torch.float32
    take_steps(resumed, optimizer, 3)
    assert torch.equal(whole, resumed)


def test_closure_runs_with_gradients():
    weights, idle = make_weights(), make_weights()
    optimizer = StochasticAdamW([weights, idle], lr=0.1)

    def closure():
        loss = weights.float().square().mean()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 1
    assert not torch.equal(weights, make_weights())
    assert torch.equal(idle, make_weights())
