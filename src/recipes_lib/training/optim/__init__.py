"""Optimizers, parameter groups and activation checkpointing."""
