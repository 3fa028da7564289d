"""Strict configuration: one YAML file plus flags, every problem reported at once. Imports no torch."""
