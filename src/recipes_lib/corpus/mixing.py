"""Weights of sources in tokens, with a cap on how often each is read."""

from __future__ import annotations

from collections.abc import Sequence

from recipes_lib.config.corpus import CorpusConfig


def compute_mixture(config: CorpusConfig, num_tokens: Sequence[int]) -> list[float]:
    """Return the share of the training tokens that comes from each source; they sum to 1.

    A source that would be read more than ``max_epochs`` times has just so many tokens, and the others share the rest by
    their weights. When all are at the cap, there are fewer tokens than ``mixture_tokens``, and shares are proportional.

    Source: UniMax, Chung et al. 2023, algorithm 1, is this with equal weights; ``tests/corpus/test_mixing.py``.

    Args:
        config: Its mixture keys, and the sources' ``weight``.
        num_tokens: Tokens, or bytes, of each source.
    """
    raw = _choose_weights(config, num_tokens)
    budget = float(config.mixture_tokens or sum(num_tokens))
    shares = [0.0] * len(raw)
    open_sources = [at for at, tokens in enumerate(num_tokens) if tokens > 0]
    left = budget
    while open_sources:
        total = sum(raw[at] for at in open_sources)
        capped = [at for at in open_sources if left * raw[at] / total > config.max_epochs * num_tokens[at]]
        for at in capped or open_sources:
            shares[at] = config.max_epochs * num_tokens[at] if capped else left * raw[at] / total
        left = budget - sum(shares)
        open_sources = [at for at in open_sources if at not in capped] if capped else []
    total = sum(shares)
    return [share / total for share in shares] if total else shares


def _choose_weights(config: CorpusConfig, num_tokens: Sequence[int]) -> list[float]:
    if config.mixture == "weights":
        return [float(entry["weight"]) for entry in config.sources]
    if config.mixture == "unimax":
        return [1.0] * len(num_tokens)
    exponent = 1 / config.mixture_temperature if config.mixture == "temperature" else 1.0
    return [tokens**exponent for tokens in num_tokens]
