"""Preference pairs: tokenisation, prepared sets, collation."""
