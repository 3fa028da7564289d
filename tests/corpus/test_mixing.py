"""Mixture weights: closed forms, and UniMax as its paper has it."""

import random
from dataclasses import replace

import pytest

from recipes_lib.config.corpus import CorpusConfig
from recipes_lib.corpus.mixing import compute_mixture

CONFIG = CorpusConfig(sources=[{"name": name, "weight": weight} for name, weight in zip("abc", (6, 3, 1), strict=True)])


def unimax(sizes, budget, cap):
    """Algorithm 1 of Chung et al. 2023."""
    left, shares = float(budget), {}
    order = sorted(range(len(sizes)), key=lambda at: sizes[at])
    for position, at in enumerate(order):
        shares[at] = min(left / (len(order) - position), sizes[at] * cap)
        left -= shares[at]
    total = sum(shares.values())
    return [shares[at] / total for at in range(len(sizes))]


def test_unimax_is_that_of_the_paper():
    random_ = random.Random(0)
    for _ in range(100):
        sizes = [random_.randrange(1, 10**6) for _ in range(3)]
        budget, cap = random_.randrange(1, 10**7), random_.choice((1, 2, 4))
        config = replace(CONFIG, mixture="unimax", mixture_tokens=budget, max_epochs=cap)
        assert compute_mixture(config, sizes) == pytest.approx(unimax(sizes, budget, cap))


def test_weights_are_kept_while_no_source_is_read_too_often():
    config = replace(CONFIG, mixture="weights", mixture_tokens=1000)
    assert compute_mixture(config, [1000, 1000, 1000]) == pytest.approx([0.6, 0.3, 0.1])


def test_what_a_capped_source_may_not_have_goes_to_the_others_by_their_weights():
    config = replace(CONFIG, mixture="weights", mixture_tokens=1000, max_epochs=2)
    assert compute_mixture(config, [100, 1000, 1000]) == pytest.approx([0.2, 0.6, 0.2])


def test_when_all_are_capped_shares_are_those_of_the_caps():
    config = replace(CONFIG, mixture="weights", mixture_tokens=10**9)
    assert compute_mixture(config, [100, 200, 100]) == pytest.approx([0.25, 0.5, 0.25])


def test_temperature_flattens():
    config = replace(CONFIG, mixture="temperature", mixture_temperature=2.0, mixture_tokens=1)
    assert compute_mixture(config, [900, 100, 0]) == pytest.approx([0.75, 0.25, 0])
    assert compute_mixture(replace(config, mixture="proportional"), [900, 100, 0]) == pytest.approx([0.9, 0.1, 0])


def test_no_source_is_read_more_often_than_the_cap():
    random_ = random.Random(1)
    for mixture in ("proportional", "weights", "temperature", "unimax"):
        for _ in range(50):
            sizes = [random_.randrange(1, 1000) for _ in range(3)]
            budget = random_.randrange(1, 4 * sum(sizes))
            config = replace(CONFIG, mixture=mixture, mixture_tokens=budget)
            shares = compute_mixture(config, sizes)
            assert sum(shares) == pytest.approx(1)
            assert all(share * budget <= 4 * size * (1 + 1e-9) for share, size in zip(shares, sizes, strict=True))
