"""Checkpoints: asynchronous saving, manifest, verification, sharded states, resume."""
