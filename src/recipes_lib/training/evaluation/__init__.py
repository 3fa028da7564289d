"""Evaluation during training: held-out loss, samples, user metrics."""
