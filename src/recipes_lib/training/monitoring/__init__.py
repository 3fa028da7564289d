"""Metrics, progress, throughput, experiment trackers."""
