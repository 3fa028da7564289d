"""Checks of a run behind ``recipes check``, recipe by recipe."""
