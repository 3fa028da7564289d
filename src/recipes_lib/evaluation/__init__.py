"""Benchmarks by lm-eval, comparison of models on the same questions, and the sandbox for code that models write."""
