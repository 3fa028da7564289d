"""Trainers, hooks, metrics and the life of a run."""
