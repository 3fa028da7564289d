"""Plan of a run before it starts: steps, tokens, FLOPs, memory, disk."""
