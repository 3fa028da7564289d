"""Leaving a model that any Hugging Face tool can open."""
