"""Benchmarks by lm-eval, and comparison of models on the same questions."""
