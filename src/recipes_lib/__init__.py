"""Recipes for training a language model from raw text to a published assistant."""

__version__ = "0.1.0"
