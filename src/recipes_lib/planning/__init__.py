"""What a run will do, computed before it starts: steps, tokens, FLOPs, disk."""
