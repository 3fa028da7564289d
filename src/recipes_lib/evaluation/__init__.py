"""Benchmarks by lm-eval, comparison of models on the same questions, and judges of answers."""
