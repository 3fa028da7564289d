"""Rows of any known layout, turned once into token ids with a loss mask, packed and stored."""
