"""Pipelines: stages in order of their needs, resumed, gated, repeated in rounds and swept over keys."""
