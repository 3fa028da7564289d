"""``recipes prove``: correctness, speed and memory of this machine, held against what is known."""
