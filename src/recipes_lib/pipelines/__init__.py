"""Pipelines of stages: dependencies, caching, resuming, gates on metrics, rounds and hyperparameter sweeps."""
