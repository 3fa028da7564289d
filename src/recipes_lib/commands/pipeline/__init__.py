"""``recipes run``: what a pipeline will do, and doing it."""
