"""Rows of any supported layout, converted once to token ids with a loss mask, packed and stored."""
