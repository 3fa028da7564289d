"""``recipes run``: check, plan and run a pipeline file."""
