"""Stages of a pipeline as jobs of a cluster."""
